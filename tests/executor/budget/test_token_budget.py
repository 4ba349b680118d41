"""If the budget is too small for one step, that step writes past a buffer; each size is tried here."""

import json
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.read_step import RowProgress, StepLimits, read_step
from executor.budget.capture_sizes import GraphSizes, decode_capture_sizes, prefill_capture_sizes
from executor.budget.report import a2a_bound, budget_table
from executor.budget.token_budget import (
    A2A_TOP_KS,
    TokenBudget,
    a2a_workspace_size_per_rank,
    check_flashinfer_a2a,
    dispatch_bytes_per_token,
)
from executor.errors import InvalidStep
from executor.model.layers.linear import vocab_slice
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.layout import DpLayout, DpPaddingMode, Place, Topology
from tests.executor.support.steps import limits_of, prompt_part, step

NUM_WORLDS = 2000  # per property


def make_budget(**sizes: Any) -> TokenBudget:
    defaults = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_num_logits": 320}
    return TokenBudget(**(defaults | sizes))


def random_budget(rng: random.Random) -> tuple[TokenBudget, GraphSizes]:
    """Returns a budget as start-up makes it, and the graphs that it was made with."""
    attn_tp_size = rng.choice([1, 1, 2, 3, 4, 8])
    max_num_seqs = rng.randint(1, 70)
    most = rng.randint(max_num_seqs, 700)
    decode = extend = ()
    if rng.random() < 0.7:
        decode = decode_capture_sizes(max_num_seqs, alignment=attn_tp_size)
    if rng.random() < 0.7:
        extend = prefill_capture_sizes(most, alignment=attn_tp_size)
    budget = TokenBudget(
        max_num_batched_tokens=most,
        max_num_seqs=max_num_seqs,
        max_num_logits=max_num_seqs + rng.randint(0, 9),
        num_tokens_per_bs=rng.choice([1, 1, 2, 4]),
        decode_graph_size=max(decode, default=0),
        extend_graph_size=max(extend, default=0),
        dp_size=rng.randint(1, 8),
        attn_tp_size=attn_tp_size,
        a2a_extends=rng.random() < 0.5,
    )
    return budget, GraphSizes(decode, extend)


def random_layout(rng: random.Random, budget: TokenBudget, graph_sizes: GraphSizes) -> DpLayout:
    """Returns a step that the router may send: full, nearly full or any, in a graph or eager."""
    has_extend = rng.random() < 0.5
    width = 1 if has_extend else budget.num_tokens_per_bs
    most = budget.max_num_batched_tokens if has_extend else budget.max_num_seqs
    counts = [
        rng.choice([most, most - 1, 0, rng.randint(0, most)]) * width for _ in range(budget.dp_size)
    ]
    graph_size = None
    if rng.random() < 0.5:
        captured = graph_sizes.extend if has_extend else graph_sizes.decode
        fitting = [size * width for size in captured if size * width >= max(counts)]
        graph_size = rng.choice(fitting) if fitting else None
    mode = DpPaddingMode.MAX_LEN if graph_size else rng.choice(list(DpPaddingMode))
    return DpLayout(
        tuple(counts),
        mode,
        rng.randrange(budget.dp_size),
        graph_size,
        has_extend,
        rng.randrange(budget.attn_tp_size),
        budget.attn_tp_size,
    )


def test_no_step_is_larger_than_the_budget():
    rng = random.Random(0)
    for world in range(NUM_WORLDS):
        budget, graph_sizes = random_budget(rng)
        assert budget.max_tokens_per_rank % budget.attn_tp_size == 0
        for _ in range(8):
            layout = random_layout(rng, budget, graph_sizes)
            case = (world, budget, layout)
            assert layout.num_tokens <= budget.max_step_tokens, case
            assert layout.num_rows <= budget.max_tokens_per_rank, case
            assert layout.shard_num_rows <= layout.padded_num_tokens, case
            assert layout.padded_num_tokens <= layout.runtime_max_tokens_per_rank, case
            assert layout.runtime_max_tokens_per_rank <= budget.max_shard_tokens_per_rank, case
            assert layout.global_dp_buffer_len <= budget.max_gathered_tokens, case
            if budget.a2a_extends or not layout.has_extend:  # else it goes by all-gather
                assert layout.runtime_max_tokens_per_rank <= budget.a2a_least_tokens, case
                assert budget.a2a_least_tokens <= budget.a2a_max_num_tokens, case
            if layout.graph_size is not None and not layout.has_extend:
                assert layout.num_rows <= budget.max_logits_rows, case


def test_the_budget_is_no_larger_than_the_largest_step():
    rng = random.Random(1)
    for world in range(NUM_WORLDS):
        budget, graph_sizes = random_budget(rng)
        width, dp_size = budget.num_tokens_per_bs, budget.dp_size
        largest = [budget.max_num_batched_tokens, budget.max_num_seqs * width]
        graphs = [*graph_sizes.extend[-1:], *(size * width for size in graph_sizes.decode[-1:])]
        layouts = [
            DpLayout(
                (min(rows, min(largest)),) * dp_size if is_graph else (rows,) * dp_size,
                DpPaddingMode.MAX_LEN,
                0,
                rows if is_graph else None,
                attn_tp_size=budget.attn_tp_size,
            )
            for sizes, is_graph in ((largest, False), (graphs, True))
            for rows in sizes
        ]
        lengths = [layout.runtime_max_tokens_per_rank for layout in layouts]
        assert max(lengths) == budget.max_shard_tokens_per_rank, (world, budget)
        gathered = [layout.global_dp_buffer_len for layout in layouts]
        assert max(gathered) == budget.max_gathered_tokens, (world, budget)
        decoding = replace(budget, a2a_extends=False)
        rows = max(budget.max_num_seqs * width, *(size * width for size in graph_sizes.decode), 1)
        assert decoding.a2a_max_num_tokens == -(-rows // budget.attn_tp_size), (world, budget)


def graph_limits(**sizes: int) -> StepLimits:
    """Returns limits with a graph of 16 tokens and a budget of 10, unless told otherwise."""
    defaults = {"max_num_batched_tokens": 10, "max_num_seqs": 4, "dp_size": 2}
    topology = Topology(dp_size=2, attn_tp_size=sizes.get("attn_tp_size", 1))
    budget = make_budget(**(defaults | sizes))
    return limits_of(
        budget, place=Place(topology), block_size=16, graph_sizes=GraphSizes(extend=(16,))
    )


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({}, "has 16 rows on a DP rank; the budget is 10"),
        ({"attn_tp_size": 4}, "has 16 rows on a DP rank; the budget is 12"),
    ],
)
def test_a_graph_that_no_buffer_was_sized_for_is_refused_with_both_numbers(
    sizes: dict[str, int], problem: str
):
    """Graphs and budget come from one place; a step must not be what finds out if they did not."""
    part = prompt_part(0, [1] * 10, [1])
    request = step(1, part, num_tokens=[10, 9], num_logits=[1, 1], graph_size=16)
    progress = RowProgress.empty(np.zeros(4, dtype=np.int64))
    with pytest.raises(InvalidStep, match=f"the step of graph_size=16 {problem}"):
        read_step(request, graph_limits(**sizes), progress)
    covered = graph_limits(**sizes, extend_graph_size=16)
    assert read_step(request, covered, progress).layout.graph_size == 16


def test_a_budget_for_another_group_is_refused():
    with pytest.raises(ValueError, match=r"for dp_size=1 and attn_tp_size=1, .* for 2 and 1"):
        graph_limits(dp_size=1)


WIDE = {"hidden_size": 4096, "itemsize": 2, "top_k": 8}
OF_64_RANKS = {"dp_size": 64, "ep_size": 64, "decode_graph_size": 64, **WIDE}
OF_8_RANKS = {"dp_size": 8, "ep_size": 8, "max_num_batched_tokens": 1024, **WIDE}
SHARED = {"max_num_seqs": 8, "attn_tp_size": 2}
# Whole dense MLPs under attention TP 8: the smallest graph of 4 sequences has 8 rows.
FOUR = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "max_num_logits": 4, "attn_tp_size": 8}
ALIGNED = {
    "decode_graph_size": decode_capture_sizes(4, alignment=8)[-1],
    "extend_graph_size": prefill_capture_sizes(100, alignment=8)[-1],
}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # Sized by a warm-up of a few tokens, a buffer met a step of 4073.
        ({"max_num_batched_tokens": 4096, "dp_size": 2}, {"max_gathered_tokens": 2 * 4096}),
        # Sized by running requests only, a dispatch overflowed at the first prefill.
        ({"max_num_batched_tokens": 8192, "a2a_extends": True}, {"a2a_max_num_tokens": 8192}),
        # At 64 ranks of a 235 B model, prompts that went by all-gather took 4 GiB of each GPU for the
        # all-to-all, of which decodes need a 64th.
        (OF_64_RANKS, {"a2a_max_num_tokens": 64, "a2a_workspace_bytes": 67_383_424}),
        (
            {**OF_64_RANKS, "a2a_extends": True},
            {"a2a_max_num_tokens": 4096, "a2a_workspace_bytes": 4_312_466_560},
        ),
        # Times ep_size again, four GPUs ran out of memory.
        (
            {**OF_8_RANKS, "max_dispatch_tokens_per_rank": 1024},
            {
                "a2a_dispatch_bytes_per_token": 8256,
                "a2a_combine_bytes_per_token": 8192,
                "a2a_max_num_tokens": 1024,
                "a2a_workspace_bytes": 134_922_624,
            },
        ),
        # Verified drafts, their draft-extend, and the padding of their graph are sent, too.
        ({**SHARED, "num_tokens_per_bs": 4, "draft_lookahead": 1}, {"a2a_max_num_tokens": 16}),
        ({**SHARED, "draft_lookahead": 1}, {"a2a_max_num_tokens": 8}),
        ({**SHARED, "num_tokens_per_bs": 4, "decode_graph_size": 10}, {"a2a_max_num_tokens": 20}),
        ({"max_num_seqs": 8, "draft_lookahead": 2}, {"max_tokens_per_rank": 2048 + 16}),
        # A cap may lie anywhere above what a step brings.
        ({"max_dispatch_tokens_per_rank": 100}, {"a2a_max_num_tokens": 100}),
        (
            {"a2a_extends": True, "max_dispatch_tokens_per_rank": 9000},
            {"a2a_max_num_tokens": 9000},
        ),
        (
            FOUR | ALIGNED,
            {"max_tokens_per_rank": 104, "max_shard_tokens_per_rank": 13, "max_logits_rows": 8},
        ),
    ],
)
def test_sizes_at_which_others_have_failed_follow_from_the_limits(
    sizes: dict[str, Any], expected: dict[str, int]
):
    budget = make_budget(**sizes)
    assert {name: getattr(budget, name) for name in expected} == expected


# The all-to-all's workspace

A2A_SIZES = [  # from FlashInfer 0.7.2.post1's own function
    ((8, 1024, 8256, 8192, 0), 134_922_624),
    ((64, 4096, 8256, 8192, 256), 4_312_532_096),
    ((1, 1, 1, 1, 0), 896),
]


SIZE_NAMES = (
    *("ep_size", "max_num_tokens", "dispatch_payload_size_per_token"),
    *("combine_payload_size_per_token", "eplb_num_experts"),
)


def workspace_size(case: tuple[int, ...]) -> int:
    return a2a_workspace_size_per_rank(**dict(zip(SIZE_NAMES, case, strict=True)))


@pytest.mark.parametrize(("case", "expected"), A2A_SIZES)
def test_the_workspace_has_the_size_that_the_library_asks_for(case: tuple[int, ...], expected: int):
    assert workspace_size(case) == expected


ASK_LIBRARY = """
import json, sys
from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_get_workspace_size_per_rank as size
print(json.dumps([size(*case) for case in json.load(sys.stdin)]))
"""


def test_the_formula_is_the_librarys():
    """Needs its compiled module, but no GPU: the size is computed on the host."""
    pytest.importorskip("flashinfer")
    rng = random.Random(3)
    most = (64, 9000, 40_000, 40_000)
    cases = [
        (*(rng.randint(1, n) for n in most), rng.choice([0, rng.randint(1, 512)]))
        for _ in range(NUM_WORLDS)
    ]
    environment = {"FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    done = subprocess.run(
        [sys.executable, "-c", ASK_LIBRARY],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        env=environment | os.environ,
    )
    if "MissingJITCacheError" in done.stderr:
        pytest.skip("FlashInfer is here without its compiled mnnvl_moe_alltoall")
    assert done.returncode == 0, done.stderr
    for case, expected in zip(cases, json.loads(done.stdout), strict=True):
        assert workspace_size(case) == expected, case


@pytest.mark.parametrize(
    ("itemsize", "quantized", "expected"),
    [
        (2, None, 2 * 4096 + 64),
        (4, None, 4 * 4096 + 64),
        (2, "nvfp4", 2 * 4096 + 64),  # the larger: bfloat16 still travels in some steps
        (2, "mxfp8", 2 * 4096 + 64),
        (1, "mxfp8", 4096 + 128 + 64),
        (1, "nvfp4", 4096 + 64),
    ],
)
def test_a_token_takes_its_hidden_state_and_8_bytes_per_expert(
    itemsize: int, quantized: str | None, expected: int
):
    assert dispatch_bytes_per_token(4096, 8, itemsize=itemsize, quantized=quantized) == expected


# What does not fit


@pytest.mark.parametrize("place", range(5))
def test_a_workspace_of_nothing_is_refused_by_name(place: int):
    case = [8, 16, 8, 8, 0]
    case[place] = -1 if SIZE_NAMES[place] == "eplb_num_experts" else 0
    with pytest.raises(ValueError, match=f"^{SIZE_NAMES[place]}={case[place]}: need at least"):
        workspace_size(tuple(case))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0: need at least 1"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens=63 is below max_num_seqs=64"),
        ({"max_num_logits": 63}, "max_num_logits=63 is below max_num_seqs=64"),
        ({"num_tokens_per_bs": 0}, "num_tokens_per_bs=0: need at least 1"),
        ({"decode_graph_size": -1}, "decode_graph_size=-1: need at least 0"),
        ({"attn_tp_size": 0}, "attn_tp_size=0"),
        ({"hidden_size": -8}, "hidden_size=-8"),
        ({"quantized_dispatch": "int3"}, "quantized_dispatch=int3: need one of nvfp4, mxfp8"),
        (
            {"quantized_dispatch": "mxfp8", "hidden_size": 48},
            "a scale per 32 values, which do not divide hidden_size=48",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named_with_what_does(sizes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        _ = make_budget(**sizes).a2a_dispatch_bytes_per_token


@pytest.mark.parametrize(
    ("sizes", "needed"),
    [
        ({"a2a_extends": True}, 2048),
        ({"a2a_extends": True, "attn_tp_size": 4, "extend_graph_size": 2052}, 513),
        ({}, 64),
        ({"num_tokens_per_bs": 4, "attn_tp_size": 2}, 128),
        ({"decode_graph_size": 72}, 72),
    ],
)
def test_a_dispatch_cap_below_what_a_step_may_bring_is_refused_with_the_number_to_set(
    sizes: dict[str, Any], needed: int
):
    below = make_budget(**sizes, max_dispatch_tokens_per_rank=needed - 1)
    problem = f"rank={needed - 1}, but a step may bring {needed} .* raise .*_rank to {needed}, or"
    with pytest.raises(ValueError, match=problem):
        _ = below.a2a_workspace_bytes
    assert make_budget(**sizes, max_dispatch_tokens_per_rank=needed).a2a_max_num_tokens == needed


def test_the_nearest_numbers_of_experts_that_have_a_kernel_are_named():
    for top_k in range(30):
        is_refused = pytest.raises(ValueError, match=f"num_experts_per_tok={top_k}:")
        with nullcontext() if top_k in A2A_TOP_KS else is_refused:
            check_flashinfer_a2a(1, top_k)
    with pytest.raises(ValueError, match=r"num_experts_per_tok=7: .* for 6 and 8"):
        check_flashinfer_a2a(8, 7)
    with pytest.raises(ValueError, match=r"num_experts_per_tok=30: .* for 22"):
        check_flashinfer_a2a(8, 30)
    check_flashinfer_a2a(64, 8)
    with pytest.raises(ValueError, match=r"ep_size=72: .* takes 1 to 64 .*; use 64 executors, or"):
        check_flashinfer_a2a(72, 8)


# The table


UNEVEN = make_budget(
    max_num_batched_tokens=101,
    max_num_seqs=4,
    decode_graph_size=8,
    max_num_logits=4,
    dp_size=2,
    attn_tp_size=8,
    ep_size=16,
    hidden_size=64,
    itemsize=2,
    top_k=3,
    vocab_size=1001,
)


def test_the_table_says_what_is_sized_by_which_bound():
    of_rank, of_executor = "hidden states of a DP rank", "hidden states of an executor"
    gathered = "rows gathered for experts, with ids and weights"
    lines = budget_table(UNEVEN)
    assert [(line.what, line.bound, line.tokens, line.bytes) for line in lines] == [
        (of_rank, "max_num_batched_tokens, to a multiple of attn_tp_size=8", 104, 104 * 128),
        (of_executor, f"{of_rank} / attn_tp_size=8", 13, 13 * 128),
        ("rows gathered for attention", of_rank, 104, 104 * 128),
        ("rows that attention sums", of_rank, 104, 104 * 128),
        ("sums of attention", of_executor, 13, 13 * 128),
        ("logits of a DP rank", "largest decode graph * num_tokens_per_bs", 8, 8 * 1008 * 4),
        ("logits as gathered", "logits of a DP rank", 8, 8 * 1008 * 2),
        ("rows sent for experts, with ids and weights", of_executor, 13, 13 * (128 + 24)),
        (gathered, f"{of_executor} * 16 executors", 208, 208 * (128 + 24)),
        ("sums of experts", of_executor, 13, 13 * 128),
    ]


@pytest.mark.parametrize("attn_tp_size", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_bound_is_a_setting_or_an_earlier_line(dp_size: int, attn_tp_size: int):
    """Each line becomes a log record of its own, in which "those" would mean nothing."""
    budget = make_budget(
        dp_size=dp_size, attn_tp_size=attn_tp_size, ep_size=dp_size * attn_tp_size, top_k=2
    )
    seen = ["max_num_batched_tokens", "max_num_logits"]
    for line in budget_table(budget):
        assert line.bound.startswith(tuple(seen)), line
        assert line.what not in seen, line
        seen.append(line.what)


def test_the_table_has_the_bytes_of_the_buffers_of_collectives():
    topology = Topology(dp_size=2, attn_tp_size=8)
    sizes: dict[str, Any] = {
        "hidden_size": UNEVEN.hidden_size,
        "dtype": torch.bfloat16,
        "device": "meta",
    }
    shard = UNEVEN.max_shard_tokens_per_rank
    communicators = (
        DpCommunicator(
            place=Place(topology), max_tokens_per_rank=shard, top_k=UNEVEN.top_k, **sizes
        ),
        AttnTpCommunicator(
            capacity=topology.capacity,
            max_shard_tokens_per_rank=shard,
            max_logits_rows=UNEVEN.max_logits_rows,
            vocab_slice=vocab_slice(UNEVEN.vocab_size, 8),
            **sizes,
        ),
    )
    held = [
        value.nbytes
        for communicator in communicators
        for value in vars(communicator).values()
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    no_buffers = {"hidden states of a DP rank", "hidden states of an executor"}
    told = [line.bytes for line in budget_table(UNEVEN) if line.what not in no_buffers]
    assert sorted(told) == sorted(held)


RANK, LOGITS = "hidden states of a DP rank", "logits of a DP rank"
SEQS, GRAPH = "max_num_seqs * num_tokens_per_bs", "largest decode graph * num_tokens_per_bs"


@pytest.mark.parametrize(
    ("sizes", "line", "bound"),
    [
        ({}, RANK, "max_num_batched_tokens"),
        ({"num_tokens_per_bs": 64}, RANK, SEQS),
        ({"decode_graph_size": 3000}, RANK, GRAPH),
        ({"extend_graph_size": 3000}, RANK, "largest prefill graph"),
        ({}, LOGITS, "max_num_logits"),
        ({"num_tokens_per_bs": 8}, LOGITS, SEQS),
        ({"num_tokens_per_bs": 8, "decode_graph_size": 64}, LOGITS, GRAPH),
        ({}, "all-to-all", SEQS),
        ({"decode_graph_size": 72}, "all-to-all", GRAPH),
        ({"a2a_extends": True}, "all-to-all", "default"),
        ({"a2a_extends": True, "max_num_batched_tokens": 8192}, "all-to-all", RANK),
        ({"max_dispatch_tokens_per_rank": 5000}, "all-to-all", "max_dispatch_tokens_per_rank"),
    ],
)
def test_the_bound_that_decides_is_named(sizes: dict[str, Any], line: str, bound: str):
    budget = make_budget(**sizes)
    bounds = {line.what: line.bound for line in budget_table(budget)}
    assert (bounds | {"all-to-all": a2a_bound(budget)})[line] == bound
