"""Our declarations of the CUDA driver agree with the oldest cuda.h that we support, with PyTorch's and with the newest.

`make check-cuda-build` unpacks NVIDIA's packages of the oldest and the newest into folders of build/cuda_headers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ooc.pytorch import build
from tests.cuda_build.driver_abi import ABI, DRIVER, ROOT, Declarations, disagreements, version

UNPACKED = ROOT / "build" / "cuda_headers"
# What CUDA 11.7 does not have yet: whether it is there is asked before it is used.
NEWER = {
    "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID",
    "CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "CU_MEM_LOCATION_TYPE_HOST_NUMA",
    "cuStreamGetId",
}

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built for the CPU alone")


def unpacked() -> list[Path]:
    """The folders of the headers, the oldest first."""
    found = {path.parents[3].name: path.parent for path in UNPACKED.glob("*/nvidia/*/include/cuda.h")}
    assert len(found) > 1, f"two versions of cuda.h are not below {UNPACKED}: `make check-cuda-build` gets them"
    return [found[name] for name in sorted(found, key=lambda name: [int(part) for part in name.split(".")])]


@pytest.fixture(params=["oldest", "of PyTorch", "newest"])
def headers(request: pytest.FixtureRequest) -> Path:
    return {"oldest": unpacked()[0], "of PyTorch": build.cuda_folders()[0][0], "newest": unpacked()[-1]}[request.param]


def test_types_constants_and_functions_agree(headers: Path, tmp_path: Path) -> None:
    assert disagreements(headers, tmp_path) == []
    declared = Declarations()
    assert declared.missing(headers) == (NEWER if headers == unpacked()[0] else set())
    assert not NEWER & {symbol for need, _, symbol in declared.functions if need == "kRequired"}


def misnamed(declared: Declarations, headers: Path) -> list[str]:
    """Functions whose plain name stands for another version. In a later header it may be a later one than ours, as
    `disagreements` compares the type of that which we look up."""
    names = declared.exported(headers)
    oldest = headers == unpacked()[0]
    return [
        f"{member} is {names.get(member)}"
        for _, member, symbol in declared.functions
        if names.get(member) != symbol and (oldest or version(names.get(member, "")) <= version(symbol))
    ]


def test_the_names_looked_up_are_those_of_the_oldest_header_and_of_none_before(headers: Path) -> None:
    assert misnamed(Declarations(), headers) == []


def test_a_name_of_an_old_version_is_found() -> None:
    """Its type is the same, so that only the names tell."""
    planted = DRIVER.replace("cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease")
    assert misnamed(Declarations(driver=planted), unpacked()[0]) == [
        "cuDevicePrimaryCtxRelease is cuDevicePrimaryCtxRelease_v2"
    ]


PLANTED = {
    "an enumerator": (ABI, "PCI_DEVICE_ID = 34", "PCI_DEVICE_ID = 35", "CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID"),
    "a result": (ABI, "CUDA_ERROR_UNKNOWN, 999", "CUDA_ERROR_UNKNOWN, 998", "CUDA_ERROR_UNKNOWN"),
    "a macro": (ABI, "RegisterReadOnly = 8", "RegisterReadOnly = 16", "kMemHostRegisterReadOnly"),
    "members exchanged": (
        ABI, "compressionType;\n    unsigned char gpuDirectRDMACapable;",
        "gpuDirectRDMACapable;\n    unsigned char compressionType;", "CUmemAllocationProp.allocFlags.compressionType",
    ),
    "a size": (ABI, "CUdevice = int", "CUdevice = long", "CUdevice"),
    "a parameter": (DRIVER, "cuMemAddressFree, (CUdeviceptr address, size_t size)",
                    "cuMemAddressFree, (CUdeviceptr address, unsigned size)", "type of cuMemAddressFree"),
    "an old version": (DRIVER, "cuMemGetInfo_v2", "cuMemGetInfo", "type of cuMemGetInfo"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    text, right, wrong, found = PLANTED[mistake]
    assert text.count(right) == 1
    planted = text.replace(right, wrong)
    texts = {"abi": planted, "driver": DRIVER} if text is ABI else {"abi": ABI, "driver": planted}
    assert found in disagreements(unpacked()[-1], tmp_path, **texts)


@pytest.mark.parametrize(
    "line", ["constexpr int CU_IPC_HANDLE_SIZE = 64;", "union CUother { int a; };", "#endif\nextern int cuOther;"]
)
def test_no_declaration_goes_uncompared(line: str) -> None:
    text = ABI.replace("struct CUmemAccessDesc {", f"{line}\n\nstruct CUmemAccessDesc {{")
    with pytest.raises(AssertionError, match="compared with no cuda"):
        Declarations(text)
