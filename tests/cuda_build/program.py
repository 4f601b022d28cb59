"""Runs a script with the kernels of computing.cpp: program.py computing.so script.py ARGUMENTS (stand_in.py)."""

from __future__ import annotations

import os
import runpy
import sys

import torch

sys.argv = sys.argv[1:]
torch.ops.load_library(sys.argv[0])
sys.argv = sys.argv[1:]
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
if os.environ.get("OOC_ALLOC", "cuda") != "0":
    import ooc.pytorch as ooc
    import swapd.session

    swapd.session._CUDA_GRANULARITY = 64 << 10  # a GPU has 2 MiB, which is coarse for programs of some 50
    ooc.enable(alloc="cuda")
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
