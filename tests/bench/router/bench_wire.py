"""Times ways to put one decode step of one DP rank into protobuf, and ours end to end.

    python -m tests.bench.router.bench_wire [--sequences 256]

A step has five integers per sequence: row, position, token, block, sampling switch. Four layouts,
made at run time from one descriptor, carry the same numbers from numpy arrays to bytes and back
to numpy arrays: a message per sequence, packed `repeated` columns, and `bytes` columns. Then our
own StepRequest and StepResponse, with the counts of 16 ranks. Encoding ends with
SerializeToString and decoding begins with FromString. Each cell is the least of 20 repeats of
many calls, in microseconds: what the code costs when nobody else takes the core.
"""

import timeit
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from protos.executor.v1 import executor_pb2 as pb
from router.executors.step_codec import decode_step, encode_step
from router.scheduling.step import BatchMode, RankBatch, StepPlan
from tests.bench.support.options import parse_options
from tests.router.support.plans import join_batches

FIELDS = ("row", "position", "token", "block", "samples")
NUM_RANKS = 16
REPEATS = 20


def make_messages() -> dict[str, Any]:
    """Returns message classes Sequences (of Sequence), Repeated and Bytes, five fields each."""
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")

    def add(name: str, field_names: tuple[str, ...], **field: Any) -> None:
        message = file.message_type.add(name=name)
        for number, field_name in enumerate(field_names, start=1):
            message.field.add(name=field_name, number=number, **field)

    add("Sequence", FIELDS, type=types.TYPE_INT32, label=types.LABEL_OPTIONAL)
    add("Repeated", FIELDS, type=types.TYPE_INT32, label=types.LABEL_REPEATED)
    add("Bytes", FIELDS, type=types.TYPE_BYTES, label=types.LABEL_OPTIONAL)
    of = {"type": types.TYPE_MESSAGE, "type_name": ".bench.Sequence"}
    add("Sequences", ("sequences",), label=types.LABEL_REPEATED, **of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"bench.{name}"))
        for name in names
    }


class Layout(NamedTuple):
    """One way to carry columns: to bytes, and back."""

    name: str
    encode: Callable[[list[np.ndarray]], bytes]
    decode: Callable[[bytes], list[np.ndarray]]


def make_layouts() -> list[Layout]:
    messages = make_messages()
    sequences, repeated, columnar = (messages[n] for n in ("Sequences", "Repeated", "Bytes"))

    def encode_sequences(columns: list[np.ndarray]) -> bytes:
        message = sequences()
        for row, position, token, block, samples in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            message.sequences.add(
                row=row, position=position, token=token, block=block, samples=samples
            )
        data: bytes = message.SerializeToString()
        return data

    def decode_sequences(data: bytes) -> list[np.ndarray]:
        values = [
            (s.row, s.position, s.token, s.block, s.samples)
            for s in sequences.FromString(data).sequences
        ]
        return list(np.array(values, dtype=np.int32).T)

    def encode_repeated(columns: list[np.ndarray]) -> bytes:
        values = [column.tolist() for column in columns]
        data: bytes = repeated(**dict(zip(FIELDS, values, strict=True))).SerializeToString()
        return data

    def decode_repeated(data: bytes) -> list[np.ndarray]:
        message = repeated.FromString(data)
        return [np.array(getattr(message, name), dtype=np.int32) for name in FIELDS]

    def encode_bytes(columns: list[np.ndarray]) -> bytes:
        values = [column.tobytes() for column in columns]
        data: bytes = columnar(**dict(zip(FIELDS, values, strict=True))).SerializeToString()
        return data

    def decode_bytes(data: bytes) -> list[np.ndarray]:
        message = columnar.FromString(data)
        return [np.frombuffer(getattr(message, name), dtype="<i4") for name in FIELDS]

    return [
        Layout("a message per sequence", encode_sequences, decode_sequences),
        Layout("packed repeated columns", encode_repeated, decode_repeated),
        Layout("bytes columns", encode_bytes, decode_bytes),
    ]


def make_plan(num_sequences: int) -> StepPlan:
    rows = np.arange(num_sequences, dtype=np.int32)
    batch = RankBatch(
        BatchMode.DECODE,
        rows,
        rows + 1000,
        num_new_blocks=(rows % 16 == 0).astype(np.int32),
        new_block_ids=rows[::16] + 1,
    )
    counts = (num_sequences,) * NUM_RANKS
    alike = {"global_num_tokens": counts, "global_num_tokens_for_logprob": counts}
    return join_batches([batch], graph_size=num_sequences, **alike)


def least_us(work: Callable[[], object]) -> float:
    timer = timeit.Timer(work)
    number = max(1, timer.autorange()[0] // 20)
    return min(timer.repeat(repeat=REPEATS, number=number)) / number * 1e6


def main() -> None:
    num_sequences = parse_options(__doc__, sequences=256).sequences

    rng = np.random.default_rng(0)
    columns = [rng.integers(1, 150_000, num_sequences, dtype=np.int32) for _ in FIELDS]
    print(f"one decode step of {num_sequences} sequences, five integers each")
    print(f"{'us':<28}{'encode':>10}{'decode':>10}{'bytes':>10}")
    for layout in make_layouts():
        data = layout.encode(columns)
        for sent, received in zip(columns, layout.decode(data), strict=True):
            assert np.array_equal(sent, received)
        print_row(layout.name, partial(layout.encode, columns), partial(layout.decode, data), data)

    plan = make_plan(num_sequences)
    [data] = encode_step(plan, 1, 1)[0]
    encode, decode = partial(encode_step, plan, 1, 1), partial(read_request, data)
    print_row("our StepRequest", encode, decode, data)

    tokens = columns[2]
    answer = make_answer(tokens)
    print_row(
        "our StepResponse",
        lambda: make_answer(tokens),
        lambda: decode_step([pb.StepResponse.FromString(answer)], plan, 150_000),
        answer,
    )


def print_row(
    name: str, encode: Callable[[], object], decode: Callable[[], object], data: bytes
) -> None:
    print(f"{name:<28}{least_us(encode):>10.1f}{least_us(decode):>10.1f}{len(data):>10}")


def read_request(data: bytes) -> list[np.ndarray]:
    """What an executor has to take out of a decode step."""
    request = pb.StepRequest.FromString(data)
    columns = request.ranks[0].sequences
    return [
        np.frombuffer(columns.rows, dtype="<i4"),
        np.frombuffer(columns.num_computed_tokens, dtype="<i4"),
        np.frombuffer(columns.num_new_blocks, dtype="<i4"),
        np.frombuffer(columns.new_block_ids, dtype="<i4"),
        np.array(request.agreement.global_num_tokens, dtype=np.int32),
    ]


def make_answer(tokens: np.ndarray) -> bytes:
    part = pb.RankResult(dp_rank=0, next_token_ids=tokens.tobytes())
    return pb.StepResponse(epoch=1, step_id=1, ranks=[part]).SerializeToString()


if __name__ == "__main__":
    main()
