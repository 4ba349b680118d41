"""Times dispatch and combine of every dispatcher over TCP, executors taking the same turns.

    python -m tests.bench.executor.bench_dispatch [--world-sizes 2,4] [--rounds 100]

Rows are those of a model with D = 1024 in bfloat16 and 8 of 128 experts per token. Each round runs
every variant once, so that what else the machine does meets all of them; the figures are medians
over the rounds of dispatch plus combine on executor 0, without experts in between. Ratios are to the
all-gather in the padding mode that the router would choose: MAX_LEN where counts are even.

Routing decides what an all-to-all saves. With 8 random experts nearly every token goes to both of 2
executors and to 3.6 of 4, as in an all-gather; "near" picks all 8 on one executor. With more
executors than cores, as 4 here, a collective waits for turns on the cores first of all.
"""

import statistics
import time
from collections.abc import Callable

import torch

from executor.model.moe.dispatch_all_gather import AllGatherDispatcher
from executor.model.moe.dispatch_all_to_all import TorchAllToAllDispatcher
from executor.model.moe.layer import Dispatcher
from executor.parallel.communicators import DpCommunicator
from executor.parallel.expert_places import ExpertPlaces
from executor.parallel.layout import DpLayout, DpPaddingMode, Place, Topology
from executor.parallel.process_groups import join_group
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.executor.support.ranks.ranks import HOST, SECRET, run_ranks

HIDDEN, EXPERTS, TOP_K, DTYPE = 1024, 128, 8, torch.bfloat16
EVEN = (1, 8, 64, 512)  # tokens of every executor
UNEVEN = (8, 64)  # tokens of the last executor, the others idle
WARM_UP = 5

Times = dict[str, tuple[float, float]]  # microseconds of dispatch and of combine


def main() -> None:
    given = parse_options(__doc__, world_sizes=(2, 4), rounds=100)
    quiet()
    for world_size in given.world_sizes:
        results = run_ranks(measure, world_size, world_size, given.rounds)[0]
        print(f"{world_size} executors: microseconds of dispatch + combine, and ratio")
        for name, times in results.items():
            base = sum(times["MAX_LEN" if "each" in name else "SUM_LEN"])
            columns = (
                f"{variant} {dispatch:6.0f} +{combine:6.0f} x{(dispatch + combine) / base:4.2f}"
                for variant, (dispatch, combine) in times.items()
                if combine
            )
            print(f"  {name:<16} {' │ '.join(columns)} │ counts {times['counts'][0]:5.0f}")


def measure(rank: int, port: int, world_size: int, rounds: int) -> dict[str, Times]:
    topology = Topology(dp_rank=rank, dp_size=world_size)
    communicator = DpCommunicator(
        place=Place(topology),
        max_tokens_per_rank=max(EVEN),
        hidden_size=HIDDEN,
        dtype=DTYPE,
        top_k=TOP_K,
    )
    communicator.join(join_group(HOST, port, SECRET, epoch=0, topology=topology, bind_host=HOST))
    results = {}
    for count in EVEN:
        results[f"{count} each"] = one_size(communicator, (count,) * world_size, rounds)
    for count in UNEVEN:
        counts = (0,) * (world_size - 1) + (count,)
        results[f"{count} on one"] = one_size(communicator, counts, rounds)
    return results


def one_size(communicator: DpCommunicator, counts: tuple[int, ...], rounds: int) -> Times:
    topology = communicator.topology
    places = ExpertPlaces.of(topology, EXPERTS)
    all_gather = AllGatherDispatcher(communicator, places)
    all_to_all = TorchAllToAllDispatcher(
        communicator, places, hidden_size=HIDDEN, dtype=DTYPE, top_k=TOP_K
    )
    max_len, sum_len = (DpLayout(counts, mode, topology.dp_rank) for mode in DpPaddingMode)
    spread, near = (routes(max_len.num_tokens, is_near=is_near) for is_near in (False, True))
    sent = torch.zeros(topology.world_size, dtype=torch.int64)
    received = torch.zeros_like(sent)

    def count_only() -> tuple[float, float]:
        start = time.perf_counter()
        communicator.group.all_to_all(received, sent)
        return time.perf_counter() - start, 0.0

    variants: dict[str, Callable[[], tuple[float, float]]] = {
        "MAX_LEN": lambda: one_pass(all_gather, max_len, spread),
        "SUM_LEN": lambda: one_pass(all_gather, sum_len, spread),
        "all-to-all": lambda: one_pass(all_to_all, max_len, spread),
        "near": lambda: one_pass(all_to_all, max_len, near),
        "counts": count_only,
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(WARM_UP + rounds):
        for name, variant in variants.items():
            samples[name].append(variant())
    return {name: median_us(taken[WARM_UP:]) for name, taken in samples.items()}


def one_pass(dispatcher: Dispatcher, layout: DpLayout, ids_TK: torch.Tensor) -> tuple[float, float]:
    """Returns seconds of dispatch and of combine."""
    x_TD = torch.ones(layout.num_tokens, HIDDEN, dtype=DTYPE)
    weights_TK = torch.ones(ids_TK.shape)
    start = time.perf_counter()
    dispatched = dispatcher.dispatch(x_TD, ids_TK, weights_TK, layout)
    between = time.perf_counter()
    y_RD = dispatched.x_RD.contiguous()
    resumed = time.perf_counter()
    dispatcher.combine(y_RD, dispatched)
    return between - start, time.perf_counter() - resumed


def routes(num_tokens: int, *, is_near: bool) -> torch.Tensor:
    """Returns random experts of each token: of all, or 8 beside each other."""
    generator = torch.Generator().manual_seed(0)
    if is_near:
        first = torch.randint(0, EXPERTS // TOP_K, (num_tokens, 1), generator=generator) * TOP_K
        return (first + torch.arange(TOP_K)).to(torch.int32)
    drawn = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(-1)
    return drawn[:, :TOP_K].to(torch.int32)


def median_us(samples: list[tuple[float, float]]) -> tuple[float, float]:
    dispatch, combine = zip(*samples, strict=True)
    return 1e6 * statistics.median(dispatch), 1e6 * statistics.median(combine)


if __name__ == "__main__":
    main()
