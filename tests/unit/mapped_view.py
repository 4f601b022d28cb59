"""What the driver says is mapped, against what the core says, chunk by chunk over the core's whole address range.

The second opinion is not ours: the caller brings a function that asks the driver about one address.
"""

from __future__ import annotations

from collections.abc import Callable

from ooc_alloc import READ, WRITE, Core

CHUNKS = 8  # of the budget


def make_core(driver: str, chunk_bytes: int) -> Core:
    """A core that waits for every copy: one that does not leaves old mappings behind for a while."""
    return Core(
        driver,
        budget_bytes=CHUNKS * chunk_bytes,
        host_budget_bytes=64 * chunk_bytes,
        chunk_bytes=chunk_bytes,
        small_limit_bytes=chunk_bytes // 8,
        address_space_bytes=64 * chunk_bytes,
    )


def check(core: Core, chunk_bytes: int, is_mapped: Callable[[int], bool]) -> None:
    """Goes through the states of variables; at each, the driver and the core have to agree."""
    base, size = core.address_range()
    most = base + 64 * chunk_bytes + 32 * chunk_bytes  # all regions, and the first slabs
    assert most <= base + size

    def mapped(first: int, count: int) -> int:
        return sum(is_mapped(first + index * chunk_bytes) for index in range(count))

    def agree() -> None:
        stats = core.stats()
        said = int(stats["resident_bytes"] + stats["cached_bytes"] + stats["slab_bytes"])
        assert mapped(base, (most - base) // chunk_bytes) * chunk_bytes == said
        assert stats["device_bytes"] == said + stats["free_bytes"] <= CHUNKS * chunk_bytes

    def use(*variables: int, access: int = READ | WRITE) -> None:
        core.function_begin(core.function_id("use"), [(variable, access) for variable in variables])
        assert all(mapped(variable, 2) == 2 for variable in variables)
        agree()
        core.function_end()

    agree()
    variables = []
    for _ in range(6):
        core.function_begin(core.function_id("make"), ())
        variables.append(core.malloc(2 * chunk_bytes))
        core.function_end()
        agree()
    assert core.stats()["swap_out_bytes"] > 0
    small = core.malloc(100)
    assert mapped(small, 1) == 1
    for variable in variables:
        use(variable)
    use(variables[0], variables[1], access=READ)
    core.evict_all()
    use()
    core.evict_all()
    assert not any(mapped(variable, 2) for variable in variables)
    agree()
    token = core.pin(variables[3])
    core.evict_all()
    assert mapped(variables[3], 2) == 2
    agree()
    core.unpin(token)
    use(variables[2])
    core.free(variables[2])
    agree()  # freed and kept for the next of its size
    core.release_cached()
    assert mapped(variables[2], 2) == 0
    agree()
    for variable in variables:
        core.free(variable)
    core.free(small)
    core.release_cached()
    agree()
    assert core.stats()["device_bytes"] == 0
    core.audit()
