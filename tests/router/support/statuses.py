"""Statuses of groups and of their ranks, with defaults for what a test does not care about."""

from typing import Any

from google.protobuf.duration_pb2 import Duration

from protos.serving.v1 import serving_pb2 as pb

FORMING, READY = pb.GROUP_STATE_FORMING, pb.GROUP_STATE_READY


def rank(number: int, step_ns: int = 4_100_000, **fields: Any) -> pb.RankStatus:
    blocks = {"num_used_blocks": 30, "num_cached_blocks": 20, "num_free_blocks": 50}
    counts = {"num_running": 8, "last_step_tokens": 8, "num_preemptions": 3, **blocks}
    times = {"last_step_duration": Duration(nanos=step_ns), "prefix_hit_rate": 0.25}
    return pb.RankStatus(dp_rank=number, **{**counts, **times, **fields})


def ready(*ranks: pb.RankStatus, **fields: Any) -> pb.GroupStatus:
    graphs = [
        pb.GraphCount(runner="decode", size=8, num_steps=70),
        pb.GraphCount(runner="decode", size=16, num_steps=30),
        pb.GraphCount(runner="eager", miss="idle_rank", num_steps=5),
    ]
    return pb.GroupStatus(state=READY, ranks=ranks, **{"epoch": 2, "graphs": graphs, **fields})
