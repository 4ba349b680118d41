"""Collectives of a pass on two executors: how long they take, and the step around them.

    python -m tests.bench.executor.bench_collectives [--batches 1,8] [--steps 600]

Two processes of one thread each run the demo model as executors do, over TCP on loopback. A decode
step is shown by its lower quartile, since a neighbour that takes a core makes both ranks wait. CPU
time, of all threads of a rank, leaves such waits out, and with them what a rank waits for the other.
Neither router nor gRPC takes part, so a step here is shorter than any that a client sees.

Below, single collectives on rows of the same model, by themselves: the time from the call to its
result.
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.epochs import JoinAttempt
from executor.parallel.layout import DpLayout, DpPaddingMode, Place, Topology
from executor.parallel.process_groups import EpochGroups, join_group
from protos.executor.v1 import executor_pb2 as pb
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.timing import in_turns
from tests.executor.support.ranks.ranks import HOST, SECRET, run_ranks
from tests.executor.support.steps import decodes_part, prompts_part, step
from tests.support.paths import DEMO_MODEL

CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}
BLOCK_SIZE = 64
PROMPT_LEN = 16
HIDDEN_SIZE = 128  # of the demo model
ROUNDS = 400


def decode(rank: int, port: int, batch_size: int, num_steps: int) -> dict[str, list[float]]:
    """Returns the seconds of decode steps, by clock."""
    quiet()
    worker, _ = build_worker(
        ExecutorConfig(
            model=DEMO_MODEL,
            dp_rank=rank,
            dp_size=2,
            block_size=BLOCK_SIZE,
            max_num_seqs=batch_size,
            num_kv_blocks=1 + batch_size * (1024 // BLOCK_SIZE),
            num_threads=1,
            listen=f"{HOST}:0",
        )
    )
    worker.join(1, f"{HOST}:{port}", JoinAttempt(1, SECRET))
    seconds: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    worker.execute(prompts(rank, batch_size))
    for number in range(num_steps):
        request = decodes(rank, batch_size, number)
        started = {clock: now() for clock, now in CLOCKS.items()}
        worker.execute(request)
        for clock, now in CLOCKS.items():
            seconds[clock].append(now() - started[clock])
    worker.leave()
    return seconds


def prompts(rank: int, batch_size: int) -> pb.StepRequest:
    lens = [PROMPT_LEN] * batch_size
    token_ids = [3 + i % 200 for i in range(PROMPT_LEN * batch_size)]
    blocks = ([1] * batch_size, range(1, 1 + batch_size))
    part = prompts_part(range(batch_size), lens, token_ids, *blocks, dp_rank=rank)
    counts = [PROMPT_LEN * batch_size] * 2
    return step(1, part, num_tokens=counts, num_logits=[batch_size] * 2)


def decodes(rank: int, batch_size: int, number: int) -> pb.StepRequest:
    """Returns the step that adds token ``number`` to every row."""
    computed = PROMPT_LEN + number
    num_blocks = computed // BLOCK_SIZE
    is_new = computed % BLOCK_SIZE == 0
    rows = range(batch_size)
    part = decodes_part(
        rows,
        [computed] * batch_size,
        dp_rank=rank,
        num_new_blocks=[1] * batch_size if is_new else [],
        new_block_ids=[1 + num_blocks * batch_size + row for row in rows] if is_new else [],
    )
    return step(2 + number, part, num_tokens=[batch_size] * 2)


def collectives(rank: int, port: int, num_rows: int) -> dict[str, float]:
    """Returns the seconds of each collective of ``num_rows`` rows a rank."""
    dp = Topology(dp_rank=rank, dp_size=2)
    groups = join_group(HOST, port, SECRET, epoch=1, topology=dp, bind_host=HOST)
    communicator = DpCommunicator(
        place=Place(dp), max_tokens_per_rank=num_rows, hidden_size=HIDDEN_SIZE, dtype=torch.bfloat16
    )
    communicator.join(groups)
    x = torch.zeros(num_rows, HIDDEN_SIZE, dtype=torch.bfloat16)
    y = torch.zeros(2 * num_rows, HIDDEN_SIZE, dtype=torch.bfloat16)

    timed: dict[str, Callable[[], object]] = {}
    for mode in DpPaddingMode:
        layout = DpLayout((num_rows, num_rows), mode, rank)
        timed[f"gather {mode.name}"] = partial(communicator.gather, x, layout)
        timed[f"scatter_sum {mode.name}"] = partial(communicator.scatter_sum, y, layout)
    seconds = measure(timed)
    groups.close()
    return seconds | inside_a_dp_rank(rank, port, num_rows)


def inside_a_dp_rank(rank: int, port: int, num_rows: int) -> dict[str, float]:
    tp = Topology(attn_tp_rank=rank, attn_tp_size=2)
    groups: EpochGroups = join_group(HOST, port, SECRET, epoch=2, topology=tp, bind_host=HOST)
    attn_tp = AttnTpCommunicator(
        capacity=tp.capacity,
        max_shard_tokens_per_rank=num_rows,
        hidden_size=HIDDEN_SIZE,
        dtype=torch.bfloat16,
        max_logits_rows=num_rows,
        vocab_slice=132,
    )
    attn_tp.join(groups)
    layout = DpLayout((2 * num_rows,), DpPaddingMode.MAX_LEN, 0, None, False, rank, 2)
    x = torch.zeros(num_rows, HIDDEN_SIZE, dtype=torch.bfloat16)
    y = torch.zeros(2 * num_rows, HIDDEN_SIZE, dtype=torch.bfloat16)
    logits = torch.zeros(num_rows, 132, dtype=torch.bfloat16)
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    seconds = measure(
        {
            "attn_tp gather": lambda: attn_tp.gather(x, layout),
            "attn_tp scatter_sum": lambda: attn_tp.scatter_sum(y, layout),
            "attn_tp gather_logits": lambda: attn_tp.gather_logits(logits),
            "attn_tp agree": lambda: attn_tp.agree(tokens),
        }
    )
    groups.close()
    return seconds


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the seconds of each. The calls take turns, as they would in a pass."""
    return {name: quartile(column) for name, column in in_turns(calls, ROUNDS).items()}


def quartile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4)[0]


def main() -> None:
    options = parse_options(__doc__, batches=(1, 8), steps=600)  # at most 1000
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    print(f"{'decode step':<12} {'wall us':>8} {'CPU us':>8}")
    for batch_size in options.batches:
        by_rank = run_ranks(decode, 2, batch_size, options.steps)
        wall, cpu = (max(quartile(seconds[clock]) for seconds in by_rank) for clock in CLOCKS)
        print(f"{f'B={batch_size}':<12} {wall * 1e6:8.0f} {cpu * 1e6:8.0f}", flush=True)
    for num_rows in options.batches:
        print(f"\n{'rows a rank: ' + str(num_rows):<24} {'us':>7}")
        by_rank = run_ranks(collectives, 2, num_rows)
        for name in by_rank[0]:
            slowest = max(seconds[name] for seconds in by_rank)
            print(f"{name:<24} {slowest * 1e6:7.0f}", flush=True)


if __name__ == "__main__":
    main()
