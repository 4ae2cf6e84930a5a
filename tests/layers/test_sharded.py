"""Every mixer under FSDP2 on two gloo processes, in one launch: first values, loss and clipped step equal one process.

Run as a script, this file is one of the two processes: its arguments are the rank and the file where both meet.
"""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORLD, D_MODEL = 2, 16


@pytest.mark.dist
def test_two_processes_equal_one(tmp_path):
    meet = tmp_path / "meet"
    command = [sys.executable, "-W", "error", __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(meet)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(WORLD)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    from zoo_layers.mixer import registered

    for rank, output in zip(ranks, outputs):
        assert rank.returncode == 0, output
        proved = {line.split()[1] for line in output.splitlines() if line.startswith("equal ")}
        assert proved == set(registered()), output


def train(block, x, weights):
    """(loss, gradient norm) of one clipped step on ``block``."""
    import torch

    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    loss = (block(x) * weights).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(block.parameters(), 0.05)
    optimizer.step()
    return loss.detach(), norm


def compare(name, kind, mesh, rank):
    """One mixer: sharded from meta on all ranks against whole on this one, in float64."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from zoo_layers import init
    from zoo_layers.block import Block
    from zoo_layers.mlp import build_mlp

    def build():
        block = Block(kind().build(D_MODEL), build_mlp("swiglu", D_MODEL), d_model=D_MODEL)
        return block.double()

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    one = build()
    init.reset(one, seed=6)
    with torch.device("meta"):
        many = build()
    fully_shard(many, mesh=mesh)
    many.to_empty(device="cpu")
    init.reset(many, seed=6)

    def same(what, rtol):
        mine = dict([*one.named_parameters(), *one.named_buffers()])
        for key, tensor in [*many.named_parameters(), *many.named_buffers()]:
            message = f"{name}: {key} {what}"
            torch.testing.assert_close(
                whole(tensor), mine[key], rtol=rtol, atol=rtol, msg=lambda text, m=message: f"{m}: {text}"
            )

    same("at the start", 0.0)
    generator = torch.Generator().manual_seed(8)
    x, weights = (torch.randn(WORLD, 20, D_MODEL, generator=generator, dtype=torch.float64) for _ in range(2))
    loss, norm = train(one, x, weights)
    part, part_norm = train(many, x[rank : rank + 1], weights[rank : rank + 1])
    dist.all_reduce(part, op=dist.ReduceOp.SUM)
    torch.testing.assert_close(part / WORLD, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole(part_norm), norm, rtol=1e-10, atol=0)
    assert norm > 0.05, f"{name}: nothing is clipped"
    same("after a clipped step", 1e-9)


def main(rank, meet):
    sys.path[:0] = [str(ROOT / "layers"), str(ROOT / "kernels")]
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from zoo_layers.mixer import registered

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        for name, kind in registered().items():
            compare(name, kind, mesh, rank)
            print("equal", name, flush=True)
    finally:
        # What FSDP leaves in cycles holds the group, and one that lives until the process ends may abort it: 1 in 20.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
