"""Checks dashboards against Grafana's own types: `python -m grafana.typecheck.check FILE.json...`

TypeScript refuses properties that a type does not know only in literals, so each dashboard becomes a TypeScript file of
literals. One is the dashboard; others are each panel once more, with the options and field settings of its own kind,
which the type of a dashboard leaves open. Settings of single fields ("overrides") are checked as if they were the whole
panel's.

The check needs the packages of package-lock.json beside this file (`make monitoring-tools`) and Node.js.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from grafana.queries import panels

HERE = Path(__file__).resolve().parent
MODULES = HERE / "node_modules"

_CONFIG: dict[str, Any] = {
    "compilerOptions": {
        "strict": True,
        "noEmit": True,
        "module": "esnext",
        "moduleResolution": "bundler",
        "skipLibCheck": True,  # do not check the package's own files
        "types": [],
        "paths": {
            "@grafana/schema": [f"{MODULES}/@grafana/schema/dist/esm/index.d.ts"],
            "@grafana/schema/*": [f"{MODULES}/@grafana/schema/*.d.ts"],
            "schema": [f"{HERE}/schema.ts"],
        },
    },
    "include": ["*.ts"],
}


class TypesDiffer(Exception):
    """A dashboard that Grafana's types do not fit; the text is the compiler's."""


def nested(path: str, value: Any) -> dict[str, Any]:
    """An override's property as a field setting: ("custom.lineWidth", 2) is {"custom": {"lineWidth": 2}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


def typescript_of(dashboard: dict[str, Any]) -> str:
    """The TypeScript file of a dashboard's literals."""
    lines = ["import type { DashboardJson, Field, Options, PanelJson, Query } from 'schema';"]

    def declare(name: str, type_name: str, value: Any) -> None:
        lines.append(f"export const {name}: {type_name} = {json.dumps(value, indent=1)};")

    declare("dashboard", "DashboardJson", dashboard)
    for index, (panel, _) in enumerate(panels(dashboard)):
        kind = json.dumps(panel.get("type", ""))
        config = panel.get("fieldConfig", {})
        lines.append(f"// {panel['title']}".replace("\n", " "))
        declare(f"panel_{index}", "PanelJson", panel)
        declare(f"options_{index}", f"Options<{kind}>", panel.get("options", {}))
        declare(f"field_{index}", f"Field<{kind}>", config.get("defaults", {}))
        declare(f"queries_{index}", "Query[]", [_query(target) for target in panel.get("targets", [])])
        for number, override in enumerate(config.get("overrides", [])):
            for place, setting in enumerate(override["properties"]):
                name = f"override_{index}_{number}_{place}"
                declare(name, f"Field<{kind}>", nested(setting["id"], setting["value"]))
    return "\n".join(lines) + "\n"


def _query(target: dict[str, Any]) -> dict[str, Any]:
    """The fields of a query that the schema knows, and its expression. The Foundation SDK has the types of the rest."""
    return {name: target[name] for name in ("refId", "hide", "queryType", "datasource", "expr") if name in target}


def check(dashboards: dict[str, dict[str, Any]]) -> None:
    """Checks dashboards by name. Raises TypesDiffer; FileNotFoundError where the packages or Node.js are missing."""
    compiler = MODULES / "typescript" / "bin" / "tsc"
    if not compiler.exists():
        raise FileNotFoundError(f"{MODULES} is not there: run `make monitoring-tools`")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tsconfig.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        for name, dashboard in dashboards.items():
            (Path(folder) / f"{name}.ts").write_text(typescript_of(dashboard), encoding="utf-8")
        answer = subprocess.run(
            ["node", str(compiler), "--project", folder, "--pretty", "false"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    if answer.returncode != 0:
        raise TypesDiffer(answer.stdout + answer.stderr)


def main(paths: list[str]) -> int:
    """Checks the files; prints the compiler's words and returns 1 where one does not fit."""
    dashboards = {Path(path).stem: json.loads(Path(path).read_text(encoding="utf-8")) for path in paths}
    try:
        check(dashboards)
    except (TypesDiffer, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(dashboards)} dashboards fit @grafana/schema")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
