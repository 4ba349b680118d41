"""Runner selection: the router has decided what runs a batch, and says it in the layout."""

from collections.abc import Sequence

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.runners import Capturable, GraphRunner, Runner


class RunnerSelection:
    """Runs each batch the way its layout says, which all ranks were told alike.

    Args:
        eager: Runs what no graph was chosen for.
        decode: Runs graphs of steps in which no rank extends; None if there are none.
        prefill: Runs graphs of the other steps; None if there are none.
        verify: Runs graphs of speculative steps; None if there are none.
        draft_runners: Run the draft model; they are captured with the others, and last.
        binds_group: Whether what is captured holds on to the process group, and must be captured
            anew for another one.
    """

    def __init__(
        self,
        eager: Runner,
        *,
        decode: GraphRunner | None = None,
        prefill: GraphRunner | None = None,
        verify: GraphRunner | None = None,
        draft_runners: Sequence[Capturable] = (),
        binds_group: bool = True,
    ) -> None:
        self._eager = eager
        self._decode = decode
        self._prefill = prefill
        self._verify = verify
        self._draft_runners = tuple(draft_runners)
        self._binds_group = binds_group
        self._is_captured = False

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V] of ``batch.logits_indices``."""
        return self._choose(batch).run(batch)

    def verify(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [T, V] of a speculative step's rows, all of which need them."""
        if batch.layout.graph_size is None:
            return self._eager.run(batch)
        assert self._verify is not None, "steps with a graph size were refused"
        return self._verify.run(batch)

    def capture(self) -> None:
        """Captures all graphs, prefill before decode before drafts, once per process group.

        All ranks must call it, at the same time: a captured pass makes collective calls.

        Raises:
            CaptureError: A size cannot be captured.
        """
        if self._is_captured and not self._binds_group:
            return
        target = (self._prefill, self._decode, self._verify)
        runners: list[Capturable] = [runner for runner in target if runner is not None]
        runners += self._draft_runners
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
