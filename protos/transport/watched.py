"""Files that an operator may replace while a process runs: certificates, keys, tokens."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

log = structlog.stdlib.get_logger(__name__)

Raw = TypeVar("Raw")
Parsed = TypeVar("Parsed")


class Watched(Generic[Raw, Parsed]):
    """What some files hold, read again whenever it is asked for. Any thread may ask.

    Contents are compared, not times: a symbolic link that points elsewhere, as Kubernetes replaces
    a Secret, counts, and so does a second change within a clock's tick. Files that cannot be read
    or make no sense, such as half of a new pair, change nothing until they do.

    Args:
        name: What it is, for the log; the setting that names the file.
        read: Reads all files. May raise OSError or ValueError.
        parse: Makes of them what is used. May raise OSError or ValueError.
        interval_s: What was read is taken for current so long.

    Raises:
        OSError: A file cannot be read now.
        ValueError: It makes no sense now.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Raw],
        parse: Callable[[Raw], Parsed],
        *,
        interval_s: float = 0.0,
    ) -> None:
        self._name = name
        self._read = read
        self._parse = parse
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._raw = read()
        self._value = parse(self._raw)
        self._look_time = time.monotonic()
        self._problem = ""

    def value(self) -> Parsed:
        """Returns the same object for as long as the files are the same."""
        if time.monotonic() - self._look_time < self._interval_s:
            return self._value
        with self._lock:
            self._look()
            return self._value

    def _look(self) -> None:
        self._look_time = time.monotonic()
        try:
            raw = self._read()
            if raw != self._raw:
                self._value = self._parse(raw)
                self._raw = raw
                log.info("files_reloaded", setting=self._name)
        except (OSError, ValueError) as error:
            if str(error) != self._problem:  # once, not at each call
                log.warning("files_not_reloaded", setting=self._name, problem=str(error))
            self._problem = str(error)
        else:
            self._problem = ""
