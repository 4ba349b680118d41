"""Images, by their Dockerfiles: files, user, command. None is built; test_built.py does."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.local.processes import ROOT
from protos import __version__
from router.executors.discovery import DnsGroup
from tests.deploy.cluster import COMMANDS, Cluster, Pod, settings_of, twins
from tests.deploy.images import dockerfiles
from tests.deploy.rendering import OVERLAYS, render

COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = {
    "lockstep-router": ["gateway", "tracing"],
    "lockstep-executor": ["cuda"],
    "lockstep-executor-cpu": ["executor"],
}
STEPS = ("-r torch-cpu.txt", "--require-hashes", "--no-index")
VERSION = __version__
OWN_SERVICES = {name: spec for name, spec in COMPOSE["services"].items() if "build" in spec}
OTHER_VARIABLES = {"OMP_NUM_THREADS"}


def all_pods() -> list[Pod]:
    pods = [pod for overlay in OVERLAYS for pod in Cluster(render(overlay)).pods]
    return [pod for pod in pods if pod.containers[0].is_ours]


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
    contexts = [pod.spec["securityContext"] for pod in all_pods()]
    users = {f"{context['runAsUser']}:{context['runAsGroup']}" for context in contexts}

    assert users == {dockerfiles.last(path, "USER")}
    [python, flag, module] = dockerfiles.entrypoint(path)
    assert (Path(python).name, flag) == ("python", "-m")
    assert COMMANDS[image].callback is not None
    assert COMMANDS[image].callback.__module__ == f"{module}.__main__"
    packages = {source.name for source, _ in dockerfiles.copied(path)} & {"router", "executor"}
    assert packages == {module}, "the router has no tensors, the executor no policy"


@pytest.mark.parametrize("image", dockerfiles.FILES)
def test_an_image_says_what_it_is(image: str) -> None:
    text = dockerfiles.last(dockerfiles.FILES[image], "LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', text))
    assert labels.pop("description")
    assert labels == {
        "title": image,
        "version": VERSION,
        "revision": "$REVISION",
        "licenses": PROJECT["license"],
    }


@pytest.mark.parametrize("image", dockerfiles.FILES)
def test_the_base_of_every_stage_can_be_replaced(image: str) -> None:
    steps = dockerfiles.instructions(dockerfiles.FILES[image])
    [(argument, _, base)] = [
        rest.partition("=") for name, rest in steps if name == "ARG" and "_IMAGE=" in rest
    ]
    stages = {rest.split()[0] for name, rest in steps if name == "FROM"}
    assert stages == {f"${{{argument}}}"}
    assert base in foreign_images(dockerfiles.FOLDER)


def test_every_step_that_installs_takes_hashes_or_no_index() -> None:
    for image, path in dockerfiles.FILES.items():
        steps = [
            step
            for name, rest in dockerfiles.instructions(path)
            if name == "RUN"
            for step in rest.split("&& ")
            if "pip install" in step
        ]
        kinds = [kind for step in steps for kind in STEPS if kind in step]
        expected = [f"--require-hashes -r {path.stem}.lock", "--no-index --no-deps"]
        # The one index that is not the default, for the one package that it is needed for.
        torch = ["-r torch-cpu.txt"] if image == "lockstep-executor-cpu" else []
        assert kinds == [*torch, *[kind.split(" ")[0] for kind in expected]]
        assert all(kind in step for kind, step in zip(expected, steps[len(torch) :], strict=True))
        assert all("--no-build-isolation" in step for step in steps if "--no-index" in step)


def test_no_step_takes_packages_from_two_indexes() -> None:
    for path in [ROOT / "Makefile", *(ROOT / "deploy").rglob("*")]:
        if path.is_file() and path.suffix not in (".safetensors", ".pyc"):
            assert "extra-index-url" not in path.read_text()


def test_only_executors_have_pytorch() -> None:
    assert "torch" in locked("lockstep-executor")
    assert "torch" not in locked("lockstep-executor-cpu").keys() | locked("lockstep-router").keys()
    assert (
        (dockerfiles.FOLDER / "torch-cpu.txt").read_text().startswith(f"torch=={pinned()['torch']}")
    )


def test_no_image_has_more_to_install_with_than_it_needs() -> None:
    hub = {"huggingface-hub", "hf-xet"}
    for image in ("lockstep-router", "lockstep-executor-cpu"):
        text = dockerfiles.FILES[image].read_text()
        assert "python -m venv --without-pip /opt/venv" in text
        assert re.search("^ARG PYTHON_IMAGE=python:3.11-", text, re.MULTILINE)
        assert not (hub | {"pip"}) & locked(image).keys()


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {_normal(name): version for name, version in pairs}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(extras: list[str]) -> set[str]:
    """What pyproject.toml asks for, with some extras, and those that they name."""
    wanted = list(PROJECT["dependencies"])
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    names = set()
    for requirement in wanted:
        within = re.fullmatch(r"lockstep\[([\w,]+)\]", requirement)
        names |= (
            required(within[1].split(","))
            if within
            else {_normal(re.split(r"[^\w.-]", requirement)[0])}
        )
    return names


def locked(image: str) -> dict[str, str]:
    """The packages of an image's lock, each with a hash at least, and their versions."""
    text = dockerfiles.FILES[image].with_suffix(".lock").read_text()
    versions = {}
    for entry in re.split(r"\n(?=\w)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)):
        requirement, *hashes = entry.split(" \\\n")
        assert hashes
        assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}\n?", each) for each in hashes)
        name, version = requirement.split("==")
        versions[_normal(name)] = version
    return versions


@pytest.mark.parametrize("image", dockerfiles.FILES)
def test_what_an_image_installs_is_of_a_version_that_was_tested(image: str) -> None:
    versions, tested = locked(image), pinned()
    wanted = required(EXTRAS[image]) - ({"torch"} if image == "lockstep-executor-cpu" else set())
    assert {"grpcio", "click"} < wanted
    assert wanted - versions.keys() == set(), "run make lock"
    assert {n: v for n, v in versions.items() if tested.get(n, v) != v} == {}, "run make lock"


def test_the_build_back_end_is_the_one_that_images_have() -> None:
    [back_end] = PYPROJECT["build-system"]["requires"]
    for image in dockerfiles.FILES:
        assert back_end == f"setuptools=={locked(image)['setuptools']}"


def unpinned() -> set[str]:
    """What is not pinned by its content, as docker/unpinned.txt admits."""
    lines = (dockerfiles.FOLDER / "unpinned.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def foreign_images(folder: Path) -> set[str]:
    """Images that others make, as the files below a folder name them."""
    found: set[str] = set()
    for path in [*folder.rglob("*.yaml"), *folder.rglob("*.Dockerfile")]:
        found |= set(
            re.findall(
                r"^(?:ARG [A-Z]+_IMAGE=|\s*(?:- )?image: )(\S+)", path.read_text(), re.MULTILINE
            )
        )
    return {image for image in found if not image.startswith("lockstep-")}


def test_what_others_make_is_pinned_by_its_content_or_listed() -> None:
    images = foreign_images(ROOT / "deploy")
    by_name = {image for image in images if not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image)}
    if "--hash=sha256:" not in (dockerfiles.FOLDER / "torch-cpu.txt").read_text():
        by_name.add("torch-cpu.txt")
    assert len(images) >= 5
    assert by_name == unpinned()


def test_images_that_are_listed_get_their_digests_from_docker(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("demo_*", "__pycache__")
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=ignored)
    before = foreign_images(tmp_path / "deploy")
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho sha256:{'0123456789abcdef' * 4}\n")
    docker.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = tmp_path / "deploy/docker/pin-images.sh"
    subprocess.run([script], check=True, env={"PATH": path})
    expected = {i if "@" in i else f"{i}@sha256:{'0123456789abcdef' * 4}" for i in before}
    assert foreign_images(tmp_path / "deploy") == expected
    left = (tmp_path / "deploy/docker/unpinned.txt").read_text().splitlines()
    assert [line for line in left if not line.startswith("#")] == sorted(
        unpinned() & {"torch-cpu.txt"}
    )
    assert os.access(ROOT / "deploy/docker/pin-images.sh", os.X_OK)


def test_flashinfer_has_one_version() -> None:
    text = (ROOT / "deploy" / "requirements-flashinfer.txt").read_text()
    [version] = re.findall(r"^flashinfer-python==([\w.]+)", text, re.MULTILINE)
    assert version == pinned()["flashinfer-python"]


@pytest.mark.parametrize("image", dockerfiles.FILES)
def test_a_program_does_not_start_where_it_may_write(image: str) -> None:
    """`python -m` takes modules from the folder that it starts in, ahead of its own library's."""
    path = dockerfiles.FILES[image]
    assert dockerfiles.last(path, "WORKDIR") == "/opt"
    for container in (container for pod in all_pods() for container in pod.containers):
        mounts = [mount["mountPath"] for mount in container.spec["volumeMounts"]]
        assert not any(Path(mount).is_relative_to("/opt") for mount in mounts)
        assert "workingDir" not in container.spec


def test_pods_run_images_that_are_built_here_in_this_version() -> None:
    for container in (container for pod in all_pods() for container in pod.containers):
        assert container.image in dockerfiles.FILES
        assert container.spec["image"] == f"{container.image}:{VERSION}"
        assert "command" not in container.spec, "the image's own is checked"
    for name, service in OWN_SERVICES.items():
        image, _, version = service["image"].partition(":")
        assert version == VERSION, name
        assert ROOT / service["build"]["dockerfile"] == dockerfiles.FILES[image]


def test_the_changelog_begins_with_this_version_or_what_came_since() -> None:
    text = (ROOT / "deploy" / "release" / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (\S+)", text, re.MULTILINE)
    assert headings[headings[0] == "Unreleased"] == VERSION


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
    for name, service in OWN_SERVICES.items():
        command = COMMANDS[service["image"].partition(":")[0]]
        env = service["environment"]
        assert all(isinstance(value, str) for value in env.values())
        assert env.keys() <= twins(command) | OTHER_VARIABLES
        settings = settings_of(command, env)
        if name == "router":
            [[group]] = settings["groups"]
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
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert not name.startswith("executor") or "ports" not in service
        assert not name.startswith("executor") or set(service["networks"]) == {"group"}
    assert COMPOSE["networks"]["group"] == {"internal": True}


def test_prometheus_scrapes_every_service_where_it_can_reach_it() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]
    }
    for job in config["scrape_configs"]:
        assert job["authorization"] == {"credentials_file": "/run/secrets/metrics-token"}
    expected: dict[str, list[str]] = {"lockstep-router": [], "lockstep-executor": []}
    networks = set(COMPOSE["services"]["prometheus"]["networks"])
    for name, service in OWN_SERVICES.items():
        job = "lockstep-router" if name == "router" else "lockstep-executor"
        variable = f"{job.upper().replace('-', '_')}_METRICS_LISTEN"
        expected[job].append(f"{name}:{service['environment'][variable].rpartition(':')[2]}")
        assert networks & set(service["networks"])
    assert jobs == expected


def test_prometheus_and_grafana_find_their_files_and_one_another() -> None:
    eyes = {name: COMPOSE["services"][name] for name in ("prometheus", "grafana")}
    inside = {}
    for service in eyes.values():
        assert service["profiles"] == ["eyes"], "the demo itself downloads nothing more"
        for volume in service["volumes"]:
            source, target, mode = volume.split(":")
            assert mode == "ro"
            inside[target] = ROOT / "deploy" / source
            assert inside[target].exists()
    flags = dict(flag.split("=") for flag in eyes["prometheus"]["command"])
    config = Path(flags["--config.file"])
    assert (inside[str(config.parent)] / config.name).exists()
    assert flags["--storage.tsdb.path"] in eyes["prometheus"]["tmpfs"]

    provisioning = inside["/etc/grafana/provisioning"]
    [source] = yaml.safe_load((provisioning / "datasources/lockstep.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    scraping = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]
    [provider] = yaml.safe_load((provisioning / "dashboards/lockstep.yaml").read_text())[
        "providers"
    ]
    assert f"{provider['options']['path']}/lockstep.json" in inside
