"""If this fails, models on a CPU attend to something else than what they should."""

import pytest
import structlog
import torch

from executor.model.cpu_kernels import library
from executor.model.layers.attention_cpu import CpuAttention, cpu_attention
from executor.model.layers.attention_torch import TorchAttention
from tests.executor.model.layers.attention_cases import (
    BLOCK_SIZE,
    MIXES,
    Case,
    Mix,
    random_trees,
    with_trees,
)

KERNEL = pytest.mark.skipif(library.load() is None, reason="no kernels for this CPU")
WIDE = 8  # times what other tests have: widths that the kernel takes
OPTIONS = {
    "heads": {},
    "latents": {"is_latent": True},
    "windows and sinks": {"window": 5, "sinks": True},
}
# Plain attention takes seconds for the longest.
EVERY_MIX = pytest.mark.parametrize("mix", [mix for mix in MIXES.values() if max(mix) < (600, 0)])


def wide(mix: Mix, dtype: torch.dtype = torch.bfloat16, **options: bool) -> Case:
    return Case(mix, dtype, times=WIDE, **options)


@KERNEL
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@EVERY_MIX
def test_every_mix_equals_plain_attention_and_is_stored_where_the_pool_says(
    mix: Mix, dtype: torch.dtype, options: dict[str, bool]
):
    case = wide(mix, dtype, **options)
    attention = case.attention("cpu")
    assert isinstance(attention, CpuAttention)
    case.check(case.run(attention))
    case.check_stored()


@KERNEL
def test_trees_and_queries_without_keys_of_their_own():
    case = wide([(prefix, 4) for prefix in (9, 0, 63)])
    case.batch.tree_mask = random_trees(3, 4, seed=0)
    attention = case.attention("cpu")
    case.check(case.run(attention), with_trees(case.num_keys, case.batch.tree_mask))
    case = wide([(9, 1), (0, 1), (63, 1)])
    attention = case.attention("cpu")
    case.check(case.run(attention))
    before = [cache.clone() for cache in case.caches]
    case.check(case.run(attention, stores=False))
    for cache, old in zip(case.caches, before, strict=True):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


@KERNEL
def test_a_draft_that_reads_layers_without_windows_needs_no_slots_for_the_others():
    case = wide([(9, 1), (63, 1)], window=5)
    case.batch.window_cache_loc = None
    attention = cpu_attention(case.num_heads, case.pool.shape, scale=case.scale)
    assert isinstance(attention, CpuAttention)
    attention.init_forward_metadata_out_graph(case.batch, case.pool)
    plain = TorchAttention(case.num_heads, case.pool.shape, scale=case.scale)
    plain.init_forward_metadata_out_graph(case.batch, case.pool)
    for cache in case.caches:
        cache.normal_(generator=torch.manual_seed(0))
    ours, expected = (one.forward(case.q, None, None, 0) for one in (attention, plain))
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


@KERNEL
def test_padding_rows_write_to_the_scratch_block_only():
    plain, padded = (wide(MIXES["mixed"], garbage=0.0) for _ in range(2))
    padded.pad(3, torch.nan)
    out = padded.run(padded.attention("cpu"))
    total = sum(padded.counts)
    assert torch.equal(out[:total], plain.run(plain.attention("cpu")))
    assert not out[total:].any()
    for ours, theirs in zip(padded.caches, plain.caches, strict=True):
        assert torch.equal(ours[BLOCK_SIZE:], theirs[BLOCK_SIZE:])


@KERNEL
def test_heads_that_the_kernel_does_not_take_run_plainly_with_a_line_in_the_log():
    with structlog.testing.capture_logs() as lines:
        attention = Case(MIXES["mixed"], torch.bfloat16).attention("cpu")
    assert type(attention) is TorchAttention
    assert [line["event"] for line in lines] == ["attention_without_kernel"]
    plain = wide(MIXES["mixed"], torch.float64)  # types that no kernel takes are nothing to log
    assert type(plain.attention("cpu")) is TorchAttention
