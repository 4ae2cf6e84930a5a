"""Packing: the contract of offsets, checked once and on the host, and the tables made from them."""

import random

import numpy as np
import pytest
import torch

from tests.waits import no_waits
from zoo_kernels.packing import CHUNK, Packing, as_packing


def draw(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, rng.randint(0, 300)]) for _ in range(rng.randint(1, 9))]
    return lengths, [sum(lengths[:n]) for n in range(len(lengths) + 1)]


@pytest.mark.parametrize("seed", range(10))
def test_the_tables_say_what_a_loop_over_documents_says(seed):
    lengths, offsets = draw(seed)
    packing = Packing.from_offsets(offsets)
    assert packing.offsets == tuple(offsets)
    assert packing.lengths == tuple(lengths)
    assert (packing.documents, packing.tokens, packing.max_length) == (len(lengths), sum(lengths), max(lengths))
    assert packing.cu_seqlens.dtype == packing.chunk_table.dtype == torch.int32
    assert packing.cu_seqlens.tolist() == offsets
    assert packing.document_ids.tolist() == [n for n, length in enumerate(lengths) for _ in range(length)]
    assert packing.positions.tolist() == [t for length in lengths for t in range(length)]
    chunks = [[n, c] for n, length in enumerate(lengths) for c in range((length + CHUNK - 1) // CHUNK)]
    assert packing.chunk_table.tolist() == chunks
    assert packing.chunk_table.shape == (len(chunks), 2)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 3, 7],
        (0, 3, 7),
        range(0, 8, 7),
        np.array([0, 3, 7]),
        [np.int64(0), np.int32(7)],
        torch.tensor([0, 3, 7]),
        torch.tensor([0, 3, 7], dtype=torch.int32),
        torch.tensor([0, 3, 3, 7], dtype=torch.uint8),
    ],
    ids=lambda offsets: type(offsets).__name__,
)
def test_any_row_of_whole_numbers_on_the_host_is_read(offsets):
    packing = Packing.from_offsets(offsets)
    assert packing.offsets == tuple(int(offset) for offset in offsets)
    assert all(type(offset) is int for offset in packing.offsets)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], "0 offset given, at least 2 are needed"),
        ([0], "1 offset given"),
        ([1, 5], "must start at 0, got 1; prepend 0"),
        ([-1, 5], "must start at 0, got -1"),
        ([0, 5, 4], "never fall, but offset 1 is 5 and the next is 4"),
        ([0, 2**31], "2147483648 tokens exceed the limit"),
        ([0, 5.0], "must be whole numbers, got 5.0"),
        ([0, True], "must be whole numbers, got True"),
        ([0, "5"], "must be whole numbers, got '5'"),
        (torch.tensor([0.0, 5.0]), "must be whole numbers, got torch.float32"),
        (torch.tensor([False, True]), "must be whole numbers, got torch.bool"),
        (torch.tensor([[0, 5]]), r"must be one row of numbers, got the shape \[1, 2\]"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "must be on the host, got a tensor on meta"),
    ],
)
def test_offsets_that_break_the_contract_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        Packing.from_offsets(offsets)


def test_the_door_of_an_op_reads_a_packing_raw_offsets_or_none():
    packing = Packing.from_offsets([0, 2, 5])
    assert as_packing(None, batch=3, tokens=5, op="op") is None
    assert as_packing(packing, batch=1, tokens=5, op="op") is packing
    assert as_packing([0, 2, 5], batch=1, tokens=5, op="op").offsets == (0, 2, 5)


def test_the_door_of_an_op_refuses_other_batches_and_other_lengths():
    with pytest.raises(ValueError, match="op: packed documents are laid end to end in one row, but the batch is 2"):
        as_packing([0, 5], batch=2, tokens=5, op="op")
    with pytest.raises(ValueError, match="op: the offsets end at 5, but there are 6 tokens; an unused tail"):
        as_packing([0, 5], batch=1, tokens=6, op="op")


def test_a_packing_cannot_be_changed_and_moves_with_its_tables():
    packing = Packing.from_offsets([0, 2, 70])
    with pytest.raises(AttributeError):
        packing.offsets = (0, 70)
    moved = packing.to("meta", non_blocking=True)
    assert moved.offsets == packing.offsets
    assert moved.cu_seqlens.device.type == moved.chunk_table.device.type == "meta"


@pytest.mark.gpu
def test_reading_a_packing_on_cuda_never_waits_for_the_device():
    packing = Packing.from_offsets([0, 2, 2, 70]).to("cuda", non_blocking=True)
    with no_waits():
        ids, positions, longest = packing.document_ids, packing.positions, packing.max_length
    assert ids.tolist() == [0] * 2 + [2] * 68
    assert positions.tolist() == [0, 1, *range(68)]
    assert longest == 68
