"""vLLM by its LLM class, in one process: its scheduler, model and sampler, without its server.

    python -m tests.bench.peers.vllm_engine CHECKPOINT

Runs in vLLM's environment. The model is compiled, which is vLLM's default.
"""

import sys
import time
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from tests.bench.peers.workload import (
    BATCHES,
    NUM_LEFT_OUT,
    NUM_PREFILLS,
    NUM_STEPS,
    PROMPT_LEN,
    WARM_UP_LEN,
    make_prompt,
    report_decode,
    report_prefill,
)


def generate(
    engine: Any, first: int, count: int, num_tokens: int, length: int = PROMPT_LEN
) -> list[list[float]]:
    """Returns for each prompt the time of sending and that of each token."""
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=num_tokens, detokenize=False
    )
    stamps: dict[str, list[float]] = {}
    for number in range(first, first + count):
        prompt = TokensPrompt(prompt_token_ids=make_prompt(number, length))
        stamps[str(number)] = [time.perf_counter()]
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            times = stamps[output.request_id]
            times += [now] * (1 + len(output.outputs[0].token_ids) - len(times))
    return list(stamps.values())


def main(folder: str) -> None:
    llm = LLM(
        folder, dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False, seed=0
    )
    engine = llm.llm_engine
    for batch_size in BATCHES:  # warm-up
        generate(engine, 10_000 * batch_size, batch_size, NUM_LEFT_OUT, WARM_UP_LEN)
    prefills = [generate(engine, number, 1, 1)[0] for number in range(NUM_PREFILLS)]
    report_prefill([stamps[1] - stamps[0] for stamps in prefills])
    for batch_size in BATCHES:
        answers = generate(engine, 100 * batch_size, batch_size, NUM_STEPS)
        report_decode([stamps[1:] for stamps in answers])


if __name__ == "__main__":
    main(sys.argv[1])
