"""Gateway service vllm.grpc.engine.VllmEngine, for gateways such as `smg`.

A thin adapter. A request becomes one of serving.proto and runs as that does (generate.py), with
the same checks and limits; only the messages differ. Methods that are not here answer
UNIMPLEMENTED and say so, which gateways take for "this engine has none".

Needs the package smg-grpc-proto, which has the protocol's messages: import this file only where
RouterConfig says that the service is wanted.
"""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError, abort_on_error
from protos.transport.interceptors import Caller, caller_of
from router.api.generate import GenerationServicer
from router.api.messages import name_request, served
from router.api.unknown_fields import refuse_unknown_fields
from router.api.vllm_kv_events import BlockFeed
from router.api.vllm_messages import (
    Answers,
    Message,
    loads,
    model_info,
    read_generate,
    server_info,
    use_field_names,
)
from router.engine.engines import Engines
from router.errors import Cancelled, HistoryGone, InvalidRequest, OperatorsOnly, Unimplemented
from router.requests.callers import DEFAULTS, CallerSettings

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 * 1024  # of the tokenizer's archive in one message
# After Abort, for the call to end by itself. A client that does not read keeps it from that: the
# call would wait for the client, and hold its place, as long as the connection lasts.
ABORT_GRACE_S = 1.0
MAX_FLUSH_WAIT_S = 600.0  # for requests to end, before the cache is flushed
FLUSH_POLL_S = 0.02
FLUSH_GRACE_S = 5.0  # for steps in flight that run what has ended: they hold its blocks

TOKENIZER_FILE = "tokenizer.json"
# What stands beside tokenizer.json in a checkpoint and says how text is made and read.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "vocab.json",
)
_ENTRY_TIME = (1980, 1, 1, 0, 0, 0)  # the same for all, so that equal files make an equal archive


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Serves VllmEngine from what serves our own API.

    Args:
        generation: Runs requests.
        engines: What it runs them on.
        tokenizer_file: The model's tokenizer.json; None where the router has none.
        version: This router's.
        is_ready: Whether gateways should send requests.
        settings: What a caller may see and do.
    """

    def __init__(
        self,
        generation: GenerationServicer,
        engines: Engines,
        tokenizer_file: Path | None,
        version: str,
        *,
        is_ready: Callable[[], bool],
        settings: CallerSettings = DEFAULTS,
    ) -> None:
        self._generation = generation
        self._engines = engines
        self._tokenizer_file = tokenizer_file
        self._version = version
        self._is_ready = is_ready
        self._settings = settings
        self._feed = BlockFeed(engines.block_logs, engines.measures.kv_snapshots)
        self._start_time = asyncio.get_running_loop().time()
        self._times: dict[tuple[Caller, str], asyncio.Timeout] = {}  # of Generate, by request id
        self._archive: tuple[bytes, str] | None = None

    async def Generate(self, request: Message, context: Context) -> None:
        name = (self._generation.flow_of(context), request.request_id)
        async with abort_on_error(context, name_request(request)):
            try:
                async with self._until_aborted(name):
                    await self._generate(request, context)
            except RpcError as error:
                use_field_names(error)
                raise

    @asynccontextmanager
    async def _until_aborted(self, name: tuple[Caller, str]) -> AsyncIterator[None]:
        """Gives a call of Generate so long, once it is aborted, to end by itself.

        Raises:
            Cancelled: It did not.
        """
        try:
            async with asyncio.timeout(None) as time:
                if name[1]:  # else nobody can name it
                    self._times.setdefault(name, time)
                try:
                    yield
                finally:
                    if self._times.get(name) is time:
                        del self._times[name]
        except TimeoutError:
            if not time.expired():
                raise  # an error of the router
            raise Cancelled("the request was aborted, and its answer not read") from None

    async def _generate(self, request: Message, context: Context) -> None:
        with self._engines.measures.counting_refusals():
            message = read_generate(request)
        answers = Answers(request)

        async def write(response: serving_pb2.GenerateResponse) -> None:
            for answer in answers.add(response):
                await context.write(answer)

        try:
            caller, timeout_s = self._generation.flow_of(context), context.time_remaining()
            await self._generation.run(message, write, caller=caller, call_timeout_s=timeout_s)
        except Cancelled:  # an aborted request ends well, and is not sent again
            for answer in answers.abort():
                await context.write(answer)

    @asynccontextmanager
    async def _checking(self, request: Message, context: Context) -> AsyncIterator[None]:
        """Refuses unknown fields, and ends the call with what the block refuses."""
        async with abort_on_error(context):
            with self._engines.measures.counting_refusals():
                refuse_unknown_fields(request)
                yield

    async def Abort(self, request: Message, context: Context) -> Message:
        async with self._checking(request, context):
            loop, caller = asyncio.get_running_loop(), self._generation.flow_of(context)
        for request_id in request.request_ids:
            self._generation.cancel(caller, request_id)
            time = self._times.get((caller, request_id))
            if time is not None and time.when() is None:
                time.reschedule(loop.time() + ABORT_GRACE_S)
        return pb.AbortResponse()

    async def HealthCheck(self, request: Message, context: Context) -> Message:
        async with self._checking(request, context):
            is_ready = self._is_ready()
        if is_ready:
            return pb.HealthCheckResponse(healthy=True)
        problems = [g.problem for g in self._generation.status(context).groups if g.problem]
        return pb.HealthCheckResponse(
            healthy=False, message="; ".join(problems) or "the router is shutting down"
        )

    async def GetModelInfo(self, request: Message, context: Context) -> Message:
        async with self._checking(request, context):
            model = served(self._engines.model)
        return model_info(model)

    async def GetServerInfo(self, request: Message, context: Context) -> Message:
        async with self._checking(request, context):
            uptime_s = asyncio.get_running_loop().time() - self._start_time
        return server_info(self._engines.status(), self._engines.num_live, uptime_s)

    async def GetLoads(self, request: Message, context: Context) -> Message:
        async with self._checking(request, context):
            entries = loads(self._engines.status())
        if request.HasField("dp_rank"):
            entries = [entry for entry in entries if entry.dp_rank == request.dp_rank]
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._version,
            dp_rank_count=len(entries),
            loads=entries,
        )

    async def FlushCache(self, request: Message, context: Context) -> Message:
        async with self._checking(request, context):
            if not self._settings.is_operator(caller_of(context)):
                raise OperatorsOnly("flushing the cache slows down all callers")
            if not 0 <= (given := request.timeout_s) <= MAX_FLUSH_WAIT_S:
                problem = f"{given:g} is not from 0 to {MAX_FLUSH_WAIT_S:g}"
                limit = f"{0 if given < 0 else MAX_FLUSH_WAIT_S:g}"
                raise InvalidRequest("timeout_s", problem, value=f"{given:g}", limit=limit)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout_s
        while self._engines.num_live and loop.time() < deadline:
            await asyncio.sleep(FLUSH_POLL_S)
        num_dropped, num_left = self._engines.flush_cache()
        deadline = loop.time() + FLUSH_GRACE_S
        while num_left and not self._engines.num_live and loop.time() < deadline:
            await asyncio.sleep(FLUSH_POLL_S)
            num_more, num_left = self._engines.flush_cache()
            num_dropped += num_more
        message = f"{num_dropped} blocks dropped"
        if num_left:
            message += (
                f"; {num_left} stay, since running requests use them: wait longer (timeout_s)"
            )
        return common_pb2.FlushCacheResponse(success=not num_left, message=message)

    async def SubscribeKvEvents(self, request: Message, context: Context) -> None:
        async with self._checking(request, context):
            is_operator = self._settings.is_operator(caller_of(context))
            if self._settings.is_cache_shared and not is_operator:
                raise OperatorsOnly("the cache is shared, and its tokens are others' prompts")
            if request.start_sequence_number:
                raise HistoryGone(request.start_sequence_number)
        salt = self._settings.cache_salt(self._generation.flow_of(context))
        await self._feed.serve(salt, context.write)

    async def GetTokenizer(self, request: Message, context: Context) -> None:
        async with self._checking(request, context):
            if self._tokenizer_file is None:
                raise Unimplemented(
                    "this router has no tokenizer; give the gateway the model's folder"
                )
        if self._archive is None:
            self._archive = await asyncio.to_thread(_zip, self._tokenizer_file)
        archive, sha256 = self._archive
        for start in range(0, len(archive), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            await context.write(
                common_pb2.GetTokenizerChunk(
                    data=archive[start:end], sha256=sha256 if end >= len(archive) else ""
                )
            )


def _zip(tokenizer_file: Path) -> tuple[bytes, str]:
    archive = zip_tokenizer(tokenizer_file)
    return archive, hashlib.sha256(archive).hexdigest()


def zip_tokenizer(tokenizer_file: Path) -> bytes:
    """Returns a zip file of the tokenizer and of what stands beside it, for a gateway without it.

    Args:
        tokenizer_file: The tokenizer's file; in the archive its name is tokenizer.json.

    Raises:
        OSError: It cannot be read.
    """
    paths = {name: tokenizer_file.parent / name for name in COMPANIONS}
    paths = {name: path for name, path in paths.items() if path.is_file()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, path in {TOKENIZER_FILE: tokenizer_file, **paths}.items():
            entry = zipfile.ZipInfo(name, date_time=_ENTRY_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, path.read_bytes())
    return archive.getvalue()


def _refusing(method: str) -> Any:
    async def refuse(self: VllmEngineServicer, request: Any, context: Context) -> None:
        async with self._checking(request, context):
            raise Unimplemented(f"this router does not have {SERVICE}/{method}")

    return refuse


for _method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name:
    if _method not in vars(VllmEngineServicer):
        setattr(VllmEngineServicer, _method, _refusing(_method))


def add_vllm_engine(server: grpc.aio.Server, servicer: VllmEngineServicer) -> None:
    """Adds the service to a server that has not started."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
