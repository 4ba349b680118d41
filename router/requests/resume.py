"""Resumed requests: outputs so far that go on as those of preempted sequences do.

    call that broke off   prompt ─▶ o o o o o │
    resumed call          prompt + o o o o o ─┼▶ o o o o ...     num_taken = all that came before

Coins depend on seed and position, penalties and grammars are told the output, and text is a function of
the tokens. So the output goes on token for token, here or at another router.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from router.errors import InvalidRequest
from router.requests.request import Int32Array, Request, Sequence, Suspicion

MAX_AGE_S = 600.0
DIGEST_BYTES = 8
FED_LEN = 512  # tokens whose text is made without a break, so that other threads have their turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """What a resumed request says of the calls before.

    Attributes:
        attempt: 1 and up.
        num_stalled: Attempts right before this one that brought no token.
        age_s: Since the request was first sent.
        outputs: int32, tokens so far by continuation; None: it has ended.
        fields: By continuation, the field that its tokens came in.
    """

    attempt: int
    num_stalled: int = 0
    age_s: float = 0.0
    outputs: Mapping[int, Int32Array | None]
    fields: Mapping[int, str]


def prompt_digest(prompt: Int32Array) -> bytes:
    """Returns 8 bytes by which a prompt is known again."""
    return blake2b(prompt.astype("<i4", copy=False).tobytes(), digest_size=DIGEST_BYTES).digest()


def take_up(request: Request, resume: Resume) -> None:
    """Makes a request go on from its outputs so far, its text included.

    Continuations that have ended leave it. One whose tokens end it is ended by that.

    Args:
        request: Not submitted yet.
        resume: Of some of its continuations.

    Raises:
        InvalidRequest: No call can have given an output.
    """
    request.attempt, request.age_s = resume.attempt, min(resume.age_s, MAX_AGE_S)
    outputs = resume.outputs
    request.sequences = [s for s in request.sequences if outputs.get(s.index, ()) is not None]
    for sequence in request.sequences:
        output = outputs.get(sequence.index)
        if output is not None and len(output):
            _go_on(sequence, output, resume.fields[sequence.index])
        if resume.num_stalled and not sequence.is_ended:
            sequence.suspicion = Suspicion(1, num_output_tokens=sequence.num_resumed)


def _go_on(sequence: Sequence, output: Int32Array, field: str) -> None:
    request, count = sequence.request, len(output)
    max_tokens = request.stop.max_tokens
    if count > max_tokens:
        problem = f"{count} tokens are more than max_tokens, which is {max_tokens} here"
        raise InvalidRequest(field, problem, value=count, limit=max_tokens)
    sequence.tokens = np.concatenate((request.prompt, output))
    sequence.num_taken, sequence.num_resumed = len(sequence.tokens), count
    sequence.progress.last_token_time = request.arrival_time
    end = _replay(sequence, output)
    if end < count:
        problem = f"token {end} of it ends the output, so none can follow; send it without them"
        raise InvalidRequest(field, problem, value=count, limit=end)
    if sequence.text is not None:
        if sequence.is_ended:
            sequence.text.close()
        sequence.text.take()  # came with the tokens


def _replay(sequence: Sequence, output: Int32Array) -> int:
    """Feeds an output's text and looks for its end. Returns the number of tokens up to it, or all."""
    num_prompt, stop, count = sequence.num_prompt_tokens, sequence.request.stop, len(output)
    if not stop.has_stop_strings:  # which nothing but a walk along the tokens can find
        lengths = np.arange(num_prompt + 1, num_prompt + count + 1)
        ends = np.isin(output, stop.stop_token_ids) & (lengths >= sequence.min_len)
        first = min(int(ends.argmax()) + 1 if ends.any() else count, count)
        if sequence.text is not None:
            for start in range(0, first, FED_LEN):
                sequence.text.feed(output[start : min(start + FED_LEN, first)], may_stop=False)
        sequence.end_at(output[first - 1 : first], num_prompt + first)
        return first
    for end in range(1, count + 1):
        if sequence.end_at(output[end - 1 : end], num_prompt + end):
            return end
    return count
