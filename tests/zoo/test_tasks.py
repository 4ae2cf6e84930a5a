"""Synthetic tasks: right answers, seeds, speed, settings that cannot be met, and what TaskData makes of them.

What each task promises on top of that: test_tasks_recall.py, _tracking.py, _mad.py, _languages.py and _needle.py.
"""

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from zoo.data import TaskData
from zoo.data.synthetic import FixedRows
from zoo.data.tasks import BLOCK, TASKS, TaskRows, make_task
from zoo.module import HybridLMModule

# Rows per second on one core, a fifth of what each must reach on a quiet machine.
FLOORS = {
    ("overwrite", "cpu"): 100_000 / 5,
    ("overwrite", "small"): 50_000 / 5,
    ("overwrite", "gpu"): 5_000 / 5,
    ("mqar", "cpu"): 100_000 / 5,
    ("mqar", "fig2"): 20_000 / 5,
    ("mqar", "mixed"): 20_000 / 5,
    ("mqar", "dense"): 20_000 / 5,
    ("mqar", "kimi"): 20_000 / 5,
    ("parity", "cpu"): 150_000 / 5,
    ("parity", "gpu"): 150_000 / 5,
    ("arithmetic", "cpu"): 300_000 / 5,
    ("arithmetic", "gpu"): 300_000 / 5,
    ("arithmetic", "brackets"): 3_000 / 5,
    ("mad_recall", "in_context"): 250_000 / 5,
    ("mad_recall", "noisy"): 250_000 / 5,
    ("mad_fuzzy", "baseline"): 15_000 / 5,
    ("mad_copy", "baseline"): 80_000 / 5,
    ("mad_memorize", "baseline"): 1_000_000 / 5,
    ("mad_compress", "baseline"): 1_000_000 / 5,
    ("niah", "s1"): 1_000 / 5,
    ("niah", "s2"): 1_000 / 5,
    ("niah", "s3"): 1_000 / 5,
    ("niah", "lite"): 1_000 / 5,
    ("regbench", "baseline"): 1_500 / 5,
    ("regbench", "cpu"): 1_500 / 5,
}
# What the labels of another row score, and how far skewed labels may lie from that.
CHANCE = {
    "overwrite": (lambda task: 2 / task.vocab_size, 0),
    "mqar": (lambda task: 2 / task.vocab, 0),
    "parity": (lambda task: 1 / 2, 0),
    "arithmetic": (lambda task: 1 / task.modulus, 0.03),  # products are 0 more often than anything else
    "mad_recall": (lambda task: 1 / task.keys, 0.01),
    "mad_fuzzy": (lambda task: 2 / task.vocab, 0.01),
    "mad_copy": (lambda task: 1 / (task.vocab - 2), 0),
    "mad_memorize": (lambda task: 1 / len(task.facts()), 0),
    "mad_compress": (lambda task: (1 + (task.seq_len - 1) / (task.vocab - 1)) / task.seq_len, 0),  # the last is known
}
TEXT = ("niah", "regbench")  # first labels are all alike; several are right


def drawn(name, profile, options=None):
    seed = random.SystemRandom().randrange(2**31)
    print(f"task seed {seed}")
    task = make_task(name, profile, options)
    return task, {split: task.block(split, seed % 7, seed) for split in ("train", "val", "test")}


def test_no_task_or_profile_is_left_out():
    assert FLOORS.keys() == {(name, profile) for name, task in TASKS.items() for profile in task.profiles}
    assert {*CHANCE, *TEXT} == TASKS.keys()


def test_the_guide_names_every_task_and_profile():
    guide = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")
    missing = [word for key in FLOORS for word in key if f"`{word}`" not in guide]
    assert not missing


# ------------------------------------------------------------------------------------------------------------- any task
@pytest.mark.parametrize(("name", "profile"), FLOORS)
def test_the_slow_solver_is_right_everywhere(name, profile):
    task, blocks = drawn(name, profile)
    for split, rows in blocks.items():
        assert rows.tokens.shape == rows.targets.shape == (BLOCK, task.seq_len)
        assert 0 <= rows.tokens.min() <= rows.tokens.max() < task.vocab_size
        assert rows.targets.max() < task.vocab_size
        counted = rows.targets != -100
        assert rows.slices.keys() == set(task.slice_names)
        assert all(mask.dtype == bool and not (mask & ~counted).any() for mask in rows.slices.values())
        assert split == "train" or (counted.sum(1) >= 1).mean() > 0.9
        if task.unsolved_in_training and split == "train":
            assert_the_next_id_is_the_label(rows)
        else:
            assert_solved(task, rows)


def assert_the_next_id_is_the_label(rows):
    known = rows.targets[:, :-1] != -100
    assert known.mean() > 0.5
    np.testing.assert_array_equal(rows.targets[:, :-1][known], rows.tokens[:, 1:][known])


def assert_solved(task, rows):
    for number, (tokens, targets) in enumerate(zip(rows.tokens[:1000].tolist(), rows.targets.tolist())):
        for at, label in enumerate(targets):
            if label == -100:
                continue
            if rows.legal is None:
                assert task.solve(tokens, at) == label
            else:
                assert rows.legal[number, at] >> label & 1


@pytest.mark.parametrize(("name", "profile"), [key for key in FLOORS if key[0] in CHANCE])
def test_labels_of_another_row_score_chance(name, profile):
    task, blocks = drawn(name, profile)
    labels = [row[row != -100] for row in blocks["test"].targets]
    right = np.concatenate([a[: len(b)] == b[: len(a)] for a, b in itertools.pairwise(labels)])
    chance, skew = CHANCE[name][0](task), CHANCE[name][1]
    assert len(right) > 100
    # Labels of one row hang together, hence more than the four standard errors of single ones.
    assert abs(np.mean(right) - chance) < skew + 8 * (chance * (1 - chance) / len(right)) ** 0.5


@pytest.mark.parametrize(("name", "profile"), FLOORS)
def test_rows_are_drawn_fast_enough(name, profile):
    task = make_task(name, profile)
    task.block("train", 0, 0)
    best = min(_seconds(lambda number=number: task.block("train", number, 0)) for number in range(3))
    assert BLOCK / best > FLOORS[name, profile]


def _seconds(draw):
    begin = time.perf_counter()
    draw()
    return time.perf_counter() - begin


@pytest.mark.parametrize(("name", "profile"), FLOORS)
def test_a_block_follows_from_seed_split_and_number_alone(name, profile):
    task = make_task(name, profile)
    rows = [
        task.block(split, n, seed).tokens
        for split, n, seed in itertools.product(("train", "val", "test"), (0, 1), (0, 1))
    ]
    for a, b in itertools.combinations(rows, 2):
        assert not np.array_equal(a, b)
    np.testing.assert_array_equal(task.block("val", 1, 1).tokens, make_task(name, profile).block("val", 1, 1).tokens)


def digest(rows: TaskRows):
    parts = [rows.tokens, rows.targets, rows.stale, *(rows.slices[name] for name in sorted(rows.slices))]
    parts += [] if rows.legal is None else [rows.legal]
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


DIGESTS = """
import sys
sys.path.insert(0, sys.argv[1])
from test_tasks import digest
from zoo.data.tasks import TASKS, make_task
for name in TASKS:
    print(digest(make_task(name).block("val", 2, 7)))
"""


def test_another_process_draws_the_same_bits():
    env = {**os.environ, "PYTHONHASHSEED": "1234"}
    command = [sys.executable, "-c", DIGESTS, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [digest(make_task(name).block("val", 2, 7)) for name in TASKS]


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].replace_overlap])
def test_no_row_of_a_test_occurs_in_training(name):
    module = TaskData(name, batch_tokens=make_task(name).seq_len, train_rows=4 * BLOCK, val_rows=200, test_rows=200)
    seen = {row.tobytes() for number in range(4) for row in module.task.block("train", number, 0).tokens}
    for split in ("val", "test"):
        assert not any(row.tobytes() in seen for row in module.eval_rows(split).tokens)
        assert module.overlap[split] == 0


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_and_is_scored_by_the_same_line(name, tmp_path):
    seq_len = make_task(name).seq_len
    data = TaskData(name, batch_tokens=4 * seq_len, val_rows=5, test_rows=5)
    sizes = {"n_layers": 1, "d_model": 16, "vocab_size": data.vocab_size, "decoder": data.decoder}
    module = HybridLMModule("DN", mlp="none", total_steps=4, **sizes)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    trainer.fit(module, data)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    (values,) = trainer.validate(module, data, verbose=False)
    shares = {key: value for key, value in values.items() if key.split("/")[-1] not in ("loss", "ppl")}
    assert {"val/accuracy", "val/row_accuracy", "val/exact"} <= shares.keys()
    assert all(value <= 1 for value in shares.values())
    assert ("val/legal_accuracy" in shares) == (name == "regbench")
    assert ("val/class_accuracy" in shares) == name.startswith("mad_")


# ------------------------------------------------------------------------------------------------------------- TaskData
def test_batches_follow_from_the_seed_and_their_number_alone():
    module = TaskData(batch_tokens=36 * 48, task_seed=3)
    batches = [batch for _, batch in zip(range(60), module.train_dataloader())]
    whole = np.concatenate([module.task.block("train", n, 3).tokens for n in range(3)])
    got = torch.cat([batch["input_ids"] for batch in batches]).numpy()
    np.testing.assert_array_equal(got, whole[: len(got)])
    batch = batches[7]
    assert batch["packing"] is None
    assert batch["tokens"] == 48 * 6
    assert batch["labels"].shape == batch["input_ids"].shape == batch["stale"].shape == (48, 36)
    assert all(mask.shape == (48, 36) for mask in batch["slices"].values())


@pytest.mark.parametrize("name", TASKS)
def test_a_task_loader_resumes_where_it_stood(name):
    def loader(**settings):
        batch_tokens = 32 * make_task(name).seq_len
        return TaskData(name, batch_tokens=batch_tokens, **{"train_rows": 200, **settings}).train_dataloader()

    straight, stopped, resumed = loader(), loader(), loader()
    expected = [batch["input_ids"].tolist() for _, batch in zip(range(6), straight)]
    got = [batch["input_ids"].tolist() for _, batch in zip(range(2), stopped)]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    got += [batch["input_ids"].tolist() for _, batch in zip(range(4), resumed)]
    assert got == expected
    assert resumed.order_hash == straight.order_hash
    with pytest.raises(ValueError, match="trained with task_seed 0, but 1 is given"):
        loader(task_seed=1).load_state_dict(stopped.state_dict())


def test_repeated_rows_come_once_an_epoch_in_another_order_each_time():
    module = TaskData(batch_tokens=36 * 10, train_rows=50)
    loader = module.train_dataloader()
    epochs = [torch.cat([batch["input_ids"] for batch in loader]).tolist() for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(module.task.block("train", 0, 0).tokens[:50].tolist())
    assert epochs[0] != epochs[1]


def test_evaluation_rows_are_whole_fixed_and_independent_of_the_batch():
    for rows in (7, 100):
        module = TaskData(batch_tokens=36 * rows, val_rows=50)
        got = torch.cat([batch["input_ids"] for batch in module.val_dataloader()])
        np.testing.assert_array_equal(got.numpy(), module.task.block("val", 0, 0).tokens[:50])
    padded = FixedRows(module.eval_rows("val")).batch(np.array([3]), padding_rows=2)
    assert padded["input_ids"].shape == (3, 36)
    assert (padded["labels"][1:] == -100).all()
    assert padded["tokens"] == 6


def test_rows_that_training_has_seen_are_replaced_and_counted():
    few = {"seq_len": 8, "kv": 1, "upd": 1, "vocab": 16}  # 7 keys, 8 values, 7 new ones: 392 rows
    module = TaskData(batch_tokens=8, options=few, train_rows=300, val_rows=100)
    seen = {row.tobytes() for row in module.task.block("train", 0, 0).tokens[:300]}
    rows = module.eval_rows("val")
    assert module.overlap["val"] > 0
    assert len(rows) == 100
    assert not any(row.tobytes() in seen for row in rows.tokens)
    endless = TaskData(batch_tokens=8, options=few)  # all 392 are seen: nothing to replace them by
    assert len(endless.eval_rows("test")) == 2048
    assert endless.overlap["test"] >= 2048
    parity = TaskData("parity", profile="gpu", batch_tokens=256, train_rows=2000)
    rows = parity.eval_rows("val")
    assert parity.overlap["val"] > 0
    np.testing.assert_array_equal(rows.tokens, parity.task.block("val", 0, 0).tokens)


def mqar(**options):
    return {"task": "mqar", "options": options}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"task": "overwritten"}, "no task 'overwritten'; there are arithmetic, mad_compress"),
        ({"profile": "tpu"}, "no profile 'tpu'; there are cpu, small, gpu"),
        ({"options": {"kvs": 3}}, "no option 'kvs'; there are seq_len, kv"),
        ({"options": {"kv": 2.5}}, "kv is 2.5, but must be of type int"),
        ({"options": {"kv": True}}, "kv is True, but must be of type int"),
        ({"options": {"kv": 0, "upd": 0}}, "at least 1 pair"),
        ({"options": {"upd": 7}}, "upd is 7, but must be from 0 to kv, here 6"),
        ({"options": {"vocab": 63}}, "vocab is 63, but must be even"),
        ({"options": {"vocab": 12}}, "12 has 5 keys, but kv asks for 6; raise vocab to 14"),
        ({"options": {"seq_len": 37}}, "seq_len is 37, but must be even"),
        ({"options": {"seq_len": 34}}, "need 36; raise seq_len or lower kv"),
        (mqar(layout="dense"), "layout is 'dense', but must be one of scattered, lm, sep"),
        (mqar(kv=17), r"17 pairs and 17 queries need 4 \* kv = 68; raise seq_len"),
        (mqar(vocab=16), "16 has 7 keys, but kv asks for 8; raise vocab to 18"),
        (mqar(vocab=64), "vocab is 64, but must be above seq_len, here 64; raise vocab to 66"),
        (mqar(seq_len=63), "seq_len is 63, but must be even"),
        (mqar(min_kv=3), "min_kv is 3, but must be 0 or kv, here 8, halved"),
        (mqar(layout="sep", seq_len=24), r"need 3 \* kv \+ 1 = 25"),
        (mqar(layout="sep", random_fillers=True), "sep has no fillers"),
        ({"task": "parity", "options": {"variant": "all"}}, "must be every or last"),
        ({"task": "parity", "options": {"min_length": 41}}, "min_length 41 and max_length 40 must rise"),
        ({"task": "parity", "options": {"test_max_length": 41}}, "test_max_length 41 must rise"),
        ({"task": "arithmetic", "options": {"modulus": 1}}, "modulus is 1, but must be at least 2"),
        ({"task": "arithmetic", "options": {"min_length": 5, "max_length": 5}}, "have an even length; take 6"),
        ({"task": "arithmetic", "options": {"times": True}}, "times is for brackets"),
        ({"task": "mad_recall", "options": {"seq_len": 128}}, "must be odd and at least 3"),
        ({"task": "mad_recall", "options": {"vocab": 15}}, "is 15, but must be even"),
        ({"task": "mad_recall", "options": {"noise": 0.2}}, "noise_vocab 0; give both"),
        ({"task": "mad_recall", "options": {"noise": 1.0}}, "must be a share from 0 to below 1"),
        ({"task": "mad_fuzzy", "options": {"vocab": 6}}, "must be even and at least 8"),
        ({"task": "mad_fuzzy", "options": {"seq_len": 10}}, "a pair and its repetition need 11"),
        ({"task": "mad_copy", "options": {"copies": 128}}, "need 257; raise seq_len or lower copies"),
        ({"task": "mad_memorize", "options": {"vocab": 2}}, "a key, a value and the blank need at least 3"),
        ({"task": "mad_compress", "options": {"vocab": 2}}, "two ids to tell apart and the last need at least 3"),
        ({"task": "mad_compress", "options": {"seq_len": 1}}, "seq_len is 1, but must be at least 2"),
        ({"task": "niah", "options": {"form": 4}}, "form is 4, but must be 1, 2 or 3"),
        ({"task": "niah", "options": {"seq_len": 256}}, "prompt, needle and reserve need .* raise seq_len to"),
        ({"task": "niah", "options": {"reserve": 7}}, "a value has up to 8 tokens; raise reserve"),
        ({"task": "niah", "options": {"from_start": True}}, "from_start is for prose"),
        ({"task": "niah", "options": {"needle_share": 0.0}}, "must be above 0, at most 1"),
        ({"task": "niah", "options": {"learn": "answer"}}, "learn is 'answer', but must be all or value"),
        ({"task": "niah", "options": {"learn": "value", "needle_share": 0.5}}, "plain text has no label; set it to 1"),
        ({"task": "regbench", "options": {"seq_len": 512}}, "and what parts them need 949"),
        ({"task": "regbench", "options": {"max_edges": 4}}, "must be from 1 to 3"),
        ({"task": "regbench", "options": {"symbols": 61}}, "must be from 4 to 60"),
        ({"batch_tokens": 100}, "no multiple of the row length 36; the next is 108"),
        ({"val_rows": 0}, "val_rows is 0"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        TaskData(**{"batch_tokens": 36, **settings})
