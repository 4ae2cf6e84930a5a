"""ShardData: the batches of shards, their order over epochs, ranks and interruptions, and shards that are not whole."""

import itertools
import json
import random
import time

import numpy as np
import pytest
import torch
import yaml

from zoo.data import ShardData
from zoo.data.loader import BatchShape, TrainLoader
from zoo.data.prepare import prepare
from zoo.data.shards import ShardedSplit, read_index
from zoo.data.shuffle import shuffled
from zoo.errors import UserError

SEP = 256


@pytest.fixture
def dice():
    seed = random.SystemRandom().randrange(2**32)
    print(f"shapes drawn with seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ninety short documents in shards so small that rows cross them."""
    root = tmp_path_factory.mktemp("text")
    words = random.Random(3)
    texts = [f"{i} " + "".join(words.choice("abc é\n") for _ in range(words.randrange(40))) for i in range(90)]
    (root / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    prepare(str(root / "a.jsonl"), root / "out", shard_tokens=150, val_share=0.2, test_share=0.2)
    return root / "out"


def data(folder, **settings):
    return ShardData(str(folder), **{"seq_len": 16, "batch_tokens": 64, **settings})


def whole(folder, split):
    """The ids of a split, read by hand, and where its documents begin."""
    index = read_index(folder)
    stored = [shard.splits[split] for shard in index.shards if split in shard.splits]
    ids = np.concatenate([np.fromfile(folder / s.files["tokens"].name, index.dtype) for s in stored])
    return ids, np.flatnonzero(ids == SEP)


def taken(loader, batches):
    return [batch["input_ids"].flatten().tolist() for _, batch in zip(range(batches), loader)]


def endless(loader, batches):
    found = []
    while len(found) < batches:
        found += taken(loader, batches - len(found))
    return found


# ------------------------------------------------------------------------------------------------------------- batches
def test_every_place_of_a_split_is_read_over_the_borders_of_shards(folder, dice):
    ids, starts = whole(folder, "train")
    split = ShardedSplit(folder, read_index(folder), "train")
    assert split.tokens == len(ids)
    for first, count in [(0, len(ids)), *((dice.randrange(len(ids)), dice.randrange(len(ids))) for _ in range(30))]:
        places = np.arange(first, first + count) % len(ids)
        np.testing.assert_array_equal(split.ids(first, count), ids[places])
        if count:
            assert split.starts(first, count).tolist() == np.flatnonzero(np.isin(places, starts)).tolist()
            numbers = np.searchsorted(starts, places, side="right") - 1
            assert split.documents(first, count).tolist() == numbers.tolist()


@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_every_label_is_the_next_token_of_the_same_document(folder, dice, layout):
    ids, starts = whole(folder, "train")
    texts = [(*ids[a + 1 : b].tolist(), SEP) for a, b in itertools.pairwise([*starts, len(ids)])]
    windows = {text[a:b] for text in texts for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
    loader = data(folder, layout=layout, data_seed=dice.randrange(100)).train_dataloader()
    for step in range(3 * len(loader)):
        batch = loader.batch(step)
        fed, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
        offsets = batch["packing"].offsets if batch["packing"] else range(0, 65, 16)
        assert set(range(0, 65, 16)) <= set(offsets)
        for a, b in itertools.pairwise(offsets):
            assert tuple(labels[a:b].tolist()) in windows
            assert fed[a + 1 : b].tolist() == labels[a : b - 1].tolist()
            assert SEP not in fed[a + 1 : b], "a document begins inside a piece"
        assert (batch["tokens"], batch["bytes"]) == (64, int((labels != SEP).sum()))


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_counts_every_label_once_whatever_the_batch_or_the_ranks(folder, split):
    ids, _ = whole(folder, split)
    expected = sorted(np.roll(ids, -1).tolist())
    stored = read_index(folder).counts()[split]
    for rows, world in [(1, 1), (3, 1), (4, 2), (64, 4)]:
        counted, text_bytes = [], 0
        for rank in range(world):
            loader = getattr(data(folder, val_batch_tokens=16 * rows), f"{split}_dataloader")()
            loader.shape = BatchShape(seq_len=16, batch_tokens=16 * rows, rank=rank, world=world)
            for batch in loader:
                labels = batch["labels"].flatten()
                counted += labels[labels != -100].tolist()
                text_bytes += batch["bytes"]
        assert (sorted(counted), text_bytes) == (expected, stored["bytes"])
    assert data(folder).eval_text(split).tolist() == np.append(ids[1:], SEP).tolist()
    assert data(folder).eval_bytes(split) == stored["bytes"]


def test_prediction_batches_say_whose_label_is_whose(folder):
    ids, starts = whole(folder, "test")
    found = {n: [] for n in range(-1, len(starts))}
    for batch in data(folder, layout="packed").predict_dataloader():
        for n, label in zip(batch["documents"].flatten().tolist(), batch["labels"].flatten().tolist()):
            found[n].append(label)
    assert set(found.pop(-1)) <= {-100}
    ends = [*starts[1:], len(ids)]
    assert found == {n: [*ids[a + 1 : b].tolist(), SEP] for n, (a, b) in enumerate(zip(starts, ends))}


def test_bytes_of_a_tokenizers_ids_are_counted(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    texts = [f"überall {n} mal {n * n} ist {n + 1}" for n in range(60)]
    backend.train_from_iterator(texts, trainer)
    backend.save(str(tmp_path / "bpe.json"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"tokenizer": str(tmp_path / "bpe.json"), "val_share": 0.3}
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", shard_tokens=90, **settings)
    module = data(tmp_path / "out", tokenizer=str(tmp_path / "bpe.json"))
    counts = module.manifest()["splits"]
    assert sum(batch["bytes"] for batch in module.val_dataloader()) == counts["val"]["bytes"]
    for batch in module.train_dataloader():
        labels = [label for label in batch["labels"].flatten().tolist() if label != module.tokenizer.separator]
        assert batch["bytes"] == sum(len(backend.id_to_token(label).encode()) for label in labels) > 0
    with pytest.raises(UserError, match=r"written with the tokenizer 'tokenizers-.*', but 'byte-257' is given"):
        data(tmp_path / "out", tokenizer="byte")


# ----------------------------------------------------------------------------------------------------------- the order
@pytest.mark.parametrize("count", [1, 2, 3, 17, 255, 256, 257, 5000])
def test_shuffling_gives_every_place_once_and_looks_like_chance(count):
    orders = [shuffled(np.arange(count), count, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(count))
    pieces = np.array_split(np.arange(count), 7)
    parts = [shuffled(piece, count, seed=0, epoch=0) for piece in pieces if len(piece)]
    np.testing.assert_array_equal(np.concatenate(parts), orders[0])
    if count >= 255:
        assert len({tuple(order) for order in orders}) == 4
        for order in [*orders, *(order[np.argsort(orders[0])] for order in orders[1:])]:
            assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 5 / np.sqrt(count)
            assert np.mean(np.abs(np.diff(order)) == 1) < 12 / count + 2 / np.sqrt(count) / 2


def test_an_epoch_holds_every_row_once_and_the_next_cuts_and_orders_them_anew(folder):
    ids, _ = whole(folder, "train")
    loader = data(folder, batch_tokens=16).train_dataloader()
    epochs = [taken(loader, len(loader)) for _ in range(3)]
    for rows in epochs:
        left_out = np.bincount(ids, minlength=257) - np.bincount(np.concatenate(rows), minlength=257)
        assert left_out.min() >= 0, "a token is fed twice in one epoch"
        assert left_out.sum() == len(ids) % 16
    assert len({tuple(sorted(map(tuple, rows))) for rows in epochs}) == 3, "epochs are cut at the same places"


def test_one_seed_fixes_the_order_and_another_changes_it(folder):
    first, again, other = (data(folder, data_seed=seed).train_dataloader() for seed in (1, 1, 2))
    assert taken(first, 5) == taken(again, 5)
    assert taken(other, 5) != taken(data(folder, data_seed=1).train_dataloader(), 5)
    assert first.order_hash == again.order_hash != other.order_hash


def test_a_state_continues_exactly_in_the_second_epoch_and_anywhere_else(folder, dice):
    straight, total = data(folder).train_dataloader(), 90
    assert len(straight) * 4 < total
    expected = endless(straight, total)
    middle = data(folder).train_dataloader()
    stop = len(straight) + len(straight) // 2
    endless(middle, stop)
    again = data(folder).train_dataloader()
    again.load_state_dict(json.loads(json.dumps(middle.state_dict())))
    assert endless(again, total - stop) == expected[stop:]
    assert again.state_dict() == straight.state_dict()
    got, state = [], None
    while len(got) < total:
        loader = data(folder).train_dataloader()
        if state is not None:
            loader.load_state_dict(state)
        got += taken(loader, min(dice.randrange(1, 9), total - len(got)))
        state = loader.state_dict()
    assert got == expected


def test_ranks_share_a_step_and_a_run_goes_on_with_more_of_them_or_fewer(folder):
    module = data(folder, batch_tokens=96)

    def loader(rank, world, accumulate=1, state=None):
        shape = BatchShape(seq_len=16, batch_tokens=96, rank=rank, world=world, accumulate=accumulate)
        made = TrainLoader(module.train_stream(), shape)
        if state is not None:
            made.load_state_dict(state)
        return made

    def union(worlds, steps):
        """Steps read by the ``worlds`` one after another, each rank's share behind the one before."""
        found, state = [], None
        for world, accumulate in worlds:
            ranks = [loader(rank, world, accumulate, state) for rank in range(world)]
            by_rank = [endless(rank, steps * accumulate) for rank in ranks]
            for step in range(steps):
                shares = [by_rank[r][step * accumulate + m] for r in range(world) for m in range(accumulate)]
                found.append(list(itertools.chain(*shares)))
            states = [rank.state_dict() for rank in ranks]
            assert all(other == states[0] for other in states)
            state = states[0]
        return found, state["order_hash"]

    steps = 2 * len(loader(0, 1)) // 3
    alone = union([(1, 1)] * 3, steps)
    for worlds in ([(2, 1), (1, 1), (2, 1)], [(1, 1), (2, 1), (3, 2)], [(1, 3), (6, 1), (1, 2)]):
        assert union(worlds, steps) == alone
    with pytest.raises(UserError, match="is 6 rows of 16, which 4 ranks x 1 micro-batches cannot share equally"):
        loader(0, 4)


def test_a_state_of_other_shards_is_refused_by_name(folder, tmp_path):
    state = data(folder).train_dataloader().state_dict()
    prepare("excerpt", tmp_path / "other", shard_tokens=50_000)
    with pytest.raises(UserError, match="trained with content_hash"):
        data(tmp_path / "other").train_dataloader().load_state_dict(state)
    with pytest.raises(UserError, match="trained with data_seed 0, but 5"):
        data(folder, data_seed=5).train_dataloader().load_state_dict(state)
    with pytest.raises(UserError, match="trained with the tokenizer 'other', but 'byte-257'"):
        data(folder).load_state_dict({"tokenizer": "other", "manifest": {}})


# ------------------------------------------------------------------------------------------------------ shards at fault
def test_shards_that_are_missing_cut_off_or_changed_are_refused_before_training(tmp_path, capsys):
    prepare("excerpt", tmp_path / "out", shard_tokens=100_000)
    index = read_index(tmp_path / "out")
    path = tmp_path / "out" / index.shards[1].splits["train"].files["tokens"].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(UserError, match=rf"{path.name} has {len(whole) - 7:,} bytes, but {len(whole):,} were written"):
        data(tmp_path / "out")
    path.unlink()
    with pytest.raises(UserError, match=f"{path.name}: No such file"):
        data(tmp_path / "out")
    path.write_bytes(whole[:100] + b"\7" + whole[101:])
    data(tmp_path / "out").prepare_data()
    with pytest.raises(UserError, match=rf"{path.name} was changed: its SHA-256 begins .* \(problems in .*: 1\)"):
        data(tmp_path / "out", verify="content").prepare_data()
    path.write_bytes(whole)
    data(tmp_path / "out", verify="content").prepare_data()
    with pytest.raises(UserError, match="no document in the split 'test'; prepare them with a larger --test_share"):
        data(tmp_path / "out").test_dataloader()
    with pytest.raises(UserError, match="tokens, fewer than seq_len 1000000"):
        data(tmp_path / "out", seq_len=10**6, batch_tokens=10**6).train_dataloader()
    with pytest.raises(UserError, match="batch_tokens is 40, no multiple of the row length 16"):
        data(tmp_path / "out", batch_tokens=40)


# ------------------------------------------------------------------------------------------------------------- training
def test_a_recipe_trains_on_shards_and_goes_on_with_the_losses_of_a_run_never_stopped(zoo, recipe, folder):
    settings = yaml.safe_load(recipe.read_text())
    settings["data"] = {"class_path": "zoo.data.ShardData", "init_args": {"folder": str(folder), "seq_len": 32}}
    settings["budget"] = {"tokens": 256 * 16, "batch_tokens": 256}
    recipe.write_text(yaml.safe_dump(settings))
    passes = 16 / len(data(folder, seq_len=32, batch_tokens=256).train_dataloader())
    assert passes > 2
    words = ["--model.pattern", "GA", "--checkpoint.every_n_train_steps", "5"]
    straight = zoo("fit", *words, root="straight")
    zoo("fit", *words, "--trainer.max_steps", "10", root="stopped")
    stopped = zoo("fit", *words, "--ckpt_path", "last", root="stopped")
    for name in ("train/loss", "val/loss", "val/bpb"):
        losses, again = ([row[name] for row in rows if name in row] for rows in (straight, stopped))
        assert losses, name
        assert again == losses, name
    kept = torch.load(recipe.parent / "stopped" / "last.ckpt", weights_only=True)
    assert kept["zoo"]["tokenizer"] == "byte-257"


@pytest.mark.slow
def test_reading_is_fast_enough_to_feed_a_gpu(tmp_path):
    """5 M tokens/s at the least on one core, packed batches of 16 x 4096; the figure is recorded in docs/data.md."""
    words = random.Random(0)
    text = "".join(words.choice("abcdefgh ") for _ in range(1200))
    lines = (json.dumps({"text": f"{n} {text[: words.randrange(100, 1200)]}"}) + "\n" for n in range(6000))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", shard_tokens=1_000_000)
    loader = data(tmp_path / "out", seq_len=4096, batch_tokens=65_536, layout="packed").train_dataloader()
    taken(loader, 3)
    best = 0.0
    for _ in range(5):  # the best of a few: the machine's other work is not ours to measure
        begun = time.perf_counter()
        tokens = sum(batch["tokens"] for _, batch in zip(range(20), loader))
        best = max(best, tokens / (time.perf_counter() - begun))
    documents = loader.batch(0)["packing"].documents
    print(f"{best / 1e6:.1f} M tokens/s, {documents} documents a batch")
    assert documents > 80
    assert best > 5e6
