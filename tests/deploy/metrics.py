"""Metrics of both programs: their families, and the samples that can be asked for."""

import re

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest

from executor import metrics as executor_metrics
from protos.serving.v1 import serving_pb2
from protos.telemetry.metrics import LATENCY_BOUNDS, Family, Histogram
from router.scheduling.counters import GroupMeasures
from router.telemetry import prometheus as router_metrics


def router_families() -> list[Family]:
    return [family for family in _families_of_a_router() if ":" not in family.name]


def picker_families() -> list[Family]:
    """Returns those that repeat others in sum, under the names that endpoint pickers look for."""
    return [family for family in _families_of_a_router() if ":" in family.name]


def _families_of_a_router() -> list[Family]:
    snapshot = router_metrics.Snapshot(
        version="1",
        model_name="m",
        is_ready=True,
        num_live_requests=0,
        num_open_calls=0,
        refused={},
        ended={},
        total_s=Histogram(LATENCY_BOUNDS),
        resumed={},
        num_resumed_tokens=0,
        kv_snapshots={},
        groups=[serving_pb2.GroupStatus()],
        totals=[GroupMeasures().totals()],
    )
    return list(router_metrics.families(snapshot))


def executor_families() -> list[Family]:
    numbers = executor_metrics.Numbers(executor_metrics.Measures(), 0, 0, 0, 0, None, {})
    return list(executor_metrics.collector(lambda: numbers)())


FAMILIES = [*router_families(), *executor_families()]


def _exposed() -> dict[str, set[str]]:
    """Returns the labels of every sample that can be asked for, by name."""
    exposed: dict[str, set[str]] = {"up": set(), "ALERTS": {"alertname", "alertstate"}}
    for family in FAMILIES:
        if family.kind == "histogram":
            exposed[f"{family.name}_bucket"] = {*family.labels, "le"}
            exposed[f"{family.name}_sum"] = exposed[f"{family.name}_count"] = {*family.labels}
        else:
            exposed[family.name] = {*family.labels}
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    for name in re.findall(r"^(\w+)[{ ]", generate_latest(registry).decode(), re.MULTILINE):
        exposed[name] = {"generation"}
    return {name: labels | {"instance", "job"} for name, labels in exposed.items()}


EXPOSED = _exposed()
