"""zoo consolidate: one safetensors file of a checkpoint's weights."""

from __future__ import annotations

import argparse

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the verb's options."""
    parser.add_argument("checkpoint", metavar="PATH", help="a .ckpt file or folder, or a run's folder (its last.ckpt)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the new file, FILE.safetensors; FILE.json beside")
    parser.add_argument(
        "--dtype", default=None, choices=DTYPES, help="of the weights; decay rates stay float32 (default: as stored)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the file and say what it holds."""
    import torch

    from zoo.checkpoint import consolidate

    loaded = consolidate(args.checkpoint, args.out, dtype=None if args.dtype is None else getattr(torch, args.dtype))
    facts, counts = loaded.facts, loaded.model.parameter_counts()
    print(f"{args.out}: {facts['canonical']}, {counts.total:,} parameters, {facts['tokens_seen']:,} tokens seen")
    return 0
