"""Pods of an overlay: names, addresses and environment, as its manifests give them."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import click

from executor.__main__ import main as executor_main
from router.__main__ import main as router_main
from tests.deploy.rendering import Manifest, matches, named, of_kind

LWS = "leaderworkerset.sigs.k8s.io"
COMMANDS = {
    "lockstep-router": router_main,
    "lockstep-executor": executor_main,
    "lockstep-executor-cpu": executor_main,
}


def twins(command: click.Command) -> set[str]:
    """Returns the environment variables that a program takes settings from."""
    return {name for option in command.params for name in option.envvar or ()}


def settings_of(
    command: click.Command, env: dict[str, str], args: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what a program reads its environment and flags as."""
    with patch.dict(os.environ, env, clear=True):
        return command.make_context(str(command.name), list(args)).params


@dataclass(frozen=True)
class Container:
    """A container of a running pod.

    Attributes:
        env: What its process finds in its environment.
    """

    spec: Manifest
    env: dict[str, str]

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def image(self) -> str:
        """Its name, without the tag."""
        return str(self.spec["image"]).partition(":")[0]

    @property
    def command(self) -> click.Command:
        return COMMANDS[self.image]

    @property
    def settings(self) -> dict[str, Any]:
        """What the program reads its flags and environment as."""
        return settings_of(self.command, self.env, self.spec.get("args", ()))

    @property
    def is_ours(self) -> bool:
        """Whether it runs a program of this repository."""
        return self.image in COMMANDS

    @property
    def probes(self) -> dict[str, Manifest]:
        names = ("startupProbe", "livenessProbe", "readinessProbe")
        return {name: self.spec[name] for name in names}


@dataclass(frozen=True)
class Pod:
    """A running pod.

    Attributes:
        group: Which of the autoscaled replicas it belongs to, where a replica is a group.
        domain: The headless Service below which its own name resolves; "" if none.
    """

    name: str
    ip: str
    labels: dict[str, str]
    spec: Manifest
    containers: tuple[Container, ...]
    domain: str = ""


@dataclass
class Cluster:
    """An overlay's pods.

    Args:
        manifests: What Kustomize made.
        num_replicas: Replicas of the executors, instead of the manifest's.
    """

    manifests: list[Manifest]
    num_replicas: int | None = None
    pods: list[Pod] = field(init=False)

    def __post_init__(self) -> None:
        self.pods = [
            *self._pods_of("Deployment", None),
            *self._pods_of("StatefulSet", self.num_replicas),
            *self._worker_pods(),
        ]

    def pods_of(self, program: str) -> list[Pod]:
        """The pods of "router" or "executor"."""
        name = f"lockstep-{program}"
        return [pod for pod in self.pods if pod.labels["app.kubernetes.io/name"] == name]

    def resolve(self, name: str) -> list[str]:
        """What the cluster's DNS answers a pod of the same namespace."""
        host, _, domain = name.partition(".")
        if domain:
            return [pod.ip for pod in self.pods if (pod.name, pod.domain) == (host, domain)]
        for service in of_kind(self.manifests, "Service"):
            if service["metadata"]["name"] == name and service["spec"].get("clusterIP") == "None":
                selector = service["spec"]["selector"]
                return [pod.ip for pod in self.pods if matches(selector, pod.labels)]
        return [pod.ip for pod in self.pods if pod.domain == name]

    def start(self, template: Manifest, name: str, ip: str, **identity: Any) -> Pod:
        """Returns the pod of a template."""
        labels = {**template["metadata"]["labels"], **identity.get("labels", {})}
        fields = {"status.podIP": ip, "metadata.name": name}
        fields |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
        containers = tuple(
            Container(spec, self._environment(spec, fields, identity.get("env", {})))
            for spec in template["spec"]["containers"]
        )
        domain = identity.get("domain", "")
        return Pod(name, ip, labels, template["spec"], containers, domain)

    def _environment(
        self, spec: Manifest, fields: dict[str, str], injected: dict[str, str]
    ) -> dict[str, str]:
        env: dict[str, str] = {}
        for source in spec.get("envFrom", ()):
            env |= named(self.manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
        env |= injected
        for variable in spec.get("env", ()):
            if "value" in variable:
                value = re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), variable["value"])
            else:
                value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            env[variable["name"]] = value
        return env

    def _pods_of(self, kind: str, num_replicas: int | None) -> Iterator[Pod]:
        for manifest in of_kind(self.manifests, kind):
            name, spec = manifest["metadata"]["name"], manifest["spec"]
            for index in range(num_replicas or spec.get("replicas", 1)):
                labels = {"apps.kubernetes.io/pod-index": str(index)}
                yield self.start(
                    spec["template"],
                    f"{name}-{index}",
                    _address(kind, index),
                    domain=spec.get("serviceName", ""),
                    labels=labels if kind == "StatefulSet" else {},
                )

    def _worker_pods(self) -> Iterator[Pod]:
        for manifest in of_kind(self.manifests, "LeaderWorkerSet"):
            name, spec = manifest["metadata"]["name"], manifest["spec"]
            template = spec["leaderWorkerTemplate"]
            for group in range(self.num_replicas or spec.get("replicas", 1)):
                leader = f"{name}-{group}"
                for index in range(template["size"]):
                    yield self.start(
                        template["workerTemplate"],
                        leader if index == 0 else f"{leader}-{index}",
                        _address("LeaderWorkerSet", group * template["size"] + index),
                        domain=leader,  # as subdomainPolicy UniquePerReplica names it
                        labels={
                            f"{LWS}/name": name,
                            f"{LWS}/group-index": str(group),
                            f"{LWS}/worker-index": str(index),
                        },
                        env={
                            "LWS_GROUP_SIZE": str(template["size"]),
                            "LWS_WORKER_INDEX": str(index),
                        },
                    )


def _address(kind: str, index: int) -> str:
    return f"10.0.{len(kind)}.{index + 1}"
