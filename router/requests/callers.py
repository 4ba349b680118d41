"""Callers of a router, kept apart: whose cached prompts a request finds, how much it may ask for."""

import secrets
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from protos.settings import Rule, at_least, one_of, setting
from protos.transport.interceptors import Caller

MIN_PRIORITY, MAX_PRIORITY = -100, 100

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
    max_caller_share: float = setting(0.9, Rule("more than 0, at most 1", lambda x: 0 < x <= 1))
    """Share of the waiting queue, by sequences and by tokens, that one caller may fill, where callers
    are told apart."""

    @property
    def is_cache_shared(self) -> bool:
        """Whether callers find each other's prompts in the prefix cache."""
        return self.prefix_cache_scope == "shared"

    def cache_salt(self, caller: Caller) -> bytes:
        """Returns what names of KV blocks begin with, 16 bytes: who has the same shares blocks."""
        return _salt(() if self.is_cache_shared else caller)

    def is_operator(self, caller: Caller) -> bool:
        """Whether a caller is told what concerns the operators only."""
        operators = [name.strip() for name in (self.operators or "").split(",")]
        return not caller or any(name in operators for name in caller if name)


DEFAULTS = CallerSettings()


@lru_cache(maxsize=1024)
def _salt(caller: Caller) -> bytes:
    return blake2b("\0".join(caller).encode(), key=_SALT_KEY, digest_size=16).digest()
