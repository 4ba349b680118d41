"""If these fail, an executor runs other tokens, blocks or sampling than the router planned."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from protos.executor.sampling_fields import SAMPLING_FIELDS, SamplingField
from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from router.executors.step_codec import (
    WrongAnswer,
    decode_step,
    difference,
    encode_starts,
    encode_step,
)
from router.requests.request import Listeners, OutputOptions, SamplingParams, Sequence
from router.scheduling.step import (
    BatchMode,
    PaddingMode,
    RankBatch,
    RowStart,
    Scoring,
    SpeculationShape,
    StepResult,
)
from tests.router.support.plans import join_batches
from tests.router.support.requests import make_request
from tests.router.support.stepper import CHAIN, Stepper, drafting, make_shape

READER = Listeners(max_listeners=1).open()
DTYPES = {"samples": "u1", "scores_output": "u1", "seed": "<u8", "biases": "<f4"}


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make_sequence(sampling: SamplingParams | None = None, **fields: Any) -> Sequence:
    return make_request(
        [1, 2, 3], READER, 5, sampling=sampling or SamplingParams(), **fields
    ).sequences[0]


def encode(*batches: RankBatch, **agreement: Any) -> list[pb.StepRequest]:
    """Returns the requests as executors read them."""
    requests, _ = encode_step(join_batches(batches, **agreement), epoch=3, step_id=9)
    return [pb.StepRequest.FromString(request) for request in requests]


def starts_of(*sequences: Sequence) -> pb.RowStarts:
    columns = pb.RowStarts()
    encode_starts(columns, [RowStart(row, s) for row, s in enumerate(sequences)])
    return pb.RowStarts.FromString(columns.SerializeToString())


def columns_of(message: Any) -> dict[str, list[Any]]:
    """Returns the columns that are there, by name."""
    dtypes = {field.name: field.dtype for field in SAMPLING_FIELDS} | DTYPES
    return {
        field.name: np.frombuffer(data, dtypes.get(field.name, "<i4")).tolist()
        for field, data in message.ListFields()
    }


DECODE = RankBatch(BatchMode.DECODE, ints(0, 4), ints(17, 3), ints(-1, 8))
IDLE = RankBatch(BatchMode.IDLE, ints(), ints())
EXTEND_COLUMNS = {
    "rows": ints(1, 2),
    "num_computed_tokens": ints(0, 4),
    "token_ids": ints(5, 6, 7),
    "num_tokens": ints(2, 1),
    "num_new_blocks": ints(1, 2),
    "new_block_ids": ints(9, 10, 11),
    "new_window_block_ids": ints(0, 12, 13),
    "samples": np.array([0, 1], dtype=np.uint8),
    "num_scored": ints(2, 0),
    "scored_ids": ints(6, 7),
}
EXTEND = RankBatch(BatchMode.EXTEND, **EXTEND_COLUMNS, starts=[RowStart(1, make_sequence())])


def test_every_rank_gets_the_same_agreement_and_its_own_part() -> None:
    requests = encode(
        DECODE,
        IDLE,
        global_num_tokens_for_logprob=(5, 0),
        has_extend=True,
        padding_mode=PaddingMode.SUM_LEN,
        graph_size=8,
    )
    assert [(r.epoch, r.step_id) for r in requests] == [(3, 9)] * 2
    assert [part.dp_rank for request in requests for part in request.ranks] == [0, 1]
    first, second = (request.agreement for request in requests)
    assert first.SerializeToString() == second.SerializeToString()
    assert list(first.global_num_tokens) == [2, 0]
    assert list(first.global_num_tokens_for_logprob) == [5, 0]
    assert (first.has_extend, first.graph_size) == (True, 8)
    assert first.padding_mode == pb.DP_PADDING_MODE_SUM_LEN


def test_a_speculative_step_says_its_width_and_what_each_sequence_may_gain() -> None:
    [request] = encode(DRAFTING, global_num_tokens=(8,), num_draft_tokens=4)
    assert request.agreement.num_draft_tokens == 4
    assert not request.agreement.global_num_tokens_for_draft
    [part] = request.ranks
    assert part.forward_mode == pb.FORWARD_MODE_DECODE
    expected = {"rows": [3, 5], "num_computed_tokens": [17, 3], "num_tokens": [4, 2]}
    assert columns_of(part.sequences) == expected


def test_a_step_that_is_not_says_what_the_draft_model_runs() -> None:
    requests = encode(DECODE, IDLE, global_num_tokens_for_draft=(3, 0), global_num_sampled=(2, 0))
    for request in requests:
        assert request.agreement.num_draft_tokens == 0
        assert list(request.agreement.global_num_tokens_for_draft) == [3, 0]
        assert list(request.agreement.global_num_sampled) == [2, 0]


def test_an_idle_rank_gets_no_columns() -> None:
    [request] = encode(IDLE)
    [part] = request.ranks
    assert part.forward_mode == pb.FORWARD_MODE_IDLE
    assert not part.HasField("sequences")
    assert not part.HasField("starts")


def test_a_decode_sends_three_columns_and_leaves_defaults_out() -> None:
    [request] = encode(DECODE)
    [part] = request.ranks
    assert part.forward_mode == pb.FORWARD_MODE_DECODE
    expected = {"rows": [0, 4], "num_computed_tokens": [17, 3]}
    assert columns_of(part.sequences) == {**expected, "token_ids": [-1, 8]}
    assert not part.HasField("starts")
    [request] = encode(RankBatch(BatchMode.DECODE, ints(0, 4), ints(17, 3)))
    assert columns_of(request.ranks[0].sequences) == expected  # each its row's last token


def test_nothing_of_one_rank_s_part_is_left_in_the_next_one_s() -> None:
    alone = [encode(batch)[0].ranks[0] for batch in (DECODE, IDLE)]
    after_others = [request.ranks[0] for request in encode(EXTEND, DECODE, EXTEND, IDLE)]
    for rank, part in ((1, alone[0]), (3, alone[1])):
        part.dp_rank = rank
        assert after_others[rank] == part


def test_each_step_s_agreement_is_its_own() -> None:
    """The last one is kept, serialised, for as long as the next is the same."""
    for graph_size in (8, 8, 16, None, 8):
        [request] = encode(DECODE, graph_size=graph_size)
        assert request.agreement.graph_size == (graph_size or 0)
        assert request.agreement.HasField("graph_size") == (graph_size is not None)


def test_an_extend_sends_every_column_as_it_is() -> None:
    [request] = encode(EXTEND)
    expected = {name: column.tolist() for name, column in EXTEND_COLUMNS.items()}
    assert columns_of(request.ranks[0].sequences) == expected
    assert columns_of(request.ranks[0].starts) == {"rows": [1]}


@pytest.mark.parametrize("kv_window", [0, 5])
@pytest.mark.parametrize("drafts", [None, CHAIN])
def test_an_executor_reads_of_a_step_what_was_planned_for_its_rank(
    drafts: SpeculationShape | None, kv_window: int
) -> None:
    """Decodes that take new blocks before chunks of prompts, ranks that do one or none, and drafts."""
    rng, kinds = random.Random(0), Counter[tuple[BatchMode, bool, bool]]()
    shape = make_shape(dp_size=2, num_blocks=60, kv_window=kv_window, speculation=drafts)
    world = Stepper(shape, acceptance=0.6, **drafting(is_on=drafts is not None))
    for _ in range(150):
        if rng.random() < 0.3:
            prompt = [rng.randint(1, 49) for _ in range(rng.randint(1, 30))]
            world.submit(prompt, max_tokens=rng.randint(1, 18))
        if (plan := world.plan()) is None:
            continue
        for rank, request in enumerate(encode_step(plan, epoch=3, step_id=9)[0]):
            [part], batch = pb.StepRequest.FromString(request).ranks, plan.batch(rank)
            columns = {
                name: getattr(batch, name) for name in pb.SequenceColumns.DESCRIPTOR.fields_by_name
            }
            planned = {name: c.tolist() for name, c in columns.items() if c is not None and len(c)}
            if rank not in plan.chunks and not any(planned.get("num_new_blocks", ())):
                planned.pop("num_new_blocks", None)  # a default
            assert columns_of(part.sequences) == planned
            begun = columns_of(part.starts).get("rows", [])
            assert begun == [start.row for start in batch.starts]
            has_decodes = plan.decodes.row_set.num_rows[rank] > 0
            kinds[batch.mode, has_decodes, bool(planned.get("num_new_blocks"))] += 1
        world.commit()
    assert kinds[BatchMode.EXTEND, True, True] > 5
    assert kinds[BatchMode.DECODE, True, True] > 5


# ---- rows that begin


DEFAULTS = make_sequence()


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ([DEFAULTS], {}),
        (
            [DEFAULTS, make_sequence(SamplingParams({"temperature": 0.5, "top_p": 0.25}))],
            {"temperature": [0.0, 0.5], "top_p": [1.0, 0.25]},
        ),
        (
            [make_sequence(SamplingParams(seed=(1 << 64) - 1)), DEFAULTS],
            {"seed": [(1 << 64) - 1, 0]},
        ),
        (
            [make_sequence(output=OutputOptions(logprobs=True, top_logprobs=3)), DEFAULTS],
            {"scores_output": [1, 0], "num_top_logprobs": [3, 0]},
        ),
        (
            [DEFAULTS, make_sequence(output=OutputOptions(logprobs=True, logprob_ids=(9, 4)))],
            {"scores_output": [0, 1], "num_logprob_ids": [0, 2], "logprob_ids": [9, 4]},
        ),
        (  # stop tokens are suppressed until the shortest output
            [
                make_sequence(min_tokens=4, stop_token_ids=(7, 8)),
                make_sequence(stop_token_ids=(7, 8)),
            ],
            {
                "suppressed_until": [3 + 4, 0],
                "num_suppressed_ids": [2, 0],
                "suppressed_ids": [7, 8],
            },
        ),
        (
            [
                make_sequence(SamplingParams(logit_bias=((4, 1.5), (9, -2.0)))),
                DEFAULTS,
                make_sequence(SamplingParams(logit_bias=((1, 0.5),))),
            ],
            {"num_biases": [2, 0, 1], "bias_ids": [4, 9, 1], "biases": [1.5, -2.0, 0.5]},
        ),
        (
            [
                make_sequence(SamplingParams(allowed_ids=(4, 9))),
                make_sequence(SamplingParams(banned=((5, 6), (7, 8, 9)))),
                DEFAULTS,
                make_sequence(SamplingParams(banned=((1, 2),))),
            ],
            {
                "num_allowed_ids": [2, 0, 0, 0],
                "allowed_ids": [4, 9],
                "num_banned": [0, 2, 0, 1],
                "banned_lens": [2, 3, 2],
                "banned_ids": [5, 6, 7, 8, 9, 1, 2],
            },
        ),
    ],
)
def test_rows_send_their_numbers_and_only_what_is_no_default(
    sequences: list[Sequence], expected: dict[str, list[Any]]
) -> None:
    assert columns_of(starts_of(*sequences)) == {"rows": list(range(len(sequences))), **expected}


@pytest.mark.parametrize("field", SAMPLING_FIELDS, ids=lambda field: field.name)
def test_each_sampling_setting_travels(field: SamplingField) -> None:
    value = field.default / 2 + 0.25 if field.dtype == np.float32 else 40
    columns = columns_of(starts_of(make_sequence(SamplingParams({field.name: value})), DEFAULTS))
    assert columns[field.name] == [value, field.default]


def test_only_penalised_rows_send_their_prompt_and_earlier_output() -> None:
    repeated = make_sequence(SamplingParams({"repetition_penalty": 1.5}))
    repeated.tokens = ints(1, 2, 3, 7, 8)  # preempted after two tokens
    present = make_sequence(SamplingParams({"presence_penalty": 1.0}))
    present.tokens = ints(1, 2, 3, 9)
    banning = make_sequence(SamplingParams(banned=((9, 9),)))
    banning.tokens = ints(1, 2, 3, 4)
    columns = columns_of(starts_of(repeated, DEFAULTS, present, banning))
    assert (columns["num_prompt_ids"], columns["prompt_ids"]) == ([3, 0, 0, 0], [1, 2, 3])
    assert (columns["num_output_ids"], columns["output_ids"]) == ([2, 0, 1, 1], [7, 8, 9, 4])


def test_rows_with_a_grammar_send_it_once_and_their_earlier_output() -> None:
    first, second = (make_sequence(grammar=name) for name in ("a", "b"))
    third = make_sequence(grammar="a", grammar_after=(4, 5))
    first.tokens = ints(1, 2, 3, 7, 8)  # preempted after two tokens
    starts = starts_of(first, DEFAULTS, second, third)
    assert list(starts.grammars) == ["a", "b"]
    starts.ClearField("grammars")
    assert columns_of(starts) == {
        "rows": [0, 1, 2, 3],
        "grammar_of": [1, 0, 2, 1],
        "num_output_ids": [2, 0, 0, 0],
        "output_ids": [7, 8],
        "num_begin_ids": [0, 0, 0, 2],
        "begin_ids": [4, 5],
    }


# ---- answers


VOCAB_SIZE = 50


def answer(dp_rank: int = 0, **columns: bytes) -> pb.StepResponse:
    part = pb.RankResult(dp_rank=dp_rank, **columns)
    return pb.StepResponse(epoch=3, step_id=9, ranks=[part], queued_ns=5, forward_ns=6)


def decode(response: pb.StepResponse, batch: RankBatch) -> StepResult:
    return decode_step([response], join_batches([batch]), VOCAB_SIZE)


def test_rows_that_cannot_keep_to_their_grammar_are_read_back_if_the_step_ran_them() -> None:
    tokens = ints(4, 5).tobytes()
    response = answer(next_token_ids=tokens)
    response.ranks[0].grammar_failures.add(row=4, problem="too complex")
    assert decode(response, DECODE).failures == [(0, 4, "too complex")]
    response.ranks[0].grammar_failures.add(row=1, problem="too complex")
    with pytest.raises(WrongAnswer, match="grammar_failures has row 1"):
        decode(response, DECODE)


def test_an_answer_is_read_back() -> None:
    result = decode(answer(next_token_ids=ints(11, 12).tobytes()), DECODE)
    assert result.token_ids.tolist() == [11, 12]
    assert (result.queued_ns, result.forward_ns) == ([5], [6])
    assert not result.scores


# Of two chunks, the last of its prompt samples: its `num_tokens` is what it runs, not what it gains.
CHUNKS = RankBatch(
    BatchMode.EXTEND,
    ints(7, 9),
    ints(0, 0),
    ints(1, 2, 3, 4),
    num_tokens=ints(2, 2),
    samples=np.array([0, 1], np.uint8),
)
DRAFTING = RankBatch(BatchMode.DECODE, ints(3, 5), ints(17, 3), num_tokens=ints(4, 2))


def gained(tokens: int, *gains: int) -> pb.StepResponse:
    return answer(
        next_token_ids=np.arange(tokens, dtype=np.int32).tobytes(),
        num_next_tokens=ints(*gains).tobytes(),
    )


def test_the_tokens_that_drafts_gained_are_read_back() -> None:
    result = decode(gained(5, 4, 1), DRAFTING)
    assert result.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert result.gains is not None
    assert result.gains.tolist() == [4, 1]


def test_a_chunk_that_does_not_sample_gets_no_token() -> None:
    assert decode(gained(1), CHUNKS).token_ids.tolist() == [0]


@pytest.mark.parametrize("batch", [DECODE, DRAFTING])
def test_one_token_each_may_be_said_or_left_out(batch: RankBatch) -> None:
    for response in (gained(2, 1, 1), gained(2)):
        result = decode(response, batch)
        assert result.gains is None or result.gains.tolist() == [1, 1]
        assert result.token_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("batch", "response", "message"),
    [
        (DRAFTING, gained(4, 1, 3), "num_next_tokens has 3 for row 5, which gains 1 to 2 in"),
        (DRAFTING, gained(2, 0, 2), "num_next_tokens has 0 for row 3, which gains 1 to 4 in"),
        (DRAFTING, gained(3, -1, 4), "num_next_tokens has -1 for row 3"),
        (DECODE, gained(3, 1, 2), "num_next_tokens has 2 for row 4, which gains 1 in"),
        (
            DRAFTING,
            gained(4, 3, 2),
            "16 bytes .* for 2 .*, whose num_next_tokens add up to 5, which take 20",
        ),
        (DRAFTING, gained(3, 3), "4 bytes of num_next_tokens for 2 .* which take 8"),
        (
            DRAFTING,
            gained(5),
            "20 bytes of next_token_ids for 2 sequences that sample, which take 8$",
        ),
        *(
            (DECODE, gained(n), f"{4 * n} bytes of next_token_ids for 2 sequences")
            for n in (0, 1, 3)
        ),
        (CHUNKS, gained(2), "8 bytes of next_token_ids for 1 sequences"),
        (CHUNKS, gained(2, 2), "has 2 for row 9, which gains 1 in this step"),
    ],
)
def test_gains_that_were_not_planned_are_refused(
    batch: RankBatch, response: pb.StepResponse, message: str
) -> None:
    with pytest.raises(WrongAnswer, match=message):
        decode(response, batch)


def tokens(dp_rank: int, *token_ids: int) -> pb.StepResponse:
    return answer(dp_rank, next_token_ids=ints(*token_ids).tobytes())


def test_ranks_are_read_side_by_side() -> None:
    responses = [tokens(0, 11, 12), tokens(1), tokens(2, 13)]
    responses[2].forward_ns = 7
    result = decode_step(responses, join_batches([DECODE, IDLE, CHUNKS]), VOCAB_SIZE)
    assert result.token_ids.tolist() == [11, 12, 13]
    assert result.forward_ns == [6, 6, 7]


@pytest.mark.parametrize("token_id", [-1, 50, 50_000, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_is_refused_with_its_rank(token_id: int) -> None:
    problem = f"next_token_ids has {token_id}, where ids are 0 to 49"
    for rank in range(3):
        ids = [[0, 49], [3], [0, 49]]
        ids[rank][-1] = token_id
        responses = [tokens(place, *row) for place, row in enumerate(ids)]
        with pytest.raises(WrongAnswer, match=problem) as caught:
            decode_step(responses, join_batches([DECODE, CHUNKS, DECODE]), VOCAB_SIZE)
        assert caught.value.rank == rank


def test_times_that_no_step_takes_are_refused_with_their_rank() -> None:
    for field in ("queued_ns", "forward_ns"):
        responses = [tokens(0, 1, 2), tokens(1, 3, 4)]
        setattr(responses[1], field, 2**64 - 1)
        with pytest.raises(WrongAnswer, match=f"{field}=18446744073709551615") as caught:
            decode_step(responses, join_batches([DECODE, DECODE]), VOCAB_SIZE)
        assert caught.value.rank == 1


@pytest.mark.parametrize("column", [b"abc", b"12345"])
def test_a_column_that_is_no_whole_number_of_tokens_is_refused(column: bytes) -> None:
    with pytest.raises(WrongAnswer, match=f"{len(column)} bytes of next_token_ids"):
        decode(answer(next_token_ids=column), CHUNKS)
    with pytest.raises(WrongAnswer, match=f"{len(column)} bytes of num_next_tokens"):
        decode(answer(next_token_ids=b"1234", num_next_tokens=column), CHUNKS)


def test_an_answer_for_another_rank_is_refused() -> None:
    with pytest.raises(WrongAnswer, match=r"it answered for the ranks \[1\]"):
        decode(tokens(1, 1, 2), DECODE)
    with pytest.raises(WrongAnswer, match=r"ranks \[\]"):
        decode(pb.StepResponse(), DECODE)


def scored_batch() -> RankBatch:
    output = OutputOptions(logprobs=True, top_logprobs=2, logprob_ids=(7,))
    sequence = make_sequence(output=output)
    return RankBatch(
        BatchMode.EXTEND,
        ints(0),
        ints(0),
        ints(1, 2, 3),
        samples=np.array([1], np.uint8),
        scorings=[Scoring(sequence, ints(2, 3), sample_index=0)],
    )


def scores(num_scores: int, num_top: int) -> pb.StepResponse:
    return answer(
        next_token_ids=ints(4).tobytes(),
        logprobs=np.arange(num_scores, dtype=np.float32).tobytes(),
        top_ids=np.arange(num_top, dtype=np.int32).tobytes(),
        top_logprobs=np.arange(num_top, dtype=np.float32).tobytes(),
        given_logprobs=np.arange(num_scores, dtype=np.float32).tobytes(),
    )


def test_log_probabilities_are_read_back() -> None:
    result = decode(scores(3, 6), scored_batch()).scores[0]
    assert result.logprobs.tolist() == [0.0, 1.0, 2.0]
    assert result.top_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert result.top_logprobs.dtype == np.float32
    assert result.given_logprobs.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("token_id", [-7, 50, 2**31 - 1])
def test_an_alternative_outside_the_vocabulary_is_refused(token_id: int) -> None:
    response = scores(3, 6)
    response.ranks[0].top_ids = ints(0, 1, token_id, 3, 4, 49).tobytes()
    with pytest.raises(WrongAnswer, match=f"top_ids has {token_id}, where ids are 0 to 49"):
        decode(response, scored_batch())


@pytest.mark.parametrize(("num_scores", "num_top"), [(2, 6), (4, 6), (3, 5), (0, 0)])
def test_missing_log_probabilities_are_refused(num_scores: int, num_top: int) -> None:
    with pytest.raises(WrongAnswer, match=r"where \(12, 24, 24, 12\) are due"):
        decode(scores(num_scores, num_top), scored_batch())


@pytest.mark.parametrize("num_rows", [0, 1, 40, 9000, 20_000])
def test_the_checksums_are_those_of_what_an_executor_reads(num_rows: int) -> None:
    """Lengths of one, two and three bytes precede what they are of."""
    rows = np.arange(num_rows, dtype=np.int32)
    batches = (RankBatch(BatchMode.DECODE, rows, rows), DECODE)
    requests, checksum = encode_step(join_batches(batches), epoch=3, step_id=9)
    for rank, data in enumerate(requests):
        request = pb.StepRequest.FromString(data)
        response = pb.StepResponse(
            agreement_crc32=agreement_crc32(request), part_crc32=part_crc32(request)
        )
        assert response.agreement_crc32 == checksum
        assert difference(response, requests[rank]) == ""
        assert difference(response, requests[1 - rank]) == "another part"
