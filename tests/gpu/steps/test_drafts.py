"""Draft models in graphs, as production builds them: with them, answers are those of plain decoding."""

import json
from math import sqrt
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from router.requests.request import SamplingParams
from tests.gpu.support.cells import asks_of, assert_solved, exam, production_cell
from tests.gpu.support.machine import IS_STAND_IN, Machine
from tests.support.paths import DEMO_DRAFTS
from tests.together.speculation.speculative_cell import Router, serve, settings_of

WAYS = [("eagle", 1), ("eagle", 2), ("mtp", 1), ("mtp", 4), ("mtp3", 1), ("frozen_kv", 1)]
WAYS.append(("frozen_kv", 4))
if IS_STAND_IN:  # tests/together/speculation has them all
    WAYS = [("eagle", 2), ("mtp3", 1)]
HEAD_DIM = 128  # that of the prebuilt kernels


def widened(name: str, folder: Path) -> Path:
    """Returns a draft of the demo's with heads of 128, which computes the same.

    A pair of numbers that turns at a frequency in a head of 64 turns at the same one at twice its
    place in a head of 128; all others are zeros. The scale of scores goes into the queries.
    """
    config = json.loads((DEMO_DRAFTS / name / "config.json").read_text())
    if config["head_dim"] == HEAD_DIM:
        return DEMO_DRAFTS / name
    half = config["head_dim"] // 2
    assert 4 * half == HEAD_DIM
    places = torch.cat((2 * torch.arange(half), HEAD_DIM // 2 + 2 * torch.arange(half)))
    tensors = load_file(DEMO_DRAFTS / name / "model.safetensors")
    for key, x in tensors.items():
        if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            rows = x.view(-1, 2 * half, x.shape[1])
            wide = rows.new_zeros(len(rows), HEAD_DIM, x.shape[1])
            wide[:, places] = rows * sqrt(2) if "q_proj" in key else rows
            tensors[key] = wide.flatten(0, 1)
        elif key.endswith("o_proj.weight"):
            columns = x.view(len(x), -1, 2 * half)
            wide = columns.new_zeros(len(x), columns.shape[1], HEAD_DIM)
            wide[..., places] = columns
            tensors[key] = wide.flatten(1)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": HEAD_DIM}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("name", "topk"), WAYS, ids=lambda value: str(value))
def test_answers_are_right_and_come_in_fewer_steps(
    machine: Machine, name: str, topk: int, tmp_path: Path
) -> None:
    problems = exam(21, 6)
    settings = settings_of(name, topk) | {"draft_model": widened(name, tmp_path / name)}
    with production_cell(machine, **settings) as cell:
        router = Router(cell)
        assert_solved(problems, serve(router, asks_of(problems)))
    assert router.tokens_per_step > 1.2


def test_drafts_that_are_drawn_are_accepted_by_chance(machine: Machine) -> None:
    sampled = SamplingParams({"temperature": 0.8, "seed": 3})
    settings = settings_of("mtp", 1) | {"draft_sampling": "rejection"}
    with production_cell(machine, **settings) as cell:
        router = Router(cell)
        answers = serve(router, asks_of(exam(22, 4), sampling=sampled))
        again = serve(Router(cell), asks_of(exam(22, 4), sampling=sampled))
    assert router.tokens_per_step > 1.2
    assert answers == again
