"""Batch runner: OpenAI's batch lines in, its output lines out, at low priority.

    python -m router.client.batch IN.jsonl OUT.jsonl --router router:50051

A line of IN has a custom_id, `"method": "POST"`, `"url": "/v1/completions"` or "/v1/chat/completions",
and the body of such a request. Each is answered by one line of OUT with its custom_id and a response
or an error, in the order in which they end. OUT grows by whole lines: whatever ends a run, even a
kill, the same command goes on where it was. What may yet succeed, such as a request that meets no
router, is sent again and makes no line.

Ends with 0 if each line has a response, 1 if some have an error, 2 if a file or a flag is refused
before anything is sent, and 3 if it stopped before the end: run it again.
"""

import argparse
import asyncio
import fcntl
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from router.client import CallFailed, Client, Completion, Many, Rejected, TlsFiles
from router.client.batch_lines import (
    OUTPUT_BEGIN,
    BatchRequest,
    LineRefused,
    answer_line,
    error_line,
    read_request,
)

PROG = "python -m router.client.batch"
# A message of this size goes by a call of its own: on a stream, one too large would end them all.
LARGE_BYTES = 256 << 10
RETRY_S = 2.0  # before the router is called again after a failure
# Reasons that another attempt does not change.
FINAL = {
    *("INVALID_REQUEST", "PROMPT_TOO_LONG", "CHAT_TEMPLATE_FAILED", "MODEL_NOT_FOUND"),
    *("CONSTRAINT_FAILED", "EXECUTOR_FAILED", "CANCELLED"),
}
BAR_CELLS = 30
SHOWN_EVERY_S = {True: 0.2, False: 10.0}  # by whether it is a terminal


class Line(NamedTuple):
    """A line of a file of either kind.

    Attributes:
        number: From 1.
        end: Bytes of the file up to its end.
    """

    number: int
    end: int
    custom_id: str
    content: dict[str, Any]


class BatchRefused(Exception):
    """A file that is no batch, or not of this one."""


class BatchStopped(Exception):
    """The batch cannot go on now. Nothing is lost."""


class BatchOutput:
    """File of output lines, of which one run at a time writes.

    Args:
        path: The file. Goes on behind its last whole line, if it exists.
        left: Hashes of the custom ids of the batch, from which those are taken that are answered.

    Attributes:
        num_failed: Lines with an error.

    Raises:
        BatchRefused: It is another batch's, or another run writes it.
        OSError: It cannot be read or written.
    """

    def __init__(self, path: Path, left: set[int]) -> None:
        self.num_failed = 0
        self._left = left
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115  until `close`
        try:
            self._file.truncate(self._read(path))  # half a line is of a run that was killed
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> int:
        """Returns how many bytes are of whole lines, once no other run writes more."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchRefused(f"{path}: another run writes it") from error
        end = 0
        for line in _lines_of(path, is_growing=True):
            if hash(line.custom_id) not in self._left or "error" not in line.content:
                raise BatchRefused(f"{path}, line {line.number}: it answers no line of this batch")
            self._count(line.content)
            end = line.end
        return end

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line, or nothing where the disk is full."""
        data, end = json.dumps(line).encode() + b"\n", self._file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(end)  # a shorter line may fit, and comes behind
            raise
        self._count(line)

    def close(self) -> None:
        """Lets another run write it."""
        self._file.close()

    def _count(self, line: dict[str, Any]) -> None:
        self._left.remove(hash(line["custom_id"]))
        self.num_failed += line["error"] is not None


class Batch:
    """A batch that runs, with at most `window` requests at once.

    Args:
        client: Of the router, not opened yet.
        source: File of batch lines.
        target: File of output lines.
        window: Requests at once.
        priority: Of each.
        patience_s: How long to try without one answer.

    Raises:
        BatchRefused: A file is no batch, or not of this one.
        OSError: It cannot be read or written.
    """

    def __init__(
        self,
        client: Client,
        source: Path,
        target: Path,
        *,
        window: int,
        priority: int,
        patience_s: float,
    ) -> None:
        self._client = client
        self._source = source
        self._window = window
        self._priority = priority
        self._patience_s = patience_s
        # Hashes of the custom ids of lines that have no answer: all that is kept of a line.
        self._left: set[int] = set()
        for line in _lines_of(source):
            if hash(line.custom_id) in self._left:
                problem = f"custom_id {line.custom_id!r} is an earlier line's, too"
                raise BatchRefused(f"{source}, line {line.number}: {problem}")
            self._left.add(hash(line.custom_id))
        self._num_lines = len(self._left)
        self.output = BatchOutput(target, self._left)
        self._num_before = len(self._left)

    async def run(self) -> None:
        """Returns when each line is answered.

        Raises:
            BatchStopped: The router refuses the caller, or there has been none for too long.
            OSError: The output cannot be written.
        """
        shown = asyncio.create_task(self._show())
        since, num_left = time.monotonic(), len(self._left)
        try:
            while self._left and (failure := await self._attempt()):
                if len(self._left) < num_left:
                    since, num_left = time.monotonic(), len(self._left)
                if (
                    isinstance(failure, Rejected)
                    or time.monotonic() - since + RETRY_S > self._patience_s
                ):
                    raise BatchStopped(f"{failure.reason or failure.code.name}: {failure}")
                await asyncio.sleep(RETRY_S)
        finally:
            shown.cancel()
            self.output.close()

    async def _attempt(self) -> CallFailed | None:
        """Asks what is left; returns what ended that early, if anything did."""
        failures: Sequence[Exception] = ()
        try:
            async with self._client as client:
                model = (await client.get_model()).name
                lines = self._unanswered()
                async with client.many() as many, asyncio.TaskGroup() as workers:
                    for _ in range(self._window):
                        workers.create_task(self._work(many, model, lines))
        except* (CallFailed, BatchRefused, OSError) as group:
            failures = group.exceptions
        for failure in failures:
            if not isinstance(failure, CallFailed):
                raise failure
            return failure
        return None

    def _unanswered(self) -> Iterator[Line]:
        return (line for line in _lines_of(self._source) if hash(line.custom_id) in self._left)

    async def _work(self, many: Many, model: str, lines: Iterator[Line]) -> None:
        """Answers one line after another; others take theirs from the same iterator."""
        for line in lines:
            self.output.write(await self._answer(many, model, line))

    async def _answer(self, many: Many, model: str, line: Line) -> dict[str, Any]:
        try:
            request = read_request(line.content, self._priority)
        except LineRefused as error:
            await asyncio.sleep(0)  # the others' turn, as nothing was waited for
            return error_line(line.custom_id, "INVALID_REQUEST", str(error), error.field)
        is_alone = request.num_bytes > LARGE_BYTES
        try:
            completions = await self._ask(self._client if is_alone else many, request)
        except CallFailed as error:
            if error.reason not in FINAL and not (is_alone and _is_too_large(error)):
                raise
            code = error.reason or error.code.name
            return error_line(line.custom_id, code, str(error), error.field, error.request_id)
        return answer_line(line.content, model, completions)

    async def _ask(self, router: Client | Many, request: BatchRequest) -> list[Completion]:
        """Returns all continuations of a request, however long the queue is full."""
        while True:
            try:
                return await router.complete_all(request.prompt, **request.options)
            except CallFailed as error:
                if error.reason != "QUEUE_FULL":
                    raise
                delay_s = error.retry_delay_s or RETRY_S
            await asyncio.sleep(delay_s * random.uniform(1.0, 1.5))

    async def _show(self) -> None:
        """Draws progress on a terminal; prints it now and then anywhere else."""
        is_terminal, start = sys.stderr.isatty(), time.monotonic()
        while True:
            await asyncio.sleep(SHOWN_EVERY_S[is_terminal])
            text, end = self.progress(time.monotonic() - start), "\n"
            if is_terminal:
                width = shutil.get_terminal_size().columns - 1
                text, end = f"\r{text[:width]}\033[K", ""
            print(text, end=end, file=sys.stderr, flush=True)

    def progress(self, elapsed_s: float) -> str:
        """Returns a line on what is done, after some seconds of this run."""
        num_left, num_lines = len(self._left), self._num_lines
        num_done = num_lines - num_left
        bar = "#" * (BAR_CELLS * num_done // max(num_lines, 1))
        rate = (self._num_before - num_left) / elapsed_s
        left = f", {num_left / rate:,.0f} s left" if rate else ""
        return (
            f"[{bar:.<{BAR_CELLS}}] {num_done:,} of {num_lines:,} lines, "
            f"{self.output.num_failed:,} with an error, {rate:,.1f}/s{left}"
        )


def _lines_of(path: Path, *, is_growing: bool = False) -> Iterator[Line]:
    """Yields the lines of a file that are not blank.

    Args:
        path: The file.
        is_growing: Whether its last line counts only if it is whole.

    Raises:
        BatchRefused: A line is no JSON object with a custom id.
    """
    end = 0
    with open(path, "rb") as file:
        for number, data in enumerate(file, start=1):
            if is_growing and not data.endswith(b"\n"):
                if data[: len(OUTPUT_BEGIN)] != OUTPUT_BEGIN[: len(data)]:
                    raise BatchRefused(f"{path}, line {number}: it answers no line of this batch")
                return
            end += len(data)
            if not data.strip():
                continue
            try:
                content = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise BatchRefused(f"{path}, line {number}: no JSON: {error}") from error
            if not isinstance(content, dict) or not isinstance(content.get("custom_id"), str):
                raise BatchRefused(f"{path}, line {number}: no object with a custom_id of text")
            yield Line(number, end, content["custom_id"], content)


def _is_too_large(error: CallFailed) -> bool:
    """Returns whether a call may have failed by its message's size."""
    codes = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
    return error.code in codes and error.reason in ("", "MALFORMED_MESSAGE")


def argument_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(PROG, description="Answers a file of OpenAI's batch lines.")
    add = parser.add_argument
    add("source", metavar="IN.jsonl", type=Path, help="batch lines")
    add("target", metavar="OUT.jsonl", type=Path, help="output lines; a run goes on behind them")
    here, is_default = "127.0.0.1:50051", " (default: %(default)s)"
    add("--router", metavar="HOST:PORT", default=here, help="as gRPC names it" + is_default)
    add("--window", type=int, default=256, help="requests at once" + is_default)
    add("--priority", type=int, default=-100, help="of all requests" + is_default)
    patience = "seconds to go on without one answer" + is_default
    add("--patience-s", type=float, default=600, help=patience)
    add("--ca", type=Path, help="CA certificates of the router, in PEM; without: plain text")
    add("--cert", type=Path, help="certificate to show the router, in PEM; with --ca")
    add("--key", type=Path, help="its private key, in PEM")
    add("--token", type=Path, help="file whose first line is a token that the router takes")
    plaintext = "send the token off this machine in plain text"
    add("--plaintext", action="store_true", help=plaintext)
    return parser


def main() -> int:
    """Runs a batch as the command line says; returns the exit code."""
    parser = argument_parser()
    given = parser.parse_args()
    if given.window < 1:
        parser.error(f"--window {given.window}: need at least 1")
    if given.ca is None and (given.cert or given.key):
        parser.error("--cert and --key go with --ca: without TLS nobody sees them")
    try:
        tls = None if given.ca is None else TlsFiles(given.cert, given.key, given.ca)
        batch = Batch(
            Client(given.router, tls, token=given.token, plaintext=given.plaintext),
            given.source,
            given.target,
            window=given.window,
            priority=given.priority,
            patience_s=given.patience_s,
        )
    except (BatchRefused, OSError, ValueError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start, problem = time.monotonic(), ""
    try:
        asyncio.run(batch.run())
    except (BatchStopped, BatchRefused, OSError) as error:
        problem = f"stopped: {error}"
    except KeyboardInterrupt:
        problem = "stopped by a signal"
    elapsed_s = max(time.monotonic() - start, 1e-3)
    print(("\n" if sys.stderr.isatty() else "") + batch.progress(elapsed_s), file=sys.stderr)
    if problem:
        print(f"{PROG}: {problem}; run it again to go on", file=sys.stderr)
        return 3
    return 1 if batch.output.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
