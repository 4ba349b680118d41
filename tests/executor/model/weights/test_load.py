"""If this fails, a broken checkpoint serves nonsense instead of an error."""

import json
import re
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.errors import CheckpointError
from executor.model.decoder.kernels import Peers
from executor.model.families import load_model, read_spec
from executor.model.weights import (
    Part,
    Source,
    WeightGroup,
    checkpoint,
    load_weights,
    tensor_names,
)
from executor.model.weights.targets import rope_rows_to_halves
from executor.parallel.communicators import DpCommunicator
from executor.parallel.layout import Place, Topology
from tests.executor.support.checkpoints import reference_logits, save_qwen3_moe
from tests.executor.support.serving import Rank

QUERY = "model.layers.0.self_attn.q_proj.weight"
EXPERT_3 = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("good")
    return path, save_qwen3_moe(path, "plain")


@pytest.fixture
def broken(good: tuple[Path, Any], tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that copies the good checkpoint with some tensors changed."""

    def copy(**changed: torch.Tensor | None) -> Path:
        shutil.copytree(good[0], tmp_path, dirs_exist_ok=True)
        tensors: dict[str, Any] = load_file(tmp_path / "model.safetensors") | changed
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        return tmp_path

    return copy


def load(path: Path, **options: Any) -> None:
    load_model(path, read_spec(path), **options)


def rank_0_of(topology: Topology, num_experts: int = 8, **dense: int) -> dict[str, Any]:
    communicator = DpCommunicator(
        place=Place(topology), max_tokens_per_rank=1, hidden_size=48, dtype=torch.float32, top_k=2
    )
    return {"peers": Peers.gathering(num_experts, communicator, **dense)}


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (QUERY, None, f"lacks {QUERY}"),
        (QUERY, torch.zeros(3, 5), r"q_proj.* in .*\[3, 5\]; .* needs \[64, 48\]"),
        (QUERY, torch.zeros(64, 48, dtype=torch.int8), "has type I8"),
        (
            QUERY.replace("weight", "bias"),
            torch.zeros(64),
            r"q_proj\.bias, for which this model has no place",
        ),
    ],
    ids=["missing", "of another shape", "of integers", "without a place"],
)
def test_a_tensor_that_does_not_fit_is_named(
    broken: Callable[..., Path], name: str, tensor: torch.Tensor | None, problem: str
):
    with pytest.raises(CheckpointError, match=problem):
        load(broken(**{name: tensor}))


def test_a_file_that_is_no_safetensors_is_named(good: tuple[Path, Any], tmp_path: Path):
    shutil.copytree(good[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        load(tmp_path)


def test_experts_of_other_ranks_are_not_read(broken: Callable[..., Path]):
    path = broken(**{EXPERT_3: torch.zeros(1)})
    load(path, **rank_0_of(Topology(dp_size=2)))
    with pytest.raises(CheckpointError, match=EXPERT_3):
        load(path)


def test_shards_load_like_one_file(good: tuple[Path, Any], tmp_path: Path):
    path, model = good
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = [5, 9, 11, 80]
    got = Rank(tmp_path).step({0: ids})[0]
    assert (got - reference_logits(model, ids)).abs().max() < 1e-4
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names b\.safetensors, which"):
        load(tmp_path)


@pytest.mark.parametrize("file", ["a", "b"])
def test_a_tensor_that_two_shards_have_is_read_from_the_one_that_the_index_names(
    tmp_path: Path, file: str
):
    for number, name in enumerate("ab"):
        tensors = {"w": torch.full((2,), float(number)), name: torch.zeros(1)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    files = {"a": "a.safetensors", "b": "b.safetensors", "w": f"{file}.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    weight = torch.empty(2)
    load_weights(tmp_path, [WeightGroup({"w": weight})], skipped=lambda name: True)
    assert weight.tolist() == [float(file == "b")] * 2


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/tmp/a.safetensors", "b/a.safetensors", "..\\a.safetensors", "a.bin", 7],
)
def test_a_shard_of_another_folder_is_not_opened(tmp_path: Path, name: object):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match=rf"names {re.escape(repr(name))}: .* same folder"):
        tensor_names(folder)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"weight_map": {"w": []}}', '{"weight_map": 3}'])
def test_an_index_that_makes_no_sense_is_named(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json has no readable weight_map"):
        tensor_names(tmp_path)


@pytest.mark.parametrize("size", [2**62, checkpoint.MAX_HEADER_BYTES + 1])
def test_a_header_beyond_its_bound_is_not_read(tmp_path: Path, size: int):
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .* header .* {size:,} bytes"):
        tensor_names(tmp_path)


def test_a_checkpoint_has_so_many_bytes_of_headers_and_tensors_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {f"{file}.safetensors": file for file in "ab"}
    for file, tensor in files.items():
        save_file({tensor: torch.zeros(1)}, tmp_path / file)
    index = {"weight_map": {tensor: file for file, tensor in files.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensor_names(tmp_path) == {"a", "b"}
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 1)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: .* more than 1 tensors"):
        tensor_names(tmp_path)
    monkeypatch.setattr(checkpoint, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"b\.safetensors .* those of all files may have 100"):
        tensor_names(tmp_path)


def test_kimi_in_nvfp4_is_within_the_bounds():
    """Of 384 experts in each of 60 layers, with four tensors for each of three matrices."""
    module = "language_model.model.layers.{}.mlp.experts.{}.{}_proj."
    tensors = {
        "weight": {"dtype": "U8", "shape": [2048, 3584]},
        "weight_scale": {"dtype": "F8_E4M3", "shape": [2048, 448]},
        "weight_scale_2": {"dtype": "F32", "shape": []},
        "input_scale": {"dtype": "F32", "shape": []},
    }
    at = {"data_offsets": [4 << 30, 4 << 30]}
    layer = [
        json.dumps({module.format(10, expert, part) + name: said | at}, separators=(",", ":"))
        for expert, part, (name, said) in product(
            range(384), ("gate", "up", "down"), tensors.items()
        )
    ]
    assert 60 * len(layer) < 0.8 * checkpoint.MAX_TENSORS
    assert 60 * len("".join(layer)) < 0.8 * checkpoint.MAX_HEADER_BYTES


def test_progress_counts_every_tensor_that_is_needed(good: tuple[Path, Any]):
    seen: list[tuple[int, int]] = []
    load(good[0], on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    assert len(seen) == len(load_file(good[0] / "model.safetensors"))


def test_only_the_part_that_a_target_stands_for_is_read(tmp_path: Path):
    saved = torch.arange(24.0).view(4, 6)
    save_file({"w": saved}, tmp_path / "model.safetensors")
    rows, columns = torch.zeros(2, 6, dtype=torch.bfloat16), torch.zeros(4, 3)
    load_weights(tmp_path, [WeightGroup({"w": Part(rows, 0, range(1, 3), 4)})])
    load_weights(tmp_path, [WeightGroup({"w": Part(columns, 1, range(3, 6), 6)})])
    assert rows.tolist() == saved[1:3].tolist()
    assert columns.tolist() == saved[:, 3:].tolist()
    nothing = torch.zeros(0, 6)
    load_weights(tmp_path, [WeightGroup({"w": Part(nothing, 0, range(4, 4), 4)})])


@pytest.mark.parametrize(("dim", "size"), [(0, 5), (1, 6)])
def test_a_tensor_of_which_a_part_is_wanted_must_have_the_whole_shape(
    tmp_path: Path, dim: int, size: int
):
    save_file({"w": torch.zeros(4, 6)}, tmp_path / "model.safetensors")
    part = Part(torch.zeros(2, 2), dim, range(2), size)
    with pytest.raises(CheckpointError, match=r"w in .* has shape \[4, 6\]; this model needs"):
        load_weights(tmp_path, [WeightGroup({"w": part})])


def test_an_executor_that_shares_attention_needs_a_communicator_for_it():
    with pytest.raises(ValueError, match=r"joins 1 executors, .* attn_tp_size=2"):
        rank_0_of(Topology(attn_tp_size=2))


def test_a_dense_mlp_that_cannot_be_split_names_the_setting_that_keeps_it_whole(tmp_path: Path):
    save_qwen3_moe(tmp_path, "mlp_only", num_experts=3)
    three = Topology(dp_size=3)
    with pytest.raises(ValueError, match=r"intermediate_size=40 .*, or set moe_dense_tp_size=1"):
        load(tmp_path, **rank_0_of(three, 3))
    load(tmp_path, **rank_0_of(three, 3, moe_dense_tp_size=1))


E, D, F = 3, 8, 6


@pytest.fixture
def stacked(tmp_path: Path) -> torch.Tensor:
    """Weights of E experts, inputs first, gate and up alternating: [E, D, 2F]."""
    saved = torch.arange(float(E * D * 2 * F)).view(E, D, 2 * F)
    save_file({"w": saved, "norm": torch.arange(4.0)}, tmp_path / "model.safetensors")
    return saved


@pytest.mark.parametrize("up", [0, 1])
@pytest.mark.parametrize("cut", [range(F), range(2, 5), range(2, 2)])
def test_a_matrix_is_read_from_a_stack_in_which_two_alternate(
    stacked: torch.Tensor, tmp_path: Path, up: int, cut: range
):
    source = Source(name="w", index=1, count=E, transposed=True, first=up, every=2)
    target = torch.full((len(cut), D), -1.0)
    group = WeightGroup({source: Part(target, 0, cut, F)})
    load_weights(tmp_path, [group], skipped=lambda name: name == "norm")
    torch.testing.assert_close(target, stacked[1].T[up::2][cut.start : cut.stop])


@pytest.mark.parametrize(
    "wrong", [{"count": E + 1}, {"every": 1}, {"transposed": False}, {"index": None}]
)
def test_a_stack_of_another_shape_is_named(
    stacked: torch.Tensor, tmp_path: Path, wrong: dict[str, Any]
):
    how = {"index": 1, "count": E, "transposed": True, "every": 2} | wrong
    groups = [WeightGroup({Source(name="w", **how): torch.zeros(F, D, device="meta")})]
    with pytest.raises(CheckpointError, match=r"w in .* has shape \[3, 8, 12\]; this model needs"):
        load_weights(tmp_path, groups, skipped=lambda _: True)


def test_one_row_fills_those_of_all_heads(stacked: torch.Tensor, tmp_path: Path):
    heads = torch.zeros(3, 4)
    groups = [WeightGroup({Source(name="norm", spread=True): heads})]
    load_weights(tmp_path, groups, skipped=lambda _: True)
    assert heads.tolist() == [[0, 1, 2, 3]] * 3


def test_rope_rows_of_some_heads_go_to_halves(tmp_path: Path):
    """Of each head of 5 rows, 4 turn, of which the even ones come first."""
    saved = torch.arange(30.0).view(15, 2)
    save_file({"q": saved}, tmp_path / "model.safetensors")
    target = torch.zeros(10, 2)
    source = Source(name="q", turn=rope_rows_to_halves(5, 4))
    load_weights(tmp_path, [WeightGroup({source: Part(target, 0, range(5, 15), 15)})])
    assert target[:, 0].div(2).tolist() == [5, 6, 8, 7, 9, 10, 11, 13, 12, 14]


def test_groups_are_finished_in_order_and_full(tmp_path: Path):
    """Threads read ahead of the group that is finished, at most three; some finish reads another's."""
    names = [f"w{i}" for i in range(20)]
    save_file({name: torch.ones(50, 50) for name in names}, tmp_path / "model.safetensors")
    targets = {name: torch.zeros(50, 50, dtype=torch.bfloat16) for name in names}
    begun: list[str] = []
    finished: list[str] = []

    def finish(name: str) -> None:
        assert begun == names[: len(finished) + 4]
        assert targets[name].all()
        assert not any(targets[later].any() for later in names[len(finished) + 4 :])
        finished.append(name)

    groups = [
        WeightGroup({name: targets[name]}, partial(finish, name), partial(begun.append, name))
        for name in names
    ]
    threads = torch.get_num_threads()
    load_weights(tmp_path, groups)
    assert finished == names
    assert torch.get_num_threads() == threads


def test_a_group_that_is_finished_goes_while_others_are_read(tmp_path: Path) -> None:
    count = 12
    save_file({f"w{i}": torch.ones(2) for i in range(count)}, tmp_path / "model.safetensors")
    targets: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    seen: list[int] = []

    def new_group(i: int) -> WeightGroup:
        target = torch.zeros(2)
        targets.add(target)
        return WeightGroup({f"w{i}": target}, finish=lambda: seen.append(len(targets)))

    load_weights(tmp_path, [new_group(i) for i in range(count)])
    assert seen[-1] <= 2 < len(seen) == count
