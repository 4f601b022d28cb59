"""Makes the dashboards: `python -m grafana` writes `grafana/generated/`. It needs the extra `grafana`."""

from __future__ import annotations

from pathlib import Path

from grafana.dashboards import fleet, memory, overview, planner, transfers

GENERATED = Path(__file__).resolve().parent / "generated"
DASHBOARDS = {
    "overview.json": overview.DASHBOARD,
    "memory.json": memory.DASHBOARD,
    "transfers.json": transfers.DASHBOARD,
    "planner.json": planner.DASHBOARD,
    "fleet.json": fleet.DASHBOARD,
}


def main() -> None:
    """Writes the dashboards, and removes those that are no longer made."""
    for path in GENERATED.glob("*.json"):
        if path.name not in DASHBOARDS:
            path.unlink()
    for name, text in DASHBOARDS.items():
        (GENERATED / name).write_text(text, encoding="utf-8")
    print(f"{len(DASHBOARDS)} dashboards in {GENERATED}")


if __name__ == "__main__":
    main()
