"""A random model behind runners on any device, batches for them, and how results are compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.graph.backend import RunnerBackend
from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.model.decoder.decoder import Decoder
from executor.model.decoder.kernels import Kernels, Peers, stacked_kernels
from executor.model.decoder.sizes import attention_of, kv_shape
from executor.model.flashinfer.cutedsl import why_not
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import Attention
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_torch import TorchAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.model.spec import ModelSpec
from executor.model.triton.operators import TritonOps
from executor.parallel.layout import DpLayout
from executor.runners import GraphRunner
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import (
    BreakablePrefillRunner,
    DecodeRunner,
    EagerRunner,
    PiecewisePrefillRunner,
)
from tests.executor.support.kv import batch_of, full_pool
from tests.gpu.support.shapes import Sizes
from tests.gpu.support.weights import NewTensor, fill, random_tensor

CPU = torch.device("cpu")
PREFILL_RUNNERS: dict[str, Callable[..., GraphRunner]] = {
    "piecewise": PiecewisePrefillRunner,
    "breakable": BreakablePrefillRunner,
}
NewAttention = Callable[[ModelSpec, KVPool, Sizes], Attention]

# How far a row of results may lie from the right one, as a part of its length: rounding to
# bfloat16 moves each number by up to 0.4 %, and another batch size may mean another kernel.
SAME_KERNELS = 0.01
OTHER_KERNELS = 0.05


def normal(*size: int, seed: int) -> torch.Tensor:
    """Returns float32 normal numbers on the CPU."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def torch_attention(config: ModelSpec, pool: KVPool, sizes: Sizes) -> TorchAttention:
    """Returns the authority. One thread: pools of threads are for the CPU."""
    return TorchAttention(attention_of(config).num_heads, pool.shape)


def flashinfer_attention(
    ops: FlashInferOps,
    extend_backend: str = "auto",
    workspace: AttentionWorkspace | None = None,
    triton: TritonOps | None = None,
) -> NewAttention:
    """Returns what makes FlashInfer's attention, with a workspace of its own unless told."""

    def new(config: ModelSpec, pool: KVPool, sizes: Sizes) -> FlashInferAttention:
        return FlashInferAttention(
            ops,
            pool,
            attention_of(config).num_heads,
            workspace or AttentionWorkspace(pool.device),
            max_num_tokens=sizes.max_num_tokens,
            extend_backend=extend_backend,
            triton=triton,
        )

    return new


def device_kernels(
    config: ModelSpec,
    sizes: Sizes,
    device: torch.device,
    ops: FlashInferOps | None,
    *,
    moe_runner: str = "grouped",
    triton: TritonOps | None = None,
) -> Kernels:
    """Returns what a GPU executor's layers call."""
    return stacked_kernels(
        config,
        dtype=config.dtype,
        device=device,
        ops=ops,
        moe_runner=moe_runner,
        max_moe_rows=sizes.max_num_tokens,
        triton=triton,
    )


def skip_without_cutedsl(ops: FlashInferOps, device: torch.device) -> None:
    """Skips the test if FlashInfer's CuTe-DSL kernels cannot run here."""
    problem = why_not(ops, torch.empty(1, 8, 32, dtype=torch.bfloat16, device=device))
    if problem is not None:
        pytest.skip(f"needs experts in CuTe-DSL: {problem}")


def new_pool(config: ModelSpec, sizes: Sizes, device: torch.device) -> KVPool:
    """Returns a pool in which every row owns shuffled blocks, alike on all devices."""
    shape = kv_shape(config, sizes.block_size, config.dtype)
    return full_pool(shape, sizes.num_rows, sizes.max_len, device)


def fill_pool(pool: KVPool, made_on: torch.device = CPU) -> None:
    """Fills a pool with random keys and values, the same for every pool of its sizes."""
    for i, cache in enumerate(pool.tensors):
        x = random_tensor(f"kv {i}", tuple(cache.shape), dtype=torch.bfloat16, device=made_on)
        cache.copy_(x)


@dataclass(slots=True)
class Result:
    """What a run gave: logits [L, V], and all keys and values after it, layer by layer."""

    logits: torch.Tensor
    caches: list[torch.Tensor]


class Case:
    """A model, a KV pool and runners over both.

    Args:
        config: The model.
        sizes: Of the pool and the graphs.
        kernels: What its layers call.
        new_attention: Makes the attention backend.
        new_tensor: Makes the weights.
        device: Where all of it lives.
        made_on: Where the pool's content is made.
    """

    def __init__(
        self,
        config: ModelSpec,
        sizes: Sizes,
        kernels: Kernels,
        new_attention: NewAttention,
        new_tensor: NewTensor,
        *,
        device: torch.device,
        made_on: torch.device = CPU,
    ) -> None:
        self.config = config
        self.sizes = sizes
        self.device = device
        self.model = Decoder(
            config,
            dtype=config.dtype,
            device=device,
            peers=Peers.gathering(config.num_experts),
            kernels=kernels,
        )
        with torch.no_grad():
            fill(self.model.weight_groups(), new_tensor)
        self.pool = new_pool(config, sizes, device)
        fill_pool(self.pool, made_on)
        self.attention = new_attention(config, self.pool, sizes)
        self._widths: set[int] = set()  # of decode graphs that attention is ready for
        self.forward_pass = ForwardPass(
            stages=self.model.stages,
            compute_logits=self.model.compute_logits,
            attention=self.attention,
            kv_pool=self.pool,
            num_heads=attention_of(config).num_heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=config.dtype,
        )

    @property
    def caches(self) -> list[torch.Tensor]:
        return self.pool.tensors

    # Runners.

    def eager(self) -> EagerRunner:
        sizes = self.sizes
        registry = build_eager_registry(
            device=self.device,
            max_bs=sizes.num_rows,
            max_num_token=sizes.max_num_tokens,
            cache_loc_dtype=torch.int64,
        )
        return EagerRunner(self.forward_pass, registry)

    def decode_registry(self, width: int = 1) -> CudaGraphBufferRegistry:
        return build_decode_registry(
            device=self.device,
            max_bs=self.sizes.decode[-1],
            max_num_token=self.sizes.decode[-1] * width,
            seq_len_fill_value=width,
            cache_loc_dtype=torch.int64,
            enable_num_token_non_padded=True,
            register_global_num_tokens=False,
        )

    def prefill_registry(self) -> CudaGraphBufferRegistry:
        return build_prefill_registry(
            device=self.device,
            max_bs=self.sizes.num_rows,
            max_num_token=self.sizes.prefill[-1],
            cache_loc_dtype=torch.int64,
            enable_num_token_non_padded=True,
        )

    def decode(
        self,
        backend: RunnerBackend,
        width: int = 1,
        registry: CudaGraphBufferRegistry | None = None,
    ) -> DecodeRunner:
        """Returns a decode runner that has captured every size."""
        if isinstance(self.attention, FlashInferAttention) and width not in self._widths:
            # Once: another call would make other wrappers, which older graphs do not read.
            self.attention.init_cuda_graph_state(self.sizes.decode, width)
            self._widths.add(width)
        runner = DecodeRunner(
            self.forward_pass,
            registry or self.decode_registry(width),
            backend,
            self.sizes.decode,
            num_tokens_per_bs=width,
        )
        with torch.inference_mode():
            runner.capture()
        return runner

    def prefill(
        self, kind: str, backend: RunnerBackend, registry: CudaGraphBufferRegistry | None = None
    ) -> GraphRunner:
        """Returns a prefill runner that has captured every size."""
        registry = registry or self.prefill_registry()
        runner = PREFILL_RUNNERS[kind](self.forward_pass, registry, backend, self.sizes.prefill)
        with torch.inference_mode():
            runner.capture()
        return runner

    # Batches.

    def batch(
        self,
        sequences: Sequence[tuple[int, int]],
        *,
        graph_size: int | None = None,
        has_extend: bool,
        rng: np.random.Generator,
    ) -> ForwardBatch:
        """Returns a batch of random tokens in random rows.

        Args:
            sequences: Of each, its tokens before this pass and in it.
            graph_size: Token rows of the graph that will run it; None if none will.
            has_extend: Whether it is a step with prompt tokens; else every token needs logits.
        """
        prefix_lens = np.array([prefix for prefix, _ in sequences], dtype=np.int64)
        new_lens = np.array([count for _, count in sequences], dtype=np.int64)
        rows = rng.permutation(self.sizes.num_rows)[: len(new_lens)]
        total = int(new_lens.sum())
        ids = torch.from_numpy(rng.integers(0, self.config.vocab_size, total))
        return batch_of(
            self.pool,
            rows,
            prefix_lens,
            new_lens,
            ids.to(self.device),
            DpLayout.single(total, graph_size, has_extend=has_extend),
            logits_indices=None if has_extend else np.arange(total),
        )

    def decode_batch(
        self, rng: np.random.Generator, num_seqs: int, width: int = 1, *, size: int | None = None
    ) -> ForwardBatch:
        """Returns a batch for the smallest graph that fits, or for the graph of ``size``."""
        longest = self.sizes.max_len - width
        size = size or next((n for n in self.sizes.decode if n >= num_seqs), None)
        assert size is not None, f"no graph for {num_seqs} sequences"
        return self.batch(
            [(int(prefix), width) for prefix in rng.integers(0, longest + 1, num_seqs)],
            graph_size=size * width,
            has_extend=False,
            rng=rng,
        )

    def prefill_batch(self, rng: np.random.Generator, num_tokens: int, size: int) -> ForwardBatch:
        """Returns prompts and chunks of prompts, with decodes between."""
        most = min(num_tokens, self.sizes.num_rows)
        least = -(-num_tokens // self.sizes.max_len)
        num_seqs = int(rng.integers(least, most + 1))
        while True:
            cuts = np.sort(rng.permutation(np.arange(1, num_tokens))[: num_seqs - 1])
            counts = np.diff(np.concatenate(([0], cuts, [num_tokens])))
            if counts.max() <= self.sizes.max_len:
                break
            num_seqs = most
        prefixes = rng.integers(0, self.sizes.max_len - counts + 1) * rng.integers(0, 2, num_seqs)
        return self.batch(
            list(zip(prefixes.tolist(), counts.tolist(), strict=True)),
            graph_size=size,
            has_extend=True,
            rng=rng,
        )

    # Runs.

    def run(self, runner: Any, batch: ForwardBatch) -> Result:
        """Returns what a run gives. The pool is afterwards as it was before."""
        before = [cache.clone() for cache in self.caches]
        with torch.inference_mode():
            logits = runner.run(batch).clone()
        scratch = self.sizes.block_size
        after = [cache[scratch:].clone() for cache in self.caches]
        for cache, old in zip(self.caches, before, strict=True):
            cache.copy_(old)
        return Result(logits, after)

    def run_eagerly(self, batch: ForwardBatch) -> Result:
        """Returns what ``run`` returns, without graph and padding."""
        layout = replace(batch.layout, graph_size=None)
        return self.run(self.eager(), replace(batch, layout=layout))


def largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns how far a row lies from where it should, as a part of its length; at worst.

    NaN counts as infinitely far.
    """
    assert got.shape == expected.shape, f"{list(got.shape)}, expected {list(expected.shape)}"
    if not got.numel():
        return 0.0
    device = got.device if got.device == expected.device else CPU
    ours, theirs = (x.to(device, torch.float32).flatten(1) for x in (got, expected))
    errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-6)
    return float(errors.nan_to_num(nan=torch.inf).max())


def assert_alike(got: Result, expected: Result, limit: float, what: str = "") -> None:
    """Compares logits, and every place of the KV pool but the scratch block."""
    error = largest_error(got.logits, expected.logits)
    assert error <= limit, f"{what}: a row of logits is off by {error:.4f} of its length"
    for layer, (ours, theirs) in enumerate(zip(got.caches, expected.caches, strict=True)):
        error = largest_error(ours, theirs)
        assert error <= limit, f"{what}: cache {layer} is off by {error:.4f} at some token"


def lazily(new: Callable[..., Any], **options: Any) -> NewAttention:
    """Adapts an attention backend that is made without the sizes of a case."""
    return lambda config, pool, sizes: new(config, pool, **options)
