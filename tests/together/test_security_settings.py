"""Settings that would leave a door open must stop the start, and say what to set instead."""

import re
from pathlib import Path
from typing import Any

import pytest

from deploy.local.launch import DEMO_MODEL
from executor.config import ExecutorConfig
from protos.transport.port import PortSecurity, is_loopback
from router.config import RouterConfig
from tests.support.certificates import Authority, replace

TOKEN = "first-token-0123456789"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    return path


def test_only_loopback_counts_as_loopback():
    assert all(map(is_loopback, ("127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1")))
    others = (
        "0.0.0.0:1",
        "[::]:1",
        "10.0.0.1:1",
        "localhost.evil.test:1",
        "127.0.0.1.test:1",
        ":1",
    )
    assert not any(map(is_loopback, others))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "listen=0.0.0.0:1: without TLS .* set tls_cert and tls_key; .* or, .*, plaintext=on"),
        ({"auth_tokens": "tokens"}, "without TLS this would be plain text"),
        ({"plaintext": "yes"}, "plaintext=yes: need one of off, side-ports, on"),
        ({"plaintext": "side-ports"}, "listen=0.0.0.0:1: without TLS"),
        ({"tls_cert": "server.pem"}, "tls_cert without tls_key"),
        ({"tls_key": "server.key"}, "tls_key without tls_cert"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca without tls_cert"),
        ({"tls_client_names": "a"}, "tls_client_names without tls_client_ca"),
        ({"tls_cert": "none.pem", "tls_key": "server.key"}, "tls_cert: .*none.pem"),
        ({"tls_cert": "client.pem", "tls_key": "server.key"}, "are no certificate with its key"),
        ({"tls_cert": "ca.pem", "tls_key": "tokens"}, "are no certificate with its key"),
        (
            {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "tokens"},
            "tokens has no CA certificate",
        ),
        ({"plaintext": "on", "auth_tokens": "none"}, "auth_tokens: .*none"),
        ({"plaintext": "on", "auth_tokens": "empty"}, "has no token: write one on each line"),
        ({"plaintext": "on", "open_services": "status"}, "open_services=status: need health"),
    ],
)
def test_settings_that_do_not_fit_are_named_with_what_does(
    authority: Authority, tokens: Path, settings: dict[str, str], problem: str
):
    authority.issue("server", "127.0.0.1")
    authority.issue("client", "client.test")
    replace(authority.folder / "tokens", tokens.read_bytes())
    replace(authority.folder / "empty", b"")
    texts = ("plaintext", "tls_client_names", "open_services")
    given: dict[str, Any] = {
        name: value if name in texts else authority.folder / value
        for name, value in settings.items()
    }
    with pytest.raises(ValueError, match=problem) as caught:
        PortSecurity(**given).check_security("0.0.0.0:1")
    assert TOKEN not in str(caught.value)


def test_plain_text_is_for_loopback_or_for_who_asks():
    PortSecurity().check_security("127.0.0.1:1")
    PortSecurity(plaintext="on").check_security("0.0.0.0:1")


@pytest.mark.parametrize("program", ["router", "executor"])
@pytest.mark.parametrize("name", ["health_listen", "metrics_listen"])
@pytest.mark.parametrize("has_tls", [False, True])
def test_ports_beside_it_are_plain_text_for_loopback_or_for_who_asks(
    authority: Authority, program: str, name: str, has_tls: bool
):
    """TLS is for the port that clients call: those for probes and metrics have none."""

    def configure(address: str, plaintext: str) -> None:
        settings: dict[str, Any] = {name: address, "plaintext": plaintext}
        if has_tls:
            files = authority.issue("server", "127.0.0.1")
            settings |= {"tls_cert": files.cert, "tls_key": files.key}
        if program == "router":
            RouterConfig(groups=(("127.0.0.1:1",),), **settings)
        else:
            ExecutorConfig(model=DEMO_MODEL, **settings)

    configure("127.0.0.1:9090", "off")
    for address in ("0.0.0.0:9090", "[::]:9090", "10.0.0.7:9090"):
        with pytest.raises(ValueError, match=f"{name}={re.escape(address)}: .*=side-ports"):
            configure(address, "off")
        configure(address, "side-ports")
        configure(address, "on")


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
    authority: Authority, tokens: Path, settings: dict[str, str], problem: str
):
    authority.issue("client", "client.test")
    replace(authority.folder / "tokens", tokens.read_bytes())
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


def test_a_password_in_a_setting_that_is_logged_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        RouterConfig(groups=(("127.0.0.1:1",),), otlp_endpoint=f"http://me:{TOKEN}@collector:4317")
    assert TOKEN not in str(caught.value)
