"""Replays against eager runs. If one of these fails, a graph answers with another batch's numbers.

Two comparisons for each batch. With the very pass that was captured, run without a graph: the same
kernels at the same sizes, so little may differ. And with the batch as it came, without padding.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.graph.backend import EagerBackend
from executor.model.decoder.kernels import cpu_kernels
from executor.runners import Runner
from tests.executor.support.recording.lazy_attention import LazyAttention
from tests.gpu.support.cases import (
    CPU,
    OTHER_KERNELS,
    PREFILL_RUNNERS,
    SAME_KERNELS,
    Case,
    NewAttention,
    assert_alike,
    device_kernels,
    flashinfer_attention,
    largest_error,
    lazily,
    skip_without_cutedsl,
    torch_attention,
)
from tests.gpu.support.machine import IS_STAND_IN, Machine
from tests.gpu.support.shapes import SMALL, SMALL_MODELS, VERIFY_WIDTH
from tests.gpu.support.weights import decided_weights

MIB = 1 << 20
NUM_RECAPTURES = 1 if IS_STAND_IN else 4
BATCHES_PER_SIZE = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """What a case is made of.

    Attributes:
        model: A key of SMALL_MODELS.
        has_flashinfer: Whether FlashInfer runs what it can, else PyTorch does.
        moe_runner: What runs the experts.
        has_triton: Whether kernels in Triton run what they can.
    """

    model: str
    has_flashinfer: bool = True
    moe_runner: str = "grouped"
    has_triton: bool = True


KINDS = {
    "flashinfer": Kind("4 heads per KV head"),
    "flashinfer without tensor cores": Kind("2 heads per KV head"),
    "flashinfer with fused experts": Kind("4 heads per KV head", moe_runner="cutlass"),
    "flashinfer with cutedsl": Kind("4 heads per KV head", moe_runner="cutedsl"),
    "torch": Kind("4 heads per KV head", has_flashinfer=False),
}
if not IS_STAND_IN:  # which has no Triton
    KINDS["flashinfer without Triton"] = Kind("4 heads per KV head", has_triton=False)


def new_case(machine: Machine, kind: Kind, new_attention: NewAttention | None = None) -> Case:
    """Returns a case on the device; skips the test if the device cannot run it."""
    if machine.no_grouped_graphs and kind.moe_runner == "grouped":
        pytest.skip(machine.no_grouped_graphs)
    ops = machine.ops if kind.has_flashinfer else None
    if kind.has_flashinfer and ops is None:
        pytest.skip("needs FlashInfer: it is not installed")
    if ops is not None and kind.moe_runner == "cutedsl":
        skip_without_cutedsl(ops, machine.device)
    triton = machine.triton if ops is not None and kind.has_triton else None
    config = SMALL_MODELS[kind.model]
    if new_attention is None:
        new_attention = torch_attention
        if ops is not None:
            new_attention = flashinfer_attention(ops, triton=triton)
    return Case(
        config,
        SMALL,
        device_kernels(
            config, SMALL, machine.device, ops, moe_runner=kind.moe_runner, triton=triton
        ),
        new_attention,
        decided_weights(config),
        device=machine.device,
    )


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, machine: Machine) -> Case:
    return new_case(machine, KINDS[request.param])


def counts_by_graph(
    sizes: Sequence[int], rng: np.random.Generator, least: int = 1
) -> Iterator[tuple[int, int]]:
    """Yields what every graph may get: full ones, hardly filled ones, and between."""
    smaller = least - 1
    for size in sizes:
        counts = {size, smaller + 1, *rng.integers(smaller + 1, size + 1, BATCHES_PER_SIZE - 2)}
        yield from ((size, count) for count in sorted(map(int, counts)))
        smaller = size


def decode_batches(case: Case, width: int = 1) -> Iterator[tuple[str, ForwardBatch]]:
    rng = np.random.default_rng(width)
    for size, count in counts_by_graph(case.sizes.decode, rng):
        what = f"{count} sequences of {width} in a graph of {size}"
        yield what, case.decode_batch(rng, count, width)


def prefill_batches(case: Case) -> Iterator[tuple[str, ForwardBatch]]:
    rng = np.random.default_rng(0)
    for size, count in counts_by_graph(case.sizes.prefill, rng, least=2):  # one would be a decode
        yield f"{count} tokens in a graph of {size}", case.prefill_batch(rng, count, size)


# Against eager runs.


def check_replays(
    case: Case, graphs: Runner, padded: Runner, batches: Iterable[tuple[str, ForwardBatch]]
) -> None:
    for what, batch in batches:
        got = case.run(graphs, batch)
        assert_alike(got, case.run(padded, batch), SAME_KERNELS, f"{what}, padded")
        assert_alike(got, case.run_eagerly(batch), OTHER_KERNELS, what)


@pytest.mark.parametrize("width", [1, VERIFY_WIDTH])
def test_decode_replays_equal_eager_runs_in_spite_of_poisoned_tails(
    machine: Machine, case: Case, width: int
) -> None:
    registry = case.decode_registry(width)
    graphs = case.decode(machine.new_backend(), width, registry)
    padded = case.decode(EagerBackend(), width)
    registry.poison_tails()
    check_replays(case, graphs, padded, decode_batches(case, width))


@pytest.mark.parametrize("kind", PREFILL_RUNNERS)
def test_prefill_replays_equal_eager_runs_in_spite_of_poisoned_tails(
    machine: Machine, case: Case, kind: str
) -> None:
    registry = case.prefill_registry()
    graphs = case.prefill(kind, machine.new_backend(), registry)
    padded = case.prefill(kind, EagerBackend())
    registry.poison_tails()
    check_replays(case, graphs, padded, prefill_batches(case))


def test_both_prefill_runners_and_decodes_share_one_memory_pool(
    machine: Machine, case: Case
) -> None:
    """As in an executor: what one graph leaves in the pool, another one overwrites."""
    prefill = [case.prefill(kind, machine.new_backend()) for kind in PREFILL_RUNNERS]
    decode = case.decode(machine.new_backend())
    rng = np.random.default_rng(1)
    for size in (*case.sizes.prefill, *reversed(case.sizes.prefill)):
        extends = case.prefill_batch(rng, max(2, size - 1), size)
        expected = case.run_eagerly(extends)
        for runner in prefill:
            assert_alike(case.run(runner, extends), expected, OTHER_KERNELS, f"{size} tokens")
        decodes = case.decode_batch(rng, int(rng.integers(1, case.sizes.decode[-1] + 1)))
        assert_alike(case.run(decode, decodes), case.run_eagerly(decodes), OTHER_KERNELS, "decode")


def test_the_device_computes_what_the_cpu_computes(machine: Machine, case: Case) -> None:
    """The whole model in float32 on the CPU, from the same weights, keys and values."""
    exact = replace(case.config, dtype=torch.float32)
    cpu = Case(
        exact,
        SMALL,
        cpu_kernels(exact, dtype=torch.float32),
        torch_attention,
        decided_weights(case.config),
        device=CPU,
    )
    for seed in range(4):
        results = []
        for one in (case, cpu):
            rng = np.random.default_rng(seed)
            size = SMALL.prefill[-1]
            batches = (one.prefill_batch(rng, size, size), one.decode_batch(rng, SMALL.decode[-1]))
            results.append([one.run_eagerly(batch) for batch in batches])
        for ours, theirs in zip(*results, strict=True):
            assert_alike(ours, theirs, OTHER_KERNELS, f"seed {seed}")


# Padding, and what an earlier batch left.


def test_an_idle_rank_replays_and_changes_nothing(machine: Machine, case: Case) -> None:
    registry = case.decode_registry()
    graphs = case.decode(machine.new_backend(), registry=registry)
    registry.poison_tails()
    rng = np.random.default_rng(0)
    for size in (*reversed(case.sizes.decode), case.sizes.decode[-1]):
        busy = case.decode_batch(rng, size)
        assert_alike(case.run(graphs, busy), case.run_eagerly(busy), OTHER_KERNELS, f"{size}")
        idle = case.run(graphs, case.decode_batch(rng, 0, size=size))
        assert idle.logits.shape == (0, case.config.vocab_size)
        for cache, after in zip(case.caches, idle.caches, strict=True):
            assert torch.equal(cache[case.sizes.block_size :], after)


def test_a_small_batch_after_a_large_one_sees_nothing_of_it(machine: Machine, case: Case) -> None:
    graphs = case.decode(machine.new_backend())
    rng = np.random.default_rng(2)
    size = case.sizes.decode[-1]
    smaller = case.sizes.decode[-2]
    small = case.decode_batch(rng, smaller + 1)
    expected = case.run(graphs, small)
    for _ in range(3):
        case.run(graphs, case.decode_batch(rng, size))
        got = case.run(graphs, small)
        assert torch.equal(got.logits, expected.logits)
        assert all(map(torch.equal, got.caches, expected.caches))


# Memory.


def test_capturing_again_takes_no_more_memory(machine: Machine, case: Case) -> None:
    """All sizes of all runners, as when a group is formed anew."""
    backends = [machine.new_backend() for _ in range(3)]
    runners = [
        case.decode(backends[0]),
        case.prefill("piecewise", backends[1]),
        case.prefill("breakable", backends[2]),
    ]
    rng = np.random.default_rng(4)
    batch = case.decode_batch(rng, case.sizes.decode[-1])
    expected = case.run_eagerly(batch)
    before = machine.memory()
    for _ in range(NUM_RECAPTURES):
        with torch.inference_mode():
            for runner in runners:
                runner.discard()
            for runner in runners:
                runner.capture()
    after = machine.memory()
    assert_alike(case.run(runners[0], batch), expected, OTHER_KERNELS, "captured again")
    allocated, reserved = (now - then for now, then in zip(after, before, strict=True))
    assert allocated <= 2 * MIB, f"{allocated / MIB:.1f} MiB more are in use"
    assert reserved <= 16 * MIB, f"{reserved / MIB:.1f} MiB more are held"
    for backend in backends:
        backend.discard()
    allocated = machine.memory()[0] - before[0]
    assert allocated <= 2 * MIB, f"dropped graphs still have {allocated / MIB:.1f} MiB"


# Attention whose metadata upgrades itself on first use (tests/executor/support/recording/lazy_attention.py).


@pytest.mark.parametrize("width", [1, VERIFY_WIDTH])
def test_metadata_that_upgrades_itself_is_upgraded_by_each_replay(
    machine: Machine, width: int
) -> None:
    kind = KINDS["torch"]
    lazy = new_case(machine, kind, lazily(LazyAttention.of))
    graphs = lazy.decode(machine.new_backend(), width)
    for what, batch in decode_batches(lazy, width):
        assert_alike(lazy.run(graphs, batch), lazy.run_eagerly(batch), OTHER_KERNELS, what)


def test_metadata_that_stays_upgraded_after_warm_up_would_be_noticed(machine: Machine) -> None:
    """The check of the check above."""
    broken = new_case(machine, KINDS["torch"], lazily(LazyAttention.of, restores=False))
    graphs = broken.decode(machine.new_backend())
    batch = broken.decode_batch(np.random.default_rng(0), broken.sizes.decode[-1])
    got, expected = broken.run(graphs, batch), broken.run_eagerly(batch)
    assert largest_error(got.logits, expected.logits) > OTHER_KERNELS
