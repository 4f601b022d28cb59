"""Device, host memory and disk: the copies between the first two are the functions of a problem one level below."""

from __future__ import annotations

from typing import Any


def store(counters: dict[str, Any]) -> str:
    """Where copies from the device go, by the counters of a summary or of a core: "host" or "disk"."""
    return "disk" if counters.get("disk_budget_bytes") and not counters.get("host_budget_bytes") else "host"
