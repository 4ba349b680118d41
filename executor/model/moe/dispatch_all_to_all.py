"""Dispatch in which a token travels only to the ranks that hold its experts, once to each.

    this rank, 3 tokens                          rank 0 gets      rank 1 gets
    t0 ▶ experts of 0 and 1    counts [2, 2]     t0               t0
    t1 ▶ rank 0 twice          ───────────▶      t1               t2
    t2 ▶ rank 1                rows, by rank     and its peers' rows after these, by rank

Counts go ahead of the rows, because a rank must know how much it receives. On the CPU that costs a
third of a small exchange (``tests/bench/executor/bench_dispatch.py``). Sending as many rows as a peer could
need would spare it, and would be the all-gather.

Results travel back along the same way. A token's results are summed in order of rank in float32 and
rounded once, as those of an all-gather are, to the same bits. Dimensions as in ``layer.py``, and:
    W ranks    S rows sent, a token once for each rank that it goes to
"""

from dataclasses import dataclass

import torch

from executor.budget.report import EXECUTOR_ROWS, BudgetLine
from executor.model.moe.dispatch_all_gather import AllGatherDispatcher
from executor.model.moe.layer import Dispatched, Dispatcher, DispatchSetup
from executor.parallel.communicators import (
    WORD,
    DpCommunicator,
    moe_words,
    pack,
    unpack,
    view_rows,
    words_of,
)
from executor.parallel.expert_places import ExpertPlaces, look_up
from executor.parallel.layout import DpLayout
from executor.parallel.process_groups import add_up


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What ``combine`` must know of a dispatch.

    Attributes:
        sent: Rows sent to each rank.
        received: Rows received from each rank.
        places_S: Of each row sent, in [W * T].
        num_tokens: T.
    """

    sent: list[int]
    received: list[int]
    places_S: torch.Tensor
    num_tokens: int


class TorchAllToAllDispatcher(Dispatcher):
    """Exchanges rows of unequal counts between all ranks of the group.

    Buffers are made once, for every rank sending all its tokens to every other, of a group as large as
    the communicator's is then. Alone, nothing travels.

    Args:
        communicator: Its ranks are the EP ranks. Says how many rows a rank may have.
        places: Of experts on them.
        hidden_size: D.
        dtype: Type of the hidden states.
        top_k: K.
        device: Where the tensors live.
    """

    is_capturable = False  # reads counts on the host

    def __init__(
        self,
        communicator: DpCommunicator,
        places: ExpertPlaces,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        top_k: int,
        device: torch.device | str = "cpu",
    ) -> None:
        most_ranks = communicator.world_size
        assert places.ep_size == most_ranks, "several ranks hold slices of the same experts"
        self._communicator = communicator
        self._places = places
        self._alone = AllGatherDispatcher(communicator, places)
        self._num_words = moe_words(hidden_size, dtype, top_k)
        self._open_in: object | None = None  # the group of a dispatch that is not combined yet
        most = communicator.max_tokens_per_rank
        self.max_rows = most_ranks * most
        self._packed, self._sent, self._received = (
            torch.zeros(count * most * self._num_words, dtype=WORD, device=device)
            for count in (1, most_ranks, most_ranks)
        )
        self._received_counts = torch.zeros(most_ranks, dtype=torch.int64, device=device)

    @classmethod
    def build(cls, setup: DispatchSetup) -> Dispatcher:
        return cls(
            setup.communicator,
            setup.places,
            hidden_size=setup.budget.hidden_size,
            dtype=setup.dtype,
            top_k=setup.budget.top_k,
            device=setup.device,
        )

    def lines(self) -> tuple[BudgetLine, ...]:
        what = "all-to-all, rows packed, sent and received"
        bound = f"{EXECUTOR_ROWS} * (1 + 2 * {len(self._received_counts)} executors)"
        buffers = (self._packed, self._sent, self._received)
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        return (BudgetLine(what, bound, num_bytes // (self._num_words * WORD.itemsize), num_bytes),)

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layout: DpLayout
    ) -> Dispatched:
        if self._communicator.is_alone:
            return self._alone.dispatch(x_TD, ids_TK, weights_TK, layout)
        self._check(x_TD, layout)
        group = self._communicator.group
        # A step that fails before ``combine`` leaves its dispatch open; the group ends with it.
        assert self._open_in is not group, "dispatch called twice without combine"
        self._open_in = group
        is_sent_WT = self._destinations(ids_TK, layout.shard_num_tokens)
        counts_W = is_sent_WT.sum(dim=1)
        received_W = self._received_counts[: self._num_ranks]
        group.all_to_all(received_W, counts_W)
        places_S = is_sent_WT.flatten().nonzero()[:, 0]
        tokens_S = places_S % len(x_TD) if len(x_TD) else places_S
        sent, received = counts_W.tolist(), received_W.tolist()

        columns = (x_TD, ids_TK, weights_TK)
        packed_T = view_rows(self._packed, len(x_TD), self._num_words)
        packed_S = view_rows(self._sent, len(tokens_S), self._num_words)
        packed_R = view_rows(self._received, sum(received), self._num_words)
        pack(columns, out=packed_T)
        torch.index_select(packed_T, 0, tokens_S, out=packed_S)
        group.all_to_all(packed_R, packed_S, received, sent)

        x_RD, ids_RK, weights_RK = unpack(packed_R, columns)
        ids_RK = look_up(self._places.slot_of_expert, ids_RK)
        exchange = _Exchange(sent, received, places_S, len(x_TD))
        return Dispatched(x_RD, ids_RK, weights_RK, exchange)

    def combine(self, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        if self._communicator.is_alone:
            return self._alone.combine(y_RD, dispatched)
        group = self._communicator.group
        assert self._open_in is group, "combine called without dispatch"
        self._open_in = None
        exchange: _Exchange = dispatched.handle
        assert len(y_RD) == sum(exchange.received), (
            f"{len(y_RD)} rows of results for {sum(exchange.received)} received"
        )
        # What was sent is no longer needed, and its rows were wider.
        num_words = words_of(y_RD.shape[1], y_RD.dtype)
        y_SD = view_rows(self._sent, len(exchange.places_S), num_words).view(y_RD.dtype)
        group.all_to_all(y_SD, y_RD.contiguous(), exchange.sent, exchange.received)
        y_WTD = y_SD.new_zeros(self._num_ranks, exchange.num_tokens, y_SD.shape[1])
        y_WTD.flatten(0, 1).index_copy_(0, exchange.places_S, y_SD)
        y_TD = torch.empty_like(y_WTD[0])
        add_up(y_WTD, out=y_TD)
        return y_TD

    @property
    def _num_ranks(self) -> int:
        return self._communicator.world_size

    def _destinations(self, ids_TK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Returns 1 where a rank holds an expert of a token and 0 elsewhere, int64 [W, T].

        Rows past ``num_tokens`` go nowhere.
        """
        ranks_TK = look_up(self._places.rank_of_expert, ids_TK)
        is_sent = ranks_TK.new_zeros(self._num_ranks + 1, len(ranks_TK))
        is_sent.scatter_(0, ranks_TK.t(), 1)  # E is with rank W
        is_sent[:, num_tokens:] = 0
        return is_sent[: self._num_ranks]

    def _check(self, x_TD: torch.Tensor, layout: DpLayout) -> None:
        assert len(layout.offsets) == self._num_ranks, (
            f"{len(layout.offsets)} ranks in the layout of a group of {self._num_ranks}"
        )
        self.check_rows(x_TD, layout)
        most = self._communicator.max_tokens_per_rank
        assert layout.runtime_max_tokens_per_rank <= most, (
            f"a rank has {layout.runtime_max_tokens_per_rank} rows; "
            f"the buffers were made for {most}"
        )
