"""TokenData: documents, splits, rows, batches, and a position that survives everything."""

import hashlib
import itertools
import json
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from zoo.data import TaskData, TokenData
from zoo.data.corpus import SPLITS, build_corpus, split_name
from zoo.data.loader import BatchShape, TrainLoader
from zoo.data.rows import Layout, TextStream
from zoo.data.sources import cut, normalise, read_documents
from zoo.data.tokenizer import ByteTokenizer

SEP = 256


@pytest.fixture
def dice():
    seed = random.SystemRandom().randrange(2**32)
    print(f"shapes drawn with seed {seed}")
    return random.Random(seed)


def words(dice, n=40):
    """``n`` different short documents, some of them not ASCII, drawn again until no split is empty."""
    texts = [f"{i} " + "".join(dice.choice("abc é\n") for _ in range(dice.randrange(60))).strip() for i in range(n)]
    texts = [text.strip() for text in texts]
    splits = {split_name(text, val_fraction=0.2, test_fraction=0.2) for text in texts}
    return texts if len(splits) == 3 else words(dice, n)


def data(tmp_path, texts, **settings):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    defaults = {"seq_len": 16, "batch_tokens": 64, "val_fraction": 0.2, "test_fraction": 0.2}
    return TokenData(str(path), **{**defaults, **settings})


def documents_of(batch, seq_len):
    """(input ids, labels) of every piece that a batch keeps apart from the others."""
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    offsets = batch["packing"].offsets if batch["packing"] else range(0, len(ids) + 1, seq_len)
    return [(ids[a:b].tolist(), labels[a:b].tolist()) for a, b in itertools.pairwise(offsets)]


# ------------------------------------------------------------------------------------------------ documents and splits
def test_line_ends_blanks_empty_texts_and_duplicates_are_gone(tmp_path):
    texts = ["\ufeffone\r\ntwo\rthree \n", "one\ntwo\nthree", "  \n", "other"]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    assert read_documents(str(path)) == ["one\ntwo\nthree", "other"]


def test_long_texts_are_cut_at_the_next_blank_line_and_nothing_else_is_lost(dice):
    text = normalise("\n\n".join("é" * dice.randrange(1, 50) + "\nx" for _ in range(200)))
    limit = dice.randrange(1, 400)
    pieces = cut(text, limit)
    assert "\n\n".join(pieces) == text
    for piece in pieces[:-1]:
        assert len(piece.encode()) >= limit
        assert "\n\n" not in piece.encode()[limit:].decode(errors="replace")
    assert cut("no blank line " * 100, 10) == [("no blank line " * 100).strip()]


def test_a_folder_is_read_whole_in_the_order_of_its_paths_and_by_its_endings(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("first")
    (tmp_path / "c.txt").write_text("second")
    (tmp_path / "a.log").write_text("third")
    assert read_documents(str(tmp_path)) == ["first", "second"]
    assert read_documents(str(tmp_path), endings=(".log",)) == ["third"]
    assert read_documents([str(tmp_path / "c.txt"), str(tmp_path)]) == ["second", "first"]


def test_a_documents_split_follows_from_its_content_alone(tmp_path, dice):
    texts = words(dice, 200)
    for text in texts[:5]:
        share = int.from_bytes(hashlib.sha256(b"zoo-split-1\0" + text.encode()).digest()[:8], "big") / 2**64
        expected = "test" if share < 0.2 else "val" if share < 0.5 else "train"
        assert split_name(text, val_fraction=0.3, test_fraction=0.2) == expected
    corpus = build_corpus(texts, ByteTokenizer(), val_fraction=0.3, test_fraction=0.2)
    shuffled = build_corpus(dice.sample(texts, len(texts)), ByteTokenizer(), val_fraction=0.3, test_fraction=0.2)
    assert corpus.content_hash == shuffled.content_hash
    decode = ByteTokenizer().decode
    for name in SPLITS:
        split = corpus.splits[name]
        np.testing.assert_array_equal(split.tokens, shuffled.splits[name].tokens)
        members = [decode(split.document(n)) for n in range(split.documents)]
        expected = {text for text in texts if split_name(text, val_fraction=0.3, test_fraction=0.2) == name}
        assert len(members) == len(expected)
        assert set(members) == expected
    assert sum(corpus.splits[name].bytes for name in SPLITS) == sum(len(text.encode()) for text in texts)


def test_a_byte_limit_keeps_a_share_of_every_split(dice):
    texts = words(dice, 2000)
    whole = build_corpus(texts, ByteTokenizer(), val_fraction=0.2, test_fraction=0.2)
    total = sum(whole.splits[name].bytes for name in SPLITS)
    half = build_corpus(texts, ByteTokenizer(), val_fraction=0.2, test_fraction=0.2, limit_bytes=total // 2)
    kept = {name: half.splits[name].bytes / whole.splits[name].bytes for name in SPLITS}
    assert total // 2 - 100 <= sum(half.splits[name].bytes for name in SPLITS) <= total // 2
    assert all(0.35 < share < 0.65 for share in kept.values()), kept


def test_the_manifest_counts_what_is_there():
    manifest = TokenData(seq_len=128, batch_tokens=1024).manifest()
    assert json.loads(json.dumps(manifest)) == manifest
    assert manifest["split_salt"] == "zoo-split-1"
    for counts in manifest["splits"].values():
        assert counts["documents"] > 10
        assert counts["tokens"] == counts["bytes"] + counts["documents"]
    assert 200_000 < sum(counts["bytes"] for counts in manifest["splits"].values()) < 300_000


def test_the_standard_library_is_read_and_split():
    manifest = TokenData("stdlib", seq_len=128, batch_tokens=1024).manifest()
    assert sum(counts["bytes"] for counts in manifest["splits"].values()) > 5_000_000
    assert all(counts["documents"] >= 10 for counts in manifest["splits"].values())


# ------------------------------------------------------------------------------------------------------ what a batch is
@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_every_label_is_the_next_token_of_the_same_document(tmp_path, dice, layout):
    module = data(tmp_path, words(dice), layout=layout, data_seed=dice.randrange(100))
    split = module.corpus.splits["train"]
    texts = {(*split.document(n).tolist(), SEP) for n in range(split.documents)}
    windows = {text[a:b] for text in texts for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
    loader = module.train_dataloader()
    for step in range(dice.randrange(20), 30):
        batch = loader.batch(step)
        for ids, labels in documents_of(batch, 16):
            assert tuple(labels) in windows
            assert ids[1:] == labels[:-1]
            assert SEP not in ids[1:], "a document begins inside a piece"
            assert SEP not in labels[:-1], "a document ends inside a piece"
        assert batch["tokens"] == 64
        assert batch["bytes"] == int((batch["labels"] != SEP).sum())
        assert (batch["packing"] is None) == (batch["input_ids"].shape == (4, 16))


def test_the_end_of_a_document_and_its_first_token_are_predicted_inside_it(tmp_path):
    texts = [f"{i:02d}" for i in range(60)]
    module = data(tmp_path, texts, seq_len=3, batch_tokens=6, doc_mask=True)
    batch = module.train_dataloader().batch(0)
    assert batch["packing"] is None, "each document fills a row"
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        assert [ids[0], labels[-1]] == [SEP, SEP]
        assert bytes(labels[:-1]).decode() in texts


def test_without_document_masks_only_rows_are_kept_apart(tmp_path, dice):
    module = data(tmp_path, words(dice), doc_mask=False)
    assert all(batch["packing"] is None for batch in module.train_dataloader())
    packed = data(tmp_path, words(dice), doc_mask=False, layout="packed").train_dataloader().batch(0)
    assert packed["packing"].offsets == (0, 16, 32, 48, 64)


def test_dense_and_packed_layouts_hold_the_same_tokens(tmp_path, dice):
    texts = words(dice)
    dense, packed = (data(tmp_path, texts, layout=layout).train_dataloader() for layout in ("auto", "packed"))
    for _, a, b in zip(range(20), dense, packed):
        for key in ("input_ids", "labels"):
            torch.testing.assert_close(a[key].flatten(), b[key].flatten(), rtol=0, atol=0)
        inner = set(b["packing"].offsets) - {0, 16, 32, 48, 64}
        assert (a["packing"] is None) == (not inner)


def test_a_tokenizer_file_trains_and_counts_bytes(tmp_path, dice):
    tokenizers = pytest.importorskip("tokenizers")
    texts = words(dice, 60)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(tmp_path / "bpe.json"))
    module = data(tmp_path, texts, tokenizer=str(tmp_path / "bpe.json"))
    assert module.vocab_size == backend.get_vocab_size() > 256
    assert [module.tokenizer.decode(module.tokenizer.encode(text)) for text in texts] == texts
    assert [int(module.tokenizer.byte_counts(text).sum()) for text in texts] == [len(text.encode()) for text in texts]
    assert sum(batch["bytes"] for batch in module.val_dataloader()) == module.corpus.splits["val"].bytes
    assert module.tokenizer.identity.startswith("tokenizers-")


# ------------------------------------------------------------------------------------------------------------ the order
def taken(loader, batches):
    return [batch["input_ids"].flatten().tolist() for _, batch in zip(range(batches), loader)]


def test_one_seed_fixes_the_order_and_another_changes_it(tmp_path, dice):
    texts = words(dice)
    first, again, other = (data(tmp_path, texts, data_seed=seed).train_dataloader() for seed in (1, 1, 2))
    assert taken(first, 5) == taken(again, 5)
    assert first.order_hash == again.order_hash
    assert taken(other, 5) != taken(data(tmp_path, texts, data_seed=1).train_dataloader(), 5)
    assert other.order_hash != first.order_hash


def test_an_epoch_holds_every_row_once_and_the_next_one_in_another_order(tmp_path, dice):
    module = data(tmp_path, words(dice, 60), batch_tokens=16)
    loader, split = module.train_dataloader(), module.corpus.splits["train"]
    epochs = [taken(loader, len(loader)) for _ in range(3)]
    for rows in epochs:
        counts = np.bincount(np.concatenate(rows), minlength=257)
        left_out = np.bincount(split.tokens, minlength=257) - counts
        assert left_out.min() >= 0, "a token is fed twice in one epoch"
        assert left_out.sum() == len(split.tokens) % 16 < 16
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_text_shorter_than_a_batch_is_repeated(tmp_path):
    module = data(tmp_path, [f"{i:02d}" for i in range(20)], batch_tokens=16 * 50)
    assert len(module.train_dataloader()) == 1
    assert module.train_dataloader().batch(0)["tokens"] == 16 * 50


def test_ranks_and_micro_batches_share_a_step_in_disjoint_parts(tmp_path, dice):
    split = data(tmp_path, words(dice)).corpus.splits["train"]
    settings = {"seq_len": 8, "data_seed": 3, "content_hash": "x", "layout": Layout()}

    def loader(rank, world, accumulate):
        shape = BatchShape(seq_len=8, batch_tokens=96, rank=rank, world=world, accumulate=accumulate)
        return TrainLoader(TextStream(split, **settings), shape)

    whole = loader(0, 1, 1)
    steps = taken(whole, 4)
    for world, accumulate in [(1, 3), (2, 1), (3, 2), (4, 3)]:
        ranks = [loader(rank, world, accumulate) for rank in range(world)]
        by_rank = [taken(rank, 4 * accumulate) for rank in ranks]
        for step in range(4):
            micro = [by_rank[r][step * accumulate + m] for r in range(world) for m in range(accumulate)]
            assert list(itertools.chain(*micro)) == steps[step]
        assert {rank.order_hash for rank in ranks} == {whole.order_hash}


def test_a_state_continues_exactly_at_any_place_again_and_again(tmp_path, dice):
    module = data(tmp_path, words(dice, 20))
    straight, total = module.train_dataloader(), 40
    expected = []
    while len(expected) < total:
        expected += taken(straight, total - len(expected))
    got, state = [], None
    while len(got) < total:
        loader = module.train_dataloader()
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        got += taken(loader, min(dice.randrange(1, 9), total - len(got)))
        state = loader.state_dict()
    assert got == expected
    assert state == straight.state_dict()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"data_seed": 5}, "data_seed"), ({"batch_tokens": 32}, "batch_tokens"), ({"doc_mask": False}, "doc_mask")],
)
def test_a_state_of_another_run_is_refused_by_name(tmp_path, dice, change, named):
    texts = words(dice)
    state = data(tmp_path, texts).train_dataloader().state_dict()
    with pytest.raises(ValueError, match=f"trained with {named}"):
        data(tmp_path, texts, **change).train_dataloader().load_state_dict(state)
    with pytest.raises(ValueError, match="trained with content_hash"):
        data(tmp_path, [*texts, "one more"]).train_dataloader().load_state_dict(state)


# ----------------------------------------------------------------------------------------------------------- evaluation
def test_evaluation_counts_every_label_once_whatever_the_batch_or_the_ranks(tmp_path, dice):
    texts = words(dice, 80)
    module = data(tmp_path, texts)
    split = module.corpus.splits["val"]
    expected = sorted(np.roll(split.tokens, -1).tolist())
    for batch_rows, world in [(1, 1), (3, 1), (4, 2), (6, 3), (64, 4)]:
        module = data(tmp_path, texts, val_batch_tokens=16 * batch_rows)
        counted, text_bytes, lengths = [], 0, set()
        for rank in range(world if batch_rows % world == 0 else 1):
            loader = module.val_dataloader()
            loader.shape = BatchShape(seq_len=16, batch_tokens=16 * batch_rows, rank=rank, world=world)
            lengths.add(len(list(loader)))
            for batch in loader:
                labels = batch["labels"].flatten()
                counted += labels[labels != -100].tolist()
                text_bytes += batch["bytes"]
                assert batch["tokens"] == int((labels != -100).sum())
                assert batch["packing"] is None or batch["packing"].tokens == len(labels)
        assert sorted(counted) == expected
        assert text_bytes == split.bytes
        assert lengths == {len(loader)}


def test_some_validation_tokens_are_spread_over_the_whole_split(tmp_path, dice):
    texts = words(dice, 300)
    module = data(tmp_path, texts, val_tokens=100)
    rows = module.eval_rows()
    assert len(rows) == 6
    assert rows.chosen[-1] > 0.7 * len(rows.rows)
    counted = torch.cat([batch["labels"].flatten() for batch in module.val_dataloader()])
    assert counted[counted != -100].tolist() == module.eval_text("val").tolist()


def test_the_padding_behind_the_last_document_is_a_document_of_its_own(tmp_path, dice):
    module = data(tmp_path, words(dice), layout="packed", seq_len=50, batch_tokens=50)
    rows = module.eval_rows()
    last = rows.batch(np.array([len(rows) - 1]))
    tail = int((last["labels"] == -100).sum())
    assert tail == -rows.rows.filled % 50
    if tail:
        assert last["packing"].lengths[-1] == tail


@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_prediction_batches_say_whose_label_is_whose(tmp_path, dice, layout):
    module = data(tmp_path, words(dice, 80), layout=layout, val_batch_tokens=16 * dice.randrange(1, 5))
    split = module.corpus.splits["test"]
    found = {n: [] for n in [*range(split.documents), -1]}
    for batch in module.predict_dataloader():
        for n, label in zip(batch["documents"].flatten().tolist(), batch["labels"].flatten().tolist()):
            found[n].append(label)
    assert set(found.pop(-1)) <= {-100}
    assert found == {n: [*split.document(n).tolist(), SEP] for n in found}


# ------------------------------------------------------------------------------------------------------------ Lightning
class Recorder(pl.LightningModule):
    """A bigram model that writes down what it is fed, and is of no use otherwise."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(257, 257)
        self.fed, self.losses = [], []

    def step(self, batch):
        logits = self.table(batch["input_ids"]).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.fed.append(batch["input_ids"].flatten().tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        return self.step(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trainer(tmp_path, steps, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", save_last=True, every_n_train_steps=1, save_top_k=0)
    return pl.Trainer(max_steps=steps, max_epochs=-1, callbacks=[checkpoint], **{**quiet, **settings})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_resumes_anywhere_with_the_losses_of_a_run_never_stopped(tmp_path, dice, accumulate):
    texts = words(dice, 20)
    stops = [*sorted(dice.sample(range(1, 30), 3)), 30]
    torch.manual_seed(0)
    straight, module = Recorder(), data(tmp_path, texts)
    initial = {name: value.clone() for name, value in straight.state_dict().items()}
    trainer(tmp_path, 30, accumulate_grad_batches=accumulate).fit(straight, module)
    (tmp_path / "ckpt" / "last.ckpt").unlink()
    steps_a_pass = len(module.train_dataloader()) // accumulate
    assert steps_a_pass < 15, "the test must cross epochs"

    fed, losses, path = [], [], None
    for stop in stops:
        again = Recorder()
        again.load_state_dict(initial)
        trainer(tmp_path, stop, accumulate_grad_batches=accumulate).fit(again, data(tmp_path, texts), ckpt_path=path)
        fed, losses, path = fed + again.fed, losses + again.losses, tmp_path / "ckpt" / "last.ckpt"
    assert fed == straight.fed
    assert losses == straight.losses
    torch.load(path, weights_only=True)


def test_validation_does_not_change_what_training_sees(tmp_path, dice):
    texts = words(dice, 20)
    runs = []
    for settings in ({"limit_val_batches": 0}, {"val_check_interval": 3, "check_val_every_n_epoch": None}):
        torch.manual_seed(0)
        module = Recorder()
        trainer(tmp_path, 12, **settings).fit(module, data(tmp_path, texts))
        runs.append((module.fed, module.losses))
    assert runs[0] == runs[1]


def test_all_verbs_of_the_trainer_run(tmp_path, dice):
    module, model = data(tmp_path, words(dice, 20)), Recorder()
    run = trainer(tmp_path, 2)
    run.fit(model, module)
    run.validate(model, module)
    run.test(model, module)
    assert len(run.predict(model, module)) == len(module.test_dataloader())


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path, dice):
    module = data(tmp_path, words(dice))
    with pytest.raises(ValueError, match="trained with the tokenizer 'other'"):
        module.load_state_dict({**module.state_dict(), "tokenizer": "other"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_lightning_moves_batch_and_packing_to_the_device(tmp_path, dice):
    model = Recorder()
    trainer(tmp_path, 3, accelerator="gpu", devices=1).fit(model, data(tmp_path, words(dice), layout="packed"))
    batch = model.transfer_batch_to_device(
        data(tmp_path, words(dice), layout="packed").train_dataloader().batch(0), "cuda", 0
    )
    assert batch["packing"].cu_seqlens.is_cuda
    assert batch["input_ids"].is_cuda


# --------------------------------------------------------------------------------------------------------------- errors
def begin(module):
    module.prepare_data()
    module.setup("fit")
    module.train_dataloader()
    module.val_dataloader()


def refused(match, **settings):
    with pytest.raises(ValueError, match=match) as caught:
        begin(TokenData(**{"seq_len": 16, "batch_tokens": 64, **settings}))
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value) or "," in str(caught.value), "an error tells the rule and the cure"


def test_sizes_that_do_not_fit_are_refused():
    refused("seq_len is 1, but a row needs at least 2", seq_len=1)
    refused("batch_tokens is 40, no multiple of the row length 16; the next is 48", batch_tokens=40)
    refused("batch_tokens is 0.*the next is 16", batch_tokens=0)
    refused("val_batch_tokens is 17", val_batch_tokens=17)
    refused("val_tokens is 15", val_tokens=15)
    refused("data_seed is -1", data_seed=-1)
    refused("val_fraction 1.0", val_fraction=1.0)
    refused("document_bytes is 0", document_bytes=0)
    refused("has 219359 tokens, fewer than seq_len 1000000", seq_len=10**6, batch_tokens=10**6)
    with pytest.raises(ValueError, match="3 ranks x 1 micro-batches cannot share"):
        BatchShape(seq_len=16, batch_tokens=64, world=3)


def test_sources_that_cannot_be_read_are_refused(tmp_path):
    refused("no file or folder", source=str(tmp_path / "missing"))
    refused("list of sources is empty", source=[])
    (tmp_path / "empty").mkdir()
    refused("holds no file that ends in", source=str(tmp_path / "empty"))
    (tmp_path / "blank.txt").write_text(" \n\n ")
    refused("holds no text", source=str(tmp_path / "blank.txt"))
    (tmp_path / "binary.txt").write_bytes(b"ab\0cd")
    refused("is binary", source=str(tmp_path / "binary.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refused("not UTF-8: byte 3 is 0xe9", source=str(tmp_path / "latin.txt"))
    for line, match in [
        ("{", "line 1 is not"),
        ('{"a": 1}', "line 1 is not"),
        ("[1]", "line 1 is not"),
        ('{"text": 1}', "is a int"),
    ]:
        (tmp_path / "bad.jsonl").write_text(line)
        refused(match, source=str(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"text": "\\ud800"}')
    refused("half a surrogate pair", source=str(tmp_path / "bad.jsonl"))


def test_an_empty_split_is_refused_with_counts_and_a_cure(tmp_path):
    (tmp_path / "one.txt").write_text("a text")
    refused(r"no document falls into the split.*\d+ train, \d+ val, \d+ test", source=str(tmp_path / "one.txt"))
    refused("raise limit_bytes", limit_bytes=10)


def test_an_unknown_tokenizer_is_refused(tmp_path):
    refused("write `byte`", tokenizer="bites")
    (tmp_path / "bad.json").write_text("{}")
    refused("not a tokenizers JSON file", tokenizer=str(tmp_path / "bad.json"))
    with pytest.raises(ValueError, match=r"id 257 is outside 0\.\.256"):
        ByteTokenizer().decode([65, 257])


@pytest.mark.parametrize(
    ("module", "ids"),
    [(TokenData(seq_len=16, batch_tokens=64), 257), (TaskData(batch_tokens=36), 64)],
    ids=["text", "task"],
)
def test_a_model_without_the_ids_of_its_data_is_refused_before_training(tmp_path, module, ids):
    model = Recorder()
    model.save_hyperparameters({"vocab_size": ids - 1})
    with pytest.raises(ValueError, match=f"has {ids} ids, but the model's vocab_size is {ids - 1}"):
        trainer(tmp_path, 1).fit(model, module)
    assert not model.fed


def test_bytes_round_trip(dice):
    text = "".join(chr(dice.choice([65, 233, 0x4E2D, 0x1F600, 10])) for _ in range(50))
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode([SEP, *ids.tolist(), SEP]) == text
