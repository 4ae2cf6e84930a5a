"""What FSDP wraps, gathers, clips and saves; the only file that knows of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zoo.checkpoint import by_place, part_of, publish, read_checkpoint, read_facts, unsaved
from zoo.errors import UserError
from zoo.model import HybridLM
from zoo_layers.block import Block
from zoo_layers.mixer import TokenMixer

LOW = (torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------------------------------------- wrapping
def shard(model: HybridLM, mesh: DeviceMesh, *, compute: torch.dtype | None = None, reshard: bool = True) -> None:
    """Shard ``model`` over ``mesh`` with FSDP2: every block on its own, then the rest; in place.

    ``hidden`` and ``nll`` gather the parameters just as ``forward`` does. A tied head and its embedding are one
    parameter of the last group. Gradients are summed over ranks in fp32.

    Args:
        mesh: of one dimension: every parameter is divided among all ranks. Of two, replicas x shards: among the ranks
            of a replica (HSDP).
        compute: the type that the weights of linear layers are gathered in; what is stored, and all else, keeps its
            type. None: nothing is cast. Decay parameters are never cast.
        reshard: free a block's weights between its forward and its backward pass.

    Raises:
        UserError: a block that mixes types in one module, outside the ``FLOAT32`` of its mixer.
    """
    for block in model.each_block():
        _shard_block(block, mesh, compute, reshard)
    fully_shard(model, mesh=mesh, mp_policy=_policy(model.parameters()))
    for method in ("hidden", "nll", "answered"):
        register_fsdp_forward_method(model, method)


def _shard_block(block: Block, mesh: DeviceMesh, compute: torch.dtype | None, reshard: bool) -> None:
    """One group a block, and a second, of fp32, where it holds parameters that are gathered in another type."""
    exact = set(_exact(block))
    low: list[nn.Module] = []
    if compute is not None:
        low = [m for m in block.modules() if isinstance(m, nn.Linear) and not exact.intersection(m.parameters())]
    elif len({parameter.dtype for parameter in block.parameters()}) > 1:
        low = list(_without(block, exact))
    grouped = {parameter for module in low for parameter in module.parameters()}
    rest = [parameter for parameter in block.parameters() if parameter not in grouped]
    types = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in rest})
    if len(types) > 1:
        raise UserError(
            f"{type(block.mixer).__name__} holds parameters of {' and '.join(types)} side by side, which FSDP cannot "
            "gather together: name those that stay fp32 in its FLOAT32, and put the others into modules of their own"
        )
    if low:
        fully_shard(low, mesh=mesh, mp_policy=_policy(grouped, compute), reshard_after_forward=reshard)
    fully_shard(block, mesh=mesh, mp_policy=_policy(rest), reshard_after_forward=reshard)


def _exact(block: Block) -> Iterator[nn.Parameter]:
    """The parameters that mixers keep in fp32."""
    for module in block.modules():
        if isinstance(module, TokenMixer):
            named = dict(module.named_parameters(recurse=False))
            yield from (named[name] for name in module.FLOAT32 if name in named)


def _without(module: nn.Module, exact: set[nn.Parameter]) -> Iterator[nn.Module]:
    """The largest modules below ``module`` that hold parameters, and none of ``exact``."""
    for child in module.children():
        held = set(child.parameters())
        if held & exact:
            yield from _without(child, exact)
        elif held:
            yield child


def _policy(parameters: Iterable[nn.Parameter], compute: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Sums in fp32 where numbers travel in less; inputs are left as they are, since autocast decides about them."""
    low = compute is not None or any(parameter.dtype in LOW for parameter in parameters)
    reduce = torch.float32 if low else None
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)


# ------------------------------------------------------------------------------------------------------------ gradients
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient, whole or this rank's part of it, by a number."""
    for gradients in _by_kind(parameters).values():
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))  # pyright: ignore[reportPrivateImportUsage]


def gradient_norm(module: nn.Module, strategy: Strategy) -> Tensor:
    """The norm of the whole gradient of ``module``, in fp32, equal on every rank and for every number of ranks."""
    if isinstance(strategy, FSDPStrategy):
        # Multiplied by min(1, inf): FSDP1 tells the norm of its flat parts in this way only.
        return _fsdp1_root(strategy).clip_grad_norm_(float("inf"))
    squares: dict[DeviceMesh | None, Tensor] = {}
    for (mesh, dtype), gradients in _by_kind(module.parameters()).items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch._foreach_norm(gradients, 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
        squares[mesh] = squares.get(mesh, 0) + torch.stack(norms).square().sum()
    for mesh, square in squares.items():
        if mesh is not None:
            # Replicas hold the same: the parts of one replica make the whole.
            dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    return torch.stack(list(squares.values())).sum().sqrt() if squares else torch.zeros(())


def _by_kind(parameters: Iterable[nn.Parameter]) -> dict[tuple[DeviceMesh | None, torch.dtype], list[Tensor]]:
    """This rank's parts of the gradients, by the mesh that holds the rest and by type."""
    kinds: dict[tuple[DeviceMesh | None, torch.dtype], list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters):
        if gradient is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            kinds.setdefault((mesh, gradient.dtype), []).append(_local(gradient))
    return kinds


def clip_gradients(module: nn.Module, strategy: Strategy, limit: float, norm: Tensor) -> None:
    """Scale the gradient down to ``limit`` where its ``norm`` is above; the rule of ``clip_grad_norm_``."""
    if isinstance(strategy, FSDPStrategy):
        _fsdp1_root(strategy).clip_grad_norm_(limit)
    else:
        scale_gradients(module.parameters(), (limit / (norm + 1e-6)).clamp(max=1.0))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fsdp1_root(strategy: FSDPStrategy) -> FullyShardedDataParallel:
    return cast(FullyShardedDataParallel, strategy.model)


# ------------------------------------------------------------------------------------------------------------- strategy
class ShardedStrategy(ModelParallelStrategy):
    """FSDP2: parameters, gradients and optimizer states divided among all devices; ``--trainer.strategy fsdp2``.

    Args:
        replicas: copies of the model, each divided among ``devices / replicas`` ranks (HSDP): one a node, for example,
            so that weights are gathered inside a node. 1: one copy over all devices.
        reshard: free a block's weights between its forward and its backward pass. False: keep them, which takes memory
            and saves gathering them again.
        save_distributed_checkpoint: write a folder with a file a rank, in parallel; all ranks must see the same disk.
            False: gather everything on rank 0 into one file.
        process_group_backend: such as nccl or gloo. None: what the device takes.

    Raises:
        UserError: replicas that do not divide the devices.
    """

    strategy_name = "fsdp2"

    def __init__(
        self,
        replicas: int = 1,
        reshard: bool = True,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
    ):
        if replicas < 1:
            raise UserError(f"fsdp2: replicas must be at least 1, got {replicas}")
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
        )
        self.replicas, self.reshard = replicas, reshard

    def setup_environment(self) -> None:
        """Start the processes' group, and lay out the mesh."""
        ranks = self.num_nodes * self.num_processes
        if ranks % self.replicas:
            raise UserError(
                f"fsdp2: {ranks} devices cannot hold {self.replicas} replicas of equal size; set the strategy's "
                "replicas to a divisor of the devices"
            )
        self._data_parallel_size = ranks
        super().setup_environment()
        self.mesh = self.device_mesh["data_parallel"]
        if self.replicas > 1:
            shape = (self.replicas, ranks // self.replicas)
            self.mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))

    # Optimizer states are named in files of ours as in those of one device: by place in the optimizer's groups.
    # Lightning counts in the order of the model instead, which would give moments to other parameters.
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of ``optimizer``: this rank's share; or, for one file, all of it on rank 0."""
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        plain = getattr(optimizer, "_optimizer", optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(cast(nn.Module, self.model), plain, options=options)
        return by_place(state) if self.global_rank == 0 else state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint whole or not at all; where one rank fails, all of them raise.

        Raises:
            UserError: it could not be written; the one before it is as it was.
        """
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            error: BaseException | None = None
            if self.is_global_zero:
                try:
                    self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
                except (OSError, ValueError) as failure:
                    error = failure
            self._agree(path, error)
            return
        part = part_of(path)
        if self.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, part, storage_options)
            error = None
        # A CheckpointException is what PyTorch makes of an error of any rank, and no Exception.
        except (OSError, RuntimeError, CheckpointException) as failure:
            error = failure
        self._agree(path, error)
        if self.is_global_zero:
            publish(part, path)

    def _agree(self, path: Path, error: BaseException | None) -> None:
        """Raise on every rank what happened on any."""
        reasons: list[str | None] = [None] * self.world_size
        mine = None if error is None else str(error if isinstance(error, UserError) else unsaved(path, error))
        dist.all_gather_object(reasons, mine)
        found = next((reason for reason in reasons if reason is not None), None)
        if found is not None:
            if self.is_global_zero:
                shutil.rmtree(part_of(path), ignore_errors=True)
            raise UserError(found)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer states from a folder or a file, of any number of ranks; returns the rest.

        Raises:
            UserError: a checkpoint that cannot be read, or of another model.
        """
        path = Path(self.broadcast(checkpoint_path))
        folder = path.is_dir()
        stored = read_facts(path) if folder else read_checkpoint(path)
        check = getattr(self.lightning_module, "check_stored", None)
        if check is not None:
            check(stored["zoo"], self, resumed=bool(self.optimizers))
        if folder:
            return super().load_checkpoint(path, weights_only=True)
        model, options = cast(nn.Module, self.model), StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, stored.pop("state_dict"), options=options)
        for optimizer, state in zip(self.optimizers, stored.get("optimizer_states", ())):
            set_optimizer_state_dict(model, optimizer, by_name(state, optimizer, model), options=options)
        return stored


StrategyRegistry.register("fsdp2", ShardedStrategy, description=ShardedStrategy.__doc__.splitlines()[0])  # type: ignore[union-attr]


def by_name(state: Mapping[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Undo :func:`zoo.checkpoint.by_place` for the parameters of ``optimizer``.

    Raises:
        UserError: groups of another number of parameters.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    ours = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    stored = [group["params"] for group in state["param_groups"]]
    if [len(group) for group in ours] != [len(group) for group in stored]:
        sizes = " and ".join(str([len(group) for group in groups]) for groups in (stored, ours))
        raise UserError(f"the checkpoint's optimizer has other groups than ours: {sizes} parameters")
    name_of = {place: name for group, mine in zip(stored, ours) for place, name in zip(group, mine)}
    return {
        "state": {name_of[place]: value for place, value in state["state"].items()},
        "param_groups": [{**g, "params": mine} for g, mine in zip(state["param_groups"], ours)],
    }
