"""Times what constrained rows add to a step of a GPU, whose forward pass takes 10 ms.

    python -m tests.bench.executor.bench_constraints [--rows 64] [--steps 100] [--forward-ms 10] [--drafts 0] [--threads 1] [--require 1.05]

The vocabulary has 151,936 tokens: bytes, and the commonest words and pieces of Python's library. Each row
writes JSON by a nested schema of its own, all at different places, and takes the tokens of a valid document.
The forward pass is a sleep, as the host's part in it is: masks are filled meanwhile, behind each of the
drafts too, a chain of right ones. Steps with and without constrained rows take turns. Columns: the median
of a step's time in each, the median of the ratios of neighbouring steps, and the least of such medians
over a tenth of the steps, which other processes disturb least; how long a step waits for masks behind the
forward pass, and what filling them takes by itself.

Applying masks is the device's: on a CPU it takes about as long as a few of the sampler's other passes over
the logits. It is printed for one row.
"""

import json
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from executor.batch.columns import Int64Array
from executor.model.sampling.constraints import Constraints, HostDrafts
from router.api.text import _bytes_by_character
from tests.bench.support.options import parse_options
from tests.bench.support.timing import median_ratio
from tests.executor.support.sampling import starts

VOCAB_SIZE, EOS = 151_936, 151_935
NUM_FILES = 1500
PIECES = re.compile(r" ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SOMEBODY = {
    "name": "Somebody with a long name",
    "age": 41,
    "tags": ["red", "blue", "green", "red"],
    "home": {"street": "Some Street 17, behind the church", "zip": "12345"},
}


def make_tokenizer() -> LLTokenizer:
    """Returns a tokenizer of as many tokens as Qwen3's, out of text that every machine has."""
    counts: Counter[str] = Counter()
    for path in islice(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")), NUM_FILES):
        for piece in PIECES.findall(path.read_text(encoding="utf-8", errors="ignore")):
            counts.update(piece[:length] for length in range(2, min(len(piece), 12) + 1))
    char_of = {byte: char for char, byte in _bytes_by_character().items()}
    tokens = dict.fromkeys(char_of[byte] for byte in range(256))
    for piece, _ in counts.most_common():
        tokens["".join(char_of[byte] for byte in piece.encode())] = None
    vocab = {token: number for number, token in enumerate(islice(tokens, VOCAB_SIZE - 1))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": EOS, "content": "<eos>", "special": True, "normalized": False}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    text = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": byte_level | {"use_regex": False},
        "decoder": byte_level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocab | {"<eos>": EOS}, "merges": []},
    }
    print(f"{len(vocab)} tokens", flush=True)
    return LLTokenizer(json.dumps(text), n_vocab=VOCAB_SIZE, eos_token=[EOS])


def schema(number: int) -> str:
    """Returns the grammar of an endless list of people; one of its own for each number."""
    person = PERSON | {"title": f"Person {number}"}
    return LLMatcher.grammar_from_json_schema({"type": "array", "items": person})


def wait(constraints: Constraints) -> None:
    assert constraints._filling is not None
    constraints._filling.result()


def begun_rows(
    tokenizer: LLTokenizer, begun: list[list[int]], drafts: int, threads: int
) -> Constraints:
    """Returns rows that each have a grammar and an output of their own."""
    num_rows, rows = len(begun), np.arange(len(begun))
    cpu = torch.device("cpu")
    constraints = Constraints(tokenizer, num_rows, cpu, max_nodes=1 + drafts, num_threads=threads)
    constraints.start(
        starts(
            VOCAB_SIZE,
            num_rows,
            rows=rows,
            grammars=[schema(row) for row in range(num_rows)],
            grammar_of=rows + 1,
            num_output_ids=[len(ids) for ids in begun],
            output_ids=[id_ for ids in begun for id_ in ids],
        )
    )
    return constraints


def main() -> None:
    options = parse_options(
        __doc__, rows=64, steps=100, forward_ms=10.0, drafts=0, threads=1, require=float
    )
    tokenizer, rows, num = make_tokenizer(), np.arange(options.rows), options.drafts
    written = tokenizer.greedy_tokenize(json.dumps([SOMEBODY] * 400 * (1 + num)))
    begun = [written[: 7 * row + 1] for row in range(options.rows)]
    constraints = begun_rows(tokenizer, begun, num, options.threads)
    nobody = Constraints(tokenizer, options.rows, torch.device("cpu"))
    parents = np.broadcast_to(np.arange(num), (options.rows, num))

    def begin(each: Constraints, gained: Int64Array) -> None:
        drafts = (lambda: HostDrafts(gained[:, 1:-1], parents)) if num else None
        each.begin(rows, rows, drafts)

    times: dict[str, list[float]] = {"plain": [], "constrained": [], "wait": [], "alone": []}
    for step in range(options.steps + 5):
        at = [len(ids) + step * (1 + num) for ids in begun]
        gained = np.array([[1 + num, *written[i : i + 1 + num]] for i in at])
        for name, each in (("plain", nobody), ("constrained", constraints)):
            start = time.perf_counter()
            begin(each, gained)
            time.sleep(options.forward_ms / 1e3)
            forward_end = time.perf_counter()
            if each is constraints:
                wait(each)
            waited = time.perf_counter() - forward_end
            each.accept(rows, lambda gained=gained: gained)
            times[name].append(time.perf_counter() - start)
        times["wait"].append(waited)
        start = time.perf_counter()
        begin(
            constraints, np.array([[1 + num, *written[i + 1 + num : i + 2 + 2 * num]] for i in at])
        )
        wait(constraints)
        times["alone"].append(time.perf_counter() - start)
    times = {name: values[5:] for name, values in times.items()}  # the first build automata
    median = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    ratio = median_ratio(times["constrained"], times["plain"])
    tenth = max(options.steps // 10, 1)
    least = min(
        median_ratio(times["constrained"][i : i + tenth], times["plain"][i : i + tenth])
        for i in range(0, options.steps, tenth)
    )
    print(
        f"{options.rows} rows: {median['plain']:.2f} ms, constrained {median['constrained']:.2f} ms, "
        f"ratio {ratio:.3f}, least {least:.3f}; wait for masks {median['wait'] * 1e3:.0f} us, "
        f"filling by itself {median['alone']:.2f} ms"
    )
    constraints.begin(rows[:1], rows[:1])
    logits, start = torch.zeros(1, VOCAB_SIZE), time.perf_counter()
    for _ in range(20):
        logits.masked_fill_(constraints.is_out(), -torch.inf)
    print(f"applying a mask on this CPU: {(time.perf_counter() - start) / 20 * 1e6:.0f} us a row")
    if options.require is not None and least > options.require:
        sys.exit(f"a ratio of {least:.3f} is above {options.require}")


if __name__ == "__main__":
    main()
