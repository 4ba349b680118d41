"""What a device brings along: kernels, attention, a way to record graphs, filters for sampling.

             CPU                     CUDA, with FlashInfer         CUDA, without
operators    PyTorch                 FlashInfer                    PyTorch
experts      packed, one by one      grouped products, or fused    grouped products
attention    PyTorch                 FlashInfer, in graphs         PyTorch, graphs break
graphs       called                  recorded                      recorded
sampling     rows by what they ask   all rows alike, FlashInfer    rows by what they ask
"""

import os
from collections.abc import Sequence
from typing import Protocol

import structlog
import torch

from executor.config import ExecutorConfig
from executor.flashinfer_ops.operators import FlashInferOps
from executor.graph.backend import RunnerBackend
from executor.graph.cpu_eager_backend import EagerBackend
from executor.graph.cuda_device import CudaDevice
from executor.graph.cuda_graph_backend import CaptureResources, CUDAGraphBackend
from executor.kv_pool import KVPool
from executor.layers.attention import Attention
from executor.layers.attention_flashinfer import FlashInferAttention
from executor.layers.attention_torch import TorchAttention
from executor.models.config import ModelConfig
from executor.models.kernels import Kernels, cpu_kernels, stacked_kernels
from executor.sampling_fixed import Filters, FlashInferFilters

log = structlog.stdlib.get_logger(__name__)


class Device(Protocol):
    """Makes what depends on where the model runs."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def filters(self) -> Filters | None:
        """How sampling drops unlikely tokens, if all rows go through every stage."""
        ...

    def kernels(self, model: ModelConfig, dtype: torch.dtype) -> Kernels:
        """Returns what the model's layers call."""
        ...

    def attention(
        self, model: ModelConfig, kv_pool: KVPool, decode_sizes: Sequence[int]
    ) -> Attention:
        """Returns the attention backend, ready for graphs of these sizes."""
        ...

    def new_backend(self) -> RunnerBackend:
        """Returns what records and replays for one runner."""
        ...


def open_device(config: ExecutorConfig, dtype: torch.dtype) -> Device:
    """Returns the device that the settings ask for. ``auto`` is CUDA wherever that can do it.

    Args:
        config: The settings.
        dtype: Type of weights and hidden states.

    Raises:
        ValueError: There is none, or it cannot do what the settings ask.
    """
    if config.device != "cpu":
        problem = _why_not_cuda(config, dtype)
        if problem is None:
            return Cuda(config)
        if config.device == "cuda":
            raise ValueError(f"device=cuda: {problem}; or set device=cpu")
        log.info("runs_on_cpu", reason=problem)
    return Cpu(os.environ.get("OMP_WAIT_POLICY", ""))


def _why_not_cuda(config: ExecutorConfig, dtype: torch.dtype) -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here"
    if config.world_size > 1:
        return (
            f"dp_size={config.dp_size}, but executors on GPUs cannot exchange hidden states yet: "
            f"need dp_size=1"
        )
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"dtype={name}, but the kernels for experts take bfloat16: need dtype=bfloat16"
    return None


class Cpu:
    """The machine's cores.

    Args:
        omp_wait_policy: What OpenMP's threads do between operators. If they sleep (PASSIVE), as
            they must where processes share cores, layers are shared among threads of our own.
    """

    torch_device = torch.device("cpu")
    filters: Filters | None = None

    def __init__(self, omp_wait_policy: str) -> None:
        self._num_workers = None if omp_wait_policy.upper() == "PASSIVE" else 1

    def kernels(self, model: ModelConfig, dtype: torch.dtype) -> Kernels:
        return cpu_kernels(model, dtype=dtype, num_workers=self._num_workers)

    def attention(
        self, model: ModelConfig, kv_pool: KVPool, decode_sizes: Sequence[int]
    ) -> Attention:
        return _torch_attention(model, kv_pool, self._num_workers)

    def new_backend(self) -> RunnerBackend:
        return EagerBackend()


class Cuda:
    """One GPU."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._config = config
        self._resources = CaptureResources(CudaDevice(self.torch_device))
        self._ops = _flashinfer(config)
        self.filters = None if self._ops is None else FlashInferFilters(self._ops)

    def kernels(self, model: ModelConfig, dtype: torch.dtype) -> Kernels:
        is_fused = self._config.moe_runner == "cutlass"
        return stacked_kernels(
            model,
            dtype=dtype,
            device=self.torch_device,
            ops=self._ops,
            fused_moe_rows=self._config.max_num_batched_tokens if is_fused else None,
        )

    def attention(
        self, model: ModelConfig, kv_pool: KVPool, decode_sizes: Sequence[int]
    ) -> Attention:
        if self._ops is None:
            return _torch_attention(model, kv_pool, num_workers=1)
        attention = FlashInferAttention(
            self._ops,
            kv_pool,
            model.num_attention_heads,
            max_num_tokens=self._config.max_num_batched_tokens,
        )
        if decode_sizes:
            attention.init_cuda_graph_state(decode_sizes)
        return attention

    def new_backend(self) -> RunnerBackend:
        return CUDAGraphBackend(self._resources)


def _torch_attention(
    model: ModelConfig, kv_pool: KVPool, num_workers: int | None
) -> TorchAttention:
    return TorchAttention(
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        dtype=kv_pool.shape.dtype,
        num_workers=num_workers,
    )


def _flashinfer(config: ExecutorConfig) -> FlashInferOps | None:
    try:
        return FlashInferOps(enable_pdl=config.flashinfer_pdl == "on")
    except ImportError as error:
        log.warning("no_flashinfer", problem=str(error), running="slower, on PyTorch's operators")
        return None
