"""What the CUDA driver says is mapped, asked through cuda-python, against what the core says. Needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from mapped_view import check, make_core

from swapd.devices.probe import CUDA_LIBRARY

CHUNK = 2 << 20

pytestmark = pytest.mark.gpu


def _driver() -> Any:
    """cuda-python's driver with a context, or a reason to skip."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    try:
        if int(driver.cuInit(0)[0]) != 0 or driver.cuDeviceGetCount()[1] == 0:
            pytest.skip("no CUDA device")
    except Exception as error:  # cuda.pathfinder finds no driver
        pytest.skip(f"no CUDA driver: {error}")
    return driver


def test_the_driver_and_the_core_agree_on_what_is_mapped() -> None:
    driver = _driver()
    core = make_core(CUDA_LIBRARY, CHUNK)
    success = driver.CUresult.CUDA_SUCCESS

    def is_mapped(address: int) -> bool:
        """By its physical handle; what it says of itself has to be a chunk of this device."""
        error, handle = driver.cuMemRetainAllocationHandle(address)
        if error != success:
            return False
        error, properties = driver.cuMemGetAllocationPropertiesFromHandle(handle)
        assert error == success
        assert properties.location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert properties.location.id == 0
        assert driver.cuMemRelease(handle)[0] == success
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
        error, mapped = driver.cuPointerGetAttribute(attribute, driver.CUdeviceptr(address))
        assert error == success and mapped
        error, base, size = driver.cuMemGetAddressRange(driver.CUdeviceptr(address))
        assert error == success
        assert int(base) <= address and address + CHUNK <= int(base) + size
        return True

    try:
        check(core, CHUNK, is_mapped)
    finally:
        core.close()
