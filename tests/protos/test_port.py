"""Settings that would leave a door open must stop the start, and say what to set instead."""

import re
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.transport.addresses import is_loopback
from protos.transport.admission import Refusals
from protos.transport.port import ServiceConfig
from tests.support.certificates import Authority, replace

TOKEN = "first-token-0123456789"


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
            "^tls_client_ca: .*tokens has no CA certificate",
        ),
        (
            {"tls_cert": "server.pem", "tls_key": "locked.key"},
            "locked.key is encrypted: .* openssl",
        ),
        ({"plaintext": "on", "auth_tokens": "none"}, "auth_tokens: .*none"),
        ({"plaintext": "on", "auth_tokens": "empty"}, "has no token: write one on each line"),
        ({"plaintext": "on", "metrics_tokens": "none"}, "metrics_tokens: .*none"),
        ({"plaintext": "on", "metrics_tokens": "empty"}, "metrics_tokens: .* has no token"),
        ({"plaintext": "on", "open_services": "status"}, "open_services=status: need health"),
        ({"plaintext": "on", "log_level": "loud"}, "log_level=loud: need one of debug, info"),
    ],
)
def test_settings_that_do_not_fit_are_named_with_what_does(
    tmp_path: Path, settings: dict[str, str], problem: str
):
    authority = Authority(tmp_path / "ca")
    authority.issue("server", "127.0.0.1")
    authority.issue("client", "client.test")
    replace(authority.folder / "tokens", TOKEN.encode())
    replace(authority.folder / "empty", b"")
    replace(authority.folder / "locked.key", b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    texts = ("plaintext", "tls_client_names", "open_services", "log_level")
    given: dict[str, Any] = {
        name: value if name in texts else authority.folder / value
        for name, value in settings.items()
    }
    with pytest.raises(ValueError, match=problem) as caught:
        ServiceConfig(listen="0.0.0.0:1", **given)
    assert TOKEN not in str(caught.value)


async def test_a_port_that_is_taken_is_named_with_the_reason():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"^listen={address}: .*in use; free it, or choose"):
            await ServiceConfig(listen=address).start(grpc.aio.server())


@pytest.mark.parametrize("name", ["health_listen", "metrics_listen", "listen"])
async def test_an_address_that_no_name_can_have_is_named_with_its_setting(name: str):
    config, refusals = ServiceConfig(**{name: "a..b:1"}, plaintext="on"), Refusals()

    async def open_ports() -> None:
        await config.serve_health(lambda server: None, refusals)
        config.serve_metrics(list, refusals.count)
        await config.start(grpc.aio.server())

    with pytest.raises(OSError, match=f"^{name}=a..b:1: the address cannot be bound: .*label"):
        await open_ports()


def test_plain_text_is_for_loopback_unless_the_operator_asks_for_it():
    ServiceConfig(listen="127.0.0.1:1")
    ServiceConfig(listen="0.0.0.0:1", plaintext="on")


@pytest.mark.parametrize("name", ["health_listen", "metrics_listen"])
@pytest.mark.parametrize("has_tls", [False, True])
def test_ports_beside_it_are_plain_text_likewise(tmp_path: Path, name: str, has_tls: bool):
    """TLS is for the port that clients call: those for probes and metrics have none."""
    settings: dict[str, Any] = {}
    if has_tls:
        files = Authority(tmp_path / "ca").issue("server", "127.0.0.1")
        settings = {"tls_cert": files.cert, "tls_key": files.key}
    ServiceConfig(**settings, **{name: "127.0.0.1:9090"})
    for address in ("0.0.0.0:9090", "[::]:9090", "10.0.0.7:9090"):
        with pytest.raises(ValueError, match=f"{name}={re.escape(address)}: .*=side-ports"):
            ServiceConfig(**settings, **{name: address})
        for plaintext in ("side-ports", "on"):
            ServiceConfig(**settings, plaintext=plaintext, **{name: address})
