"""A small random model behind runners, and random batches for them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.forward_batch import DpLayout, ForwardBatch
from executor.graph.backend import RunnerBackend
from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.kv_pool import KVPool
from executor.layers.attention import Attention
from executor.layers.attention_torch import TorchAttention
from executor.models import load_model
from executor.models.config import ModelConfig
from executor.models.kernels import stacked_kernels
from executor.runners import GraphRunner
from executor.runners.decode import DecodeRunner
from executor.runners.eager import EagerRunner
from executor.runners.forward_pass import ForwardPass
from executor.runners.prefill_breakable import BreakablePrefillRunner
from executor.runners.prefill_piecewise import PiecewisePrefillRunner

BLOCK_SIZE = 4
NUM_ROWS = 16
MAX_LEN = 64
MAX_TOKENS = 64
DECODE_SIZES = (1, 2, 4, 8, 16)
PREFILL_SIZES = (4, 8, 16, 32, 64)
PREFILL_RUNNERS: dict[str, Callable[..., GraphRunner]] = {
    "piecewise": PiecewisePrefillRunner,
    "breakable": BreakablePrefillRunner,
}
NewAttention = Callable[[ModelConfig], Attention]


def torch_attention(config: ModelConfig) -> TorchAttention:
    return TorchAttention(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        dtype=config.dtype,
    )


class RunnerCase:
    """A model, a KV pool in which every row owns its blocks, and runners over both.

    Args:
        path: Checkpoint.
        new_attention: Makes the attention backend.
        is_capturable: Whether layers do device work alone, as on CUDA.
    """

    def __init__(
        self,
        path: Path,
        new_attention: NewAttention = torch_attention,
        *,
        is_capturable: bool = False,
    ) -> None:
        config = ModelConfig.from_dir(path)
        kernels = None
        if is_capturable:
            cpu = torch.device("cpu")
            kernels = stacked_kernels(config, dtype=config.dtype, device=cpu, ops=None)
        model: Any = load_model(path, config, kernels=kernels)
        blocks_per_row = MAX_LEN // BLOCK_SIZE
        self.pool = KVPool(
            config.kv_shape(BLOCK_SIZE, config.dtype),
            num_blocks=1 + NUM_ROWS * blocks_per_row,
            num_rows=NUM_ROWS,
            max_blocks_per_row=blocks_per_row,
        )
        shuffled = np.random.default_rng(0).permutation(np.arange(1, self.pool.num_blocks))
        rows = range(NUM_ROWS)
        self.pool.append_blocks(rows, [0] * NUM_ROWS, [blocks_per_row] * NUM_ROWS, shuffled)
        self.vocab_size = config.vocab_size
        self.model = model
        self.forward_pass = ForwardPass(
            stages=model.stages,
            compute_logits=model.compute_logits,
            attention=new_attention(config),
            kv_pool=self.pool,
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=config.dtype,
        )
        torch.manual_seed(1)
        for cache in self.caches:
            cache.normal_()

    @property
    def caches(self) -> list[torch.Tensor]:
        return [*self.pool.key_cache, *self.pool.value_cache]

    def eager_registry(self) -> CudaGraphBufferRegistry:
        return build_eager_registry(
            device="cpu", max_bs=NUM_ROWS, max_num_token=MAX_TOKENS, cache_loc_dtype=torch.int64
        )

    def decode_registry(self, width: int = 1, **options: Any) -> CudaGraphBufferRegistry:
        return build_decode_registry(
            device="cpu",
            max_bs=DECODE_SIZES[-1],
            max_num_token=DECODE_SIZES[-1] * width,
            seq_len_fill_value=width,
            cache_loc_dtype=torch.int64,
            enable_num_token_non_padded=True,
            register_global_num_tokens=False,
            **options,
        )

    def prefill_registry(self, **options: Any) -> CudaGraphBufferRegistry:
        return build_prefill_registry(
            device="cpu",
            max_bs=NUM_ROWS,
            max_num_token=PREFILL_SIZES[-1],
            cache_loc_dtype=torch.int64,
            enable_num_token_non_padded=True,
            **options,
        )

    def decode(
        self,
        backend: RunnerBackend,
        width: int = 1,
        registry: CudaGraphBufferRegistry | None = None,
    ) -> DecodeRunner:
        """Returns a decode runner that has captured."""
        runner = DecodeRunner(
            self.forward_pass,
            registry or self.decode_registry(width),
            backend,
            DECODE_SIZES,
            num_tokens_per_bs=width,
        )
        with torch.inference_mode():
            runner.capture()
        return runner

    def prefill(
        self, kind: str, backend: RunnerBackend, registry: CudaGraphBufferRegistry | None = None
    ) -> GraphRunner:
        """Returns a prefill runner that has captured."""
        runner = PREFILL_RUNNERS[kind](
            self.forward_pass, registry or self.prefill_registry(), backend, PREFILL_SIZES
        )
        with torch.inference_mode():
            runner.capture()
        return runner

    def batch(
        self,
        rng: np.random.Generator,
        num_tokens: Sequence[int],
        graph_size: int | None,
        *,
        has_extend: bool,
    ) -> ForwardBatch:
        """Returns a batch of random rows, prefix lengths and tokens.

        Args:
            num_tokens: Tokens of each sequence.
            graph_size: Token rows of the graph that will run it; None if none will.
            has_extend: Whether it is a step with prompt tokens.
        """
        new_lens = np.asarray(num_tokens, dtype=np.int64)
        rows = rng.permutation(NUM_ROWS)[: len(new_lens)]
        prefix_lens = rng.integers(0, MAX_LEN - new_lens + 1)
        total = int(new_lens.sum())
        layout = DpLayout.single(total, graph_size, has_extend=has_extend)
        return ForwardBatch.from_columns(
            rows=rows,
            num_computed=prefix_lens,
            num_tokens=new_lens,
            input_ids=torch.from_numpy(rng.integers(0, self.vocab_size, total)),
            out_cache_loc=self.pool.out_cache_loc(rows, prefix_lens, new_lens),
            layout=layout,
            logits_indices=None if has_extend else np.arange(total),
        )

    def decode_batch(
        self, rng: np.random.Generator, size: int, *, num_seqs: int | None = None, width: int = 1
    ) -> ForwardBatch:
        """Returns a batch that a decode graph of ``size`` runs."""
        if num_seqs is None:
            smaller = max((s for s in DECODE_SIZES if s < size), default=0)
            num_seqs = int(rng.integers(smaller + 1, size + 1))
        return self.batch(rng, [width] * num_seqs, size * width, has_extend=False)

    def prefill_batch(self, rng: np.random.Generator, size: int) -> ForwardBatch:
        """Returns a batch that a prefill graph of ``size`` runs: chunks, with decodes between."""
        total = int(rng.integers(size // 2 + 1, size + 1))
        num_seqs = int(rng.integers(1, min(total, NUM_ROWS) + 1))
        cuts = np.sort(rng.permutation(np.arange(1, total))[: num_seqs - 1])
        num_tokens = np.diff(np.concatenate(([0], cuts, [total])))
        return self.batch(rng, num_tokens.tolist(), size, has_extend=True)

    def run_eagerly(self, batch: ForwardBatch) -> list[torch.Tensor]:
        """Returns what ``run`` returns, without graph and padding."""
        layout = replace(batch.layout, graph_size=None)
        runner = EagerRunner(self.forward_pass, self.eager_registry())
        return self.run(runner, replace(batch, layout=layout))

    def run(self, runner: Any, batch: ForwardBatch) -> list[torch.Tensor]:
        """Returns the logits and all keys and values after a run, which leaves no trace."""
        before = [cache.clone() for cache in self.caches]
        with torch.inference_mode():
            logits = runner.run(batch).clone()
        after = [cache[BLOCK_SIZE:].clone() for cache in self.caches]  # without the scratch block
        for cache, old in zip(self.caches, before, strict=True):
            cache.copy_(old)
        return [logits, *after]
