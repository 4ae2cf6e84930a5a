"""What can be chosen about memory and machines changes no number; what goes wrong on one rank stops all of them."""

import sys

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo.conftest import RECIPE
from tests.zoo.ranks import launch, recipe_in
from zoo.architecture import settle
from zoo.checkpoint import by_place, load_model
from zoo.errors import UserError
from zoo.model import RECOMPUTE
from zoo.module import HybridLMModule
from zoo.run import read_metrics
from zoo.sharding import ShardedStrategy, by_name
from zoo.verbs.train import run_lightning
from zoo_layers.block import Block
from zoo_layers.mixer import registered

EVERY = ",".join(registered())
POISON = "--trainer.callbacks={class_path: tests.zoo.ranks.Poison, init_args: {where: WHERE}}"


def gradients(model, recompute="none", packing=None):
    """Loss, gradients, and the largest number of elements that the forward pass keeps for the backward."""
    model.set_recompute(recompute)
    model.zero_grad()
    generator, kept = torch.Generator().manual_seed(0), 0
    ids, labels = torch.randint(0, 17, (2, 1, 40), generator=generator).unbind()

    def count(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        nll, _ = model.nll(ids, labels, packing)
    nll.backward()
    return nll.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, kept


@pytest.mark.parametrize("packing", [None, [0, 3, 3, 29, 40]], ids=["one document", "packed"])
@pytest.mark.parametrize("recompute", RECOMPUTE[1:])
def test_recomputing_changes_neither_loss_nor_gradient_of_any_mixer(recompute, packing):
    model = settle(EVERY, d_model=32, vocab_size=17).build(seed=3)
    loss, wanted, kept = gradients(model, packing=packing)
    again, found, less = gradients(model, recompute, packing)
    assert again == loss
    # Selective checkpoints keep their tensors where hooks do not see them.
    assert less < kept
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")


class Products(TorchDispatchMode):
    """Counts matrix products that are computed, not looked up."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_selective_keeps_what_full_computes_again():
    model = settle("GA", d_model=32, vocab_size=17).build(seed=3)
    counts = {}
    for recompute in RECOMPUTE:
        with Products() as products:
            gradients(model, recompute)
        counts[recompute] = products.count
    assert counts["none"] == counts["selective"] < counts["full"]


def test_an_unknown_way_to_recompute_is_named():
    with pytest.raises(ValueError, match="recompute must be one of none, selective, full, got 'half'"):
        settle("GA", d_model=32, vocab_size=17).build(device="meta").set_recompute("half")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
def test_compiled_blocks_have_the_same_losses_and_the_same_checkpoint(zoo, tmp_path, monkeypatch):
    """Traced, not translated: the C++ compiler takes a minute and is PyTorch's to test."""
    calls, compiled = [], nn.Module.compile
    monkeypatch.setattr(Block, "compile", lambda self: (calls.append(self), compiled(self, backend="aot_eager")))
    words = ["--model.pattern", "GDN,SWA", "--trainer.max_steps", "3"]
    plain = zoo("fit", *words, root="plain")
    rows = zoo("fit", *words, "--model.compile", "true")
    assert len(calls) == 2
    one, other = (torch.tensor([row["train/loss"] for row in r]) for r in (plain, rows))
    torch.testing.assert_close(other, one, rtol=1e-4, atol=0)
    weights = {root: load_model(tmp_path / root).model.state_dict() for root in ("plain", "run")}
    assert weights["plain"].keys() == weights["run"].keys()
    zoo("fit", "--model.pattern", "GDN,SWA", "--ckpt_path", "last")  # a plain run goes on from a compiled one


def test_compiled_blocks_leave_nothing_to_select():
    with pytest.raises(UserError, match="recompute selective chooses among the ops that run"):
        HybridLMModule("GA", d_model=32, vocab_size=17, recompute="selective", compile=True)


def test_a_model_built_on_meta_equals_one_built_plainly_in_every_parameter_and_buffer():
    architecture = settle(EVERY, d_model=32, vocab_size=17, tie=True)
    plain, late = architecture.build(seed=5), architecture.build(device="meta")
    late.materialise("cpu")
    for tensor in [*late.parameters(), *late.buffers()]:
        tensor.detach().fill_(float("nan"))
    late.reset(5)
    wanted = dict([*plain.named_parameters(), *plain.named_buffers()])
    found = dict([*late.named_parameters(), *late.named_buffers()])
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.dtype == wanted[name].dtype
    assert late.head.weight is late.embedding.weight


def test_optimizer_states_are_numbered_by_their_place_in_the_groups():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleDict({"a": a, "b": b})
    groups = [{"params": [b.weight, a.weight]}, {"params": [a.bias, b.bias]}]
    optimizer = torch.optim.AdamW(groups)
    torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    named = by_name(state, optimizer, model)
    assert named["param_groups"][0]["params"] == ["b.weight", "a.weight"]
    assert torch.equal(named["state"]["a.weight"]["exp_avg"], optimizer.state[a.weight]["exp_avg"])
    assert by_place(named) == state
    with pytest.raises(UserError, match=r"other groups than ours: \[2, 2\] and \[4\] parameters"):
        by_name(state, torch.optim.AdamW(model.parameters()), model)


def test_states_of_fsdp1_are_resumed_by_fsdp1_alone_and_measured_by_all():
    module = HybridLMModule("GA", d_model=32, vocab_size=17)
    module.configure_model()
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    facts = {**checkpoint["zoo"], "fsdp1": True}
    with pytest.raises(UserError, match="trained with FSDP1 and cannot go on without it"):
        module.check_stored(facts, ShardedStrategy(), resumed=True)
    with pytest.raises(UserError, match="trained without FSDP1 and cannot go on with it"):
        module.check_stored(checkpoint["zoo"], FSDPStrategy(), resumed=True)
    module.check_stored(facts, ShardedStrategy(), resumed=False)


def test_replicas_below_one_are_refused():
    with pytest.raises(UserError, match="replicas must be at least 1, got 0"):
        ShardedStrategy(replicas=0)


# ---------------------------------------------------------------------------------------------------- what stops a run
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("forward", "first bad layer: layer 2 .SWA., whose output is not finite. The weights are still those"),
        ("backward", "first bad layer: layer 2 .SWA., in the backward pass"),
        ("weights", "first bad layer: layer 2 .SWA., whose weights were not finite before it"),
    ],
)
@pytest.mark.parametrize("micro_batches", ["1", "2"])
def test_a_gradient_that_is_not_finite_stops_before_the_step(zoo, tmp_path, where, message, micro_batches):
    accumulate = ["--trainer.accumulate_grad_batches", micro_batches]
    with pytest.raises(UserError, match=f"step 2: the gradient is not finite; {message}"):
        zoo("fit", *accumulate, POISON.replace("WHERE", where))
    stopped = load_model(tmp_path / "run")
    assert stopped.facts["tokens_seen"] == 2 * 128
    assert all(parameter.isfinite().all() for parameter in stopped.model.parameters())


def test_the_guard_can_be_sent_away(zoo):
    rows = zoo("fit", "--guard.every_n_steps", "0", POISON.replace("WHERE", "forward"))
    assert len(rows) == 6
    assert rows[-1]["train/loss"] != rows[-1]["train/loss"]


@pytest.mark.dist
def test_what_goes_wrong_on_one_rank_stops_both_and_fsdp1_clips_as_one_device_does(tmp_path):
    words = recipe_in(tmp_path, RECIPE)
    clip = ["--trainer.gradient_clip_val", "0.3"]

    def fit(name, *more):
        return ["fit", *words, str(tmp_path / name), *more]

    one_file = "{class_path: zoo.sharding.ShardedStrategy, init_args: {save_distributed_checkpoint: false}}"
    full = "--trainer.callbacks=tests.zoo.ranks.FullDisk"
    fsdp1 = ["--trainer.strategy={class_path: tests.zoo.ranks.FSDP1OnCPU}"]
    answers = launch(
        tmp_path,
        [
            fit("poisoned", "--trainer.strategy", "fsdp2", POISON.replace("WHERE", "forward")),
            fit("full", "--trainer.strategy", "fsdp2", full),
            fit("one file", "--trainer.strategy", one_file),
            fit("fsdp1", *fsdp1, *clip),
            fit("low", *fsdp1, "--trainer.precision", "bf16-true"),
        ],
    )
    assert answers[0][0] == answers[0][1]
    assert "step 2: the gradient is not finite; first bad layer: layer 2 (SWA)" in answers[0][0]
    assert "on rank 1" in answers[0][0]
    assert answers[1][0] == answers[1][1]
    assert "could not be saved: No space left on device" in answers[1][0]
    assert load_model(tmp_path / "full").facts["tokens_seen"] == 2 * 128
    assert sorted(file.name for file in (tmp_path / "full").glob("*.ckpt*")) == ["last.ckpt"]
    assert answers[2] == answers[3] == ("done", "done")
    assert all("FSDP1 flattens weights of one type only" in answer for answer in answers[4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["zoo"])
        run_lightning("fit", [*words, str(tmp_path / "alone"), *clip])
    alone, sharded = (read_metrics(tmp_path / name) for name in ("alone", "fsdp1"))
    for metric in ("train/loss", "grad_norm"):
        one, two = (torch.tensor([row[metric] for row in rows if metric in row]) for rows in (alone, sharded))
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5, msg=metric)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_folder_is_named_before_anything_is_trained(tmp_path, damage, sharded):
    path = sharded(tmp_path)
    shard = sorted(path.glob("*.distcp"))[-1]
    shard.unlink() if damage == "missing" else shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"is damaged: .*distcp has"):
        load_model(path)


@pytest.fixture
def sharded(monkeypatch):
    """A sharded checkpoint of a model that was never trained, as one process writes it."""

    def write(folder):
        from torch.distributed.checkpoint.state_dict_saver import save

        module = HybridLMModule("GDN,SWA", d_model=32, vocab_size=17)
        module.configure_model()
        facts = {"state_dict": {}}
        module.on_save_checkpoint(facts)
        save({"state_dict": module.state_dict()}, checkpoint_id=folder / "last.ckpt", no_dist=True)
        torch.save({"zoo": facts["zoo"]}, folder / "last.ckpt" / "meta.pt")
        assert load_model(folder).facts == facts["zoo"]
        return folder / "last.ckpt"

    return write
