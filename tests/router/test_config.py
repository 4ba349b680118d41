"""A wrong setting must stop the router's start with one line that says what fits."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from tests.support.certificates import Authority, replace

TOKEN = "first-token-0123456789"
GROUPS = (("127.0.0.1:1",),)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "group: 10.0.0.7:1 is not on loopback.* set executor_ca, .* executor_plaintext=on"),
        ({"executor_token": "tokens"}, "10.0.0.7:1 is not on loopback"),
        ({"executor_plaintext": "yes"}, "executor_plaintext=yes: need one of on, off"),
        ({"executor_name": "x"}, "executor_name without executor_ca"),
        ({"executor_cert": "client.pem"}, "executor_cert without executor_key"),
        (
            {"executor_cert": "client.pem", "executor_key": "client.key"},
            "executor_cert without executor_ca",
        ),
        ({"executor_ca": "tokens"}, "executor_ca: .*tokens has no CA certificate"),
        ({"executor_ca": "ca.pem", "executor_token": "none"}, "executor_token: .*none"),
    ],
)
def test_a_router_knows_how_it_may_reach_its_executors(
    tmp_path: Path, settings: dict[str, str], problem: str
):
    authority = Authority(tmp_path / "ca")
    authority.issue("client", "client.test")
    replace(authority.folder / "tokens", TOKEN.encode())
    texts = ("executor_plaintext", "executor_name")
    given: dict[str, Any] = {
        name: value if name in texts else authority.folder / value
        for name, value in settings.items()
    }
    with pytest.raises(ValueError, match=problem):
        RouterConfig(groups=(("127.0.0.1:1", "10.0.0.7:1"),), **given)


@pytest.mark.parametrize("group", ["dns:executor:1?size=2", "executor:1", "[2001:db8::1]:1"])
def test_a_name_counts_as_another_machine(group: str):
    with pytest.raises(ValueError, match="is not on loopback"):
        RouterConfig(groups=((group,),))
    RouterConfig(groups=((group,),), executor_plaintext="on")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"groups": ()}, r"groups=\(\): need at least one group"),
        ({"listen": "localhost"}, "listen=localhost: need host:port"),
        ({"max_calls": 0}, "max_calls=0: need at least 1"),
        ({"prompt_steps_between_drafts": 0}, "prompt_steps_between_drafts=0: need at least 1"),
        ({"speculation": "yes"}, "speculation=yes: need one of on, off"),
        ({"vllm_engine": "yes"}, "vllm_engine=yes: need one of on, off"),
        ({"min_tokens_per_draft_step": 0.9}, "need at least 1, the token that each sequence"),
        ({"step_deadline_factor": 1.0}, "step_deadline_factor=1.0: need more than 1, or steps"),
        ({"retry_delay_s": 0.0}, "retry_delay_s=0.0: need more than 0"),
        ({"shutdown_grace_s": -1.0}, "shutdown_grace_s=-1.0: need at least 0"),
        ({"otlp_endpoint": "collector"}, "otlp_endpoint=collector: need http://host:4317"),
        ({"otlp_endpoint": "http://[::1"}, "otlp_endpoint=.*: need http://host:4317"),
        ({"otlp_endpoint": "http://collector:x"}, "otlp_endpoint=.*: need http://host:4317"),
        ({"otlp_endpoint": "http://collector"}, "otlp_endpoint=.*: need http://host:4317"),
        ({"tokenizer": Path("/nowhere")}, "tokenizer=/nowhere: there is no such file; give"),
        ({"chat_template": Path("/some")}, "chat_template=/some: without a tokenizer"),
    ],
)
def test_a_setting_that_does_not_fit_is_named_with_what_does(
    settings: dict[str, Any], problem: str
):
    with pytest.raises(ValueError, match=problem):
        RouterConfig(**{"groups": GROUPS, **settings})


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_password_in_a_setting_that_is_logged_is_refused_and_not_shown(scheme: str):
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        RouterConfig(groups=GROUPS, otlp_endpoint=f"{scheme}me:{TOKEN}@collector:4317")
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("tokenizer.model", "AutoTokenizer.from_pretrained"),
        ("tiktoken.model", "python -m deploy.convert_tiktoken"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_with_what_converts_it(
    name: str, command: str, tmp_path: Path
):
    other = tmp_path / name
    other.touch()
    for given in (tmp_path, other):
        with pytest.raises(ValueError, match=r"reads tokenizer\.json only") as caught:
            RouterConfig(groups=GROUPS, tokenizer=given)
        assert command in str(caught.value)
        assert str(other) in str(caught.value)
    (tmp_path / "tokenizer.json").touch()
    assert RouterConfig(groups=GROUPS, tokenizer=tmp_path).tokenizer_file is not None


def test_drafts_are_on_if_not_told_otherwise():
    config = RouterConfig(groups=GROUPS)
    assert config.speculation == "on"
    assert (config.min_tokens_per_draft_step, config.prompt_steps_between_drafts) == (1.5, 2)


def test_a_port_that_is_taken_stops_a_router_in_one_line_of_json():
    """gRPC's own log would write another line between them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = (sys.executable, "-m", "router", "--group", "127.0.0.1:1", "--listen", address)
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    events = [json.loads(line) for line in process.stderr.splitlines()]
    assert [event["event"] for event in events] == ["configuration", "cannot_start"]
    assert "in use" in events[1]["problem"]


def test_help_does_not_import_torch():
    command = (sys.executable, "-X", "importtime", "-m", "router", "--help")
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "--group" in process.stdout
    assert "router.config" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "transformers")}
