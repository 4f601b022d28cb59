"""A sample of the strict suite (tests/stress; all of it: make test-strict) that is quick enough for every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress import campaign

OPERATORS = """
    addmm as_strided cat cumsum fft.fft index_put linalg.solve masked_select native_layer_norm nn.functional.batch_norm
    nn.functional.conv2d nn.functional.embedding_bag nn.functional.scaled_dot_product_attention scatter_add sum unique
    view where
""".split()
MODULES = ("nn.Linear", "nn.Conv2d", "nn.BatchNorm2d", "nn.LSTM")
OTHERS = (
    "nested_strided quantized_per_channel mkldnn_layout sparse_training python_values numpy_both_ways packed_sequences"
)


@pytest.mark.parametrize("where", ["memory", pytest.param("disk", marks=pytest.mark.slow)])
@pytest.mark.medium
def test_a_sample_of_operators_and_modules(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk, a checksum of every page that is written is compared when the page is read."""
    if where == "disk":
        monkeypatch.setenv("STRESS_DISK", str(tmp_path))
    chosen = ["op|div|floor_rounding|float32", *(f"op|{name}||float32" for name in OPERATORS)]
    chosen += [f"module|{name}|train|float32" for name in MODULES]
    chosen += ["list|_foreach_addcdiv||float32", "optimizer|AdamW|fused|float32"]
    chosen += [f"layout|{name}||" for name in OTHERS.split()]
    report = campaign.run(chosen)
    assert not report.faults and not report.mismatches, report.failures()
    assert not report.undefined
    assert report.samples > 250
    assert sum(stats["swap_in_count"] for stats in report.stats) > 1000
    assert (sum(stats["disk_read_bytes"] for stats in report.stats) > 1 << 20) == (where == "disk")
