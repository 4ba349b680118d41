"""Flags of the demo and of serve that say how executors share the model, and what drafts for it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

SHARING = ("ep_size", "moe_a2a", "moe_a2a_extend", "moe_dense_tp_size", "dtype")
DRAFTING = (
    "draft_model",
    "num_draft_steps",
    "draft_topk",
    "num_draft_tokens",
    "draft_sampling",
)
NAMES = SHARING + DRAFTING


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. What is not given is left to the executors: `python -m executor --help`."""
    parser.add_argument("--dp-size", type=_size, default=2, help="DP ranks [default: 2]")
    parser.add_argument(
        "--attn-tp-size", type=_size, default=1, help="executors of each DP rank [default: 1]"
    )
    parser.add_argument(
        "--ep-size", type=_size, help="parts that the experts fall into; 1 is no EP [default: all]"
    )
    parser.add_argument("--moe-a2a", help="how tokens reach the experts' executors: none or torch")
    parser.add_argument(
        "--moe-a2a-extend", help="the same in steps with prompts: all-gather or all-to-all"
    )
    parser.add_argument(
        "--moe-dense-tp-size", type=_size, help="1: dense layers are whole on each executor"
    )
    parser.add_argument("--dtype", help="of weights and KV: auto, float32 or bfloat16")
    parser.add_argument(
        "--draft-model", type=Path, help="folder of a draft model, such as deploy/demo_drafts/mtp"
    )
    parser.add_argument("--num-draft-steps", type=_size, help="drafts one after another")
    parser.add_argument(
        "--draft-topk", type=_size, help="drafts that each step goes on from: above 1 a tree"
    )
    parser.add_argument("--num-draft-tokens", type=_size, help="tokens verified at once")
    parser.add_argument(
        "--draft-sampling", help="how drafts of requests that sample are accepted: match, rejection"
    )


def executor_args(args: argparse.Namespace, names: Sequence[str] = NAMES) -> Sequence[str]:
    """Returns what was given, as flags of each executor; dp_size and attn_tp_size are not among it."""
    given = [(name, getattr(args, name)) for name in names if getattr(args, name) is not None]
    return [part for name, value in given for part in (f"--{name.replace('_', '-')}", str(value))]


def describe(args: argparse.Namespace) -> str:
    """Says how many executors there are, and what they are to one another."""
    num_executors = args.dp_size * args.attn_tp_size
    executors = "1 executor" if num_executors == 1 else f"{num_executors} executors"
    if args.attn_tp_size == 1:
        return executors
    return f"{executors} (DP {args.dp_size} x attention TP {args.attn_tp_size})"


def _size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{size}: need at least 1")
    return size
