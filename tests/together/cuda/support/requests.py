"""Small executors and the requests that they get."""

from typing import Any

from router.requests.request import SamplingParams
from tests.together.speculation.speculative_cell import Ask, demo_prompts

SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 48,
    "num_kv_blocks": 2 * 20 + 1,
    "decode_graph_sizes": (2,),
}
PROMPTS = demo_prompts(5, 2)
ASKS = [Ask(prompt=prompt, max_tokens=3, delay=2 * i) for i, prompt in enumerate(PROMPTS)]
SAMPLED = SamplingParams({"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 7})
PENALISED = SamplingParams({"temperature": 0.7, "frequency_penalty": 0.4}, logit_bias=((50, 2.0),))
# Waits until the copy has run with which the step before began: at the latest when its pass begins.
PLANNING = "PlanSchedule.written"
