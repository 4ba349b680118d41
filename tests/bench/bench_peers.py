"""Compares Lockstep with vLLM and llama.cpp on this machine's CPU, all in turns within one run.

    python -m tests.bench.bench_peers [--rounds 3] [--threads 2] [--peers lockstep,vllm,...] [--picture FILE]

All load the same random Qwen3-MoE of 703 M parameters in bfloat16 (hidden 1024, 12 layers, 32
experts of width 512, 4 for each token, 16 query and 4 KV heads of 64, vocabulary 32768; 1.4 GB).
The others are installed from the package index into environments of their own, once
(peers/environments.py); one that cannot be had is left out with a sentence. In each round each has
a turn: it is started anew, warmed up, measured and stopped, while no other runs. Before each turn a
probe reads memory with all cores. Printed and drawn are medians over the rounds.

    lockstep model     forward, logits and argmax, without scheduling or messages
    lockstep service   router, executor and client, three processes on real sockets, gRPC
    vllm engine        vLLM's LLM class in one process: its scheduler, compiled model and sampler
    vllm server        the same behind its OpenAI server, with the same client
    llama.cpp model    decode, logits and argmax by llama.cpp's C interface, flash attention on

Prefill is the median of six prompts of 512 random tokens, one after another, to their first token.
Decode B=N is tokens a second of N sequences with such prompts, while all of them decode: from the
eighth token of the last to be prefilled until the first ends, at 48. All decode greedily, ignore the
end of the sequence, and count tokens as they come. "Mix" is the first 96 requests of an Azure trace
of conversations at their own times (42 s) with their lengths divided by four: output tokens a
second, time to the first token, and gaps between messages of one answer. Prompts have nothing in
common, so no prefix cache helps; vLLM's is off.

The limit of a decode column is what the probe's bandwidth allows: a step reads the weights of layers
and head, those of the experts that as many random choices hit, and keys and values. That of the
prefill is what the probe's product of matrices allows for the products that each token takes.

Not compared: quality of text, many cores, GPUs, quantised weights, which llama.cpp is made for.
Servers answer in text and token ids; the one speaks gRPC and the other HTTP, each as its users have
it. Lockstep's model alone and llama.cpp do no scheduling; vLLM's class does. Waiting OpenMP threads
spin, as is the default, but in Lockstep's service, whose default is to sleep. The machine must be
quiet.
"""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.bench.peers.environments import CACHE, LLAMA_CPP, OURS, VLLM, Missing
from tests.bench.peers.picture import draw
from tests.bench.peers.workload import BATCHES, MARK, PROMPT_LEN
from tests.bench.support.options import parse_options

ROOT = Path(__file__).parents[2]
CHECKPOINT = CACHE / "qwen3-moe-703m"
GGUF = CHECKPOINT / "model.gguf"
PICTURE = CACHE / "peers.svg"
TURNS = CACHE / "turns.json"  # the figures of each
COLUMNS = ("prefill", *(f"decode {batch_size}" for batch_size in BATCHES))
YARDSTICK = "vllm engine"
MIX = {
    "tokens/s": "tokens_per_s",
    "first token ms": "first_token_ms",
    "p99": "first_token_p99_ms",
    "gap ms": "gap_ms",
    "gap p99": "gap_p99_ms",
}
# Of the model, for the limits: of a layer the parameters that every token uses, those of one expert,
# and the products of the mean token of a prompt with the keys and values before it.
LAYERS, EXPERTS, TOP_K = 12, 32, 4
EXPERT_SIZE = 3 * 1024 * 512
COMMON_SIZE = 1024 * (16 + 2 * 4 + 16) * 64 + 1024 * EXPERTS
ATTENTION_SIZE = 2 * 16 * 64 * PROMPT_LEN // 2
HEAD_SIZE = 1024 * 32768
KV_BYTES = LAYERS * 2 * 4 * 64 * 2 * PROMPT_LEN  # of a sequence

Figures = dict[str, dict[str, float]]  # by column, then by name


# Commands of the peers, and what they need in their environment variables.


def module(name: str) -> tuple[str, str]:
    return "-m", f"tests.bench.peers.{name}"


def lockstep_model(variables: dict[str, str]) -> list[str]:
    return [str(OURS), *module("lockstep_model"), str(CHECKPOINT)]


def lockstep_service(variables: dict[str, str]) -> list[str]:
    return [str(OURS), *module("lockstep_service"), str(CHECKPOINT)]


def vllm_engine(variables: dict[str, str]) -> list[str]:
    python = VLLM.python()
    # What vLLM sets for its server's workers, but cannot for the process that it is called in.
    libraries = [*VLLM.find("torch*/**/libgomp*.so*"), *VLLM.find("vllm/libs/libtcmalloc*.so*")]
    variables["LD_PRELOAD"] = ":".join(map(str, libraries))
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    bind_vllm(variables)
    return [str(python), *module("vllm_engine"), str(CHECKPOINT)]


def vllm_server(variables: dict[str, str]) -> list[str]:
    bind_vllm(variables)
    return [str(OURS), *module("vllm_server"), str(CHECKPOINT), str(VLLM.python())]


def bind_vllm(variables: dict[str, str]) -> None:
    """By itself it would leave one core to its server."""
    last = int(variables["OMP_NUM_THREADS"]) - 1
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{last}", "VLLM_CPU_KVCACHE_SPACE": "2"}


def llama_model(variables: dict[str, str]) -> list[str]:
    python = LLAMA_CPP.python()
    if not GGUF.exists():
        subprocess.run([python, *module("gguf_file"), CHECKPOINT, GGUF], cwd=ROOT, check=True)
    return [str(python), *module("llama_model"), str(GGUF), variables["OMP_NUM_THREADS"]]


PEERS: dict[str, Callable[[dict[str, str]], list[str]]] = {
    "lockstep model": lockstep_model,
    "lockstep service": lockstep_service,
    "vllm engine": vllm_engine,
    "vllm server": vllm_server,
    "llama.cpp model": llama_model,
}


def take_turn(command: list[str], environment: dict[str, str], log_path: Path) -> Figures:
    """Runs a program that prints figures.

    Raises:
        Missing: It failed.
    """
    with log_path.open("w") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    if done.returncode:
        raise Missing(f"it ended with exit code {done.returncode}; {log_path} says why")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    figures = [json.loads(line.removeprefix(MARK)) for line in lines]
    return {figure.pop("column"): figure for figure in figures}


def run_rounds(names: list[str], rounds: int, threads: int) -> tuple[dict[str, Figures], Figures]:
    """Returns the medians of each peer that could be had, and of the probe."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    plain |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    turns: dict[str, list[Figures]] = defaultdict(list)
    probe = [str(OURS), *module("probe")]
    for number in range(rounds):
        for name in list(names):
            variables = dict(plain)
            try:
                command = PEERS[name](variables)
                speed = take_turn(probe, plain, CACHE / "probe.log")
                figures = take_turn(command, variables, CACHE / f"{name}.log")
            except Missing as reason:
                print(f"{name} is left out: {reason}", flush=True)
                names.remove(name)
                continue
            turns["probe"].append(speed)
            turns[name].append(figures)
            print_turn(number, name, speed["probe"], figures)
        TURNS.write_text(json.dumps(turns))
    medians = {name: medians_of(figures) for name, figures in turns.items()}
    return {name: medians[name] for name in names if name in medians}, medians["probe"]


def medians_of(turns: list[Figures]) -> Figures:
    return {
        column: {key: median(turn[column][key] for turn in turns) for key in figures}
        for column, figures in turns[0].items()
    }


def limits_of(probe: dict[str, float]) -> dict[str, float]:
    """Returns tokens a second of each column that the machine allows."""
    used = LAYERS * (COMMON_SIZE + TOP_K * EXPERT_SIZE + ATTENTION_SIZE)
    limits = {"prefill": probe["gflop_per_s"] * 1e9 / (2 * used)}
    for batch_size in BATCHES:
        num_hit = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** batch_size)
        weights = LAYERS * (COMMON_SIZE + num_hit * EXPERT_SIZE) + HEAD_SIZE
        num_bytes = 2 * weights + batch_size * KV_BYTES
        limits[f"decode {batch_size}"] = batch_size * probe["gb_per_s"] * 1e9 / num_bytes
    return limits


def print_turn(number: int, name: str, probe: dict[str, float], figures: Figures) -> None:
    columns = "".join(f"  {key} {column['tokens_per_s']:.0f}" for key, column in figures.items())
    print(f"round {number + 1}, {probe['gb_per_s']:.0f} GB/s: {name:<16}{columns}", flush=True)


def print_table(peers: dict[str, Figures], probe: dict[str, float]) -> None:
    limits, yardstick = limits_of(probe), peers.get(YARDSTICK, {})
    print(
        f"\nmedians: {probe['gb_per_s']:.0f} GB/s, {probe['gflop_per_s']:.0f} GFLOP/s in bfloat16"
    )
    print(f"tokens/s (times {YARDSTICK}'s, share of the limit)")
    print(f"{'':<16}" + "".join(f"{column:>20}" for column in COLUMNS))
    for name, figures in peers.items():
        cells = []
        for column in COLUMNS:
            speed = figures[column]["tokens_per_s"]
            ratio = f"{speed / yardstick[column]['tokens_per_s']:.2f}x" if yardstick else "-"
            cells.append(f"{speed:.0f} ({ratio}, {speed / limits[column]:.0%})")
        print(f"{name:<16}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"{'limit':<16}" + "".join(f"{limits[column]:>20.0f}" for column in COLUMNS))
    print("\nmix" + " " * 13 + "".join(f"{title:>16}" for title in MIX))
    for name, figures in peers.items():
        if "mix" in figures:
            cells = [figures["mix"][key] for key in MIX.values()]
            print(f"{name:<16}" + "".join(f"{cell:>16.1f}" for cell in cells))


def main() -> None:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options = parse_options(
        __doc__, rounds=3, threads=threads, peers=",".join(PEERS), picture=str(PICTURE)
    )
    names = [name for name in PEERS if name in options.peers.split(",")]
    if not (CHECKPOINT / "tokenizer.json").exists():
        subprocess.run([OURS, *module("checkpoint"), CHECKPOINT], cwd=ROOT, check=True)
    peers, probe = run_rounds(names, options.rounds, options.threads)
    print_table(peers, probe["probe"])
    Path(options.picture).write_text(draw(peers, limits_of(probe["probe"])))


if __name__ == "__main__":
    main()
