"""Callers of a router, kept apart: whose cached prompts a request finds, how much it may ask for.

What one caller sends is a flow; of a gateway that names its users in metadata, what one user sends.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from weakref import WeakValueDictionary

from protos.settings import Rule, at_least, one_of, setting
from protos.transport.credentials import Watched
from protos.transport.interceptors import Caller
from router.requests.flow_limits import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    NO_LIMITS,
    RELOAD_S,
    FlowLimits,
    read_flow_limits,
)

MAX_FLOW_NAME = 64  # characters of metadata; of a longer one, its hash

_SALT_KEY = secrets.token_bytes(16)  # without it, nobody outside can work out a block's name


@dataclass(frozen=True, kw_only=True)
class CallerSettings:
    """Settings of what a caller may see and take of what others use too."""

    prefix_cache_scope: str = setting("flow", one_of("flow", "shared"))
    """Whose prompts a prompt's beginning is found among in the prefix cache: flow, its own
    caller's, as far as tokens or certificates tell callers apart; or shared, all callers', and no
    answer then says how much was found, though its time may."""
    operators: str | None = setting(None, unset="only where callers are not told apart, all")
    """Names, with commas, of callers' tokens or certificates that GetStatus tells addresses and
    problems of executors."""
    max_request_outputs: int = setting(
        1 << 20, at_least(64 * (1 + 20), ", for the largest n and top_logprobs")
    )
    """What a request may ask for: n x max_tokens x (1 + top_logprobs), and with prompt_logprobs its
    prompt's tokens x (1 + top_logprobs). More is refused; without max_tokens it gets as many tokens
    as this allows."""
    max_priority: int = setting(
        MAX_PRIORITY,
        Rule(
            f"from {MIN_PRIORITY} to {MAX_PRIORITY}",
            range(MIN_PRIORITY, MAX_PRIORITY + 1).__contains__,
        ),
    )
    """Highest priority that a request may have."""
    flow_metadata: str | None = setting(
        None,
        Rule(
            "a metadata key of a-z, 0-9, - and _, not ending in -bin",
            re.compile(r"(?!.*-bin$)[a-z0-9_-]+").fullmatch,
        ),
        unset="each caller is one flow",
    )
    """Metadata key by which a caller names the flow of a call, such as a gateway its user. Each flow
    gets a share, so set it only where all callers may be trusted with as many as they name."""
    flow_limits: Path | None = setting(None, unset="all flows alike")
    """File of what flows get that have a line in it: NAME weight=2 max_priority=0
    max_waiting_sequences=100 max_waiting_tokens=400000, or some of these. It is read again when it
    changes."""
    max_flow_waiting_sequences: int = setting(0, at_least(0))
    """Sequences of one flow that may wait in each group, where callers are told apart; 0: nine tenths
    of all that may."""
    max_flow_waiting_tokens: int = setting(0, at_least(0))
    """Prompt tokens of one flow that may wait in each group, but that its first request may be longer;
    0: nine tenths of all that may."""

    @property
    def is_cache_shared(self) -> bool:
        """Whether callers find each other's prompts in the prefix cache."""
        return self.prefix_cache_scope == "shared"

    def flow_of(self, caller: Caller, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Returns the names of a flow: the caller's, and what the call's metadata say."""
        named = (value for key, value in metadata if key == self.flow_metadata)
        if (value := str(next(named, ""))) == "":
            return caller
        if len(value) > MAX_FLOW_NAME:
            value = blake2b(value.encode(), digest_size=16).hexdigest()
        return (*caller, f"{self.flow_metadata}={value}")

    @cached_property
    def _limits(self) -> Watched[Mapping[str, FlowLimits], Mapping[str, FlowLimits]] | None:
        if self.flow_limits is None:
            return None
        read = partial(read_flow_limits, self.flow_limits)
        return Watched("flow_limits", read, lambda limits: limits, interval_s=RELOAD_S)

    def limits_of(self, flow: Caller) -> FlowLimits:
        """Returns what the file of limits says of a flow: by its last name that has a line."""
        if self._limits is None:
            return NO_LIMITS
        limits = self._limits.value()
        return next((limits[name] for name in reversed(flow) if name in limits), NO_LIMITS)

    def max_priority_of(self, flow: Caller) -> int:
        """Returns the highest priority that a request of a flow may have."""
        own = self.limits_of(flow).max_priority
        return self.max_priority if own is None else min(own, MAX_PRIORITY)

    def cache_salt(self, caller: Caller) -> bytes:
        """Returns what names of KV blocks begin with, 16 bytes: who has the same shares blocks."""
        return _salt(() if self.is_cache_shared else caller)

    def is_operator(self, caller: Caller) -> bool:
        """Whether a caller is told what concerns the operators only."""
        operators = [name.strip() for name in (self.operators or "").split(",")]
        return not caller or any(name in operators for name in caller if name)


DEFAULTS = CallerSettings()


class Turns:
    """Turns at what takes time before a request waits: a caller's flood of it waits behind itself.

    Args:
        num_at_once: Turns that each caller may have.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._of = WeakValueDictionary[Caller, asyncio.Semaphore]()  # of callers that have some

    def of(self, caller: Caller) -> asyncio.Semaphore:
        return self._of.setdefault(caller, asyncio.Semaphore(self._num_at_once))


@lru_cache(maxsize=1024)
def _salt(caller: Caller) -> bytes:
    return blake2b("\0".join(caller).encode(), key=_SALT_KEY, digest_size=16).digest()
