import io
import json
import zipfile

import numpy as np
import pytest
from planning_traces import Builder, random_trace

from swapd.trace.trace import Machine, Trace
from swapd.trace.trace_file import TraceError


def small() -> Trace:
    b = Builder()
    weight = b.entry(1000)
    (x,) = b.call("make", [weight], [500], seconds=0.25)
    (y,) = b.call("use", [x], [700], seconds=0.5)
    b.free(x)
    b.call("update", [y], writes=[weight], seconds=0.125)
    b.free(y)
    return b.trace(chunk_bytes=64, machine=Machine(1.5e9, 2.5e9, 1e-5))


def changed(**values: object) -> Trace:
    trace = small()
    fields = {name: getattr(trace, name) for name in Trace.__dataclass_fields__}
    return Trace(**{**fields, **values})


def rewritten(member: str, content: bytes | None) -> bytes:
    """The small trace's file with one member replaced, or left out."""
    source, target = zipfile.ZipFile(io.BytesIO(small().to_bytes())), io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            if name != member:
                archive.writestr(name, source.read(name))
            elif content is not None:
                archive.writestr(name, content)
    return target.getvalue()


def header(**values: object) -> bytes:
    with zipfile.ZipFile(io.BytesIO(small().to_bytes())) as archive:
        return json.dumps({**json.loads(archive.read("header.json")), **values}).encode()


@pytest.mark.parametrize("seed", range(20))
def test_round_trip_is_exact(seed, tmp_path):
    trace = random_trace(seed)
    path = tmp_path / "a.trace"
    trace.save(path)
    loaded = Trace.load(path)
    assert loaded == trace
    assert loaded.machine == trace.machine
    assert loaded.describe() == trace.describe()
    assert loaded.to_bytes() == path.read_bytes() == trace.to_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_equality_sees_every_field():
    trace = small()
    assert trace == small()
    assert trace != changed(fingerprint=7)
    assert trace != changed(machine=None)
    assert trace != changed(dormant_bytes=1)
    assert trace != changed(slab_chunks_peak=1)
    assert trace != changed(use_flags=np.where(trace.use_flags == 1, 3, trace.use_flags))


def test_live_bytes():
    assert small().live_bytes.tolist() == [1500, 2200, 1700]


def test_empty_trace_round_trips():
    trace = Builder().trace()
    assert Trace.from_bytes(trace.to_bytes()) == trace
    assert trace.functions == trace.variables == 0


def test_a_truncated_file_is_an_error():
    content = small().to_bytes()
    for length in range(0, len(content), 7):
        with pytest.raises(TraceError, match=r"x\.trace"):
            Trace.from_bytes(content[:length], "x.trace")


def test_a_damaged_file_is_an_error_or_has_lost_nothing():
    content, trace, errors = small().to_bytes(), small(), 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        try:
            assert Trace.from_bytes(bytes(damaged)) == trace, position
        except TraceError:
            errors += 1
    assert errors > len(content) // 2


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("header.json", None, "header.json is missing"),
        ("died.npy", None, "died.npy is missing"),
        ("header.json", b"{", "header.json is damaged"),
        ("header.json", b"[]", "not a swapd-trace file"),
        ("header.json", header(format="other"), "not a swapd-trace file"),
        ("header.json", header(version=3), "newer release"),
        ("header.json", header(version=2), "part_of.npy is missing"),
        ("header.json", header(version="1"), "version '1'"),
        ("header.json", header(functions=4), "counts"),
        ("header.json", header(fingerprint="xyz"), "damaged header"),
        ("header.json", header(machine={"speed": 1}), "damaged header"),
        ("header.json", header(machine={"out_bytes_per_second": -1}), "damaged header"),
        ("header.json", header(map_seconds=-1), "damaged header"),
        ("header.json", header(unmap_seconds="long"), "damaged header"),
        ("born.npy", b"\x93NUMPY\x01\x00", "born.npy is damaged"),
    ],
)
def test_errors_say_what_is_wrong(member, content, message):
    with pytest.raises(TraceError, match=message):
        Trace.from_bytes(rewritten(member, content))


def test_pickled_arrays_are_refused():
    member = io.BytesIO()
    np.save(member, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(TraceError, match=r"born\.npy is damaged"):
        Trace.from_bytes(rewritten("born.npy", member.getvalue()))


def test_wrong_types_are_refused():
    member = io.BytesIO()
    np.save(member, np.zeros(3, np.float64))
    with pytest.raises(TraceError, match="float64"):
        Trace.from_bytes(rewritten("born.npy", member.getvalue()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"born": [-1, 0]}, "born has 2 entries"),
        ({"born": [-2, 0, 1]}, "born and died"),
        ({"born": [-1, 2, 1]}, "born and died"),
        ({"died": [4, 1, 2]}, "born and died"),
        ({"died": [3, 0, 2]}, "function 1 uses variable 1"),
        ({"born": [-1, 1, 1]}, "function 0 uses variable 1"),
        ({"previous": [1, -1, -1]}, "previous must lead"),
        ({"previous": [3, -1, -1]}, "previous is no variable"),
        ({"previous": [0, 0, -1]}, "previous must lead"),
        ({"use_variables": [0, 1, 1, 2, 2, 9]}, "does not exist"),
        ({"use_flags": [1, 2, 1, 2, 1, 0]}, "neither a read nor a write"),
        ({"use_offsets": [0, 3, 2, 6]}, "use_offsets"),
        ({"use_offsets": [0, 2, 4, 5]}, "use_offsets"),
        ({"function_seconds": [0.1, -0.1, 0.1]}, "negative time"),
        ({"function_start": [0.1, float("nan"), 0.1]}, "finite"),
        ({"variable_bytes": [1, -1, 1]}, "size is negative"),
        ({"fingerprint": 1 << 64}, "64 bits"),
        ({"function_names": ("a", "b")}, "entries where"),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(TraceError, match=message):
        changed(**values)


def test_two_variables_cannot_have_one_past():
    b = Builder()
    b.entry(10)
    b.entry(10)
    b.call("f", [0, 1])
    b.previous[1] = 0
    with pytest.raises(TraceError, match="two variables"):
        b.trace()


def test_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        small().born[0] = 5


def test_describe_names_everything():
    text = small().describe()
    assert text.startswith("trace 0000000000005eed: 3 functions, 3 variables, live peak 2200 bytes")
    assert "f2 update 0.125000000s live=1700 uses: 2r 0w" in text
    assert "v0 1000 bytes born=-1 died=3 previous=0" in text


def test_costs_of_memory_calls_are_beside_the_machine_where_older_releases_do_not_look():
    costly = changed(machine=Machine(1.5e9, 2.5e9, 1e-5, 2e-6, 3e-6))
    assert Trace.from_bytes(costly.to_bytes()) == costly != small()
    machine = {"out_bytes_per_second": 1.5e9, "in_bytes_per_second": 2.5e9, "latency_seconds": 1e-5}
    for trace, costs in ((costly, {"map_seconds": 2e-6, "unmap_seconds": 3e-6}), (small(), {})):
        with zipfile.ZipFile(io.BytesIO(trace.to_bytes())) as archive:
            found = json.loads(archive.read("header.json"))
        assert found["machine"] == machine
        assert {name: found[name] for name in found if name.endswith("map_seconds")} == costs


def test_places_are_kept_and_shown():
    trace = changed(places=("train.py:7 in main", "<b>"), variable_place=[-1, 0, 1])
    again = Trace.from_bytes(trace.to_bytes())
    assert again == trace != small()
    assert [again.place(v) for v in range(3)] == ["", "train.py:7 in main", "<b>"]
    assert "v1 500 bytes born=0 died=1 at train.py:7 in main" in again.describe()
    assert small().place(1) == ""


def test_a_file_without_places_is_as_before():
    names = zipfile.ZipFile(io.BytesIO(small().to_bytes())).namelist()
    assert "places.json" not in names
    assert "variable_place.npy" not in names


def test_more_places_than_a_file_may_have_are_left_out():
    trace = changed(places=("x" * (9 << 20),), variable_place=[0, 0, 0])
    assert Trace.from_bytes(trace.to_bytes()) == small()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"places": ("a",)}, "no variable_place"),
        ({"places": ("a",), "variable_place": [0]}, "3 are needed"),
        ({"places": ("a",), "variable_place": [0, 1, 0]}, "none of the places"),
        ({"places": ("a",), "variable_place": [0, -2, 0]}, "none of the places"),
    ],
)
def test_wrong_places_are_refused(values, message):
    with pytest.raises(TraceError, match=message):
        changed(**values)
