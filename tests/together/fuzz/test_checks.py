"""What the network can bring is read or refused, and nothing else comes of it.

The same messages as in tests/e2e/serving/test_fuzz.py, without processes around the checks: more of them
in less time.
"""

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import vllm_engine_pb2

from executor.batch.read_step import RowProgress, StepLimits, read_step
from executor.budget.capture_sizes import GraphSizes
from executor.budget.token_budget import TokenBudget
from executor.errors import InvalidStep
from executor.parallel.layout import Place
from protos.executor.sampling_fields import SAMPLING_FIELDS
from protos.executor.v1 import executor_pb2
from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError
from router.api.messages import read_request
from router.api.vllm_messages import read_generate, use_field_names
from router.requests.request import Listeners, Request
from tests.router.support import fake_engines
from tests.together.fuzz.requests import any_request, any_vllm_request
from tests.together.fuzz.steps import Sizes, any_step

VOCAB_SIZE = 264
MAX_MODEL_LEN = 64
SIZES = Sizes(vocab_size=VOCAB_SIZE, num_rows=8, num_kv_blocks=32, block_size=4)


MODEL = replace(fake_engines.MODEL, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


def refusals_of(make: Callable[[], serving_pb2.GenerateRequest]) -> list[RpcError]:
    """Makes requests and reads them: some are in range, and some are refused. Returns the errors."""
    listener = Listeners(max_listeners=1).open()
    refusals = []

    async def read_all() -> None:
        for _ in range(500):
            try:
                request = await read_request(make(), model=MODEL, tokenizer=None, listener=listener)
            except RpcError as error:
                refusals.append(error)
            else:
                check_request(request)

    asyncio.run(read_all())
    assert 50 < len(refusals) < 450
    return refusals


@pytest.mark.parametrize("seed", range(10))
def test_a_request_is_read_in_range_or_refused_by_name(seed: int) -> None:
    rng = random.Random(seed)
    refusals = refusals_of(lambda: any_request(rng, VOCAB_SIZE))
    assert [error for error in refusals if not error.field] == []


@pytest.mark.parametrize("seed", range(10))
def test_a_gateways_request_is_read_in_range_or_refused_by_its_own_names(seed: int) -> None:
    rng = random.Random(seed)
    for error in refusals_of(lambda: read_generate(any_vllm_request(rng, VOCAB_SIZE))):
        use_field_names(error)
        assert error.field is not None
        assert str(error).startswith(f"{error.field}: ")
        check_path(vllm_engine_pb2.GenerateRequest.DESCRIPTOR, error.field)


def check_path(message: Descriptor | None, path: str) -> None:
    """Every step of the path is a field of the message before, or one of its unions."""
    for name in re.sub(r"\[[^]]*\]", "", path).split("."):
        assert message is not None, path
        assert name in message.fields_by_name or name in message.oneofs_by_name, path
        field = message.fields_by_name.get(name)
        message = None if field is None else field.message_type


def check_request(request: Request) -> None:
    sampling, stop = request.sampling, request.stop
    numbers = [*sampling.values.values(), *(bias for _, bias in sampling.logit_bias)]
    assert np.isfinite(np.array(numbers, np.float32)).all()
    assert all(field.contains(sampling[field.name]) for field in SAMPLING_FIELDS)
    assert 0 <= request.prompt.min() <= request.prompt.max() < VOCAB_SIZE
    assert 1 <= stop.max_tokens <= MAX_MODEL_LEN - len(request.prompt)
    assert stop.min_tokens <= stop.max_tokens
    assert 1 <= len(request.sequences) <= 64


@pytest.mark.parametrize("seed", range(10))
def test_a_step_is_read_or_refused_by_name_and_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    limits = StepLimits(
        place=Place(),
        budget=TokenBudget(
            max_num_batched_tokens=32, max_num_seqs=SIZES.num_rows, max_num_logits=16
        ),
        num_kv_blocks=SIZES.num_kv_blocks,
        block_size=SIZES.block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        graph_sizes=GraphSizes(decode=(1, 2, 4), extend=(4, 8, 16)),
        takes_grammars=True,
    )
    progress = RowProgress.empty(np.zeros(SIZES.num_rows, np.int64))
    progress.is_live[:4] = progress.has_sampled[:2] = True
    progress.num_blocks[:4] = [1, 2, 3, 10]
    before = [column.copy() for column in (progress.is_live, progress.num_blocks)]
    outcomes = {"read": 0, "refused": 0, "malformed": 0}
    unnamed: list[Exception] = []
    for _ in range(1000):
        data = any_step(rng, SIZES, step_id=1)
        try:
            message = executor_pb2.StepRequest.FromString(data)
        except DecodeError:
            outcomes["malformed"] += 1
            continue
        try:
            columns = read_step(message, limits, progress)
        except InvalidStep as error:
            unnamed += [error] if not error.field else []
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert len(columns.rows) == len(set(columns.rows.tolist())) <= SIZES.num_rows
        assert columns.token_ids.max(initial=0) < VOCAB_SIZE
        assert (columns.num_computed_tokens + columns.num_tokens).max(initial=0) <= MAX_MODEL_LEN
        assert ((columns.new_block_ids > 0) & (columns.new_block_ids < 32)).all()
    assert unnamed == []
    assert all(map(np.array_equal, before, (progress.is_live, progress.num_blocks)))
    assert min(outcomes.values()) > 20, outcomes
