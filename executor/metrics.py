"""What an executor tells Prometheus. Read by the scrape's thread, between two of the others' steps.

The names are listed in deploy/prometheus/METRICS.md.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from executor.measures import Measures
from protos.telemetry.metrics import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What does not change about an executor once it has loaded.

    Attributes:
        num_kv_blocks: 0 while it loads.
    """

    dp_rank: int
    attn_tp_rank: int
    num_kv_blocks: int = 0


def collector(
    measures: Measures,
    place: Callable[[], Place],
    epoch: Callable[[], int | None],
    device_memory: Callable[[], dict[str, int]],
) -> Callable[[], Iterable[Family]]:
    """Returns what a thread calls to collect the metrics.

    Args:
        measures: What steps amounted to.
        place: Which executor this is, as far as is known.
        epoch: The epoch that it is joined to; None if to none.
        device_memory: Bytes of an accelerator's memory by state; empty on a CPU.
    """
    return lambda: families(measures, place(), epoch(), device_memory())


def families(
    measures: Measures, place: Place, epoch: int | None, device_memory: dict[str, int]
) -> Iterator[Family]:
    """Yields every metric of an executor, also those that have no series yet."""

    def gauge(name: str, help_text: str, value: float) -> Family:
        return Family(f"lockstep_executor_{name}", "gauge", help_text, (), [((), value)])

    yield Family(
        "lockstep_executor_info",
        "gauge",
        "1; its labels say which executor of its group this is.",
        ("dp_rank", "attn_tp_rank"),
        [((str(place.dp_rank), str(place.attn_tp_rank)), 1.0)],
    )
    yield gauge("ready", "Whether it is joined to an epoch.", float(epoch is not None))
    yield gauge("epoch", "The epoch that it is joined to; 0 if to none.", epoch or 0)
    yield gauge("kv_blocks", "KV blocks of its pool; 0 while it loads.", place.num_kv_blocks)
    yield Family(
        "lockstep_executor_device_memory_bytes",
        "gauge",
        "Memory of its GPU that PyTorch uses (allocated) or holds (reserved); none on a CPU.",
        ("state",),
        [((state,), size) for state, size in device_memory.items()],
    )
    yield Family(
        "lockstep_executor_joins_total",
        "counter",
        "Join calls, by outcome.",
        ("outcome",),
        [((outcome,), count) for outcome, count in measures.joins.copy().items()],
    )
    yield Family(
        "lockstep_executor_steps_total",
        "counter",
        "Steps by this rank's forward mode, and whether a captured graph was replayed.",
        ("mode", "graph"),
        [
            ((mode, "replay" if is_replay else "eager"), count)
            for (mode, is_replay), count in measures.steps.copy().items()
        ],
    )
    yield Family(
        "lockstep_executor_failed_steps_total",
        "counter",
        "Steps that were refused or failed, by the error's reason.",
        ("reason",),
        [((reason,), count) for reason, count in measures.failures.copy().items()],
    )
    yield Family(
        "lockstep_executor_tokens_total",
        "counter",
        "Rows that steps ran: tokens of sequences (scheduled) and what filled up graphs (padding).",
        ("kind",),
        [(("scheduled",), measures.scheduled_tokens), (("padding",), measures.padding_tokens)],
    )
    yield Family(
        "lockstep_executor_step_seconds_total",
        "counter",
        "Where the time of steps went: queue (while the step before ran), fill (columns to the "
        "device), peers (until every executor had begun), forward (on a GPU: its launch), sample "
        "(until tokens were on the host).",
        ("phase",),
        [((phase,), nanoseconds / 1e9) for phase, nanoseconds in measures.phase_ns.items()],
    )
    yield Family(
        "lockstep_executor_execute_seconds",
        "histogram",
        "From a step's beginning to its answer.",
        (),
        [((), measures.execute_s.copy())],
    )
