"""A rank of a program with collectives: collectives.py RANK RANKS STORE KIND. Prints a digest of all that it got.

Each kind ends with functions that need all the room there is, between collectives and beside them.
"""

import hashlib
import itertools
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

rank, ranks, store, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

COUNT = 1 << 16  # floats: 256 KiB
own = [torch.full((COUNT,), float(rank * 100 + i)) for i in range(4 * ranks)]
digest = hashlib.sha256()


def parts(first: int = 0) -> list[Tensor]:
    return [own[first + i] for i in range(ranks)]


def between(tensors: list[Tensor]) -> None:
    """Every tensor a few times, two at a time."""
    for _ in range(3):
        for a, b in itertools.pairwise(tensors):
            a.mul_(0.5).add_(b, alpha=0.25)


def all_gather() -> list[Tensor]:
    made = [torch.empty(COUNT) for _ in range(ranks)]
    dist.all_gather(made, own[0])
    return made


def all_gather_into_tensor() -> list[Tensor]:
    made = torch.empty(COUNT * ranks)
    dist.all_gather_into_tensor(made, own[1])
    return [made]


def all_to_all() -> list[Tensor]:
    made = [torch.empty(COUNT) for _ in range(ranks)]
    dist.all_to_all(made, parts(2))
    return made


def reduce_scatter() -> list[Tensor]:
    made = torch.empty(COUNT)
    dist.reduce_scatter_tensor(made, torch.cat(parts(1)))
    return [made]


def coalesced() -> list[Tensor]:
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in parts():
            dist.all_reduce(tensor)
    manager.wait()
    return parts()


def gather() -> list[Tensor]:
    made = [torch.empty(COUNT) for _ in range(ranks)] if rank == 0 else None
    dist.gather(own[3], made)
    return made or []


def reduced() -> list[Tensor]:
    """More tensors than fit, one after the other: none may stay behind."""
    for tensor in own:
        dist.all_reduce(tensor)
    return own


def sent() -> list[Tensor]:
    for tensor in own:
        if rank % 2:
            dist.recv(tensor, rank - 1)
        elif rank + 1 < ranks:
            dist.send(tensor, rank + 1)
    return own


def in_functions() -> list[Tensor]:
    group = dist.distributed_c10d._get_default_group()
    made = [functional.wait_tensor(functional.all_reduce(tensor, "sum", group)) for tensor in own[2:]]
    time.sleep(0.3 * (rank == 1))  # the others' collectives go on meanwhile
    going_on = [functional.all_reduce(tensor, "sum", group) for tensor in own[:2]]
    between(own[2:])
    return [*made, *(result + 0 for result in going_on)]


def under_way() -> list[Tensor]:
    """Collectives go on while functions need the room that they take."""
    made = [torch.empty(COUNT) for _ in range(ranks)]
    time.sleep(0.3 * (rank == 1))
    works = [dist.all_gather(made, own[0], async_op=True), dist.all_reduce(own[1], async_op=True)]
    between(own[2:])
    for work in works:
        work.wait()
    return made


def data_parallel() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        parallel(own[0].view(-1, 256) + rank).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


KINDS: dict[str, Callable[[], list[Tensor]]] = {
    function.__name__: function
    for function in (
        *(all_gather, all_gather_into_tensor, all_to_all, reduce_scatter, coalesced, gather, reduced, sent),
        *(in_functions, under_way, data_parallel),
    )
}

if __name__ == "__main__":
    for _ in range(2):
        between(own)
        for made in KINDS[kind]():
            digest.update(made.detach().numpy().tobytes())
    between(own)
    for tensor in own:
        digest.update(tensor.numpy().tobytes())
    print(digest.hexdigest())
    dist.barrier()
    dist.destroy_process_group()
