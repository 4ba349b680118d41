"""What runs in a step: one file per kind of forward pass.

A runner takes a ForwardBatch to logits. It is given callables, never a model, and runners do not
inherit from one another.
"""

from typing import Protocol

import torch

from executor.forward_batch import ForwardBatch


class Runner(Protocol):
    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns logits [L, V], one row for each of ``batch.logits_indices``.

        Every DP rank must call it in each step, also with no tokens.
        """
        ...
