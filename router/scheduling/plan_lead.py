"""Time at which a step is planned: as late as executors allow.

Two steps are in flight so that executors never wait. Planned at once, the second would be fixed a whole
step before it begins, and a request that comes meanwhile would wait for both. What the running step
takes is known by and large, so the next one is planned shortly before its end.
"""

from typing import Final

SHARE = 0.95  # of the prediction: executors may be faster
FIRST_LEAD_S, MIN_LEAD_S, MAX_LEAD_S = 1e-3, 0.3e-3, 5e-3
GROWTH, SHRINKAGE = 1.25, 0.99
READY_S = 0.5e-3  # what an executor has waited for takes it as long to read, and a GPU's to launch
LEAST_LEADS: Final = 2  # a step of fewer is over before it pays


class PlanLead:
    """Learns how long before a step's end the next one must be planned to be there in time.

    Attributes:
        seconds: For planning, sending and reading it.
        num_late: Plans that came too late.
    """

    def __init__(self) -> None:
        self.seconds = FIRST_LEAD_S
        self.num_late = 0

    def wait_s(self, predicted_s: float) -> float:
        """Returns how long after the running step's start the next one is planned; 0: at once."""
        if predicted_s < LEAST_LEADS * self.seconds:
            return 0.0
        return SHARE * predicted_s - self.seconds

    def note(self, queued_s: float, *, was_put_off: bool) -> None:
        """Notes how long a step lay at an executor until its work began.

        Where steps vary, a lead may come to be too long for them: plans made at once shorten it again.
        """
        if queued_s > READY_S:
            least_s = MIN_LEAD_S if was_put_off else min(self.seconds, FIRST_LEAD_S)
            self.seconds = max(least_s, SHRINKAGE * self.seconds)
        elif was_put_off:
            self.num_late += 1
            self.seconds = min(MAX_LEAD_S, GROWTH * self.seconds)
