"""FlashInfer's own Python over compiled modules that only take note of their calls, and Triton's kernels.

Whatever it would build or load is a stand-in, under the name that it has among prebuilt modules.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch

from executor.budget.token_budget import A2A_ALIGNMENT, a2a_workspace_size_per_rank
from executor.model.flashinfer import bootstrap
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.triton.operators import TritonOps
from tests.together.cuda.support.fake_gpu import DEVICE, FakeGpu

_CACHED = type(lru_cache(lambda: None))
FLOAT_BYTES, INT_BYTES = 1 << 20, 1 << 16  # of workspace that each plan asks for
MOE_BYTES = 1 << 20
SHARED_BYTES = 233472, 232448  # of a Hopper multiprocessor, and of a block on it


class Module:
    """A compiled module: each function takes note of its call and returns what its caller reads."""

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self._gpu = gpu
        self._returns: dict[str, Callable[..., Any]] = {
            "plan": lambda *args: [0] * 16,
            "plan_with_staged_workspace_bytes": lambda *args: ([0] * 16, 0),
            "workspace_size": lambda *args: (FLOAT_BYTES, INT_BYTES),
            "get_workspace_size": lambda *args: MOE_BYTES,
            "set_deepgemm_jit_include_dirs": lambda *args: None,
            "init": lambda *args: self,
            "moe_a2a_initialize": self._initialize,
            "moe_a2a_get_aux_data_size": lambda *args: _aux_bytes(*args[:2]),
        }
        self._max_num_tokens = 0
        self.name = name

    def __getattr__(self, function: str) -> Callable[..., Any]:
        if function.startswith("__"):
            raise AttributeError(function)
        if function in self._returns:
            return partial(self._on_host, function)
        return partial(self._kernel, function)

    def _on_host(self, function: str, *args: Any) -> Any:
        if self._gpu.is_capturing:
            self._gpu.refuse(f"{self.name}.{function} is called")
        if function.startswith("plan"):  # which ends with a copy to the device
            self._gpu.launch("plan")
        return self._returns[function](*args)

    def _kernel(self, function: str, *args: Any, **kwargs: Any) -> Any:
        self._gpu.call(function, [*args, *kwargs.values()])
        return self._dispatched(*args) if function == "moe_a2a_dispatch" else None

    def _initialize(
        self, workspace: torch.Tensor, ep_rank: int, ep_size: int, max_num_tokens: int, eplb: int
    ) -> torch.Tensor:
        self._max_num_tokens = max_num_tokens
        return workspace.new_zeros(10, dtype=torch.int64)

    def _dispatched(
        self,
        ids: torch.Tensor,
        payloads: list[torch.Tensor],
        workspace: torch.Tensor,
        metainfo: torch.Tensor,
        capacity: int,
        ep_rank: int,
        ep_size: int,
        *rest: Any,
    ) -> tuple[list[int], list[int], int, int, int]:
        """Returns where each payload's rows arrive, how many bytes, and what is free behind them."""
        self._gpu.row_bytes.add(sum(x.shape[1] * x.itemsize for x in payloads))
        at = _aux_bytes(ep_size, self._max_num_tokens)
        offsets, sizes = [], []
        for x in payloads:
            assert len(x) == len(ids) <= capacity <= self._max_num_tokens
            assert x.is_contiguous()
            offsets.append(ep_rank * workspace.stride(0) + at)
            sizes.append(ep_size * capacity * x[0].nbytes if len(x) else 0)
            at += sizes[-1]
        return offsets, sizes, at, -1, 0


class Kernels:
    """Triton's kernels, each launched by ``kernel[grid](...)``."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> dict[Any, Callable[..., None]]:
        def launch(*args: Any, **constants: Any) -> None:
            self._gpu.call(name, args)

        return defaultdict(lambda: launch)


def _aux_bytes(ep_size: int, max_num_tokens: int) -> int:
    """Returns the bytes of counters and flags."""
    with_payloads = a2a_workspace_size_per_rank(
        ep_size=ep_size,
        max_num_tokens=max_num_tokens,
        dispatch_payload_size_per_token=A2A_ALIGNMENT,
        combine_payload_size_per_token=A2A_ALIGNMENT,
    )
    return with_payloads - 2 * ep_size * max_num_tokens * A2A_ALIGNMENT


def install(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Has the library load such modules, and share memory of which a rank sees its own part."""
    core = import_module("flashinfer.jit.core")
    modules: dict[str, Module] = {}

    def build_and_load(spec: Any) -> Module:
        if spec.name not in modules:
            gpu.modules.append(spec.name)
        return modules.setdefault(spec.name, Module(gpu, spec.name))

    def join(workspace: Any, communicator: Any) -> bool:
        size = (communicator.Get_size(), workspace.bytes_per_rank)
        workspace.tensor = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        return True

    patch.setattr(core.JitSpec, "build_and_load", build_and_load)
    patch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    patch.setattr(import_module("flashinfer.utils"), "_cache_buf", {})
    latent = import_module("flashinfer.mla._batch_mla._backends._fa_common")
    patch.setattr(latent, "_get_fa_shared_memory_limits", lambda device: SHARED_BYTES)
    patch.setattr(bootstrap.MnnvlWorkspace, "join", join)
    patch.setattr(FlashInferOps, "has_built", lambda ops, name: True)
    patch.setattr(TritonOps, "__init__", lambda ops: setattr(ops, "_kernels", Kernels(gpu)))


def forget_modules() -> None:
    """Has the library load each module anew when it next asks for it."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "flashinfer":
            for value in list(vars(module).values()):
                if type(value) is _CACHED:
                    value.cache_clear()
