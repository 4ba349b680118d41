"""Router of an expert layer: a row's logits to the experts that it goes to, and their weights.

    x ──▶ gate ──▶ logits ──▶ scores ──▶ + correction ──▶ groups kept ──▶ top K ──▶ ids
                                └──────────────────────────────────────────▶ weights

Dimensions as in ``layer.py``.
"""

from collections.abc import Callable
from functools import partial

import torch

from executor.model.cpu_kernels.library import LANES, Library, by_row
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.linear import Linear
from executor.model.spec import GroupScore, MoeSpec, RouterSpec, Scores
from executor.model.triton.operators import TritonOps

_LEAST_SUM = 1e-20  # added to a sum of sigmoids, which may all be 0


class Router:
    """The gate of a layer's experts, and the choice among them.

    Args:
        spec: The layer's.
        hidden_size: D.
        library: Kernels for bfloat16 on the CPU; None for plain PyTorch.
        ops: FlashInfer, whose kernel chooses where it can; None likewise.
        triton: Ours, whose kernel chooses where it can; None likewise.
        dtype: Type of the hidden states.
        device: Where it lives.

    Attributes:
        gate: Projection, D to E.
        correction: float32 [E], added to scores for the choice; None without.
        num_experts: E.

    Raises:
        ValueError: Experts, groups and K do not fit one another.
    """

    def __init__(
        self,
        spec: MoeSpec,
        hidden_size: int,
        library: Library | None = None,
        ops: FlashInferOps | None = None,
        triton: TritonOps | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        router = spec.router
        check_groups(spec)
        self.num_experts, self._top_k = spec.num_experts, spec.top_k
        self.gate = Linear(
            hidden_size,
            spec.num_experts,
            has_bias=router.bias,
            dtype=torch.float32 if router.in_float32 else dtype,
            device=device,
            library=library,
        )
        self.correction: torch.Tensor | None = None
        if router.correction_bias:
            self.correction = torch.empty(spec.num_experts, dtype=torch.float32, device=device)
        self._spec = router
        self._library = None if hidden_size % LANES else library
        self._choose: Callable[..., tuple[torch.Tensor, torch.Tensor]]
        self._choose = partial(choose_experts, top_k=spec.top_k, spec=router)
        if ops is not None and fits_kernel(spec) and ops.can_route(device):
            self._choose = partial(
                ops.choose_experts,
                num_groups=router.num_groups,
                num_kept_groups=router.num_kept_groups,
                top_k=spec.top_k,
                factor=router.factor,
            )
            none = torch.zeros(1, spec.num_experts, device=device)
            self._choose(none, correction_E=none[0])  # loads it now
        self._choose_at_once: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        if triton is not None and is_softmax_of_chosen(router):
            self._choose_at_once = partial(
                triton.choose_experts, top_k=spec.top_k, factor=router.factor
            )
            self._choose_at_once(
                torch.zeros(1, spec.num_experts, dtype=self.gate.weight.dtype, device=device), None
            )
        self._rule = (  # as the CPU's kernel takes it
            *(spec.num_experts, spec.top_k, router.num_groups, router.num_kept_groups),
            *(router.scores is Scores.SIGMOID, router.group_score is GroupScore.TOP2),
            *(router.renormalise, router.factor),
        )

    def __call__(
        self, x_TD: torch.Tensor, is_padding_T1: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns expert ids [T, K] int32 and weights [T, K] float32 of x [T, D].

        Args:
            x_TD: Hidden states.
            is_padding_T1: bool, rows that go to no expert: their ids are E. None: no row is.
        """
        gate, correction = self.gate, self.correction
        if self._library is not None:
            num_rows, width = x_TD.shape
            ids_TK = torch.empty(num_rows, self._top_k, dtype=torch.int32)
            weights_TK = torch.empty(num_rows, self._top_k)
            packed = (gate.weight, None) if gate.is_packed else (None, gate.weight)
            given = *by_row(x_TD), *packed, gate.bias, correction, is_padding_T1
            chosen = ids_TK, weights_TK
            self._library("route", *self._rule, *given, *chosen, num_rows, width)
            return ids_TK, weights_TK
        logits_TE = gate(x_TD.float() if self._spec.in_float32 else x_TD)
        if self._choose_at_once is not None:
            return self._choose_at_once(logits_TE, is_padding_T1)
        ids_TK, weights_TK = self._choose(logits_TE, correction_E=correction)
        if is_padding_T1 is not None:
            ids_TK.masked_fill_(is_padding_T1, self.num_experts)
        return ids_TK, weights_TK


def choose_experts(
    logits_TE: torch.Tensor,
    top_k: int,
    spec: RouterSpec,
    correction_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks each token's experts and their weights.

    Scores are float32 for logits of any type: ties in bfloat16 pick other experts. Nothing waits for
    the device.

    Args:
        logits_TE: Router logits, any float dtype.
        top_k: K, from 1 to the experts of the groups that are kept.
        spec: How.
        correction_E: float32, added to the scores for the choice; None adds nothing.

    Returns:
        Expert ids [T, K] int32 and weights [T, K] float32, the first choice first.

    Source: Transformers, Qwen3MoeTopKRouter.forward, DeepseekV3MoE.route_tokens_to_experts,
    DeepseekV2MoE.route_tokens_to_experts, GptOssTopKRouter.forward.
    """
    logits_TE = logits_TE.float()
    is_softmax = spec.scores is Scores.SOFTMAX
    if is_softmax_of_chosen(spec) and correction_E is None:
        # Shares of the chosen are their own softmax: two launches less.
        chosen_TK, ids_TK = torch.topk(logits_TE, top_k, dim=-1)
        return _ids_and_weights(ids_TK, torch.softmax(chosen_TK, dim=-1), spec)
    scores_TE = torch.softmax(logits_TE, dim=-1) if is_softmax else logits_TE.sigmoid()
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if spec.num_groups > 1:
        choice_TE = _of_kept_groups(choice_TE, spec)
    weights_TK, ids_TK = torch.topk(choice_TE, top_k, dim=-1)
    if correction_E is not None:
        weights_TK = scores_TE.gather(-1, ids_TK)
    if spec.renormalise:
        total_T1 = weights_TK.sum(dim=-1, keepdim=True)
        if not is_softmax:
            total_T1 += _LEAST_SUM
        weights_TK = weights_TK / total_T1
    return _ids_and_weights(ids_TK, weights_TK, spec)


def _ids_and_weights(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, spec: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.factor != 1:
        weights_TK = weights_TK * spec.factor
    return ids_TK.to(torch.int32), weights_TK


def _of_kept_groups(choice_TE: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Returns the scores, those of other groups than each token's best -inf: they may be negative."""
    num_tokens, num_experts = choice_TE.shape
    by_group = choice_TE.view(num_tokens, spec.num_groups, num_experts // spec.num_groups)
    if spec.group_score is GroupScore.MAX:
        of_groups = by_group.amax(dim=-1)
    else:
        of_groups = by_group.topk(2, dim=-1).values.sum(dim=-1)
    kept = of_groups.topk(spec.num_kept_groups, dim=-1, sorted=False).indices
    is_left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, kept, False)
    return by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)


def is_softmax_of_chosen(spec: RouterSpec) -> bool:
    """Whether weights are the softmax of the largest logits."""
    is_softmax = spec.scores is Scores.SOFTMAX
    return is_softmax and spec.renormalise and spec.num_groups == 1 and not spec.correction_bias


def fits_kernel(spec: MoeSpec) -> bool:
    """Whether ``FlashInferOps.choose_experts`` makes such a choice."""
    router = spec.router
    return (
        (router.scores, router.group_score) == (Scores.SIGMOID, GroupScore.TOP2)
        and (router.in_float32 and router.correction_bias and router.renormalise)
        and router.num_groups > 1
        and spec.num_experts <= 32 * router.num_groups
        and spec.num_experts * router.num_kept_groups <= 128 * router.num_groups
        and spec.top_k <= min(8, router.num_groups * router.num_kept_groups)
    )


def check_groups(spec: MoeSpec) -> None:
    """Checks that experts, groups and K fit one another.

    Raises:
        ValueError: They do not.
    """
    experts, groups, kept = spec.num_experts, spec.router.num_groups, spec.router.num_kept_groups
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not divide into n_group={groups}")
    least = 2 if groups > 1 and spec.router.group_score is GroupScore.TOP2 else 1
    if experts // groups < least:
        raise ValueError(
            f"n_group={groups} leaves {experts // groups} of {experts} experts to a group, which is "
            f"chosen by its best {least}"
        )
    if not 1 <= kept <= groups:
        raise ValueError(f"topk_group={kept} of n_group={groups}")
    if not 1 <= spec.top_k <= kept * (experts // groups):
        raise ValueError(
            f"num_experts_per_tok={spec.top_k}: the topk_group={kept} groups that are kept have "
            f"{kept * (experts // groups)} experts"
        )
