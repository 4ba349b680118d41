"""Linear layers: the product, the vocabulary's embedding and head; threads that share attention.

A weight is laid out once, at load, for what reads it: the kernels of the CPU have it in panels
(``model/cpu_kernels``), all else as it is.

The executors of one DP rank share the head:

    attn_tp 0   [L, D] ─▶ [L, Vp]  ─┐
    attn_tp 1   [L, D] ─▶ [L, Vp]  ─┴─ gathered ─▶ [L, 2 * Vp], cut to [L, V]

All have equal shares of Vp = ceil(V / attn_tp_size) rows; rows past the vocabulary are zeros that
nobody reads. Every executor ends up with the same bits, so that they cannot sample differently.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog
import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import Library
from executor.model.cpu_kernels.linear import linear, linear_of_heads, pack, pad_bias
from executor.model.layers.linear_kept import KeptLinears
from executor.model.weights import KeptWeight, Part, Weight, WeightGroup
from executor.parallel.communicators import AttnTpCommunicator

_OPENMP_ROWS = 256  # a prompt of 512 tokens is 7 % slower when shared

_LOG = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")
_Outcomes = SimpleQueue[tuple[int, Any, BaseException | None]]
_Tasks = SimpleQueue[tuple[int, Callable[[], Any], _Outcomes] | None]


class WorkerPool:
    """The calling thread and ``size - 1`` daemon threads, which end with the pool.

    They share the independent pieces of a layer, each on one core. Left alone, PyTorch splits every
    operator over its OpenMP threads. A layer of experts is tens of operators of a tenth of a
    millisecond, and if waiting threads sleep (OMP_WAIT_POLICY=PASSIVE, which ranks on shared cores
    need) each pays for waking them. Here a layer is split once, and an operator runs on the core that
    called it: decode on two threads takes 60 % of the time then. If waiting threads spin, a pool of
    one is faster: OpenMP's threads are there at once, and these would compete with them for the cores
    (``tests/bench/executor/bench_cpu_model.py``).

    Operators release the GIL. A piece computes the same on any thread, so results do not depend on
    the number of threads. One thread at a time may call the pool. A pool of one has no threads and
    leaves OpenMP alone.

    Args:
        size: Pieces that run at once; the calling thread's number of OpenMP threads if None.

    Attributes:
        is_sharing: Whether ``run`` shares now.
    """

    def __init__(self, size: int | None = None) -> None:
        num_threads = torch.get_num_threads()
        self.size = num_threads if size is None else size
        self.is_sharing = False
        self._tasks: _Tasks = SimpleQueue()
        started = threading.Barrier(self.size)
        for _ in range(self.size - 1):
            threading.Thread(target=_work, args=(self._tasks, started), daemon=True).start()
        started.wait()
        # A thread that first computes later starts from the last number set by any thread.
        torch.set_num_threads(num_threads)

    @contextmanager
    def sharing(self, num_rows: int) -> Iterator[None]:
        """Within it, ``run`` shares, and the calling thread's operators keep to its own core.

        Many rows are left to OpenMP: their operators are long, the small ones too.
        """
        if self.size == 1 or not 0 < num_rows < _OPENMP_ROWS:
            yield
            return
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread; takes a quarter of a microsecond
        self.is_sharing = True
        try:
            yield
        finally:
            self.is_sharing = False
            torch.set_num_threads(num_threads)

    def run(self, pieces: Sequence[Callable[[], T]]) -> list[T]:
        """Returns the result of each piece, in order.

        If pieces fail, raises what the first of them raised, after all have ended.
        """
        if not self.is_sharing or len(pieces) < 2:
            return [piece() for piece in pieces]
        done: _Outcomes = SimpleQueue()
        for i in range(1, len(pieces)):
            self._tasks.put((i, pieces[i], done))
        _finish(0, pieces[0], done)
        outcomes = sorted((done.get() for _ in pieces), key=itemgetter(0))
        for _, _, error in outcomes:
            if error is not None:
                raise error
        return [result for _, result, _ in outcomes]

    def shares(self, costs: Sequence[int]) -> list[slice]:
        """Cuts a sequence of things with these costs into at most ``size`` runs of like cost."""
        ends = list(accumulate(costs, initial=0))
        inner = [
            min(range(len(ends)), key=lambda i: abs(ends[i] * self.size - share * ends[-1]))
            for share in range(1, self.size)
        ]
        cuts = [0, *inner, len(costs)]
        return [slice(start, stop) for start, stop in pairwise(cuts) if start < stop]

    def __del__(self) -> None:
        for _ in range(self.size - 1):
            self._tasks.put(None)


@torch.inference_mode()  # which is a thread's own
def _work(tasks: _Tasks, started: threading.Barrier) -> None:
    torch.set_num_threads(1)
    started.wait()
    while (task := tasks.get()) is not None:
        _finish(*task)
        del task  # so that an idle thread keeps no tensors


def _finish(index: int, piece: Callable[[], Any], done: _Outcomes) -> None:
    try:
        done.put((index, piece(), None))
    except BaseException as error:  # the thread that waits for the piece raises it
        done.put((index, None, error))


class Linear:
    """y = x @ weight.T + bias.

    Filled by the loader through ``weight`` and ``bias``, then finished once.

    Args:
        in_features: Width of x.
        out_features: Width of y.
        has_bias: Whether there is a bias.
        dtype: Type of weight, bias, x and y.
        device: Where they live.
        library: Kernels that read the weight packed, if it is bfloat16; None for plain PyTorch.
        kept: Keeps the weight quantised if it can; None dequantises.
        parts: Rows of each matrix in it that others follow, or that executors share.

    Attributes:
        weight: [out_features, in_features]; packed, once ``finish`` has done so; empty if it is kept.
        bias: [out_features], or None; as the kernel takes it, likewise.
        is_packed: Whether they are.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None = None,
        kept: KeptLinears | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kept = kept
        self._kept_weight: KeptWeight | None = None
        if kept is not None:
            self._kept_weight = kept.new(out_features, in_features, parts, device)
        num_plain = out_features if self._kept_weight is None else 0
        self.weight = torch.empty(num_plain, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if has_bias else None
        self.is_packed = False
        self._library = library

    @property
    def filled(self) -> Weight:
        """What the loader fills."""
        return self.weight if self._kept_weight is None else self._kept_weight

    def rows(self, *sizes: int) -> Sequence[Weight]:
        """Returns it by rows of matrices side by side."""
        if self._kept_weight is None:
            return torch.split_with_sizes(self.weight, sizes)
        return self._kept_weight.split(sizes)

    def finish(self, weight: torch.Tensor | None = None) -> None:
        """Packs weight and bias for the kernel, if there is one.

        Args:
            weight: Takes the place of ``self.weight``; for a weight that another layer owns.
        """
        if weight is not None:
            self.weight = weight
        if self._kept_weight is not None:
            return
        if self._library is None or self.weight.dtype is not torch.bfloat16:
            return
        if self.in_features % 2:
            _LOG.warning("no_kernel_for_odd_width", width=self.in_features, running="PyTorch's")
            return
        self.weight = pack(self.weight)
        self.bias = None if self.bias is None else pad_bias(self.bias)
        self.is_packed = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [N, out_features] for x [N, in_features]. N may be 0."""
        if self._library is not None and self.is_packed:
            return linear(self._library, x, self.weight, self.out_features, self.bias)
        if self._kept is not None and self._kept_weight is not None:
            return self._kept.run(x, self._kept_weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class HeadLinear:
    """y = x @ weight, each head with a weight of its own.

    Args:
        num_heads: H.
        in_features: Width of a head of x.
        out_features: Width of a head of y.
        dtype: Type of weight, x and y.
        device: Where they live.
        library: As in ``Linear``.

    Attributes:
        weight: [H, in_features, out_features]; packed, once ``finish`` has done so.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None = None,
    ) -> None:
        self.out_features = out_features
        size = (num_heads, in_features, out_features)
        self.weight = torch.zeros(size, dtype=dtype, device=device)
        self._library = library if dtype is torch.bfloat16 and in_features % 2 == 0 else None

    def finish(self) -> None:
        """Packs the weight for the kernel, if there is one."""
        if self._library is not None:
            self.weight = pack(self.weight.transpose(1, 2))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, H, out_features] for x [T, H, in_features]."""
        if self._library is not None:
            return linear_of_heads(self._library, x, self.weight, self.out_features)
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


class Embedding:
    """Looks up a row per token.

    Attributes:
        weight: [num_embeddings, width].
    """

    def __init__(
        self, num_embeddings: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(num_embeddings, width, dtype=dtype, device=device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns [T, width] for int64 ids [T]."""
        return F.embedding(input_ids, self.weight)


class LMHead:
    """This executor's rows of the head.

    Args:
        hidden_size: D.
        vocab_size: V.
        communicator: Joins the executors of this DP rank.
        dtype: Type of weights and hidden states.
        device: Where they live.
        library: Kernels of the product; None for plain PyTorch.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        communicator: AttnTpCommunicator,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None,
    ) -> None:
        self.vocab_size = vocab_size
        num_rows = vocab_slice(vocab_size, communicator.size)
        start = num_rows * communicator.topology.attn_tp_rank
        self._rows = range(start, start + num_rows)
        self._communicator = communicator
        self._linear = Linear(hidden_size, num_rows, dtype=dtype, device=device, library=library)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [L, V] of hidden states [L, D].

        Every executor of the DP rank must call it, with the same rows. The next call may overwrite
        what this one returned.
        """
        logits = self._communicator.gather_logits(self._linear(hidden))
        return logits[:, : self.vocab_size].float()

    def weight_group(self, name: str) -> WeightGroup:
        """Returns what fills a head of its own."""
        at = range(*(min(row, self.vocab_size) for row in (self._rows.start, self._rows.stop)))
        weight = self._linear.weight
        weight[len(at) :].zero_()
        part = Part(weight[: len(at)], 0, at, self.vocab_size)
        return WeightGroup({name: part}, self._linear.finish)

    def tied_weight_group(self, embedding: torch.Tensor) -> WeightGroup:
        """Returns what takes the head from the embedding, once that is filled.

        Args:
            embedding: [attn_tp_size * Vp, D], zeros past the vocabulary.
        """
        rows = embedding[self._rows.start : self._rows.stop]
        return WeightGroup({}, lambda: self._linear.finish(rows))


def vocab_slice(vocab_size: int, attn_tp_size: int) -> int:
    """Returns Vp, the rows of each executor's share."""
    return -(-vocab_size // attn_tp_size)
