"""Measurements of models.py, each a rung of its own. Nothing is asserted about time."""

import pytest

from tests.gpu.figures.models import MEASUREMENTS, CannotMeasure
from tests.gpu.support.machine import Machine
from tests.gpu.support.results import publish


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_it_is_measured(machine: Machine, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if machine.no_grouped_graphs:
        pytest.skip(machine.no_grouped_graphs)
    try:
        tables = MEASUREMENTS[name](machine)
    except CannotMeasure as error:
        pytest.skip(str(error))
    with capsys.disabled():
        for table in tables:
            publish(table)
    assert all(cell for table in tables for cells in table.rows.values() for cell in cells)
