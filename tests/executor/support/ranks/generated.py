"""Greedy tokens of executors behind sockets, driven as a router drives them. For tests."""

from typing import Any

from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.servers import Client
from tests.executor.support.steps import decode_part, idle_part, prompt_part, step, tokens_of

MODES = {True: pb.DP_PADDING_MODE_SUM_LEN, False: pb.DP_PADDING_MODE_MAX_LEN}  # by has_extend


async def generate(
    clients: list[Client],
    prompts: list[list[int]],
    count: int,
    epoch: int,
    *,
    replays: bool = False,
    attn_tp_size: int = 1,
) -> list[list[int]]:
    """Returns greedy tokens of one sequence per rank. Rank r begins r steps late.

    Args:
        clients: By world rank.
        prompts: Of each.
        count: Tokens of each.
        epoch: Joined by all.
        replays: Whether steps in which all ranks run tokens replay graphs.
        attn_tp_size: Executors of each rank.
    """
    calls = [client.executor.Step() for client in clients]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step_id in range(1, count + len(prompts)):
        parts = [
            part_of(rank, prompt, step_id - 1 - rank, count) for rank, prompt in enumerate(prompts)
        ]
        is_extend = any(part.forward_mode == pb.FORWARD_MODE_EXTEND for part in parts)
        agreed: dict[str, Any] = {
            "num_tokens": [len(part.sequences.token_ids) // 4 for part in parts],
            "num_logits": [min(len(part.sequences.token_ids), 1) for part in parts],
            "has_extend": is_extend,
            "padding_mode": MODES[is_extend],
        }
        if replays and all(agreed["num_tokens"]):
            sizes = (await clients[0].executor.Describe(pb.DescribeRequest())).graph_sizes
            of_kind, most = sizes.extend if is_extend else sizes.decode, max(agreed["num_tokens"])
            agreed["graph_size"] = min(size for size in of_kind if size >= most)
            agreed["padding_mode"] = pb.DP_PADDING_MODE_MAX_LEN
        for number, call in enumerate(calls):
            await call.write(step(step_id, parts[number // attn_tp_size], epoch=epoch, **agreed))
        for number, call in enumerate(calls):
            answer = await call.read()
            if number % attn_tp_size == 0:
                tokens[number // attn_tp_size] += tokens_of(answer)
    for call in calls:
        await call.done_writing()
    return tokens


def part_of(rank: int, prompt: list[int], own_step: int, count: int) -> pb.RankStep:
    if not 0 <= own_step < count:
        return idle_part(rank)
    if own_step == 0:
        return prompt_part(0, prompt, list(range(1, -(-len(prompt) // 4) + 1)), dp_rank=rank)
    computed = len(prompt) + own_step - 1
    new = [computed // 4 + 1] if computed % 4 == 0 else []
    return decode_part(0, computed, -1, new, dp_rank=rank)
