"""OOC_POLICY=mmcnn: layers of inference in the parts of mmCNN's Algorithm 1, with the bits of plain memory."""

from __future__ import annotations

from pathlib import Path

from splitting_runs import both

from swapd.splitting.segments import Layer, schedule_layers

# The activation takes twice 360 KiB of 512 KiB; the last layer's weights, 300 KiB, fit beside its input and result, but
# not beside a part of the activation.
SOURCE = """
    import torch.nn.functional as F
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.end = nn.Linear(800, 96)

        def forward(self, x):
            return self.end(F.max_pool2d(torch.tanh(x), 10).flatten(1))

    net = Net().eval()
    with torch.no_grad():
        for step in range(8):
            show(f"result {step}", net(torch.randn(1, 8, 106, 106)))
"""


def test_what_fits_runs_in_parts_of_which_one_comes_in_ahead(tmp_path: Path) -> None:
    (tmp_path / "auto").mkdir()
    asked = both(tmp_path, SOURCE, OOC_POLICY="mmcnn", OOC_PLANNING="blocking").figures
    ours = both(tmp_path / "auto", SOURCE, OOC_PLANNING="blocking").figures
    assert asked["policy"] == "mmcnn" and asked["planned_iteration_count"] > 0

    def parts(figures: dict, operator: str) -> set[int]:
        return {row["parts"] for row in figures["split_layers"] if row["operator"] == operator}

    room = asked["budget_bytes"] - 2 * asked["chunk_bytes"]  # of small variables; with 1 or 3 it is the same
    maps = 8 * 106 * 106 * 4
    activation, pooled = Layer("tanh", maps, maps), Layer("pool", maps, 8 * 100 * 4)
    end = Layer("linear", 8 * 100 * 4, 96 * 4, 96 * 800 * 4, heavy=True)
    steps = schedule_layers([activation, pooled, end], room)
    assert [step.self_number for step in steps] == [2, 1, 3]  # the last would fit whole
    assert parts(ours, "aten::addmm") == set()
    assert parts(asked, "aten::addmm") == {3}
    assert min(parts(asked, "aten::tanh")) >= 2


def test_training_runs_as_ever(tmp_path: Path) -> None:
    source = """
        from torch import nn
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 300))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            show(name, parameter)
    """
    figures = both(tmp_path, source, OOC_POLICY="mmcnn", OOC_PLANNING="blocking").figures
    assert figures["policy"] == "mmcnn" and figures["planned_iteration_count"] > 0
