"""Draft model of an executor, its runners, and what drives them in a step.

target ─▶ draft model ─┐
target's KV pool ──────┼─▶ forward passes ─▶ drafter, extender ─▶ speculator, verifier
attention, one each ───┘
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from executor.batch.kv_pool import KVPool
from executor.budget.speculation import SpeculationPlan
from executor.build.devices import AttentionGraphs, Device
from executor.build.plan import Blueprint
from executor.build.runners import row_counts
from executor.graph.cuda_graph_buffer_registry import build_draft_registry
from executor.graph.slots import GraphSlot, draft_extend_slots, eagle_draft_slots, frozen_kv_slots
from executor.model.decoder.sizes import attention_of, attention_share
from executor.model.drafts.config import DraftConfig
from executor.model.drafts.draft import DraftModel
from executor.model.layers.attention import Attention
from executor.model.sampling.sampler import Sampler
from executor.parallel.layout import require_mlp_tp_gather
from executor.runners import Capturable
from executor.runners.eagle_draft import EagleDraftRunner
from executor.runners.eagle_draft_extend import EagleDraftExtendRunner, MultiLayerDraftExtendRunner
from executor.runners.forward_pass import ForwardPass, RunnerGraphs
from executor.runners.frozen_kv_mtp import FrozenKvMtpRunner
from executor.speculative.speculator import Drafter, Extender, Speculator
from executor.speculative.state import DraftState
from executor.speculative.verifier import Verifier
from executor.worker import Speculation


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a draft model adds to an executor.

    Attributes:
        speculation: Its part in a step.
        runners: What is captured for it.
        state: What it goes on from, of each row.
    """

    speculation: Speculation
    runners: tuple[Capturable, ...]
    state: DraftState


def build_drafts(
    blueprint: Blueprint,
    device: Device,
    draft: DraftModel,
    target_pass: ForwardPass,
    sampler: Sampler,
    *,
    agree: Callable[[torch.Tensor], None] | None,
) -> Drafts:
    """Builds everything around a draft model. Nothing is captured yet.

    Args:
        blueprint: With a draft model.
        device: Where it runs.
        draft: The draft model, loaded.
        target_pass: The target's forward pass, which leaves features.
        sampler: The target's.
        agree: Replaces a tensor by that of one executor among those of a DP rank; None without peers.
    """
    config, draft_config, plan = blueprint.config, blueprint.draft, blueprint.speculation
    assert draft_config is not None
    assert plan is not None
    is_drawn = config.draft_sampling == "rejection"
    builder = _Builder(blueprint, draft_config, plan, device, draft, target_pass, is_drawn)
    drafter, extender, runners = builder.runners()
    kv_pool, max_position = target_pass.kv_pool, blueprint.max_model_len - 1
    assert target_pass.features is not None, "a target with a draft model leaves features"
    state = DraftState(
        plan,
        kv_pool,
        hidden_size=draft.hidden_size,
        vocab_size=draft.vocab_size if is_drawn else 0,
        dtype=blueprint.dtype,
    )
    speculator = Speculator(
        plan,
        state,
        drafter=drafter,
        extender=extender,
        project=draft.project,
        features=target_pass.features,
        kv_pool=kv_pool,
        sampler=sampler,
        max_position=max_position,
        is_drawn=is_drawn,
    )
    verifier = Verifier(
        plan, kv_pool, sampler, max_position=max_position, agree=agree, target_ids=draft.target_ids
    )
    return Drafts(Speculation(speculator, verifier), runners, state)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the runners of one draft model."""

    blueprint: Blueprint
    draft_config: DraftConfig
    plan: SpeculationPlan
    device: Device
    draft: DraftModel
    target_pass: ForwardPass
    is_drawn: bool

    def runners(self) -> tuple[Drafter | None, Extender | None, tuple[Capturable, ...]]:
        """Returns what drafts, what extends, and both to be captured."""
        if self.plan.algorithm == "frozen_kv_mtp":
            frozen = self._frozen_kv()
            return frozen, None, (frozen.graphs,)
        shape = self.draft_config.kv_shape(
            self.blueprint.config.block_size, self.blueprint.dtype, self.blueprint.config.capacity
        )
        assert shape is not None, "it has keys and values of its own"
        kv_pool = self.target_pass.kv_pool.sibling(shape)
        if self.plan.algorithm == "multi_layer_eagle":
            layers = self._multi_layer(kv_pool)
            return None, layers, (layers.graphs,)
        drafter, extender = self._eagle_draft(kv_pool), self._eagle_extend(kv_pool)
        return drafter, extender, (drafter.graphs, extender.graphs)

    def _eagle_draft(self, kv_pool: KVPool) -> EagleDraftRunner:
        plan = self.plan
        passes = [
            self._pass(kv_pool, self._attention(kv_pool, plan.topk, has_tree=plan.is_tree))
            for _ in range(plan.num_draft_steps - 1)
        ]
        slots = eagle_draft_slots(
            num_steps=plan.num_draft_steps,
            topk=plan.topk,
            hidden_size=self.draft.hidden_size,
            dtype=self.blueprint.dtype,
            drawn_vocab_size=self.draft.vocab_size if self.is_drawn else 0,
        )
        return EagleDraftRunner(
            passes,
            plan,
            target_ids=self.draft.target_ids,
            is_drawn=self.is_drawn,
            graphs=self._graphs(passes[0], slots, plan.topk) if passes else None,
        )

    def _eagle_extend(self, kv_pool: KVPool) -> EagleDraftExtendRunner:
        forward_pass = self._pass(kv_pool, self._attention(kv_pool, *self._extend_widths))
        return EagleDraftExtendRunner(
            forward_pass,
            self.plan.topk,
            target_ids=self.draft.target_ids,
            is_drawn=self.is_drawn,
            graphs=self._extend_graphs(forward_pass),
        )

    def _multi_layer(self, kv_pool: KVPool) -> MultiLayerDraftExtendRunner:
        attention = self._attention(kv_pool, *self._extend_widths)
        passes = [self._pass(kv_pool, attention, layer) for layer in range(self.plan.num_layers)]
        return MultiLayerDraftExtendRunner(
            passes,
            target_ids=self.draft.target_ids,
            is_drawn=self.is_drawn,
            graphs=self._extend_graphs(passes[0]),
        )

    def _frozen_kv(self) -> FrozenKvMtpRunner:
        plan, kv_pool = self.plan, self.target_pass.kv_pool
        sizes = tuple(size * plan.topk for size in self.blueprint.graph_sizes.decode)
        attention = self.device.attention(
            self._num_heads, kv_pool, [AttentionGraphs(sizes)], self.blueprint.budget
        )
        forward_pass = self._pass(kv_pool, attention)
        slots = frozen_kv_slots(
            num_steps=plan.num_draft_steps,
            hidden_size=self.draft.hidden_size,
            dtype=self.blueprint.dtype,
            is_drawn=self.is_drawn,
        )
        return FrozenKvMtpRunner(
            forward_pass,
            plan,
            target_ids=self.draft.target_ids,
            is_drawn=self.is_drawn,
            graphs=self._graphs(forward_pass, slots, plan.topk),
        )

    @property
    def _extend_widths(self) -> tuple[int, int]:
        """Rows that a sequence has behind a speculative step, and behind one of decodes."""
        return self.plan.num_extend_rows, self.plan.num_layers

    def _extend_graphs(self, forward_pass: ForwardPass) -> dict[int, RunnerGraphs]:
        found = {}
        for width in self._extend_widths:
            slots = draft_extend_slots(
                width=width,
                hidden_size=self.draft.hidden_size,
                dtype=self.blueprint.dtype,
                num_layers=self.plan.num_layers,
                is_drawn=self.is_drawn,
            )
            graphs = self._graphs(forward_pass, slots, width)
            if graphs is not None:
                found[width] = graphs
        return found

    @property
    def _num_heads(self) -> int:
        capacity = self.blueprint.config.capacity
        return len(attention_share(attention_of(self.draft_config.layers), capacity).q_heads)

    def _attention(self, kv_pool: KVPool, *widths: int, has_tree: bool = False) -> Attention:
        sizes = self.blueprint.graph_sizes.decode
        graphs = [AttentionGraphs(sizes, width, has_tree) for width in widths]
        scale = attention_of(self.draft_config.layers).scale
        return self.device.attention(self._num_heads, kv_pool, graphs, self.blueprint.budget, scale)

    def _pass(self, kv_pool: KVPool, attention: Attention, layer: int = 0) -> ForwardPass:
        config, draft, layers = self.blueprint.config, self.draft, self.draft_config.layers
        is_moe = layers.moe is not None
        return ForwardPass(
            stages=partial(draft.stages, layer=layer),
            compute_logits=partial(draft.compute_logits, layer=layer),
            attention=attention,
            kv_pool=kv_pool,
            num_heads=self._num_heads,
            hidden_size=draft.hidden_size,
            vocab_size=draft.vocab_size,
            dtype=self.blueprint.dtype,
            place=self.target_pass.place,
            require_mlp_tp_gather=require_mlp_tp_gather(
                config.topology,
                gathers_experts=is_moe and config.gathers_experts,
                splits_dense=False,
            ),
            max_len=self.blueprint.max_model_len,
        )

    def _graphs(
        self, forward_pass: ForwardPass, slots: Sequence[GraphSlot], width: int
    ) -> RunnerGraphs | None:
        sizes = self.blueprint.graph_sizes.decode
        if not sizes:
            return None
        registry = build_draft_registry(
            slots,
            device=forward_pass.kv_pool.device,
            max_bs=sizes[-1],
            width=width,
            **row_counts(forward_pass),
        )
        return RunnerGraphs(registry, self.device.new_backend(), sizes)
