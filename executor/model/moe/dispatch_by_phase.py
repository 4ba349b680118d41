"""One dispatcher for decode steps, another for steps in which any rank extends.

Decode steps send few rows, for which an all-to-all's buffers are sized; a prefill's would be many
times larger. All ranks choose alike, because ``layout.has_extend`` is the same on all of them.
"""

from dataclasses import replace

import torch

from executor.model.moe.layer import Dispatched, Dispatcher
from executor.parallel.layout import DpLayout


class PhaseDispatcher:
    """Passes each step on to one of two dispatchers.

    Args:
        decode: For steps in which no rank runs more than one token of a sequence.
        extend: For the others.
    """

    def __init__(self, *, decode: Dispatcher, extend: Dispatcher) -> None:
        self.decode = decode
        self.extend = extend

    @property
    def is_capturable(self) -> bool:
        return self.decode.is_capturable and self.extend.is_capturable

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        layout: DpLayout,
    ) -> Dispatched:
        chosen = self.extend if layout.has_extend else self.decode
        dispatched = chosen.dispatch(x_TD, topk_ids_TK, topk_weights_TK, layout)
        return replace(dispatched, handle=(chosen, dispatched))

    def combine(self, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        chosen, inner = dispatched.handle
        y_TD: torch.Tensor = chosen.combine(y_RD, inner)
        return y_TD
