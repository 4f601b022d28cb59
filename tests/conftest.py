"""What all tests share: no setting of the caller's environment reaches them, nor does one of theirs remain."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

# Tests run beside each other: a thread that waits for PyTorch's others gives its core away. PyTorch reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts what it puts into the background with SIGINT ignored, `nohup` with SIGHUP ignored, and child processes
# inherit that; tests of how programs end need what a terminal gives. A handler that Python installed stays.
for _ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, signal.default_int_handler if _ignored == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OOC_") and not name.startswith("OOC_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("OOC_PLANNING", "blocking")  # which iteration is the first under a plan is the same every time


def pytorchs_settings() -> dict[str, object]:
    """Those that decide what PyTorch computes, or what Inductor makes of a graph, in this process; by name."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def no_settings_of_pytorchs_remain() -> Iterator[None]:
    """A test that leaves one behind changes those that come after it in the same process: it fails itself instead."""
    before = pytorchs_settings()
    yield
    after = pytorchs_settings()
    assert {name: value for name, value in after.items() if before and value != before[name]} == {}


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported and collected is no garbage, and looking for some in it takes long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The minutes of random programs begin first, or one worker would be left with them at the end.

    Tests marked ``gpu`` need a driver; without one they are skipped, by name, in the summary.
    """
    items.sort(key=lambda item: "test_random_programs" not in item.nodeid)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    from ooc_alloc import OocError
    from swapd.devices.probe import open_device

    try:
        device, _ = open_device("cuda")
        device.close()
    except OocError as error:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {error}"))
