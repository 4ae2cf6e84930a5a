"""What tier 2 trains, sized by trials on an H200 (docs/claims.md), so that side by side all takes a quarter of an hour.

Learning rates are the recipes' where none is given.
"""

from __future__ import annotations

from zoo.claims.claim import Experiment
from zoo.comparison.plan import Entry, Reading


# ------------------------------------------------------------------------------------------------------ recall of pairs
def _recall(
    name: str,
    length: int,
    vocab: int,
    arms: tuple[Entry, ...],
    *settings: str,
    steps: int,
    seeds: tuple[int, ...] = (0,),
) -> Experiment:
    """MQAR. Rows of 4 to 64 pairs in turn are learned from, rows of 64 are asked: with 64 alone none leaves the start.

    Few ids and a high rate, for the same reason: with 8192 ids DeltaNet has hardly begun after 3000 steps
    (docs/claims.md).
    """
    options = "--data.init_args.options={{seq_len: {}, kv: 64, vocab: {}, min_kv: {}}}"
    tokens = 64 * length
    return Experiment(
        name=name,
        recipe="mqar",
        arms=arms,
        settings=(
            options.format(length, vocab, 4),
            f"--budget.batch_tokens={tokens}",
            f"--budget.tokens={steps * tokens}",
            f"--model.lr_scheduler.init_args.warmup_steps={steps // 10}",
            "--model.optimizer.init_args.lr=6e-3",
            "--trainer.val_check_interval=1000",
            *settings,
        ),
        seeds=seeds,
        readings=(Reading("test", (options.format(length, vocab, 0),)),),
        lengths={"test": length},
        seconds=0.011 * steps,
    )


# Two layers without a convolution have to learn to bind a value to the key before it, which DeltaNet can and a sum
# cannot. It is learned suddenly, after 1000 to 3000 steps, or not before the rate has fallen.
RECALL = _recall("recall_256", 256, 512, (Entry("LA"), Entry("DN")), steps=7000, seeds=(0, 1, 2))
PLAIN = (Entry("LA"), Entry("DN"), Entry("GA"))
RECALL_HARD = _recall("recall_512", 512, 1024, PLAIN, steps=8000)
RECALL_WIDE = _recall("recall_256_wide", 256, 512, PLAIN, "--model.d_model=128", steps=4000)


GLA_EQUAL, GLA_DOUBLE, M2_EQUAL = "GLA, equal state", "GLA, twice the state", "M2, equal state"
LA_CONV, DN_CONV, GDN_CONV = "LA, convolution", "DN, convolution", "GDN, convolution"
HYBRIDS = ("DN:conv=4,GA", "GDN:conv=4,SWA:window=16")
# Which memory holds more is told by rows that all learn from: 16 pairs in 64 tokens. GDN and GLA learn nothing from
# rows of 256 in these steps (docs/claims.md). A head has 16 channels, as many as there are pairs, so that size counts.
RECALL_SMALL = Experiment(
    name="recall_64",
    recipe="mqar",
    arms=(
        Entry("LA:conv=4", LA_CONV),
        Entry("DN:conv=4", DN_CONV),
        Entry("GDN:head_dim=16:conv=4", GDN_CONV),
        Entry("GLA:head_dim=16:conv=4", GLA_EQUAL),
        Entry("GLA:head_dim=16:expand_v=2:conv=4", GLA_DOUBLE),
        Entry("M2:expand=1:head_dim=16:state=16", M2_EQUAL),
        *(Entry(pattern) for pattern in HYBRIDS),
    ),
    settings=(
        "--model.d_model=32",
        "--data.init_args.options={seq_len: 64, kv: 16, vocab: 256, min_kv: 4}",
        "--budget.batch_tokens=8192",
        "--budget.tokens=16384000",
        "--model.lr_scheduler.init_args.warmup_steps=200",
        "--model.optimizer.init_args.lr=6e-3",
        "--trainer.val_check_interval=500",
    ),
    seeds=(0, 1),
    readings=(Reading("test", ("--data.init_args.options={seq_len: 64, kv: 16, vocab: 256, min_kv: 0}",)),),
    lengths={"test": 64},
    seconds=25,
)


def _overwrite(
    name: str, arms: tuple[str, ...], length: int, seeds: tuple[int, ...], seconds: float, *settings: str
) -> Experiment:
    """Recall after updates; 3000 steps of 64 rows."""
    tokens = 64 * length
    return Experiment(
        name=name,
        recipe="overwrite",
        arms=tuple(map(Entry, arms)),
        settings=(
            f"--budget.batch_tokens={tokens}",
            f"--budget.tokens={3000 * tokens}",
            "--model.lr_scheduler.init_args.warmup_steps=300",
            *settings,
        ),
        seeds=seeds,
        readings=(Reading("test"),),
        lengths={"test": length},
        seconds=seconds,
    )


# 32 pairs and 32 new values in rows of 256. One layer: two that add do together what one cannot (docs/overwrite.md).
OVERWRITE = _overwrite("overwrite_gpu", ("LA", "GLA", "M2", "DN", "GDN"), 256, (0, 1, 2), 33)
# 8 pairs and 8 new values in rows of 64: from rows of 256, GDN and GLA learn nothing in these steps (docs/claims.md).
SHORT = "--data.init_args.profile=small"
OVERWRITE_DECAY = _overwrite("overwrite_decay", ("LA", "GLA", "M2", "DN", "GDN"), 64, (0, 1), 30, SHORT)
# Windows need a layer beside them.
OVERWRITE_PAIRS = _overwrite(
    "overwrite_pairs",
    ("SWA", "DN,SWA", "GDN,SWA"),
    64,
    (0,),
    30,
    SHORT,
    "--model.n_layers=2",
    "--model.mixers.SWA.window=16",
)


# --------------------------------------------------------------------------------------------------------------- MAD
def _mad(name: str, length: int, seconds: float, *settings: str, seeds: tuple[int, ...] = (0,)) -> Experiment:
    return Experiment(
        name=name,
        recipe="mad_lite",
        arms=tuple(map(Entry, ("DN", "GLA", "M2", "GDN"))),
        settings=settings,
        seeds=seeds,
        matched=True,
        readings=(Reading("test"),),
        lengths={"test": length},
        seconds=seconds,
    )


FUZZY = _mad("mad_fuzzy", 127, 60)
COPY = _mad(
    "mad_copy",
    256,
    40,
    "--data.init_args.task=mad_copy",
    "--budget.batch_tokens=32768",
    "--budget.tokens=81920000",
)
MEMORIZE = _mad(
    "mad_memorize",
    32,
    3,
    "--data.init_args.task=mad_memorize",
    "--data.init_args.train_rows=256",
    "--budget.batch_tokens=4096",
    "--budget.tokens=409600",
    "--model.lr_scheduler.init_args.warmup_steps=10",
    "--trainer.val_check_interval=50",
    seeds=(0, 1, 2),
)

# ------------------------------------------------------------------------------------------------------- state tracking
TWO, ONE = "DN, beta up to 2", "DN, beta up to 1"


def _tracking(
    name: str,
    task: str,
    steps: int,
    variant: str,
    arms: tuple[Entry, ...] = (
        Entry("DN:negative_eigenvalues=true", TWO),
        Entry("DN:negative_eigenvalues=false", ONE),
    ),
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
) -> Experiment:
    """Rows of 40 symbols at most are learned from, 256 a step; read on 40 to 80, and to 256."""
    options = f"--data.init_args.options={{{{{variant}seq_len: {{0}}, test_min_length: 40, test_max_length: {{0}}}}}}"
    tokens = 256 * 40
    return Experiment(
        name=name,
        recipe="arithmetic",
        arms=arms,
        settings=(
            f"--data.init_args.task={task}",
            options.format(40),
            f"--budget.batch_tokens={tokens}",
            f"--budget.tokens={steps * tokens}",
            f"--model.lr_scheduler.init_args.warmup_steps={steps // 10}",
        ),
        seeds=seeds,
        readings=(Reading("2x", (options.format(80),)), Reading("6x", (options.format(256),))),
        lengths={"2x": 80, "6x": 256},
        score="2x/accuracy",
        seconds=0.012 * steps,
    )


# A label at every symbol: with one a row, so few steps would decide little.
PARITY = _tracking("parity_gpu", "parity", 1500, "variant: every, ")
OTHERS = ("LA", "GLA", "M2", "GA")
GATED, GATED_HYBRID = "GDN, beta up to 2", "GDN,SWA, beta up to 2"
PARITY_OTHERS = _tracking(
    "parity_others",
    "parity",
    1500,
    "variant: every, ",
    arms=(
        *map(Entry, OTHERS),
        Entry("GDN:negative_eigenvalues=true", GATED),
        Entry("GDN:negative_eigenvalues=true,SWA", GATED_HYBRID),
    ),
    seeds=(0, 1),
)
ARITHMETIC = _tracking("arithmetic", "arithmetic", 4000, "", seeds=(0, 1))

# ------------------------------------------------------------------------------------------------------------- language
TEXT_HYBRIDS = ("GDN,SWA", "M2,GDN,SWA", "DN,GA@2,GA@N/2+1")
PARENTS = {
    "GDN,SWA": ("GDN", "GA"),
    "M2,GDN,SWA": ("M2", "GDN", "GA"),
    "DN,GA@2,GA@N/2+1": ("DN", "GA"),
}
TEXT_PURE = ("LA", "GLA", "M2", "DN", "GDN", "GA")
ELU, L1, L1_ELU = "DN, L2 and 1+ELU", "DN, L1 and SiLU", "DN, L1 and 1+ELU"
TEXT = Experiment(
    name="text",
    recipe="gdn_h1_text_25m",
    arms=(
        Entry("LA:heads=6:conv=4:qk_norm=l2", "LA"),
        Entry("GLA:heads=3:conv=4", "GLA"),
        *(Entry(pattern) for pattern in ("M2", "DN", "GDN", "GA", *TEXT_HYBRIDS)),
        Entry("DN:feature_map=elu1", ELU),
        Entry("DN:qk_norm=l1", L1),
        Entry("DN:qk_norm=l1:feature_map=elu1", L1_ELU),
    ),
    settings=("--budget.tokens=13107200", "--model.lr_scheduler.init_args.warmup_steps=20"),
    matched=True,
    readings=(Reading("1x"), Reading("4x", ("--data.init_args.seq_len=4096",))),
    lengths={"1x": 1024, "4x": 4096},
    score="1x/bpb",
    seconds=24,
)


def _needle(name: str, form: int, *patterns: str) -> Experiment:
    """Trained at 512 bytes, read up to 4096, by depth. The value alone is learned: among all ids it comes late."""
    options = "--data.init_args.options={{form: {}, seq_len: {}{}}}"
    lengths = (512, 1024, 2048, 4096)
    return Experiment(
        name=name,
        recipe="niah_lite",
        arms=tuple(map(Entry, patterns)),
        settings=(options.format(form, 512, ", needle_share: 1.0, learn: value"), "--budget.tokens=49152000"),
        readings=tuple(Reading(str(length), (options.format(form, length, ""),)) for length in lengths),
        lengths={str(length): length for length in lengths},
        score="512/exact",
        seconds=30,
    )


NEEDLE = _needle("needle", 1, "DN", "GDN", "M2", "GDN,SWA")
NEEDLE_PROSE = _needle("needle_prose", 2, "DN", "GDN")
