"""Accuracy and speed of weights in int8 against bfloat16, on the CPU's kernels.

    python -m tests.bench.executor.bench_int8 [--threads 2] [--batches 1,8,32]

Accuracy: the demo models are given the demo's problems with their answers; one is right if each token of
its answer is the likeliest where it stands, as it would be chosen then. Logits are compared at the same
places, and of the random model of ``bench_cpu_model``, 703 M parameters, those of a prompt of 512; also with
float32, from which bfloat16 differs, too.

Speed: that model, prefill of 512 tokens and greedy steps behind as many, in turns of 16 steps of which
the first two are left out. Threads that find a core taken make all others wait: only a quiet machine
shows what several threads do, and ratios say more than numbers.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

from deploy.local.demo import NUM_REQUESTS, SEED, draw_requests
from deploy.local.demo_tasks import STOP, token_ids
from executor.model.decoder.kernels import cpu_kernels
from executor.model.families import Model, load_model, read_spec
from executor.model.spec import ModelSpec
from executor.model.weights.kept import DEQUANTISED, IN_INT8
from tests.bench.executor.bench_cpu_model import (
    NUM_LEFT_OUT,
    PROMPT_LEN,
    TURN_STEPS,
    Ours,
    make_checkpoint,
    seconds,
)
from tests.bench.support.options import parse_options
from tests.support.paths import DEMO_MODEL, DEMO_MODEL_MLA

NAMES = ("bfloat16", "int8", "float32")


def load_all(path: Path) -> tuple[ModelSpec, list[Model]]:
    """Returns a model in each of ``NAMES``."""
    spec, dtype = read_spec(path), torch.bfloat16
    kernels = [cpu_kernels(spec, dtype=dtype, keeping=keep) for keep in (DEQUANTISED, IN_INT8)]
    models = [load_model(path, spec, dtype=dtype, kernels=each) for each in kernels]
    return spec, [*models, load_model(path, spec, dtype=torch.float32)]


def print_demo(path: Path) -> None:
    spec, models = load_all(path)
    num_right, found = [0] * len(models), []
    for request in draw_requests(SEED, NUM_REQUESTS):
        ids = token_ids(request.context + request.problem.line + STOP)
        answer = slice(len(token_ids(request.text)) - 1, len(ids) - 1)
        logits = [Ours(model, spec, 1, len(ids)).logits(ids)[answer] for model in models]
        for i, each in enumerate(logits):
            num_right[i] += each.argmax(dim=-1).tolist() == ids[answer.start + 1 :]
        found.append(torch.stack(logits))
    counts = (f"{name} {count}" for name, count in zip(NAMES, num_right, strict=True))
    print(f"{path.name}: of {NUM_REQUESTS} problems right: {', '.join(counts)}")
    print_differences(torch.cat(found, dim=1))


def print_differences(logits: torch.Tensor) -> None:
    """Prints how far logits [models, T, V] are apart."""
    for one, other in ((1, 0), (1, 2), (0, 2)):
        ours, plain = logits[one], logits[other]
        same = (ours.argmax(dim=-1) == plain.argmax(dim=-1)).float().mean()
        apart = (ours - plain).abs()
        print(
            f"  {f'{NAMES[one]}, {NAMES[other]}':<18} the likeliest of {len(plain)} tokens the same in "
            f"{same:.2%}; logits, of standard deviation {plain.std():.2f}, differ by "
            f"{apart.mean():.3f}, at most {apart.max():.2f}; relative error "
            f"{apart.norm() / plain.norm():.2%}",
            flush=True,
        )


def print_speed(name: str, num_tokens: int, times: list[list[float]]) -> None:
    plain, int8 = (statistics.median(column) for column in times)
    print(
        f"  {name:<12} {num_tokens / plain:12.1f} {num_tokens / int8:9.1f} {plain / int8:8.2f}x",
        flush=True,
    )


def time_prefill(models: list[Model], spec: ModelSpec, rounds: int) -> list[list[float]]:
    ids = torch.randint(0, spec.vocab_size, (1, PROMPT_LEN))
    ours = [Ours(model, spec, 1, PROMPT_LEN) for model in models]
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for column, each in zip(times, ours, strict=True):
            column.append(seconds(partial(each.run, [0], 0, ids)))
    return [column[1:] for column in times]


def time_decode(
    models: list[Model], spec: ModelSpec, batch_size: int, steps: int
) -> list[list[float]]:
    ours = [Ours(model, spec, batch_size, PROMPT_LEN + steps) for model in models]
    for each in ours:
        each.fill()
    rows, ids = list(range(batch_size)), torch.randint(0, spec.vocab_size, (batch_size, 1))
    times: list[list[float]] = [[], []]
    for first in range(0, steps, TURN_STEPS):
        turn = range(first, min(first + TURN_STEPS, steps))
        for column, each in zip(times, ours, strict=True):
            column += [seconds(partial(each.run, rows, PROMPT_LEN + i, ids)) for i in turn][
                NUM_LEFT_OUT:
            ]
    return times


def main() -> None:
    options = parse_options(__doc__, batches=(1, 8, 32), threads=2, steps=64, rounds=4)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        for path in (DEMO_MODEL, DEMO_MODEL_MLA):
            print_demo(path)
        make_checkpoint(Path(directory))
        spec, models = load_all(Path(directory))
        print("random model of 703 M parameters")
        ids = torch.randint(0, spec.vocab_size, (PROMPT_LEN,)).tolist()
        print_differences(
            torch.stack([Ours(model, spec, 1, PROMPT_LEN).logits(ids) for model in models])
        )
        del models[2]
        print(f"  tokens/s, {options.threads} threads {NAMES[0]:>9} {NAMES[1]:>7} {'ratio':>9}")
        print_speed("prefill 512", PROMPT_LEN, time_prefill(models, spec, options.rounds))
        for batch_size in options.batches:
            times = time_decode(models, spec, batch_size, options.steps)
            print_speed(f"decode B={batch_size}", batch_size, times)


if __name__ == "__main__":
    main()
