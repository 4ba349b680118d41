"""A caller that shows its secrets to the wrong server gives them away."""

from pathlib import Path

import pytest

from protos.transport import credentials
from protos.transport.credentials import TlsFiles, stale_files
from router.client import Client
from router.executors.security import ExecutorSecurity
from tests.support.certificates import Authority
from tests.support.echo_server import (
    NOT_CONNECTED,
    STREAM,
    ask,
    exchange,
    mutual_tls,
    refusal,
    serving,
)

TOKEN = "first-token-0123456789"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


async def test_a_client_goes_on_with_new_files_and_its_streams_with_the_old_ones(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("router.client.client.RELOAD_S", 0.0)
    files = authority.issue("client", "client.test")
    async with serving(**mutual_tls(authority)) as address, Client(address, files) as client:
        first = client._channels[-1]
        stream = first.stream_stream(STREAM)()
        await exchange(stream, b"1")

        successor = Authority(authority.folder)
        successor.issue("server", "127.0.0.1")
        successor.issue("client", "client.test")
        client._renew()
        assert await ask(client._channels[-1]) == b"hello"
        assert client._channels[-1] is not first
        await exchange(stream, b"2")


@pytest.mark.parametrize(
    "target", ["router:50051", "dns:///router:50051", "ipv4:127.0.0.1:1,10.0.0.1:1"]
)
def test_a_client_does_not_send_a_token_off_this_machine_in_plain_text(
    target: str, authority: Authority
):
    with pytest.raises(ValueError, match="the token would be sent in plain text") as caught:
        Client(target, token=TOKEN)
    assert TOKEN not in str(caught.value)
    Client(target, token=TOKEN, plaintext=True)
    Client(target, TlsFiles(ca=authority.ca), token=TOKEN)
    for near in ("127.0.0.1:1", "dns:///localhost:1", "unix:/tmp/router", "ipv6:[::1]:1"):
        Client(near, token=TOKEN)


async def test_a_group_behind_a_name_is_checked_by_that_name(authority: Authority):
    """Its addresses are numbers that no certificate has."""
    security = ExecutorSecurity(executor_ca=authority.ca)
    own = authority.issue("server", "executor.test")
    async with serving(tls_cert=own.cert, tls_key=own.key) as address:
        by_name = security.opener(("dns:executor.test:1?size=2",))
        async with by_name.open(address, ()) as channel:
            assert await ask(channel) == b"hello"
        async with security.opener((address,)).open(address, ()) as channel:
            assert (await refusal(channel)).code() in NOT_CONNECTED


def test_a_file_of_the_executors_token_that_makes_no_sense_is_told_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(credentials, "TOKEN_RELOAD_S", 0.0)
    path = tmp_path / "token"
    path.write_text(TOKEN)
    opener = ExecutorSecurity(executor_token=path).opener(("127.0.0.1:1",))
    assert stale_files()["executor_token"] == 0
    path.write_text("")
    assert stale_files()["executor_token"] == 1
    del opener  # it was there until now
