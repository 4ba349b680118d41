"""If this fails, an executor answers otherwise for the tile that its CPU runs, or without kernels."""

from pathlib import Path

import pytest
import torch

from executor.model.cpu_kernels import library
from tests.executor.model.cpu_kernels.kernel_cases import num_threads
from tests.executor.support.checkpoints import VOCAB_SIZE, reference_logits, save_qwen3_moe
from tests.executor.support.serving import Rank
from tests.support.paths import DEMO_MODEL_MLA

PROMPT = torch.randint(3, VOCAB_SIZE, (37,), generator=torch.Generator().manual_seed(0)).tolist()
OFF = 0.15  # logits have a standard deviation of 1; bfloat16 keeps 8 bits, through two layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """Returns a model in bfloat16 that all kernels take, and its logits in float32.

    Every token goes to all experts: rounding may choose others, whose results are far off.
    """
    path = tmp_path_factory.mktemp("model")
    sizes = {"moe_intermediate_size": 32, "head_dim": 32, "num_experts_per_tok": 4}
    model = save_qwen3_moe(path, "tied", dtype=torch.bfloat16, **sizes)
    return path, reference_logits(model.float(), PROMPT)


@pytest.mark.parametrize("choice", [*library.TILES, "off"])
def test_every_tile_and_plain_pytorch_give_the_same_logits(
    checkpoint: tuple[Path, torch.Tensor], choice: str, monkeypatch: pytest.MonkeyPatch
):
    path, expected = checkpoint
    monkeypatch.setenv(library.CHOICE, choice)
    if choice != "off" and library.load() is None:
        pytest.skip(f"{choice} does not run here")
    logits = Rank(path).step({0: PROMPT})[0]
    assert (logits - expected).abs().max() < OFF * expected.std()


@pytest.mark.parametrize("is_latent", [False, True], ids=["heads", "latents"])
@pytest.mark.parametrize("choice", library.TILES)
def test_logits_have_the_same_bits_alone_in_a_batch_in_chunks_and_decoded(
    checkpoint: tuple[Path, torch.Tensor],
    choice: str,
    is_latent: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    path = DEMO_MODEL_MLA if is_latent else checkpoint[0]
    monkeypatch.setenv(library.CHOICE, choice)
    if library.load() is None:
        pytest.skip(f"{choice} does not run here")
    alone = Rank(path, dtype=torch.bfloat16).step({0: PROMPT})[0]
    with num_threads(2):
        assert torch.equal(Rank(path, dtype=torch.bfloat16).step({0: PROMPT})[0], alone)

    others = {0: PROMPT[::-1], 1: PROMPT[:1], 3: PROMPT[5:30], 5: PROMPT[3:]}
    assert torch.equal(Rank(path, dtype=torch.bfloat16).step(others | {2: PROMPT})[2], alone)

    rank, parts = Rank(path, dtype=torch.bfloat16), []
    for start, stop in [(0, 13), (13, 14), (14, 18), (18, 19), (19, 37)]:
        beside = {0: others[0][start : start + 1]}
        parts.append(rank.step(beside | {4: PROMPT[start:stop]})[4])
    assert torch.equal(torch.cat(parts), alone)
