"""Overlay cpu-demo: its very commands and environment, as processes on loopback addresses.

Each pod gets an address of its own in 127.0.0.0/8, where it listens at the manifest's ports. What a
process cannot have is what an image and a cluster add: the files below /opt are the repository's,
and names are answered by tests/deploy/resolver. Processes are forked off a server that has imported
what they import.
"""

import asyncio
import json
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.error import HTTPError

import grpc
import pytest

from deploy.local.demo import SEED, ask, draw_requests
from deploy.local.processes import Process
from protos.executor.v1 import executor_pb2
from protos.serving.v1 import serving_pb2
from router.client import Client, Unavailable
from tests.deploy.cluster import Cluster, Pod
from tests.deploy.images import dockerfiles
from tests.deploy.rendering import (
    KUBERNETES,
    Manifest,
    named,
    of_kind,
    render,
    render_folder,
)
from tests.e2e.support.fork_server import fork_server
from tests.support.certificates import Authority
from tests.support.echo_server import calling
from tests.support.scraping import scrape_text

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has every address of 127.0.0.0/8"
)

SERVICES = (
    serving_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"],
)
RESOLVER = Path(__file__).parent / "resolver"
NUM_REQUESTS = 24
WAIT_S = 120.0
CALLER_TOKEN, OPERATOR_TOKEN, EXECUTOR_TOKEN, METRICS_TOKEN = (64 * letter for letter in "coem")
TOKENS = (
    ("lockstep-caller-tokens", "tokens", f"operator {OPERATOR_TOKEN}\n{CALLER_TOKEN}"),
    ("lockstep-executor-token", "token", EXECUTOR_TOKEN),
    ("lockstep-executor-token", "metrics", METRICS_TOKEN),
)


@pytest.fixture(scope="module", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fork_server(tmp_path_factory.mktemp("forks"), python_path=str(RESOLVER)):
        yield


def free_address(ports: list[int]) -> str:
    """Returns a loopback address at which nobody listens at these ports."""
    while True:
        ip = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind((ip, port))
        except OSError:
            continue
        return ip


class LoopbackCluster:
    """Runs the pods of an overlay, each of one container, as processes."""

    def __init__(self, manifests: list[Manifest], log_dir: Path) -> None:
        self.cluster = Cluster(manifests)
        self.log_dir = log_dir
        self.secrets = log_dir / "secrets"
        self.hosts = log_dir / "hosts.json"
        self.processes: dict[str, Process] = {}
        self.cluster.pods = [self._at_loopback(pod) for pod in self.cluster.pods]
        self.publish()

    def _at_loopback(self, pod: Pod) -> Pod:
        """The same pod, started at an address that exists here."""
        kind = "StatefulSet" if pod.domain else "Deployment"
        [owner] = of_kind(self.cluster.manifests, kind)
        ports = [p["containerPort"] for c in pod.containers for p in c.spec["ports"]]
        return self.cluster.start(
            owner["spec"]["template"],
            pod.name,
            free_address(ports),
            domain=pod.domain,
            labels=pod.labels,
        )

    def pod(self, name: str) -> Pod:
        [pod] = [pod for pod in self.cluster.pods if pod.name == name]
        return pod

    def publish(self) -> None:
        """Lets the names of headless Services resolve to the pods that there are."""
        names = [
            service["metadata"]["name"]
            for service in of_kind(self.cluster.manifests, "Service")
            if service["spec"].get("clusterIP") == "None"
        ]
        complete = self.hosts.with_suffix(".new")
        complete.write_text(json.dumps({name: self.cluster.resolve(name) for name in names}))
        complete.replace(self.hosts)

    def start(self, pod: Pod) -> None:
        """Starts a pod's container as its image and manifest say."""
        [container] = pod.containers
        image = dockerfiles.FILES[container.image]
        _, *arguments = [*dockerfiles.entrypoint(image), *container.spec.get("args", ())]
        env = {**dockerfiles.environment(image), **container.env}
        env = {name: dockerfiles.in_repository(image, value) for name, value in env.items()}
        for mount in container.spec["volumeMounts"]:
            [volume] = [v for v in pod.spec["volumes"] if v["name"] == mount["name"]]
            if "secret" in volume:
                path, secret = f"{mount['mountPath']}/", volume["secret"]["secretName"]
                folder = f"{self.secrets / secret}/"
                env = {name: value.replace(path, folder) for name, value in env.items()}
        # Pods may listen everywhere, each in a network of its own; here all share one.
        env = {name: value.replace("0.0.0.0", pod.ip) for name, value in env.items()}
        env |= {"PYTHONPATH": str(RESOLVER), "HOSTS_FILE": str(self.hosts)}
        self.processes[pod.name] = Process(
            pod.name, arguments, log_path=self.log_dir / f"{pod.name}.log", env=env
        )

    async def replace(self, name: str) -> None:
        """Kills a pod; another with its name starts at another address, as StatefulSets do."""
        await self.processes[name].kill()
        old = self.pod(name)
        self.cluster.pods.remove(old)
        self.publish()
        new = self._at_loopback(old)
        self.cluster.pods.append(new)
        self.start(new)
        self.publish()

    async def probe(self, pod: Pod, probe: str) -> None:
        """Asks as the kubelet does until the answer is SERVING."""
        [container] = pod.containers
        asked = container.probes[probe]["grpc"]
        async with asyncio.timeout(WAIT_S):
            while not await is_serving(f"{pod.ip}:{asked['port']}", asked["service"]):
                for process in self.processes.values():
                    assert not process.has_ended, f"{process.name} ended:\n{process.log_tail}"
                await asyncio.sleep(0.1)

    async def stop(self) -> dict[str, int]:
        """Sends every pod SIGTERM. Returns the exit codes of those that end within their grace."""
        grace = {pod.name: pod.spec["terminationGracePeriodSeconds"] for pod in self.cluster.pods}
        await asyncio.gather(*[p.stop(grace[name]) for name, p in self.processes.items()])
        return {name: await process.exited() for name, process in self.processes.items()}


async def is_serving(address: str, service: str) -> bool:
    async with Client(address) as client:
        try:
            return await client.health(service)
        except Unavailable:
            return False


async def answers(address: str, service: str, method: str) -> bool:
    """Says whether a port lets somebody without a token, or with the other port's, call a method."""
    for token in (None, EXECUTOR_TOKEN if service == SERVICES[0].full_name else CALLER_TOKEN):
        async with calling(address, token=token) as channel:
            call = channel.unary_unary(f"/{service}/{method}")(b"")
            if await call.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return True
    return False


@asynccontextmanager
async def running(manifests: list[Manifest], folder: Path) -> AsyncIterator[LoopbackCluster]:
    """Runs an overlay, with Secrets for its tokens, until the block ends."""
    for secret, file, token in TOKENS:
        (folder / "secrets" / secret).mkdir(parents=True, exist_ok=True)
        (folder / "secrets" / secret / file).write_text(token)
    cluster = LoopbackCluster(manifests, folder)
    try:
        for pod in cluster.cluster.pods:
            cluster.start(pod)
        yield cluster
    finally:
        for process in cluster.processes.values():
            await process.kill()


def router_address(cluster: LoopbackCluster) -> str:
    service = named(cluster.cluster.manifests, "Service", "lockstep-router")
    return f"{cluster.pod('lockstep-router-0').ip}:{service['spec']['ports'][0]['port']}"


async def metrics(pod: Pod, token: str | None = METRICS_TOKEN) -> str:
    [port] = [p["containerPort"] for p in pod.containers[0].spec["ports"] if p["name"] == "metrics"]
    return await scrape_text(f"{pod.ip}:{port}", token=token)


async def answer_right(address: str, seed: int) -> None:
    async with Client(address, token=CALLER_TOKEN) as client:
        asked = [ask(client, request) for request in draw_requests(seed, NUM_REQUESTS)]
        for answer in await asyncio.gather(*asked):
            assert answer.is_right, (answer.request.problem, answer.text)


async def test_the_demo_answers_right_also_after_a_pod_came_back_elsewhere(
    tmp_path: Path,
) -> None:
    async with running(render("cpu-demo"), tmp_path) as pods:
        router, address = pods.pod("lockstep-router-0"), router_address(pods)
        for pod in pods.cluster.pods:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                await pods.probe(pod, probe)
        await answer_right(address, SEED)
        for pod in pods.cluster.pods:
            assert "# HELP lockstep_" in await metrics(pod)
            for other in (None, EXECUTOR_TOKEN, CALLER_TOKEN):
                with pytest.raises(HTTPError, match="401"):
                    await metrics(pod, other)
            port = 50051 if pod is router else 50061
            service = SERVICES[0 if pod is router else 1]
            for method in service.methods:
                assert not await answers(f"{pod.ip}:{port}", service.full_name, method.name)
        for scaled in of_kind(render("gpu-node"), "ScaledObject"):
            for trigger in scaled["spec"]["triggers"]:
                [metric] = re.findall(r"lockstep_\w+", trigger["metadata"]["query"])
                assert f"# TYPE {metric} gauge" in await metrics(router)

        before = pods.pod("lockstep-executor-1").ip
        await pods.replace("lockstep-executor-1")
        after = pods.pod("lockstep-executor-1")
        assert after.ip != before
        await pods.probe(after, "readinessProbe")
        await pods.probe(router, "readinessProbe")
        await answer_right(address, SEED)
        exit_codes = await pods.stop()
    assert exit_codes == dict.fromkeys(exit_codes, 0)


async def test_certificates_between_router_and_executors_take_two_secrets(tmp_path: Path) -> None:
    base, component = KUBERNETES / "overlays" / "cpu-demo", KUBERNETES / "components/executor-tls"
    kustomization = {
        "resources": [os.path.relpath(base, tmp_path)],
        "components": [os.path.relpath(component, tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    make_secrets(tmp_path / "secrets")

    async with running(render_folder(tmp_path), tmp_path) as cluster:
        router = cluster.pod("lockstep-router-0")
        await cluster.probe(router, "readinessProbe")
        await answer_right(router_address(cluster), SEED)
        executor = cluster.pod("lockstep-executor-0")
        assert await is_serving(f"{executor.ip}:50261", "liveness")
        assert not await is_serving(f"{executor.ip}:50061", "liveness"), "without a certificate"


def make_secrets(folder: Path) -> None:
    """Writes what cert-manager would put into the Secrets of router and executors."""
    authority = Authority(folder)
    for name in ("lockstep-router", "lockstep-executor"):
        files = authority.issue(name, name)
        secret = folder / f"{name}-tls"
        secret.mkdir()
        for source, target in zip(
            (files.cert, files.key, files.ca), ("tls.crt", "tls.key", "ca.crt"), strict=True
        ):
            shutil.copy(str(source), secret / target)
