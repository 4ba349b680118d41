"""Nothing stops: each line of the table of ``make nothing-stops``, small, whatever time it takes."""

from pathlib import Path

from tests.e2e.conftest import EXECUTOR_ARGS
from tests.e2e.nothing_stops import Size, table

SMALL = Size(
    num_streams=8,
    num_kills=1,
    num_router_kills=1,
    num_double_kills=1,
    num_updates=1,
    num_formings=10,
    num_stops=1,
    num_pauses=1,
    num_turns=1,
    num_steps=12,
    busy_s=0.3,
    group_sizes=(2,),
    executor_args=EXECUTOR_ARGS,
    steady_s=0.3,
)


async def test_each_line_is_measured_and_nothing_is_lost_or_wrong(tmp_path: Path):
    lines = [line async for line in table(SMALL, tmp_path)]
    for line in lines:
        print(line)

    assert [line.is_right for line in lines] == [True] * 18
