"""Operators, gateways and dashboards go by the status: each number of it has one source."""

from protos.serving.v1 import serving_pb2 as pb
from tests.router.support.running_engines import complete, running


async def test_a_group_that_has_stepped_says_so_of_itself_and_of_each_rank() -> None:
    async with running() as engines:
        request = await complete(engines, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=6)
        [group] = engines.status()
    assert (group.group, group.state, group.problem) == (0, pb.GROUP_STATE_READY, "")
    assert (group.epoch, group.step, group.num_waiting) == (1, 6, 0)
    assert group.HasField("last_step_age")
    assert group.block_size
    assert group.max_num_seqs
    assert [(count.runner, count.num_steps) for count in group.graphs] == [("eager", 6)]
    assert [rank.dp_rank for rank in group.ranks] == [0, 1]
    rank = group.ranks[request.sequences[0].dp_rank]
    assert (rank.num_running, rank.last_step_tokens, rank.total_tokens) == (0, 1, 9 + 5)
    assert (rank.num_used_blocks, rank.num_preemptions) == (0, 0)
    assert rank.num_cached_blocks
    assert rank.num_free_blocks
    assert rank.address
    assert not group.HasField("speculation")
