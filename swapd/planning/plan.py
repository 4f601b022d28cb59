"""Plan: which chunks leave the device after which function, and when they start to come back.

A plan is two ordered lists. An out may start when function `after_function` has ended; outs are copied strictly in
the order of the list, and their memory is free when the copy ends. A clean variable is dropped without a copy. An in
may start when `after_function` has ended (-1: as the iteration starts), the first `after_outs` outs of the list are
complete, and there is room; ins too are copied strictly in order. The two directions do not wait for each other.

A write-back is a copy to the host that leaves the chunks on the device, so that a later out drops them at once.
Write-backs are made in their own order while no out is due. A write-back is skipped if its variable was used again
before its turn. No move and no function waits for a write-back.

Variables are numbered as in the iteration that the plan serves. A move that is still under way, or still waiting,
when the iteration ends carries on in the next one; an in with ``before_function == n`` is for the next iteration.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swapd.files import write_whole
from swapd.trace.json_structure import check_format, parse

FORMAT = "swapd-plan"
VERSION = 2
LARGEST_FILE = 1 << 25  # bytes: about a million moves


class PlanError(ValueError):
    """A plan's file is damaged or of another version."""


class Out(NamedTuple):
    """A swap-out of `chunk_count` chunks of `variable`, from `first_chunk` on."""

    variable: int
    first_chunk: int
    chunk_count: int
    after_function: int


class In(NamedTuple):
    """A swap-in of `chunk_count` chunks of `variable`, needed by `before_function`."""

    variable: int
    first_chunk: int
    chunk_count: int
    after_function: int
    after_outs: int
    before_function: int


@dataclass(frozen=True)
class Plan:
    """The moves of one iteration, and how they were found."""

    outs: tuple[Out, ...] = ()
    ins: tuple[In, ...] = ()
    write_backs: tuple[Out, ...] = ()
    policy: str = "none"
    window_bytes: int | None = None
    fingerprint: int = 0  # of the sequence that it serves
    chunk_bytes: int = 0
    capacity_chunks: int = 0
    predicted_seconds: float | None = None  # one iteration in the steady state, as simulated
    bound_seconds: float | None = None  # what no schedule beats, see swapd.planning.lower_bound

    def __bool__(self) -> bool:
        return bool(self.outs or self.ins)

    def to_arrays(self) -> dict[str, NDArray[np.int32]]:
        """Contiguous int32 arrays, one per field of a move: ``out_variable`` to ``back_after_function``."""
        arrays: dict[str, NDArray[np.int32]] = {}
        for prefix, kind, moves in (("out", Out, self.outs), ("in", In, self.ins), ("back", Out, self.write_backs)):
            table = np.array(moves, dtype=np.int32).reshape(len(moves), len(kind._fields))
            for column, name in enumerate(kind._fields):
                arrays[f"{prefix}_{name}"] = np.ascontiguousarray(table[:, column])
        return arrays

    def to_json(self) -> str:
        """The plan as one JSON object."""
        fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, **vars(self)}
        fields["fingerprint"] = f"{self.fingerprint:016x}"
        fields["out_fields"], fields["in_fields"] = Out._fields, In._fields  # write-backs have the fields of outs
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str, name: str = "plan") -> Plan:
        """Read what `to_json` wrote. Errors call the text `name`.

        Raises:
            PlanError: the text is no plan, or a plan of another version.
        """
        if len(text) > LARGEST_FILE:
            raise PlanError(f"{name}: too large for a plan; {LARGEST_FILE} bytes is the most")
        try:  # each move is a list of numbers
            fields = parse(text, lists=8, objects=1, commas_per_list=len(Out._fields))
        except ValueError as error:
            raise PlanError(f"{name}: not a plan, or truncated ({error!s:.200})") from None
        try:
            check_format(fields, FORMAT, VERSION, VERSION)
        except ValueError as error:
            raise PlanError(f"{name}: {error}") from None
        try:
            plan = cls(
                outs=tuple(Out(*_integers(row)) for row in fields["outs"]),
                ins=tuple(In(*_integers(row)) for row in fields["ins"]),
                write_backs=tuple(Out(*_integers(row)) for row in fields["write_backs"]),
                policy=str(fields["policy"]),
                window_bytes=_optional(fields["window_bytes"], int),
                fingerprint=int(fields["fingerprint"], 16),
                chunk_bytes=int(fields["chunk_bytes"]),
                capacity_chunks=int(fields["capacity_chunks"]),
                predicted_seconds=_optional(fields["predicted_seconds"], float),
                bound_seconds=_optional(fields["bound_seconds"], float),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PlanError(f"{name}: damaged ({error!r:.200})") from None
        sizes = (plan.chunk_bytes, plan.capacity_chunks)
        if not 0 <= plan.fingerprint < 1 << 64 or not 0 <= min(sizes) <= max(sizes) < 1 << 60:
            raise PlanError(f"{name}: damaged (its fingerprint, chunk or capacity is out of range)")
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON, whole or not at all."""
        write_whole(path, (self.to_json() + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from `path`. Raises PlanError, or OSError when the file cannot be read."""
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
        try:
            return cls.from_json(content.decode("utf-8"), os.fspath(path))
        except UnicodeDecodeError as error:
            raise PlanError(f"{os.fspath(path)}: not a plan ({error})") from None


def _integers(row: list[Any]) -> list[int]:
    if not all(type(value) is int and -(1 << 31) <= value < 1 << 31 for value in row):
        raise ValueError("a move must be integers of 32 bits")
    return row


def _optional(value: Any, kind: Any) -> Any:
    return None if value is None else kind(value)
