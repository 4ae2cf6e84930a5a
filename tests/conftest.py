"""Read before any test is: without a GPU, Triton's kernels are interpreted, which is decided when they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
