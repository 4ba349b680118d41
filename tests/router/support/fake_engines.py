"""Fake of Engines, at the seam that the public API sees: tests play the executors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from protos.serving.v1 import serving_pb2, serving_pb2_grpc
from protos.transport.admission import Refusals
from protos.transport.errors import RpcError
from protos.transport.interceptors import Caller, RequestReader
from protos.transport.limits import PortLimits
from router.api.generate import UNSHARED, GenerationServicer
from router.api.health import Health
from router.api.text import Tokenizer
from router.errors import Cancelled, DeadlineExceeded, RequestExists, ShuttingDown
from router.requests.request import Columns, FinishReason, Listener, Listeners, Request, Sequence
from router.scheduling.counters import RequestMeasures
from router.scheduling.kv.block_log import BlockLog
from router.scheduling.step import ServedModel

MODEL = ServedModel(
    name="tiny-moe",
    architecture="Qwen3MoeForCausalLM",
    fingerprint="f00d",
    vocab_size=1000,
    max_model_len=100,
    eos_token_ids=(2,),
    supports_constraints=True,
)


class FakeEngines:
    """Keeps requests; a test says what becomes of them.

    Attributes:
        arrivals: Requests submitted that no test has looked at.
        refusal: What `submit` raises, if set.
        echoes: Whether each continuation ends at once, with the prompt as its output.
        logs: What `block_logs` returns.
        flushed: What `flush_cache` returns.
    """

    def __init__(self, model: ServedModel | None = MODEL, max_listeners: int = 8) -> None:
        self.model = model
        self.listeners = Listeners(max_listeners)
        self.live: dict[tuple[Caller, str], Request] = {}
        self.arrivals: asyncio.Queue[Request] = asyncio.Queue()
        self.refusal: RpcError | None = None
        self.echoes = False
        self.groups: list[serving_pb2.GroupStatus] = []
        self.events: list[serving_pb2.Event] = []
        self.is_draining = self.is_shutting_down = False
        self.logs: list[BlockLog | None] = []
        self.flushed = (0, 0)
        self.measures = RequestMeasures()
        self._max_listeners = max_listeners

    @property
    def num_live(self) -> int:
        return len(self.live)

    def begin_drain(self, **_: float) -> None:
        self.is_draining = True

    async def hand_over(self) -> bool:
        return False

    def block_logs(self) -> list[BlockLog | None]:
        return self.logs

    def flush_cache(self) -> tuple[int, int]:
        return self.flushed

    def shut_down(self) -> None:
        self.is_shutting_down = True
        self.refusal = ShuttingDown("this router is shutting down: send the request to another one")
        self.listeners.wake_all()

    def cancel_all(self) -> None:
        for request in list(self.live.values()):
            self.cancel(request, ShuttingDown("this router shut down before the request had ended"))

    def check_open(self) -> None:
        if self.refusal is not None and self.refusal.code is grpc.StatusCode.UNAVAILABLE:
            raise self.refusal

    def check_room(self, *, is_resumed: bool = False) -> None:
        if self.refusal is not None:
            raise self.refusal

    def submit(self, request: Request) -> None:
        self.check_room()
        name = (request.caller, request.request_id)
        if name in self.live:
            raise RequestExists(request.request_id)
        self.live[name], request.served = request, self.model
        if request.deadline is not None:
            error = DeadlineExceeded("been taken", 0.0)
            loop = asyncio.get_running_loop()
            request.expiry = loop.call_at(request.deadline, self.cancel, request, error)
        self.arrivals.put_nowait(request)
        for sequence in [sequence for sequence in request.sequences if sequence.is_ended]:
            self._end(sequence)
        if self.echoes:
            for sequence in request.sequences:
                self.give(sequence, request.prompt.tolist())
                self.finish(sequence)

    def cancel(self, request: Request, error: RpcError | None = None) -> None:
        for sequence in request.sequences:
            if not sequence.is_ended:
                self.fail(sequence, error or Cancelled("the request was cancelled"))

    def fail(self, sequence: Sequence, error: RpcError) -> None:
        """Ends one continuation with an error, whatever becomes of the others."""
        sequence.error = error
        self._end(sequence)

    def find(self, caller: Caller, request_id: str) -> Request | None:
        return self.live.get((caller, request_id))

    def take_columns(self, listener: Listener) -> Columns:
        taken = [
            (request.tag, sequence.take_tokens())
            for request in self.live.values()
            for sequence in request.sequences
            if request.listener is listener and request.is_columnar
        ]
        taken = [(tag, token_ids) for tag, token_ids in taken if len(token_ids)]
        return Columns(
            np.array([tag for tag, _ in taken], dtype=np.uint32),
            np.array([len(token_ids) for _, token_ids in taken], dtype=np.int32),
            np.concatenate([np.zeros(0, np.int32), *[token_ids for _, token_ids in taken]]),
        )

    def status(self) -> list[serving_pb2.GroupStatus]:
        return self.groups

    def overview(self, version: str) -> serving_pb2.GetStatusResponse:
        return serving_pb2.GetStatusResponse(
            groups=self.groups,
            version=version,
            events=self.events,
            is_draining=self.is_draining,
            num_live_requests=self.num_live,
        )

    def give(self, sequence: Sequence, token_ids: Iterable[int]) -> None:
        """Commits tokens, as a step would."""
        new = np.array(list(token_ids), dtype=np.int32)
        sequence.tokens = np.concatenate([sequence.tokens, new])
        if sequence.request.stop.has_stop_strings:
            assert sequence.text is not None
            sequence.stop_string = sequence.text.feed(new, may_stop=True)
        sequence.request.listener.wake()
        if sequence.stop_string is not None:
            self.finish(sequence, FinishReason.STOP)

    def finish(self, sequence: Sequence, reason: FinishReason = FinishReason.LENGTH) -> None:
        sequence.finish_reason = reason
        self._end(sequence)

    async def idle(self) -> None:
        """Returns when no request is live and every call has given its listener back."""
        async with asyncio.timeout(120):
            while self.live or self.listeners.num_free < self._max_listeners:
                await asyncio.sleep(0)  # lets the others run; takes no time of its own

    def _end(self, sequence: Sequence) -> None:
        request = sequence.request
        request.listener.ended.append(sequence)
        request.listener.wake()
        if not request.is_live:
            self.live.pop((request.caller, request.request_id), None)
            if request.expiry is not None:
                request.expiry.cancel()


@asynccontextmanager
async def serve(
    engines: FakeEngines, tokenizer: Tokenizer | None = None, health: Health | None = None
) -> AsyncIterator[str]:
    """Serves engines on loopback and yields the target to connect to."""
    servicer = GenerationServicer(engines, tokenizer, version="1.2.3")  # type: ignore[arg-type]
    services = [generation(servicer), *([] if health is None else [health.add_to])]
    async with listening(*services, **front_of(servicer, engines)) as target:
        yield target
        await engines.idle()  # no call may leave anything behind


@asynccontextmanager
async def listening(
    *services: Callable[[grpc.aio.Server], object],
    interceptors: Iterable[grpc.aio.ServerInterceptor] = (),
    options: Iterable[tuple[str, Any]] = (),
    port: int = 0,
) -> AsyncIterator[str]:
    """Serves on loopback and yields the target to connect to; `services` add themselves."""
    options = [*options, ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(interceptors=[*interceptors], options=options)
    for add in services:
        add(server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def generation(servicer: Any) -> Callable[[grpc.aio.Server], object]:
    return partial(serving_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)


def front_of(servicer: GenerationServicer, engines: FakeEngines) -> dict[str, Any]:
    """Returns what app.py gives the server besides services."""
    limits, refusals = PortLimits(), Refusals(engines.measures.add_refusal)
    reader = RequestReader(limits, refusals, checks=servicer.checks(), unshared=UNSHARED)
    return {"interceptors": [reader], "options": limits.server_options()}


def byte_tokenizer(
    folder: Path, *, special: Iterable[str] = (), added: Iterable[str] = ()
) -> Tokenizer:
    """One token per byte, ids 0 to 255 in the order of the characters that stand for them.

    Args:
        special, added: Further tokens, numbered on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    inner.add_tokens([AddedToken(token) for token in added])
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")
