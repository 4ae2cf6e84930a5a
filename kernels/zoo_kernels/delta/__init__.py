"""The delta-rule family: one op, :func:`delta_rule`, for every memory that decays, erases and adds."""

from zoo_kernels.delta.op import delta_rule
from zoo_kernels.delta.step import delta_step

__all__ = ["delta_rule", "delta_step"]
