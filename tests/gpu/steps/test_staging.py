"""A step's columns on their way to the device. If one fails, the host waits, or a step reads others'.

Which operators wait, PyTorch says itself. It does not see what FlashInfer and events do.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.staging import ReadBack, StagingBuffer, StepInputs, to_device
from tests.gpu.support.machine import Machine
from tests.gpu.support.production import PRODUCTION

CAPACITY = StepInputs(*range(20, 20 + len(StepInputs._fields)))
PROMPT, ANSWER = ([byte + 3 for byte in text] for text in (b"\n17+25=", b"42\n"))
BLOCK_SIZE, NUM_STEPS = 4, 12
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": [1.0], "top_k": [40], "top_p": [0.9], "seed": [7]}


def lengths_of(seed: int) -> StepInputs[int]:
    """Returns random lengths within CAPACITY, some of them 0."""
    rng = np.random.default_rng(seed)
    return StepInputs(*(int(rng.integers(0, most + 1)) * (rng.random() < 0.8) for most in CAPACITY))


def test_the_device_reads_what_each_step_wrote(machine: Machine) -> None:
    copier = machine.copier()
    staging = StagingBuffer(CAPACITY, 3, copier)
    kept, expected = [], []
    for step in range(50):
        with machine.waiting_refused():
            inputs = StepInputs(
                *(
                    np.arange(length) + 1000 * place + 100_000 * step
                    for place, length in enumerate(lengths_of(step))
                )
            )
            staged = staging.send(inputs)
            kept.append(torch.cat(staged.tensors))
        expected.append([value for array in inputs for value in array.tolist()])
        if machine.device.type == "cuda":
            assert staged.host.is_pinned()
    assert [tensor.tolist() for tensor in kept] == expected
    assert ReadBack(kept[0][:100], copier).wait().tolist() == expected[0][:100]
    assert ReadBack(kept[0][:0], copier).wait().tolist() == []  # a step that samples nothing


def test_rare_columns_get_to_the_device_without_a_wait(machine: Machine) -> None:
    values = np.arange(1000)
    with machine.waiting_refused():
        tensor = to_device(values, machine.device)
    assert tensor.tolist() == values.tolist()


@dataclass(slots=True)
class Steps:
    """A worker, and one sequence that it decodes."""

    worker: Any
    length: int = 0
    tokens: list[int] | None = None

    def begin(self, starts: dict[str, Any]) -> None:
        """Runs the prompt, with room for all of its blocks but one."""
        from tests.executor.support.steps import prompt_part, step, tokens_of

        self.length = len(PROMPT)
        blocks = list(range(1, 1 + -(-self.length // BLOCK_SIZE)))
        part = prompt_part(0, PROMPT, blocks, **starts)
        self.tokens = tokens_of(
            self.worker.execute(step(1, part, num_tokens=[self.length], num_logits=[1]))
        )

    def decode(self, graph_size: int | None) -> None:
        """Runs one more token, which the router does not know; sends a new block when due."""
        from tests.executor.support.steps import decode_part, step, tokens_of

        assert self.tokens is not None
        new = [1 + self.length // BLOCK_SIZE] if self.length % BLOCK_SIZE == 0 else []
        part = decode_part(0, self.length, -1, new)
        request = step(2, part, num_tokens=[1], graph_size=graph_size)
        self.tokens += tokens_of(self.worker.execute(request))
        self.length += 1


@pytest.fixture(scope="module")
def worker(machine: Machine) -> Any:
    """The executor's worker for the demo model, as production builds it."""
    from deploy.local.launch import DEMO_MODEL
    from executor.build.executor import build_worker
    from executor.config import ExecutorConfig

    if machine.no_grouped_graphs:
        pytest.skip(machine.no_grouped_graphs)
    settings: dict[str, Any] = dict(PRODUCTION)
    config = ExecutorConfig(
        model=DEMO_MODEL,
        device=machine.device.type,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_kv_blocks=64,
        decode_graph_sizes=(1, 4),
        prefill_graph_sizes=(16,),
        **settings,
    )
    worker, _ = build_worker(config)
    worker.join(1, "")
    return worker


@pytest.mark.parametrize("starts", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("graph_size", [None, 1, 4])
def test_a_decode_step_waits_for_the_device_only_to_read_its_tokens(
    machine: Machine, worker: Any, graph_size: int | None, starts: dict[str, Any]
) -> None:
    """Reading back waits for an event, which is allowed; all else that waits is refused."""
    if graph_size is None and machine.ops is None:
        pytest.skip("needs FlashInfer: PyTorch's attention reads rows on the host")
    steps = Steps(worker)
    steps.begin(starts)
    steps.decode(graph_size)  # what is made at first use may wait
    for _ in range(NUM_STEPS):
        with machine.waiting_refused():
            steps.decode(graph_size)
    assert steps.tokens is not None
    assert len(steps.tokens) == 2 + NUM_STEPS


@pytest.mark.parametrize("graph_size", [None, 1, 4])
def test_the_worker_adds_right(machine: Machine, worker: Any, graph_size: int | None) -> None:
    steps = Steps(worker)
    steps.begin(GREEDY)
    for _ in range(len(ANSWER) - 1):
        steps.decode(graph_size)
    assert steps.tokens == ANSWER
