"""If this fails, one wrong step ends all executors, or makes them wait for each other for minutes.

First the check by itself, in groups of threads. Then real executors behind real sockets, two in this
process, each with its own compute thread. Their timeout for a lost peer is ten minutes; every test
ends, and fails, long before.
"""

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.errors import PeerLost, StepDisagreement
from executor.links import Links
from executor.metrics import Measures
from executor.parallel.process_groups import EpochGroups, RankGroup
from executor.parallel.rendezvous import open_store
from executor.parallel.topology import Topology
from executor.step_check import StepCheck
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.ranks import rank_threads
from tests.executor.support.ranks.rank_threads import on_every_rank, topologies
from tests.executor.support.servers import Client, error_of, form_group, group_of
from tests.executor.support.steps import decode_part, idle_part, prompt_part, step, tokens_of

PEER_TIMEOUT_S = 600.0
TEST_TIMEOUT_S = 120.0
PROMPTS = [[5, 17, 33, 2, 90, 41, 8, 8, 60], [7, 3, 44]]
COUNTS = [len(prompt) for prompt in PROMPTS]

Change = Callable[[pb.StepRequest], object]


def in_groups(
    act: Callable[[Topology, EpochGroups], Any], dp_size: int, attn_tp_size: int = 1
) -> list[Any]:
    """Returns what each executor's thread gave or raised."""
    store = open_store(rank_threads.HOST, timeout_s=rank_threads.TIMEOUT_S)
    return on_every_rank(store.port, 1, topologies(dp_size, attn_tp_size), act)


def begun(
    groups: EpochGroups,
    told: str = "the same",
    part: bytes = b"",
    *,
    attn_tp_size: int = 1,
    measures: Measures | None = None,
) -> StepCheck:
    """Returns a check that has shown the others what this executor was told."""
    check = StepCheck(groups, attn_tp_size, measures)
    check.begin(told.encode(), lambda: part, lambda: told)
    return check


def sum_of_ones(group: RankGroup | None) -> float:
    assert group is not None
    x = torch.ones(1)
    group.all_reduce(x)
    return float(x)


def test_the_first_collective_finishes_the_check_of_its_step():
    def act(place: Topology, groups: EpochGroups) -> list[float]:
        measures, sums = Measures(), []
        check = StepCheck(groups, 2, measures)
        assert check.holds_collectives
        for number, group in enumerate((groups.world, groups.attn_tp, groups.world)):
            check.begin(b"%d" % number, lambda: b"part", str)
            sums.append(sum_of_ones(group))
            waited_ns = measures.phase_ns["peers"]
            assert waited_ns > 0
            check.finish()
            sums.append(sum_of_ones(groups.world))
            assert measures.phase_ns["peers"] == waited_ns
        return sums

    assert in_groups(act, 2, 2) == [[4, 4, 2, 4, 4, 4]] * 4


@pytest.mark.parametrize("first", ["world", "attn_tp", "finish"])
def test_executors_that_were_told_different_things_begin_no_collective(first: str):
    """Not even those whose peers in that collective were told the same."""

    def act(place: Topology, groups: EpochGroups) -> None:
        check = begun(groups, "8 rows" if place.world_rank == 3 else "9 rows", attn_tp_size=2)
        check.finish() if first == "finish" else sum_of_ones(getattr(groups, first))

    errors = in_groups(act, 2, 2)
    assert {type(error) for error in errors} == {StepDisagreement}
    [message] = {str(error) for error in errors}
    assert message == (
        "the executors were told different things: world ranks 0, 1 and 2: 9 rows; "
        "world rank 3: 8 rows"
    )


def test_all_learn_which_dp_rank_was_given_different_parts():
    def act(place: Topology, groups: EpochGroups) -> None:
        part = b"other" if place.world_rank == 3 else b"part %d" % place.dp_rank
        begun(groups, part=part, attn_tp_size=2).finish()

    errors = in_groups(act, 2, 2)
    assert {type(error) for error in errors} == {StepDisagreement}
    [message] = {str(error) for error in errors}
    assert message.startswith("world ranks 2 and 3 share DP rank 1, but were given different parts")


def test_executors_of_different_dp_ranks_may_be_given_different_parts():
    def act(place: Topology, groups: EpochGroups) -> float:
        begun(groups, part=b"part %d" % place.dp_rank, attn_tp_size=2)
        return sum_of_ones(groups.world)

    assert in_groups(act, 2, 2) == [4] * 4


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_executor_that_leaves_before_its_first_collective_fails_the_others(has_begun: bool):
    """If it had begun, either the check or the collective finds out."""

    def act(place: Topology, groups: EpochGroups) -> float | None:
        if place.world_rank == 2 and not has_begun:
            return None
        begun(groups)
        return None if place.world_rank == 2 else sum_of_ones(groups.world)

    *errors, _ = in_groups(act, 3)
    for error in errors:
        assert isinstance(error, RuntimeError if has_begun else PeerLost), error
        assert "Timed out" not in str(error)
    if not has_begun:
        assert "world rank 2: " in str(errors[0]) + str(errors[1])


def test_a_stopped_executor_is_waited_for_until_the_timeout():
    group: Any = SimpleNamespace()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check = begun(EpochGroups(1, group, None, group, Links(0, {1: ours}, 0.2)))
        problem = "did not begin the step: world rank 1 sent nothing for 0.2 s"
        with pytest.raises(PeerLost, match=re.escape(problem)):
            check.finish()


def test_leaving_the_group_frees_a_thread_that_waits_for_a_stopped_executor():
    is_freed = threading.Event()

    def close_once_it_waits(groups: EpochGroups) -> None:
        while not groups.links._in_use.locked() and not is_freed.is_set():
            time.sleep(0.001)
        groups.close()

    def act(place: Topology, groups: EpochGroups) -> None:
        if place.world_rank == 1:
            is_freed.wait(rank_threads.TIMEOUT_S)
            return
        begun(groups)
        closing = threading.Thread(target=close_once_it_waits, args=(groups,))
        closing.start()
        try:
            sum_of_ones(groups.world)
        finally:
            is_freed.set()
            closing.join()

    error, _ = in_groups(act, 2)
    assert isinstance(error, PeerLost)
    assert "sent nothing" not in str(error)


def prompts_step() -> list[pb.StepRequest]:
    """Returns each rank's step 1, in which it runs its prompt."""
    return [
        step(
            1,
            prompt_part(0, prompt, [1, 2, 3][: -(-len(prompt) // 4)], dp_rank=rank),
            num_tokens=COUNTS,
            num_logits=[1, 1],
            padding_mode=pb.DP_PADDING_MODE_SUM_LEN,
        )
        for rank, prompt in enumerate(PROMPTS)
    ]


def decode_step() -> list[pb.StepRequest]:
    """Returns each rank's step 2, which replays a graph of 2 rows."""
    requests = []
    for rank, count in enumerate(COUNTS):
        requests.append(step(2, decode_part(0, count, dp_rank=rank), num_tokens=[1, 1]))
        requests[-1].agreement.graph_size = 2
    return requests


async def send(calls: list[Any], epoch: int, requests: list[pb.StepRequest]) -> None:
    for call, request in zip(calls, requests, strict=True):
        request.epoch = epoch
        await call.write(request)


async def run_prompts(clients: list[Client], epoch: int) -> tuple[list[Any], list[list[int]]]:
    """Returns each rank's stream and first token, in a group formed anew."""
    await form_group(clients, epoch)
    calls = [client.executor.Step() for client in clients]
    await send(calls, epoch, prompts_step())
    return calls, [tokens_of(await call.read()) for call in calls]


def other_count(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens[0] = 8


def other_num_logits(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens_for_logprob[0] = 2


def other_padding(request: pb.StepRequest) -> None:
    request.agreement.padding_mode = pb.DP_PADDING_MODE_MAX_LEN


def other_graph(request: pb.StepRequest) -> None:
    request.agreement.graph_size = 4


def no_graph(request: pb.StepRequest) -> None:
    request.agreement.ClearField("graph_size")


def own_count(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens[1] = 4


def over_budget(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens[0] = 33


@pytest.mark.parametrize(
    ("requests", "change", "by_rank"),
    [
        (prompts_step, other_count, ["global_num_tokens=[9, 3]", "global_num_tokens=[8, 3]"]),
        (prompts_step, other_num_logits, ["for_logprob=[1, 1]", "for_logprob=[2, 1]"]),
        (prompts_step, other_padding, ["MODE_SUM_LEN", "MODE_MAX_LEN"]),
        (decode_step, other_graph, ["graph_size=2", "graph_size=4"]),
        (decode_step, no_graph, ["graph_size=2", "graph_size=None"]),
    ],
)
async def test_executors_that_were_told_different_things_all_say_who_was_told_what(
    tiny_checkpoint: Path,
    requests: Callable[[], list[pb.StepRequest]],
    change: Change,
    by_rank: list[str],
):
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        calls, tokens = await run_prompts(clients, 1)
        epoch = 1
        if requests is prompts_step:
            await form_group(clients, epoch := 2)
            calls = [client.executor.Step() for client in clients]
        wrong = requests()
        change(wrong[1])
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await send(calls, epoch, wrong)
            errors = [await error_of(call) for call in calls]
        assert errors[0] == errors[1]
        reason, message = errors[0]
        assert reason == "STEP_DISAGREEMENT"
        for rank, told in enumerate(by_rank):
            said = message.partition(f"world rank {rank}: ")[2].partition(";")[0]
            assert told in said, message
        assert (await run_prompts(clients, 3))[1] == tokens


async def test_a_step_without_collectives_is_checked_too(tiny_checkpoint: Path):
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        calls = [client.executor.Step() for client in clients]
        requests = [step(1, idle_part(dp_rank=rank), num_tokens=[0, 0]) for rank in range(2)]
        requests[1].agreement.padding_mode = pb.DP_PADDING_MODE_SUM_LEN
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await send(calls, 1, requests)
            errors = [await error_of(call) for call in calls]
    assert [reason for reason, _ in errors] == ["STEP_DISAGREEMENT"] * 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (own_count, "global_num_tokens says 4 for this executor's part, which has 3"),
        (over_budget, "global_num_tokens has 33; the budget is 32"),
    ],
)
async def test_a_step_that_one_executor_refuses_fails_on_the_other_at_once(
    tiny_checkpoint: Path, change: Change, problem: str, first: int
):
    """Whichever gets it first: one waits for the other, or finds that it has left."""
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        requests = prompts_step()
        change(requests[1])
        calls = [client.executor.Step() for client in clients]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await calls[first].write(requests[first])
            if first == 1:
                refused = await error_of(calls[1])
                await calls[0].write(requests[0])
            else:
                await calls[1].write(requests[1])
                refused = await error_of(calls[1])
            reason, message = await error_of(calls[0])
        assert refused == ("INVALID_STEP", problem)
        assert reason == "STEP_FAILED"
        assert "PeerLost: an executor of the group left it" in message
        _, tokens = await run_prompts(clients, 2)
        assert [len(own) for own in tokens] == [1, 1]


async def test_a_step_over_budget_is_refused_by_every_executor_with_the_same_words(
    tiny_checkpoint: Path,
):
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        requests = prompts_step()
        for request in requests:
            over_budget(request)
        calls = [client.executor.Step() for client in clients]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await send(calls, 1, requests)
            errors = [await error_of(call) for call in calls]
    assert errors == [("INVALID_STEP", "global_num_tokens has 33; the budget is 32")] * 2


def other_tokens(request: pb.StepRequest) -> None:
    [part] = request.ranks
    part.sequences.token_ids = part.sequences.token_ids[4:] + part.sequences.token_ids[:4]


def other_sampling(request: pb.StepRequest) -> None:
    """As many rows of logits, but of a scored token instead of a sampled one."""
    [part] = request.ranks
    part.sequences.samples = b"\0"
    part.sequences.num_scored = (1).to_bytes(4, "little")
    part.sequences.scored_ids = (7).to_bytes(4, "little")


@pytest.mark.parametrize("change", [other_tokens, other_sampling])
async def test_executors_of_a_dp_rank_that_were_given_different_parts_both_say_so(
    tiny_checkpoint: Path, change: Change
):
    """Else one would compute heads of other tokens, or wait for logits that nobody gathers."""
    prompt = PROMPTS[0]
    requests = [
        step(1, prompt_part(0, prompt, [1, 2, 3]), num_tokens=[len(prompt)], num_logits=[1])
        for _ in range(2)
    ]
    change(requests[1])
    async with group_of(tiny_checkpoint, 1, 2, peer_timeout_s=PEER_TIMEOUT_S) as clients:
        await form_group(clients, 1)
        calls = [client.executor.Step() for client in clients]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await send(calls, 1, requests)
            errors = [await error_of(call) for call in calls]
    assert errors[0] == errors[1]
    reason, message = errors[0]
    assert reason == "STEP_DISAGREEMENT"
    assert "world ranks 0 and 1 share DP rank 0" in message
