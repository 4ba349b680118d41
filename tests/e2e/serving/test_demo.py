"""Demo: all its answers are right, and it fails if one is wrong."""

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.local import flags
from deploy.local.demo import (
    MAX_ANSWER_TOKENS,
    NUM_REQUESTS,
    SEED,
    Answer,
    draw_requests,
    main,
    print_differences,
)
from deploy.local.demo_tasks import STOP, token_ids
from deploy.local.launch import DEMO_MODEL
from deploy.local.processes import ROOT
from executor.__main__ import main as executor_main
from tests.support.paths import DEMO_MODEL_MLA

BATCH_SIZE = 50
PAD_ID, STOP_ID = 0, 13


@torch.inference_mode()
def test_the_demos_problems_are_ones_that_transformers_answers_right():
    """Of each, the likeliest tokens behind the prompt and the answer so far are the answer's next."""
    from transformers import AutoModelForCausalLM  # seconds

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    requests = sorted(draw_requests(SEED, NUM_REQUESTS), key=lambda r: len(r.text))
    for start in range(0, len(requests), BATCH_SIZE):
        batch = requests[start : start + BATCH_SIZE]
        texts = [token_ids(request.text + request.problem.answer + STOP) for request in batch]
        width = max(map(len, texts))
        ids = torch.tensor([text + [PAD_ID] * (width - len(text)) for text in texts])
        likeliest = model(ids, use_cache=False).logits.argmax(-1)
        for row, request, text in zip(likeliest.tolist(), batch, texts, strict=True):
            prompt = len(token_ids(request.text))
            assert len(text) - prompt <= MAX_ANSWER_TOKENS
            assert row[prompt - 1 : len(text) - 1] == text[prompt:], request.problem


async def run_demo(*args: str) -> tuple[int | None, str]:
    """Returns the demo's exit code and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.local.demo", *args),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_the_demo_exits_with_0_when_all_answers_are_right():
    exit_code, output = await run_demo("--requests", "40")

    assert exit_code == 0, output
    assert "40 of 40 right. All processes have ended." in output


def test_the_demo_shares_the_model_as_told_and_compares_with_one_executor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With processes that are forked."""
    args = (
        *("--model", str(DEMO_MODEL_MLA), "--requests", "12", "--compare"),
        *("--dp-size", "1", "--attn-tp-size", "2"),
        *("--moe-a2a", "torch", "--moe-a2a-extend", "all-to-all"),
    )
    monkeypatch.setattr(sys, "argv", ["demo", *args])

    assert main() == 0
    output = capsys.readouterr().out
    assert "Starting 2 executors (DP 1 x attention TP 2) and a router" in output
    assert "12 of 12 token for token as a single executor answers them" in output


@pytest.mark.parametrize(
    ("args", "named"),
    [(["--ep-size", "0"], "need at least 1"), (["--attn-tp-size", "none"], "--attn-tp-size")],
)
def test_a_size_that_cannot_be_is_refused_before_anything_starts(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
):
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)

    with pytest.raises(SystemExit):
        parser.parse_args(args)
    assert named in capsys.readouterr().err


def test_drafts_are_refused_beside_a_model_that_they_were_not_trained_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["demo", "--model", str(tmp_path), "--speculative"])

    with pytest.raises(SystemExit):
        main()
    assert f"its drafts are of {DEMO_MODEL}, not of {tmp_path}" in capsys.readouterr().err


def test_what_is_given_goes_to_the_executors_and_nothing_else():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)

    assert flags.executor_args(parser.parse_args([])) == []
    given = ["--ep-size", "1", "--moe-a2a", "none", "--dtype", "float32"]
    assert flags.executor_args(parser.parse_args(["--dp-size", "4", *given])) == given
    known = {option for parameter in executor_main.params for option in parameter.opts}
    assert {f"--{name.replace('_', '-')}" for name in flags.NAMES} <= known


def test_a_token_that_differs_is_shown_and_fails_the_demo(capsys: pytest.CaptureFixture[str]):
    [request] = draw_requests(SEED, 1)
    finish: Any = None  # nobody looks at it
    answers = [Answer(request, [52, STOP_ID], finish)] * 2

    assert not print_differences(answers, [[52, STOP_ID], [53, STOP_ID]])
    output = capsys.readouterr().out
    assert "1 of 2 token for token" in output
    assert f"was answered [52, {STOP_ID}], by a single one [53, {STOP_ID}]" in output
