"""If a line of the table is too small, the KV pool takes memory that something else needs later."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.batch.row_starts import PARAMETERS, RowStarts
from executor.build import executor as build
from executor.build import kv as build_kv
from executor.build.devices import Cpu, Cuda
from executor.build.executor import build_worker
from executor.build.kv import CUDA_KV_SHARE, bytes_per_block
from executor.build.memory import PROBABILITY_COPIES, state_lines
from executor.build.plan import Blueprint
from executor.config import ExecutorConfig
from executor.graph.slots import global_num_tokens_slots
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention_workspace import FLOAT_BYTES, AttentionWorkspace
from executor.model.sampling.sampler import Sampler
from executor.runners.forward_pass import ForwardPass
from executor.runners.runner_graphs import RunnerGraphs
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer, real_flashinfer
from tests.support.paths import DEMO_DRAFTS as DRAFTS
from tests.support.paths import DEMO_MODEL as MODEL

SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "dtype": "bfloat16",
    "device": "cpu",
    "block_size": 4,
    "max_num_seqs": 6,
    "max_model_len": 32,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 60,
    "decode_graph_sizes": (2, 4),
    "prefill_graphs": "off",
}
WAYS: dict[str, dict[str, Any]] = {
    "eagle": {"draft_model": DRAFTS / "eagle"},
    "eagle drawn": {"draft_model": DRAFTS / "eagle", "draft_sampling": "rejection"},
    "eagle tree": {"draft_model": DRAFTS / "eagle", "draft_topk": 3, "num_draft_tokens": 9},
    "one draft": {"draft_model": DRAFTS / "mtp", "num_draft_steps": 1},
    "one drawn": {
        "draft_model": DRAFTS / "mtp",
        "num_draft_steps": 1,
        "draft_sampling": "rejection",
    },
    "layers": {"draft_model": DRAFTS / "mtp3"},
    "layers drawn": {"draft_model": DRAFTS / "mtp3", "draft_sampling": "rejection"},
    "frozen KV": {"draft_model": DRAFTS / "frozen_kv", "draft_topk": 2, "num_draft_tokens": 6},
    "frozen KV drawn": {"draft_model": DRAFTS / "frozen_kv", "draft_sampling": "rejection"},
    "without graphs": {
        "draft_model": DRAFTS / "eagle",
        "draft_sampling": "rejection",
        "decode_graphs": "off",
        "decode_graph_sizes": None,
    },
}


class Held:
    """What draft runners hold, however they divide it among objects of theirs."""

    def __init__(self, *runners: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.phases: list[RunnerGraphs] = []
        self._seen: set[int] = set()
        for runner in runners:
            self._walk(runner)

    def _walk(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, ForwardPass):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, RunnerGraphs):
            self.phases.append(value)
        elif isinstance(value, dict):
            self._walk_all(value.values())
        elif isinstance(value, list | tuple):
            self._walk_all(value)
        elif type(value).__module__.startswith("executor.runners."):
            own = vars(value)
            self._walk_all(own[name] for name in own if name != "_target_ids")

    def _walk_all(self, values: Any) -> None:
        for value in values:
            self._walk(value)

    def inputs(self) -> Iterator[torch.Tensor]:
        """Yields the buffers on the device, but for the few numbers that say how many rows run."""
        counts = {"num_token_non_padded", *(slot.name for slot in COUNTS)}
        for phase in self.phases:
            for name in phase.registry.slot_names():
                slot = phase.registry.get_slot(name)
                if name not in counts and slot.device is None:
                    yield slot.allocated()


COUNTS = global_num_tokens_slots(
    require_gathered_buffer=True, require_mlp_tp_gather=True, num_dp_ranks=2
)


def bytes_of(tensors: Any) -> int:
    """Returns the memory of tensors, that of views of one another once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def tensors_of(owner: Any) -> list[torch.Tensor]:
    return [value for value in vars(owner).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_the_table_has_the_bytes_of_what_is_kept(settings: dict[str, Any]) -> None:
    config = ExecutorConfig(**(SETTINGS | settings))
    worker, description = build_worker(config)
    told = {line.what: line.bytes for line in description.budget.lines}
    assert worker._speculation is not None
    speculator = worker._speculation.speculator
    runner: Any = worker._runner
    assert told["sampling state of each row"] == bytes_of(tensors_of(worker._sampler))
    for name in ("decode", "verify"):
        graphs = getattr(runner, f"_{name}")
        logits = () if graphs is None else (graphs._logits,)
        assert told.get(f"logits of {name} graphs", 0) == bytes_of(logits)
    assert told["features of the target"] == bytes_of([speculator._features])

    state = speculator._state
    kept = [state.tokens, state.scores, state.hidden, state.carries]
    assert told["drafts and hidden states of each row"] == bytes_of(kept)
    probs = "probabilities of the first drafts of each row"
    assert told.get(probs, 0) == bytes_of([] if state.probs is None else [state.probs])

    held = Held(speculator._drafter, speculator._extender)
    in_graphs = (
        "drafts of graphs",
        "tree masks of draft graphs",
        "probabilities of drafts of graphs",
    )
    assert sum(told.get(what, 0) for what in in_graphs) == bytes_of(held.tensors)
    buffers = {buffer.data_ptr(): buffer.nbytes for buffer in held.inputs()}
    assert told.get("inputs of draft graphs", 0) == sum(buffers.values())
    assert bool(held.phases) == bool(config.decode_graphs == "on")


class CpuWithFlashInfer(Cpu):
    """Makes attention as a GPU's executor does, from a library that computes on the CPU."""

    def __init__(self) -> None:
        super().__init__("PASSIVE")
        self.ops = FlashInferOps(enable_pdl=False)
        self._workspace = AttentionWorkspace("cpu")

    attention: Any = Cuda.attention
    attention_lines: Any = Cuda.attention_lines


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuFlashInfer]:
    library = CpuFlashInfer(real_flashinfer(tmp_path_factory))
    with library.installed():
        yield library


@pytest.mark.parametrize(
    ("name", "num_attentions"),
    # The target's, a draft-extend's, and one for each draft but the first.
    [("eagle tree", 4), ("eagle drawn", 4), ("layers", 2), ("frozen KV", 2)],
)
def test_all_attention_of_a_worker_shares_a_workspace_which_the_table_has(
    name: str, num_attentions: int, library: CpuFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace of its own for each took 128 MiB as often, and no line of the table said so."""
    device = CpuWithFlashInfer()
    monkeypatch.setattr(build, "open_device", lambda *_: device)
    with capture_logs() as events:
        _, description = build_worker(ExecutorConfig(**(SETTINGS | WAYS[name])))
    eager = [wrapper for wrapper in library.wrappers if not wrapper.is_graph]
    num_eager = [type(wrapper).__name__ for wrapper in eager].count("_DecodeWrapper")
    assert num_eager == num_attentions
    floats = {wrapper.workspaces[0].data_ptr() for wrapper in library.wrappers}
    assert floats == {device._workspace.float.data_ptr()}
    plans = {wrapper.workspaces[1].data_ptr() for wrapper in library.wrappers}
    assert len(plans) == len(library.wrappers)
    lines = device.attention_lines()
    assert lines[0].bytes == FLOAT_BYTES
    assert f" {len(library.wrappers)} " in lines[1].what
    logged = [event for event in events if event["event"] == "token_budget"]
    assert [event["what"] for event in logged][-3:] == [line.what for line in lines]
    assert [(line.what, line.bytes) for line in description.budget.lines] == [
        (event["what"], event["bytes"]) for event in logged
    ]


def test_a_bound_of_what_is_kept_is_a_setting_or_a_line() -> None:
    for settings in WAYS.values():
        blueprint = Blueprint.of(ExecutorConfig(**(SETTINGS | settings)))
        seen = ["max_num_seqs", "largest decode graph", "hidden states of a DP rank"]
        lines = state_lines(blueprint)
        assert all(line.bound.startswith(tuple(seen)) for line in lines), lines
        assert len({line.what for line in lines}) == len(lines)


class PeakMemory(TorchDispatchMode):
    """Adds up the storages that operators make within it and that are still alive.

    Attributes:
        bytes: The most at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._storages: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in given:
                self._storages.add(leaf.untyped_storage())
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in self._storages))
        return out


def sampling_starts(num_rows: int) -> RowStarts:
    """Returns rows of which each goes through every filter."""
    none = np.zeros(0, dtype=np.int64)
    zeros = np.zeros(num_rows, dtype=np.int64)
    parameters = np.zeros(num_rows, PARAMETERS)
    given = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    for name, value in {**given, "repetition_penalty": 1}.items():
        parameters[name] = value
    return RowStarts(
        rows=np.arange(num_rows),
        parameters=parameters,
        scores_output=zeros.astype(np.bool_),
        num_top_logprobs=zeros,
        suppressed_until=zeros,
        num_suppressed_ids=zeros,
        suppressed_ids=none,
        num_biases=zeros,
        bias_ids=none,
        biases=none.astype(np.float32),
        num_prompt_ids=zeros,
        prompt_ids=none,
        num_output_ids=zeros,
        output_ids=none,
    )


def test_the_work_on_verified_probabilities_is_counted() -> None:
    num_rows, vocab_size = 8, 4000
    sampler = Sampler(num_rows, vocab_size, "cpu")
    sampler.start(sampling_starts(num_rows))
    rows, logits = np.arange(num_rows), torch.randn(num_rows, vocab_size)
    with torch.inference_mode(), PeakMemory() as memory:
        p = sampler.probabilities(logits, rows, rows + 5, torch.from_numpy(rows))
    assert p.shape == logits.shape
    assert round(memory.bytes / p.nbytes) == PROBABILITY_COPIES  # but for an entry or two per row


@pytest.mark.parametrize("name", ["eagle drawn", "layers"])
def test_the_kv_pool_leaves_memory_for_what_is_made_after_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS | WAYS[name] | {"num_kv_blocks": None}
    blueprint = Blueprint.of(ExecutorConfig(**settings))
    free, device = 1 << 30, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
    later = sum(line.bytes for line in state_lines(blueprint))
    spilled = blueprint.config.max_num_seqs * blueprint.spill_blocks_per_row
    taken = build_kv._num_kv_blocks(blueprint, device) + spilled
    assert taken == int((free - later) * CUDA_KV_SHARE) // bytes_per_block(blueprint)


def test_without_memory_for_two_blocks_the_start_ends(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 1 << 30))
    blueprint = Blueprint.of(ExecutorConfig(model=tiny_checkpoint))
    with pytest.raises(ValueError, match="kv_cache_bytes=0: a block takes"):
        build_kv._num_kv_blocks(blueprint, torch.device("cuda"))
