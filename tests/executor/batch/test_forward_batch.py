"""If this fails, a sequence runs at other positions than its own, or another row's logits are sampled."""

from dataclasses import replace

import pytest
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.parallel.layout import DpLayout


def build(num_computed: list[int], num_tokens: list[int]) -> ForwardBatch:
    total = sum(num_tokens)
    return ForwardBatch.from_columns(
        rows=range(len(num_tokens)),
        num_computed=num_computed,
        num_tokens=num_tokens,
        input_ids=torch.arange(total),
        out_cache_loc=torch.arange(total),
        layout=DpLayout.single(total),
    )


def test_positions_and_last_rows_follow_from_the_counts():
    batch = build([0, 7, 2], [3, 1, 2])
    assert batch.forward_mode is ForwardMode.EXTEND
    assert batch.positions.tolist() == [0, 1, 2, 7, 2, 3]
    assert batch.seq_lens_cpu.tolist() == [3, 8, 4]
    assert batch.logits_indices.tolist() == [2, 3, 5]


def test_the_mode_follows_from_the_counts():
    assert build([4, 9], [1, 1]).forward_mode is ForwardMode.DECODE
    assert build([], []).forward_mode is ForwardMode.IDLE


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one of each per sequence"):
        build([4], [1, 1])
    with pytest.raises(ValueError, match="has a 0"):
        build([4, 2], [1, 0])


@pytest.mark.parametrize(("attn_tp_rank", "num_real"), [(0, 4), (1, 1)])
def test_padding_is_told_for_the_rows_of_this_executors_shard(attn_tp_rank: int, num_real: int):
    batch = build([0], [5])
    assert batch.is_padding() is None
    batch.layout = replace(batch.layout, graph_size=8, attn_tp_rank=attn_tp_rank, attn_tp_size=2)
    batch.num_token_non_padded = torch.tensor([num_real], dtype=torch.int32)
    is_padding = batch.is_padding()
    assert is_padding is not None
    assert is_padding.tolist() == [[row >= num_real] for row in range(4)]
