"""Whole streams under chaos: a dead or hung executor costs no token, request or block.

More faults, and how long recoveries take: python -m tests.e2e.chaos --faults 10
"""

from pathlib import Path

import pytest

from tests.e2e.chaos import run_chaos, show


@pytest.mark.parametrize(("num_groups", "num_faults"), [(2, 4), (1, 2)])
async def test_streams_are_whole_though_executors_are_killed_and_stopped(
    tmp_path: Path, num_groups: int, num_faults: int
):
    report = await run_chaos(
        num_groups=num_groups, num_streams=32, num_faults=num_faults, seed=3, log_dir=tmp_path
    )
    show(report)

    assert report.wrong == []
    assert report.num_streams >= 32
    assert report.recoveries_s, "no fault was noticed"
    for group in report.groups:
        assert group.num_waiting == group.num_waiting_tokens == 0
        assert [rank.num_used_blocks for rank in group.ranks] == [0, 0]
