"""Check of KV that outlived an epoch: of a few sequences it is computed again, and compared.

Stale KV would be wrong text without a word. So after a recovery some sequences that ran before are asked
for a token twice more, beside what they do themselves, as far as they have full blocks:

    as found    on whatever blocks caches have of them  likeliest next token, log probability ─┐
    anew        by another salt, so that none is found  log probability of the same token ────┴▶ equal?

Sums of other batches round otherwise, so the two may differ a little; where KV is of other tokens,
they hardly ever differ so little. Where nothing is found, nothing is checked.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

import numpy as np

from protos.transport.interceptors import Caller
from router.requests.request import (
    NO_LISTENER,
    Int32Array,
    Listener,
    OutputOptions,
    Request,
    SamplingParams,
    Sequence,
    StopConditions,
)

MAX_DIFFERENCE = 0.5  # of the log probabilities of a likely token: more than 16 bits explain
NO_HURRY = -1000  # priority of what is computed anew
SALT_BYTES = 16
SEED = 17

_NUMBERS = count(1)
_NOBODY = Listener(NO_LISTENER, np.zeros(1, dtype=np.bool_))


class _Found(NamedTuple):
    """What came of a prompt on blocks that were found."""

    num_tokens: int
    token_id: int
    logprob: float


class KeptCheck:
    """The checks of one group.

    Args:
        share: Of the sequences that ran before a loss, 0 to 1.
        submit: Queues a sequence of the check.
        counts: Counts checks, by what they found.

    Attributes:
        problem: What a check found; "": nothing so far.
    """

    def __init__(
        self,
        share: float,
        submit: Callable[[Sequence], None],
        counts: dict[str, int],
    ) -> None:
        self._share = share
        self._submit = submit
        self._counts = counts
        self._random = random.Random(SEED)
        self._running: dict[Sequence, _Found | None] = {}  # None: it runs on what is found
        self.problem = ""

    def begin(self, waiting: Iterable[Sequence], block_size: int) -> None:
        """Checks some of the sequences that ran before a loss; none is bound yet."""
        for sequence in waiting:
            num_tokens = (len(sequence.tokens) - 1) // block_size * block_size
            has_run = sequence.progress.num_computed_tokens > 0
            if has_run and num_tokens and self._random.random() < self._share:
                prompt, salt = sequence.tokens[: num_tokens + 1].copy(), sequence.request.cache_salt
                self._run(prompt, sequence.request.caller, salt, None)

    def stop(self) -> list[Sequence]:
        """Gives up what runs, as the epoch is over. Returns it; the caller ends it."""
        running, self._running, self.problem = list(self._running), {}, ""
        return running

    def take_end(self, sequence: Sequence) -> bool:
        """Takes the end of a sequence. Returns whether it was one of the check."""
        if sequence not in self._running:
            return False
        found, prompt = self._running.pop(sequence), sequence.request.prompt
        num_cached = sequence.progress.num_cached_tokens
        if sequence.error is not None or (num_cached > 0) != (found is None):
            return True
        [scores] = sequence.logprobs
        if found is None:
            found = _Found(num_cached, scores.token_id, scores.logprob)
            salt = self._random.randbytes(SALT_BYTES)
            self._run(prompt, sequence.request.caller, salt, found)
        elif abs(found.logprob - (logprob := float(scores.given_logprobs[0]))) <= MAX_DIFFERENCE:
            self._counts["equal"] += 1
        else:
            self._counts["differs"] += 1
            self.problem = (
                f"{found.num_tokens} tokens of KV that was kept over a loss differ from what they are "
                f"computed anew: token {found.token_id} has log probability {found.logprob:.3f} behind "
                f"them, and should have {logprob:.3f}"
            )
        return True

    def _run(self, prompt: Int32Array, caller: Caller, salt: bytes, found: _Found | None) -> None:
        """Submits a sequence of a caller's flow: one of its own would take others' places."""
        number = next(_NUMBERS)
        request = Request(
            request_id=f"verify-kept-kv-{number}",
            prompt=prompt,
            sampling=SamplingParams(),
            stop=StopConditions(max_tokens=1),
            output=OutputOptions(
                logprobs=True, logprob_ids=() if found is None else (found.token_id,)
            ),
            listener=_NOBODY,
            arrival_time=asyncio.get_running_loop().time(),
            priority=0 if found is None else NO_HURRY,
            caller=caller,
            cache_salt=salt,
        )
        request.turn = (request.arrival_time, -number)  # no other request's
        [sequence] = request.sequences
        self._running[sequence] = found
        self._submit(sequence)
