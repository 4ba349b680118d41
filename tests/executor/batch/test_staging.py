"""If this fails, a step runs on the columns of another one, or the host waits for the device."""

import numpy as np
import pytest
import torch

from executor.batch.staging import MAX_CACHED_VIEWS, Copier, ReadBack, StagingBuffer, StepInputs
from tests.executor.support.recording.copiers import LazyDevice, SeparateMemory

CPU = Copier(torch.device("cpu"))
NUM_COLUMNS = len(StepInputs._fields)
CAPACITY = StepInputs(*range(20, 20 + NUM_COLUMNS))


def lengths_of(seed: int) -> StepInputs[int]:
    """Returns random lengths within CAPACITY, some of them 0."""
    rng = np.random.default_rng(seed)
    return StepInputs(*(int(rng.integers(0, most + 1)) * (rng.random() < 0.8) for most in CAPACITY))


def numbers(lengths: StepInputs[int], step: int = 0) -> StepInputs[np.ndarray]:
    """Returns numbers that no other step and no other column has."""
    return StepInputs(
        *(np.arange(length) + 1000 * place + 100_000 * step for place, length in enumerate(lengths))
    )


@pytest.mark.parametrize("copier", [CPU, SeparateMemory()])
def test_every_column_arrives_as_it_was_written(copier: Copier):
    staging = StagingBuffer(CAPACITY, 3, copier)
    for step in range(20):
        inputs = numbers(lengths_of(step), step)
        staged = staging.send(inputs)
        for columns in (staged.arrays, staged.tensors):
            assert [x.tolist() for x in columns] == [x.tolist() for x in inputs]


def test_a_step_goes_to_the_device_in_one_copy_of_no_more_than_its_columns():
    copier = SeparateMemory()
    staging = StagingBuffer(CAPACITY, 3, copier)
    staging.send(numbers(CAPACITY._replace(positions=1)))
    assert copier.num_copies == 1
    staged = staging.send(numbers(StepInputs(*[2] * NUM_COLUMNS)))
    assert len(staged.host) == len(staged.device) == 8 * NUM_COLUMNS


def test_a_step_without_columns_is_not_sent():
    copier = SeparateMemory()
    staging = StagingBuffer(CAPACITY, 3, copier)
    staged = staging.send(numbers(StepInputs(*[0] * NUM_COLUMNS)))
    assert copier.num_copies == 0
    assert all(tensor.shape == (0,) for tensor in staged.tensors)


def test_on_the_cpu_the_tensors_are_the_arrays():
    staged = StagingBuffer(CAPACITY, 3, CPU).send(numbers(CAPACITY))
    for array, tensor in zip(staged.arrays, staged.tensors, strict=True):
        assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_no_slot_is_overwritten_before_the_device_has_read_it(num_slots: int):
    """The device lags behind as far as it may, and reads each step's columns after its copy."""
    device = LazyDevice()
    staging = StagingBuffer(CAPACITY, num_slots, device)
    seen: list[list[list[int]]] = []
    expected = []
    for step in range(12):
        inputs = numbers(lengths_of(step), step)
        expected.append([column.tolist() for column in inputs])
        tensors = staging.send(inputs).tensors
        device.begin_work(lambda tensors=tensors: seen.append([t.tolist() for t in tensors]))
        assert len(seen) == max(step + 1 - num_slots, 0), "waited for more than the slot needs"
    device.run_all()
    assert seen == expected


def test_what_is_begun_late_in_a_step_still_belongs_to_it():
    """A sampler reads its rows after the forward pass; the slot must wait for that too."""
    device = LazyDevice()
    staging = StagingBuffer(CAPACITY, 2, device)
    read = []
    for step in range(4):
        staged = staging.send(numbers(CAPACITY, step))
        device.begin_work(lambda: None)
        host = staged.arrays.seq_lens
        device.begin_work(lambda host=host: read.append(int(host[0]) // 100_000))
    device.run_all()
    assert read == [0, 1, 2, 3]


def test_views_of_lengths_that_come_again_are_made_once_per_slot():
    staging = StagingBuffer(CAPACITY, 2, CPU)
    decode, prompt = lengths_of(1), lengths_of(2)
    first = [staging.send(numbers(lengths)) for lengths in (decode, decode, prompt, prompt)]
    again = [staging.send(numbers(lengths)) for lengths in (decode, decode, prompt, prompt)]
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert first[0] is not first[1]


def test_views_are_forgotten_before_they_are_too_many():
    staging = StagingBuffer(CAPACITY._replace(positions=1000), 1, CPU)
    for step in range(3 * MAX_CACHED_VIEWS):
        staged = staging.send(numbers(CAPACITY._replace(positions=step)))
        assert len(staged.arrays.positions) == step
        [slot] = staging._slots
        assert len(slot.views) <= MAX_CACHED_VIEWS


def test_columns_begin_where_a_wide_load_may():
    staged = StagingBuffer(CAPACITY, 1, CPU).send(numbers(lengths_of(5)))
    start = staged.host.data_ptr()
    assert all((tensor.data_ptr() - start) % 64 == 0 for tensor in staged.tensors if len(tensor))


def test_more_than_the_capacity_is_refused_by_column():
    staging = StagingBuffer(CAPACITY, 1, CPU)
    with pytest.raises(AssertionError, match="seq_lens has 26 entries; the slot has 25"):
        staging.send(numbers(CAPACITY._replace(seq_lens=26)))


def test_tokens_are_waited_for():
    device = LazyDevice()
    for step in range(3):
        tokens = torch.full((5 + step,), -1)
        device.begin_work(lambda tokens=tokens, step=step: tokens.fill_(step))
        assert ReadBack(tokens, device).wait().tolist() == [step] * (5 + step)
    assert device.num_copies == 3


def test_the_next_steps_tokens_leave_those_that_nobody_has_read():
    device = LazyDevice()
    read_backs = [ReadBack(torch.full((5,), step), device) for step in range(2)]
    assert [each.wait().tolist() for each in reversed(read_backs)] == [[1] * 5, [0] * 5]
    assert read_backs[0].wait().tolist() == [0] * 5  # as often as asked


def test_what_begins_after_the_copy_is_not_waited_for():
    device = LazyDevice()
    tokens, later = torch.full((3,), -1), torch.zeros(1)
    device.begin_work(lambda: tokens.fill_(7))
    results = ReadBack(tokens, device)
    device.begin_work(lambda: tokens.fill_(8))
    device.begin_work(lambda: later.fill_(1))
    assert results.wait().tolist() == [7] * 3
    assert later.tolist() == [0]


def test_a_step_without_tokens_waits_for_nothing():
    device = LazyDevice()
    earlier = torch.zeros(1)
    device.begin_work(lambda: earlier.fill_(1))
    assert ReadBack(torch.zeros(0, dtype=torch.int64), device).wait().tolist() == []
    assert earlier.tolist() == [0]
    assert device.num_copies == 0


def test_no_tokens_of_a_device_that_the_host_cannot_read_are_none_on_the_host():
    """As NumPy would say of a GPU's tensor, however short."""
    tokens = torch.zeros(0, dtype=torch.int64, device="meta")
    assert ReadBack(tokens, SeparateMemory()).wait().tolist() == []


def test_on_the_cpu_tokens_are_read_where_they_are():
    tokens = torch.arange(5)
    assert ReadBack(tokens, CPU).wait().ctypes.data == tokens.data_ptr()
