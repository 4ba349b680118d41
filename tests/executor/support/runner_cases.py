"""A small random model behind the executor's runners, and random batches for them.

Imports no Transformers: the processes of a group start here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.build.plan import plan_budget
from executor.build.runners import build_runners
from executor.config import ExecutorConfig
from executor.graph.backend import EagerBackend, RunnerBackend
from executor.graph.cuda_graph_buffer_registry import (
    CudaGraphBufferRegistry,
    PaddingPolicy,
)
from executor.model.decoder.kernels import Peers, stacked_kernels
from executor.model.decoder.sizes import attention_of, attention_share, kv_shape, windows_of
from executor.model.families import load_model, read_spec
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import Attention, LayerOptions
from executor.model.layers.attention_torch import TorchAttention
from executor.model.moe.layer import Dispatched
from executor.model.spec import GqaSpec, ModelSpec
from executor.model.triton.operators import TritonOps
from executor.parallel.layout import DpLayout, DpPaddingMode, Place, Topology
from executor.runners import Runner
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import RunnerSelection
from executor.speculative.tree import ancestors
from tests.executor.support.experts import with_heads
from tests.executor.support.kv import batch_of, full_pool
from tests.executor.support.ranks.attention_tp_ranks import communicators

BLOCK_SIZE = 4
NUM_ROWS = 16
MAX_LEN = 64
MAX_TOKENS = 64
DECODE_SIZES = (1, 2, 4, 8, 16)
PREFILL_SIZES = (4, 8, 16, 32, 64)
PREFILL_GRAPHS = ("piecewise", "breakable")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HasGraphs(Protocol):
    def capture(self) -> None: ...


R = TypeVar("R", bound=HasGraphs)
NewAttention = Callable[[ModelSpec, KVPool], Attention]


def torch_attention(config: ModelSpec, pool: KVPool) -> TorchAttention:
    windows = windows_of(config)
    return TorchAttention(
        attention_of(config).num_heads,
        pool.shape,
        scale=attention_of(config).scale,
        layers=[LayerOptions(windows.get(layer)) for layer in range(len(config.layers))],
    )


class RunnerCase:
    """A model, a KV pool in which every row owns its blocks, and runners over both.

    Args:
        path: Checkpoint.
        new_attention: Makes the attention backend, given a model with this executor's heads and the
            KV pool.
        is_capturable: Whether layers do device work alone, as on CUDA.
        topology: This executor's place in its group. In one of several, ``members`` must join a
            group before the first run.
        aux_layers: Layers whose sums are features for a draft, or none of them: the hidden states
            are. None if there is no draft.
        ops: FlashInfer for the layers of a capturable case; None runs PyTorch's operators.
        triton: Triton for them, likewise.
        moe_dense_tp_size: 1 runs dense MLPs whole on each executor.
    """

    def __init__(
        self,
        path: Path,
        new_attention: NewAttention = torch_attention,
        *,
        is_capturable: bool = False,
        topology: Topology | None = None,
        aux_layers: Sequence[int] | None = None,
        ops: FlashInferOps | None = None,
        triton: TritonOps | None = None,
        moe_dense_tp_size: int | None = None,
    ) -> None:
        topology = topology or Topology()
        config = read_spec(path)
        self.heads = attention_share(attention_of(config), topology.capacity)
        kernels = None
        if is_capturable:
            cpu = torch.device("cpu")
            kernels = stacked_kernels(
                config, dtype=config.dtype, device=cpu, ops=ops, triton=triton
            )
        num_aux = len(aux_layers or ())
        communicator, attn_tp_communicator = communicators(
            config, topology, MAX_TOKENS, config.hidden_size * (1 + num_aux)
        )
        self.members = (communicator, attn_tp_communicator)
        model: Any = load_model(
            path,
            config,
            peers=Peers.gathering(
                config.num_experts,
                communicator,
                attn_tp_communicator,
                moe_dense_tp_size=moe_dense_tp_size,
            ),
            kernels=kernels,
            aux_layers=aux_layers or (),
        )
        features = None
        if aux_layers is not None:
            feature_size = config.hidden_size * max(num_aux, 1)
            features = torch.zeros(MAX_TOKENS, feature_size, dtype=config.dtype)
        shape = kv_shape(config, BLOCK_SIZE, config.dtype, topology.capacity)
        self.pool = full_pool(shape, NUM_ROWS, MAX_LEN)
        self.settings = ExecutorConfig(
            model=path,
            dp_rank=topology.dp_rank,
            dp_size=topology.dp_size,
            attn_tp_rank=topology.attn_tp_rank,
            attn_tp_size=topology.attn_tp_size,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
        )
        self.vocab_size = config.vocab_size
        self.num_layers = len(config.layers)
        self.num_experts = config.num_experts
        self.aux_layers = aux_layers or ()
        self.model = model
        self.model_config = config
        own_heads = {"num_heads": len(self.heads.q_heads)}
        if isinstance(attention_of(config), GqaSpec):
            own_heads["num_kv_heads"] = len(self.heads.kv_heads)
        own = with_heads(config, **own_heads)
        self.forward_pass = ForwardPass(
            stages=model.stages,
            compute_logits=model.compute_logits,
            attention=new_attention(own, self.pool),
            kv_pool=self.pool,
            num_heads=len(self.heads.q_heads),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=config.dtype,
            place=Place(topology),
            require_mlp_tp_gather=topology.dp_size > 1,
            features=features,
        )
        fill_heads(self.pool, config, topology, seed=1)

    @property
    def caches(self) -> list[torch.Tensor]:
        return self.pool.tensors

    def build(
        self,
        sizes: GraphSizes,
        new_backend: Callable[[], RunnerBackend] = EagerBackend,
        prefill_graphs: str = "breakable",
        speculation: SpeculationPlan | None = None,
    ) -> RunnerSelection:
        """Returns the executor's own runners, which have captured nothing yet."""
        settings = replace(self.settings, prefill_graphs=prefill_graphs)
        budget = plan_budget(settings, self.model_config, self.forward_pass.dtype, sizes)
        return build_runners(
            settings, budget, self.forward_pass, sizes, new_backend, speculation=speculation
        )

    def decode(self, backend: RunnerBackend, width: int = 1, *, has_tree: bool = False) -> Runner:
        """Returns a runner of decodes that has captured.

        Args:
            backend: Of the runner.
            width: Tokens of each sequence.
            has_tree: Whether they are a tree of drafts.
        """
        plan = None
        if width > 1:
            steps, topk = (2, 2) if has_tree else (width - 1, 1)
            plan = SpeculationPlan(
                algorithm="eagle", num_draft_steps=steps, topk=topk, num_draft_tokens=width
            )
        sizes = GraphSizes(decode=DECODE_SIZES)
        runner = self.build(sizes, lambda: backend, speculation=plan)
        return captured(runner if plan is None else runner._verify)

    def prefill(self, prefill_graphs: str, backend: RunnerBackend) -> Runner:
        """Returns a runner of extends that has captured."""
        sizes = GraphSizes(extend=PREFILL_SIZES)
        return captured(self.build(sizes, lambda: backend, prefill_graphs))

    def batch(
        self,
        rng: np.random.Generator,
        num_tokens: Sequence[int],
        graph_size: int | None,
        *,
        has_extend: bool,
        global_num_tokens: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """Returns a batch of random rows, prefix lengths and tokens.

        Args:
            num_tokens: Tokens of each sequence.
            graph_size: Token rows of the graph that will run it; None if none will.
            has_extend: Whether it is a step with prompt tokens.
            global_num_tokens: Tokens of each DP rank; None if there are no others.
        """
        new_lens = np.asarray(num_tokens, dtype=np.int64)
        rows = rng.permutation(NUM_ROWS)[: len(new_lens)]
        prefix_lens = rng.integers(0, MAX_LEN - new_lens + 1)
        total = int(new_lens.sum())
        counts = (total,) if global_num_tokens is None else tuple(global_num_tokens)
        topology = self.forward_pass.place.topology
        layout = DpLayout(
            counts,
            DpPaddingMode.MAX_LEN,
            topology.dp_rank,
            graph_size,
            has_extend,
            topology.attn_tp_rank,
            topology.attn_tp_size,
        )
        ids = torch.from_numpy(rng.integers(0, self.vocab_size, total))
        scored = None if has_extend else np.arange(total)
        return batch_of(self.pool, rows, prefix_lens, new_lens, ids, layout, scored)

    def decode_batch(
        self, rng: np.random.Generator, size: int, *, num_seqs: int | None = None, width: int = 1
    ) -> ForwardBatch:
        """Returns a batch that a decode graph of ``size`` runs."""
        if num_seqs is None:
            smaller = max((s for s in DECODE_SIZES if s < size), default=0)
            num_seqs = int(rng.integers(smaller + 1, size + 1))
        return self.batch(rng, [width] * num_seqs, size * width, has_extend=False)

    def tree_batch(
        self, rng: np.random.Generator, size: int, *, num_seqs: int | None = None, width: int = 4
    ) -> ForwardBatch:
        """Returns random trees of drafts behind random prefixes, for a graph of ``size``."""
        batch = self.decode_batch(rng, size, num_seqs=num_seqs, width=width)
        count = batch.batch_size
        parents = rng.integers(0, np.arange(1, width), (count, width - 1))
        sees = ancestors(torch.from_numpy(parents), width)
        roots = batch.positions.view(count, width)[:, :1]
        return replace(
            batch,
            positions=(roots + sees.sum(dim=2) - 1).flatten(),
            tree_mask=sees,
            extend_seq_lens_cpu=np.full(count, width),
        )

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
        return self.run(self.build(GraphSizes()), replace(batch, layout=layout))

    def run(self, runner: Runner, batch: ForwardBatch) -> list[torch.Tensor]:
        """Returns the logits and all keys and values after a run, which leaves no trace.

        And at the end the features of the batch's rows, if the case has any.
        """
        features = self.forward_pass.features
        if features is not None:
            features.fill_(torch.nan)
        with put_back(self.caches) as after, torch.inference_mode():
            logits = runner.run(batch).clone()
        left = [] if features is None else [features[: len(batch.input_ids)].clone()]
        return [logits, *after, *left]


def watch_experts(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Returns a list that gets the expert ids [R, K] of each layer of each pass from now on.

    A recorded pass adds them once, at its capture; each replay puts its own there.
    """
    seen: list[torch.Tensor] = []
    runner = type(model.layers[0].mlp.experts.runner)
    run = runner.run

    def watched(self: Any, dispatched: Dispatched) -> torch.Tensor:
        seen.append(dispatched.topk_ids_RK.clone())
        result: torch.Tensor = run(self, dispatched)
        return result

    monkeypatch.setattr(runner, "run", watched)
    return seen


def fill_heads(pool: KVPool, config: ModelSpec, topology: Topology, *, seed: int) -> None:
    """Fills a pool with its executor's heads of random keys and values, the same on each of a group."""
    torch.manual_seed(seed)
    attention = attention_of(config)
    heads = attention_share(attention, topology.capacity).kv_heads
    num_heads = attention.num_kv_heads if isinstance(attention, GqaSpec) else len(heads)
    for cache in pool.tensors:
        size = (len(cache), num_heads, cache.shape[2])
        cache.copy_(torch.randn(size, dtype=cache.dtype)[:, heads.start : heads.stop])


@contextmanager
def put_back(caches: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields a list that gets the keys and values after a run, without the scratch block.

    The caches have their content of before again then.
    """
    before, after = [cache.clone() for cache in caches], list[torch.Tensor]()
    yield after
    after += [cache[BLOCK_SIZE:].clone() for cache in caches]
    for cache, old in zip(caches, before, strict=True):
        cache.copy_(old)


def registry_of(runner: Any) -> CudaGraphBufferRegistry:
    """Returns the inputs of what ``RunnerCase.decode`` or ``prefill`` returned."""
    if isinstance(runner, RunnerSelection):
        runner = runner._decode or runner._prefill
    registry: CudaGraphBufferRegistry = runner.graphs.registry
    return registry


def captured(runner: R) -> R:
    """Returns the runner once it has captured."""
    with torch.inference_mode():
        runner.capture()
    return runner


def keep_padding(registry: CudaGraphBufferRegistry, name: str) -> None:
    """Poisons a registry and leaves the padding of one of its slots as it is."""
    slot = registry.get_slot(name)
    assert slot.padding_policy is PaddingPolicy.ZERO or slot.post_fill is not None
    slot.padding_policy, slot.post_fill = PaddingPolicy.KEEP_PAD, None
    registry.poison_tails({name: torch.iinfo(slot.dtype).max})


FLOAT32_OFF = 1e-5


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Logits, keys and values: bit for bit in bfloat16, and in float32 but for the last of them, as
    PyTorch's products add up in another order for another number of rows."""
    is_exact = any(tensor.dtype is torch.bfloat16 for tensor in expected)
    assert_close(got, expected, 0 if is_exact else FLOAT32_OFF)
