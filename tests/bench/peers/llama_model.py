"""llama.cpp by the C interface that llama-cpp-python loads: decode, logits, argmax.

    python -m tests.bench.peers.llama_model FILE.gguf THREADS

Runs in llama.cpp's environment.
"""

import sys
import time

import llama_cpp
import numpy as np

from tests.bench.peers.workload import (
    BATCHES,
    NUM_PREFILLS,
    NUM_STEPS,
    PROMPT_LEN,
    VOCAB_SIZE,
    make_prompt,
    report_decode,
    report_prefill,
)


class Model:
    """A model with room for max(BATCHES) sequences."""

    def __init__(self, path: str, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = max(BATCHES)
        params.n_ctx = max(BATCHES) * (PROMPT_LEN + NUM_STEPS)
        params.n_batch = params.n_ubatch = PROMPT_LEN
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(PROMPT_LEN, 0, 1)

    def forget(self, num_kept: int) -> None:
        """Cuts every sequence down to its first tokens."""
        memory = llama_cpp.llama_get_memory(self._context)
        for row in range(max(BATCHES)):
            llama_cpp.llama_memory_seq_rm(memory, row, num_kept, -1)

    def run(self, rows: list[int], num_computed: int, ids: list[list[int]]) -> list[int]:
        """Returns the next token of each row after its ids."""
        batch, place = self._batch, 0
        logits_at = []
        for row, tokens in zip(rows, ids, strict=True):
            for position, token in enumerate(tokens, num_computed):
                batch.token[place], batch.pos[place] = token, position
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = position == num_computed + len(tokens) - 1
                place += 1
            logits_at.append(place - 1)
        batch.n_tokens = place
        if code := llama_cpp.llama_decode(self._context, batch):
            sys.exit(f"llama_decode returned {code}")
        pointers = [llama_cpp.llama_get_logits_ith(self._context, at) for at in logits_at]
        return [int(np.ctypeslib.as_array(pointer, (VOCAB_SIZE,)).argmax()) for pointer in pointers]


def main(path: str, num_threads: int) -> None:
    model = Model(path, num_threads)
    prefill_s = []
    first_ids = []
    for row in range(max(BATCHES)):
        prompt = make_prompt(row)
        begun = time.perf_counter()
        first_ids += model.run([row], 0, [prompt])
        prefill_s.append(time.perf_counter() - begun)
    report_prefill(prefill_s[:NUM_PREFILLS])
    for batch_size in BATCHES:
        rows, ids = list(range(batch_size)), first_ids[:batch_size]
        stamps = []
        for step in range(NUM_STEPS):
            ids = model.run(rows, PROMPT_LEN + step, [[token] for token in ids])
            stamps.append(time.perf_counter())
        report_decode([stamps] * batch_size)
        model.forget(PROMPT_LEN)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
