"""Agreement of manifests with one another, and with the programs that they start."""

import asyncio
import math
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import yaml
from grpc_health.v1 import health_pb2

from deploy.local.launch import DEMO_MODEL
from deploy.local.processes import ROOT
from executor.config import ExecutorConfig
from executor.server.service import LIVENESS as EXECUTOR_LIVENESS
from executor.server.service import READINESS as EXECUTOR_READINESS
from protos.serving.v1 import serving_pb2
from router.api.health import LIVENESS, READINESS
from router.executors.discovery import find_addresses, strength_of
from tests.deploy.cluster import Cluster, Container, Pod, twins
from tests.deploy.rendering import OVERLAYS, Manifest, matches, named, of_kind, render
from tests.e2e.support.envoy import CONFIG, metrics_users

# Read by libraries, not by Lockstep.
OTHER_VARIABLES = {"OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "FLASHINFER_WORKSPACE_BASE", "HOME"}
MARGIN_S = 5  # to end after all that can be waited for
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
SYSTEM = {"kubernetes.io/metadata.name": "kube-system"}
CALLERS = {"kubernetes.io/metadata.name": "public", "lockstep/callers": "true"}


def cluster(overlay: str) -> Cluster:
    """An overlay's pods, with as many groups as its autoscaler may start."""
    manifests = render(overlay)
    scaled = of_kind(manifests, "ScaledObject")
    return Cluster(manifests, scaled[0]["spec"]["maxReplicaCount"] if scaled else None)


@pytest.fixture(params=OVERLAYS)
def running(request: pytest.FixtureRequest) -> Cluster:
    return cluster(request.param)


def containers(running: Cluster, program: str | None = None) -> list[tuple[Pod, Container]]:
    """Returns all our containers, or those of "router" or "executor", with their pods."""
    pods = running.pods if program is None else running.pods_of(program)
    return [(pod, c) for pod in pods for c in pod.containers if c.is_ours]


def port_of(container: Container, setting: str = "listen") -> int:
    return int(container.settings[setting].rpartition(":")[2])


def test_every_variable_is_a_setting_and_its_value_can_be_read(running: Cluster) -> None:
    for _, container in containers(running):
        unknown = container.env.keys() - twins(container.command) - OTHER_VARIABLES
        assert {name for name in unknown if not name.startswith("LWS_")} == set()
        assert container.settings


def test_what_is_no_setting_is_found() -> None:
    running = cluster("cpu-demo")
    router, *_ = running.pods_of("router")
    router.containers[0].env["LOCKSTEP_ROUTER_MAX_CALL"] = "1"

    with pytest.raises(AssertionError, match="LOCKSTEP_ROUTER_MAX_CALL"):
        test_every_variable_is_a_setting_and_its_value_can_be_read(running)


def test_the_executors_of_each_group_fill_its_places_and_the_router_finds_them(
    running: Cluster,
) -> None:
    async def resolve(name: str) -> list[str]:
        return running.resolve(name)

    at = {
        f"{pod.ip}:{port_of(container)}": executor_config(container)
        for pod, container in containers(running, "executor")
    }
    router, *_ = running.pods_of("router")
    found = []
    for group in router.containers[0].settings["groups"]:
        addresses = asyncio.run(_addresses(group, resolve))
        found += addresses
        assert all(at[a].peer_host == a.rpartition(":")[0] for a in addresses)
        if (strength := strength_of(group)) is not None:
            assert len(addresses) >= strength.size
            assert {at[a].max_dp_size * at[a].attn_tp_size for a in addresses} == {strength.size}
            assert {at[a].min_dp_size * at[a].attn_tp_size for a in addresses} == {strength.least}
            continue
        places = {(at[a].topology.dp_rank, at[a].topology.attn_tp_rank) for a in addresses}
        assert len(places) == len(addresses) == at[addresses[0]].world_size
        assert len({at[a].topology.world_size for a in addresses}) == 1
    assert sorted(found) == sorted(at), "each executor is in one group"


async def _addresses(group: Any, resolve: Any) -> list[str]:
    return list(await find_addresses(group, resolve)())


def executor_config(container: Container) -> ExecutorConfig:
    """What the executor's settings come to, but for files that are not here."""
    settings = container.settings
    files = dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca", "tls_client_names"))
    with NamedTemporaryFile("w") as tokens:
        tokens.write("t" * 64)
        tokens.flush()
        files["auth_tokens"] = files["metrics_tokens"] = Path(tokens.name)
        return ExecutorConfig(**{**settings, **files, "plaintext": "on", "model": DEMO_MODEL})


def test_both_sides_of_a_hop_agree_on_certificates_or_on_plain_text(running: Cluster) -> None:
    (_, router), *_ = containers(running, "router")
    ours = router.settings
    for pod, container in containers(running, "executor"):
        theirs = container.settings
        uses_tls = theirs["plaintext"] != "on"
        assert uses_tls == (ours["executor_plaintext"] == "off")
        assert uses_tls == (theirs["tls_cert"] is not None) == (ours["executor_ca"] is not None)
        if uses_tls:
            assert ours["executor_name"] == pod.labels["app.kubernetes.io/name"]
            assert theirs["tls_client_names"] == "lockstep-router"
            files = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_client_ca": "ca.crt"}
            for setting, name in files.items():
                assert theirs[setting] == Path("/tls", name)


def test_each_container_of_a_node_has_a_gpu_of_its_own() -> None:
    for overlay in ("gpu-node", "multi-node"):
        for pod in cluster(overlay).pods_of("executor"):
            devices = [container.settings["device"] for container in pod.containers]
            claims = {
                claim["name"]: claim["resourceClaimTemplateName"]
                for claim in pod.spec["resourceClaims"]
            }
            template = named(render(overlay), "ResourceClaimTemplate", claims.pop("gpus"))
            [gpus] = template["spec"]["spec"]["devices"]["requests"]
            assert devices == [f"cuda:{index}" for index in range(gpus["exactly"]["count"])]
            for container in pod.containers:
                wanted = [{"name": name} for name in ("gpus", *claims)]
                assert container.spec["resources"]["claims"] == wanted
            spans_nodes = overlay == "multi-node"
            assert list(claims) == (["fabric"] if spans_nodes else [])
            if spans_nodes:
                [domain] = of_kind(render(overlay), "ComputeDomain")
                channel = domain["spec"]["channel"]["resourceClaimTemplate"]
                assert channel["name"] == claims["fabric"]


def test_gpus_run_flashinfers_experts_and_its_all_to_all() -> None:
    for overlay in ("gpu-node", "gpu-node-tls", "multi-node"):
        for _, container in containers(cluster(overlay), "executor"):
            config = executor_config(container)
            assert (config.moe_a2a, config.moe_runner) == ("flashinfer", "cutlass")


def test_probes_ask_for_services_that_are_served_at_the_port_that_listens(running: Cluster) -> None:
    assert (EXECUTOR_LIVENESS, EXECUTOR_READINESS) == (LIVENESS, READINESS)
    for _, container in containers(running):
        asked = {name: probe["grpc"]["service"] for name, probe in container.probes.items()}
        expected = {"startupProbe": LIVENESS, "livenessProbe": LIVENESS}
        is_one_of_two = container.image == "lockstep-router" and stands_by(running)
        assert asked == expected | {"readinessProbe": LIVENESS if is_one_of_two else READINESS}
        for probe in container.probes.values():
            assert probe["grpc"]["port"] == port_of(container, "health_listen")
            assert probe["timeoutSeconds"] > 1, "the default of a second kills busy pods"
        ports = [port["containerPort"] for port in container.spec["ports"]]
        settings = ("listen", "metrics_listen", "health_listen")
        assert ports == [port_of(container, setting) for setting in settings]
    for pod in running.pods:
        listening = [port["containerPort"] for c in pod.containers for port in c.spec["ports"]]
        assert len(set(listening)) == len(listening), "the containers of a pod share its ports"


def stands_by(running: Cluster) -> bool:
    """Whether one of the routers has no group that can step."""
    return named(running.manifests, "Deployment", "lockstep-router")["spec"]["replicas"] > 1


def test_two_routers_stand_where_envoy_asks_for_their_health_and_one_is_always_there() -> None:
    for overlay in ("cpu-demo", "cpu-demo-pool", "gpu-node", "gpu-node-tls", "multi-node"):
        running = cluster(overlay)
        budget = named(running.manifests, "PodDisruptionBudget", "lockstep-router")["spec"]
        deployment = named(running.manifests, "Deployment", "lockstep-router")["spec"]
        if overlay.startswith("cpu-demo"):
            assert not stands_by(running)
            continue
        assert stands_by(running)
        assert (budget.get("maxUnavailable"), budget["minAvailable"]) == (None, 1)
        assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert named(running.manifests, "Deployment", "lockstep-envoy")


def test_services_pick_pods_and_ports_that_exist(running: Cluster) -> None:
    for service in of_kind(running.manifests, "Service"):
        spec = service["spec"]
        picked = [pod for pod in running.pods if matches(spec["selector"], pod.labels)]
        assert picked, service["metadata"]["name"]
        for port in spec["ports"]:
            for pod in picked:
                declared = [p for c in pod.containers for p in c.spec["ports"]]
                targets = [target for p in declared for target in (p["name"], p["containerPort"])]
                assert port["targetPort"] in targets
    executors = named(running.manifests, "Service", "lockstep-executor")["spec"]
    assert executors["clusterIP"] == "None"
    assert executors["publishNotReadyAddresses"] is True
    router = named(running.manifests, "Service", "lockstep-router")["spec"]
    assert {port["appProtocol"] for port in router["ports"]} == {"kubernetes.io/h2c"}


def test_selectors_of_workloads_and_budgets_pick_their_pods(running: Cluster) -> None:
    for workload in of_kind(running.manifests, "Deployment", "StatefulSet"):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert matches(workload["spec"]["selector"], labels)
        assert workload["spec"].get("serviceName", "lockstep-executor") == "lockstep-executor"
    covered: list[str] = []
    for budget in of_kind(running.manifests, "PodDisruptionBudget"):
        picked = [p.name for p in running.pods if matches(budget["spec"]["selector"], p.labels)]
        assert picked, budget["metadata"]["name"]
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        covered += picked
    assert sorted(covered) == sorted(pod.name for pod in running.pods), "each pod has one budget"


def test_every_port_of_the_programs_asks_for_a_token(running: Cluster) -> None:
    for pod, container in containers(running):
        settings, volumes = container.settings, {v["name"]: v for v in pod.spec["volumes"]}
        is_router = container.image == "lockstep-router"
        used = {
            "executor_token" if is_router else "auth_tokens": ("lockstep-executor-token", "token"),
            "metrics_tokens": ("lockstep-executor-token", "metrics"),
        }
        if is_router:
            used["auth_tokens"] = ("lockstep-caller-tokens", "tokens")
        if is_router and of_kind(running.manifests, "InferencePool"):
            del used["metrics_tokens"]  # endpoint pickers have none to show
        for setting, (secret, file) in used.items():
            path = settings[setting]
            [mount] = [
                m for m in container.spec["volumeMounts"] if m["mountPath"] == str(path.parent)
            ]
            assert mount["readOnly"] is True
            # Not optional, so that a pod waits for it instead of starting open.
            assert volumes[mount["name"]]["secret"] == {"secretName": secret}
            assert path.name == file
        assert settings["open_services"] == "health"


def test_envoy_has_hashes_of_the_passwords_for_its_metrics_and_not_these(running: Cluster) -> None:
    path = Path(metrics_users(yaml.safe_load(CONFIG.read_text()))["filename"])
    for pod in running.pods_of("envoy"):
        [container] = pod.containers
        [mount] = [m for m in container.spec["volumeMounts"] if m["mountPath"] == str(path.parent)]
        [volume] = [v for v in pod.spec["volumes"] if v["name"] == mount["name"]]
        items = [{"key": "users", "path": path.name}]
        assert volume["secret"] == {"secretName": "lockstep-envoy-metrics", "items": items}


def allows(running: Cluster, pod: Pod, port: int, *, labels: Any = None, space: Any = None) -> bool:
    """Says whether a pod in this namespace, or one in another, may connect to a port of a pod."""
    return _may(running, pod, "ingress", port, labels, space)


def reaches(
    running: Cluster, pod: Pod, port: int, *, labels: Any = None, space: Any = None
) -> bool:
    """Says whether a pod may connect to a port of a pod in this namespace, or in another."""
    return _may(running, pod, "egress", port, labels, space)


def _may(running: Cluster, pod: Pod, way: str, port: int, labels: Any, space: Any) -> bool:
    policies = [
        policy["spec"]
        for policy in of_kind(running.manifests, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], pod.labels)
    ]
    assert policies, f"{pod.name} is open to all"
    return any(
        _is_among(port, rule) and _is_peer(rule, labels or {}, space or {})
        for policy in policies
        for rule in policy.get(way, ())
    )


def _is_among(port: int, rule: Manifest) -> bool:
    ports = rule.get("ports")
    return ports is None or any(p["port"] <= port <= p.get("endPort", p["port"]) for p in ports)


def _is_peer(rule: Manifest, labels: dict[str, str], space: dict[str, str]) -> bool:
    if not {"from", "to"} & rule.keys():
        return True
    return any(
        matches(peer["podSelector"], labels) and not space
        if "podSelector" in peer
        else bool(space) and matches(peer["namespaceSelector"], space)
        for peer in rule.get("from", rule.get("to", ()))
    )


def test_routers_alone_reach_executors_and_executors_one_another(running: Cluster) -> None:
    router, *_ = running.pods_of("router")
    [executor, *_] = running.pods_of("executor")
    for container in executor.containers:
        port = port_of(container)
        assert allows(running, executor, port, labels=router.labels)
        assert not allows(running, executor, port, labels={"app": "stranger"})
        metrics = port_of(container, "metrics_listen")
        assert allows(running, executor, metrics, space=MONITORING)
        assert not allows(running, executor, metrics, space={"kubernetes.io/metadata.name": "x"})
        assert not allows(running, executor, port, space=MONITORING)
        assert not allows(running, executor, port, space={"kubernetes.io/metadata.name": "x"})
    assert allows(running, executor, 40_000, labels=executor.labels)
    assert not allows(running, executor, 40_000, labels=router.labels)
    [container] = router.containers
    metrics = port_of(container, "metrics_listen")
    assert not allows(running, router, metrics, labels={"app": "caller"})
    assert allows(running, router, metrics, space=MONITORING)


def test_callers_alone_reach_what_faces_them(running: Cluster) -> None:
    """The router, or Envoy before it where tenants differ."""
    [router, *_], gateways = running.pods_of("router"), running.pods_of("envoy")
    public = port_of(router.containers[0])
    fronts = [(pod, pod.containers[0].spec["ports"][0]["containerPort"]) for pod in gateways]
    for pod, port in fronts or [(router, public)]:
        assert allows(running, pod, port, space=CALLERS)
        assert not allows(running, pod, port, space={"kubernetes.io/metadata.name": "x"})
        assert not allows(running, pod, port, labels={"app": "stranger"})
    for pod in gateways:
        assert allows(running, router, public, labels=pod.labels)
        assert not allows(running, router, public, space=CALLERS)
        assert reaches(running, pod, public, labels=router.labels)
        assert not reaches(running, pod, 50061, labels=running.pods_of("executor")[0].labels)


def test_no_pod_calls_where_it_has_nothing_to_do(running: Cluster) -> None:
    [router, *_], [executor, *_] = running.pods_of("router"), running.pods_of("executor")
    for container in executor.containers:
        assert reaches(running, router, port_of(container), labels=executor.labels)
    assert reaches(running, router, 53, space=SYSTEM)
    assert reaches(running, router, 4317, space=MONITORING)
    assert reaches(running, executor, 40_000, labels=executor.labels)
    assert not reaches(running, router, 40_000, labels=executor.labels)
    for pod in running.pods:
        assert not reaches(running, pod, 443, space=SYSTEM)
        assert not reaches(running, pod, 443, space={"kubernetes.io/metadata.name": "x"})
        assert not reaches(running, pod, 443, labels={"app": "stranger"})


def test_what_is_referred_to_exists(running: Cluster) -> None:
    manifests = running.manifests
    for pod in running.pods:
        named(manifests, "ServiceAccount", pod.spec["serviceAccountName"])
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                named(manifests, "PersistentVolumeClaim", claim)
            if "configMap" in volume:
                named(manifests, "ConfigMap", volume["configMap"]["name"])
            if volume["name"] == "tls":  # the operator's, for components/executor-tls alone
                name = pod.labels["app.kubernetes.io/name"]
                assert volume["secret"] == {"secretName": f"{name}-tls", "optional": True}
        for container in pod.containers:
            mounts = {mount["name"] for mount in container.spec["volumeMounts"]}
            assert mounts <= volumes.keys()
            for source in container.spec.get("envFrom", ()):
                named(manifests, "ConfigMap", source["configMapRef"]["name"])
    for scaled in of_kind(manifests, "ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]
        found = named(manifests, target["kind"], target["name"])
        assert found["apiVersion"] == target["apiVersion"]
        router, *_ = running.pods_of("router")
        groups = router.containers[0].settings["groups"]
        assert len(groups) == scaled["spec"]["maxReplicaCount"], "what it starts, a router uses"
    for route in of_kind(manifests, "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                ports = named(manifests, "Service", backend["name"])["spec"]["ports"]
                assert backend["port"] in {port["port"] for port in ports}
            services = {match["method"]["service"] for match in rule["matches"]}
            assert services <= {
                service.full_name
                for messages in (serving_pb2, health_pb2)
                for service in messages.DESCRIPTOR.services_by_name.values()
            }


def test_there_is_time_to_drain(running: Cluster) -> None:
    for pod, container in containers(running):
        settings, hook = container.settings, container.spec.get("lifecycle", {})
        waits = hook.get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if container.image == "lockstep-router":
            assert waits > 0, "endpoints take a while to change"
            waits += settings["shutdown_delay_s"] + settings["shutdown_grace_s"]
        else:
            waits += settings["stop_timeout_s"]
        assert pod.spec["terminationGracePeriodSeconds"] >= waits + MARGIN_S


def test_no_container_has_more_rights_than_it_needs(running: Cluster) -> None:
    for pod in running.pods:
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False, "LOCKSTEP_ROUTER_PORT would be a setting's"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        for container in pod.containers:
            assert container.spec["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            resources = container.spec["resources"]
            assert resources["requests"].keys() == {"cpu", "memory"}
            assert resources["limits"].keys() == {"memory"}


def test_what_programs_write_to_is_a_volume(running: Cluster) -> None:
    for _, container in containers(running):
        mounts = container.spec["volumeMounts"]
        writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
        assert "/tmp" in writable
        for name in ("HOME", "FLASHINFER_WORKSPACE_BASE"):
            if name in container.env:
                assert os.path.commonpath([container.env[name], "/cache"]) in writable
        for name in ("model", "tokenizer"):
            folder = container.settings.get(name)
            if folder is not None and not str(folder).startswith("/opt/"):
                assert str(Path(folder)) in [mount["mountPath"] for mount in mounts]


@pytest.mark.parametrize(
    ("waiting", "usages", "wanted"),
    [
        (0, [0.0], 1),
        (20, [0.5], 1),
        (40, [0.5], 2),
        (0, [0.7], 2),
        (0, [0.4, 0.4], 2),  # two that keep the line empty between them
        (0, [0.2, 0.2], 1),
        (500, [1.0, 1.0], 2),
    ],
)
def test_as_many_groups_run_as_the_line_and_the_kv_pools_ask_for(
    waiting: int, usages: list[float], wanted: int
) -> None:
    [scaled] = of_kind(render("gpu-node"), "ScaledObject")
    measured = {"waiting_sequences": waiting, "kv_usage_ratio": sum(usages)}
    asked = []
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["metricType"] == "AverageValue"
        [total] = [v for name, v in measured.items() if name in trigger["metadata"]["query"]]
        asked.append(math.ceil(total / float(trigger["metadata"]["threshold"])))
    spec = scaled["spec"]
    assert min(spec["maxReplicaCount"], max(spec["minReplicaCount"], *asked)) == wanted


@pytest.mark.parametrize("overlay", ["gpu-node", "multi-node"])
def test_every_container_is_scraped_as_a_job_that_the_alerts_know(overlay: str) -> None:
    running = cluster(overlay)
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text()
    scraped = set()
    for monitor in of_kind(running.manifests, "PodMonitor"):
        spec = monitor["spec"]
        for pod in running.pods:
            if matches(spec["selector"], pod.labels):
                if pod.containers[0].is_ours:
                    assert f'job="{pod.labels[spec["jobLabel"]]}"' in rules
                ports = {
                    p["name"]: p["containerPort"] for c in pod.containers for p in c.spec["ports"]
                }
                asked = (endpoint["port"] for endpoint in spec["podMetricsEndpoints"])
                # A pod has none for each that is asked: nodes have four or eight GPUs.
                scraped |= {(pod.name, ports[name]) for name in asked if name in ports}
                secret = {"name": "lockstep-executor-token", "key": "metrics"}
                sent = {"authorization": {"credentials": secret}}
                if not pod.containers[0].is_ours:
                    keys = ("username", "password")
                    secrets = {key: {"name": "lockstep-envoy-metrics", "key": key} for key in keys}
                    sent = {"basicAuth": secrets}
                assert all(sent.items() <= e.items() for e in spec["podMetricsEndpoints"])
    listening = {(pod.name, port_of(c, "metrics_listen")) for pod, c in containers(running)}
    assert scraped == listening | {(pod.name, 50150) for pod in running.pods_of("envoy")}


@pytest.mark.parametrize("overlay", ["gpu-node", "multi-node"])
def test_executors_of_a_pod_can_hand_memory_to_one_another(overlay: str) -> None:
    for pod in cluster(overlay).pods_of("executor"):
        assert pod.spec["shareProcessNamespace"] is True
        for path in ("/tmp", "/dev/shm"):
            volumes = set()
            for container in pod.containers:
                [mount] = [m for m in container.spec["volumeMounts"] if m["mountPath"] == path]
                assert not mount.get("readOnly")
                assert "subPath" not in mount
                volumes.add(mount["name"])
            assert len(volumes) == 1, f"{path} is not the same for all"
