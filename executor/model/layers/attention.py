"""Attention backends as a model calls them, and a forward pass that stops at each call.

T token rows    H query heads    N KV heads    D head width    V width of values, D but for latents
"""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import NamedTuple, Protocol

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.model.triton.operators import HeadTurn, LatentTurn


class AttentionCall(NamedTuple):
    """What a model hands to attention: the arguments of ``Attention.forward``.

    ``turn`` is only for a backend with Triton's kernels: the model is then made with them, too.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    layer_id: int
    turn: HeadTurn | LatentTurn | None = None


class LayerOptions(NamedTuple):
    """What a layer's attention does that a plain softmax over all keys before a query does not.

    Attributes:
        window: Keys that a query sees, with its own; None for all.
        sinks: [H], a logit of each head that joins its softmax and has no value; None without.
    """

    window: int | None = None
    sinks: torch.Tensor | None = None


PLAIN = LayerOptions()


# A forward pass that yields its attention calls, is sent their results [T, H * V], and returns
# the hidden states [T, D].
Stages = Generator[AttentionCall, torch.Tensor, torch.Tensor]
Attend = Callable[..., torch.Tensor]


def run_stages(stages: Stages, attend: Attend) -> torch.Tensor:
    """Runs a forward pass to its end and returns its hidden states [T, D]."""
    with closing(stages):
        try:
            call = next(stages)
            while True:
                *given, turn = call
                call = stages.send(attend(*given) if turn is None else attend(*given, turn))
        except StopIteration as end:
            hidden: torch.Tensor = end.value
            return hidden


class Attention(Protocol):
    """An attention backend. In a forward pass, on CUDA:

        init_forward_metadata_out_graph   host      before every pass and every replay
        init_forward_metadata_in_graph    device    the first thing that a graph records
        forward                           device    once per layer

    Attributes:
        is_capturable: Whether ``forward`` is only device work; if not, graphs break around it.
    """

    is_capturable: bool

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        """Plans on the host, once before each forward pass and before each replay."""
        ...

    def init_forward_metadata_in_graph(self) -> None:
        """Plans on the device; recorded, so that each replay plans anew."""
        ...

    def on_after_cuda_graph_warmup(self) -> None:
        """Puts metadata that ``forward`` upgrades on first use back to what planning left.

        Else the warm-up runs would have upgraded it, and the graph would lack the upgrade.
        """
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer_id: int
    ) -> torch.Tensor:
        """Stores keys and values, then attends.

        Args:
            q: [T, H, D], rotated.
            k: [T, N, D], rotated. None: nothing is stored, and each sequence, which has one query
                then, sees all keys that it has. It may have none, and several sequences may be
                one row of the block table.
            v: [T, N, V]; None where k is, or where values are the first V columns of the keys.
            layer_id: Layer of the KV pool.

        Returns:
            [T, H * V]. Rows that belong to no sequence are finite and mean nothing.
        """
        ...
