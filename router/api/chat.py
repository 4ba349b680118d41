"""Chats as texts, by the chat template of the checkpoint.

A template is a program: it came with the checkpoint, and what callers send says how long it runs. It runs
in a process of its own (chat_worker.py), with bounded processor time and memory: in a thread of the
router it could neither be stopped nor kept from the interpreter, which the router's loop needs. A chat of
20 messages takes 0.2 ms there and back.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from protos.serving.v1 import serving_pb2
from protos.transport.interceptors import Caller
from router.api.chat_worker import ANSWER, FAILED, INVALID, REQUEST, Settings, new_environment
from router.errors import ChatTemplateFailed, InvalidRequest
from router.requests.callers import Turns

log = structlog.stdlib.get_logger(__name__)

MAX_TEMPLATE_BYTES = 1 << 20
MAX_WORKERS = 2  # which render at once; further chats wait for them
WORKER = "router.api.chat_worker"
STUCK_S = 30.0  # without an answer, however little of the processor a worker got: it is ended


def read_templates(folder: Path, file: Path | None, timeout_s: float) -> Settings | None:
    """Returns a checkpoint's chat templates and special tokens; None if it has no template.

    Args:
        folder: Of the checkpoint.
        file: A template to use instead of its own.
        timeout_s: Processor time that a chat may take.

    Raises:
        OSError: A file cannot be read.
        ValueError: One is no template, or is too long.
    """
    config = _read_json(folder / "tokenizer_config.json")
    sources, origin = config.get("chat_template"), str(folder / "tokenizer_config.json")
    own = folder / "chat_template.jinja"
    if file is None and own.is_file():
        file = own
    if file is not None:
        sources, origin = file.read_text(), str(file)
    if not sources:
        return None
    try:
        named = {"default": sources}
        if isinstance(sources, list):
            named = {each["name"]: each["template"] for each in sources}
        if "default" not in named:
            raise ValueError(f"it names {sorted(named)}, but no 'default'")
        for source in named.values():
            if (size := len(source.encode())) > MAX_TEMPLATE_BYTES:
                raise ValueError(f"it has {size} bytes; at most {MAX_TEMPLATE_BYTES} fit")
            new_environment().parse(source)
    except (
        Exception
    ) as error:  # a file of another shape, a wrong template, recursion that is too deep
        raise ValueError(
            f"chat_template: that of {origin} is none: {error}; give another one"
        ) from error
    special = {**_read_json(folder / "special_tokens_map.json"), **config}
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in special.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return Settings(named, tokens, timeout_s)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"tokenizer: {path} is no JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def worker_environment() -> dict[str, str]:
    """Returns an environment in which Python finds the modules that it finds here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class _Worker(NamedTuple):
    """A process that renders, and its ends of the pipes."""

    process: Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def ask(self, data: bytes, max_chars: int) -> tuple[bytes, bytes]:
        self.stdin.write(REQUEST.pack(len(data), max_chars) + data)
        await self.stdin.drain()
        kind, size = ANSWER.unpack(await self.stdout.readexactly(ANSWER.size))
        return kind, await self.stdout.readexactly(size)


class ChatRenderer:
    """Makes texts of chats, in processes that start at the latest when there is something to do.

    Args:
        settings: The templates.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._room = asyncio.Semaphore(MAX_WORKERS)
        self._turns = Turns(MAX_WORKERS)
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._warming: asyncio.Task[None] | None = None

    def warm_up(self) -> None:
        """Starts a process, if none was started, so that the first chat need not wait for that."""
        if self._warming is None and not self._workers:
            self._warming = asyncio.create_task(self._warm_up())

    async def _warm_up(self) -> None:
        try:
            if not self._room.locked():  # else chats start as many as there may be
                async with self._room:
                    self._idle.append(await self._start())
        except OSError as error:
            log.warning("chat_worker_not_started", error=str(error))
        finally:
            self._warming = None

    async def render(self, chat: serving_pb2.Chat, max_chars: int, caller: Caller = ()) -> str:
        """Returns a chat's text; of one that is longer than may be, the beginning, which is, too.

        So many as are rendered at once of each caller's stand in line, so that a flood of them waits
        behind itself.

        Raises:
            InvalidRequest: A field of the chat is wrong.
            ChatTemplateFailed: The template makes no text of it.
        """
        async with self._turns.of(caller):
            await self._room.acquire()  # a caller that leaves before that has nothing rendered
            rendering = asyncio.create_task(self._render(chat.SerializeToString(), max_chars))
            rendering.add_done_callback(self._end_turn)
            return await asyncio.shield(rendering)

    def _end_turn(self, rendering: asyncio.Task[str]) -> None:
        """Makes room for the next chat.

        A caller that leaves must not leave a worker behind that is still at work, nor an error that
        nobody has looked at.
        """
        self._room.release()
        if not rendering.cancelled():
            rendering.exception()

    async def close(self) -> None:
        """Ends the processes."""
        if self._warming is not None:
            await asyncio.wait((self._warming,))
        for worker in list(self._workers):
            with suppress(ProcessLookupError):
                worker.process.kill()
            await worker.process.wait()

    async def _render(self, data: bytes, max_chars: int) -> str:
        for is_second in (False, True):
            worker = self._take_idle() or await self._start()
            try:
                async with asyncio.timeout(STUCK_S):
                    kind, answer = await worker.ask(data, max_chars)
                break
            # The last is uvloop's, where the other end of a pipe is closed.
            except (asyncio.IncompleteReadError, TimeoutError, ConnectionError, RuntimeError):
                code = await self._end(worker)
            if code == -signal.SIGPROF:
                timeout_s = self._settings.timeout_s
                problem = f"it takes more than {timeout_s:g} s of processor time"
                raise ChatTemplateFailed(problem, limit=f"{timeout_s:g}")
            if is_second:  # once, it may have been ended by somebody else
                raise ChatTemplateFailed(f"its process ended with code {code}, twice")
        self._idle.append(worker)
        if kind == INVALID:
            raise InvalidRequest(*json.loads(answer))
        if kind == FAILED:
            raise ChatTemplateFailed(answer.decode(errors="replace"))
        return answer.decode(errors="replace")

    def _take_idle(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            self._workers.remove(worker)  # somebody ended it
        return None

    async def _start(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", WORKER),
            stdin=PIPE,
            stdout=PIPE,
            env=worker_environment(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        worker = _Worker(process, process.stdin, process.stdout)
        self._workers.append(worker)
        settings = json.dumps(self._settings._asdict()).encode()
        with suppress(ConnectionError, RuntimeError):  # if it has ended: to ask it fails, too
            worker.stdin.write(REQUEST.pack(len(settings), 0) + settings)
        return worker

    async def _end(self, worker: _Worker) -> int:
        """Returns what a worker ended with that answers no more."""
        self._workers.remove(worker)
        with suppress(ProcessLookupError):  # Process.kill may take the code from `wait`
            os.kill(worker.process.pid, signal.SIGKILL)
        code = await worker.process.wait()
        log.warning("chat_worker_ended", code=code)
        return code
