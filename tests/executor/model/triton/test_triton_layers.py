"""Models and attention with Triton's kernels compute what they do without, in graphs, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.batch.kv_pool import KVPool
from executor.budget.capture_sizes import GraphSizes
from executor.build.devices import AttentionGraphs
from executor.model.decoder.sizes import attention_of
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import Attention
from executor.model.spec import ModelSpec
from executor.model.triton.operators import TritonOps
from executor.parallel.layout import DpLayout
from tests.executor.model.layers.attention_cases import Case
from tests.executor.support.checkpoints import save_latent_model, save_qwen3_moe
from tests.executor.support.flashinfer.attention import flashinfer_attention
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import RunnerCase, assert_close, captured, registry_of


class Recorded:
    """Kernels whose launches a backend records."""

    def __init__(self, kernels: Any, backend: RecordingBackend) -> None:
        self._kernels, self._backend = kernels, backend

    def __getattr__(self, name: str) -> Any:
        kernel, backend = getattr(self._kernels, name), self._backend

        class Launched:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return backend.kernel(kernel[grid])

        return Launched()


@pytest.fixture(scope="module", params=["heads", "latents"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small model with heads of keys, or with latents."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "heads":
        save_qwen3_moe(path, "wide")
    else:
        save_latent_model(path, "deepseek_v3", num_hidden_layers=2)
    return path


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_replay_with_triton_computes_what_the_model_does_eagerly_without(
    triton: TritonOps,
    library: CpuFlashInfer,
    ops: FlashInferOps,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, rng = RecordingBackend(), np.random.default_rng(0)
    library.launch = backend.kernel
    monkeypatch.setattr(triton, "_kernels", Recorded(triton._kernels, backend))

    def new_attention(config: ModelSpec, pool: KVPool) -> Attention:
        graphs = [AttentionGraphs((2,))]
        num_heads, scale = attention_of(config).num_heads, attention_of(config).scale
        return flashinfer_attention(num_heads, pool, graphs, scale=scale, triton=triton)

    plain = RunnerCase(checkpoint)
    case = RunnerCase(checkpoint, new_attention, is_capturable=True, ops=ops, triton=triton)
    runner = captured(case.build(GraphSizes(decode=(2,)), lambda: backend))
    registry_of(runner).poison_tails()
    for num_seqs in (1, 2):
        batch = case.decode_batch(rng, 2, num_seqs=num_seqs)
        assert_close(case.run(runner, batch), plain.run_eagerly(batch), 1e-4)


def test_layers_with_windows_and_sinks_attend_as_without(
    triton: TritonOps, library: CpuFlashInfer
) -> None:
    case = Case([(25, 1), (3, 1)], layout=DpLayout.single(2, 2), window=5, sinks=True)
    attention = case.flashinfer(triton=triton)
    attention.init_cuda_graph_state((2,))
    case.check(case.run(attention))
