"""Runs a program written for the CPU with CUDA as the default device: python on_cuda.py PROGRAM [ARGUMENTS]."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.set_default_device("cuda")
runpy.run_path(sys.argv[0], run_name="__main__")
