"""Training on a GPU, through the command line: the losses of a CPU, of compiled blocks, and of a run never stopped."""

import pytest

pytestmark = pytest.mark.gpu
PATTERNS = ("GDN", "DN,SWA", "M2,GDN,SWA", "KDA,GA")
SIZES = ["--budget.tokens", "20480", "--budget.batch_tokens", "2048", "--data.init_args.seq_len", "512"]
SIZES += ["--model.d_model", "64", "--model.mixers.GDN.head_dim", "64", "--model.mixers.SWA.window", "100"]
SIZES += ["--model.optimizer.init_args.lr", "2e-3", "--model.n_layers", "6", "--trainer.limit_val_batches", "0"]
# PyTorch's attention adds gradients up in any order unless it is told otherwise.
EXACT = ["--trainer.deterministic", "true"]


@pytest.fixture
def train(zoo, tmp_path):
    """Losses and gradient norms of a run on longer documents."""
    folder = tmp_path / "long"
    folder.mkdir()
    for number in range(60):
        words = " ".join(f"word{(number * 7 + i * i) % 97}" for i in range(50 + 13 * number))
        (folder / f"{number:02d}.txt").write_text(f"document {number}: {words}\n", encoding="utf-8")

    def run(pattern, root, *words, where="gpu"):
        given = ["--model.pattern", pattern, "--data.init_args.source", str(folder), "--trainer.accelerator", where]
        rows = zoo("fit", *given, *SIZES, *words, root=tmp_path / root)
        return [(row["train/loss"], row["grad_norm"]) for row in rows if "train/loss" in row]

    return run


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_run_that_was_stopped_has_the_bits_of_one_that_was_not(train, pattern):
    straight = train(pattern, "straight", *EXACT)
    assert len(straight) == 10
    assert straight[-1][0] < straight[0][0] - 0.5
    train(pattern, "stopped", *EXACT, "--trainer.max_steps", "6")
    assert train(pattern, "stopped", *EXACT, "--ckpt_path", "last")[-4:] == straight[-4:]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_in_fp32_a_gpu_has_the_losses_of_a_cpu(train, pattern):
    precise = ["--trainer.precision", "32-true"]
    losses = {where: train(pattern, where, *precise, where=where) for where in ("gpu", "cpu")}
    for (one, _), (other, _) in zip(losses["gpu"], losses["cpu"], strict=True):
        assert one == pytest.approx(other, rel=2e-3)


@pytest.mark.parametrize("pattern", ["GDN", "M2,GDN,SWA"])
def test_compiled_blocks_have_the_losses_of_eager_ones(train, pattern):
    eager, compiled = train(pattern, "eager"), train(pattern, "compiled", "--model.compile", "true")
    for (one, _), (other, _) in zip(compiled, eager, strict=True):
        assert one == pytest.approx(other, rel=1e-2)


def test_devices_that_shard_alone_have_the_losses_of_one_that_does_not(train):
    """One rank of FSDP2: its casts and gathers, and its checkpoint, which a plain run goes on from."""
    pattern, plain = "GDN,SWA", train("GDN,SWA", "plain")
    sharded = train(pattern, "sharded", "--trainer.strategy", "fsdp2", "--trainer.max_steps", "6")
    assert [one for one, _ in sharded] == pytest.approx([one for one, _ in plain[:6]], rel=1e-3)
    again = train(pattern, "sharded", "--ckpt_path", "last")
    assert [one for one, _ in again[-4:]] == pytest.approx([one for one, _ in plain[-4:]], rel=1e-3)
