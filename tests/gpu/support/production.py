"""Settings that production's executors have on GPUs, those of a group's shape aside."""

import re

from executor.config import ExecutorConfig
from tests.support.paths import ROOT

# Of the process, the group, its places and its secrets. An all-to-all takes several GPUs.
OTHERS = {"model", "max_restarts", "plaintext", "auth_tokens", "metrics_tokens", "moe_a2a"}
OTHERS |= {"dp_size", "dp_ranks_per_node", "attn_tp_size", "ep_size"}


def settings_of(overlay: str) -> dict[str, str]:
    """Returns what an overlay of Kubernetes sets of kernels and graphs."""
    path = ROOT / "deploy/kubernetes/overlays" / overlay / "kustomization.yaml"
    said = re.findall(r"- LOCKSTEP_EXECUTOR_(\w+)=(\S+)", path.read_text(encoding="utf-8"))
    settings = {name.lower(): value for name, value in said}
    return {name: value for name, value in settings.items() if name not in OTHERS}


PRODUCTION = settings_of("gpu-node")
PDL = PRODUCTION.get(
    "flashinfer_pdl", ExecutorConfig.__dataclass_fields__["flashinfer_pdl"].default
)
