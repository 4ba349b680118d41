"""If a check of a caller lets a stranger through, all prompts and answers are his."""

import hashlib
import itertools
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2_grpc

from protos.transport import credentials as credentials_module
from protos.transport.admission import Refusals
from protos.transport.channel import with_token
from protos.transport.credentials import (
    AcceptedTokens,
    TlsFiles,
    channel_credentials,
    read_tokens,
    stale_files,
    token_sender,
)
from protos.transport.error_details import error_details
from protos.transport.health import HealthServicer
from protos.transport.port import ServiceConfig
from tests.support.certificates import Authority, replace
from tests.support.echo_server import (
    ANY,
    ECHO,
    HEALTH,
    NOT_CONNECTED,
    REFLECTION,
    STREAM,
    WHO,
    Refused,
    ask,
    calling,
    exchange,
    mutual_tls,
    refusal,
    serving,
)

TOKEN, SECOND, WRONG = "first-token-0123456789", "second-token-0123456789", "no-token-0123456789"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# ours\n{TOKEN}\n\n  {SECOND}  \n")
    return path


@pytest.fixture(autouse=True)
def _files_are_looked_at_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials_module, "TOKEN_RELOAD_S", 0.0)


# ---- tokens


@pytest.mark.parametrize("token", [TOKEN, SECOND])
async def test_any_token_of_the_file_is_taken(tokens: Path, token: str):
    async with serving(auth_tokens=tokens) as address, calling(address, token=token) as channel:
        assert await ask(channel) == b"hello"
        call = channel.stream_stream(STREAM)()
        await exchange(call, b"more")


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ((), "no token: send the metadata 'authorization: Bearer TOKEN'"),
        ((("authorization", f"Bearer {WRONG}"),), "not one that is taken here"),
        ((("authorization", f"Bearer {TOKEN}x"),), "not one that is taken here"),
        ((("authorization", f"Bearer {TOKEN[:-1]}"),), "not one that is taken here"),
        ((("authorization", "Bearer # ours"),), "not one that is taken here"),
        ((("authorization", "Bearer "),), "not one that is taken here"),
        ((("authorization", TOKEN),), "another scheme than Bearer"),
        ((("authorization", f"Basic {TOKEN}"),), "another scheme than Bearer"),
        ((("authorization", f"Bearer {TOKEN}"),) * 2, "more than once"),
    ],
)
@pytest.mark.parametrize("method", [ECHO, STREAM, "/test.Echo/Nothing", "/no.Such/Method"])
async def test_every_other_call_is_refused_and_told_why_but_not_what_it_sent(
    tokens: Path, method: str, metadata: Any, problem: str
):
    async with serving(auth_tokens=tokens) as address, calling(address) as channel:
        # As a stream that sends nothing: without a token it is refused before the first message.
        call = channel.stream_stream(method)(metadata=metadata)
        with pytest.raises(Refused) as caught:
            await call.read()

    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert error_details(caught.value).reason == "UNAUTHENTICATED"
    assert problem in caught.value.details()
    assert all(secret not in repr(caught.value) for secret in (TOKEN, SECOND, WRONG))


@pytest.mark.parametrize(
    ("open_services", "is_open"),
    [
        ("health", {HEALTH: True, REFLECTION: False}),
        ("reflection", {HEALTH: False, REFLECTION: True}),
        ("health,reflection", {HEALTH: True, REFLECTION: True}),
        ("none", {HEALTH: False, REFLECTION: False}),
    ],
)
async def test_health_and_reflection_are_as_open_as_they_are_set(
    tokens: Path, open_services: str, is_open: dict[str, bool]
):
    settings = {"auth_tokens": tokens, "open_services": open_services}
    async with serving(**settings) as address, calling(address) as channel:
        for method, answers in is_open.items():
            if answers:
                assert await ask(channel, method) in (b"hello", b"\x08\x01")
            else:
                refused = await refusal(channel, method)
                assert refused.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_name_that_only_begins_like_an_open_service_is_not_open(tokens: Path):
    async with serving(auth_tokens=tokens) as address, calling(address) as channel:
        refused = await refusal(channel, "/grpc.health.v1.HealthAndMore/Check")

        assert refused.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_can_be_replaced_while_calls_go_on(tokens: Path):
    sent = tokens.with_name("sent")
    sent.write_text(TOKEN)
    send = token_sender(sent)
    async with serving(auth_tokens=tokens) as address:
        channel = with_token(grpc.aio.insecure_channel(address), send)
        async with channel:
            running = channel.stream_stream(STREAM)()
            await exchange(running, b"1")

            replace(tokens, f"{TOKEN}\n{WRONG}\n".encode())
            assert await ask(channel) == b"hello"
            replace(sent, WRONG.encode())
            assert await ask(channel) == b"hello"
            replace(tokens, WRONG.encode())
            assert await ask(channel) == b"hello"

            await exchange(running, b"2")  # it began while its token was taken
        async with calling(address, token=TOKEN) as channel:
            assert (await refusal(channel)).code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "content",
    [
        *("", "# none", "short", "with space in between", "ünïcödé-" * 3),
        *("name short", f"n\xe4me {WRONG}", f"# {WRONG}", f"{WRONG} {SECOND}"),
    ],
)
def test_a_file_that_makes_no_sense_leaves_the_tokens_as_they_were(
    tokens: Path, content: str, caplog: pytest.LogCaptureFixture
):
    accepted = AcceptedTokens(tokens)
    tokens.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert accepted.name_of(TOKEN)
        assert not accepted.name_of(content)

    with pytest.raises(ValueError, match=str(tokens)) as caught:
        read_tokens(tokens)
    assert not content or content not in str(caught.value)

    tokens.unlink()
    assert accepted.name_of(TOKEN)
    assert stale_files()["auth_tokens"] == 1
    tokens.write_text(WRONG)
    assert accepted.name_of(WRONG)
    assert stale_files()["auth_tokens"] == 0
    assert not accepted.name_of(TOKEN)


def test_tokens_are_compared_as_hashes_and_all_of_them(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
):
    """So that the time tells neither where a token differs nor which one it is."""
    compared = []

    def note(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    accepted = AcceptedTokens(tokens)
    monkeypatch.setattr("hmac.compare_digest", note)
    for token in (TOKEN, SECOND, WRONG, ""):
        compared.clear()
        accepted.name_of(token)
        assert compared == [(32, 32)] * 2


async def test_a_caller_keeps_its_name_when_its_token_changes(tokens: Path):
    tokens.write_text(f"search {TOKEN}\nsearch {SECOND}\n{WRONG}\n")
    async with serving(auth_tokens=tokens) as address:
        names = []
        for token in (TOKEN, SECOND, WRONG):
            async with calling(address, token=token) as channel:
                names.append(await ask(channel, WHO))
                tokens.write_text(tokens.read_text() + "# read again\n")
                assert await ask(channel, WHO) == names[-1]
    assert names[:2] == [b"search"] * 2
    assert len(names[2]) == 32  # it has none: a hash
    assert names[2] not in hashlib.sha256(WRONG.encode()).hexdigest().encode()


async def test_a_caller_is_told_by_its_certificate_and_its_token(
    authority: Authority, tokens: Path
):
    tokens.write_text(f"search {TOKEN}")
    settings = mutual_tls(authority)
    client = authority.issue("client", "client.example", "10.0.0.7")
    async with (
        serving(**settings) as by_certificate,
        serving(**settings, auth_tokens=tokens) as by_both,
        serving() as by_nothing,
    ):
        async with calling(by_certificate, client) as channel:
            assert await ask(channel, WHO) == b"client.example|10.0.0.7"
        async with calling(by_both, client, TOKEN) as channel:
            assert await ask(channel, WHO) == b"search|client.example|10.0.0.7"
        async with calling(by_nothing, token=TOKEN) as channel:  # a word that nobody checked
            assert await ask(channel, WHO) == b""


async def test_callers_whose_alternative_names_grpc_cannot_read_are_told_apart(
    authority: Authority,
):
    async with serving(**mutual_tls(authority)) as address:
        for name in ("alice", "bob"):
            async with calling(address, authority.issue_to_person(name)) as channel:
                assert await ask(channel, WHO) == name.encode()


def test_a_server_keeps_no_token(tokens: Path):
    accepted = AcceptedTokens(tokens)

    def reachable(thing: Any, depth: int = 6) -> str:
        if depth == 0:
            return ""
        parts = [repr(thing)]
        for value in getattr(thing, "__dict__", {}).values():
            parts.append(reachable(value, depth - 1))
        return "".join(parts)

    shown = reachable(accepted)
    assert "Watched" in shown
    assert "b'" in shown  # the hashes
    assert TOKEN not in shown


# ---- TLS


@pytest.mark.parametrize("who", ["none", "of another CA", "plain text"])
async def test_mutual_tls_refuses_every_other_caller(
    authority: Authority, tmp_path: Path, who: str
):
    other = Authority(tmp_path / "other").issue("client", "client.test")
    files = {
        "none": TlsFiles(ca=authority.ca),
        "of another CA": TlsFiles(other.cert, other.key, authority.ca),
        "plain text": None,
    }
    async with serving(**mutual_tls(authority)) as address, calling(address, files[who]) as channel:
        assert (await refusal(channel)).code() in NOT_CONNECTED


@pytest.mark.parametrize("fault", ["of another CA", "for another host"])
async def test_a_client_refuses_a_server_that_is_not_the_one(
    authority: Authority, tmp_path: Path, fault: str
):
    issuer = Authority(tmp_path / "other") if fault == "of another CA" else authority
    own = issuer.issue("server", "127.0.0.1" if fault == "of another CA" else "else.test")
    files = TlsFiles(ca=authority.ca)
    async with (
        serving(tls_cert=own.cert, tls_key=own.key) as address,
        calling(address, files) as channel,
    ):
        assert (await refusal(channel)).code() in NOT_CONNECTED


@pytest.mark.parametrize("method", [ECHO, STREAM, REFLECTION])
async def test_a_certificate_of_the_ca_with_another_name_is_refused(
    authority: Authority, method: str
):
    names = "router.test, spare.test"
    async with serving(**mutual_tls(authority), tls_client_names=names) as address:
        async with calling(address, authority.issue("executor", "executor.test")) as channel:
            refused = await refusal(channel, method)
            assert refused.code() == grpc.StatusCode.UNAUTHENTICATED
            assert "executor.test" in refused.details()
            assert await ask(channel, HEALTH) == b"\x08\x01"  # status: SERVING
        async with calling(address, authority.issue("router", "x.test", "spare.test")) as channel:
            assert await ask(channel, method) == b"hello"


async def test_new_connections_get_new_files_and_open_ones_go_on(
    authority: Authority, tmp_path: Path
):
    client = authority.issue("client", "client.test")
    async with (
        serving(**mutual_tls(authority)) as address,
        calling(address, client) as channel,
    ):
        stream = channel.stream_stream(STREAM)()
        await exchange(stream, b"1")
        before = client.read()

        successor = Authority(authority.folder)  # another CA in the same files
        successor.issue("server", "127.0.0.1")
        async with calling(address, successor.issue("client", "client.test")) as newer:
            assert await ask(newer) == b"hello"
        await exchange(stream, b"2")
        assert await ask(channel) == b"hello"

        old = [tmp_path / name for name in ("old.pem", "old.key", "old-ca.pem")]
        for path, content in zip(old, (before.cert, before.key, before.ca), strict=True):
            assert content is not None
            path.write_bytes(content)
        async with calling(address, TlsFiles(*old)) as outdated:
            assert (await refusal(outdated)).code() in NOT_CONNECTED


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *itertools.product(("server.pem", "server.key", "ca.pem"), (None, b"", b"no PEM")),
        ("server.pem", "another's"),
        ("server.key", "another's"),
    ],
)
async def test_half_of_a_new_pair_changes_nothing(
    authority: Authority, tmp_path: Path, name: str, content: Any
):
    if content == "another's":
        other = Authority(tmp_path / "other")
        other.issue("server", "127.0.0.1")
        content = (other.folder / name).read_bytes()
    client = authority.issue("client", "client.test")
    credentials = channel_credentials(client.read())
    async with serving(**mutual_tls(authority)) as address:
        if content is None:
            (authority.folder / name).unlink()
        else:
            replace(authority.folder / name, content)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            assert await ask(channel) == b"hello"


async def test_the_port_for_probes_has_health_alone():
    health = HealthServicer()
    health.set("", True)

    def add_to(server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)

    with structlog.testing.capture_logs() as lines:
        server = await ServiceConfig(health_listen=ANY).serve_health(add_to, Refusals())
    assert server is not None
    try:
        async with grpc.aio.insecure_channel(lines[0]["address"]) as channel:
            assert await channel.unary_unary(HEALTH)(b"") == b"\x08\x01"  # status: SERVING
            assert (await refusal(channel)).code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(None)
