"""Padded layout that executors derive from the router's agreement."""

import random

import pytest

from executor.parallel.layout import DpLayout, DpPaddingMode
from router.scheduling.step import CapturedSizes
from router.scheduling.step_builder import Counts, agree

NUM_CASES = 400  # for each of the seeds


@pytest.mark.parametrize("seed", range(10))
def test_all_executors_derive_the_same_geometry_from_one_agreement_of_the_router(seed: int):
    rng = random.Random(200 + seed)
    for _ in range(NUM_CASES):
        dp_size, attn_tp_size = rng.randint(1, 6), rng.randint(1, 5)
        most = rng.choice([1, 3, 20, 40])
        counts = [rng.choice([0, rng.randint(0, most)]) for _ in range(dp_size)]
        counts[0] += 1  # an idle system takes no step
        sizes = tuple(attn_tp_size * size for size in (1, 2, 4, 8))
        agreement = agree(
            Counts(counts, counts, counts, [], []),
            has_extend=rng.random() < 0.5,
            attn_tp_size=attn_tp_size,
            graph_sizes=CapturedSizes(rng.choice([(), sizes]), rng.choice([(), sizes])),
        )
        mode, size = DpPaddingMode[agreement.padding_mode.name], agreement.graph_size
        first, *others = [
            DpLayout(counts, mode, dp_rank, size, False, attn_tp_rank, attn_tp_size)
            for dp_rank in range(dp_size)
            for attn_tp_rank in range(attn_tp_size)
        ]
        for layout in others:
            assert layout.offsets == first.offsets
            assert layout.global_shard_num_rows == first.global_shard_num_rows
            assert layout.global_shard_num_tokens == first.global_shard_num_tokens
            assert layout.global_dp_buffer_len == first.global_dp_buffer_len
            assert layout.runtime_max_tokens_per_rank == first.runtime_max_tokens_per_rank
