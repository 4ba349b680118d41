"""A step at exactly the budget must run in every buffer; one token more must not reach any."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.errors import InvalidStep
from executor.parallel.epochs import JoinAttempt
from executor.server.service import agreement_digest
from executor.worker import Worker
from protos.executor.v1 import executor_pb2 as pb
from protos.transport.port import ServiceConfig
from tests.executor.support.ranks.ranks import HOST, SECRET, run_ranks
from tests.executor.support.steps import floats_of, row_starts, sequences, step, tokens_of
from tests.support.paths import DEMO_DRAFTS, DEMO_MODEL

NUM_SEQS, NUM_TOKENS, NUM_LOGITS = 3, 33, 9
BLOCK_SIZE, BLOCKS_PER_ROW = 4, 8
SIZES: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "max_num_seqs": NUM_SEQS,
    "max_num_batched_tokens": NUM_TOKENS,
    "max_num_logits": NUM_LOGITS,
    "num_kv_blocks": 33,
}
FULL = [11] * 3  # NUM_TOKENS in NUM_SEQS prompts; each ends inside a block
NUM_SCORED = NUM_LOGITS - NUM_SEQS


def make_worker(path: Path, **settings: Any) -> Worker:
    worker, _ = build_worker(ExecutorConfig(model=path, **(SIZES | settings)))
    worker.join(1, "")
    return worker


def prompts_step(
    lengths: Sequence[int],
    *,
    num_scored: int = 0,
    graph_size: int | None = None,
    block_size: int = BLOCK_SIZE,
) -> pb.StepRequest:
    """Returns the step that starts a row for each prompt and samples once for each."""
    prompts = [
        [(7 * row + 5 * at) % 90 + 3 for at in range(length)] for row, length in enumerate(lengths)
    ]
    num_blocks = [-(-length // block_size) for length in lengths]
    part = pb.RankStep(
        forward_mode=pb.FORWARD_MODE_EXTEND,
        starts=row_starts(rows=range(len(lengths))),
        sequences=sequences(
            rows=range(len(lengths)),
            num_tokens=lengths,
            num_computed_tokens=[0] * len(lengths),
            token_ids=[token for prompt in prompts for token in prompt],
            num_new_blocks=num_blocks,
            new_block_ids=[
                1 + row * BLOCKS_PER_ROW + block
                for row, count in enumerate(num_blocks)
                for block in range(count)
            ],
            num_scored=[num_scored] + [0] * (len(lengths) - 1),
            scored_ids=prompts[0][1 : num_scored + 1],
        ),
    )
    num_logits = [len(lengths) + num_scored]
    num_tokens = [sum(lengths)]
    return step(1, part, num_tokens=num_tokens, num_logits=num_logits, graph_size=graph_size)


def decodes_step(num_computed: Sequence[int], *, graph_size: int | None = None) -> pb.StepRequest:
    """Returns the step that runs the last sampled token of each row. No row grows a block."""
    part = pb.RankStep(
        forward_mode=pb.FORWARD_MODE_DECODE,
        sequences=sequences(rows=range(len(num_computed)), num_computed_tokens=num_computed),
    )
    return step(2, part, num_tokens=[len(num_computed)], graph_size=graph_size)


@pytest.mark.parametrize("prefill_graphs", ["breakable", "piecewise"])
def test_a_step_at_exactly_the_budget_runs_eagerly_and_in_the_largest_graphs(
    tiny_checkpoint: Path, prefill_graphs: str
):
    answers = tokens_at_the_budget(0, 0, tiny_checkpoint, {"prefill_graphs": prefill_graphs})
    assert [len(tokens) for tokens in answers] == [NUM_SEQS] * 6
    assert answers[2:4] == answers[4:] == answers[:2]


@pytest.mark.parametrize(
    ("too_large", "problem"),
    [
        (
            prompts_step([11, 11, 12]),
            f"comes to {NUM_TOKENS + 1}; max_num_batched_tokens is {NUM_TOKENS}",
        ),
        (
            prompts_step(FULL, num_scored=NUM_SCORED + 1),
            f"comes to {NUM_LOGITS + 1}; max_num_logits is {NUM_LOGITS}",
        ),
        (
            prompts_step(FULL, graph_size=NUM_TOKENS + 4),
            f"graph_size={NUM_TOKENS + 4} is not captured",
        ),
    ],
)
def test_one_more_than_the_budget_is_refused_before_anything_changes(
    tiny_checkpoint: Path, too_large: pb.StepRequest, problem: str
):
    worker = make_worker(tiny_checkpoint)
    prompts, decodes = prompts_step(FULL), decodes_step(FULL)
    worker.execute(prompts)
    expected = tokens_of(worker.execute(decodes))

    worker.join(2, "")
    worker.execute(prompts)
    with pytest.raises(InvalidStep, match=problem):
        worker.execute(too_large)
    assert tokens_of(worker.execute(decodes)) == expected


@pytest.mark.parametrize(
    "places",
    [
        {"dp_size": 2},
        {"attn_tp_size": 2},
        {"dp_size": 2, "moe_a2a": "torch", "moe_a2a_extend": "all-to-all"},
        {"attn_tp_size": 2, "moe_a2a": "torch", "moe_a2a_extend": "all-to-all"},
    ],
)
def test_two_executors_run_a_step_at_exactly_the_budget(
    tiny_checkpoint: Path, places: dict[str, Any]
):
    """With attention TP, 33 tokens and 3 sequences become 34 rows and graphs of 2 and 4."""
    expected = tokens_at_the_budget(0, 0, tiny_checkpoint, {})
    answers = run_ranks(tokens_at_the_budget, 2, tiny_checkpoint, places)
    assert answers[0] == expected
    assert answers[1] == (expected if "dp_size" in places else [[]] * 6)  # only one peer answers


def tokens_at_the_budget(
    rank: int, store_port: int, path: Path, places: dict[str, Any]
) -> list[list[int]]:
    """Returns what a worker answers to full steps: eager, then in the largest graphs."""
    dp_size = places.get("dp_size", 1)
    is_dp = dp_size > 1
    place = {"dp_rank": rank} if is_dp else {"attn_tp_rank": rank}
    worker, description = build_worker(ExecutorConfig(model=path, **SIZES, **place, **places))
    sizes = description.graph_sizes
    answers = []
    for epoch, (extend, decode, mode) in enumerate(
        (
            (None, None, pb.DP_PADDING_MODE_SUM_LEN),
            (None, None, pb.DP_PADDING_MODE_MAX_LEN),
            (sizes.extend[-1], sizes.decode[-1], pb.DP_PADDING_MODE_MAX_LEN),
        )
    ):
        worker.join(epoch + 1, f"{HOST}:{store_port}", JoinAttempt(epoch + 1, SECRET))
        requests = (
            prompts_step(FULL, num_scored=NUM_SCORED, graph_size=extend),
            decodes_step(FULL, graph_size=decode),
        )
        for step_id, request in enumerate(requests):
            agreement = request.agreement
            agreement.padding_mode = mode
            agreement.global_num_tokens.extend(list(agreement.global_num_tokens) * (dp_size - 1))
            logits = agreement.global_num_tokens_for_logprob
            logits.extend(list(logits) * (dp_size - 1))
            request.epoch, request.step_id = epoch + 1, step_id + 1
            request.ranks[0].dp_rank = rank if is_dp else 0
            response = worker.execute(request)
            answers.append(tokens_of(response) if response.ranks else [])
            for part in response.ranks:
                assert len(floats_of(part.logprobs)) == (NUM_SCORED if step_id == 0 else 0)
    worker.leave()
    return answers


def test_a_small_first_step_does_not_size_what_a_large_one_needs(tiny_checkpoint: Path):
    """Sized by a warm-up of a few tokens, a buffer did not hold the first step of 4073."""
    sizes: dict[str, Any] = {
        "block_size": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 4096,
        "max_num_logits": 8,
        "num_kv_blocks": 65,
        "prefill_graphs": "off",
    }
    lengths = [512] * 7 + [4073 - 7 * 512]
    tokens = []
    for has_small_one in (True, False):
        worker = make_worker(tiny_checkpoint, **sizes)
        if has_small_one:
            worker.execute(prompts_step([1], block_size=64))
        tokens.append(tokens_of(worker.execute(prompts_step(lengths, block_size=64))))
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 8


# Another value of each setting in which members may not differ.
OTHERWISE: dict[str, Any] = {
    "dp_size": 4,
    "max_dp_size": 4,
    "attn_tp_size": 2,
    "ep_size": 1,
    "moe_dense_tp_size": 1,
    "dtype": "bfloat16",
    "block_size": 8,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 34,
    "max_num_logits": 10,
    "max_model_len": 99,
    "decode_graphs": "off",
    "decode_graph_sizes": (2,),
    "prefill_graphs": "piecewise",
    "prefill_graph_sizes": (16, 32),
    "moe_a2a": "none",
    "moe_a2a_extend": "all-to-all",
    "max_dispatch_tokens_per_rank": 5000,
    "quantized_dispatch": "nvfp4",
    "moe_runner": "cutlass",
    "quantized_weights": "dequantize",
    "weights": "int8",
    "flashinfer_pdl": "on",
    "triton_kernels": "off",
}
DRAFTING_OTHERWISE: dict[str, Any] = {
    "draft_model": DEMO_DRAFTS / "mtp",
    "num_draft_steps": 2,
    "draft_topk": 2,
    "num_draft_tokens": 5,
    "draft_sampling": "rejection",
}
BESIDE_IT = {
    "ep_size": {"moe_a2a": "none"},
    "max_dp_size": {"dp_size": 1, "max_dp_size": 2},
    "quantized_dispatch": {"dp_size": 1, "moe_a2a": "flashinfer"},
    "weights": {"dtype": "bfloat16"},
    "num_draft_tokens": {"draft_topk": 2},
}
AGREED_AS = {
    "max_dp_size": "dp_size",
    "decode_graphs": "decode_graph_sizes",
    "prefill_graph_sizes": "extend_graph_sizes",
    "draft_model": "draft_fingerprint",
    "draft_topk": "topk",
}
# Settings in which members may differ, besides the ports: where an executor is (the type of its device
# may not differ, nor the fingerprint of its model), and its resources.
RANKS = {"dp_rank", "node_rank", "dp_ranks_per_node", "attn_tp_rank"}
PLACE = {"model", "device", "advertised_host", "anonymous_callers", "check", *RANKS}
RESOURCES = {
    *("num_kv_blocks", "kv_cache_bytes", "min_dp_size", "num_threads"),
    *("peer_timeout_s", "stop_timeout_s", "max_restarts"),
}


def member_agreement(path: Path, **settings: Any) -> dict[str, str]:
    member = {"device": "cpu", "dp_size": 2, "moe_a2a": "torch", **SIZES}
    _, description = build_worker(ExecutorConfig(model=path, **(member | settings)))
    assert description.agreement["model_fingerprint"] == description.model.fingerprint
    return dict(description.agreement)


@pytest.mark.parametrize("name", [*OTHERWISE, *DRAFTING_OTHERWISE])
def test_members_that_differ_in_what_sizes_or_routes_a_step_do_not_agree(
    tiny_checkpoint: Path, name: str
):
    """Executors that differ in one of these hang or crash in their first collective call."""
    path, both = tiny_checkpoint, BESIDE_IT.get(name, {})
    if name in ("weights", "quantized_dispatch"):
        path = DEMO_MODEL
    if name in DRAFTING_OTHERWISE:
        path, both = DEMO_MODEL, {"moe_a2a": "none", "draft_model": DEMO_DRAFTS / "eagle", **both}
    key = AGREED_AS.get(name, name)
    one = member_agreement(path, **both)
    other = member_agreement(path, **both | {name: (OTHERWISE | DRAFTING_OTHERWISE)[name]})
    assert one[key] != other[key]
    assert agreement_digest(one) != agreement_digest(other)


def test_members_agree_whatever_their_ranks_and_resources(tiny_checkpoint: Path):
    one = member_agreement(tiny_checkpoint)
    other = member_agreement(
        tiny_checkpoint, dp_rank=1, listen="127.0.0.1:0", num_kv_blocks=40, peer_timeout_s=5.0
    )
    assert one == other
    assert agreement_digest(one) == agreement_digest(other)
    assert one["device"] == "cpu"


def test_every_setting_is_one_that_members_agree_on_or_may_differ_in():
    settings = {field.name for field in fields(ExecutorConfig)}
    settings -= {field.name for field in fields(ServiceConfig)}
    assert settings == OTHERWISE.keys() | DRAFTING_OTHERWISE.keys() | PLACE | RESOURCES
