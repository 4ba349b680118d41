"""Settings of a group's engine."""

from dataclasses import dataclass

from protos.settings import Rule, above, at_least, setting
from router.scheduling.scheduler import SchedulerSettings
from router.scheduling.step import StepSettings


@dataclass(frozen=True, kw_only=True)
class EngineSettings(SchedulerSettings, StepSettings):
    """Settings of a group's engine."""

    pipeline_depth: int = setting(2, at_least(1))
    """Steps in flight at most. 2 hides the way to the executors; 1 helps to debug."""
    verify_kept_kv: float = setting(0.001, Rule("0 to 1", lambda share: 0 <= share <= 1))
    """Share of the sequences that ran before a loss of which all KV that was kept is computed again and
    compared, at the cost of that. If it differs, the group drops what it kept, and forms anew."""
    retry_delay_s: float = setting(0.5, above(0))
    """Seconds from a loss to the first attempt to form the group again, and between attempts at most:
    they follow the sooner the shorter it has been down."""
