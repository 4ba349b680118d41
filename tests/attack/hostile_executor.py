"""Hostile executor: one that a router is told of, and that lies in what it describes or answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc
import numpy as np

from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1 import executor_pb2_grpc

Describes = Callable[[pb.DescribeResponse], object]
Answers = Callable[[pb.StepResponse], object]
SOME_TOKEN = 40
FLOOD, FLOOD_BYTES = 60, 32 << 20


def nothing(told: object) -> None:
    pass


@dataclass(frozen=True)
class Lie:
    """What a hostile executor says.

    Attributes:
        word: By which the router's log must name it.
        describes, answers: Change what an honest one would say.
        times: How often each answer is sent.
        is_scored: Whether it is only in answers to requests for log probabilities.
    """

    word: str
    describes: Describes = nothing
    answers: Answers = nothing
    times: int = 1
    is_scored: bool = False


def sizes(**given: int) -> Lie:
    """Returns a lie about sizes, wherever they stand in a description."""

    def lie(told: pb.DescribeResponse) -> None:
        for name, size in given.items():
            for part in (told, told.coordinates, told.model, told.budget):
                if name in part.DESCRIPTOR.fields_by_name:
                    setattr(part, name, size)

    return Lie(next(iter(given)), describes=lie)


@cache
def _many_entries() -> pb.DescribeResponse:
    entries = {f"{number:0100}": "x" * 100 for number in range(100_000)}
    return pb.DescribeResponse(agreement=entries)


def agrees_to_much(told: pb.DescribeResponse) -> None:
    told.MergeFrom(_many_entries())


def tokens(token: int) -> Lie:
    def lie(told: pb.StepResponse) -> None:
        column = told.ranks[0].next_token_ids
        told.ranks[0].next_token_ids = np.full(len(column) // 4, token, "<i4").tobytes()

    return Lie("token", answers=lie)


def top_ids(told: pb.StepResponse) -> None:
    column = told.ranks[0].top_ids
    told.ranks[0].top_ids = np.full(len(column) // 4, -7, "<i4").tobytes()


def half_a_column(told: pb.StepResponse) -> None:
    told.ranks[0].next_token_ids = told.ranks[0].next_token_ids[:3]


def another_step(told: pb.StepResponse) -> None:
    told.step_id += 7


def much(told: pb.StepResponse) -> None:
    told.ranks[0].next_token_ids = b""
    told.ranks[0].logprobs = bytes(FLOOD_BYTES)


LIES: Mapping[str, Lie] = {
    "2^22 DP ranks of 32": sizes(dp_size=1 << 22, attn_tp_size=32),
    "2^31 - 1 KV blocks": sizes(num_kv_blocks=(1 << 31) - 1),
    "2^22 sequences": sizes(num_rows=1 << 22, max_num_seqs=1 << 22, max_num_logits=1 << 22),
    "blocks of no token": sizes(block_size=0),
    "epoch 2^64 - 1": sizes(epoch=(1 << 64) - 1),
    "a vocabulary of nothing": sizes(vocab_size=0),
    # Not read, so that only the call can be named.
    "an agreement of 100,000 entries": Lie("Describe", describes=agrees_to_much),
    "token -1": tokens(-1),
    "token 2^31 - 1": tokens((1 << 31) - 1),
    "token 264 of 264": tokens(264),
    "likely token -7": Lie("top_ids", answers=top_ids, is_scored=True),
    "a column of 3 bytes": Lie("token", answers=half_a_column),
    "another step's answer": Lie("step", answers=another_step),
    "60 answers of 32 MiB": Lie("", answers=much, times=FLOOD),
}
HONEST = Lie("")


class HostileExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """A group of one that lies.

    Args:
        honest: Describes an executor; what the lie leaves is said after it.

    Attributes:
        num_told: How often the lie has been told.
    """

    def __init__(self, honest: pb.DescribeResponse) -> None:
        self.num_told = 0
        self._honest = honest
        self._lie, self._instance = HONEST, "first"
        self._started_anew = asyncio.Event()
        self._scores: dict[int, int] = {}  # top log probabilities of the rows that are scored

    def tell(self, lie: Lie) -> None:
        """Lies so from now on, as a process that was started anew."""
        self._lie, self.num_told, self._instance = lie, 0, uuid.uuid4().hex
        self._started_anew.set()
        self._started_anew = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> pb.DescribeResponse:
        told = pb.DescribeResponse()
        told.CopyFrom(self._honest)
        told.coordinates.CopyFrom(pb.Coordinates(dp_size=1, attn_tp_size=1, ep_size=1))
        told.instance_id = self._instance
        told.ClearField("driver")  # who drives the honest one drives no group of this one
        self._lie.describes(told)
        self.num_told += self._lie.describes is not nothing
        return told

    async def Prepare(self, request: Any, context: Any) -> pb.PrepareResponse:
        host = context.peer().partition(":")[2].rpartition(":")[0]
        return pb.PrepareResponse(store_address=f"{host}:9")

    async def Join(self, request: Any, context: Any) -> pb.JoinResponse:
        self._scores.clear()
        return pb.JoinResponse(instance_id=self._instance)

    async def Step(self, requests: Any, context: Any) -> None:
        answering = asyncio.create_task(self._answer_all(requests, context))
        anew = asyncio.create_task(self._started_anew.wait())
        try:
            await asyncio.wait({answering, anew}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            anew.cancel()
            await asyncio.gather(answering, anew, return_exceptions=True)

    async def _answer_all(self, requests: Any, context: Any) -> None:
        async for request in requests:
            answer = self._answer(request)
            if answer.ranks[0].next_token_ids:
                self._lie.answers(answer)
                self.num_told += self._lie.answers is not nothing
            for _ in range(self._lie.times):
                await context.write(answer)

    def _answer(self, request: pb.StepRequest) -> pb.StepResponse:
        part = request.ranks[0]
        self._note_starts(part.starts)
        rows = np.frombuffer(part.sequences.rows, "<i4")
        if part.sequences.samples:
            rows = rows[np.frombuffer(part.sequences.samples, "u1") > 0]
        scored = [self._scores[row] for row in rows.tolist() if row in self._scores]
        result = pb.RankResult(
            dp_rank=part.dp_rank,
            next_token_ids=np.full(len(rows), SOME_TOKEN, "<i4").tobytes(),
            logprobs=bytes(4 * len(scored)),
            top_ids=bytes(4 * sum(scored)),
            top_logprobs=bytes(4 * sum(scored)),
        )
        return pb.StepResponse(
            epoch=request.epoch,
            step_id=request.step_id,
            ranks=[result],
            agreement_crc32=agreement_crc32(request),
            part_crc32=part_crc32(request),
        )

    def _note_starts(self, starts: pb.RowStarts) -> None:
        rows = np.frombuffer(starts.rows, "<i4")
        is_scored = np.frombuffer(starts.scores_output or bytes(len(rows)), "u1")
        tops = np.frombuffer(starts.num_top_logprobs or bytes(4 * len(rows)), "<i4")
        for row, scores, top in zip(rows.tolist(), is_scored, tops.tolist(), strict=True):
            self._scores.pop(row, None)
            if scores:
                self._scores[row] = top


@asynccontextmanager
async def hostile_executor(
    listen: str, honest_address: str, token: str | None
) -> AsyncIterator[HostileExecutor]:
    """Runs one that describes itself as the honest executor does, until it is told to lie."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    async with grpc.aio.insecure_channel(honest_address) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        hostile = HostileExecutor(await stub.Describe(pb.DescribeRequest(), metadata=metadata))
    options = [("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(hostile, server)
    server.add_insecure_port(listen)
    await server.start()
    try:
        yield hostile
    finally:
        await server.stop(None)
