"""Classify images with AlexNet in plain PyTorch, and print a fingerprint of every bit of the results.

    python examples/alexnet.py                                            # weights of 217 MiB
    OOC_ALLOC=emulated OOC_BUDGET=5MB python examples/alexnet.py          # the same bits, in 5 MB

The network has the published shape and, as nothing is downloaded, random weights; the images are noise. It is seeded:
two runs with the same arguments on one machine print the same fingerprint. `--network` takes the other networks of
mmCNN (Li et al. 2019).
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import sys
import time

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.models.mmcnn import IMAGES, NETWORKS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify images with AlexNet.")
    parser.add_argument("--network", choices=list(NETWORKS), default="AlexNet", help="default %(default)s")
    parser.add_argument("--images", type=int, default=4, help="one after the other (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and images (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    size = IMAGES[arguments.network]
    model = NETWORKS[arguments.network]().eval()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    print(f"{arguments.network}, weights of {weights / 2**20:.0f} MiB", flush=True)
    digest = hashlib.sha256()
    with torch.no_grad():
        for image in range(arguments.images):
            began = time.perf_counter()
            scores = model(torch.randn(1, 3, size, size))
            digest.update(scores.numpy().tobytes())
            seconds = time.perf_counter() - began
            print(f"image {image + 1:3d}  class {int(scores.argmax())}  {seconds:.3f} s", flush=True)
    print(f"fingerprint {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
