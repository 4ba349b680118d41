"""What a draft model goes on from: rows that begin, with and without blocks out of the prefix cache."""

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool, KVShape
from executor.budget.speculation import SpeculationPlan
from executor.speculative.draft_batch import Extended
from executor.speculative.state import DraftState

HIDDEN = 3


def pool() -> KVPool:
    shape = KVShape.of_heads(
        num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype=torch.float32
    )
    return KVPool(shape, num_blocks=6, num_rows=4, max_blocks_per_row=4)


def state_of(algorithm: str = "eagle", topk: int = 1, vocab_size: int = 0) -> DraftState:
    plan = SpeculationPlan(algorithm=algorithm, num_draft_steps=3, topk=topk)
    return DraftState(plan, pool(), hidden_size=HIDDEN, vocab_size=vocab_size, dtype=torch.float32)


def filled(*shape: int, start: float = 1.0) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).float().view(shape) + start


@pytest.mark.parametrize(
    ("algorithm", "topk", "count", "layers"),
    [("eagle", 1, 1, 1), ("eagle", 4, 4, 1), ("multi_layer_eagle", 1, 3, 3)],
)
def test_a_row_keeps_the_drafts_that_the_next_step_goes_on_from(
    algorithm: str, topk: int, count: int, layers: int
):
    state = state_of(algorithm, topk, vocab_size=5)
    assert state.carries.shape == (4, layers, HIDDEN)
    rows = torch.tensor([3, 1])
    probs = filled(2, 3, 5) if algorithm == "multi_layer_eagle" else filled(2, 5)
    extended = Extended(
        torch.arange(1, 2 * count + 1).view(2, count),
        filled(2, count),
        filled(2, HIDDEN),
        probs=probs,
    )
    state.keep(rows, extended)
    for kept, given in zip(
        (state.tokens, state.scores, state.hidden, state.probs), (*extended[:3], probs), strict=True
    ):
        assert kept is not None
        assert torch.equal(kept[rows], given)
        assert not kept[[0, 2]].any(), "rows that did not sample"


def test_a_row_begins_with_what_its_last_cached_block_left_and_with_zeros_without_one():
    state = state_of("multi_layer_eagle")
    state.carries.fill_(9)
    features, outputs = filled(5, HIDDEN), filled(5, HIDDEN, start=100)
    state.keep_blocks(torch.tensor([4, 2]), 0, features, torch.tensor([3, 1]))
    state.keep_blocks(torch.tensor([4]), 2, outputs, torch.tensor([2]))

    state.start(np.array([0, 3, 2]), np.array([8, 0, 4]), np.array([4, 4, 2]))

    assert torch.equal(state.carries[0, 0], features[3])
    assert torch.equal(state.carries[0, 2], outputs[2])
    assert not state.carries[0, 1].any()
    assert not state.carries[3].any(), "nothing cached: the first token has nothing before it"
    assert torch.equal(state.carries[2, 0], features[1])
    assert (state.carries[1] == 9).all(), "another row"


def test_a_row_goes_on_with_what_its_last_token_left():
    state = state_of()
    states = filled(6, HIDDEN)
    state.keep_carries(torch.tensor([2, 0]), 0, states, torch.tensor([5, 1]))
    assert torch.equal(state.carries[[2, 0], 0], states[[5, 1]])
    assert not state.carries[[1, 3]].any()


def test_a_draft_without_keys_of_its_own_keeps_nothing_for_blocks():
    state = state_of("frozen_kv_mtp")
    state.start(np.array([1]), np.array([4]), np.array([3]))
    assert not state.carries.any()
    assert state.probs is None
