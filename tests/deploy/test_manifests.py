"""Manifests: a typo in any field is refused, which a server would silently drop."""

import functools
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.rendering import (
    CUSTOM_KINDS,
    OVERLAYS,
    BadManifest,
    of_kind,
    render,
    validate,
    with_typo,
)

# Maps whose keys are the author's own.
FREE = {"labels", "annotations", "matchLabels", "data", "selector", "limits", "requests"}

Path = tuple[str | int, ...]


def fields(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every field that has a name in the schema."""
    if isinstance(value, dict):
        for name, child in value.items():
            is_free = path and path[-1] in FREE and all(isinstance(v, str) for v in value.values())
            if not is_free:
                yield (*path, name)
            yield from fields(child, (*path, name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from fields(child, (*path, index))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_fits_its_schema(overlay: str) -> None:
    for manifest in render(overlay):
        validate(manifest)


def test_a_typo_in_any_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its megabytes of schemas are otherwise read again at each of some hundred calls.
    read_once = functools.cache(kubernetes_validate.utils.schema_contents)
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", read_once)
    tried = set()
    for overlay in OVERLAYS:
        for manifest in render(overlay):
            for path in fields(manifest):
                names = (manifest["kind"], *(step for step in path if isinstance(step, str)))
                if "template" in names:  # a pod's fields are the same wherever it stands
                    names = ("pod", *names[names.index("template") :])
                if names in tried or path in (("kind",), ("apiVersion",)):
                    continue
                tried.add(names)
                with pytest.raises(BadManifest):
                    validate(with_typo(manifest, path))
    assert {kind for kind, *_ in tried} > set(CUSTOM_KINDS)
    assert ("pod", "template", "spec", "containers", "livenessProbe", "grpc", "service") in tried


def test_wrong_values_are_refused() -> None:
    [workers] = of_kind(render("multi-node"), "LeaderWorkerSet")
    workers["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    with pytest.raises(BadManifest, match="restartPolicy"):
        validate(workers)
    [executors] = of_kind(render("cpu-demo"), "StatefulSet")
    executors["spec"]["replicas"] = "two"
    with pytest.raises(BadManifest, match="replicas"):
        validate(executors)
    executors["apiVersion"] = "apps/v2"
    with pytest.raises(BadManifest, match="no such kind"):
        validate(executors)
