"""Random programs as Hypothesis draws them: statements and settings, with what plain PyTorch made of each statement."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field

from hypothesis import strategies as st

from tests.fuzz import statements
from tests.fuzz.execution import OUT_OF_MEMORY, Step, Way, execute, last_look, namespace, settings_kept

# Budgets in chunks: from what holds the operands of little more than one operator up to what holds most programs.
_CHUNK_KIB, _BUDGET_CHUNKS = [16, 4, 64], [64, 128, 32, 256]
_SETTINGS = {
    "OOC_SMALL_LIMIT": ["1", "1KiB", "4KiB", "16KiB"],
    "OOC_SPLIT": ["exact", "off", "exact"],
    "OOC_STRICT": ["0", "0", "1"],
    "OOC_POLICY": ["auto", "window", "idle", "demand"],
    "OOC_HOST_BUDGET": ["256MiB", "256MiB", "12MiB"],
}
ALWAYS = {"OOC_ALLOC": "emulated", "OOC_EMULATED_GRANULARITY": "4KiB", "OOC_EMULATED_MEMORY": "64MiB"}
ALWAYS |= {"OOC_PLANNING": "blocking"}  # a seed is the same run every time


@dataclass
class Program:
    """Statements, how to run them, and what plain memory gave: a step for each, and one for the last look."""

    settings: dict[str, str]
    way: Way
    statements: list[str]
    plain: list[Step] = field(default_factory=list)

    def script(self) -> str:
        """The program as a file that runs by itself, from the root of a checkout."""
        settings = {**ALWAYS, **self.settings}
        lines = ["# OOC_ALLOC=0 in front of the command runs it in plain memory.", "import os", ""]
        lines += [f"os.environ.setdefault({name!r}, {value!r})" for name, value in settings.items()]
        lines += ["", "from tests.fuzz.execution import Way, execute, last_look, namespace", ""]
        lines += [f"way = {self.way!r}", "space = namespace(way)", "for statement in ("]
        lines += [f"    {statement!r}," for statement in self.statements]
        lines += ["):", "    print(statement, execute(statement, space, way), flush=True)"]
        lines += ["print(last_look(space))", ""]
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({"settings": self.settings, "way": asdict(self.way), "statements": self.statements})

    @staticmethod
    def from_json(text: str) -> Program:
        read = json.loads(text)
        return Program(read["settings"], Way(**read["way"]), read["statements"])

    def run_plain(self) -> list[Step]:
        """What plain memory gives, in this process."""
        with settings_kept():
            space = namespace(self.way)
            return [*(execute(statement, space, self.way) for statement in self.statements), last_look(space)]


@st.composite
def programs(draw: st.DrawFn, most: int = 30) -> Program:
    """A program of at most so many statements, run in plain memory while it is drawn."""
    settings = {name: draw(st.sampled_from(values)) for name, values in _SETTINGS.items()}
    chunk = draw(st.sampled_from(_CHUNK_KIB))
    settings["OOC_CHUNK_SIZE"] = f"{chunk}KiB"
    settings["OOC_BUDGET"] = f"{chunk * draw(st.sampled_from(_BUDGET_CHUNKS))}KiB"
    way = Way(
        seed=draw(st.integers(0, 3)),
        threads=draw(st.sampled_from([1, 1, 2])),
        deterministic=draw(st.sampled_from([False, False, True])),
        look_at_all=draw(st.booleans()),
    )
    program = Program(settings, way, [])
    names = statements.Names(draw)
    names.space = namespace(way)
    for _ in range(draw(st.integers(8, most))):
        statement = statements.statement(names)
        program.statements.append(statement)
        program.plain.append(execute(statement, names.space, way))
    program.plain.append(last_look(names.space))
    names.space.clear()
    return program


def _kind(error: str) -> str:
    """The type of an error: what a message says of shapes may be of a part."""
    return error.partition(":")[0]


def difference(program: Program, found: list[Step], plain_steps: list[Step] | None = None) -> str:
    """The first step that is not as in plain memory; empty if there is none. Out of memory is told, not wrong.

    What a variable was before an error is what a step last saw of it. Other plain steps than the program's own may have
    seen more: every change by way of another variable, too.
    """
    before: dict[str, str] = {}
    for number, (seen, plain, step) in enumerate(zip(program.plain, plain_steps or program.plain, found)):
        at = f"step {number}, {program.statements[number] if number < len(program.statements) else '(at the end)'}"
        if step.error.startswith(OUT_OF_MEMORY) and step.error != plain.error:
            for name, digest in step.digests.items():
                if name in before and before[name] != digest:
                    return f"{at}: {step.error}\n  {name} changed: {digest}, plain {before[name]}"
            return "" if re.search("OOC_BUDGET|OOC_HOST_BUDGET|OOC_SPLIT", step.error) else f"{at}: {step.error}"
        if _kind(step.error) != _kind(plain.error):
            return f"{at}: {step.error or 'no error'}, plain {plain.error or 'no error'}"
        before |= plain.digests
        for name in seen.digests:
            if step.digests.get(name) != plain.digests.get(name):
                return f"{at}: {name} is {step.digests.get(name)}, plain {plain.digests.get(name)}"
    return ""
