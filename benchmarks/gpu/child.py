"""One case in this process. `python -m benchmarks.gpu.child`, started ahead of time by `run.py`.

    the parent writes     {"kind": "step", "arm": "offload", "model": {...}, "budget_bytes": ..., ...}
    the child answers     {"ready": true}          when its context, its libraries and (some arms) its model are there
    the parent writes     {"go": true}             when the ballast holds the rest of the device's memory
    the child answers     {"outcome": "ok", ...}   and ends

One JSON object a line. What libraries print goes to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, TextIO

_OUT_OF_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "bad allocation")


def outcome_of(error: BaseException) -> str:
    """`out of memory`, which is a result, or `failed: ` and the error's last line."""
    text = f"{type(error).__name__}: {error}"
    if "OutOfMemory" in type(error).__name__ or any(words.lower() in text.lower() for words in _OUT_OF_MEMORY_WORDS):
        return "out of memory"
    if isinstance(error, NotImplementedError):
        return f"not available: {error}"
    return f"failed: {text.strip().splitlines()[0][:300]}"


def settle_kernels() -> None:
    """Results that do not depend on luck, and the precision that a user of this hardware would choose."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # writes that no training run makes
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def warm_libraries(device: Any) -> None:
    """Loads what libraries load at their first use, before the memory beside the budget is gone."""
    import torch

    images = torch.ones(2, 8, 16, 16, device=device, requires_grad=True)
    weights = torch.ones(8, 8, 3, 3, device=device, requires_grad=True)
    torch.nn.functional.conv2d(images, weights).sum().backward()
    square = torch.ones(64, 64, device=device)
    (square @ square).sum().item()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Channel:
    """Requests and answers, one JSON object a line; prints of anybody else do not get in between."""

    def __init__(self, source: TextIO, target: TextIO) -> None:
        self._source, self._target = source, target

    def receive(self) -> dict[str, Any]:
        """Raises EOFError when the parent is gone."""
        line = self._source.readline()
        if not line:
            raise EOFError("the parent is gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, message: dict[str, Any]) -> None:
        self._target.write(json.dumps(message) + "\n")
        self._target.flush()


def run_step(request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """A training case. Raises whatever the arm raises."""
    import torch

    from benchmarks.gpu.arms import make_arm
    from benchmarks.gpu.models import make_job
    from benchmarks.gpu.train import train

    settle_kernels()
    arm = make_arm(request)
    arm.start()
    device = torch.device(request["device"])
    warm_libraries(device)
    job = None
    if arm.early:
        job = make_job(request["model"], device)
        arm.adopt(job, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    channel.send({"ready": True})
    channel.receive()
    arm.limit(request["budget_bytes"], device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if job is None:
        job = make_job(request["model"], device)
        arm.adopt(job, device)
    result = train(
        job, arm, device, warm_up=request["warm_up"], steps=request["steps"], phases=request["arm"] == "in-core"
    )
    return result | arm.facts()


def run_allocation(request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Pairs of malloc and free through PyTorch's allocator interface, behind which is its own allocator or ours."""
    import torch

    from benchmarks.gpu.allocation import measure
    from benchmarks.gpu.arms import make_arm

    make_arm(request).start()
    torch.cuda.init()
    channel.send({"ready": True})
    channel.receive()
    return {"nanoseconds": measure()}


def run_probe(request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """What `swapd probe` measures; kept as this machine's profile too, which planning uses."""
    from swapd.devices.probe import measure, open_device
    from swapd.devices.profile import save_profile

    channel.send({"ready": True})
    channel.receive()
    device, _ = open_device(request.get("alloc", "cuda"))
    try:
        profile = measure(device)
    finally:
        device.close()
    save_profile(profile)
    return {"profile": json.loads(profile.to_json())}


def serve(source: TextIO, target: TextIO) -> None:
    """One case."""
    channel = Channel(source, target)
    try:
        import torch  # noqa: F401  # the slow part, while the case before still runs

        request = channel.receive()
    except EOFError:
        return
    os.environ.update(request.get("environment", {}))
    try:
        kinds = {"step": run_step, "allocation": run_allocation, "probe": run_probe}
        channel.send({"outcome": "ok", **kinds[request["kind"]](request, channel)})
    except EOFError:
        return
    except BaseException as error:
        traceback.print_exc()
        channel.send({"outcome": outcome_of(error), "error": f"{type(error).__name__}: {error}"[:2000]})


def main() -> None:
    target = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints, also those of native code
    serve(sys.stdin, target)
    target.flush()
    os._exit(0)  # an arm that ran out of memory may not be able to tidy up


if __name__ == "__main__":
    main()
