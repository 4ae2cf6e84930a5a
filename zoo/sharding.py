"""What FSDP wraps; the only file that knows of ranks."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from zoo.errors import UserError
from zoo.model import HybridLM


def shard(model: HybridLM, mesh: DeviceMesh) -> None:
    """Shard ``model`` over ``mesh`` with FSDP2: every block on its own, then the rest; in place.

    ``hidden`` and ``nll`` gather the parameters just as ``forward`` does.

    Raises:
        UserError: weights of two types, as bf16-true makes them where mixers keep their rates in fp32.
    """
    types = {parameter.dtype for parameter in model.parameters()}
    if len(types) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
        raise UserError(f"weights of two types, {names}, cannot be sharded; take trainer.precision bf16-mixed")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("hidden", "nll"):
        register_fsdp_forward_method(model, method)
