"""If these fail, the target model answers otherwise to drafts than it would token by token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.budget.capture_sizes import GraphSizes
from executor.graph.backend import EagerBackend
from executor.graph.cuda_graph_buffer_registry import build_decode_registry
from executor.runners.dummy_batches import dummy_extend
from executor.runners.target import DecodeRunner, RunnerSelection
from executor.speculative.tree import ancestors
from tests.executor.support.kv import out_cache_loc
from tests.executor.support.runner_cases import (
    DTYPES,
    MAX_LEN,
    NUM_ROWS,
    RunnerCase,
    registry_of,
)

NUM_NODES = 4

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module", params=DTYPES)
def case(request: pytest.FixtureRequest, targets: dict[str, Path]) -> RunnerCase:
    return RunnerCase(targets[request.param])


def test_padded_nodes_see_something(case: RunnerCase):
    """With no key at all, kernels may divide by zero, and the scratch block would hold NaN."""
    rng = np.random.default_rng(0)
    runner = case.decode(EagerBackend(), NUM_NODES, has_tree=True)
    tree_mask = registry_of(runner).get_slot("tree_mask").allocated()
    tree_mask.fill_(False)
    batch = case.tree_batch(rng, 8, num_seqs=3)
    case.run(runner, batch)
    assert batch.tree_mask is not None
    assert torch.equal(tree_mask[:3], batch.tree_mask)
    assert tree_mask[3:8].all()


def test_a_tree_answers_as_each_of_its_paths_does(case: RunnerCase):
    """Two drafts side by side, one of which goes on: against plain chains."""
    rng = np.random.default_rng(0)
    batch = case.tree_batch(rng, 1, num_seqs=1)
    sees = ancestors(torch.tensor([[0, 0, 1]]), 2)
    root = batch.positions[:1]
    tree = replace(batch, tree_mask=sees, positions=(root + sees.sum(dim=2) - 1).flatten())
    logits = case.run_eagerly(tree)[0]
    for path in ([0, 1, 3], [0, 2]):
        row, first = int(batch.req_pool_indices[0]), int(root[0])
        count = len(path)
        chain = case.batch(rng, [count], None, has_extend=False)
        lens = torch.tensor([first + count])
        chain = replace(
            chain,
            input_ids=batch.input_ids[path],
            positions=first + torch.arange(count),
            out_cache_loc=out_cache_loc(case.pool, [row], [first], [count]),
            req_pool_indices=torch.tensor([row]),
            seq_lens=lens,
            seq_lens_cpu=lens,
        )
        tolerance = 1e-4 if case.forward_pass.dtype == torch.float32 else 0.1
        torch.testing.assert_close(
            logits[path], case.run_eagerly(chain)[0], rtol=tolerance, atol=tolerance
        )


def test_padded_sequences_shorter_than_what_they_run_are_refused(case: RunnerCase):
    registry = build_decode_registry(
        device="cpu", max_bs=4, max_num_token=12, seq_len_fill_value=2, cache_loc_dtype=torch.int64
    )
    with pytest.raises(AssertionError, match="a padded sequence of 2 tokens cannot run 3"):
        DecodeRunner(case.forward_pass, registry, EagerBackend(), (1, 4), num_tokens_per_bs=3)


def test_drafts_are_verified_by_the_graph_that_the_layout_names_and_else_eagerly(case: RunnerCase):
    eager = case.build(GraphSizes())._eager
    verify: Any = case.decode(EagerBackend(), NUM_NODES, has_tree=True)
    runner = RunnerSelection(eager, verify=verify)
    batch = case.tree_batch(np.random.default_rng(0), 4, num_seqs=3)
    expected = case.run_eagerly(batch)[0]
    in_graph = batch.layout
    with torch.inference_mode():
        for layout in (in_graph, replace(in_graph, graph_size=None)):
            got = runner.verify(replace(batch, layout=layout))
            assert torch.equal(got, expected)
            is_of_graph = got.data_ptr() == verify._logits.data_ptr()
            assert is_of_graph == (layout.graph_size is not None)


def test_a_prompt_that_stands_for_a_graph_ends_where_a_sequence_must(case: RunnerCase):
    """Rows of the block table may be longer: for drafts, whose positions have no rotation."""
    limited = replace(case.forward_pass, max_len=MAX_LEN - 5)
    dummy = dummy_extend(limited, 2 * MAX_LEN)
    assert int(dummy.positions.max()) == MAX_LEN - 6
    assert dummy.seq_lens_cpu.tolist() == [59, 59, 10]
    with pytest.raises(ValueError, match="16 rows of 59 tokens hold 944"):
        dummy_extend(limited, NUM_ROWS * MAX_LEN)
