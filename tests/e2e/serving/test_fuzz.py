"""Whatever the network brings to a router or an executor is answered with a reason, and forgotten.

Messages that are random, damaged, huge, late, doubled or right but for one thing
(tests/together/fuzz) go to real processes over real sockets. LOCKSTEP_FUZZ sets how many to each of the
two, LOCKSTEP_FUZZ_SEED which.
"""

import asyncio
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from deploy.local.demo import ask, draw_requests, idle_group
from deploy.local.launch import DEMO_MODEL
from deploy.local.processes import Process
from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1 import executor_pb2_grpc
from protos.serving.v1 import serving_pb2
from protos.transport.error_details import error_details
from tests.e2e.conftest import PATIENT
from tests.e2e.support.logs import scraped
from tests.e2e.support.stacks import served
from tests.executor.support.steps import prompt_part, step, tokens_of
from tests.together.fuzz.mutations import damaged, random_bytes
from tests.together.fuzz.requests import Call, any_call, right_request
from tests.together.fuzz.steps import Sizes, any_step, right_step

NUM_MESSAGES = int(os.environ.get("LOCKSTEP_FUZZ", "1200"))
SEED = int(os.environ.get("LOCKSTEP_FUZZ_SEED", "1"))
NUM_AT_ONCE = 32
CALL_TIMEOUT_S = 240.0
VOCAB_SIZE = 264
EXECUTOR_ARGS = (
    *("--dtype", "float32", "--device", "cpu", "--max-model-len", "128", "--block-size", "4"),
    *("--num-kv-blocks", "200", "--max-num-seqs", "16", "--max-num-batched-tokens", "96"),
)
STEP = "/lockstep.executor.v1.ExecutorService/Step"

# Status and reason of every answer that is precise. UNKNOWN and INTERNAL are bugs.
PUBLIC_ANSWERS = {
    ("OK", ""),
    ("INVALID_ARGUMENT", "INVALID_REQUEST"),
    ("INVALID_ARGUMENT", "CONSTRAINT_FAILED"),
    ("INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
    ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
    ("NOT_FOUND", "MODEL_NOT_FOUND"),
    ("NOT_FOUND", "REQUEST_NOT_FOUND"),
    ("ALREADY_EXISTS", "REQUEST_EXISTS"),
    ("FAILED_PRECONDITION", "RESUME_MISMATCH"),
    ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),  # a timeout of a nanosecond
    ("CANCELLED", "CANCELLED"),  # by a Cancel of the same id
    ("RESOURCE_EXHAUSTED", ""),  # by gRPC: longer than the port takes
    ("CANCELLED", "here"),  # this side left
}
STEP_ANSWERS = {
    ("OK", ""),
    ("INVALID_ARGUMENT", "INVALID_STEP"),
    ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
    ("FAILED_PRECONDITION", "STALE_EPOCH"),
    ("FAILED_PRECONDITION", "STEP_OUT_OF_ORDER"),
}
EPOCH_ANSWERS = {
    ("OK", ""),
    ("INVALID_ARGUMENT", "INVALID_EPOCH"),
    ("INVALID_ARGUMENT", "INVALID_RENDEZVOUS"),
    ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
    ("FAILED_PRECONDITION", "STALE_EPOCH"),
}

# Over the last two thirds of the messages. An executor grows with each new shape that PyTorch runs,
# to some 100 MB in the end.
MAX_ROUTER_GROWTH_BYTES = 24 << 20
MAX_EXECUTOR_GROWTH_BYTES = 128 << 20


class Held:
    """What a process holds of the machine."""

    def __init__(self, process: Process) -> None:
        folder = Path("/proc") / str(process.pid)
        [num_kib] = re.findall(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())
        self.num_bytes = int(num_kib) << 10
        self.num_files = len(list((folder / "fd").iterdir()))


async def check_held(before: Held, process: Process, max_growth_bytes: int) -> None:
    """Connections that this side has left may still be open for a moment."""
    while (after := Held(process)).num_files > before.num_files + 4:
        await asyncio.sleep(0.05)
    assert after.num_bytes - before.num_bytes < max_growth_bytes


def check_log(path: Path) -> None:
    """Nothing failed that nobody expected to."""
    lines = path.read_text().splitlines()
    wrong = [line for line in lines if "Traceback" in line or '"level": "error"' in line]
    assert wrong == []


def outcome_of(error: Any) -> tuple[str, str]:
    return error.code().name, error_details(error).reason


# ---- the public API


def make_call(channel: grpc.Channel, call: Call) -> tuple[str, str]:
    """Returns the call's status and reason; those of requests on a stream are checked here.

    With threads: gRPC's client for asyncio says INTERNAL where it still wrote when the call ended.
    """
    rpc = channel.stream_stream(f"{call.service}/{call.method}")(
        iter(call.messages), timeout=CALL_TIMEOUT_S
    )
    try:
        for data in rpc:
            if call.method == "GenerateMany":
                check_errors(data)
            if call.leaves_early:
                rpc.cancel()
                return "CANCELLED", "here"
    except grpc.RpcError as error:
        return outcome_of(error)
    return "OK", ""


def check_errors(data: bytes) -> None:
    for error in serving_pb2.GenerateManyResponse.FromString(data).errors:
        code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
        assert (code.name, error.reason) in PUBLIC_ANSWERS, error


def make_calls(address: str, calls: Sequence[Call]) -> Counter[tuple[str, str]]:
    """Makes all calls, some at a time. Returns how often each answer came."""
    answers: Counter[tuple[str, str]] = Counter()
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        for call, answer in zip(
            calls, threads.map(partial(make_call, channel), calls), strict=True
        ):
            assert answer in PUBLIC_ANSWERS, (answer, call)
            answers[answer] += 1
    return answers


async def talk_nonsense(address: str, rng: random.Random) -> None:
    """Connections that do not even speak HTTP/2, or stop in the middle of it."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    host, _, port = address.rpartition(":")
    for _ in range(50):
        _, writer = await asyncio.open_connection(host, int(port))
        start = rng.choice((b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", preface))
        writer.write(start + rng.choice((b"", rng.randbytes(300), bytes(9), damaged(rng, preface))))
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def test_no_public_request_breaks_a_router_or_stays_in_it(tmp_path: Path):
    rng = random.Random(SEED)
    calls = [any_call(rng, VOCAB_SIZE) for _ in range(NUM_MESSAGES)]
    router_args = ("--metrics-listen", "127.0.0.1:0", "--vllm-engine", "on", *PATIENT)
    settings = {"executor_args": EXECUTOR_ARGS, "router_args": router_args}
    async with served(tmp_path, dp_size=1, **settings) as (stack, client):
        first = NUM_MESSAGES // 3
        answers = await asyncio.to_thread(make_calls, stack.address, calls[:first])
        executor = stack.executors[0]
        router_before, executor_before = Held(stack.router), Held(executor)
        answers += await asyncio.to_thread(make_calls, stack.address, calls[first:])
        await talk_nonsense(stack.address, rng)

        group = await idle_group(client)
        assert (group.num_waiting, group.num_waiting_tokens) == (0, 0)
        assert group.epoch == 1  # no executor was lost on the way
        while (numbers := await scraped(stack.router))["lockstep_router_open_calls"][()]:
            await asyncio.sleep(0.05)
        assert numbers["lockstep_router_live_requests"][()] == 0
        await check_held(router_before, stack.router, MAX_ROUTER_GROWTH_BYTES)
        await check_held(executor_before, executor, MAX_EXECUTOR_GROWTH_BYTES)
        print(dict(answers))
        # The messages are as varied as they should be, if most kinds of answers were among them.
        assert len(answers) >= 7
        right = [
            await ask(client, request) for request in draw_requests(1, 5) if not request.context
        ]
        assert len(right) > 0
        assert all(answer.is_right for answer in right)
    for process in (stack.router, executor):
        assert await process.exited() == 0
        check_log(process.log_path)


# ---- an executor's


class Driver:
    """Drives one executor, whatever it has just been sent."""

    def __init__(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self._stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._channel = channel
        self._rng = rng
        self._epoch = 0
        self._next_id = 1

    async def join(self) -> None:
        """Begins a new epoch; no earlier message may keep it from doing so."""
        described = await self._stub.Describe(pb.DescribeRequest())
        self._sizes = Sizes(
            vocab_size=described.model.vocab_size,
            num_rows=described.num_rows,
            num_kv_blocks=described.num_kv_blocks,
            block_size=described.model.block_size,
        )
        self._epoch, self._next_id = described.epoch + 1, 1
        store = await self._stub.Prepare(pb.PrepareRequest(epoch=self._epoch, secret=bytes(32)))
        join = pb.JoinRequest(epoch=self._epoch, store_address=store.store_address)
        await self._stub.Join(join)

    async def send_steps(self) -> int:
        """Sends a right step or two, perhaps, and then one that is seldom right. Returns how many."""
        messages = [
            right_step(self._rng, self._sizes, self._next_id + n, self._epoch).SerializeToString()
            for n in range(self._rng.choice((0, 0, 0, 1, 2)))
        ]
        step_id = self._next_id + len(messages)
        messages.append(any_step(self._rng, self._sizes, step_id, self._epoch))
        call = self._channel.stream_stream(STEP)(iter(messages), timeout=CALL_TIMEOUT_S)
        num_answered, answer = 0, ("OK", "")
        try:
            async for data in call:
                response = pb.StepResponse.FromString(data)
                assert (response.epoch, response.step_id) == (self._epoch, self._next_id)
                self._next_id += 1
                num_answered += 1
        except grpc.aio.AioRpcError as error:
            answer = outcome_of(error)
        assert answer in STEP_ANSWERS, (answer, messages)
        # Those before it were right, and it was answered too unless it was refused.
        assert num_answered == len(messages) - (answer != ("OK", ""))
        self.answers[answer] += 1
        return len(messages)

    async def send_epoch(self) -> None:
        """Sends a Prepare or a Join of any epoch."""
        epoch = self._rng.choice((0, 1, self._epoch, self._epoch + 1, 2**63, *[2**64 - 1] * 3))
        address = self._rng.choice(("", "x", "127.0.0.1:1", ":", "[::1]:99999", "h:" + "9" * 5000))
        if self._rng.random() < 0.3:
            method, message = (
                "Prepare",
                pb.PrepareRequest(
                    epoch=epoch, secret=bytes(self._rng.choice((15, 32)))
                ).SerializeToString(),
            )
        else:
            request = pb.JoinRequest(epoch=epoch, store_address=address)
            method, message = "Join", request.SerializeToString()
        message = self._rng.choice((message, damaged(self._rng, message), random_bytes(self._rng)))
        call = self._channel.unary_unary(f"{STEP.removesuffix('Step')}{method}")
        answer = ("OK", "")
        try:
            await call(message, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            answer = outcome_of(error)
        assert answer in EPOCH_ANSWERS, (answer, method, message)

    async def greedy(self) -> list[int]:
        """Returns what the model says to a prompt, in an epoch of its own."""
        await self.join()
        prompt, tokens = [3 + byte for byte in b"\n17+25="], []
        size = self._sizes.block_size
        ids = list(range(1, 1 + -(-(len(prompt) + 4) // size)))
        for _ in range(4):
            needed = -(-len(prompt) // size)
            part = prompt_part(2, prompt, ids[:needed])
            message = step(
                self._next_id, part, num_tokens=[len(prompt)], num_logits=[1], epoch=self._epoch
            )
            [response] = [answer async for answer in self._stub.Step(iter([message]))]
            self._next_id += 1
            tokens += tokens_of(response)
            prompt.append(tokens[-1])
        return tokens


async def test_no_step_message_breaks_an_executor_or_stays_in_it(tmp_path: Path):
    args = ("-m", "executor", "--model", str(DEMO_MODEL), "--listen", "127.0.0.1:0")
    log_path = tmp_path / "executor.log"
    process = Process("executor", (*args, *EXECUTOR_ARGS), log_path=log_path, env={})
    try:
        address = (await process.event("listening"))["address"]
        await process.event("ready_to_join")
        async with grpc.aio.insecure_channel(address) as channel:
            await drive(Driver(channel, random.Random(SEED)), process)
    finally:
        await process.stop(60)
    assert await process.exited() == 0
    check_log(log_path)


async def drive(driver: Driver, process: Process) -> None:
    right = await driver.greedy()
    before, num_sent, num_marks = Held(process), 0, 0
    while num_sent < NUM_MESSAGES:
        if num_marks < num_sent // 100:
            num_marks += 1
            for _ in range(5):
                await driver.send_epoch()
            await driver.join()
            num_sent += 5
        num_sent += await driver.send_steps()
        if num_sent <= NUM_MESSAGES // 3:
            before = Held(process)
    print(dict(driver.answers))
    assert set(driver.answers) == STEP_ANSWERS
    assert await driver.greedy() == right
    await check_held(before, process, MAX_EXECUTOR_GROWTH_BYTES)


def test_the_right_requests_of_this_test_are_right():
    """A damaged request says nothing if the one that it was before would have been refused too."""
    rng = random.Random(SEED)
    requests = [right_request(rng, VOCAB_SIZE) for _ in range(100)]
    assert all(request.WhichOneof("prompt") for request in requests)
    assert all(1 <= request.stop.max_tokens <= 4 for request in requests)
