"""Lockstep's model without its service: forward, logits, argmax, step after step.

python -m tests.bench.peers.lockstep_model CHECKPOINT
"""

import sys
import time

import torch

from executor.model.decoder.kernels import cpu_kernels
from executor.model.families import load_model, read_spec
from tests.bench.executor.bench_cpu_model import Ours
from tests.bench.peers.workload import (
    BATCHES,
    NUM_PREFILLS,
    NUM_STEPS,
    PROMPT_LEN,
    make_prompt,
    report_decode,
    report_prefill,
)


def main(folder: str) -> None:
    spec = read_spec(folder)
    model = load_model(folder, spec, kernels=cpu_kernels(spec, dtype=spec.dtype))
    ours = Ours(model, spec, max(BATCHES), PROMPT_LEN + NUM_STEPS)
    prefill_s = []
    first_ids = []
    for row in range(max(BATCHES)):
        ids = torch.tensor([make_prompt(row)])
        begun = time.perf_counter()
        first_ids.append(ours.run([row], 0, ids))
        prefill_s.append(time.perf_counter() - begun)
    report_prefill(prefill_s[:NUM_PREFILLS])
    for batch_size in BATCHES:
        rows, ids = list(range(batch_size)), torch.cat(first_ids[:batch_size])
        stamps = []
        for step in range(NUM_STEPS):
            ids = ours.run(rows, PROMPT_LEN + step, ids)
            ids.tolist()  # as one that decides when to stop would read them
            stamps.append(time.perf_counter())
        report_decode([stamps] * batch_size)


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1])
