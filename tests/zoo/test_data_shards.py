"""zoo data: what prepare writes, that it goes on where it was killed, and what check and show say of it."""

import errno
import gzip
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zoo.cli import main
from zoo.data import prepare as preparation
from zoo.data.corpus import split_name
from zoo.data.prepare import prepare
from zoo.data.shards import INDEX, check_sizes, find_problems, read_index
from zoo.data.sources import list_parts, normalise
from zoo.data.tokenizer import load_tokenizer
from zoo.errors import UserError

SHARES = {"val_share": 0.2, "test_share": 0.1}


@pytest.fixture
def dice():
    seed = random.SystemRandom().randrange(2**32)
    print(f"texts drawn with seed {seed}")
    return random.Random(seed)


def draw(dice, n=60):
    return [f"{i} " + "".join(dice.choice("abc é\n") for _ in range(dice.randrange(90))) for i in range(n)]


def jsonl(texts, key="text"):
    return "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def documents_of(folder):
    """(split, ids) of every document, shard by shard, read by hand."""
    index = read_index(folder)
    for shard in index.shards:
        for name, split in shard.splits.items():
            ids = np.fromfile(folder / split.files["tokens"].name, index.dtype)
            starts = np.fromfile(folder / split.files["starts"].name, "<i8")
            for a, b in itertools.pairwise(starts):
                assert ids[a] == index.tokenizer["separator"]
                yield name, ids[a + 1 : b].tolist()


def texts_of(folder):
    index = read_index(folder)
    decode = load_tokenizer(index.tokenizer["file"], folder).decode
    return [(name, decode(ids)) for name, ids in documents_of(folder)]


def expected(texts):
    """The same from the texts themselves, whatever the shards."""
    kept = [text for text in map(normalise, texts) if text]
    return sorted((split_name(text, val_fraction=0.2, test_fraction=0.1), text) for text in kept)


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def refused(match, *args, **settings):
    with pytest.raises(UserError, match=match) as caught:
        prepare(*args, **settings)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------ what is written
def test_every_document_is_in_the_split_of_its_content_and_every_shard_is_filled(tmp_path, dice):
    texts = [*draw(dice), "", " \n", "\ufeffends\r\nare\rnormal"]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    seen = []
    index = prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", shard_tokens=300, report=seen.append, **SHARES)
    assert sorted(texts_of(tmp_path / "out")) == expected(texts)
    assert index == read_index(tmp_path / "out")
    assert index.complete
    assert len(index.shards) > 3
    for shard in index.shards[:-1]:
        assert 300 <= sum(split.tokens for split in shard.splits.values()) < 300 + 200
    counts = index.counts()
    kept = [text for _, text in expected(texts)]
    assert sum(count["documents"] for count in counts.values()) == seen[-1].documents == len(kept)
    assert sum(count["bytes"] for count in counts.values()) == sum(len(text.encode()) for text in kept)
    assert all(count["tokens"] == count["bytes"] + count["documents"] for count in counts.values())
    assert (seen[-1].share, seen[-1].shards) == (1.0, len(index.shards))
    for _, file in index.files():
        stored = (tmp_path / "out" / file.name).read_bytes()
        assert (len(stored), hashlib.sha256(stored).hexdigest()) == (file.size, file.sha256)
    assert list(find_problems(tmp_path / "out", index)) == []


def test_files_of_every_kind_give_the_same_documents(tmp_path, dice):
    texts = draw(dice, 30)
    folder = tmp_path / "in"
    folder.mkdir()
    lines, half = jsonl(texts), len(texts) // 2
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[:half])))
    (folder / "b.txt").write_text(texts[half], encoding="utf-8")
    (folder / "c.txt.gz").write_bytes(gzip.compress(texts[half + 1].encode()))
    (folder / "d.jsonl").write_bytes(b"\n" + jsonl(texts[half + 2 :]))
    (folder / "e.log").write_text("not this one")
    prepare(str(folder), tmp_path / "out", **SHARES)
    assert sorted(texts_of(tmp_path / "out")) == expected(texts)
    (tmp_path / "f.jsonl").write_bytes(lines.replace(b'"text"', b'"body"'))
    prepare(str(tmp_path / "f.jsonl"), tmp_path / "two", text_key="body", **SHARES)
    assert sorted(texts_of(tmp_path / "two")) == expected(texts)
    refused(r"line 1 is not an object.*its keys: body\); name the field", str(tmp_path / "f.jsonl"), tmp_path / "three")


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one\u2028two\x85three"]))
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", val_share=0)
    assert texts_of(tmp_path / "out") == [("train", "one\u2028two\x85three")]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_reading_goes_on_at_any_document_and_knows_how_far_it_is(tmp_path, dice, ending):
    texts, path = draw(dice, 40), tmp_path / f"a{ending}"
    if ending == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"id": range(40), "text": texts}), path, row_group_size=7)
    elif ending == ".jsonl.zst":
        compressor = pytest.importorskip("zstandard").ZstdCompressor()
        path.write_bytes(compressor.compress(jsonl(texts[:9])) + compressor.compress(jsonl(texts[9:])))
    else:
        path.write_bytes(gzip.compress(jsonl(texts)) if ending == ".jsonl.gz" else jsonl(texts))
    (part,) = list_parts(str(path))
    for skip in [0, 1, 40, *dice.sample(range(40), 5)]:
        found = list(part.documents(skip))
        assert [text for text, _ in found] == texts[skip:]
        read = [places for _, places in found]
        assert read == sorted(read)
        assert not read or read[-1] == part.size


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_damaged_file_is_named(tmp_path, dice, ending):
    path, whole = tmp_path / f"a{ending}", jsonl(draw(dice, 200))
    if ending == ".jsonl.zst":
        whole = pytest.importorskip("zstandard").ZstdCompressor().compress(whole)
    elif ending == ".parquet":
        pytest.importorskip("pyarrow")
    else:
        whole = gzip.compress(whole)
    path.write_bytes(whole[:-20])
    refused(r"a\.(jsonl|parquet).*fetch it again|no readable Parquet", str(path), tmp_path / "out")
    path.write_bytes(b"something else\n" * 9)
    refused(r"a\.(jsonl|parquet).*fetch it again|no readable Parquet", str(path), tmp_path / "two")


def test_a_saved_data_set_is_read_and_its_splits_are_asked_for(tmp_path, dice):
    datasets = pytest.importorskip("datasets")
    texts = draw(dice, 30)
    rows = datasets.Dataset.from_dict({"text": texts, "other": list(range(30))})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": rows, "validation": rows.select(range(3))}).save_to_disk(str(tmp_path / "both"))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.jsonl").write_bytes(jsonl(texts))
    for n, name in enumerate(["saved", "both", "plain"]):
        source = str(tmp_path / name) if name != "plain" else f"hf:{tmp_path / name}"
        prepare(source, tmp_path / f"out{n}", shard_tokens=300, **SHARES)
        assert sorted(texts_of(tmp_path / f"out{n}")) == expected(texts)
    prepare(f"hf:{tmp_path / 'both'}:validation", tmp_path / "few", **SHARES)
    assert sorted(texts_of(tmp_path / "few")) == expected(texts[:3])
    refused("names a configuration or a split", f"hf:{tmp_path / 'saved'}:train", tmp_path / "x")
    refused("has no split 'dev', its splits are train, validation", f"hf:{tmp_path / 'both'}:dev", tmp_path / "x")
    refused(
        "has no column 'body', its columns are text, other", str(tmp_path / "saved"), tmp_path / "x", text_key="body"
    )


def test_absent_libraries_are_named_with_their_extra(tmp_path, monkeypatch):
    for library, source, extra in [
        ("pyarrow", "a.parquet", "parquet"),
        ("zstandard", "a.jsonl.zst", "zstd"),
        ("datasets", "hf:someone/texts", "datasets"),
    ]:
        monkeypatch.setitem(sys.modules, library, None)
        (tmp_path / "a.parquet").write_bytes(b"x")
        (tmp_path / "a.jsonl.zst").write_bytes(b"x")
        name = source if source.startswith("hf:") else str(tmp_path / source)
        refused(
            rf"`{library}` package, which is not installed; `pip install 'hybrid-zoo\[{extra}\]'`", name, tmp_path / "o"
        )
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    refused(r"hybrid-zoo\[tiktoken\]", "excerpt", tmp_path / "o", tokenizer="tiktoken:cl100k_base")


# ----------------------------------------------------------------------------------------------------------- tokenizers
def bpe_file(path, texts):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(path))
    return str(path)


def rank_file(path):
    """A .tiktoken file of all bytes and a few pairs."""
    import base64

    pieces = [*(bytes([byte]) for byte in range(256)), b"ab", b"bc", b"abc", b" a", "é".encode()]
    path.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)))
    return f"tiktoken:{path}"


def test_a_tokenizers_file_goes_with_its_shards_and_every_token_counts_its_bytes(tmp_path, dice):
    texts = draw(dice)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    name = bpe_file(tmp_path / "bpe.json", texts)
    index = prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=name, shard_tokens=300, **SHARES)
    assert (tmp_path / "out" / index.tokenizer["file"]).read_bytes() == (tmp_path / "bpe.json").read_bytes()
    assert sorted(texts_of(tmp_path / "out")) == expected(texts)
    assert index.dtype == np.dtype("<u2")
    for shard in index.shards:
        for split in shard.splits.values():
            widths = split.open(tmp_path / "out", "widths", index.dtype)
            ids = split.open(tmp_path / "out", "tokens", index.dtype)
            assert widths.dtype == np.uint8
            assert int(widths.sum()) == split.bytes
            assert ((widths == 0) == (ids == index.tokenizer["separator"])).all()
    assert list(find_problems(tmp_path / "out", index)) == []


def test_a_tiktoken_file_encodes_and_a_large_vocabulary_takes_four_bytes(tmp_path, dice, monkeypatch):
    pytest.importorskip("tiktoken")
    texts = [*draw(dice), "it says <|endoftext|> and abcabc"]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    name = rank_file(tmp_path / "small.tiktoken")
    refused("does not say how text is cut", "excerpt", tmp_path / "out", tokenizer=name)
    index = prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=name + "@cl100k_base", **SHARES)
    assert (index.tokenizer["vocab_size"], index.tokenizer["separator"]) == (262, 261)
    assert sorted(texts_of(tmp_path / "out")) == expected(texts)
    assert list(find_problems(tmp_path / "out", index)) == []
    other = prepare("excerpt", tmp_path / "two", tokenizer=name + "@o200k_base", val_share=0)
    assert other.tokenizer["identity"] != index.tokenizer["identity"]
    with pytest.raises(UserError, match=r"no \.tiktoken file"):
        load_tokenizer(f"tiktoken:{tmp_path / 'a.jsonl'}@cl100k_base")
    monkeypatch.setattr(preparation, "id_dtype", lambda vocab_size: np.dtype("uint32"))
    wide = prepare(str(tmp_path / "a.jsonl"), tmp_path / "wide", tokenizer=name + "@cl100k_base", **SHARES)
    assert wide.dtype == np.dtype("<u4")
    assert texts_of(tmp_path / "wide") == texts_of(tmp_path / "out")


# ------------------------------------------------------------------------------------------------------------- going on
# Starts a preparation again and again, kills it after a moment, and looks at what it left; one import serves all. On a
# machine so fast that it ends before it was killed a few times, it begins anew and kills sooner.
KILLS = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from zoo.data.prepare import prepare
from zoo.data.shards import INDEX, find_problems, read_index

source, out, tokenizer, dice = sys.argv[1], Path(sys.argv[2]), sys.argv[3], random.Random(int(sys.argv[4]))
longest = 0.4


def look(kept, stages):
    index = read_index(out)
    problems = [problem for problem in find_problems(out, index) if "not finished" not in problem]
    assert not problems, problems
    stages.add(len(index.shards))
    for _, file in index.files():
        stat = os.stat(out / file.name)
        assert kept.setdefault(file.name, (stat.st_ino, stat.st_mtime_ns)) == (stat.st_ino, stat.st_mtime_ns)


def kill_until_done():
    global longest
    kept, stages, kills, done = {}, set(), 0, False
    while not done:
        child = os.fork()
        if not child:
            prepare(source, out, tokenizer=tokenizer, shard_tokens=5000, val_share=0.2, test_share=0.1, command="c")
            os._exit(0)
        time.sleep(dice.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        done = os.waitpid(child, 0)[1] == 0
        kills += not done
        longest *= 1.03  # a slow machine must get somewhere as well
        if (out / INDEX).exists():
            look(kept, stages)
    return kills, len(stages)


kills, stages = kill_until_done()
while kills < 3 or stages < 3:
    shutil.rmtree(out)
    longest *= 0.6
    kills, stages = kill_until_done()
print(json.dumps([kills, stages]))
"""


@pytest.mark.parametrize("tokenizer", ["byte", "a file"])
def test_killed_at_any_moment_it_goes_on_behind_the_last_whole_shard_to_the_same_bytes(tmp_path, dice, tokenizer):
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.jsonl").write_bytes(jsonl([*draw(dice, 400), ""]))
    if tokenizer == "a file":
        tokenizer = bpe_file(tmp_path / "bpe.json", draw(dice))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    prepare(str(folder), straight, tokenizer=tokenizer, shard_tokens=5000, command="c", **SHARES)
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [str(folder), str(killed), tokenizer, str(dice.randrange(1000))]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kills, stages = json.loads(done.stdout)
    assert kills >= 3
    assert stages >= 3, "no kill fell between two shards"
    assert content(killed) == content(straight)


def test_a_finished_folder_is_left_as_it_is_and_others_are_refused_with_both_values(tmp_path, dice, monkeypatch):
    texts = draw(dice)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    source, out = str(tmp_path / "a.jsonl"), tmp_path / "out"
    monkeypatch.setattr(preparation, "_OpenShard", stopping(preparation._OpenShard, after=2))
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, shard_tokens=300, **SHARES)
    monkeypatch.undo()
    begun = read_index(out)
    assert (len(begun.shards), begun.complete) == (2, False)
    with pytest.raises(UserError, match=r"not finished, it holds 2 shards"):
        check_sizes(out, begun)
    name = bpe_file(tmp_path / "bpe.json", texts)
    refused("tokenizer 'byte-257', but 'tokenizers-290-", source, out, tokenizer=name, shard_tokens=300, **SHARES)
    refused("shard_tokens 300, but 400 is given", source, out, shard_tokens=400, **SHARES)
    refused("val_share 0.2, but 0.3 is given", source, out, shard_tokens=300, val_share=0.3, test_share=0.1)
    (tmp_path / "a.jsonl").write_bytes(jsonl([*texts[:-1], "another"]))
    refused("source '1 files, .*' is given", source, out, shard_tokens=300, **SHARES)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    prepare(source, out, shard_tokens=300, **SHARES)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    prepare(source, out, shard_tokens=300, **SHARES)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert sorted(texts_of(out)) == expected(texts)


def stopping(made, after):
    """An open shard whose user loses patience when shard ``after`` is to be closed."""

    class Stopping(made):
        def close(self, out):
            if len(self._index.shards) == after:
                raise KeyboardInterrupt
            return super().close(out)

    return Stopping


def test_a_full_disk_is_named_and_leaves_whole_shards(tmp_path, dice, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(draw(dice)))
    calls = itertools.count()

    def full(descriptor):
        if next(calls) == 21:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preparation.os, "fsync", full)
    refused(
        "No space left on device; whole shards.*make room, then run",
        str(tmp_path / "a.jsonl"),
        tmp_path / "out",
        shard_tokens=300,
    )
    monkeypatch.undo()
    index = read_index(tmp_path / "out")
    assert index.shards
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert [p for p in find_problems(tmp_path / "out", index) if "not finished" not in p] == []
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", shard_tokens=300)
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "straight", shard_tokens=300)
    assert content(tmp_path / "out") == content(tmp_path / "straight")


def test_two_at_once_and_a_folder_of_other_things_are_refused(tmp_path, dice):
    (tmp_path / "a.jsonl").write_bytes(jsonl(draw(dice)))

    def inside(progress):
        refused("another process prepares", str(tmp_path / "a.jsonl"), tmp_path / "out")

    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", report=inside)
    refused("holds other files, such as 'a.jsonl'", "excerpt", tmp_path)
    refused("shard_tokens is 0", "excerpt", tmp_path / "x", shard_tokens=0)
    refused("val_share 1.0", "excerpt", tmp_path / "x", val_share=1.0)
    (tmp_path / "blank.txt").write_text(" \n")
    refused("holds no text", str(tmp_path / "blank.txt"), tmp_path / "x")
    refused("cannot make the folder.*Not a directory", "excerpt", tmp_path / "blank.txt" / "x")


# ------------------------------------------------------------------------------------------------------------- the verb
def test_the_verb_prepares_shows_and_checks(tmp_path, capsys):
    out = str(tmp_path / "out")
    words = ["data", "prepare", "excerpt", "--out", out, "--shard_tokens", "60000", "--test_share", "0.1"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "176 documents" in shown.out
    assert main(["data", "show", out]) == 0
    assert shown.out.endswith(capsys.readouterr().out), "prepare ends with what show prints"
    index = read_index(Path(out))
    assert index.command == (
        f"zoo data prepare excerpt --out {out} --tokenizer byte --shard_tokens 60000 --text_key text --test_share 0.1"
    )
    assert main(["data", "check", out]) == 0
    assert "files are as they were written" in capsys.readouterr().out
    broken, gone = index.shards[0].splits["train"].files["tokens"], index.shards[1].splits["train"].files["starts"]
    with (tmp_path / "out" / broken.name).open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    (tmp_path / "out" / gone.name).unlink()
    assert main(["data", "check", out]) == 1
    said = capsys.readouterr().out
    assert f"{broken.name} was changed: its SHA-256 begins" in said
    assert f"{gone.name}: No such file" in said
    assert "problems: 2" in said


def test_an_index_that_is_missing_cut_or_changed_is_refused(tmp_path, capsys):
    assert main(["data", "show", str(tmp_path)]) == 2
    assert "holds no index.json; make shards with `zoo data prepare" in capsys.readouterr().err
    prepare("excerpt", tmp_path / "out")
    path = tmp_path / "out" / INDEX
    whole = path.read_text()
    for broken, match in [
        (whole[: len(whole) // 2], "is no index of shards"),
        (whole.replace('"separator": 256', '"separator": 255'), "its hash differs"),
        (whole.replace("zoo-shards-1", "zoo-shards-9"), "has the schema 'zoo-shards-9'"),
        ("[]", "is no index of shards"),
    ]:
        path.write_text(broken)
        with pytest.raises(UserError, match=match):
            read_index(tmp_path / "out")
