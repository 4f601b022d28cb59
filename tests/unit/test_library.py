"""What Python reads of the C headers is what the compiler makes of them and what the library has."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc_alloc import Iteration, OocError, TraceArrays, device_memory, library_path
from ooc_alloc.library import declarations, ffi, load_library, numpy_type, open_library
from ooc_alloc.timeline import EVENT

PACKAGE = Path(__file__).resolve().parents[2] / "ooc_alloc"
HEADERS = {"csrc/ooc_alloc.h": "", "csrc/probe.h": "", "emulated/emulated_control.h": "libooc_emulated_cuda.so"}


@pytest.fixture(scope="module", params=HEADERS)
def header(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, declarations(request.param)


def structs_of(known: Any) -> list[str]:
    return [name for name in known.list_types()[0] if known.typeof(name).kind == "struct" and known.typeof(name).fields]


def test_layouts_are_those_of_the_compiler(header: tuple[str, Any], tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("g++") or pytest.skip("no C compiler")
    path, known = header
    assert structs_of(known)
    asked, expected = [], []
    for name in structs_of(known):
        struct = known.typeof(name)
        asked.append(f"sizeof({name})")
        expected.append(known.sizeof(struct))
        for member, field in struct.fields:
            asked += [f"offsetof({name}, {member})", f"sizeof((({name}*)0)->{member})"]
            expected += [field.offset, known.sizeof(field.type)]
    numbers = "".join(f'  printf("%zu\\n", (size_t){one});\n' for one in asked)
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{PACKAGE / path}"\nint main(void) {{\n{numbers}}}\n'
    )
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "layout")], check=True)
    found = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout.split()
    assert [int(one) for one in found] == expected


def test_the_library_has_every_function(header: tuple[str, Any]) -> None:
    path, known = header
    library = open_library(known, str(library_path(HEADERS[path] or "libooc_alloc.so")))
    assert any(callable(getattr(library, name)) for name in dir(library))


def test_the_core_fills_the_struct_that_python_reads() -> None:
    text = """
        from ooc_alloc import Core, library_path
        from ooc_alloc.library import ABI_VERSION, ffi, load_library
        core = Core(str(library_path("libooc_emulated_cuda.so")), host_budget_bytes=64 << 20, budget_bytes=32 << 20)
        stats = ffi.new("ooc_stats *")
        load_library().ooc_core_read_stats(core._core, stats)
        assert (stats.version, stats.struct_bytes) == (ABI_VERSION, ffi.sizeof("ooc_stats"))
        found = core.stats()
        assert found["budget_bytes"] == 32 << 20 and isinstance(found["budget_bytes"], int), found
        assert found["copy_in_seconds"] == 0.0 and isinstance(found["copy_in_seconds"], float), found
        assert not {"version", "struct_bytes"} & set(found)
        core.close()
        assert core.handle == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(text)], check=True)


def test_the_numpy_type_of_events_has_the_layout_of_the_struct() -> None:
    struct = ffi.typeof("ooc_event")
    offsets = {member: field.offset for member, field in struct.fields}
    assert EVENT.fields is not None
    assert {member: place[1] for member, place in EVENT.fields.items()}.items() <= offsets.items()
    assert EVENT.itemsize == ffi.sizeof(struct) == sum(place[0].itemsize for place in EVENT.fields.values())
    assert EVENT["start"] == np.float64 and EVENT["variable"] == np.int32 and EVENT["flags"] == np.uint16
    assert "free_bytes" in (EVENT.names or ()) and "address" not in (EVENT.names or ())


def test_numpy_types_of_numbers() -> None:
    known = {"int8_t": "i1", "uint16_t": "u2", "size_t": "u8", "ssize_t": "i8", "float": "f4", "double": "f8"}
    assert {name: numpy_type(ffi.typeof(name)).str[1:] for name in known} == known
    assert numpy_type(ffi.typeof("int32_t *")).itemsize == ffi.sizeof("int32_t *")


@pytest.mark.parametrize(("kind", "struct"), [(Iteration, "ooc_iteration"), (TraceArrays, "ooc_trace_arrays")])
def test_classes_for_users_name_the_members(kind: type, struct: str) -> None:
    assert [field.name for field in dataclasses.fields(kind)] == [name for name, _ in ffi.typeof(struct).fields]


def test_a_header_and_a_library_of_two_versions_are_refused(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("g++") or pytest.skip("no C compiler")
    source = tmp_path / "old.c"
    names = [name for name in dir(load_library()) if callable(getattr(load_library(), name))]
    source.write_text("".join(f"unsigned {name}(void) {{ return 4; }}\n" for name in names))
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libooc_alloc.so")], check=True)
    first, second = load_in_a_child(tmp_path, times=2).splitlines()  # as a notebook's cell that is run again
    assert first == second and "different versions: build them together" in first


def test_a_library_that_is_none_is_an_error_of_the_loader(tmp_path: Path) -> None:
    (tmp_path / "libooc_alloc.so").write_text("no library")
    answer = load_in_a_child(tmp_path)
    assert answer.startswith("OSError") and "libooc_alloc.so" in answer and "find_library" not in answer


def test_a_library_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    assert "`make native` in the checkout" in load_in_a_child(tmp_path)


def load_in_a_child(libraries: Path, times: int = 1) -> str:
    text = f"""
        from ooc_alloc.library import load_library
        for _ in range({times}):
            try:
                load_library()
            except Exception as error:
                print(type(error).__name__, error)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=os.environ | {"_OOC_LIBRARIES": str(libraries)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_an_address_is_a_number() -> None:
    assert ffi.typeof("ooc_operand").fields[0][1].type.cname == "uintptr_t"
    signature = ffi.typeof(load_library().ooc_malloc)
    assert [one.cname for one in (signature.result, *signature.args)] == ["uintptr_t", "ssize_t", "int", "uintptr_t"]


def test_what_the_emulated_device_refuses_is_told() -> None:
    text = """
        from ooc_alloc import Core, OocError, library_path, refused_settings
        driver = str(library_path("libooc_emulated_cuda.so"))
        try:
            Core(driver, host_budget_bytes=64 << 20)
        except OocError:
            print(refused_settings(driver))
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=os.environ | {"OOC_EMULATED_MEMORY": "much"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OOC_EMULATED_MEMORY" in answer.stdout


def test_a_driver_that_is_not_there_is_named() -> None:
    with pytest.raises(OocError, match="libnothing"):
        device_memory("/nowhere/libnothing.so")
