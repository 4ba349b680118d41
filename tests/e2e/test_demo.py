"""`make demo` is the first thing that a newcomer runs, and it fails if one answer is wrong."""

import asyncio
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from deploy.demo import (
    MAX_ANSWER_TOKENS,
    NUM_REQUESTS,
    SEED,
    DemoRequest,
    draw_requests,
    text_of,
    token_ids,
)
from deploy.launch import DEMO_MODEL
from deploy.processes import ROOT

BATCH_SIZE = 50
PAD_ID, EOS_ID, STOP_ID = 0, 2, 13


@torch.inference_mode()
def answers(model: PreTrainedModel, requests: list[DemoRequest]) -> list[str]:
    """Completes prompts greedily, with padding at the left."""
    rows = [token_ids(request.text) for request in requests]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD_ID] * (width - len(row)) + row for row in rows])
    output = model.generate(
        ids,
        attention_mask=(ids != PAD_ID).long(),
        do_sample=False,
        max_new_tokens=MAX_ANSWER_TOKENS,
        pad_token_id=PAD_ID,
        eos_token_id=[STOP_ID, EOS_ID],
    )
    return [text_of(row) for row in output[:, width:].tolist()]


def test_the_demos_problems_are_ones_that_transformers_answers_right():
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        requests = sorted(draw_requests(SEED, NUM_REQUESTS), key=lambda r: len(r.text))
        for start in range(0, len(requests), BATCH_SIZE):
            batch = requests[start : start + BATCH_SIZE]
            for request, answer in zip(batch, answers(model, batch), strict=True):
                assert request.problem.is_answered_by(answer), (request.problem, answer)
    finally:
        torch.set_num_threads(num_threads)


async def test_the_demo_exits_with_0_when_all_answers_are_right():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.demo", "--requests", "40"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()

    assert process.returncode == 0, output.decode()
    assert "40 of 40 right. All processes have ended." in output.decode()
