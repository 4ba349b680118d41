"""Banned sequences: tokens that outputs of some rows shall not have one behind the other.

A row's last tokens are kept on the device, where a step's tokens are before the host knows them.

    R rows    W sequences of a row at most    L tokens of one but its last, at most
"""

import numpy as np
import torch

from executor.batch.columns import BoolArray, Int64Array
from executor.batch.read_step import RowStarts
from executor.batch.staging import to_device
from protos.executor.sampling_fields import BAN, MAX_BANNED, MAX_BANNED_LEN

WIDTH = MAX_BANNED_LEN - 1
ANY, NONE, NEVER = -1, -2, -3  # in place of a token: fits all; is there none; fits nothing


class BannedSequences:
    """Those of one executor's rows. What rows hold that have none does not matter.

    Args:
        num_rows: R.
        device: Where logits are.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self._most = 0  # sequences that any row has had

        def table(value: int, *shape: int) -> torch.Tensor:
            return torch.full((num_rows, *shape), value, dtype=torch.int64, device=device)

        self._recent = table(NONE, WIDTH)  # the newest last
        self._heads = table(NEVER, MAX_BANNED, WIDTH)  # [R, W, L], all but the last, behind ANY
        self._lasts = table(0, MAX_BANNED)

    def start(self, starts: RowStarts) -> BoolArray:
        """Takes what these rows shall not have. Returns which have some, bool [A]."""
        has_some: BoolArray = starts.num_banned > 0
        if not has_some.any():
            return has_some
        self._most = max(self._most, int(starts.num_banned.max()))
        members = np.flatnonzero(has_some)
        recent = np.full((len(members), WIDTH), NONE)
        heads = np.full((len(members), MAX_BANNED, WIDTH), NEVER)
        lasts = np.zeros((len(members), MAX_BANNED), np.int64)
        sequences = np.split(starts.banned_ids, np.cumsum(starts.banned_lens)[:-1])
        of_row = np.cumsum(starts.num_banned) - starts.num_banned
        outputs = np.cumsum(starts.num_output_ids)
        for place, row in enumerate(members.tolist()):
            first = of_row[row]
            for number, ids in enumerate(sequences[first : first + starts.num_banned[row]]):
                heads[place, number] = ANY
                heads[place, number, WIDTH + 1 - len(ids) :] = ids[:-1]
                lasts[place, number] = ids[-1]
            output = starts.output_ids[: outputs[row]]
            output = output[len(output) - min(starts.num_output_ids[row], WIDTH) :]
            recent[place, WIDTH - len(output) :] = output
        at = self._index(starts.rows[members])
        self._recent[at] = self._index(recent)
        self._heads[at] = self._index(heads)
        self._lasts[at] = self._index(lasts)
        return has_some

    def lower(self, logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Returns logits in which tokens that would end a banned sequence come last.

        Args:
            logits: float32 [S, V].
            at: int64 [S], rows that have banned sequences.
        """
        heads, recent = self._heads[at, : self._most], self._recent[at][:, None]
        is_due = ((heads == recent) | (heads == ANY)).all(dim=2)
        return logits.scatter_add(1, self._lasts[at, : self._most], is_due.to(logits.dtype) * BAN)

    def remember(self, tokens: torch.Tensor, at: torch.Tensor) -> None:
        """Adds a token, int64 [S], to the output of each of these rows, int64 [S]."""
        self._recent[at] = torch.cat((self._recent[at, 1:], tokens[:, None]), dim=1)

    def _index(self, values: Int64Array) -> torch.Tensor:
        return to_device(values, self._device)
