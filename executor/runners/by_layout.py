"""Chooses what runs a batch. The router has decided; this only looks its decision up."""

import torch

from executor.forward_batch import ForwardBatch
from executor.runners import GraphRunner, Runner


class RunnerByLayout:
    """Runs each batch the way its layout says, which all ranks were told alike.

    Args:
        eager: Runs what no graph was chosen for.
        decode: Runs graphs of steps in which no rank extends; None if there are none.
        prefill: Runs graphs of the other steps; None if there are none.
        binds_group: Whether what is captured holds on to the process group, and must be captured
            anew for another one.
    """

    def __init__(
        self,
        eager: Runner,
        *,
        decode: GraphRunner | None = None,
        prefill: GraphRunner | None = None,
        binds_group: bool = True,
    ) -> None:
        self._eager = eager
        self._decode = decode
        self._prefill = prefill
        self._binds_group = binds_group
        self._is_captured = False

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V] of ``batch.logits_indices``."""
        return self._choose(batch).run(batch)

    def capture(self) -> None:
        """Captures all graphs, prefill before decode, once per process group.

        All ranks must call it, at the same time: a captured pass makes collective calls.

        Raises:
            CaptureError: A size cannot be captured.
        """
        if self._is_captured and not self._binds_group:
            return
        runners = [runner for runner in (self._prefill, self._decode) if runner is not None]
        for runner in runners:  # all of them first: they share memory, and the old group is gone
            runner.discard()
        for runner in runners:
            runner.capture()
        self._is_captured = True

    def _choose(self, batch: ForwardBatch) -> Runner:
        if batch.layout.graph_size is None:
            return self._eager
        runner = self._prefill if batch.layout.has_extend else self._decode
        assert runner is not None, "steps with a graph size were refused, as nothing is captured"
        return runner
