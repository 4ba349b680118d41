"""Ranks as threads of one process, each with groups of its own over TCP."""

import threading
from collections.abc import Callable
from typing import Any

from executor.parallel.layout import Topology
from executor.parallel.process_groups import EpochGroups
from tests.executor.support.ranks.ranks import TIMEOUT_S, join, topology_of

# After which ranks that still wait have their groups closed, as in service a router ends every stream of a
# group that is lost: who waits for a rank that waits for another one sees no connection end.
FREED_S = 20.0


def topologies(dp_size: int, attn_tp_size: int) -> list[Topology]:
    """Returns every executor's place, in order of world rank."""
    return [topology_of(rank, dp_size, attn_tp_size) for rank in range(dp_size * attn_tp_size)]


def on_every_rank(
    port: int, epoch: int, places: list[Topology], act: Callable[[Topology, EpochGroups], Any]
) -> list[Any]:
    """Returns what ``act`` gave on each rank, or the error it raised. Then the rank leaves.

    All have joined before any acts.
    """
    results: list[Any] = [None] * len(places)
    joined: list[EpochGroups] = []
    formed = threading.Barrier(len(places))

    def run(place: Topology) -> None:
        try:
            groups = join(port, place, epoch)
        except Exception as error:
            results[place.world_rank] = error
            formed.abort()
            return
        joined.append(groups)
        try:
            formed.wait(TIMEOUT_S)
            results[place.world_rank] = act(place, groups)
        except Exception as error:
            results[place.world_rank] = error
        finally:
            groups.close()

    threads = [threading.Thread(target=run, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(FREED_S)
        if any(isinstance(result, Exception) for result in results):
            for groups in joined:
                groups.close()
    return results
