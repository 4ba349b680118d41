"""Devices: the kernels, attention, graph backend and sampling filters of a CPU or a GPU.

             CPU                     CUDA, with FlashInfer         CUDA, without
operators    kernels of its own      FlashInfer, Triton            PyTorch
experts      kernels of its own      grouped products, or fused    grouped products
FP8, MXFP4   dequantised, or int8    kept on Hopper                dequantised
attention    a kernel of its own     FlashInfer, in graphs         PyTorch, graphs break
graphs       kernels' calls are      recorded                      recorded
             recorded, or called
sampling     rows by what they ask   all rows alike, FlashInfer    rows by what they ask
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import structlog
import torch

from executor.batch.kv_pool import KVPool
from executor.budget.report import BudgetLine
from executor.budget.token_budget import TokenBudget
from executor.config import ExecutorConfig
from executor.graph.backend import EagerBackend, RunnerBackend, Work
from executor.graph.cpu_graph import CpuGraph, GraphMemory
from executor.graph.cuda_graph_backend import CaptureResources, CudaDevice, CUDAGraphBackend
from executor.model.cpu_kernels import library
from executor.model.decoder.kernels import Kernels, cpu_kernels, stacked_kernels
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import Attention, LayerOptions
from executor.model.layers.attention_cpu import cpu_attention
from executor.model.layers.attention_flashinfer import FlashInferAttention, flashinfer_attention
from executor.model.layers.attention_torch import TorchAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.model.sampling.fixed_shape import Filters, FlashInferFilters
from executor.model.spec import ModelSpec
from executor.model.triton.operators import TritonOps
from executor.model.weights import KeptAs
from executor.model.weights.kept import DEQUANTISED, IN_INT8, Keeping
from executor.parallel.communicators import HostBarrier

log = structlog.stdlib.get_logger(__name__)


class AttentionGraphs(NamedTuple):
    """Graphs that call attention.

    Attributes:
        sizes: Sequences of each.
        width: Query rows of each sequence.
        has_tree: Whether these see one another as a tree says.
    """

    sizes: tuple[int, ...]
    width: int = 1
    has_tree: bool = False


class Device(ABC):
    """Makes what depends on where the model runs.

    Attributes:
        torch_device: Where tensors are.
        ops: FlashInfer; None where it does not run.
        triton: Kernels of ours beside it; None likewise.
        filters: How sampling drops unlikely tokens, if all rows go through every stage.
        members: What talks to other executors for it.
    """

    torch_device: torch.device
    ops: FlashInferOps | None = None
    triton: TritonOps | None = None
    filters: Filters | None = None
    members: tuple[HostBarrier, ...] = ()

    @abstractmethod
    def kernels(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        max_moe_rows: int,
        keeping: Keeping = DEQUANTISED,
    ) -> Kernels:
        """Returns what the model's layers call.

        Args:
            model: Its sizes.
            dtype: Type of weights and hidden states.
            max_moe_rows: Rows of experts in the largest pass.
            keeping: What stays quantised.
        """

    def why_dequantised(self, kept_as: KeptAs) -> str | None:
        """Returns why no kernel here reads weights of such a format; None if some do."""
        return "a CPU has no kernels for them"

    def why_not_int8(self) -> str | None:
        """Returns why no kernel here reads weights in int8; None if some do."""
        return "only a CPU has kernels for it: set device=cpu"

    def attention(
        self,
        num_heads: int,
        kv_pool: KVPool,
        graphs: list[AttentionGraphs],
        budget: TokenBudget,
        scale: float | None = None,
        layers: Sequence[LayerOptions] = (),
    ) -> Attention:
        """Returns an attention backend, ready for these graphs.

        Args:
            num_heads: Query heads of this executor.
            kv_pool: Keys and values of its KV heads, and the block tables.
            graphs: What will be captured with it.
            budget: Token rows of the largest pass.
            scale: What scores are multiplied by; 1 / sqrt(width of a key) if None.
            layers: What layers do that others do not, by their number.
        """
        return TorchAttention(num_heads, kv_pool.shape, scale=scale, layers=layers)

    def attention_lines(self) -> tuple[BudgetLine, ...]:
        """Returns what all attention made so far has allocated, for the budget's table."""
        return ()

    @abstractmethod
    def new_backend(self) -> RunnerBackend:
        """Returns what records and replays for one runner."""


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
        if config.device != "auto":
            raise ValueError(f"device={config.device}: {problem}; or set device=cpu")
        log.info("runs_on_cpu", reason=problem)
    kernels = library.load() if dtype is torch.bfloat16 and config.is_alone else None
    return Cpu(None if kernels is None else partial(CpuGraph, kernels, GraphMemory()))


def _why_not_cuda(config: ExecutorConfig, dtype: torch.dtype) -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here"
    number, count = _cuda_number(config.device), torch.cuda.device_count()
    if number is not None and number >= count:
        return f"PyTorch finds {count} CUDA devices here: they are cuda:0 to cuda:{count - 1}"
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"dtype={name}, but the kernels for experts take bfloat16: need dtype=bfloat16"
    return None


def _cuda_number(device: str) -> int | None:
    """Returns N of ``cuda:N``; None where the setting names no device."""
    _, _, number = device.partition(":")
    return int(number) if number else None


def memory_in_use() -> dict[str, int]:
    """Returns the bytes of GPU memory that PyTorch uses and holds in this process; {} without."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    numbers = range(torch.cuda.device_count())
    return {
        "allocated": sum(torch.cuda.memory_allocated(number) for number in numbers),
        "reserved": sum(torch.cuda.memory_reserved(number) for number in numbers),
    }


class Cpu(Device):
    """The machine's cores.

    Args:
        record: As ``EagerBackend`` takes it.
    """

    torch_device = torch.device("cpu")

    def __init__(self, record: Callable[[Work], Work] | None = None) -> None:
        self._record = record

    def kernels(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        max_moe_rows: int,
        keeping: Keeping = DEQUANTISED,
    ) -> Kernels:
        assert keeping in (DEQUANTISED, IN_INT8), "a CPU keeps nothing as it is stored"
        return cpu_kernels(model, dtype=dtype, max_moe_rows=max_moe_rows, keeping=keeping)

    def why_not_int8(self) -> str | None:
        kernels, problem = library.find()
        return (
            None if kernels else f"it takes kernels of the CPU, of which there are none: {problem}"
        )

    def attention(
        self,
        num_heads: int,
        kv_pool: KVPool,
        graphs: list[AttentionGraphs],
        budget: TokenBudget,
        scale: float | None = None,
        layers: Sequence[LayerOptions] = (),
    ) -> Attention:
        return cpu_attention(num_heads, kv_pool.shape, scale=scale, layers=layers)

    def new_backend(self) -> RunnerBackend:
        return EagerBackend(self._record)


class Cuda(Device):
    """One GPU: the one that the settings name, else that of this executor's number in its group.

    Executors of one group on one machine then each have their own: NCCL refuses two on one GPU.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        number = _cuda_number(config.device)
        if number is None:
            count = torch.cuda.device_count()
            if count > 1 and config.capacity.is_elastic:
                raise ValueError(
                    f"device={config.device}: an elastic executor has no turn among the {count} GPUs of "
                    f"its machine; set device to one of cuda:0 to cuda:{count - 1}"
                )
            number = config.topology.world_rank % count
        self.torch_device = torch.device("cuda", number)
        torch.cuda.set_device(self.torch_device)  # NCCL and FlashInfer launch on the current one
        self._config = config
        self._resources = CaptureResources(CudaDevice(self.torch_device))
        self._barrier = HostBarrier()
        self.members = (self._barrier,)
        self.ops = _flashinfer(config, self.torch_device)
        if self.ops is not None:
            self.ops.load(self.torch_device)
        self.triton = None if self.ops is None else open_triton(config, self.torch_device)
        # Here, so that the KV pool is sized by what it leaves.
        self._workspace = None if self.ops is None else AttentionWorkspace(self.torch_device)
        self.filters = None if self.ops is None else FlashInferFilters(self.ops)

    def kernels(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        max_moe_rows: int,
        keeping: Keeping = DEQUANTISED,
    ) -> Kernels:
        moe_runner = self._config.moe_runner
        if moe_runner == "auto":
            is_fused = keeping.experts is not None or self._has_fused_experts()
            moe_runner = "cutlass" if is_fused else "grouped"
            log.info("experts", moe_runner=moe_runner)
        return stacked_kernels(
            model,
            dtype=dtype,
            device=self.torch_device,
            ops=self.ops,
            moe_runner=moe_runner,
            max_moe_rows=max_moe_rows,
            keeping=keeping,
            triton=self.triton,
        )

    def _has_fused_experts(self) -> bool:
        """Whether FlashInfer's fused kernels are there: compiling them takes from minutes to hours."""
        if self.ops is None:
            return False
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return self.ops.has_built(f"fused_moe_{major}{minor}")

    def why_dequantised(self, kept_as: KeptAs) -> str | None:
        if self.ops is None:
            return "FlashInfer is not installed"
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if (major, minor) != (9, 0):
            return f"the kernels are for Hopper (SM90), and this GPU is SM{major}{minor}"
        is_fp8 = kept_as.per_byte == 1
        cuda = tuple(int(number) for number in str(torch.version.cuda).split(".")[:2])
        if is_fp8 and cuda < (12, 8):
            return f"the kernels need CUDA 12.8, and PyTorch has {torch.version.cuda}"
        name = "gemm.fp8_blockscale_gemm_sm90"
        if not is_fp8:
            name = "fused_moe.interleave_moe_weights_for_sm90_mixed_gemm"
        return None if self.ops.has(name) else f"this FlashInfer lacks {name}"

    def attention(
        self,
        num_heads: int,
        kv_pool: KVPool,
        graphs: list[AttentionGraphs],
        budget: TokenBudget,
        scale: float | None = None,
        layers: Sequence[LayerOptions] = (),
    ) -> Attention:
        if self.ops is None or self._workspace is None:
            return super().attention(num_heads, kv_pool, graphs, budget, scale, layers)
        new = partial(
            FlashInferAttention,
            self.ops,
            kv_pool,
            num_heads,
            self._workspace,
            max_num_tokens=budget.max_tokens_per_rank,
            scale=scale,
            triton=self.triton,
        )
        attention = flashinfer_attention(new, layers)
        attention.load()
        for sizes, width, has_tree in graphs:
            if sizes:
                attention.init_cuda_graph_state(sizes, width, has_tree=has_tree)
            if has_tree and isinstance(attention, FlashInferAttention):
                attention.init_trees(width)
        return attention

    def attention_lines(self) -> tuple[BudgetLine, ...]:
        return () if self._workspace is None else self._workspace.lines()

    def new_backend(self) -> RunnerBackend:
        return CUDAGraphBackend(self._resources, barrier=self._barrier.wait)


def starts_early(flashinfer_pdl: str, device: torch.device) -> bool:
    """Returns whether FlashInfer's kernels start early on a GPU, by the setting of that name."""
    if flashinfer_pdl == "auto":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return flashinfer_pdl == "on"


def _flashinfer(config: ExecutorConfig, device: torch.device) -> FlashInferOps | None:
    try:
        return FlashInferOps(enable_pdl=starts_early(config.flashinfer_pdl, device))
    except ImportError as error:
        log.warning("no_flashinfer", problem=str(error), running="slower, on PyTorch's operators")
        return None


def open_triton(config: ExecutorConfig, device: torch.device) -> TritonOps | None:
    """Returns the kernels in Triton; None without, or where none can be compiled."""
    if config.triton_kernels == "off":
        return None
    try:
        ops = TritonOps()
        ops.load(device)
    except Exception as error:  # of a compiler, of any kind
        log.warning("no_triton", problem=str(error), running="with more launches, without it")
        return None
    return ops
