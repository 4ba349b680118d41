"""Workspaces of FlashInfer's attention wrappers: one owner per executor.

    float   one for all wrappers      partial results of one run: its first kernel writes them, its
                                      last one sums them up
    plans   one for each wrapper      what planning leaves for the runs behind it
    tables  one for each attention    page tables and masks, where captured graphs read them

Sharing the first is safe because nothing in it outlives a run. Planning takes offsets into it and
checks its size, and writes nothing there; a captured graph holds its address. Graphs replay on one
stream, one after another, and a kernel that starts early waits for those before it to end, then touches
memory. Layers have always shared it that way; passes, wrappers of decodes and of extends, and graphs of
any size do the same. The plans cannot be shared: the passes of a draft phase are all planned before
the first one runs.

Source: FlashInfer 0.7.2, attention/scheduler.cuh, DecodePlanImpl and PrefillPlanImpl (``v_offset`` and
``s_offset`` of the float buffer, one copy to the int buffer); csrc/batch_prefill_paged.cuh and
csrc/batch_decode.cu (``tmp_v`` and ``tmp_s``); decode.py and prefill.py, ``reset_workspace_buffer``.
"""

from typing import TypeVar

import torch

from executor.budget.report import BudgetLine
from executor.model.flashinfer.latent import PagedLatent
from executor.model.flashinfer.paged import PagedAttention

Paged = TypeVar("Paged", bound=PagedAttention | PagedLatent)

# Bytes that plans of batches outside graphs find room in. Such a plan splits keys over at most two
# blocks of threads per SM, 128 rows each: 42 MiB with 160 SMs and heads of 256.
# Source: FlashInfer, attention/scheduler.cuh, PrefillPlanImpl; its documentation says 128 MB.
FLOAT_BYTES = 128 << 20

# For the plan of such a batch, however many rows it has: what a wrapper of FlashInfer begins with.
ANY_PLAN_BYTES = 8 << 20


class AttentionWorkspace:
    """What all attention of one executor allocates, and how much that is.

    Args:
        device: Where attention runs.
        float_bytes: To begin with; None: ``FLOAT_BYTES``.

    Attributes:
        float: uint8 zeros, what wrappers begin with. Another, larger tensor after ``reserve``.
    """

    def __init__(self, device: torch.device | str, float_bytes: int | None = None) -> None:
        self._device = torch.device(device)
        self._wrappers: list[tuple[PagedAttention | PagedLatent, torch.Tensor]] = []
        self._counting = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._table_bytes = 0
        self._is_fixed = False
        self.float = self._zeros(FLOAT_BYTES if float_bytes is None else float_bytes, torch.uint8)

    def adopt(self, wrapper: Paged, plan_bytes: int | None = None) -> Paged:
        """Gives a wrapper memory for its plans, in place of what it came with, and returns it.

        Args:
            wrapper: Made with ``float``. To be planned before it runs.
            plan_bytes: What its plans need; None: ``ANY_PLAN_BYTES``, for any batch.
        """
        own = self._zeros(ANY_PLAN_BYTES if plan_bytes is None else plan_bytes, torch.uint8)
        wrapper.set_workspace(self.float, own)
        self._wrappers.append((wrapper, own))
        return wrapper

    def reserve(self, float_bytes: int) -> None:
        """Makes ``float`` at least so large, for all wrappers. Before the first capture."""
        if float_bytes <= len(self.float):
            return
        assert not self._is_fixed, (
            f"a plan needs {float_bytes} bytes, and graphs hold the address of {len(self.float)}: "
            f"make every wrapper before the first capture"
        )
        self.float = self._zeros(float_bytes, torch.uint8)
        for wrapper, own in self._wrappers:
            wrapper.set_workspace(self.float, own)

    def fix(self) -> None:
        """Says that a graph is captured now: ``float`` stays where it is."""
        self._is_fixed = True

    def new_table(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros for what an attention reads beside its plans."""
        table = self._zeros(length, dtype)
        self._table_bytes += table.nbytes
        return table

    def counting(self, length: int) -> torch.Tensor:
        """Returns int32 0, 1, … to ``length - 1``, a view of what all share while it is as long."""
        if length > len(self._counting):
            length_made = max(length, 2 * len(self._counting))  # few times, should it be in steps
            self._counting = torch.arange(length_made, dtype=torch.int32, device=self._device)
        return self._counting[:length]

    def lines(self) -> tuple[BudgetLine, ...]:
        """Returns what has been allocated, for the budget's table."""
        shared, count = len(self.float), len(self._wrappers)
        bound = "default" if shared == FLOAT_BYTES else "largest decode graph"
        plans = sum(own.nbytes + wrapper.library_bytes for wrapper, own in self._wrappers)
        tables = self._table_bytes + self._counting.nbytes
        return (
            BudgetLine("attention workspace, one for all passes", bound, 0, shared),
            BudgetLine(f"plans of {count} attention wrappers", "decode_graph_sizes", 0, plans),
            BudgetLine("page tables and masks of attention", "decode_graph_sizes", 0, tables),
        )

    def _zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=self._device)
