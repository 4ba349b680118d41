"""The worker is what turns a router's plan into tokens: same plan, same tokens, or a refusal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.errors import InvalidStep
from executor.worker import Worker
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.checkpoints import reference_logits
from tests.executor.support.recording.copiers import SeparateMemory
from tests.executor.support.steps import (
    decode_part,
    floats_of,
    idle_part,
    ints_of,
    prompt_part,
    row_starts,
    sequences,
    step,
    tokens_of,
)

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60]


@pytest.fixture
def worker(tiny_checkpoint: Path) -> Worker:
    return make_worker(tiny_checkpoint)


def make_worker(path: Path) -> Worker:
    config = ExecutorConfig(
        model=path, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=64
    )
    worker, _ = build_worker(config)
    worker.join(1, "")
    return worker


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: Path) -> Any:
    from transformers import Qwen3MoeForCausalLM  # seconds

    return Qwen3MoeForCausalLM.from_pretrained(tiny_checkpoint).eval()


@pytest.fixture
def apart(worker: Worker) -> Worker:
    """A worker whose host and device share no memory, as on CUDA, with a table on each side."""
    pool = worker._kv_pool
    pool.tables = pool.tables_cpu.clone()
    return Worker(
        limits=worker._limits,
        kv_pool=pool,
        sampler=worker._sampler,
        runner=worker._runner,
        members=[],
        form_group=None,
        device=worker._device,
        copier=SeparateMemory(),
    )


@pytest.fixture(params=["shared memory", "memory of its own"])
def either(request: pytest.FixtureRequest, worker: Worker) -> Worker:
    """A worker whose host and device share memory, and one whose do not."""
    if request.param == "shared memory":
        return worker
    apart: Worker = request.getfixturevalue("apart")
    return apart


def generate(
    worker: Worker, row: int, prompt: list[int], count: int, feed_back: bool = False, **starts: Any
) -> list[int]:
    """Returns ``count`` tokens; each is fed back by its value or as -1."""
    blocks = iter(range(1 + 12 * row, 13 + 12 * row))
    first = [next(blocks) for _ in range(-(-len(prompt) // 4))]
    part = prompt_part(row, prompt, first, **starts)
    tokens = tokens_of(worker.execute(step(1, part, num_tokens=[len(prompt)], num_logits=[1])))
    for length in range(len(prompt), len(prompt) + count - 1):
        new = [next(blocks)] if length % 4 == 0 else []
        part = decode_part(row, length, tokens[-1] if feed_back else -1, new)
        tokens += tokens_of(worker.execute(step(2, part, num_tokens=[1])))
    return tokens


def test_greedy_tokens_equal_transformers(worker: Worker, reference: Any):
    ids = list(PROMPT)
    for _ in range(12):
        ids.append(int(reference_logits(reference, ids)[-1].argmax()))
    assert generate(worker, 0, PROMPT, 12, feed_back=True) == ids[len(PROMPT) :]


@pytest.mark.parametrize("starts", [{}, {"temperature": [1.0], "seed": [3]}])
def test_a_token_that_the_router_does_not_know_yet_equals_its_value(
    worker: Worker, starts: dict[str, Any]
):
    known = generate(worker, 0, PROMPT, 12, feed_back=True, **starts)
    assert generate(worker, 0, PROMPT, 12, **starts) == known
    assert generate(worker, 3, PROMPT, 12, **starts) == known


def test_a_preempted_sequence_samples_on_as_before(worker: Worker):
    starts: dict[str, Any] = {
        "temperature": [1.0],
        "seed": [11],
        "frequency_penalty": [0.5],
        "repetition_penalty": [1.3],
        "num_prompt_ids": [len(PROMPT)],
        "prompt_ids": PROMPT,
    }
    whole = generate(worker, 0, PROMPT, 12, **starts)
    starts |= {"num_output_ids": [5], "output_ids": whole[:5]}
    assert generate(worker, 2, PROMPT + whole[:5], 7, **starts) == whole[5:]


@pytest.mark.parametrize("starts", [{}, {"temperature": [1.0], "seed": [3]}])
@pytest.mark.parametrize("graph_size", [None, 4])
def test_a_row_that_begins_with_its_last_known_token_decodes_as_if_it_went_on(
    worker: Worker, starts: dict[str, Any], graph_size: int | None
):
    """Its other tokens' KV is in blocks that it gets: those of a row that went before."""
    whole = generate(worker, 0, PROMPT, 12, **starts)
    num_computed, block_ids = len(PROMPT) + 4, [1, 2, 3, 4]
    part = decode_part(2, num_computed, whole[4], block_ids)
    part.starts.CopyFrom(row_starts(rows=[2], **starts))
    begin = step(3, part, num_tokens=[1])
    if graph_size is not None:
        begin.agreement.graph_size = graph_size
    tokens = tokens_of(worker.execute(begin))
    for length in range(num_computed + 1, num_computed + 7):
        new = [20 + length // 4] if length % 4 == 0 else []
        tokens += tokens_of(
            worker.execute(step(4, decode_part(2, length, -1, new), num_tokens=[1]))
        )
    assert tokens == whole[5:]


def test_a_prompt_in_chunks_beside_a_decode_and_a_scored_prompt_equals_each_alone(
    either: Worker, reference: Any
):
    random: dict[str, Any] = {"temperature": [1.0], "seed": [5]}
    expected, [drawn] = generate(either, 0, PROMPT, 3), generate(either, 2, PROMPT, 1, **random)
    either.execute(step(1, prompt_part(1, PROMPT, [40, 41, 42]), num_tokens=[9], num_logits=[1]))
    first = pb.RankStep(
        forward_mode=pb.FORWARD_MODE_EXTEND,
        starts=row_starts(rows=[0, 2], temperature=[0, 1], seed=[0, 5]),
        sequences=sequences(
            rows=[1, 0, 2],
            num_tokens=[1, 5, 9],
            num_computed_tokens=[9, 0, 0],
            token_ids=[-1, *PROMPT[:5], *PROMPT],
            num_new_blocks=[0, 2, 3],
            new_block_ids=[1, 2, 50, 51, 52],
            samples=[1, 0, 1],
            num_scored=[0, 0, 8],
            scored_ids=PROMPT[1:],
        ),
    )
    second = pb.RankStep(
        forward_mode=pb.FORWARD_MODE_EXTEND,
        sequences=sequences(
            rows=[0, 1],
            num_tokens=[4, 1],
            num_computed_tokens=[5, 10],
            token_ids=[*PROMPT[5:], -1],
            num_new_blocks=[1, 0],
            new_block_ids=[3],
        ),
    )
    mixed = either.execute(step(2, first, num_tokens=[15], num_logits=[10]))
    last = either.execute(step(3, second, num_tokens=[5], num_logits=[2]))
    tokens = tokens_of(mixed) + tokens_of(last)
    assert tokens == [expected[1], drawn, expected[0], expected[2]]
    scores = reference_logits(reference, PROMPT).log_softmax(-1)[range(8), PROMPT[1:]]
    assert floats_of(mixed.ranks[0].logprobs) == pytest.approx(scores.tolist(), abs=1e-4)


def test_scores_are_those_of_the_model_before_penalties(either: Worker, reference: Any):
    scored = {"scores_output": [1], "num_top_logprobs": [2]}
    part = prompt_part(0, PROMPT, [1, 2, 3], **scored, temperature=[0.3], presence_penalty=[2.0])
    part.sequences.MergeFrom(sequences(num_scored=[8], scored_ids=PROMPT[1:]))

    response = either.execute(step(1, part, num_tokens=[9], num_logits=[9]))

    expected = reference_logits(reference, PROMPT).log_softmax(-1)
    [token] = tokens_of(response)
    chosen = expected[range(9), [*PROMPT[1:], token]]
    values, ids = expected.topk(2)
    [result] = response.ranks
    assert floats_of(result.logprobs) == pytest.approx(chosen.tolist(), abs=1e-4)
    assert ints_of(result.top_ids) == ids.flatten().tolist()
    assert floats_of(result.top_logprobs) == pytest.approx(values.flatten().tolist(), abs=1e-4)


def test_only_rows_that_ask_are_scored(worker: Worker):
    part = pb.RankStep(
        forward_mode=pb.FORWARD_MODE_EXTEND,
        starts=row_starts(
            rows=[0, 1, 2],
            scores_output=[0, 1, 0],
            num_top_logprobs=[5, 3, 5],
            num_logprob_ids=[1, 2, 0],
            logprob_ids=[7, 8, 9],
        ),
        sequences=sequences(
            rows=[2, 1, 0],
            num_computed_tokens=[0, 0, 0],
            token_ids=[4, 5, 6],
            num_new_blocks=[1, 1, 1],
            new_block_ids=[1, 2, 3],
        ),
    )
    [result] = worker.execute(step(1, part, num_tokens=[3])).ranks
    assert len(floats_of(result.logprobs)) == 1
    assert ints_of(result.top_ids)[0] == ints_of(result.next_token_ids)[1]
    assert len(floats_of(result.top_logprobs)) == 3
    assert len(floats_of(result.given_logprobs)) == 2


@pytest.mark.parametrize("starts", [{}, {"temperature": [1.0], "seed": [3]}])
def test_a_step_is_launched_before_the_one_before_is_finished(
    either: Worker, starts: dict[str, Any]
):
    scored = {"scores_output": [1], "num_top_logprobs": [2]}
    expected = generate(either, 0, PROMPT, 4, **starts)
    part = prompt_part(0, PROMPT, [1, 2, 3], **starts, **scored)
    steps = [step(1, part, num_tokens=[9], num_logits=[1])]
    steps += [step(2, decode_part(0, length), num_tokens=[1]) for length in (9, 10, 11)]
    pending = [either.launch(each) for each in steps]
    answers = [either.finish(each) for each in pending]
    assert [token for each in answers for token in tokens_of(each)] == expected
    assert all(len(ints_of(each.ranks[0].top_ids)) == 2 for each in answers)


def test_a_step_without_a_sampling_sequence_gives_no_tokens(worker: Worker):
    part = prompt_part(0, PROMPT, [1, 2, 3])
    part.sequences.samples = b"\0"
    response = worker.execute(step(1, part, num_tokens=[9], num_logits=[0]))
    assert tokens_of(response) == []
    idle = worker.execute(step(2, idle_part(), num_tokens=[0]))
    assert tokens_of(idle) == []


def test_a_refused_step_leaves_no_trace(worker: Worker):
    """The refused step would start a row, write blocks and sample, had it been run."""
    expected = generate(worker, 0, PROMPT, 6)
    generate(worker, 0, PROMPT, 3)
    caches = [cache.clone() for cache in worker._kv_pool.tensors]
    bad = prompt_part(0, [1, 2, 3, 4, 5], [1, 2], temperature=[2.0])
    bad.sequences.MergeFrom(sequences(num_scored=[1], scored_ids=[10_000]))

    with pytest.raises(InvalidStep, match="scored_ids"):
        worker.execute(step(4, bad, num_tokens=[5], num_logits=[2]))

    for before, after in zip(caches, worker._kv_pool.tensors, strict=True):
        assert torch.equal(before, after)
    assert worker._kv_pool.row_num_blocks[0] == 3
    tokens = [
        tokens_of(worker.execute(step(5, decode_part(0, length, -1, new), num_tokens=[1])))
        for length, new in ((11, []), (12, [20]), (13, []))
    ]
    assert [token for [token] in tokens] == expected[3:]


@pytest.mark.parametrize(
    "starts",
    [
        {},
        {"temperature": [1.0], "seed": [3]},
        {"temperature": [0.8], "top_k": [9], "top_p": [0.9], "min_p": [0.05], "seed": [4]},
        {"presence_penalty": [0.7], "frequency_penalty": [0.2], "repetition_penalty": [1.1]},
    ],
)
def test_memory_of_its_own_gives_a_device_the_same_tokens(
    tiny_checkpoint: Path, apart: Worker, starts: dict[str, Any]
):
    """Whatever a step changes must have travelled: nothing may rest on shared memory."""
    shared = make_worker(tiny_checkpoint)
    for row in (2, 0, 2):
        expected = generate(shared, row, PROMPT, 12, **starts)
        assert generate(apart, row, PROMPT, 12, **starts) == expected
        assert torch.equal(apart._kv_pool.tables, apart._kv_pool.tables_cpu)


@pytest.mark.parametrize(
    ("starts", "num_draws"), [({}, 0), ({"temperature": [1.0], "seed": [3]}, 1)]
)
def test_a_decode_step_is_one_copy_there_and_one_back_and_one_of_draws(
    apart: Worker, monkeypatch: pytest.MonkeyPatch, starts: dict[str, Any], num_draws: int
):
    part = prompt_part(0, PROMPT[:3], [1], **starts)
    apart.execute(step(1, part, num_tokens=[3], num_logits=[1]))

    def refuse(values: object, device: object) -> torch.Tensor:
        raise AssertionError("a copy beside the staged one")

    draws: list[object] = []

    def draw(values: object, device: object) -> torch.Tensor:
        draws.append(values)
        return torch.as_tensor(values)

    monkeypatch.setattr("executor.model.sampling.sampler.to_device", draw)
    for module in ("worker", "batch.staging"):
        monkeypatch.setattr(f"executor.{module}.to_device", refuse)
    copier: Any = apart._stager._staging._copier
    for length in range(3, 12):
        before = copier.num_copies
        new = [2 + length // 4] if length % 4 == 0 else []
        apart.execute(step(2, decode_part(0, length, -1, new), num_tokens=[1]))
        assert copier.num_copies - before == 2
        assert len(draws) == num_draws
        draws.clear()


def test_more_blocks_than_are_staged_reach_the_device_all_the_same(apart: Worker):
    """A long prefix found in the cache brings more blocks than a step's own tokens fill."""
    most = apart._stager._capacity.block_places
    num_blocks = most + 1
    part = prompt_part(1, [7], np.arange(1, num_blocks + 1).tolist())
    part.sequences.MergeFrom(sequences(num_computed_tokens=[4 * num_blocks - 1]))
    apart.execute(step(1, part, num_tokens=[1]))
    assert apart._kv_pool.tables[0, 1, :num_blocks].tolist() == list(range(1, num_blocks + 1))


def test_a_row_that_starts_again_has_no_last_token(worker: Worker):
    generate(worker, 0, PROMPT, 2)
    chunk = prompt_part(0, PROMPT[:4], [1])
    chunk.sequences.samples = b"\0"
    worker.execute(step(3, chunk, num_tokens=[4], num_logits=[0]))
    with pytest.raises(InvalidStep, match="-1 for row 0"):
        worker.execute(step(4, decode_part(0, 4, -1, [2]), num_tokens=[1]))


def test_a_join_forgets_all_rows(worker: Worker):
    generate(worker, 0, PROMPT, 2)
    worker.join(2, "")
    with pytest.raises(InvalidStep, match="row 0 runs without having started"):
        worker.execute(step(1, decode_part(0, 10), num_tokens=[1]))
