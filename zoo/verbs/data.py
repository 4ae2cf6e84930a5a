"""zoo data: texts into token shards, and what is in them."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli import PartParser

if TYPE_CHECKING:
    from zoo.data.prepare import Progress
    from zoo.data.shards import Index

BAR = 30  # characters of the bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the parts and their options."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="{prepare,check,show}", parser_class=PartParser)
    prepare = parts.add_parser("prepare", description="encode texts into token shards; run again, it goes on")
    prepare.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="files or folders of text, .jsonl, .parquet; hf:NAME; a saved data set",
    )
    prepare.add_argument("--out", required=True, metavar="FOLDER", help="where the shards go")
    prepare.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="byte (default), a tokenizers JSON file, tiktoken:cl100k_base, or tiktoken:FILE.tiktoken",
    )
    prepare.add_argument("--shard_tokens", type=int, default=None, metavar="N", help="default 50,000,000")
    prepare.add_argument("--text_key", default="text", metavar="KEY", help="field or column of the text (default text)")
    prepare.add_argument("--val_share", type=float, default=None, metavar="P", help="of the documents, default 0.005")
    prepare.add_argument("--test_share", type=float, default=0.0, metavar="P", help="of the documents, default 0")
    prepare.add_argument("--endings", nargs="+", default=None, metavar="END", help="file names that count in a folder")
    for name, text in (("check", "compare every file with its checksum"), ("show", "what is in the shards")):
        part = parts.add_parser(name, description=text)
        part.add_argument("folder", metavar="FOLDER", help="what `zoo data prepare` wrote")


def run(args: argparse.Namespace) -> int:
    """Run one part. ``check`` exits with 1 if something is wrong."""
    if args.part == "prepare":
        return _prepare(args)
    from zoo.data.shards import read_index

    folder = Path(args.folder)
    index = read_index(folder)
    return _check(folder, index) if args.part == "check" else _show(folder, index)


def _prepare(args: argparse.Namespace) -> int:
    from zoo.data.prepare import ENDINGS, SHARD_TOKENS, VAL_SHARE, prepare

    with _bar() as report:
        index = prepare(
            args.source,
            args.out,
            tokenizer=args.tokenizer,
            shard_tokens=SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens,
            val_share=VAL_SHARE if args.val_share is None else args.val_share,
            test_share=args.test_share,
            text_key=args.text_key,
            endings=ENDINGS if args.endings is None else tuple(args.endings),
            command=_command(args),
            report=report,
        )
    return _show(Path(args.out), index)


def _check(folder: Path, index: Index) -> int:
    from zoo.data.shards import find_problems

    problems = 0
    for problem in find_problems(folder, index):
        print(problem, flush=True)
        problems += 1
    files = sum(1 for _ in index.files())
    print(f"{folder}: problems: {problems}" if problems else f"{folder}: {files} files are as they were written")
    return 1 if problems else 0


def _show(folder: Path, index: Index) -> int:
    from zoo.console import print_table

    rows = [
        (split, f"{count['documents']:,}", f"{count['tokens']:,}", f"{count['bytes']:,}")
        for split, count in index.counts().items()
    ]
    tokenizer, source = index.tokenizer, index.source
    ids = f"{tokenizer['vocab_size']:,} ids as {tokenizer['dtype']}, separator {tokenizer['separator']}"
    notes = [
        f"{folder}: {len(index.shards)} shards, {sum(f.size for _, f in index.files()):,} bytes, content "
        f"{index.content_hash}" + ("" if index.complete else "; NOT finished, run its command again"),
        f"tokenizer {tokenizer['identity']}: {ids}",
        f"source {' '.join(source['names'])}: {source['parts']:,} files, {source['bytes']:,} bytes",
        f"command {index.command}",
    ]
    print_table([("split", True), ("documents", False), ("tokens", False), ("text bytes", False)], rows, notes=notes)
    return 0


def _command(args: argparse.Namespace) -> str:
    """The command that makes these shards again."""
    words = ["zoo", "data", "prepare", *args.source]
    for name in ("out", "tokenizer", "shard_tokens", "text_key", "val_share", "test_share"):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, *(["--endings", *args.endings] if args.endings else [])])


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A line that shows how far it is, where the output is a terminal; else a line a shard."""
    from zoo.console import Console

    console, begun, shards = Console(stderr=True), time.perf_counter(), -1

    with console.status("reading the source") as status:

        def report(progress: Progress) -> None:
            nonlocal shards
            done = round(BAR * progress.share)
            seconds = time.perf_counter() - begun
            text = (
                f"{'━' * done}{'╌' * (BAR - done)} {progress.share:.0%}  {progress.shards} shards, "
                f"{progress.documents:,} documents, {progress.tokens:,} tokens, {seconds:.0f} s"
            )
            if console.is_terminal:
                status.update(text)
            elif progress.shards != shards:
                print(text, flush=True)
            shards = progress.shards

        yield report
