"""Devices: what a roofline model has to know of a GPU and of its link to the host.

A function's time is the larger of its arithmetic at the device's rate and its bytes at the memory's, plus a launch
(Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore architectures", CACM
2009). Peak rates are those of the vendors' public data sheets, named beside each device: dense, without sparsity, a
multiplication and an addition counted as two. Programs do not reach them; see `EFFICIENCY`.

Such times are estimates. Nothing here was measured on any of these devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swapd.trace.trace import Machine

GB = 10**9
GIB = 1 << 30
TERA = 1e12

# The share of the peak that functions reach, by class. These are round figures of ours, such as vendors' libraries are
# reported to reach on large operands. A small operand reaches less, which only the launch time accounts for here.
EFFICIENCY: Mapping[str, float] = MappingProxyType(
    {
        "convolution": 0.70,  # implicit matrix products; borders and strides cost some
        "matmul": 0.80,  # large matrix products run at 0.8 to 0.95 of the peak
        "attention": 0.50,  # two products with a softmax between them that uses other units
        "tensor": 0.60,  # any of these on tensor cores, which the memory cannot feed as well
        "memory": 0.80,  # streaming: refresh, turns between reads and writes, and the tail of each launch
    }
)


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU in a machine. Rates are per second, the link's are for each way."""

    name: str  # as on the command line
    title: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops: Mapping[str, float]  # peak by arithmetic (float64, float32, tf32, float16, bfloat16); others run as float32
    link: Machine  # what copies reach, not the link's nominal speed
    launch_seconds: float = 5e-6  # of one function: what an eager framework needs to get a small kernel going

    def flops_per_second(self, arithmetic: str, kind: str) -> float:
        """The rate that functions of a class (a key of `EFFICIENCY`) reach in an arithmetic, else in float32."""
        peak = self.flops.get(arithmetic, self.flops["float32"])
        on_tensor_cores = arithmetic in ("tf32", "float16", "bfloat16") and peak > self.flops["float32"]
        return peak * min(EFFICIENCY[kind], EFFICIENCY["tensor"] if on_tensor_cores else 1.0)

    def seconds(self, flops: float, touched_bytes: float, arithmetic: str = "float32", kind: str = "matmul") -> float:
        """The roofline: a launch and the longer of arithmetic and memory traffic."""
        compute = flops / self.flops_per_second(arithmetic, kind)
        return self.launch_seconds + max(compute, touched_bytes / (self.memory_bytes_per_second * EFFICIENCY["memory"]))


def _rates(**tera: float) -> Mapping[str, float]:
    return MappingProxyType({name: value * TERA for name, value in tera.items()})


def _link(gigabytes: float, latency_seconds: float) -> Machine:
    return Machine(gigabytes * GB, gigabytes * GB, latency_seconds)


_LATENCY = 10e-6  # of one asynchronous copy from or to pinned memory, the order of magnitude on all of these

_DEVICES = (
    # "NVIDIA Tesla V100 GPU accelerator" data sheet, SXM2: 15.7 and 125 (tensor) teraflops, 900 GB/s, 16 GB. IBM Power
    # System AC922 (POWER9) has two or three NVLink 2 bricks of 25 GB/s each way for each GPU: 50 or 75 GB/s. The seed
    # paper has two NVLinks in section 5. Copies are taken at 50 GB/s, the lower of the two.
    Device(
        "v100-nvlink2",
        "NVIDIA V100 16 GB, NVLink 2 to a POWER9 host",
        16 * GIB,
        900 * GB,
        _rates(float64=7.8, float32=15.7, float16=125.0),
        _link(50, _LATENCY),
    ),
    # GeForce GTX Titan X (Maxwell): vDNN, section IV-B, has 7 teraflops, 336 GB/s and 12 GB; section II-C has 12.8 GB/s
    # for copies over PCIe 3 with 16 lanes (16 GB/s nominal).
    Device(
        "titanx-pcie3",
        "NVIDIA Titan X (Maxwell) 12 GB, PCIe 3",
        12 * GIB,
        336 * GB,
        _rates(float64=0.2, float32=7.0),
        _link(12.8, _LATENCY),
    ),
    # "NVIDIA A100 tensor core GPU" data sheet, PCIe 40 GB: 19.5, 156 (TF32), 312 teraflops, 1,555 GB/s; PCIe 4 with 16
    # lanes is 31.5 GB/s each way after encoding, of which copies reach about 80%.
    Device(
        "a100-pcie4",
        "NVIDIA A100 40 GB, PCIe 4",
        40 * GIB,
        1555 * GB,
        _rates(float64=19.5, float32=19.5, tf32=156.0, float16=312.0, bfloat16=312.0),
        _link(25, _LATENCY),
    ),
    # "NVIDIA H100 tensor core GPU" data sheet, SXM: 67 teraflops, 3.35 TB/s, 80 GB. Its tensor rates are with sparsity,
    # 989 and 1,979; dense operands reach half. PCIe 5 with 16 lanes is 63 GB/s each way after encoding, copies are
    # taken at 80% of it.
    Device(
        "h100-pcie5",
        "NVIDIA H100 SXM 80 GB, PCIe 5",
        80 * GIB,
        3350 * GB,
        _rates(float64=67.0, float32=67.0, tf32=494.5, float16=989.5, bfloat16=989.5),
        _link(50, _LATENCY),
    ),
    # "NVIDIA H200 tensor core GPU" data sheet, SXM: arithmetic as the H100, 4.8 TB/s, 141 GB; the same link.
    Device(
        "h200-pcie5",
        "NVIDIA H200 SXM 141 GB, PCIe 5",
        141 * GB,
        4800 * GB,
        _rates(float64=67.0, float32=67.0, tf32=494.5, float16=989.5, bfloat16=989.5),
        _link(50, _LATENCY),
    ),
    # "NVIDIA GH200 Grace Hopper superchip" data sheet: arithmetic as the H100, 96 GB HBM3 at 4 TB/s, NVLink-C2C 900
    # GB/s both ways together, 450 each way. The host's LPDDR5X has up to 512 GB/s for both ways and the processor
    # together, so copies are taken at 300 each way, which is a guess.
    Device(
        "gh200-c2c",
        "NVIDIA GH200 96 GB, NVLink-C2C",
        96 * GIB,
        4000 * GB,
        _rates(float64=67.0, float32=67.0, tf32=494.5, float16=989.5, bfloat16=989.5),
        _link(300, _LATENCY),
    ),
)

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})


def get_device(name: str) -> Device:
    """The device of that name. Raises ValueError, with the names that there are."""
    try:
        return DEVICES[name]
    except KeyError:
        raise ValueError(f"no device {name!r}; there are {', '.join(DEVICES)}") from None
