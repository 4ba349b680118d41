"""Constraints of requests: schemas, expressions, grammars and choices, checked and made one grammar."""

import asyncio
import atexit
import json
import signal
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from subprocess import PIPE, Popen
from threading import Lock, Timer
from typing import Any

from protos.serving.v1 import serving_pb2
from protos.transport.interceptors import Caller
from router.api.chat import STUCK_S, worker_environment
from router.api.grammar_worker import MAX_WORK_S, SIMPLER, dumps, try_build
from router.api.text import Tokenizer
from router.errors import InvalidRequest
from router.requests.callers import Turns
from router.scheduling.step import ServedModel

MAX_CONSTRAINT_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_AFTER = 16  # tokens behind which it begins
NUM_KEPT = 256  # constraints whose grammar is kept, since most services send few
WORKER = "router.api.grammar_worker"


class _Worker:
    """A process that builds grammars, started at the latest when there is one to build."""

    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None
        self._lock = Lock()  # held while one is built

    def build(self, kind: str, text: str) -> tuple[str, str]:
        """Returns what `try_build` does."""
        with self._lock:
            for _ in range(2):  # the first time, somebody else may have ended it
                if line := self._ask(json.dumps([kind, text]).encode() + b"\n"):
                    grammar, problem = json.loads(line)
                    return grammar, problem
                if (code := self._stop()) == -signal.SIGPROF:
                    return "", f"it takes more than {MAX_WORK_S:g} s to build; {SIMPLER}"
        return "", f"its process ended with code {code}, twice; {SIMPLER}"

    def start(self) -> None:
        """Starts the process, if there is none."""
        with self._lock:
            self._start()

    def end(self) -> None:
        """Ends the process."""
        if (process := self._process) is not None:
            process.kill()  # what it builds is over
            with self._lock:
                if self._process is not None:
                    self._stop()

    def _start(self) -> Popen[bytes]:
        if self._process is None:
            command, environment = (sys.executable, "-m", WORKER), worker_environment()
            self._process = Popen(command, stdin=PIPE, stdout=PIPE, env=environment)
        return self._process

    def _ask(self, line: bytes) -> bytes:
        """Returns the answer; empty where the process has ended."""
        process = self._start()
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = Timer(STUCK_S, process.kill)
        timer.start()
        try:
            stdin.write(line)
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            return b""
        finally:
            timer.cancel()
        return answer if answer.endswith(b"\n") else b""

    def _stop(self) -> int:
        """Ends the process, if it has not ended; returns its code."""
        process, self._process = self._process, None
        assert process is not None
        with suppress(BrokenPipeError), process:
            process.kill()
        return process.wait()


@dataclass(slots=True)
class _Build:
    """A grammar that is being built.

    Attributes:
        task: Returns what `try_build` does.
        num_waiting: Requests that wait for it.
    """

    task: asyncio.Task[tuple[str, str]]
    num_waiting: int = 0


class _Kept:
    """Grammars of the constraints that came last, by their digest, or what is wrong with them."""

    def __init__(self) -> None:
        self._built: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._lock = Lock()  # of these
        self._builds: dict[tuple[Caller, bytes], _Build] = {}  # in flight
        self._turns = Turns(1)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        self.worker = _Worker()

    def warm_up(self) -> None:
        """Starts the process, in a thread."""
        self._thread.submit(self.worker.start)

    async def grammar_of(self, kind: str, text: str, caller: Caller = ()) -> str:
        """Returns the grammar of a constraint, built if it is not known; once for all of a caller's that ask.

        One of each caller's stands in line for the process, so that a flood of them waits behind itself.

        Raises:
            InvalidRequest: There is none.
        """
        key = blake2b(f"{kind}:{text}".encode(), digest_size=16).digest()
        built = self._find(key) or await self._build(key, kind, text, caller)
        return _checked(kind, *built)

    def _find(self, key: bytes) -> tuple[str, str] | None:
        with self._lock:
            if key in self._built:
                self._built.move_to_end(key)
            return self._built.get(key)

    async def _build(self, key: bytes, kind: str, text: str, caller: Caller) -> tuple[str, str]:
        """Returns what `try_build` does. One that nobody waits for any more does not begin."""
        if (build := self._builds.get((caller, key))) is None:
            task = asyncio.create_task(self._build_in_turn(key, kind, text, caller))
            build = self._builds[caller, key] = _Build(task)
        build.num_waiting += 1
        try:
            return await asyncio.shield(build.task)
        finally:
            build.num_waiting -= 1
            if not build.num_waiting:
                build.task.cancel()
                del self._builds[caller, key]

    async def _build_in_turn(
        self, key: bytes, kind: str, text: str, caller: Caller
    ) -> tuple[str, str]:
        async with self._turns.of(caller):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._build_now, key, kind, text)

    def _build_now(self, key: bytes, kind: str, text: str) -> tuple[str, str]:
        """Runs in the thread. Another caller's may have been built while this one stood in line."""
        if (built := self._find(key)) is None:
            built = self.worker.build(kind, text)
            with self._lock:
                self._built[key] = built
                if len(self._built) > NUM_KEPT:
                    self._built.popitem(last=False)
        return built


_kept = _Kept()


@atexit.register  # at the latest
def end_worker() -> None:
    """Ends the process that builds grammars; the next one to build starts another."""
    _kept.worker.end()


def warm_up() -> None:
    """Starts the process that builds grammars, so that the first one need not wait for that."""
    _kept.warm_up()


async def read_constraint(
    message: serving_pb2.GenerateRequest, model: ServedModel, caller: Caller = ()
) -> str:
    """Returns the grammar that a request's outputs keep to, as executors get it; empty: none.

    Raises:
        InvalidRequest: The constraint is none, or nothing here can enforce it.
    """
    if not message.HasField("constraint"):
        return ""
    constraint = message.constraint
    match constraint.WhichOneof("kind"):
        case None:
            raise InvalidRequest("constraint", "there is none; set one of its kinds")
        case "json_object":
            kind, text = "json_schema", '{"type": "object"}'
        case "choices":
            kind, text = "choices", dumps(_read_choices(constraint.choices.values))
        case kind:
            text = getattr(constraint, kind)
    if (size := len(text.encode())) > MAX_CONSTRAINT_BYTES:
        problem = f"{size} bytes are too many; send at most {MAX_CONSTRAINT_BYTES}"
        raise InvalidRequest(f"constraint.{kind}", problem, value=size, limit=MAX_CONSTRAINT_BYTES)
    if not model.supports_constraints:
        raise InvalidRequest(
            "constraint",
            "the model is served without a tokenizer.json that fits it, or has no end-of-sequence "
            "token: its outputs cannot be constrained; leave it out",
        )
    if message.stop.ignore_eos:
        raise InvalidRequest(
            "stop.ignore_eos",
            "an output with a constraint ends with the end-of-sequence token; leave one of them out",
        )
    return await _kept.grammar_of(kind, text, caller)


def read_after(
    constraint: serving_pb2.Constraint, model: ServedModel, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Returns the tokens behind which a constraint begins; none: it does at once.

    Raises:
        InvalidRequest: They are too many, none of the model's, or not known.
    """
    ids, field = tuple(constraint.after_token_ids), "constraint.after_token_ids"
    if len(ids) > MAX_AFTER:
        problem = f"{len(ids)} are too many; send at most {MAX_AFTER}"
        raise InvalidRequest(field, problem, value=len(ids), limit=MAX_AFTER)
    if (most := max(ids, default=0)) >= model.vocab_size:
        problem = f"{most} is none of the model's tokens, 0 to {model.vocab_size - 1}"
        raise InvalidRequest(field, problem, value=most, limit=model.vocab_size - 1)
    if not constraint.after_reasoning:
        return ids
    if ids:
        raise InvalidRequest("constraint.after_reasoning", f"{field} is set, too; leave one out")
    if tokenizer is None or not tokenizer.reasoning_end:
        problem = "the router knows no tokens that end the model's reasoning; send after_token_ids"
        raise InvalidRequest("constraint.after_reasoning", problem)
    return tokenizer.reasoning_end


def build_grammar(kind: str, text: str) -> str:
    """Returns the grammar of a constraint, in llguidance's JSON.

    Args:
        kind: Field of Constraint.
        text: What it holds; of choices, as JSON.

    Raises:
        InvalidRequest: There is none. It names the field, and within a schema the place.
    """
    return _checked(kind, *try_build(kind, text))


def _checked(kind: str, grammar: str, problem: str) -> str:
    if problem:
        raise InvalidRequest(f"constraint.{kind}", problem)
    return grammar


def _read_choices(values: Any) -> list[str]:
    field = "constraint.choices.values"
    if not 1 <= (count := len(values)) <= MAX_CHOICES:
        problem, limit = f"{count} are not from 1 to {MAX_CHOICES}", MAX_CHOICES if count else 1
        raise InvalidRequest(field, problem, value=count, limit=limit)
    if "" in values:
        raise InvalidRequest(f"{field}[{list(values).index('')}]", "it is empty")
    return list(values)
