"""Rungs of the ladder, in their order: small things first, measurements last."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rung:
    """Tests, or a measurement, in one process.

    Attributes:
        name: Its row in RESULTS.md.
        what: What it shows.
        tests: Arguments of pytest.
        limit_s: After so many seconds it is ended, and has failed.
        tables: What it measures, by the headings in RESULTS.md.
        env: Of its process.
    """

    name: str
    what: str
    tests: tuple[str, ...]
    limit_s: float
    tables: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def _tests(name: str, what: str, limit_s: float, *arguments: str, **env: str) -> Rung:
    tests = (f"tests/gpu/{each}" if each.endswith(".py") else each for each in arguments)
    return Rung(name, what, tuple(tests), limit_s, env=env)


def _figures(name: str, what: str, limit_s: float, *tables: str) -> Rung:
    test = f"tests/gpu/figures/test_figures.py::test_it_is_measured[{name}]"
    return Rung(name, what, (test,), limit_s, tables)


# As executor/__main__.py has NCCL on one machine, and PyTorch's watchdog of it.
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

# fmt: off
RUNGS = (
    _tests("machine", "packages that a server needs, and kernels that it loads, are there", 60,
           "steps/test_machine.py"),
    _tests("ops", "norms, rotation, activation, routing and experts against PyTorch on the CPU", 120,
           "kernels/test_ops.py", "-k", "not cutedsl"),
    _tests("attention", "attention, trees and latents against PyTorch on the CPU", 120,
           "kernels/test_attention.py", "kernels/test_attention_trees.py", "kernels/test_latent.py"),
    _tests("sampling", "filters and samples against PyTorch on the CPU; a seed's token in a graph", 60,
           "kernels/test_sampling.py"),
    _tests("staging", "columns of a step; decode steps that wait only to read their tokens", 60,
           "steps/test_staging.py"),
    _tests("runners", "replays against eager runs, poisoned tails, idle ranks, capturing again", 180,
           "steps/test_runners.py", "-k", "not cutedsl"),
    _tests("nccl", "collectives of one rank over NCCL, eager and captured, in epoch after epoch", 60,
           "steps/test_nccl.py", **NCCL),
    _tests("serving", "prompts beside decodes, log probabilities, a rejoin that keeps the weights", 90,
           "steps/test_serving.py"),
    _tests("stack", "the demo's requests through router and executor", 120, "steps/test_stack.py"),
    _tests("drafts", "chains and trees of drafts in graphs: the answers of plain decoding", 120,
           "steps/test_drafts.py"),
    _tests("cutedsl", "experts in CuTe-DSL, where that is installed", 60,
           "kernels/test_ops.py", "steps/test_runners.py", "-k", "cutedsl"),
    # Its kernels wait for one another: one that is loaded late would keep the others waiting.
    _tests("dispatch", "FlashInfer's all-to-all between ranks on one GPU, against all experts on one",
           120, "kernels/test_dispatch.py", CUDA_MODULE_LOADING="EAGER"),
    _figures("steps", "decode and prefill steps of a 30B-A3B shape, and what bandwidth allows", 240,
             "Memory bandwidth", "Decode steps", "Prefill steps"),
    _figures("variants", "kernels of experts, early starts of kernels (PDL) and Triton compared", 120,
             "Variants"),
    _figures("trace", "kernels in which the time of a captured decode step goes", 60, "Trace"),
    _figures("period", "period of decode steps over the device's own time, two in flight", 120,
             "Period"),
    _figures("registry", "a decode registry filled", 30, "Registry fill"),
    _figures("transformers", "decode steps beside Transformers, on the same weights", 60,
             "Against Transformers"),
)
# fmt: on
