"""Where a context keeps what it found out: for ever (`swapd.splitting.store`), or in this process."""

from __future__ import annotations

from typing import Protocol

from swapd.splitting.store import Key, Verdict


class Verdicts(Protocol):
    """What a context uses of `swapd.splitting.store.Store`."""

    def verdict(self, key: Key, how: str | None = None, parts: int | None = None) -> Verdict | None: ...
    def put_verdict(self, key: Key, verdict: Verdict) -> None: ...


class KeptHere:
    """Verdicts of this process alone."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Key, str | None, int | None], Verdict] = {}

    def verdict(self, key: Key, how: str | None = None, parts: int | None = None) -> Verdict | None:
        """The verdict on a division, or None if it is not known."""
        return self._kept.get((key, how, parts))

    def put_verdict(self, key: Key, verdict: Verdict) -> None:
        """Keeps a verdict."""
        self._kept[key, verdict.how, verdict.parts] = verdict
