"""Run by test_hostile_files.py in a process of little memory: `python hostile_files.py NAME`.

Each function below throws damaged and hostile trace and plan files at the readers. What comes back is the error that is
documented or something that can be used; anything else (another exception, too much memory, a crash) ends the process.
"""

import io
import json
import os
import resource
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_traces import random_trace

from swapd.cli import main
from swapd.planning.plan import Plan, PlanError
from swapd.planning.problem import Problem
from swapd.policies import get, make_plan
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Trace
from swapd.trace.trace_file import ARRAYS, TraceError

MEMORY_BYTES = 3 << 29  # address space in all; the interpreter with NumPy takes about a third of it
TRACES = [random_trace(seed) for seed in (1, 3, 5)]
FILES = [trace.to_bytes() for trace in TRACES]
PLANS = [make_plan(Problem.from_trace(t, Problem.from_trace(t, 0).min_budget_bytes)).to_json() for t in TRACES]
FEW = settings(
    max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "400")),
    derandomize="HOSTILE_EXAMPLES" not in os.environ,  # the same files each time, unless asked for more of them
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def load(content: bytes) -> Trace | None:
    """The trace, or None where it is refused as it should be."""
    try:
        return Trace.from_bytes(content, "x.trace")
    except TraceError as error:
        message = str(error)
    assert message.startswith("x.trace: ") and len(message) < 600, message[:1000]
    return None


def refusal(content: bytes) -> str:
    """The error's words."""
    try:
        Trace.from_bytes(content, "x.trace")
    except TraceError as error:
        return str(error)
    return "it was accepted"


def use(trace: Trace) -> None:
    """Everything that is done with a trace works, or says why not."""
    trace.describe()
    for budget in (int(trace.live_bytes.max(initial=0)) // 2, 0):
        try:
            problem = Problem.from_trace(trace, budget)
            simulate(problem, get("idle")(problem, None))
            simulate(problem, Plan())
        except ValueError:
            pass  # it does not fit, or there are too many chunks


@st.composite
def mutations(draw: st.DrawFn, contents: list[bytes]) -> bytes:
    """A file with flips, cuts, repeats and insertions."""
    content = bytearray(draw(st.sampled_from(contents)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "number", "repeat"]))
        if kind == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 1 + len(content)))]
        elif kind == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=30))
        elif kind == "number":
            content[at : at + 8] = struct.pack("<q", draw(st.integers(-(1 << 63), (1 << 63) - 1)))
        else:
            content[at:at] = content[at : at + draw(st.integers(1, 200))]
    return bytes(content)


def traces_mutated() -> None:
    @FEW
    @given(mutations(FILES))
    def check(content: bytes) -> None:
        trace = load(content)
        if trace is not None:
            use(trace)

    check()


def traces_of_any_bytes() -> None:
    start = FILES[0][:30]

    @FEW
    @given(st.binary(max_size=2000), st.booleans(), st.booleans())
    def check(content: bytes, with_start: bool, with_end: bool) -> None:
        load((start if with_start else b"") + content + (FILES[0][-400:] if with_end else b""))

    check()


def npy(array: np.ndarray) -> bytes:
    member = io.BytesIO()
    np.save(member, array, allow_pickle=True)
    return member.getvalue()


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return target.getvalue()


def members(content: bytes = FILES[0]) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def header(**values: object) -> bytes:
    return json.dumps({**json.loads(members()["header.json"]), **values}).encode()


NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), 1 << 59]))
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def traces_with_other_contents() -> None:
    """Whole archives with right checksums: only the meaning is wrong."""

    @FEW
    @given(st.sampled_from(sorted(ARRAYS)), st.integers(0, 60), NUMBERS, st.integers(0, 2))
    def arrays(name: str, at: int, number: int, which: int) -> None:
        found = members(FILES[which])
        array = np.load(io.BytesIO(found[f"{name}.npy"])).copy()
        if len(array):
            value = np.array([number]).astype(array.dtype)[0] if array.dtype.kind in "iu" else float(number) ** 3
            array[at % len(array)] = value
        trace = load(archive({**found, f"{name}.npy": npy(array)}))
        if trace is not None:
            use(trace)

    @FEW
    @given(st.sampled_from(sorted(json.loads(members()["header.json"]))), JSON)
    def headers(key: str, value: object) -> None:
        trace = load(archive({**members(), "header.json": header(**{key: value})}))
        if trace is not None:
            use(trace)

    arrays()
    headers()


def claims(shape: str) -> bytes:
    """A .npy member whose header claims a shape."""
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)


def hostile_traces() -> None:
    """Each is refused, with words about what is wrong. None of them may take the memory that it asks for."""
    found, big = members(), 1 << 40
    zeros = bytes(300 << 20)
    deep = b"[" * 1_000_000
    many = {f"m{i}": b"" for i in range(2000)}
    ones = np.ones(TRACES[0].variables, np.int32)
    placed = {**found, "places.json": b'["train.py:7"]', "variable_place.npy": npy(0 * ones)}
    assert load(archive(placed)) is not None
    parted = {**found, "header.json": header(version=2, chunk_bytes=1 << 31)}
    parted |= {"part_of.npy": npy(np.arange(len(ones), dtype=np.int32)), "part_first_chunk.npy": npy(0 * ones)}
    assert load(archive(parted)) is not None
    cases = {
        "a bomb for a header": ({**found, "header.json": b" " * (80 << 20)}, "larger than"),
        "a bomb for an array": ({**found, "born.npy": npy(np.zeros(75 << 20, np.int32))}, "larger than"),
        "a bomb behind an array": ({**found, "born.npy": found["born.npy"] + zeros}, "larger than"),
        "huge counts": ({**found, "header.json": header(variables=big)}, "count of variables"),
        "the largest counts": ({**found, "header.json": header(uses=1 << 23)}, "do not match the arrays"),
        "negative counts": ({**found, "header.json": header(uses=-1)}, "count of uses"),
        "a count that is no number": ({**found, "header.json": header(functions="1" * 10_000)}, "count of functions"),
        "a huge shape": ({**found, "born.npy": claims(f"({big},)")}, "do not match"),
        "a negative shape": ({**found, "born.npy": claims("(-1,)")}, "do not match"),
        "a deep shape": ({**found, "born.npy": claims("(" * 3000 + ")" * 3000)}, "is damaged"),
        "no magic": ({**found, "born.npy": b"nothing"}, "is damaged"),
        "Python objects": ({**found, "born.npy": npy(np.array([{}], object))}, "Python objects"),
        "deep nesting": ({**found, "header.json": b'{"format": ' + deep}, "lists or objects"),
        "deep nesting in UTF-16": ({**found, "header.json": deep.decode().encode("utf-16")}, "damaged"),
        "many small lists": ({**found, "header.json": b"[" + b"[]," * (20 << 20) + b"[]]"}, "lists or objects"),
        "a long number": ({**found, "header.json": header()[:-1] + b', "x": ' + b"9" * 100_000 + b"}"}, "damaged"),
        "a huge float": ({**found, "header.json": header(dormant_bytes=float("inf"))}, "damaged header"),
        "a link of no speed": ({**found, "header.json": header(machine={"in_bytes_per_second": 10**400})}, "damaged"),
        "another version": ({**found, "header.json": header(version=3)}, "newer release"),
        "a version with parts, and none": ({**found, "header.json": header(version=2)}, "part_of.npy is missing"),
        "negative parts": ({**parted, "part_of.npy": npy(-ones)}, "must ascend"),
        "parts one upon the other": ({**parted, "part_of.npy": npy(0 * ones)}, "overlap"),
        "parts far away": ({**parted, "part_first_chunk.npy": npy(ones << 30)}, "any machine"),
        "parts of other variables": ({**parted, "part_of.npy": npy(ones[1:])}, "do not match the arrays"),
        "names of numbers": ({**found, "header.json": header(function_names=[1] * TRACES[0].functions)}, "is no text"),
        "huge sizes": ({**found, "variable_bytes.npy": npy(np.full(TRACES[0].variables, 1 << 59))}, "add up to more"),
        "long times": ({**found, "function_seconds.npy": npy(np.full(TRACES[0].functions, 1e300))}, "thirty years"),
        "a bomb of places": ({**placed, "places.json": b" " * (9 << 20)}, "places.json is larger than"),
        "places of places": ({**placed, "places.json": b'[["a"]]'}, "no list of texts"),
        "many small places": ({**placed, "places.json": b"[" + b"{}," * (2 << 20) + b"{}]"}, "no list of texts"),
        "a place of a number": ({**placed, "places.json": b"[1]"}, "no list of texts"),
        "places and no variables": ({**found, "places.json": b"[]"}, "variable_place.npy is missing"),
        "a place that is not there": ({**placed, "variable_place.npy": npy(ones)}, "none of the places"),
        "places of other variables": ({**placed, "variable_place.npy": npy(ones[1:])}, "do not match the arrays"),
        "places in 64 bits": ({**placed, "variable_place.npy": npy(ones.astype(np.int64))}, "not int32"),
        "many members": ({**many, **found}, "more than 64 members"),
    }  # fmt: skip
    for name, (content, message) in cases.items():
        words = refusal(archive(content))
        assert message in words and len(words) < 600, (name, words[:300])
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        assert "compressed in a way" in refusal(archive(found, compression))


def hostile_lengths() -> None:
    """The archive's own directory lies about sizes and places."""
    content = FILES[0]
    start = content.index(b"PK\x01\x02")
    lies = (0, 1, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF)
    for field in (20, 24, 42):  # compressed size, size, offset of the member
        for lie in lies:
            damaged = bytearray(content)
            damaged[start + field : start + field + 4] = struct.pack("<I", lie)
            trace = load(bytes(damaged))
            assert trace is None or trace == TRACES[0]
    end = content.rindex(b"PK\x05\x06")
    for field in (12, 16):  # size and offset of the directory
        for lie in lies:
            damaged = bytearray(content)
            damaged[end + field : end + field + 4] = struct.pack("<I", lie)
            trace = load(bytes(damaged))
            assert trace is None or trace == TRACES[0]


def huge_files() -> None:
    """Files that are larger than memory: refused without being read to their end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "huge"
        with path.open("wb") as file:
            file.truncate(1 << 40)
        for kind, error_kind in ((Trace, TraceError), (Plan, PlanError)):
            try:
                kind.load(path)
            except error_kind as error:
                message = str(error)
            assert "is the most" in message


def commands() -> None:
    """The commands end with a message for traces that are whole but ask for too much."""
    trace = TRACES[0]
    fields = {name: getattr(trace, name) for name in Trace.__dataclass_fields__}
    sizes = trace.variable_bytes.copy()
    sizes[0] = 1 << 59
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.trace"
        previous = np.full(len(sizes), -1)
        Trace(**{**fields, "variable_bytes": sizes, "chunk_bytes": 1, "previous": previous}).save(path)
        for command in ("plan", "simulate", "compare"):
            assert main([command, str(path), "--budget", "1GiB"]) == 1
        assert main(["report", str(path), "--budget", "1GiB", "-o", str(Path(folder) / "x.svg")]) == 1
        path.write_bytes(FILES[0][:-5])
        for command in ("plan", "simulate", "compare"):
            assert main([command, str(path), "--budget", "1GiB"]) == 1


def load_plan(text: str) -> Plan | None:
    try:
        return Plan.from_json(text, "x.plan")
    except PlanError as error:
        message = str(error)
    assert message.startswith("x.plan: ") and len(message) < 600, message[:1000]
    return None


def plans_mutated() -> None:
    fields = [json.loads(text) for text in PLANS]

    @FEW
    @given(mutations([text.encode() for text in PLANS]))
    def texts(content: bytes) -> None:
        plan = load_plan(content.decode("utf-8", "replace"))
        if plan is not None:
            plan.to_arrays()

    @FEW
    @given(st.sampled_from(sorted(fields[0])), JSON, st.integers(0, 2))
    def values(key: str, value: object, which: int) -> None:
        plan = load_plan(json.dumps({**fields[which], key: value}))
        if plan is not None:
            plan.to_arrays()

    texts()
    values()


def hostile_plans() -> None:
    whole = json.loads(PLANS[0])
    row = [1, 0, 1, 0]
    cases = {
        "deep nesting": ("[" * 1_000_000, "lists or objects"),
        "deep nesting of what looks like moves": ('{"outs": ' + "[1,1,1,1," * 200_000, "not a plan, or truncated"),
        "objects": ('{"format": "swapd-plan", "version": 1, "x": [' + "{}," * (8 << 20) + "{}]}", "lists or objects"),
        "small lists": ('{"outs": [' + "[]," * (8 << 20) + "[]]}", "lists or objects"),
        "a move of large numbers": (json.dumps({**whole, "outs": [[1 << 31, 0, 1, 0]]}), "32 bits"),
        "a move of long numbers": (json.dumps({**whole, "outs": [[10**4000, 0, 1, 0]]}), "damaged"),
        "a longer number": ('{"x": ' + "9" * 100_000 + "}", "not a plan"),
        "a move that is too short": (json.dumps({**whole, "outs": [row[:3]]}), "damaged"),
        "an infinite chunk": (json.dumps({**whole, "chunk_bytes": float("inf")}), "damaged"),
        "a negative chunk": (json.dumps({**whole, "chunk_bytes": -1}), "out of range"),
        "a negative capacity": (json.dumps({**whole, "capacity_chunks": -5}), "out of range"),
        "a long fingerprint": (json.dumps({**whole, "fingerprint": "f" * 100_000}), "out of range"),
        "too many characters": (" " * (40 << 20), "too large"),
        "another version": (json.dumps({**whole, "version": 7}), "version 7"),
    }
    for name, (text, message) in cases.items():
        words = "it was accepted"
        try:
            Plan.from_json(text, "x.plan")
        except PlanError as error:
            words = str(error)
        assert message in words and len(words) < 600, (name, words[:300])


CASES = (
    traces_mutated, traces_of_any_bytes, traces_with_other_contents, hostile_traces, hostile_lengths, huge_files,
    commands, plans_mutated, hostile_plans,
)  # fmt: skip

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    {case.__name__: case for case in CASES}[sys.argv[1]]()
    print("done")
