"""Findings: what one check of `swapd doctor` says, and what all of them come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "no"]


@dataclass(frozen=True)
class Check:
    """One finding: ok, warn (something is missing or less than best), or no (what it is about cannot work)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, in the order in which a person would look."""

    checks: tuple[Check, ...]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    @property
    def usable(self) -> bool:
        """Whether programs can run out-of-core on at least one kind of device."""
        basics = all(self[name].status != "no" for name in ("system", "memfd", "native libraries", "settings"))
        return basics and any(self[name].status == "ok" for name in ("emulated device", "CUDA device"))
