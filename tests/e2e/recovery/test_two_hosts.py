"""Group over a network: right answers, also after a cable was cut, for good on one that loses frames."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.processes import ROOT
from tests.e2e.support.hosts import hosts, why_not
from tests.e2e.support.two_hosts import EXECUTORS, ROUTER

TIMEOUT_S = 540


@pytest.mark.parametrize(
    ("kind", "delay_s", "loss"),
    # A round trip over the second one takes 20 ms more.
    [("cut", 0.0, 0.0), ("gone", 0.01, 0.01)],
)
def test_a_group_over_a_network_answers_right_and_outlives_a_cut_cable(
    kind: str, delay_s: float, loss: float, tmp_path: Path
):
    if (reason := why_not()) is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    program = (sys.executable, "-m", "tests.e2e.support.two_hosts", kind)
    with hosts((ROUTER, *EXECUTORS), delay_s, loss) as made:
        command = [*made.command(ROUTER), *program, made.prefix, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, "its output says what is wrong"
