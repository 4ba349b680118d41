"""Compose file: what `docker compose up` would refuse, or quietly not do. No Docker is needed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.local.processes import ROOT
from tests.deploy.cluster import COMMANDS, settings_of
from tests.deploy.images.dockerfiles import FILES, entrypoint
from tests.deploy.rendering import with_typo

COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "compose.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)
MARGIN_S = 5  # to end after all that can be waited for
OWN_NAMES = (
    "services",
    "networks",
    "secrets",
    "environment",
)  # of maps whose keys are the author's own

Place = tuple[str, ...]


def fields(value: Any, place: Place = ()) -> Iterator[Place]:
    if isinstance(value, dict):
        for name, child in value.items():
            if not name.startswith("x-"):
                if not place or place[-1] not in OWN_NAMES:
                    yield (*place, name)
                yield from fields(child, (*place, name))


def test_it_fits_the_schema() -> None:
    CHECK.check_schema(SCHEMA)
    CHECK.validate(COMPOSE)


@pytest.mark.parametrize("place", list(fields(COMPOSE)), ids=".".join)
def test_a_typo_in_any_field_is_refused(place: Place) -> None:
    with pytest.raises(jsonschema.ValidationError):
        CHECK.validate(with_typo(COMPOSE, place))


def test_networks_that_services_are_on_exist() -> None:
    for service in COMPOSE["services"].values():
        assert set(service["networks"]) <= COMPOSE["networks"].keys()


def test_executors_the_router_and_prometheus_share_tokens_that_git_does_not_have() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for source in COMPOSE["secrets"].values():
        assert f"/deploy/{Path(source['file'])}" in ignored
    assert COMPOSE["services"]["prometheus"]["secrets"] == ["metrics-token"]
    for service in COMPOSE["services"].values():
        if "build" not in service:
            continue
        command = COMMANDS[service["image"].partition(":")[0]]
        settings = settings_of(command, service["environment"])
        setting = "executor_token" if "executor_token" in settings else "auth_tokens"
        assert settings[setting] == Path("/run/secrets/executor-token")
        assert settings["metrics_tokens"] == Path("/run/secrets/metrics-token")
        assert service["secrets"] == ["executor-token", "metrics-token"] == [*COMPOSE["secrets"]]


def test_each_of_our_containers_is_probed_where_it_listens() -> None:
    for service in COMPOSE["services"].values():
        if "build" not in service:
            continue
        image = service["image"].partition(":")[0]
        _, python, _, module, address, name = service["healthcheck"]["test"]
        assert python == entrypoint(FILES[image])[0]
        assert (module, name) == ("protos.transport.probe", "liveness")
        listen = settings_of(COMMANDS[image], service["environment"])["listen"]
        assert address == listen.replace("0.0.0.0", "127.0.0.1")


def test_there_is_time_to_drain_before_a_container_is_killed() -> None:
    """Docker kills after ten seconds where nothing else is said; streams take longer."""
    for service in COMPOSE["services"].values():
        if "build" not in service:
            continue
        command = COMMANDS[service["image"].partition(":")[0]]
        settings = settings_of(command, service["environment"])
        names = ("shutdown_delay_s", "shutdown_grace_s", "stop_timeout_s")
        waits = [settings.get(name, 0) for name in names]
        assert sum(waits) >= 30
        assert int(service["stop_grace_period"].removesuffix("s")) >= sum(waits) + MARGIN_S
