"""Graph runners: from a batch to logits or drafts, one class per kind of forward pass.

A runner is given callables, never a model, and runners do not inherit from one another. How a pass
is recorded and replayed is the backend's business (``executor/graph``): on a CPU the same runners
call what a GPU replays.
"""

from typing import Protocol

import torch

from executor.batch.forward_batch import ForwardBatch


class Runner(Protocol):
    """Takes a batch to logits."""

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V], one row for each of ``batch.logits_indices``.

        Every DP rank must call it in each step, also with no tokens. The next run may overwrite
        what this one returned.
        """
        ...


class Capturable(Protocol):
    """Has graphs."""

    def discard(self) -> None:
        """Drops what was captured."""
        ...

    def capture(self) -> None:
        """Captures every size, the largest first. All ranks must call it, at the same time.

        What was captured before was discarded.

        Raises:
            CaptureError: A size cannot be captured.
        """
        ...


class GraphRunner(Runner, Capturable, Protocol):
    """Runs the batches whose layout names a size that it captured."""
