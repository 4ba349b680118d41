"""If this fails, slots filled anew compute something else than experts loaded at start, or more is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor.errors import CheckpointError
from executor.model.decoder.kernels import Kernels, Peers, cpu_kernels
from executor.model.families import load_model, read_spec
from executor.model.moe.experts import ExpertShare, ExpertSlots
from executor.model.weights import Loader
from executor.model.weights.checkpoint import Checkpoint, Stored
from executor.model.weights.kept import DEQUANTISED, IN_INT8, Keeping
from executor.parallel.communicators import DpCommunicator
from executor.parallel.layout import Place, Topology
from protos.executor.placement import GHOST
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.model.moe.moe_cases import CLAMPED, PREFIX, D, biases, checkpoint, routed
from tests.executor.support.checkpoints import save_family, save_latent_model
from tests.executor.support.experts import new_spec

FF = 24  # no multiple of what kernels take, so that columns are padded
SKIPS: dict[str, Any] = {"skipped": lambda name: True}


def kernels(dtype: torch.dtype, keeping: Keeping) -> Kernels:
    return cpu_kernels(spec(dtype), dtype=dtype, keeping=keeping)


def spec(dtype: torch.dtype) -> Any:
    return new_spec(hidden_size=D, num_experts=8, top_k=3, intermediate_size=FF, dtype=dtype)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = checkpoint(torch.bfloat16, 8) | biases(torch.bfloat16, 8)
    cropped = {
        name: (x[:FF] if "down" not in name else x[:, :FF] if x.ndim == 2 else x).contiguous()
        for name, x in tensors.items()
    }
    save_file(cropped, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of the tensors that are read."""
    names: list[str] = []
    get = Checkpoint.__getitem__

    def noted(self: Checkpoint, name: str) -> Stored:
        stored = get(self, name)

        def read(index: Any) -> torch.Tensor:
            names.append(name)
            return stored.read(index)

        return stored.dequantised(stored.shape, read)

    monkeypatch.setattr(Checkpoint, "__getitem__", noted)
    return names


def new_slots(dtype: torch.dtype, keeping: Keeping, rank: int = 0) -> ExpertSlots:
    moe = spec(dtype).moe
    moe = type(moe)(**{f: getattr(moe, f) for f in moe.__slots__} | BIASED)
    share = ExpertShare.of(Topology(dp_rank=rank, dp_size=3), moe)
    return kernels(dtype, keeping).new_experts(moe, share)


BIASED = {"activation": CLAMPED, "bias": True}
WAYS = {
    "float32": (torch.float32, DEQUANTISED),
    "bfloat16": (torch.bfloat16, DEQUANTISED),
    "int8": (torch.bfloat16, IN_INT8),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_slots_filled_anew_equal_those_filled_at_start_and_read_nothing_else(
    way: tuple[torch.dtype, Keeping], saved: Path, reads: list[str]
) -> None:
    if way[1] is IN_INT8 and kernels(*way).library is None:
        pytest.skip("there are no kernels for int8 here")
    loader, layer = Loader(saved), new_slots(*way)
    loader.fill(layer.weight_groups(PREFIX), **SKIPS)
    assert layer.resident == [0, 1, 2]
    layer.runner.run(routed(9, 0, 4, way[0]))
    reads.clear()
    loader.fill(layer.missing_groups(PREFIX, (6, 1, 7)), **SKIPS)
    assert layer.resident == [6, 1, 7]
    assert {int(name.split(".")[1]) for name in reads} == {6, 7}
    loader.fill(layer.missing_groups(PREFIX, (6, 7, GHOST)), **SKIPS)
    loader.close()
    assert layer.resident == [6, 7, 7], "a ghost may be anything"
    other = new_slots(*way, rank=2)
    with_others = Loader(saved)
    with_others.fill(other.weight_groups(PREFIX), **SKIPS)
    with_others.close()
    assert other.resident == [6, 7, GHOST]
    rows = routed(11, 0, 3, way[0])
    rows.topk_ids_RK[rows.topk_ids_RK == 2] = 3  # which is elsewhere
    assert torch.equal(layer.runner.run(rows), other.runner.run(rows))
    reads.clear()
    assert layer.missing_groups(PREFIX, (6, 7, GHOST)) == []
    assert reads == []


def test_a_slot_whose_expert_did_not_arrive_holds_none_and_can_be_filled_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = WAYS["bfloat16"]
    loader, layer, expected = Loader(saved), new_slots(*way), new_slots(*way, rank=1)
    loader.fill(layer.weight_groups(PREFIX), **SKIPS)
    loader.fill(expected.weight_groups(PREFIX), **SKIPS)
    with monkeypatch.context() as patched:
        arrange = type(layer.runner).arrange

        def fail(w13: torch.Tensor) -> torch.Tensor:
            arrange(w13)
            raise OSError("the disk is gone")

        patched.setattr(type(layer.runner), "arrange", staticmethod(fail))
        with pytest.raises(OSError, match="the disk"):
            loader.fill(layer.missing_groups(PREFIX, (3, 4, 2)), **SKIPS)
    assert layer.resident == [GHOST, GHOST, 2]
    loader.fill(layer.missing_groups(PREFIX, (3, 4, 5)), **SKIPS)
    loader.close()
    rows = routed(11, 0, 4, way[0])
    assert torch.equal(layer.runner.run(rows), expected.runner.run(rows))


def test_an_expert_that_the_checkpoint_lacks_is_named(saved: Path) -> None:
    loader, layer = Loader(saved), new_slots(*WAYS["float32"])
    with pytest.raises(CheckpointError, match=r"lacks experts\.8\."):
        loader.fill(layer.missing_groups(PREFIX, (8, GHOST, GHOST)), **SKIPS)
    loader.close()
    assert layer.resident == [GHOST] * 3


SAVES: dict[str, Any] = {
    "mixtral": save_family,
    "gpt_oss": save_model,
    "deepseek_v3": save_latent_model,
}


@pytest.mark.parametrize("family", SAVES)
def test_a_model_takes_over_the_experts_of_another_executor(family: str, tmp_path: Path) -> None:
    """By the names, stacks and turns of its family."""
    SAVES[family](tmp_path, family)
    model_spec = read_spec(tmp_path)
    dp_size = model_spec.num_experts

    def loaded(rank: int) -> Any:
        communicator = DpCommunicator(
            place=Place(Topology(dp_rank=rank, dp_size=dp_size)),
            max_tokens_per_rank=1,
            hidden_size=model_spec.hidden_size,
            dtype=torch.float32,
            top_k=model_spec.top_k,
        )
        peers = Peers.gathering(model_spec.num_experts, communicator, moe_dense_tp_size=1)
        return load_model(tmp_path, model_spec, dtype=torch.float32, peers=peers)

    model, other = loaded(0), loaded(dp_size - 1)
    loader = Loader(tmp_path, model_spec.quantization)
    loader.fill(model.missing_groups((dp_size - 1,)))
    loader.close()
    assert len(model.expert_slots) == len(other.expert_slots) > 0
    for mine, theirs in zip(model.expert_slots, other.expert_slots, strict=True):
        assert mine.resident == theirs.resident == [dp_size - 1]
        for one, two in ((mine._w13, theirs._w13), (mine._w2, theirs._w2)):
            assert torch.equal(one, two)
        for one, two in zip(mine._biases or (), theirs._biases or (), strict=True):
            assert torch.equal(one, two)
