"""Metrics of both services: a histogram that is cheap to fill, and tables of what a scrape shows.

Code that counts knows nothing of Prometheus: it adds to numbers that its own thread writes. A
scrape reads them and makes Prometheus' text of them, in a thread of its own.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Metric as ExposedMetric

T = TypeVar("T")
Labels = tuple[str, ...]

# Seconds. Waits of people and of services, and whole answers.
LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# Seconds. Steps, and gaps between two tokens.
STEP_BOUNDS = (1e-3, 2.5e-3, 5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1.0, 5.0, 30.0)

# A scrape's thread lets go of the interpreter once in so many families: else the event loop would
# wait for all of them. Sleeping takes longer than asked for, so not at each.
BREATH_FAMILIES, BREATH_S = 8, 20e-6


class Histogram:
    """Counts values by size. One thread adds; any thread may read.

    Args:
        bounds: Upper bounds of the buckets, ascending; one more bucket has all that is larger.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def copy(self) -> "Histogram":
        """Returns its state now, for another thread."""
        copied = Histogram(self.bounds)
        copied.counts, copied.total = list(self.counts), self.total
        return copied

    def buckets(self) -> list[tuple[str, float]]:
        """Returns each bound and how many values are not above it, as Prometheus wants them."""
        total, buckets = 0, []
        names = [*map(repr, self.bounds), "+Inf"]
        for name, count in zip(names, self.counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        return buckets


Values = (
    float
    | Histogram
    | Mapping[str, float]
    | Mapping[tuple[str, str], float]
    | Mapping[tuple[str, str], Histogram]
    | None
)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric and all of its series.

    Attributes:
        name: As Prometheus shows it; a counter's ends in "_total".
        kind: "gauge", "counter" or "histogram".
        help: Its meaning, for people.
        labels: Names of its labels.
        series: Each series' label values, with its value.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    series: Iterable[tuple[tuple[str, ...], "float | Histogram"]]

    def to_metric(self) -> "ExposedMetric":
        """Returns it in the form that prometheus-client writes."""
        from prometheus_client import core

        if self.kind == "histogram":
            histogram = core.HistogramMetricFamily(self.name, self.help, labels=self.labels)
            for labels, value in self.series:
                assert isinstance(value, Histogram)
                histogram.add_metric(labels, value.buckets(), sum_value=value.total)
            return histogram
        metric: Any = core.GaugeMetricFamily if self.kind == "gauge" else core.CounterMetricFamily
        family = metric(self.name, self.help, labels=self.labels)
        for labels, value in self.series:
            family.add_metric(labels, value)
        return family  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Metric(Generic[T]):
    """Row of a table of metrics.

    Attributes:
        name: Without the program's prefix; a counter's ends in "_total".
        kind: "gauge", "counter" or "histogram".
        labels: Names of labels beside the labels of the table's subjects.
        values: A subject's value, or its values by `labels`; None for no series.
        help: What it tells, for people.
    """

    name: str
    kind: str
    labels: Labels
    values: Callable[[T], Values]
    help: str


def families_of(
    table: Iterable[Metric[T]], prefix: str, names: Labels, subjects: Sequence[tuple[Labels, T]]
) -> Iterator[Family]:
    """Yields each metric of a table, also if it has no series yet.

    Args:
        table: The metrics.
        prefix: Of their names.
        names: Of the subjects' labels.
        subjects: Label values and subject.
    """
    for metric in table:
        series: list[tuple[Labels, float | Histogram]] = []
        for labels, subject in subjects:
            values = metric.values(subject)
            if isinstance(values, Mapping):
                for more, value in values.items():
                    series.append((labels + ((more,) if isinstance(more, str) else more), value))
            elif values is not None:
                series.append((labels, values))
        yield Family(prefix + metric.name, metric.kind, metric.help, names + metric.labels, series)


def new_registry(collect: Callable[[], Iterable[Family]]) -> "CollectorRegistry":
    """Returns the families that `collect` returns, and the process's own."""
    from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_Collector(collect))
    return registry


class _Collector:
    """Collector, as prometheus-client wants one."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable["ExposedMetric"]:
        """Returns nothing: what there is, is known only when it is collected."""
        return ()

    def collect(self) -> Iterable["ExposedMetric"]:
        for number, family in enumerate(self._collect()):
            yield family.to_metric()
            if number % BREATH_FAMILIES == 0:
                time.sleep(BREATH_S)
