"""Flags of the demo and of serve: how executors share the model, and what drafts for it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from deploy.local.launch import DEMO_MODEL
from executor.__main__ import main as executor

SHARING = ("ep_size", "moe_a2a", "moe_a2a_extend", "moe_dense_tp_size", "dtype", "weights")
DRAFTING = ("draft_model", "num_draft_steps", "draft_topk", "num_draft_tokens", "draft_sampling")
NAMES = SHARING + DRAFTING


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. The executors' own are described as `python -m executor --help` does."""
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="a Hugging Face checkpoint [default: demo]"
    )
    parser.add_argument("--dp-size", type=_size, default=2, help="DP ranks [default: 2]")
    parser.add_argument(
        "--attn-tp-size", type=_size, default=1, help="executors of each DP rank [default: 1]"
    )
    parser.add_argument(
        "--spares",
        type=_count,
        help="further executors, one of which takes the place of one that is lost; without any left, the "
        "others go on, down to half of the DP ranks [default: 0, and all executors are needed]",
    )
    for option in executor.params:
        if option.name in NAMES:
            assert isinstance(option, click.Option)
            is_size = option.type is click.INT
            parser.add_argument(*option.opts, type=_size if is_size else str, help=option.help)
    parser.add_argument(
        "--log-dir", type=Path, help="where logs go [default: a folder that goes at the end]"
    )


def executor_args(args: argparse.Namespace, names: Sequence[str] = NAMES) -> Sequence[str]:
    """Returns what was given, as flags of each executor; dp_size and attn_tp_size are not among it."""
    given = [(name, getattr(args, name)) for name in names if getattr(args, name) is not None]
    return [part for name, value in given for part in (f"--{name.replace('_', '-')}", str(value))]


def group_args(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sizes of the stack's group, as `LocalStack` takes them."""
    least = None if args.spares is None else -(-args.dp_size // 2)
    return {
        "dp_size": args.dp_size,
        "attn_tp_size": args.attn_tp_size,
        "min_dp_size": least,
        "spares": args.spares or 0,
    }


def describe(args: argparse.Namespace) -> str:
    """Says how many executors there are, and what they are to one another."""
    num_executors = args.dp_size * args.attn_tp_size
    executors = "1 executor" if num_executors == 1 else f"{num_executors} executors"
    if args.spares is not None:
        executors += f" and {args.spares} to spare"
    if args.attn_tp_size == 1:
        return executors
    return f"{executors} (DP {args.dp_size} x attention TP {args.attn_tp_size})"


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{count}: need at least 0")
    return count


def _size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{size}: need at least 1")
    return size
