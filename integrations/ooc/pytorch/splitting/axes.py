"""The axes of operators from tables: which dimension of which argument, and of which result, an axis is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ooc.pytorch.splitting.parts import Axis, Named


def table(*rows: str, least: Mapping[str, Sequence[int]] | None = None) -> Callable[[Named], list[Axis]]:
    """Axes from rows such as "channels input:1 weight bias:0 -> 1 0", in the order in which they are cut.

    A row has the axis's name, arguments, each group of them with its dimension, and the dimension of each result ("-"
    for none). Arguments that are not given, or lack the dimension or elements in it, do not count. An axis is left out
    if those that count are of unlike sizes there, except for those with a star, which may be broadcast. `least` is by
    name, as in `Axis`.
    """
    parsed = []
    for row in rows:
        name, left, right = re.split(" (.*) -> ", row)
        groups = re.findall(r"([^:]+):(-?\d+)", left)
        takes = {argument: int(d) for group, d in groups for argument in group.split()}
        parsed.append((name, takes, {result: int(d) for result, d in enumerate(right.split()) if d != "-"}))

    def axes(named: Named) -> list[Axis]:
        found = []
        for name, takes, gives in parsed:
            given = {a: d for a, d in takes.items() if _has(named.get(a.rstrip("*")), d)}
            lengths = {named[a].shape[d] for a, d in given.items() if not a.endswith("*")}
            if len(lengths) == 1:
                cut = {a.rstrip("*"): d for a, d in given.items()}
                found.append(Axis(name, lengths.pop(), cut, gives, least=(least or {}).get(name, (1,))))
        return found

    return axes


def _has(value: object, dimension: int) -> bool:
    return isinstance(value, Tensor) and -value.dim() <= dimension < value.dim() and value.shape[dimension] > 0


def beside(named: Named, takes: str, own: int | Iterable[int], removed: bool = False, results: int = 2) -> list[Axis]:
    """An axis for each dimension of arguments of one shape but the operator's own, the outermost in memory first.

    `removed`: the results lack the operator's own dimensions.
    """
    given = [name for name in takes.split() if isinstance(named.get(name), Tensor)]
    first: Tensor = named[given[0]]
    owned = {d % max(first.dim(), 1) for d in ([own] if isinstance(own, int) else own)}
    found = []
    for d in sorted(set(range(first.dim())) - owned, key=lambda d: -first.stride()[d]):
        place = d - sum(one < d for one in owned) if removed else d
        gives = dict.fromkeys(range(results), place)
        found.append(Axis(f"dimension {d}", first.shape[d], dict.fromkeys(given, d), gives))
    return found
