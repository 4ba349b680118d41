"""If these fail, a DeepSeek answers otherwise in a graph, or beside others, than by itself."""

from pathlib import Path

import numpy as np
import pytest
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.build.devices import AttentionGraphs
from executor.graph.backend import EagerBackend
from executor.model.decoder.sizes import attention_of
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.spec import ModelSpec
from executor.runners import Runner
from tests.executor.support.checkpoints import save_latent_model
from tests.executor.support.flashinfer.attention import flashinfer_attention
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer
from tests.executor.support.ranks.latent_ranks import serve_latents
from tests.executor.support.ranks.ranks import run_ranks
from tests.executor.support.ranks.runner_ranks import RanksStep
from tests.executor.support.recording.recording_backend import RecordingBackend
from tests.executor.support.runner_cases import (
    DECODE_SIZES,
    PREFILL_GRAPHS,
    RunnerCase,
    assert_close,
    registry_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WAYS = [("decode", 1), ("decode", 3), *[(kind, 1) for kind in PREFILL_GRAPHS]]


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small DeepSeek-V2 whose first layers are dense, and too wide to be split by eight."""
    path = tmp_path_factory.mktemp("latents")
    save_latent_model(
        path,
        "deepseek_v2",
        num_attention_heads=8,
        first_k_dense_replace=2,
        intermediate_size=90,
        n_group=2,
        topk_group=1,
    )
    return path


def runner_of(case: RunnerCase, kind: str, width: int, backend: EagerBackend) -> Runner:
    runner = case.decode(backend, width) if kind == "decode" else case.prefill(kind, backend)
    registry_of(runner).poison_tails()
    return runner


def batches_of(case: RunnerCase, kind: str, width: int) -> list[ForwardBatch]:
    rng = np.random.default_rng(width)
    if kind != "decode":
        return [case.prefill_batch(rng, size) for size in (4, 32, 64)]
    few = case.decode_batch(rng, 8, num_seqs=0, width=width)
    return [few, *(case.decode_batch(rng, size, width=width) for size in (8, 1, 4))]


@pytest.mark.parametrize(("kind", "width"), WAYS)
def test_every_runner_gives_what_an_eager_pass_gives_whatever_the_padding_holds(
    kind: str, width: int, latents: Path
) -> None:
    case = RunnerCase(latents)
    runner = runner_of(case, kind, width, EagerBackend())
    for batch in batches_of(case, kind, width):
        assert_close(case.run(runner, batch), case.run_eagerly(batch), 1e-4)


@pytest.mark.parametrize(("kind", "width"), WAYS)
def test_recorded_graphs_on_flashinfer_replay_each_their_own_batch(
    kind: str, width: int, latents: Path, library: CpuFlashInfer
) -> None:
    def attention(config: ModelSpec, pool: KVPool) -> FlashInferAttention:
        of_model = attention_of(config)
        graphs = [AttentionGraphs(DECODE_SIZES, width)] if kind == "decode" else []
        return flashinfer_attention(of_model.num_heads, pool, graphs, scale=of_model.scale)

    backend = RecordingBackend()
    library.launch = backend.kernel
    plain, case = RunnerCase(latents), RunnerCase(latents, attention, is_capturable=True)
    runner = runner_of(case, kind, width, backend)
    for batch in batches_of(case, kind, width)[1:]:
        assert_close(case.run(runner, batch), plain.run_eagerly(batch), 1e-4)


@pytest.mark.parametrize(
    ("shape", "prefill_graphs"), [((1, 8), "piecewise"), ((2, 2), "breakable")], ids=["1x8", "2x2"]
)
def test_executors_that_share_a_model_with_dense_first_layers_answer_like_one(
    shape: tuple[int, int], prefill_graphs: str, latents: Path
) -> None:
    """Piecewise prefill graphs with dense MLPs whole on each of eight executors crashed elsewhere."""
    chunks, decodes, more = ([5, 1, 9], [3, 1]), ([1] * 7, [1] * 3), ([2, 2], [9, 1])
    steps = [
        RanksStep(num_tokens[: shape[0]], graph_size, has_extend)
        for num_tokens, graph_size, has_extend in (
            (chunks, 16, True),
            (decodes, 8, False),
            (more, None, True),
        )
    ]
    alone = RunnerCase(latents)
    outcomes = run_ranks(serve_latents, shape[0] * shape[1], latents, shape, prefill_graphs, steps)
    for rank, of_rank in enumerate(outcomes):
        for step, got in zip(steps, of_rank, strict=True):
            expected = alone.run_eagerly(step.batch(alone, rank // shape[1]))
            assert_close([torch.from_numpy(x) for x in got], expected, 1e-4)
