"""What no task may do: show a row of a test in training, or draw other rows for the same seed."""

import itertools

import numpy as np
import pytest
import torch

from zoo.data import TaskData
from zoo.data.loader import BatchShape, EvalLoader, TrainLoader
from zoo.data.synthetic import FixedRows, TaskStream
from zoo.data.tasks import TASKS, make_task

TRAINED, TESTED, STEP = 3000, 300, 12  # rows: of training, of validation and test each, of one step
# Tasks with so few different rows that splits meet; what they do about it: test_tasks.py.
SHORT = {"arithmetic"}


def rows_of(batches):
    """Every tensor of the batches, rows after rows, by name."""
    tensors = [
        {"input_ids": b["input_ids"], "labels": b["labels"], "stale": b["stale"], **b["slices"]} for b in batches
    ]
    return {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def trained(name, *, seed=0, rows=None, rank=0, world=1, accumulate=1):
    task = make_task(name)
    shape = BatchShape(
        seq_len=task.seq_len, batch_tokens=STEP * task.seq_len, rank=rank, world=world, accumulate=accumulate
    )
    return TrainLoader(TaskStream(task, seed=seed, rows=rows), shape)


def take(loader, count):
    passes = itertools.chain.from_iterable(itertools.repeat(loader))
    return list(itertools.islice(passes, count))


@pytest.mark.parametrize("name", TASKS)
def test_no_split_holds_a_row_of_another(name):
    data = TaskData(name, batch_tokens=make_task(name).seq_len, train_rows=TRAINED, val_rows=TESTED, test_rows=TESTED)
    blocks = [data.task.block("train", number, 0).tokens for number in range(-(-TRAINED // 1024))]
    found = {"train": np.concatenate(blocks)[:TRAINED]} | {s: data.eval_rows(s).tokens for s in ("val", "test")}
    seen = {split: {row.tobytes() for row in tokens} for split, tokens in found.items()}
    meeting = {split: sum(row.tobytes() in seen["train"] for row in found[split]) for split in ("val", "test")}
    assert data.overlap == meeting
    assert (sum(meeting.values()) > 0) == (name in SHORT)
    if name not in SHORT:
        assert not seen["val"] & seen["test"]
        assert len(seen["train"]) == TRAINED, "training repeats a row that it should not"


@pytest.mark.parametrize("rows", [None, 100], ids=["endless", "repeated"])
@pytest.mark.parametrize("name", TASKS)
def test_one_seed_gives_the_same_bits_to_any_workers_and_after_a_resume(name, rows):
    whole = rows_of(take(trained(name, rows=rows), 9))
    ranks = [take(trained(name, rows=rows, rank=rank, world=2, accumulate=3), 9 * 3) for rank in range(2)]
    # Each rank takes one run of rows of a step, in three micro-batches.
    shares = [[rank[3 * step : 3 * step + 3] for rank in ranks] for step in range(9)]
    assert_equal(rows_of([batch for step in shares for rank in step for batch in rank]), whole)
    stopped, resumed = trained(name, rows=rows), trained(name, rows=rows, accumulate=2)
    first = take(stopped, 4)
    resumed.load_state_dict(stopped.state_dict())
    assert_equal(rows_of([*first, *take(resumed, 5 * 2)]), whole)


@pytest.mark.parametrize("name", TASKS)
def test_ranks_evaluate_every_row_once(name):
    rows = make_task(name).block("test", 0, 0)[slice(31)]
    shape = {"seq_len": rows.tokens.shape[1], "batch_tokens": 8 * rows.tokens.shape[1]}
    whole = rows_of(EvalLoader(FixedRows(rows), BatchShape(**shape)))
    ranks = [EvalLoader(FixedRows(rows), BatchShape(**shape, rank=rank, world=2)) for rank in range(2)]
    shared = rows_of([batch for pair in zip(*ranks) for batch in pair])
    counted = (shared["labels"] != -100).any(1)
    kept = torch.cat([torch.arange(28), torch.arange(28, 32)[counted[28:]]])  # the last of 32 fills up
    assert not counted[31]
    assert_equal({key: value[kept] for key, value in shared.items()}, whole)


@pytest.mark.parametrize("name", TASKS)
def test_two_seeds_share_no_row(name):
    task = make_task(name)
    for split in ("train", "val", "test"):
        one, other = ({row.tobytes() for row in task.block(split, 0, seed).tokens} for seed in (0, 1))
        if name in SHORT:
            assert len(one & other) < len(one)
        else:
            assert not one & other
    batches = [take(trained(name, seed=seed), 2) for seed in (0, 1)]
    for one, other in itertools.product(*batches):
        assert not torch.equal(one["input_ids"], other["input_ids"])
