import math

import pytest

from swapd.devices.roofline import DEVICES, EFFICIENCY, get_device


@pytest.mark.parametrize("name", DEVICES)
def test_each_device_is_complete_and_in_order(name):
    device = get_device(name)
    assert device.name == name
    assert 10 << 30 < device.memory_bytes < 200 << 30
    assert device.link.out_bytes_per_second < device.memory_bytes_per_second / 5
    assert {"float32", "float64"} <= set(device.flops)
    assert device.flops["float64"] <= device.flops["float32"] <= device.flops.get("tf32", math.inf)
    assert device.flops.get("tf32", 0.0) <= device.flops.get("float16", math.inf)
    for kind, share in EFFICIENCY.items():
        assert 0 < share < 1
        assert device.flops_per_second("float32", kind) < device.flops["float32"]


def test_arithmetic_that_a_device_has_no_unit_for_is_done_as_float32():
    old = get_device("titanx-pcie3")
    for arithmetic in ("tf32", "float16", "bfloat16"):
        assert old.flops_per_second(arithmetic, "matmul") == old.flops_per_second("float32", "matmul")
    assert get_device("v100-nvlink2").flops_per_second("float16", "matmul") == pytest.approx(0.6 * 125e12)
    assert get_device("a100-pcie4").flops_per_second("tf32", "attention") == pytest.approx(0.5 * 156e12)


def test_the_roofline_is_the_longer_side():
    device = get_device("a100-pcie4")
    assert device.seconds(0, 0) == device.launch_seconds
    compute = device.seconds(1e12, 0, "float32", "convolution") - device.launch_seconds
    assert compute == pytest.approx(1e12 / (0.7 * 19.5e12))
    memory = device.seconds(0, 1555e6) - device.launch_seconds
    assert memory == pytest.approx(1e-3 / 0.8)
    assert device.seconds(1e12, 1555e6, "float32", "convolution") == device.launch_seconds + max(compute, memory)


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match="no device 'p100'; there are v100-nvlink2, titanx-pcie3"):
        get_device("p100")
