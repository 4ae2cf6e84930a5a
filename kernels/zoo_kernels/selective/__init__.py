"""Mamba's selective scan: a decay of its own for every channel and every number of its state."""

from zoo_kernels.selective.op import selective_scan
from zoo_kernels.selective.step import selective_step

__all__ = ["selective_scan", "selective_step"]
