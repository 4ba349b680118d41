"""No image can be built here, so what its Dockerfile names is checked: files, user, command."""

import os
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from deploy.processes import ROOT
from router.discovery import DnsGroup
from tests.deploy import dockerfiles
from tests.deploy.cluster import COMMANDS, Cluster, twins
from tests.deploy.rendering import OVERLAYS, render

COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
OTHER_VARIABLES = {"OMP_NUM_THREADS"}


@pytest.mark.parametrize("image", dockerfiles.FILES)
def test_what_is_copied_exists_and_is_in_the_build_context(image: str) -> None:
    _, *patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    kept = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    for source, _ in dockerfiles.copied(dockerfiles.FILES[image]):
        assert source.exists()
        path = source.relative_to(ROOT)
        assert any(path.is_relative_to(folder) for folder in kept), f"{path} is ignored"


@pytest.mark.parametrize("image", dockerfiles.FILES)
def test_an_image_runs_its_program_as_the_pods_user(image: str) -> None:
    path = dockerfiles.FILES[image]
    users = {
        f"{context['runAsUser']}:{context['runAsGroup']}"
        for overlay in OVERLAYS
        for pod in Cluster(render(overlay)).pods
        for context in [pod.spec["securityContext"]]
    }

    assert users == {dockerfiles.last(path, "USER")}
    [python, flag, module] = dockerfiles.entrypoint(path)
    assert (Path(python).name, flag) == ("python", "-m")
    assert COMMANDS[image].callback is not None
    assert COMMANDS[image].callback.__module__ == f"{module}.__main__"
    packages = {source.name for source, _ in dockerfiles.copied(path)} & {"router", "executor"}
    assert packages == {module}, "the router has no tensors, the executor no policy"


def test_only_executors_have_pytorch() -> None:
    for image, path in dockerfiles.FILES.items():
        installs = [rest for name, rest in dockerfiles.instructions(path) if "pip install" in rest]
        assert installs
        assert all("-c constraints.txt" in rest for rest in installs)
        has_torch = any("torch" in rest.split() or "executor" in rest for rest in installs)
        assert has_torch == (image != "lockstep-router")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_images_that_are_built_here_in_this_version(overlay: str) -> None:
    for pod in Cluster(render(overlay)).pods:
        for container in pod.containers:
            assert container.image in dockerfiles.FILES
            assert container.spec["image"] == f"{container.image}:{VERSION}"
            assert "command" not in container.spec, "the image's own is checked"
    for name, service in COMPOSE["services"].items():
        image, _, version = service["image"].partition(":")
        assert version == VERSION, name
        assert ROOT / service["build"]["dockerfile"] == dockerfiles.FILES[image]


def test_what_the_manifests_read_inside_an_image_was_copied_there() -> None:
    for pod in Cluster(render("cpu-demo")).pods:
        for container in pod.containers:
            path = dockerfiles.FILES[container.image]
            for name in ("tokenizer", "model"):
                inside = container.settings.get(name)
                if inside is not None:
                    assert Path(dockerfiles.in_repository(path, str(inside))).exists()


def test_compose_starts_one_group_with_settings_that_exist() -> None:
    places = []
    for name, service in COMPOSE["services"].items():
        command = COMMANDS[service["image"].partition(":")[0]]
        env = service["environment"]
        assert all(isinstance(value, str) for value in env.values())
        assert env.keys() <= twins(command) | OTHER_VARIABLES
        with patch.dict(os.environ, env, clear=True):
            settings = command.make_context(name, []).params
        if name == "router":
            [group] = settings["groups"]
            continue
        assert service["networks"]["group"]["aliases"] == [DnsGroup.parse(group).name]
        assert settings["advertised_host"] == service["hostname"] == name
        places.append((settings["dp_rank"], settings["dp_size"]))

    size = DnsGroup.parse(group).size
    assert places == [(rank, size) for rank in range(size)]


def test_every_service_of_compose_is_hardened_and_executors_are_out_of_reach() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert (name == "router") == ("ports" in service)
        assert name == "router" or set(service["networks"]) == {"group"}
    assert COMPOSE["networks"]["group"] == {"internal": True}
