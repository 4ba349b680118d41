"""A wrong setting must stop the start with one line that says what fits, not fail in a step."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from executor.__main__ import _load, main
from executor.config import ExecutorConfig, resolve_max_model_len
from executor.metrics import Measures
from protos.executor.grammars import MAX_GRAMMAR_BYTES
from protos.executor.v1 import executor_pb2 as pb
from protos.settings import BAD_CONFIGURATION

# Of one request, as the router checks them (router/api/messages.py).
MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS = 1024, 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": Path("/nowhere")}, "model=/nowhere: need a folder that holds a config.json"),
        ({"listen": "localhost"}, "listen=localhost: need host:port"),
        ({"listen": "localhost:70000"}, "listen=localhost:70000"),
        ({"listen": "::1:80"}, "listen=::1:80"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank=2: with dp_size=2 it is 0 to 1"),
        ({"node_rank": 1}, "node_rank=1: need dp_ranks_per_node"),
        ({"dp_rank": 8, "dp_ranks_per_node": 8}, "dp_rank counts within the node, from 0 to 7"),
        (
            {"dp_size": 2, "listen": "0.0.0.0:1", "plaintext": "on", "anonymous_callers": "on"},
            "advertised_host is not set",
        ),
        (
            {"listen": "10.0.0.7:1", "plaintext": "on"},
            "listen=10.0.0.7:1: any caller .* set auth_tokens, and executor_token of the router, .* "
            "or tls_client_ca, .* or, where the network .* anonymous_callers=on",
        ),
        ({"anonymous_callers": "yes"}, "anonymous_callers=yes: need one of on, off"),
        ({"min_dp_size": 1}, "min_dp_size=1 without max_dp_size: it is for elastic executors"),
        ({"min_dp_size": 3, "max_dp_size": 2}, "min_dp_size=3 is above max_dp_size=2"),
        (
            {"dp_size": 2, "max_dp_size": 2},
            "dp_size=2 with max_dp_size=2: the router says where an elastic .* leave dp_size out",
        ),
        ({"ep_size": 1, "max_dp_size": 2}, "ep_size=1 with max_dp_size=2: .* each is an EP rank"),
        ({"moe_a2a": "flashinfer", "max_dp_size": 2}, "set moe_a2a to none or torch"),
        ({"dtype": "int8"}, "dtype=int8: need one of auto, float32, bfloat16"),
        ({"device": "tpu"}, "device=tpu"),
        ({"block_size": 0}, "block_size=0: need at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 99, "max_num_batched_tokens": 98}, "max_num_batched_tokens=98 is below"),
        ({"max_num_logits": 63}, "max_num_logits=63 is below max_num_seqs=64"),
        ({"max_model_len": 1}, "max_model_len=1: need at least 2"),
        ({"num_kv_blocks": 1}, "num_kv_blocks=1: need at least 2"),
        ({"num_kv_blocks": 9, "kv_cache_bytes": 9}, "both size the KV pool"),
        ({"decode_graphs": "yes"}, "decode_graphs=yes: need one of on, off"),
        ({"decode_graph_sizes": (8, 65)}, "has 65: a size is 1 to max_num_seqs=64"),
        (
            {"attn_tp_size": 2, "max_num_seqs": 1, "decode_graph_sizes": (2, 3)},
            r"has 3: a size is 1 to 2 \(max_num_seqs=1 to a multiple of attn_tp_size=2\), as no",
        ),
        ({"prefill_graphs": "on"}, "prefill_graphs=on: need one of breakable, piecewise, off"),
        ({"prefill_graph_sizes": (0,)}, "has 0: a size is 1 to max_num_batched_tokens=2048"),
        ({"moe_runner": "torch"}, "moe_runner=torch: need one of auto, grouped, cutlass"),
        ({"quantized_weights": "fp8"}, "need one of auto, keep, dequantize"),
        ({"weights": "int4"}, "weights=int4: need one of auto, int8"),
        (
            {"weights": "int8", "quantized_weights": "keep"},
            "weights=int8 with quantized_weights=keep: .* set one of the two to auto",
        ),
        ({"device": "cuda:x"}, "device=cuda:x: need one of auto, cpu, cuda, cuda:N"),
        ({"moe_dense_tp_size": 2}, "moe_dense_tp_size=2: need 1, .* or nothing, .* over the group"),
        ({"moe_a2a": "nccl"}, "moe_a2a=nccl: need one of none, torch, flashinfer"),
        ({"quantized_dispatch": "fp8"}, "need one of off, mxfp8, nvfp4"),
        (
            {"quantized_dispatch": "mxfp8", "moe_a2a": "torch", "dp_size": 2},
            "quantized_dispatch=mxfp8 with moe_a2a=torch: .* set moe_a2a=flashinfer or",
        ),
        ({"moe_a2a_extend": "none"}, "moe_a2a_extend=none: need one of all-gather, all-to-all"),
        (
            {"moe_a2a_extend": "all-to-all"},
            "moe_a2a_extend=all-to-all with moe_a2a=none: there is no all-to-all; set moe_a2a to",
        ),
        ({"max_dispatch_tokens_per_rank": 0}, "max_dispatch_tokens_per_rank=0: need at least 1"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"peer_timeout_s": 0.0}, "peer_timeout_s=0.0: need more than 0"),
        ({"stop_timeout_s": float("nan")}, "stop_timeout_s=nan"),
    ],
)
def test_a_setting_that_does_not_fit_is_named_with_what_does(
    model: Path, settings: dict[str, Any], problem: str
):
    with pytest.raises(ValueError, match=problem):
        ExecutorConfig(**({"model": model} | settings))


def test_the_defaults_fit_and_cannot_be_changed(model: Path):
    config = ExecutorConfig(model=model)
    assert config.num_logits == config.max_num_seqs + 256
    with pytest.raises(FrozenInstanceError):
        config.dp_rank = 1  # type: ignore[misc]


def test_an_all_to_all_needs_every_executor_to_be_an_ep_rank(model: Path):
    for moe_a2a in ("torch", "flashinfer"):
        ExecutorConfig(model=model, dp_size=4, moe_a2a=moe_a2a)
        problem = f"moe_a2a={moe_a2a} with ep_size=2: .* so set ep_size=4 or moe_a2a=none"
        with pytest.raises(ValueError, match=problem):
            ExecutorConfig(model=model, dp_size=4, ep_size=2, moe_a2a=moe_a2a)


@pytest.mark.parametrize(
    ("settings", "gathers"),
    [
        ({}, True),
        ({"moe_a2a": "flashinfer"}, True),
        ({"moe_a2a": "torch"}, True),
        ({"moe_a2a": "torch", "moe_a2a_extend": "all-to-all"}, False),
    ],
)
def test_experts_gather_unless_every_step_takes_the_all_to_all(
    model: Path, settings: dict[str, Any], gathers: bool
):
    assert ExecutorConfig(model=model, **settings).gathers_experts is gathers


@pytest.mark.parametrize(
    ("settings", "dp_rank"),
    [
        ({"dp_rank": 3}, 3),
        ({"dp_rank": 3, "node_rank": 2, "dp_ranks_per_node": 8}, 19),
        ({"dp_rank": 0, "node_rank": 0, "dp_ranks_per_node": 8}, 0),
    ],
)
def test_a_pod_and_a_container_together_name_a_rank(
    model: Path, settings: dict[str, Any], dp_rank: int
):
    assert ExecutorConfig(model=model, dp_size=24, **settings).topology.dp_rank == dp_rank


@pytest.mark.parametrize(
    ("listen", "advertised_host", "expected"),
    [
        ("127.0.0.1:1", None, ("127.0.0.1", None)),
        ("[::1]:0", None, ("::1", None)),
        ("10.0.0.7:1", "executor-0.test", ("executor-0.test", None)),
        ("0.0.0.0:1", "10.0.0.7", ("10.0.0.7", "0.0.0.0")),
        ("[::]:1", "executor-0.test", ("executor-0.test", "::")),
        ("0.0.0.0:1", None, (None, None)),
        ("[::]:1", "[fd00::1]", ("fd00::1", "::")),
    ],
)
def test_peers_are_told_the_advertised_host_first_and_every_address_is_open_only_if_listen_is(
    model: Path, listen: str, advertised_host: str | None, expected: tuple[str | None, str | None]
):
    config = ExecutorConfig(
        model=model,
        listen=listen,
        advertised_host=advertised_host,
        plaintext="on",
        anonymous_callers="on",
    )
    assert (config.peer_host, config.bind_host) == expected


def test_an_executor_off_loopback_takes_callers_with_a_token(model: Path, tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a token that is long enough\n".replace(" ", "-"))
    ExecutorConfig(model=model, listen="10.0.0.7:1", plaintext="on", auth_tokens=tokens)
    ExecutorConfig(model=model, listen="127.0.0.1:1")


def test_the_longest_sequence_is_the_checkpoints_unless_that_is_huge():
    assert resolve_max_model_len(None, 4096) == 4096
    assert resolve_max_model_len(None, 1_000_000) == 32768
    assert resolve_max_model_len(500_000, 1_000_000) == 500_000
    with pytest.raises(ValueError, match="max_model_len=5000: the checkpoint has 4096 positions"):
        resolve_max_model_len(5000, 4096)


def test_the_dispatch_cap_has_a_short_variable_besides_its_own():
    [option] = [each for each in main.params if each.name == "max_dispatch_tokens_per_rank"]
    assert option.envvar == [
        "LOCKSTEP_EXECUTOR_MAX_DISPATCH_TOKENS_PER_RANK",
        "LOCKSTEP_MAX_DISPATCH_TOKENS_PER_RANK",
    ]


@pytest.fixture
def signals() -> Iterator[None]:
    """Puts back what a start sets."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_container_s_first_process_ends_when_told_to_while_it_imports(
    model: Path, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    """It gets only signals that it handles."""

    def terminate(host: str | None) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("protos.settings.configure_logging", lambda level="info": None)
    monkeypatch.setattr("executor.__main__._keep_in", terminate)
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(model)], standalone_mode=False)
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_an_operator_says_otherwise(
    model: Path, monkeypatch: pytest.MonkeyPatch, signals: None, given: str | None
):
    def run(serving: Coroutine[Any, Any, int]) -> int:
        serving.close()
        raise LookupError

    monkeypatch.setattr("protos.settings.configure_logging", lambda level="info": None)
    monkeypatch.setattr("executor.__main__.uvloop.run", run)
    monkeypatch.setattr("executor.__main__._keep_in", lambda host: None)
    monkeypatch.setattr("executor.__main__._spare_survivors", lambda: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(LookupError):
        main(["--model", str(model)], standalone_mode=False)
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")


@pytest.mark.parametrize("error", [ValueError, OSError, RuntimeError, MemoryError])
async def test_a_model_that_cannot_be_loaded_ends_the_start_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    class Servicer:
        async def load(self, build: Any) -> None:
            raise error("no room")

    with capture_logs() as lines:
        config, servicer = ExecutorConfig(model=model), cast(Any, Servicer())
        assert await _load(servicer, config, Measures(), asyncio.Event()) == BAD_CONFIGURATION
    [line] = lines
    assert line["event"] == "cannot_start"
    assert "no room" in line["problem"]


def test_help_does_not_import_torch():
    script = "import sys, executor.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_largest_step_is_within_the_longest_message(model: Path):
    """Every row begins, penalised, with all of its blocks of both lists cached, and scores its tokens."""
    num_seqs, num_tokens, length, block_size = 4, 64, 32768, 2
    config = ExecutorConfig(
        model=model,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        max_model_len=length,
        block_size=block_size,
    )
    starts, sequences = pb.RowStarts(), pb.SequenceColumns()
    for column in pb.RowStarts.DESCRIPTOR.fields:
        if column.name != "grammars":
            setattr(starts, column.name, bytes(8 * num_seqs))
    for column in pb.SequenceColumns.DESCRIPTOR.fields:
        setattr(sequences, column.name, bytes(4 * num_seqs))
    starts.bias_ids = starts.biases = bytes(4 * num_seqs * MAX_LOGIT_BIASES)
    starts.suppressed_ids = bytes(4 * num_seqs * 2 * MAX_STOP_TOKEN_IDS)
    starts.prompt_ids = bytes(4 * num_seqs * length)
    starts.grammars.extend(["a" * MAX_GRAMMAR_BYTES] * num_seqs)
    sequences.token_ids = sequences.scored_ids = bytes(4 * num_tokens)
    blocks = bytes(4 * num_seqs * (length // block_size))
    sequences.new_block_ids = sequences.new_window_block_ids = blocks
    counts = [2**31] * 1024  # of as many DP ranks
    agreement = pb.StepAgreement(global_num_tokens=counts, global_num_tokens_for_logprob=counts)
    part = pb.RankStep(starts=starts, sequences=sequences)
    step = pb.StepRequest(epoch=2**63, step_id=2**63, agreement=agreement, ranks=[part])

    assert step.ByteSize() <= config.default_message_bytes
    assert config.default_message_bytes < 2 * step.ByteSize() + 65536
    options = dict(replace(config, max_message_bytes=5000).server_options())
    assert options["grpc.max_receive_message_length"] == 5000
