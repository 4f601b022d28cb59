"""Makes the dashboards: `python -m grafana` writes `grafana/generated/`, `python -m grafana --check` compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

GENERATED = Path(__file__).resolve().parent / "generated"


def made() -> dict[str, str]:
    """The JSON of every dashboard, by file name."""
    from grafana.dashboards import fleet, memory, overview, planner, transfers

    return {f"{it.__name__.rsplit('.', 1)[-1]}.json": it.make() for it in (overview, memory, transfers, planner, fleet)}


def differing(folder: Path) -> list[str]:
    """Names of the files in `folder` that are not what would be made: changed, missing, or left over."""
    new = made()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in new.keys() | there.keys() if new.get(name) != there.get(name))


def main() -> int:
    """Writes the dashboards, or compares them and returns 1 if one differs."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana", description="Make the Grafana dashboards from the catalogue."
    )
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    parser.add_argument("--folder", type=Path, default=GENERATED, help="where the JSON files are (default %(default)s)")
    arguments = parser.parse_args()
    try:
        import grafana_foundation_sdk  # noqa: F401
    except ImportError:
        parser.error("needs the extra `grafana` and Python 3.11; the JSON files in grafana/generated need neither")
    if arguments.check:
        stale = differing(arguments.folder)
        print(f"not up to date: {', '.join(stale)}; run `make dashboards`" if stale else "up to date")
        return 1 if stale else 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in differing(arguments.folder):
        if name not in made():
            (arguments.folder / name).unlink()
    for name, text in made().items():
        (arguments.folder / name).write_text(text, encoding="utf-8")
    print(f"{len(made())} dashboards in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
