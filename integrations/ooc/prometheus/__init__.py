"""Prometheus metrics of a running program; `catalogue.py` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapd.session import Session

last_session: Session | None = None  # that this process has turned on, by any integration; it may have ended
