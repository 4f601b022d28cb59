"""The networks and the result tables of mmCNN (Li et al. 2019), to be computed again.

The tables' limits are 200, 100, 50, 10 and 5 MB, which are MiB. Layer 1 is the input.
"""

from __future__ import annotations

from swapd.splitting.segments import Layer

MIB = 1 << 20
LIMITS_MIB = (200, 100, 50, 10, 5)
FLOAT = 4


class Network:
    """Layers of a network for one image, each from the output of the one before."""

    def __init__(self, channels: int, size: int) -> None:
        self.channels, self.size = channels, size
        self.layers = [Layer("input", self.bytes, 0)]

    @property
    def bytes(self) -> int:
        return self.channels * self.size * self.size * FLOAT

    def heavy(self, channels: int, kernel: int, size: int, groups: int = 1) -> None:
        before, weights = self.bytes, channels * self.channels // groups * kernel * kernel * FLOAT
        self.channels, self.size = channels, size
        self.layers.append(Layer("conv", before, self.bytes, weights, heavy=True))

    def in_place(self) -> None:
        self.layers.append(Layer("relu", self.bytes, 0))

    def light(self, size: int) -> None:
        before, self.size = self.bytes, size
        self.layers.append(Layer("pool", before, self.bytes))


def vgg_d19() -> list[Layer]:
    """16 convolutions of 3 x 3 in five blocks, three fully connected layers."""
    net = Network(3, 224)
    for channels, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            net.heavy(channels, 3, net.size)
            net.in_place()
        net.light(net.size // 2)
    net.heavy(4096, 7, 1)
    net.in_place()
    net.heavy(4096, 1, 1)
    net.in_place()
    net.heavy(1000, 1, 1)
    return net.layers


def alexnet() -> list[Layer]:
    """The table's sizes are those of ten classes, and of convolutions 2, 4 and 5 in two groups."""
    net = Network(3, 227)
    net.heavy(96, 11, 55)
    for channels, kernel, size, groups in ((256, 5, 27, 2), (384, 3, 13, 1)):
        net.in_place()
        net.light(net.size)  # normalisation
        net.light(size)
        net.heavy(channels, kernel, size, groups)
    for channels in (384, 256):
        net.in_place()
        net.heavy(channels, 3, 13, 2)
    net.in_place()
    net.light(6)
    net.heavy(4096, 6, 1)
    net.in_place()
    net.heavy(4096, 1, 1)
    net.in_place()
    net.heavy(10, 1, 1)
    return net.layers


def rows(table: str) -> list[list[float]]:
    """The numbers of a table, without the layer's."""
    return [[float(word) for word in line.split()[1:]] for line in table.split("\n") if line]


# self_number and conv_number of VGG-D19 under each limit
TABLE_3 = """
1 1 1 1 1 1 1 1 1 1 1
2 1 0 1 0 1 0 2 0 3 0
3 1 1 1 1 1 1 2 1 3 1
4 1 0 1 0 1 0 3 0 5 0
5 1 1 1 1 1 1 2 1 3 1
6 1 0 1 0 1 0 2 0 4 0
7 1 0 1 0 1 0 1 0 2 0
8 1 1 1 1 1 1 1 1 2 1
9 1 0 1 0 1 0 2 0 3 0
10 1 1 1 1 1 1 1 1 2 3
11 1 0 1 0 1 0 1 0 2 0
12 1 0 1 0 1 0 1 0 3 0
13 1 1 1 1 1 1 1 1 1 2
14 1 0 1 0 1 0 1 0 2 0
15 1 1 1 1 1 1 1 1 1 2
16 1 0 1 0 1 0 1 0 2 0
17 1 1 1 1 1 1 1 1 1 2
18 1 0 1 0 1 0 1 0 2 0
19 1 1 1 1 1 1 1 1 1 4
20 1 0 1 0 1 0 1 0 1 0
21 1 0 1 0 1 0 1 0 4 0
22 1 1 1 1 1 1 1 2 1 5
23 1 0 1 0 1 0 2 0 5 0
24 1 1 1 1 1 1 1 2 1 5
25 1 0 1 0 1 0 2 0 5 0
26 1 1 1 1 1 1 1 2 1 5
27 1 0 1 0 1 0 2 0 5 0
28 1 1 1 1 1 1 1 2 1 3
29 1 0 1 0 1 0 1 0 1 0
30 1 0 1 0 1 0 2 0 3 0
31 1 1 1 1 1 1 1 1 1 3
32 1 0 1 0 1 0 1 0 3 0
33 1 1 1 1 1 1 1 1 1 3
34 1 0 1 0 1 0 1 0 3 0
35 1 1 1 1 1 1 1 1 1 3
36 1 0 1 0 1 0 1 0 3 0
37 1 2 1 4 1 0 1 0 1 0
38 1 0 1 0 1 0 1 0 1 0
39 2 0 4 0 8 0 40 0 81 0
40 1 1 1 1 1 2 1 0 1 0
41 1 0 1 0 2 0 7 0 13 0
42 1 1 1 1 1 1 1 2 1 4
43 1 0 1 0 1 0 2 0 4 0
"""

# MiB of each layer
TABLE_4_ALEXNET = """
1 0.72 0.72 0.72 0.72 0.72
2 1.70 1.70 1.70 1.70 1.70
3 2.28 2.28 2.28 2.28 2.28
4 2.22 2.22 2.22 2.22 2.22
5 1.37 1.37 1.37 1.37 1.37
6 0.98 0.98 0.98 0.98 0.98
7 4.09 4.09 4.09 4.09 4.09
8 1.42 1.42 1.42 1.42 1.42
9 0.88 0.88 0.88 0.88 0.88
10 0.41 0.41 0.41 0.41 0.41
11 2.78 2.78 2.78 2.78 2.78
12 0.50 0.50 0.50 0.50 0.50
13 1.94 1.94 1.94 1.94 1.94
14 0.41 0.41 0.41 0.41 0.41
15 144.18 72.17 48.17 0.17 0.17
16 0.20 0.20 0.20 0.20 0.20
17 0.05 0.05 0.05 9.65 4.85
18 64.03 64.03 32.02 0.02 0.02
19 0.03 0.03 0.03 9.18 4.96
20 0.16 0.16 0.16 0.16 0.16
21 0.02 0.02 0.02 0.02 0.02
"""

TABLE_6_VGG_D19 = """
1 0.58 0.58 0.58 0.58 0.58
2 12.82 12.82 12.82 6.41 4.27
3 12.26 12.26 12.26 6.13 4.09
4 24.50 24.50 24.50 8.17 4.90
5 12.53 12.53 12.53 6.41 4.37
6 15.31 15.31 15.31 7.66 3.83
7 9.19 9.19 9.19 9.19 4.59
8 6.69 6.69 6.69 6.69 3.63
9 12.25 12.25 12.25 6.13 4.08
10 7.25 7.25 7.25 7.25 3.44
11 7.66 7.66 7.66 7.66 3.83
12 4.59 4.59 4.59 4.59 4.59
13 5.31 5.31 5.31 5.31 4.19
14 6.13 6.13 6.13 6.13 3.06
15 5.31 5.31 5.31 5.31 4.19
16 6.13 6.13 6.13 6.13 3.06
17 5.31 5.31 5.31 5.31 4.19
18 6.13 6.13 6.13 6.13 3.06
19 7.56 7.56 7.56 7.56 4.19
20 3.83 3.83 3.83 3.83 3.83
21 2.30 2.30 2.30 2.30 2.30
22 10.53 10.53 10.53 6.03 3.33
23 3.06 3.06 3.06 3.06 3.06
24 10.53 10.53 10.53 6.03 3.33
25 3.06 3.06 3.06 3.06 3.06
26 10.53 10.53 10.53 6.03 3.33
27 3.06 3.06 3.06 3.06 3.06
28 10.53 10.53 10.53 6.03 4.53
29 1.91 1.91 1.91 1.91 1.91
30 0.77 0.77 0.77 0.77 0.77
31 9.38 9.38 9.38 9.38 3.38
32 0.77 0.77 0.77 0.77 0.77
33 9.38 9.38 9.38 9.38 3.38
34 0.77 0.77 0.77 0.77 0.77
35 9.38 9.38 9.38 9.38 3.38
36 0.77 0.77 0.77 0.77 0.77
37 196.39 98.39 0.38 0.38 0.38
38 0.48 0.48 0.48 0.48 0.48
39 0.11 0.11 49.11 9.91 4.95
40 64.03 64.03 32.02 0.02 0.02
41 0.03 0.03 0.03 9.18 4.96
42 15.64 15.64 15.64 7.83 3.92
43 0.02 0.02 0.02 0.02 0.02
"""
