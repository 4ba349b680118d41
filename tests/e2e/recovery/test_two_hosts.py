"""Group over a network: right answers, also after a cable was cut."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.processes import ROOT
from tests.e2e.support.hosts import hosts, why_not
from tests.e2e.support.two_hosts import (
    EXECUTORS,
    NUM_REQUESTS,
    NUM_STREAMS,
    NUM_TOKENS,
    ROUTER,
    Report,
)

TIMEOUT_S = 540


def test_a_group_over_a_network_answers_right_and_outlives_a_cut_cable(tmp_path: Path):
    if (reason := why_not()) is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with hosts((ROUTER, *EXECUTORS)) as made:
        done = subprocess.run(
            [
                *made.command(ROUTER),
                *(sys.executable, "-m", "tests.e2e.support.two_hosts", made.prefix, str(tmp_path)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    report = Report(**json.loads(done.stdout.splitlines()[-1]))
    print(report)

    assert report.num_right == NUM_REQUESTS
    assert report.num_whole == NUM_STREAMS
    # It was cut in mid-stream, noticed, named by its address, and joined again.
    assert 0 < report.num_tokens_before < NUM_STREAMS * NUM_TOKENS
    assert "10.77.0.3" in report.problem
    before, after = report.epochs
    assert after > before
    assert report.num_left == 0
