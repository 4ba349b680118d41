"""Results of runs, which several processes make and a file keeps.

A result is found again by a digest of all that it follows from: the run, its trace, and the code of its
policy and of the world. So a change of ours runs our settings again, and none of the peers'.
"""

import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import router.requests
import router.scheduling
from router.scheduling.kv import block_pool, prefix_cache
from router.scheduling.step_builder import pick_padding_mode
from tests.bench.policies import lockstep, peers, ranks, traces, world
from tests.bench.policies.settings import ALL, OWN
from tests.bench.policies.traces import jobs_at, read_trace
from tests.bench.policies.world import COSTS, Sizes, serve

NICENESS = 10
_WORLD = (world, traces, pick_padding_mode)
_PEERS = (*_WORLD, peers, ranks, block_pool, prefix_cache)
_OWN_PACKAGES = (router.requests, router.scheduling)

Figures = dict[str, float]


class Run(NamedTuple):
    """A trace served by one setting.

    Attributes:
        setting: A name of `settings.ALL`.
        num_requests: Of the trace.
        rate: Requests a second; None: all wait at once.
        num_copies: So many times over, each time with other prompts.
        num_skipped: Requests of the trace before these.
    """

    setting: str
    trace: Path
    num_requests: int
    num_ranks: int
    cost: str
    rate: float | None
    num_copies: int = 1
    num_skipped: int = 0


def figures_of(run: Run) -> Figures:
    """Serves a run's requests.

    Returns its figures, see `world.Outcome`; of our own besides by how many percent steps were off what
    they were predicted to take.
    """
    arrivals = read_trace(run.trace, run.num_requests, run.num_skipped)
    period = 0.0 if run.rate is None else len(arrivals) / run.rate
    jobs = [
        replace(job, arrival=job.arrival + number * period)
        for number in range(run.num_copies)
        for job in jobs_at(arrivals, run.rate, copy=number)
    ]
    policy = ALL[run.setting](Sizes(num_ranks=run.num_ranks))
    figures = serve(policy, jobs, COSTS[run.cost]).figures()
    if isinstance(policy, lockstep.Lockstep):
        figures["error %"] = 100 * policy.measures.costs.plain.error
    return figures


class Results:
    """Figures of runs.

    Args:
        path: File that keeps them, a line of JSON for each; made where there is none.
        num_processes: That run at a time, with a low priority.
    """

    def __init__(self, path: Path, num_processes: int) -> None:
        self._path = path
        self._num_processes = num_processes
        self._known: dict[str, Figures] = {}
        if path.exists():
            lines = path.read_text().splitlines()
            self._known = dict(json.loads(line) for line in lines if line.endswith("]"))

    def of(self, runs: Sequence[Run]) -> list[Figures]:
        """Returns the figures of each run. Those that are not known are made, and kept as they come."""
        names = [_digest(run) for run in runs]
        missing = {
            name: run for name, run in zip(names, runs, strict=True) if name not in self._known
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            for number, (name, figures) in enumerate(self._make(missing), start=1):
                self._known[name] = figures
                file.write(f"\n{json.dumps((name, figures))}")
                file.flush()
                if sys.stderr.isatty():
                    print(f"\r{number} of {len(missing)} runs ", end="", file=sys.stderr)
        return [self._known[name] for name in names]

    def _make(self, missing: dict[str, Run]) -> Iterator[tuple[str, Figures]]:
        if self._num_processes == 1 or len(missing) < 2:
            yield from zip(missing, map(figures_of, missing.values()), strict=True)
            return
        # A scheduler's table is large and hardly used: in huge pages, zeroing it is half of a run.
        os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
        with ProcessPoolExecutor(
            self._num_processes, get_context("spawn"), initializer=os.nice, initargs=(NICENESS,)
        ) as pool:
            yield from zip(missing, pool.map(figures_of, missing.values()), strict=True)


def _digest(run: Run) -> str:
    code = _peers_code()
    if run.setting.startswith(OWN):
        code = f"{_own_code()} {ALL[run.setting]}"
    said = f"{code} {_content(run.trace)} {run._replace(trace=Path())}"
    return blake2b(said.encode(), digest_size=12).hexdigest()


@cache
def _content(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=12).hexdigest()


@cache
def _peers_code() -> str:
    return _together(map(inspect.getsource, _PEERS))


@cache
def _own_code() -> str:
    folders = [Path(package.__path__[0]) for package in _OWN_PACKAGES]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    sources = [inspect.getsource(each) for each in (*_WORLD, lockstep)]
    return _together([*sources, *(file.read_text() for file in files)])


def _together(sources: Iterable[str]) -> str:
    return blake2b("\0".join(sources).encode(), digest_size=12).hexdigest()
