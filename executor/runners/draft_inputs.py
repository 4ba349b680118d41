"""What a graph of the draft model reads, as flat as its registry. Data only.

B sequences    T token rows    P passes    K drafts that each goes on from    H hidden size
V the draft's vocabulary
"""

from dataclasses import dataclass

import torch

from executor.speculative.draft_batch import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInputs:
    """What the graphs of every phase may read besides.

    Attributes:
        temperature, seeds, draw_positions: As in ``Draws``; None if nothing is drawn.
        num_token_non_padded, global_num_tokens_gpu, global_num_tokens_for_logprob_gpu: As in
            ``ForwardBatch``, for each pass.
    """

    temperature: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    draw_positions: torch.Tensor | None = None
    num_token_non_padded: torch.Tensor | None = None
    global_num_tokens_gpu: torch.Tensor | None = None
    global_num_tokens_for_logprob_gpu: torch.Tensor | None = None

    @property
    def draws(self) -> Draws | None:
        temperature, seeds, positions = self.temperature, self.seeds, self.draw_positions
        if temperature is None or seeds is None or positions is None:
            return None
        return Draws(temperature, seeds, positions)


def draw_inputs(draws: Draws | None) -> dict[str, torch.Tensor | None]:
    """Returns the fields of ``PhaseInputs`` that say how drafts are drawn."""
    if draws is None:
        return {}
    temperature, seeds, positions = draws.temperature, draws.seeds, draws.positions
    return {"temperature": temperature, "seeds": seeds, "draw_positions": positions}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInputs(PhaseInputs):
    """A draft phase: P passes over the same sequences, T rows each.

    Attributes:
        positions: int64 [P, T], of each pass's rows.
        req_pool_indices: int64 [B], rows of the block table; [T] where each row is attended as a
            sequence of its own.
        seq_lens: int64 [P, B], slots that each pass's attention sees; [T] where all passes see
            the same.
        seq_lens_cpu: The same on the host.
        tokens: int64 [B, K], first drafts; [B, 1], last tokens, where these begin.
        hidden_states: [B, H], what the draft model takes with them.
        out_cache_loc: int64 [P, T], slots of each pass; None where none are written.
        scores: float32 [B, K], log probabilities of first drafts; None with last tokens.
        probs: float32 [B, V], what first drafts were drawn from.
    """

    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    tokens: torch.Tensor
    hidden_states: torch.Tensor
    out_cache_loc: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    probs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendInputs(PhaseInputs):
    """A draft-extend of B sequences with equally many rows.

    Attributes:
        input_ids, positions, out_cache_loc, req_pool_indices, seq_lens, seq_lens_cpu,
            hidden_states: As in ``ForwardBatch``.
        last_offsets: int64 [B], how far each sequence's last token is from its first row.
        carries: [B, layers - 1, H], as in ``ExtendBatch``.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    hidden_states: torch.Tensor
    last_offsets: torch.Tensor
    carries: torch.Tensor | None = None
