"""Security of both hops, with real processes: certificates and tokens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio

from deploy.local.demo import SEED, ask, draw_requests, idle_group
from deploy.local.launch import DEMO_MODEL, LocalStack
from deploy.local.processes import Process
from protos.executor.v1 import executor_pb2
from protos.serving.v1 import serving_pb2
from protos.transport.credentials import TlsFiles
from router.client import Client, Rejected, Unavailable
from tests.e2e.conftest import EXECUTOR_ARGS, PATIENT
from tests.e2e.support.stacks import group_with_problem
from tests.e2e.support.streams import PROMPT, long_streams
from tests.support.certificates import Authority, replace
from tests.support.echo_server import HEALTH as HEALTH_CHECK
from tests.support.echo_server import NOT_CONNECTED, REFLECTION, calling

BAD_CONFIGURATION = 2
OK, UNAUTHENTICATED = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
PUBLIC = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"]
INNER = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"]
GET_STATUS = f"/{PUBLIC.full_name}/GetStatus"


class Hop(NamedTuple):
    """One of both hops: who is called, where, and with what.

    Attributes:
        service: The service that is called.
        addresses: Where.
        name: Of the certificates there, if not the host of the address.
        files: Of its rightful caller.
        token: Of its rightful caller.
    """

    service: Any
    addresses: Sequence[str]
    name: str | None
    files: TlsFiles
    token: str

    async def outcomes(
        self, files: TlsFiles | None, token: str | None, *more: str
    ) -> set[grpc.StatusCode]:
        """Returns how calls of all methods of the service, and of some more, end everywhere."""
        called = [f"/{self.service.full_name}/{method.name}" for method in self.service.methods]
        return {
            await outcome(address, method, files, token, self.name)
            for address in self.addresses
            for method in (*called, *more)
        }


@dataclass
class Secured:
    """A stack of which both hops have mutual TLS and tokens.

    Attributes:
        public: CA between clients and the router.
        inner: CA between the router and executors.
        client: Files of a client.
        router: Files that the router shows executors.
        stack: The processes.
    """

    public: Authority
    inner: Authority
    client: TlsFiles
    router: TlsFiles
    stack: LocalStack

    def hop(self, called: str) -> Hop:
        if called == "router":
            return Hop(PUBLIC, [self.stack.address], None, self.client, PUBLIC_TOKEN)
        addresses = self.stack.executor_addresses
        return Hop(INNER, addresses, "executor.test", self.router, INNER_TOKEN)


PUBLIC_TOKEN, OTHER_TOKEN = "public-token-8f1c2b7e", "other-token-6e0d9a35"
INNER_TOKEN = "inner-token-1b9d4f60"
NEXT_PUBLIC, NEXT_INNER = "next-public-token-77a2", "next-inner-token-c41e"
on_both_hops = pytest.mark.parametrize("hop", ["router", "executor"])
SECRETS = (PUBLIC_TOKEN, OTHER_TOKEN, INNER_TOKEN, NEXT_PUBLIC, NEXT_INNER)


def flags(prefix: str, files: TlsFiles, ca_flag: str) -> tuple[str, ...]:
    return (
        *(f"--{prefix}-cert", str(files.cert), f"--{prefix}-key", str(files.key)),
        *(ca_flag, str(files.ca)),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    public, inner = Authority(folder / "public"), Authority(folder / "inner")
    (public.folder / "tokens").write_text(f"{PUBLIC_TOKEN}\n{OTHER_TOKEN}\n")
    (public.folder / "token").write_text(PUBLIC_TOKEN)
    (inner.folder / "tokens").write_text(INNER_TOKEN)
    client, router = public.issue("client", "client.test"), inner.issue("router", "router.test")
    stack = LocalStack(
        dp_size=2,
        executor_args=(
            *EXECUTOR_ARGS,
            *flags("tls", inner.issue("executor", "executor.test"), "--tls-client-ca"),
            *("--tls-client-names", "router.test", "--auth-tokens", f"{inner.folder}/tokens"),
            *("--log-level", "debug"),
        ),
        router_args=(
            *flags("tls", public.issue("public", "127.0.0.1"), "--tls-client-ca"),
            *("--auth-tokens", f"{public.folder}/tokens"),
            *flags("executor", router, "--executor-ca"),
            *("--executor-name", "executor.test", "--executor-token", f"{inner.folder}/tokens"),
            *("--log-level", "debug"),
            *PATIENT,
        ),
        tls=client,
        token=public.folder / "token",
        log_dir=folder,
    )
    async with stack:
        yield Secured(public, inner, client, router, stack)
    assert stack.left_running == []


async def outcome(
    address: str, method: str, files: TlsFiles | None, token: str | None, name: str | None = None
) -> grpc.StatusCode:
    """Returns how a call with an empty message ends.

    As a unary one, whatever the method: gRPC's client for asyncio ends a call itself if that fails
    while it says that no more messages follow.
    """
    async with calling(address, files, token, name) as channel:
        call = channel.unary_unary(method)(b"")
        code: grpc.StatusCode = await call.code()
        assert not any(secret in repr(call) for secret in SECRETS)
        return code


async def test_answers_are_right_through_mutual_tls_and_tokens_on_both_hops(secured: Secured):
    async with secured.stack.client() as client:
        answers = await asyncio.gather(
            *[ask(client, request) for request in draw_requests(SEED, 30)]
        )
        assert all(answer.is_right for answer in answers)
        async with client.many() as many:
            assert (await many.complete("\n17+25=", max_tokens=16)).text == "42\n"
        assert (await client.get_model()).has_tokenizer
        assert await client.health("readiness")


@on_both_hops
@pytest.mark.parametrize("token", [None, "wrong-token-wrong-token", "of the other hop"])
async def test_a_missing_or_wrong_token_is_refused(secured: Secured, hop: str, token: str | None):
    called = secured.hop(hop)
    if token == "of the other hop":
        token = INNER_TOKEN if hop == "router" else PUBLIC_TOKEN
    codes = await called.outcomes(called.files, token, REFLECTION)
    assert codes == {UNAUTHENTICATED}


@on_both_hops
async def test_health_needs_a_certificate_but_no_token(secured: Secured, hop: str):
    called = secured.hop(hop)
    for address in called.addresses:
        code = await outcome(address, HEALTH_CHECK, called.files, None, called.name)
        assert code == OK


@on_both_hops
@pytest.mark.parametrize("who", ["nobody", "of another CA", "of the other hop", "in plain text"])
async def test_a_missing_or_wrong_certificate_is_refused(
    secured: Secured, tmp_path: Path, hop: str, who: str
):
    called = secured.hop(hop)
    alien = Authority(tmp_path).issue("client", "router.test")
    other = secured.hop("executor" if hop == "router" else "router").files
    files = {
        "nobody": TlsFiles(ca=called.files.ca),
        "of another CA": TlsFiles(alien.cert, alien.key, called.files.ca),
        "of the other hop": TlsFiles(other.cert, other.key, called.files.ca),
        "in plain text": None,
    }[who]
    assert await called.outcomes(files, called.token, HEALTH_CHECK) <= set(NOT_CONNECTED)


async def test_an_executor_takes_no_steps_from_another_executor(secured: Secured):
    """Its certificate is of the same CA, and it has the token."""
    folder = secured.inner.folder
    executor = TlsFiles(folder / "executor.pem", folder / "executor.key", secured.inner.ca)
    codes = await secured.hop("executor").outcomes(executor, INNER_TOKEN)
    assert codes == {UNAUTHENTICATED}


async def test_a_client_is_told_what_it_lacks(secured: Secured, tmp_path: Path):
    address = secured.stack.address
    async with Client(address, secured.client) as client:
        with pytest.raises(Rejected, match="no token") as caught:
            await client.get_model()
        assert caught.value.reason == "UNAUTHENTICATED"
    async with Client(address, TlsFiles(ca=secured.public.ca), token=PUBLIC_TOKEN) as client:
        with pytest.raises(Unavailable):
            await client.get_model()


async def test_files_are_replaced_while_streams_go_on(secured: Secured):
    """Every certificate, both CAs and all tokens; then an executor dies, and is met anew."""
    stack, folder = secured.stack, secured.public.folder
    old_client = {path: path.read_bytes() for path in folder.iterdir()}
    async with stack.client() as client, client.many() as many:
        async with long_streams((client, PROMPT), (many, PROMPT)):
            replace(folder / "tokens", f"{PUBLIC_TOKEN}\n{NEXT_PUBLIC}\n".encode())
            await until_code(secured, NEXT_PUBLIC, OK)  # tokens are looked at every second
            replace(folder / "token", NEXT_PUBLIC.encode())
            public = Authority(folder)
            public.issue("public", "127.0.0.1")
            public.issue("client", "client.test")
            await until_code(secured, NEXT_PUBLIC, OK)  # and certificates at each connection
            async with stack.client() as newcomer:
                assert (await newcomer.complete("\n17+25=", max_tokens=16)).text == "42\n"
            assert (await client.complete("\n17+25=", max_tokens=16)).text == "42\n"

            replace(secured.inner.folder / "tokens", f"{NEXT_INNER}\n{INNER_TOKEN}\n".encode())
            inner = Authority(secured.inner.folder)
            inner.issue("executor", "executor.test")
            inner.issue("router", "router.test")
            await stack.restart_executor(1)
            assert (await client.complete("\n17+25=", max_tokens=16)).text == "42\n"

        group = await idle_group(client)
        assert group.epoch > 1
        assert group.problem == ""

    replace(folder / "tokens", NEXT_PUBLIC.encode())
    await until_code(secured, PUBLIC_TOKEN, UNAUTHENTICATED)
    assert await public_code(secured, NEXT_PUBLIC) == OK
    outdated = folder / "outdated"
    outdated.mkdir()
    for path, content in old_client.items():
        (outdated / path.name).write_bytes(content)
    files = TlsFiles(outdated / "client.pem", outdated / "client.key", secured.public.ca)
    code = await outcome(stack.address, GET_STATUS, files, NEXT_PUBLIC)
    assert code in NOT_CONNECTED


async def until_code(secured: Secured, token: str, code: grpc.StatusCode) -> None:
    """Returns when this comes of the client's certificate and this token at the router."""
    while await public_code(secured, token) != code:
        await asyncio.sleep(0.1)


async def public_code(secured: Secured, token: str) -> grpc.StatusCode:
    return await outcome(secured.stack.address, GET_STATUS, secured.client, token)


async def test_a_router_with_the_wrong_token_says_so_and_shows_none(
    secured: Secured, tmp_path: Path
):
    wrong = "wrong-token-2222222222"
    (tmp_path / "tokens").write_text(wrong)
    args = (
        *("-m", "router", "--listen", "127.0.0.1:0", "--log-level", "debug"),
        *("--group", ",".join(secured.stack.executor_addresses)),
        *flags("executor", secured.router, "--executor-ca"),
        *("--executor-name", "executor.test", "--executor-token", f"{tmp_path}/tokens"),
    )
    router = Process("router", args, log_path=tmp_path / "router.log", env={})
    try:
        async with Client((await router.event("listening"))["address"]) as client:
            group = await group_with_problem(client, "UNAUTHENTICATED")
            assert not await client.health("readiness")
        assert "not one that is taken here" in group.problem
        assert wrong not in repr(group)
    finally:
        await router.stop(30)
    assert wrong not in router.log_path.read_text()


async def test_no_secret_is_in_logs_status_or_descriptions(secured: Secured):
    async with secured.stack.client() as client:
        seen = repr(await client.get_status())
    token = (secured.inner.folder / "tokens").read_text().split()[0]
    for address in secured.stack.executor_addresses:
        async with calling(address, secured.router, token, "executor.test") as channel:
            described = await channel.unary_unary(f"/{INNER.full_name}/Describe")(b"")
            seen += executor_pb2.DescribeResponse.FromString(described).__repr__()
    logs = list(secured.stack.log_dir.glob("*.log"))
    assert {log.name for log in logs} == {"router.log", "executor-0.log", "executor-1.log"}
    seen += "".join(log.read_text() for log in logs)

    assert "auth_tokens" in seen  # the settings are there, as paths
    assert "agreement" in seen
    hidden = [*SECRETS]
    for key in secured.stack.log_dir.glob("*/*.key"):
        hidden += [line for line in key.read_text().splitlines() if "PRIVATE" not in line]
    assert len(hidden) > len(SECRETS)
    for secret in hidden:
        assert secret not in seen


# ---- nothing in plain text off loopback, unless asked for


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("-m", "router", "--group", "127.0.0.1:1", "--listen", "0.0.0.0:0"), "tls_cert"),
        (("-m", "router", "--group", "dns:executor:1?size=2"), "executor_ca"),
        (("-m", "executor", "--model", str(DEMO_MODEL), "--listen", "0.0.0.0:0"), "tls_cert"),
    ],
)
async def test_plain_text_off_loopback_stops_the_start_and_is_told_what_to_set(
    tmp_path: Path, args: tuple[str, ...], named: str
):
    process = Process("service", args, log_path=tmp_path / "log", env={})

    assert await process.exited() == BAD_CONFIGURATION
    log = process.log_path.read_text()
    assert "plain text" in log
    assert named in log
    assert "plaintext=on" in log
    assert "listening" not in log


async def test_an_executor_that_anybody_could_drive_by_tls_does_not_start(tmp_path: Path):
    files = Authority(tmp_path).issue("executor", "executor.test")
    args = (
        *("-m", "executor", "--model", str(DEMO_MODEL), "--listen", "0.0.0.0:0"),
        *("--tls-cert", str(files.cert), "--tls-key", str(files.key)),
    )
    process = Process("executor", args, log_path=tmp_path / "log", env={})

    assert await process.exited() == BAD_CONFIGURATION
    assert "any caller that reaches it could drive this executor" in process.log_path.read_text()


async def test_plain_text_off_loopback_is_there_for_who_asks_for_it(tmp_path: Path):
    args = ("-m", "router", "--group", "10.0.0.7:1", "--listen", "0.0.0.0:0")
    asked = ("--plaintext", "on", "--executor-plaintext", "on")
    router = Process("router", (*args, *asked), log_path=tmp_path / "log", env={})
    try:
        address = (await router.event("listening"))["address"]
        async with Client(address.replace("0.0.0.0", "127.0.0.1")) as client:
            assert await client.health("liveness")
    finally:
        await router.kill()
    assert "Traceback" not in router.log_path.read_text()
