"""A small draft model behind each of the four draft runners, and random batches for them.

Imports no Transformers: the processes of a group start here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.batch.kv_pool import KVPool
from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.build import drafts
from executor.build.devices import AttentionGraphs
from executor.graph.backend import RunnerBackend
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.model.decoder.kernels import stacked_kernels
from executor.model.drafts.config import DraftConfig
from executor.model.drafts.draft import load_draft_model
from executor.model.layers.attention import Attention
from executor.model.layers.attention_torch import TorchAttention
from executor.parallel.layout import DpLayout, DpPaddingMode, Topology
from executor.runners.forward_pass import RunnerGraphs
from executor.speculative.draft_batch import DraftBatch, ExtendBatch
from tests.executor.support.kv import batch_of, out_cache_loc
from tests.executor.support.runner_cases import (
    BLOCK_SIZE,
    MAX_LEN,
    NUM_ROWS,
    RunnerCase,
    fill_heads,
    put_back,
)

NUM_STEPS = 3
FILE_OF = {  # the draft checkpoint (draft_checkpoints.py) that each runner is tested with
    "eagle": "eagle3",
    "moe": "nextn",
    "multi_layer": "nextn_three_layers",
    "frozen_kv": "frozen_kv",
}


@dataclass(frozen=True)
class Way:
    """A runner, and how it drafts.

    Attributes:
        runner: "draft", "extend", "multi_layer" or "frozen_kv".
        draft: Which of ``FILE_OF`` drafts.
        topk: Drafts that each step goes on from.
        is_drawn: Whether drafts are drawn.
        num_draft_tokens: Tokens that are verified; 0 for the default.
        is_plain: Whether it is a draft-extend behind decodes that have not drafted.
    """

    runner: str
    draft: str
    topk: int = 1
    is_drawn: bool = False
    num_draft_tokens: int = 0
    is_plain: bool = False

    def __str__(self) -> str:
        drawn = "-drawn" if self.is_drawn else ""
        plain = "-plain" if self.is_plain else ""
        return f"{self.runner}-{self.draft}-topk{self.topk}{drawn}{plain}"

    @property
    def plan(self) -> SpeculationPlan:
        algorithm = {"multi_layer": "multi_layer_eagle", "frozen_kv": "frozen_kv_mtp"}
        return SpeculationPlan(
            algorithm=algorithm.get(self.draft, "eagle"),
            num_draft_steps=NUM_STEPS,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
        )

    @property
    def is_extend(self) -> bool:
        """Whether its runner is a draft-extend."""
        return self.runner in ("extend", "multi_layer")

    @property
    def width(self) -> int:
        """Token rows of each sequence."""
        if not self.is_extend:
            return self.topk
        return self.plan.num_layers if self.is_plain else self.plan.num_extend_rows

    @property
    def widths(self) -> tuple[int, ...]:
        """Of all graphs that the runner has."""
        plan = self.plan
        return (plan.num_extend_rows, plan.num_layers) if self.is_extend else (self.topk,)


WAYS = [
    Way("draft", "eagle"),
    Way("draft", "eagle", is_drawn=True),
    Way("draft", "eagle", 2),
    Way("draft", "moe", 4),
    Way("extend", "eagle"),
    Way("extend", "eagle", 4),
    Way("extend", "moe", 2),
    Way("extend", "moe", is_drawn=True),
    Way("extend", "eagle", is_plain=True),
    Way("extend", "moe", 4, is_plain=True),
    Way("extend", "moe", is_drawn=True, is_plain=True),
    Way("multi_layer", "multi_layer"),
    Way("multi_layer", "multi_layer", is_drawn=True),
    Way("multi_layer", "multi_layer", is_plain=True),
    Way("multi_layer", "multi_layer", is_drawn=True, is_plain=True),
    Way("frozen_kv", "frozen_kv"),
    Way("frozen_kv", "frozen_kv", is_drawn=True),
    Way("frozen_kv", "frozen_kv", 2),
    Way("frozen_kv", "frozen_kv", 4),
]


NewAttention = Callable[[int, KVPool, list[AttentionGraphs]], Attention]


class DraftCase:
    """A target, its draft and their KV pools, in which every row owns its blocks.

    Args:
        target: Checkpoint of the target.
        draft: Of the draft.
        way: What to run.
        is_capturable: Whether layers do device work alone, as on CUDA; attention does not.
        topology: This executor's place in its group.
        new_attention: Makes an attention of runners with graphs, given query heads, the draft's KV
            pool and the graphs that call it; the CPU's if None.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        way: Way,
        *,
        is_capturable: bool = False,
        topology: Topology | None = None,
        new_attention: NewAttention | None = None,
    ) -> None:
        self.way = way
        self.is_capturable = is_capturable
        self.topology = topology or Topology()
        self.target = RunnerCase(target, is_capturable=is_capturable, topology=topology)
        self.config = config = DraftConfig.from_dir(draft, self.target.model_config)
        self.dtype = self.target.model_config.dtype
        kernels = None
        if is_capturable:
            cpu = torch.device("cpu")
            kernels = stacked_kernels(config.layers, dtype=self.dtype, device=cpu, ops=None)
        self.model: Any = load_draft_model(draft, config, self.target.model, kernels=kernels)
        shape = config.kv_shape(BLOCK_SIZE, self.dtype, self.topology.capacity)
        self.pool = self.target.pool if shape is None else self.target.pool.sibling(shape)
        if shape is not None:
            fill_heads(self.pool, config.layers, self.topology, seed=2)
        self._new_attention = new_attention
        self.layouts: list[DpLayout] = []  # of every pass that began
        stages = self.model.stages

        def noted(batch: ForwardBatch, layer: int = 0) -> Any:
            self.layouts.append(batch.layout)
            return stages(batch, layer)

        self.model.stages = noted

    @property
    def caches(self) -> list[torch.Tensor]:
        return self.pool.tensors

    def build(
        self,
        sizes: Sequence[int] = (),
        new_backend: Callable[[], RunnerBackend] | None = None,
        way: Way | None = None,
    ) -> Any:
        """Returns the executor's own runner of a way, the case's if None. It has captured nothing.

        With graphs it takes a backend for each of ``way.widths``.
        """
        way, config = way or self.way, self.config
        blueprint: Any = SimpleNamespace(
            config=self.target.settings,
            dtype=self.dtype,
            graph_sizes=GraphSizes(decode=tuple(sizes)),
            budget=None,
            max_model_len=MAX_LEN,
        )
        device: Any = SimpleNamespace(attention=self._attention, new_backend=new_backend)
        target_pass = self.target.forward_pass
        builder = drafts._Builder(
            blueprint, config, way.plan, device, self.model, target_pass, way.is_drawn
        )
        if way.runner == "frozen_kv":
            return builder._frozen_kv()
        builders = {
            "draft": builder._eagle_draft,
            "extend": builder._eagle_extend,
            "multi_layer": builder._multi_layer,
        }
        return builders[way.runner](self.pool)

    def _attention(
        self,
        num_heads: int,
        pool: KVPool,
        graphs: list[AttentionGraphs],
        budget: None,
        scale: float | None = None,
    ) -> Attention:
        if self._new_attention is not None and graphs[0].sizes:
            return self._new_attention(num_heads, pool, graphs)
        return TorchAttention(num_heads, pool.shape)

    # ---- batches

    def batch(
        self,
        rng: np.random.Generator,
        num_requests: int | Sequence[int],
        graph_requests: int | None,
        padding_mode: DpPaddingMode = DpPaddingMode.MAX_LEN,
    ) -> DraftBatch | ExtendBatch:
        """Returns a batch of random rows, lengths, tokens and hidden states.

        Args:
            num_requests: Of each DP rank.
            graph_requests: Sequences of the graph that runs it; None if none does.
        """
        counts = [num_requests] if isinstance(num_requests, int) else num_requests
        step = DpLayout(
            tuple(counts),
            padding_mode,
            self.topology.dp_rank,
            attn_tp_rank=self.topology.attn_tp_rank,
            attn_tp_size=self.topology.attn_tp_size,
        )
        layout = step.of_requests(counts, self.way.width, graph_requests=graph_requests)
        rows = rng.permutation(NUM_ROWS)[: counts[self.topology.dp_rank]]
        new_batch = self._extend_batch if self.way.is_extend else self._draft_batch
        return new_batch(rng, rows, layout)

    def _draft_batch(
        self, rng: np.random.Generator, rows: np.ndarray[Any, Any], layout: DpLayout
    ) -> DraftBatch:
        way, count = self.way, len(rows)
        is_frozen = way.runner == "frozen_kv"
        num_slots = 0 if is_frozen else (NUM_STEPS - 1) * way.topk
        lens = rng.integers(2, MAX_LEN - num_slots + 1, count)
        num_tokens = 1 if is_frozen else way.topk
        tokens = torch.from_numpy(rng.integers(0, self.target.vocab_size, count * num_tokens))
        return draft_batch(
            rows,
            lens,
            layout,
            input_ids=tokens,
            out_cache_loc=out_cache_loc(self.pool, rows, lens, np.full(count, num_slots)),
            scores=-_normal(rng, (count, num_tokens)).abs().sort(dim=1).values,
            hidden_states=_normal(rng, (count, self.model.hidden_size)).to(self.dtype),
            probs=self._probs(rng, count) if way.is_drawn and not is_frozen else None,
            **self._draws(rng, torch.from_numpy(lens)),
        )

    def _extend_batch(
        self, rng: np.random.Generator, rows: np.ndarray[Any, Any], layout: DpLayout
    ) -> ExtendBatch:
        width, count = self.way.width, len(rows)
        layers = NUM_STEPS if self.way.runner == "multi_layer" else 1
        starts = rng.integers(1, MAX_LEN - width + 1, count)
        num_tokens = rng.integers(1, width - layers + 2, count)
        ids = torch.from_numpy(rng.integers(0, self.target.vocab_size, count * width))
        batch = batch_of(self.pool, rows, starts, np.full(count, width), ids, layout)
        size = self.model.hidden_size
        batch.hidden_states = _normal(rng, (count * width, size)).to(self.dtype)
        firsts = torch.arange(count) * width
        carries = _normal(rng, (count, layers - 1, size)).to(self.dtype) if layers > 1 else None
        return ExtendBatch.of(
            batch,
            width=width,
            starts=firsts,
            lasts=firsts + torch.from_numpy(num_tokens - 1),
            carries=carries,
            **self._draws(rng, torch.from_numpy(starts + num_tokens)),
        )

    def _probs(self, rng: np.random.Generator, count: int) -> torch.Tensor:
        return _normal(rng, (count, self.model.vocab_size)).softmax(dim=-1)

    def _draws(self, rng: np.random.Generator, positions: torch.Tensor) -> dict[str, Any]:
        if not self.way.is_drawn:
            return {}
        temperature = torch.from_numpy(rng.choice([0.0, 0.7, 1.0], len(positions)))
        seeds = torch.from_numpy(rng.integers(0, 2**62, len(positions)))
        return {"temperature": temperature.float(), "seeds": seeds, "draw_positions": positions}

    # ---- runs

    def run(self, runner: Any, batch: DraftBatch | ExtendBatch) -> list[torch.Tensor]:
        """Returns what a run gives, and all keys and values after it. It leaves no trace."""
        with put_back(self.caches) as after, torch.inference_mode():
            if isinstance(batch, DraftBatch):
                results = [x.clone() for x in runner.draft(batch) if x is not None]
            else:
                results = self._real(runner.extend(batch), batch)
        return [*results, *after]

    def _real(self, extended: Any, batch: ExtendBatch) -> list[torch.Tensor]:
        outputs = [states.clone() for states in extended.outputs]
        probs = [] if extended.probs is None else [extended.probs]
        return [extended.tokens, extended.scores, extended.hidden, *outputs, *probs]

    def run_eagerly(self, batch: DraftBatch | ExtendBatch) -> list[torch.Tensor]:
        """Returns what ``run`` returns, without graph and padding."""
        return self.run(self.build(), eager(batch))


def draft_batch(
    rows: Any, lens: Any, layout: DpLayout, *, input_ids: torch.Tensor, **fields: Any
) -> DraftBatch:
    """Returns some rows, with so many tokens each, to draft after."""
    seq_lens = torch.as_tensor(lens)
    return DraftBatch(
        forward_mode=ForwardMode.DECODE if len(seq_lens) else ForwardMode.IDLE,
        batch_size=len(seq_lens),
        input_ids=input_ids,
        positions=seq_lens,
        req_pool_indices=torch.as_tensor(rows),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        layout=layout,
        logits_indices=input_ids[:0],
        **fields,
    )


def eager(batch: DraftBatch | ExtendBatch) -> DraftBatch | ExtendBatch:
    """Returns the batch as a step without a graph has it."""
    return replace(batch, layout=replace(batch.layout, graph_size=None))


def captured(runner: Any) -> Any:
    """Returns the draft runner once it has captured."""
    with torch.inference_mode():
        runner.graphs.capture()
    return runner


def graphs_of(runner: Any, way: Way) -> RunnerGraphs:
    """Returns what replays a way's batches in a runner that has graphs."""
    graphs = runner.graphs.graphs
    found: RunnerGraphs = graphs[way.width] if way.is_extend else graphs
    return found


def registry_of(runner: Any, way: Way) -> CudaGraphBufferRegistry:
    """Returns their inputs."""
    return graphs_of(runner, way).registry


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
