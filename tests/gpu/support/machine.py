"""Where the suite runs: a GPU, or a CPU that stands in for one so that the suite itself is tested.

With LOCKSTEP_GPU_TESTS_ON=cpu every test runs at tiny sizes, on PyTorch instead of FlashInfer's
kernels and on recorded operators instead of CUDA graphs. That finds what is wrong with a test,
never what is wrong with a kernel.

    python -m tests.gpu.support.machine    one line of JSON: why nothing can run here, or what it is
"""

import atexit
import gc
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

import torch

from executor.batch.staging import Copier
from executor.build.devices import open_triton, starts_early
from executor.config import ExecutorConfig
from executor.graph.backend import EagerBackend, RunnerBackend
from executor.graph.cuda_graph_backend import CaptureResources, CudaDevice, CUDAGraphBackend
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers import attention_workspace
from executor.model.triton.operators import TritonOps
from tests.executor.support.flashinfer.cpu_flashinfer import WORKSPACE, CpuFlashInfer
from tests.executor.support.recording.copiers import SeparateMemory
from tests.executor.support.recording.recording_backend import RecordingBackend, living_memory
from tests.gpu.support.production import PDL, PRODUCTION
from tests.support.paths import DEMO_MODEL

SWITCH = "LOCKSTEP_GPU_TESTS_ON"
IS_STAND_IN = os.environ.get(SWITCH) == "cpu"


def why_not() -> str:
    """Returns why nothing can run here; empty if it can."""
    chosen = os.environ.get(SWITCH, "")
    if chosen not in ("", "cpu"):
        raise ValueError(f"{SWITCH}={chosen}: leave it out to use the GPU; it can be cpu")
    if IS_STAND_IN or torch.cuda.is_available():
        return ""
    return "PyTorch finds no CUDA device here"


class Gpu:
    """The current CUDA device.

    Attributes:
        device: Where tensors live.
        moe_runner: Kernels of experts, in production.
    """

    moe_runner = PRODUCTION.get("moe_runner", "grouped")

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._capability = torch.cuda.get_device_capability(self.device)
        self._resources = CaptureResources(CudaDevice(self.device))
        self._backends: list[CUDAGraphBackend] = []

    @cached_property
    def ops(self) -> FlashInferOps | None:
        """FlashInfer as in production; None where it is not installed."""
        return self.new_ops(PDL)

    @cached_property
    def triton(self) -> TritonOps | None:
        """Kernels in Triton as in production; None where none can be compiled."""
        settings: dict[str, Any] = dict(PRODUCTION)
        return open_triton(ExecutorConfig(model=DEMO_MODEL, **settings), self.device)

    def new_ops(self, pdl: str) -> FlashInferOps | None:
        """Returns FlashInfer whose kernels may start early, or not: "on", "off" or "auto"."""
        has_nvcc = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ
        if not has_nvcc or shutil.which("ninja") is None:
            # A kernel that is not built already is then reported as missing, and its test fails.
            os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        try:
            return FlashInferOps(enable_pdl=starts_early(pdl, self.device))
        except ImportError:
            return None

    @property
    def has_fa3(self) -> bool:
        """Whether FlashInfer's kernels for Hopper run here."""
        return self._capability[0] == 9

    @property
    def no_grouped_graphs(self) -> str:
        """Why graphs cannot capture grouped products here; empty if they can."""
        if self._capability in ((9, 0), (10, 0)):
            return ""
        major, minor = self._capability
        return (
            f"PyTorch's grouped product is captured on compute capability 9.0 and 10.0; "
            f"this GPU has {major}.{minor}"
        )

    def new_backend(self, *, calls_library: bool = False) -> RunnerBackend:
        """Returns what records graphs.

        Args:
            calls_library: Whether FlashInfer's functions that return tensors are called, which
                the stand-in cannot record.
        """
        self._backends.append(CUDAGraphBackend(self._resources))
        return self._backends[-1]

    def discard(self) -> None:
        """Drops what all backends so far have captured.

        A backend that is forgotten before takes the memory pool that it shares along.
        """
        while self._backends:
            self._backends.pop().discard()

    def copier(self) -> Copier:
        """Returns how a step's columns get to the device."""
        return Copier(self.device)

    @contextmanager
    def waiting_refused(self) -> Iterator[None]:
        """Within it, an operator that makes the host wait for the device is an error."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> tuple[int, int]:
        """Returns the bytes that tensors have, and those that PyTorch holds for them."""
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def bandwidth(self) -> float | None:
        """Returns the nominal bytes per second of the device's memory; None if unknown."""
        properties = torch.cuda.get_device_properties(self.device)
        kilohertz = getattr(properties, "memory_clock_rate", 0)
        bits = getattr(properties, "memory_bus_width", 0)
        return 2.0 * kilohertz * 1e3 * bits / 8 or None  # two transfers per clock

    def facts(self) -> dict[str, str]:
        """Returns the device and the versions of what runs on it."""
        properties = torch.cuda.get_device_properties(self.device)
        memory_gib = properties.total_memory / (1 << 30)
        return {
            "GPU": f"{properties.name}, {memory_gib:.0f} GiB",
            "Capability": ".".join(map(str, self._capability)),
            "Driver": _driver(),
            "CUDA": str(torch.version.cuda),
            **_versions(),
        }


class StandIn:
    """The CPU, in the role of a GPU: it has what `Gpu` has."""

    has_fa3 = False
    triton: TritonOps | None = None
    no_grouped_graphs = ""
    moe_runner = "grouped"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._library: CpuFlashInfer | None = None
        self._backends: list[RecordingBackend] = []

    @cached_property
    def ops(self) -> FlashInferOps | None:
        return self.new_ops(PDL)

    def new_ops(self, pdl: str) -> FlashInferOps | None:
        folder = tempfile.mkdtemp(prefix="lockstep-flashinfer-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # the library writes until then
        with patch.dict(os.environ, {"FLASHINFER_WORKSPACE_BASE": folder}):
            try:
                import flashinfer
            except ImportError:
                return None
        attention_workspace.FLOAT_BYTES = WORKSPACE[0]  # filling 128 MiB takes longest
        attention_workspace.ANY_PLAN_BYTES = WORKSPACE[1]
        self._library = CpuFlashInfer(flashinfer)
        self._library.launch = self._launch
        with self._library.installed():
            return FlashInferOps(enable_pdl=pdl == "on")

    def _launch(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """Whichever backend records at the time takes the call down."""
        for backend in self._backends:
            kernel = backend.kernel(kernel)
        return kernel

    def new_backend(self, *, calls_library: bool = False) -> RunnerBackend:
        if calls_library:
            return EagerBackend()
        self._backends.append(RecordingBackend())
        return self._backends[-1]

    def discard(self) -> None:
        while self._backends:
            self._backends.pop().discard()

    def copier(self) -> Copier:
        return SeparateMemory()

    def waiting_refused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        if self._library is not None:
            self._library.calls.clear()  # which hold their arguments
        gc.collect()
        tensors = living_memory()
        tensors.pop(None, None)
        num_bytes = sum(x.untyped_storage().nbytes() for x in tensors.values())
        return num_bytes, num_bytes

    def free_bytes(self) -> int:
        return 1 << 40

    def bandwidth(self) -> float | None:
        return None

    def facts(self) -> dict[str, str]:
        return {
            "GPU": f"none: a CPU stood in ({platform.machine()})",
            "Capability": "none",
            "Driver": "none",
            "CUDA": "none",
            **_versions(),
        }


Machine = Gpu | StandIn


@cache
def open_machine() -> Machine:
    """Returns where this process runs the suite. Only if ``why_not`` is empty."""
    return StandIn() if IS_STAND_IN else Gpu()


def _versions() -> dict[str, str]:
    names = {
        "FlashInfer": "flashinfer-python",
        "Triton": "triton",
        "Transformers": "transformers",
    }
    found = {name: _version(package) for name, package in names.items()}
    return {"Python": platform.python_version(), "PyTorch": torch.__version__, **found}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.stdout else "unknown"


if __name__ == "__main__":
    found = why_not()
    print(json.dumps({"problem": found, "facts": {} if found else open_machine().facts()}))
