"""What FSDP wraps; the only file that knows of ranks."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from zoo.model import HybridLM


def shard(model: HybridLM, mesh: DeviceMesh) -> None:
    """Shard ``model`` over ``mesh`` with FSDP2: every block on its own, then the rest; in place.

    ``hidden`` and ``nll`` gather the parameters just as ``forward`` does.
    """
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("hidden", "nll"):
        register_fsdp_forward_method(model, method)
