"""Fixtures of every rung: the machine, and a skip of what cannot run on it. See machine.py."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.spec import ModelSpec
from tests.executor.support.recording.recording_backend import known_world
from tests.gpu.support.attention import Twins
from tests.gpu.support.machine import IS_STAND_IN, Machine, open_machine, why_not
from tests.gpu.support.shapes import SMALL_MODELS

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def machine() -> Machine:
    """Where the suite runs."""
    problem = why_not()
    if problem:
        pytest.skip(problem)
    return open_machine()


@pytest.fixture(scope="session")
def ops(machine: Machine) -> FlashInferOps:
    if machine.ops is None:
        pytest.skip("needs FlashInfer: it is not installed")
    return machine.ops


@pytest.fixture(autouse=True, scope="module")
def world(machine: Machine) -> Iterator[None]:
    """Spares each recording the million objects that a run has imported."""
    with known_world() if IS_STAND_IN else nullcontext():
        yield


@pytest.fixture(params=SMALL_MODELS)
def config(request: pytest.FixtureRequest) -> ModelSpec:
    """Returns the sizes of a model of one layer."""
    model = SMALL_MODELS[request.param]
    return replace(model, layers=model.layers[:1])


@pytest.fixture
def twins(config: ModelSpec, machine: Machine) -> Twins:
    return Twins(config, machine.device, machine.triton)


@pytest.fixture(autouse=True)
def own_buffers(machine: Machine) -> Iterator[None]:
    """Gives each test input buffers of its own, and drops its graphs."""
    with fresh_input_buffer_pool():
        yield
    machine.discard()


def pytest_report_header() -> list[str]:
    problem = why_not()
    if problem:
        return [f"GPU tests: skipped, {problem}"]
    return [f"{name}: {fact}" for name, fact in open_machine().facts().items()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shows the warnings of libraries instead of failing: nobody has seen them all on a GPU."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
