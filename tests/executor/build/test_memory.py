"""If a line of the table is too small, the KV pool takes memory that something else needs later."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from executor.batch.kv_pool import KVPool
from executor.budget.report import BudgetLine
from executor.build import devices
from executor.build import executor as build
from executor.build.devices import Cpu, Cuda
from executor.build.executor import build_worker
from executor.build.memory import (
    CUBLAS_BYTES,
    CUDA_KV_SHARE,
    NCCL_BYTES,
    PROBABILITY_COPIES,
    SCORE_COPIES,
    later_lines,
    num_kv_blocks,
)
from executor.build.plan import Blueprint
from executor.config import ExecutorConfig
from executor.graph.backend import EagerBackend, ShapeKey, Work
from executor.graph.cpu_graph import GraphMemory
from executor.model.cpu_kernels.library import load
from executor.model.flashinfer.cutedsl import scratch_rows
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention_workspace import FLOAT_BYTES, AttentionWorkspace
from executor.model.layers.operators import TorchOperators
from executor.model.moe.layer import Dispatched
from executor.model.moe.runner_cutedsl import CuteDslMoERunner
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.model.sampling.sampler import Sampler
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
from tests.executor.support.recording.peak_memory import PeakMemory
from tests.executor.support.sampling import starts
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
DRAWN = {"draft_sampling": "rejection"}
ONE_DRAFT = {"draft_model": DRAFTS / "mtp", "num_draft_steps": 1}
NO_GRAPHS = {"decode_graphs": "off", "decode_graph_sizes": None}
WAYS: dict[str, dict[str, Any]] = {
    "eagle": {"draft_model": DRAFTS / "eagle"},
    "eagle drawn": {"draft_model": DRAFTS / "eagle", **DRAWN},
    "eagle tree": {"draft_model": DRAFTS / "eagle", "draft_topk": 3, "num_draft_tokens": 9},
    "one draft": ONE_DRAFT,
    "one drawn": ONE_DRAFT | DRAWN,
    "layers": {"draft_model": DRAFTS / "mtp3"},
    "layers drawn": {"draft_model": DRAFTS / "mtp3", **DRAWN},
    "frozen KV": {"draft_model": DRAFTS / "frozen_kv", "draft_topk": 2, "num_draft_tokens": 6},
    "frozen KV drawn": {"draft_model": DRAFTS / "frozen_kv", **DRAWN},
    "without graphs": {"draft_model": DRAFTS / "eagle", **DRAWN, **NO_GRAPHS},
}


HELD = (
    "scratch of experts, for the rows of a pass",
    "sampling state of each row",
    "features of the target",
    "draft state of each row",
    "buffers of draft runners",
    "buffers of runners",
)


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_the_table_has_the_bytes_of_all_that_is_made_between_the_models_and_the_kv_blocks(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, made = PeakMemory(), []
    new_kv_pool, num_kv_blocks = build.new_kv_pool, build.num_kv_blocks

    def begin(*args: Any) -> KVPool:
        pool = new_kv_pool(*args)
        memory.__enter__()
        return pool

    def end(*args: Any) -> int:
        memory.__exit__(None, None, None)
        made.append(memory.alive)
        return num_kv_blocks(*args)

    monkeypatch.setattr(build, "new_kv_pool", begin)
    monkeypatch.setattr(build, "num_kv_blocks", end)
    worker, description = build_worker(ExecutorConfig(**(SETTINGS | settings)))
    told = {line.what: line.bytes for line in description.budget.lines}
    held = [told.get(what, 0) for what in HELD]
    assert made == [sum(held)]
    state = [*vars(worker._sampler).values(), *vars(worker._sampler._banned).values()]
    assert told["sampling state of each row"] == sum(
        value.nbytes for value in state if isinstance(value, torch.Tensor)
    )
    seen = ("max_num_seqs", "largest decode graph", "hidden states of")
    bounds = [line.bound for line in description.budget.lines if line.what in HELD]
    assert all(bound.startswith(seen) for bound in bounds), bounds


def test_the_table_has_what_threads_keep_of_experts_on_a_cpu() -> None:
    config = ExecutorConfig(**SETTINGS)
    _worker, description = build_worker(config)
    model = Blueprint.of(config).model
    assert model.moe is not None
    per_row = model.top_k * model.moe.intermediate_size * 2 + torch.get_num_threads() * 32 * 4
    [line] = [line for line in description.budget.lines if "CPU's kernel" in line.what]
    assert line.tokens == 64
    assert line.bytes == (0 if load() is None else 64 * per_row)


@pytest.mark.parametrize(
    "way", ["plain", "eagle tree", "layers drawn", "frozen KV", "without graphs"]
)
def test_recorded_passes_take_no_more_than_the_table_says(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, capture = GraphMemory(), EagerBackend.capture

    def capture_and_run(backend: EagerBackend, key: ShapeKey, run: Work) -> None:
        capture(backend, key, run)
        backend.replay(key)

    monkeypatch.setattr(devices, "GraphMemory", lambda: memory)
    monkeypatch.setattr(EagerBackend, "capture", capture_and_run)
    monkeypatch.setattr(EagerBackend, "outlives_group", False)  # nothing is put off
    _worker, description = build_worker(ExecutorConfig(**(SETTINGS | WAYS.get(way, {}))))
    told = {line.what: line.bytes for line in description.budget.lines}.get("recorded passes", 0)
    taken = sum(block.nbytes() for block in memory._blocks.values())
    assert taken <= told
    assert bool(taken) == bool(told)


class CpuWithFlashInfer(Cpu):
    """Makes attention as a GPU's executor does, from a library that computes on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = FlashInferOps(enable_pdl=False)
        self._config = ExecutorConfig(**SETTINGS | {"moe_runner": "grouped"})
        self._workspace = AttentionWorkspace("cpu")

    kernels: Any = Cuda.kernels
    attention: Any = Cuda.attention
    attention_lines: Any = Cuda.attention_lines


@pytest.fixture
def device(library: CpuFlashInfer, monkeypatch: pytest.MonkeyPatch) -> CpuWithFlashInfer:
    device = CpuWithFlashInfer()
    monkeypatch.setattr(build, "open_device", lambda *_: device)
    return device


@pytest.mark.parametrize(
    ("name", "num_attentions"),
    # The target's, a draft-extend's, and one for each draft but the first.
    [("eagle tree", 4), ("eagle drawn", 4), ("layers", 2), ("frozen KV", 2)],
)
def test_all_attention_of_a_worker_shares_a_workspace_which_the_table_has(
    name: str, num_attentions: int, library: CpuFlashInfer, device: CpuWithFlashInfer
) -> None:
    """A workspace of its own for each took 128 MiB as often, and no line of the table said so."""
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
    for line, event in zip(description.budget.lines, logged, strict=True):
        assert (line.what, line.bound) == (event["what"], event["bound"])
        assert (line.tokens, line.bytes) == (event["tokens"], event["bytes"])


def test_the_work_on_verified_probabilities_is_counted() -> None:
    num_rows, vocab_size = 8, 4000
    sampler = Sampler(num_rows, vocab_size, "cpu")
    of_each = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01}  # every filter runs
    columns = {name: [value] * num_rows for name, value in of_each.items()}
    sampler.start(starts(vocab_size, num_rows, rows=range(num_rows), **columns))
    rows, logits = np.arange(num_rows), torch.randn(num_rows, vocab_size)
    with torch.inference_mode(), PeakMemory() as memory:
        p = sampler.probabilities(logits, rows, rows + 5, torch.from_numpy(rows))
    assert p.shape == logits.shape
    assert round(memory.bytes / p.nbytes) == PROBABILITY_COPIES  # but for an entry or two per row
    with torch.inference_mode(), PeakMemory() as memory:
        sampler.pick(logits, rows, rows + 5, torch.from_numpy(rows))
    assert memory.bytes < PROBABILITY_COPIES * p.nbytes


def later_bytes(
    elements_per_row: Callable[..., int] | None = None, **settings: Any
) -> dict[str, int]:
    """Returns what comes after the KV pool on a GPU, where 64 rows at most reach the experts."""
    blueprint = Blueprint.of(ExecutorConfig(**(SETTINGS | settings)))
    dispatcher: Any = SimpleNamespace(max_rows=64)
    kernels: Any = SimpleNamespace(elements_per_row=elements_per_row)
    num_models = 1 if blueprint.draft is None else 2
    lines = later_lines(blueprint, torch.device("cuda"), dispatcher, [kernels] * num_models)
    return {line.what: line.bytes for line in lines}


def cuda_blocks(free: int, later: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how many blocks there would be on a GPU, of 100 bytes each.

    Half of what comes later is the all-to-all's.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
    pool: Any = SimpleNamespace(
        device=torch.device("cuda"), all_bytes_per_block=100, num_spill_blocks=0
    )
    blueprint = Blueprint.of(ExecutorConfig(**(SETTINGS | {"num_kv_blocks": None})))
    dispatcher: Any = SimpleNamespace(workspace_bytes=later // 2)
    return num_kv_blocks(blueprint, pool, dispatcher, [BudgetLine("", "", 0, later // 2)])


def test_the_kv_pool_leaves_memory_for_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The all-to-all's workspace did not fit at the first Join: nobody had left it any memory."""
    free = 1 << 30
    assert cuda_blocks(free, 1 << 28, monkeypatch) == int((free - (1 << 28)) * CUDA_KV_SHARE) // 100
    problem = r"kv_cache_bytes=0: a block takes .*; 268435456 are .*: lower max_num_batched_tokens"
    with pytest.raises(ValueError, match=problem):
        cuda_blocks(1000, 1 << 28, monkeypatch)


@pytest.mark.parametrize(
    ("sizes", "num_communicators"),
    [
        ({}, 0),
        ({"dp_size": 2}, 1),
        ({"attn_tp_size": 2}, 1),
        ({"dp_size": 2, "attn_tp_size": 2}, 2),
    ],
)
def test_the_table_has_the_buffers_of_each_communicator_and_of_cublas(
    sizes: dict[str, int], num_communicators: int
) -> None:
    later = later_bytes(**sizes)
    assert later["NCCL, an allowance"] == num_communicators * NCCL_BYTES
    assert later["cuBLAS, of two streams"] == 2 * CUBLAS_BYTES


def test_the_table_has_logits_of_passes_and_what_sampling_makes_of_them() -> None:
    model = Blueprint.of(ExecutorConfig(**SETTINGS)).model
    row_bytes, plain, drawn = (
        4 * model.vocab_size,
        later_bytes(),
        later_bytes(**WAYS["eagle drawn"], max_num_logits=6),
    )
    assert plain["logits of passes"] == 2 * (6 + 256) * row_bytes
    assert later_bytes(**NO_GRAPHS)["logits of passes"] == (6 + 256) * row_bytes
    sampled = later_bytes(max_num_logits=6)
    assert sampled["work on probabilities of tokens"] == 6 * PROBABILITY_COPIES * row_bytes
    of_verified = drawn["work on probabilities of verified tokens"]
    assert of_verified == 6 * (4 * PROBABILITY_COPIES + 3) * row_bytes
    matched = later_bytes(**WAYS["eagle"], max_num_logits=6)  # picks a token behind each draft
    assert matched["work on probabilities of tokens"] == 6 * 4 * PROBABILITY_COPIES * row_bytes


def test_the_table_has_what_scoring_a_long_prompt_makes_of_its_logits() -> None:
    """It comes behind sampling, whose work is the larger one unless many tokens are scored at once."""
    blueprint = Blueprint.of(ExecutorConfig(**SETTINGS))
    row_bytes = 4 * blueprint.model.vocab_size
    later = later_bytes(max_num_logits=64)  # 6 sequences
    assert later["work on log probabilities"] == 64 * SCORE_COPIES * row_bytes
    assert "work on probabilities of tokens" not in later


@pytest.mark.parametrize(("prefill_graphs", "num_passes"), [("off", 1), ("breakable", 2)])
def test_the_table_has_what_experts_hold_in_a_pass(prefill_graphs: str, num_passes: int) -> None:
    """Prompts' rows of 64 executors, each for 8 experts, took 8 GiB within the library, on no line."""
    model = Blueprint.of(ExecutorConfig(**SETTINGS)).model
    later = later_bytes(CuteDslMoERunner.elements_per_row, prefill_graphs=prefill_graphs)
    num_bytes = num_passes * 64 * (2 + model.top_k) * model.hidden_size * 2
    assert later["work of experts"] == num_bytes


def test_what_grouped_products_hold_is_counted() -> None:
    rows, top_k, hidden, columns = 64, 3, 64, 48
    w13, w2 = torch.randn(4, 2 * columns, hidden), torch.randn(4, hidden, columns)
    runner = GroupedMMRunner(w13, w2, TorchOperators([]).silu_and_mul)
    ids, weights = torch.randint(5, (rows, top_k), dtype=torch.int32), torch.rand(rows, top_k)
    dispatched = Dispatched(torch.randn(rows, hidden), ids, weights)
    with torch.inference_mode(), PeakMemory() as memory:
        runner.run(dispatched)
    counted = 4 * rows * runner.elements_per_row(top_k, hidden, columns)
    assert 0 <= memory.bytes - counted <= 48 * ids.numel() + 64  # ids, sorted and back


@pytest.mark.parametrize("moe_runner", ["cutlass", "cutedsl"])
def test_the_table_has_the_scratch_of_experts_and_the_workspace_of_the_all_to_all(
    moe_runner: str, device: CpuWithFlashInfer
) -> None:
    """It had rows of hidden states where CuTe-DSL has padded rows of F, and nothing of CUTLASS'."""
    settings = {"dp_size": 2, "moe_a2a": "flashinfer", "moe_runner": moe_runner}
    device._config = ExecutorConfig(**(SETTINGS | settings))
    _worker, description = build_worker(device._config)
    budget = Blueprint.of(device._config).budget
    told = {line.what: line for line in description.budget.lines}
    workspace = told["all-to-all workspace, tokens of an EP rank"]
    assert (workspace.tokens, workspace.bytes) == (6, budget.a2a_workspace_bytes)
    assert workspace.bound == "max_num_seqs * num_tokens_per_bs"
    scratch = told["scratch of experts, for the rows of a pass"]
    assert scratch.tokens == budget.max_gathered_tokens == 128
    rows = {"cutlass": 128 * 2, "cutedsl": scratch_rows(128, 2, 4) * 128 * 2}[moe_runner]
    assert scratch.bytes == rows


@pytest.mark.parametrize("rank", [0, 2])
def test_the_table_has_the_slots_of_experts_and_the_ghosts_among_them(rank: int) -> None:
    worker, description = build_worker(ExecutorConfig(dp_rank=rank, dp_size=3, **SETTINGS))
    [line] = [line for line in description.budget.lines if line.what.startswith("expert slots")]
    ghosts = "; of each layer 1 without an expert" if rank == 2 else ""
    assert line.bound == f"num_experts=8 / ep_size=3{ghosts}"
    model = Blueprint.of(ExecutorConfig(**SETTINGS)).model
    assert model.moe is not None
    expert_bytes = 3 * model.hidden_size * model.moe.intermediate_size * 2
    assert (line.tokens, line.bytes) == (3, 3 * expert_bytes * len(model.layers))
    worker.leave()
