"""Step messages as a broken router, or none at all, sends them to an executor of its own."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.steps import decode_part, idle_part, prompt_part, step
from tests.together.fuzz.mutations import changed, column, damaged, filled, random_bytes

GRAMMARS = ('start: "a" | "b" start', "start: /[0-9]+/", "start: nothing", "", "{", "\x00" * 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a right step must fit in."""

    vocab_size: int
    num_rows: int
    num_kv_blocks: int
    block_size: int


def right_step(rng: random.Random, sizes: Sizes, step_id: int, epoch: int = 1) -> pb.StepRequest:
    """Returns a step that starts a row, or rather one that nobody can refuse."""
    if rng.random() < 0.1:
        return step(step_id, idle_part(), num_tokens=[0], epoch=epoch)
    prompt = [rng.randrange(sizes.vocab_size) for _ in range(rng.randint(1, 12))]
    num_blocks = -(-len(prompt) // sizes.block_size)
    block_ids = [rng.randrange(1, sizes.num_kv_blocks) for _ in range(num_blocks)]
    starts: dict[str, list[float]] = {}
    if rng.random() < 0.5:
        starts = {"temperature": [0.7], "top_k": [3], "top_p": [0.9], "seed": [rng.getrandbits(64)]}
    if rng.random() < 0.3:
        starts |= {"repetition_penalty": [1.2], "num_prompt_ids": [1], "prompt_ids": [prompt[0]]}
    has_grammar = rng.random() < 0.2
    if has_grammar:
        starts |= {"grammar_of": [1]}
    part = prompt_part(rng.randrange(sizes.num_rows), prompt, block_ids, **starts)
    if has_grammar:
        part.starts.grammars.append(rng.choice(GRAMMARS))
    return step(step_id, part, num_tokens=[len(prompt)], num_logits=[1], epoch=epoch)


def any_step(rng: random.Random, sizes: Sizes, step_id: int, epoch: int = 1) -> bytes:
    """Returns the bytes of a step that is seldom right."""
    kind = rng.random()
    if kind < 0.05:
        return random_bytes(rng)
    if kind < 0.15:
        message = filled(rng, pb.StepRequest, 0.8)
        message.epoch, message.step_id = epoch, step_id
        return message.SerializeToString()
    if kind < 0.2:
        part = decode_part(rng.randrange(sizes.num_rows), rng.randint(0, 40))
        return step(step_id, part, num_tokens=[1], epoch=epoch).SerializeToString()
    message = right_step(rng, sizes, step_id, epoch)
    if kind < 0.3:
        return damaged(rng, message.SerializeToString())
    if kind < 0.4:
        return changed(rng, message).SerializeToString()
    for _ in range(rng.choice((1, 1, 1, 2))):
        rng.choice(CHANGES)(rng, message)
    return message.SerializeToString()


def _change_column(rng: random.Random, message: pb.StepRequest) -> None:
    """Another column in place of one, or one entry more, less or other."""
    part = message.ranks[0]
    target = rng.choice((part.starts, part.sequences, part.sequences))
    name = rng.choice(target.DESCRIPTOR.fields).name
    if name == "grammars":
        target.grammars[:] = rng.choices(GRAMMARS, k=rng.randrange(3))
        return
    data: bytes = getattr(target, name)
    match rng.choice(("other", "shorter", "longer", "entry")):
        case "shorter":
            data = data[: rng.randint(0, max(0, len(data) - 1))]
        case "longer":
            data += column(rng)
        case "entry" if data and len(data) % 4 == 0:
            values = np.frombuffer(data, "<i4").copy()
            values[rng.randrange(len(values))] = rng.choice((-1, 0, 1, 2, 50, 2**31 - 1, -(2**31)))
            data = values.tobytes()
        case _:
            data = column(rng)
    setattr(target, name, data)


def _change_agreement(rng: random.Random, message: pb.StepRequest) -> None:
    message.agreement.CopyFrom(changed(rng, message.agreement))


def _double_a_part(rng: random.Random, message: pb.StepRequest) -> None:
    message.ranks.append(message.ranks[0])


def _double_rows(rng: random.Random, message: pb.StepRequest) -> None:
    """The same row twice in one batch, all columns alike."""
    for target in (message.ranks[0].starts, message.ranks[0].sequences):
        for field, data in target.ListFields():
            if isinstance(data, bytes):
                setattr(target, field.name, data * 2)
    for counts in (
        message.agreement.global_num_tokens,
        message.agreement.global_num_tokens_for_logprob,
    ):
        counts[:] = [count * 2 % 2**32 for count in counts]


def _misplace(rng: random.Random, message: pb.StepRequest) -> None:
    """A step that is late, early, or of another epoch."""
    name = "step_id" if rng.random() < 0.5 else "epoch"
    value = getattr(message, name)
    setattr(message, name, rng.choice((0, (value + 1) % 2**64, max(1, value) - 1, 2**63)))


CHANGES: tuple[Callable[[random.Random, pb.StepRequest], None], ...] = (
    *([_change_column] * 8),
    *([_change_agreement] * 2),
    _double_a_part,
    _double_rows,
    _misplace,
)
