"""zoo generate: continue a text from a checkpoint."""

from __future__ import annotations

import argparse
import sys

from zoo.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the verb's options."""
    parser.add_argument("--ckpt", required=True, metavar="PATH", help="a .ckpt file, or a run's folder (its last.ckpt)")
    parser.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    parser.add_argument("--max_new_tokens", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the most likely token (default 0.8)"
    )
    parser.add_argument("--top_k", type=int, default=None, metavar="K", help="draw among the K most likely tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument(
        "--tokenizer", default="byte", help="byte, or the tokenizers JSON file that the run used (default byte)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default cpu)")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    import torch

    from zoo.checkpoint import load_model
    from zoo.data.tokenizer import load_tokenizer
    from zoo.generate import generate

    if args.device.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"--device {args.device}: give cpu, cuda, or one GPU such as cuda:1")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {args.device}: no CUDA device is available here; leave the option out for the CPU")
    loaded = load_model(args.ckpt, device=args.device)
    tokenizer = load_tokenizer(args.tokenizer)
    if loaded.facts["tokenizer"] not in (None, tokenizer.identity):
        raise UserError(
            f"{args.ckpt} was trained with the tokenizer {loaded.facts['tokenizer']}, but {tokenizer.identity} is "
            "given; name "
            "the file that the run used: --tokenizer FILE"
        )
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt = [tokenizer.separator, *tokenizer.encode(text)]
    (new,) = generate(
        loaded.model,
        [prompt],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        stop_ids=(tokenizer.separator,),
    )
    print(text + tokenizer.decode([token for token in new if token != tokenizer.separator]))
    return 0
