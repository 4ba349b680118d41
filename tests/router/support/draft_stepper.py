"""A stepper whose group drafts, and what its tests ask of requests and steps."""

from router.requests.request import Request
from router.scheduling.speculation import DraftSettings
from router.scheduling.step import StepPlan
from tests.router.scheduling.test_scheduler import output_of
from tests.router.scheduling.test_speculation import speculation
from tests.router.support.stepper import Stepper, make_shape
from tests.sim.fake_rank import expected_output

CHAIN = speculation()
PROMPT = [1, 2, 3]
ALWAYS = DraftSettings(min_tokens_per_step=1)


def stepper(acceptance: float = 1.0, drafts: DraftSettings = ALWAYS, **sizes: object) -> Stepper:
    shape = make_shape(**{"speculation": CHAIN, **sizes})
    return Stepper(shape, acceptance=acceptance, drafts=drafts)


def plain(request: Request) -> list[int]:
    """What a request's first sequence gives without drafts."""
    stop = request.stop
    return expected_output(
        request.prompt.tolist(),
        stop.max_tokens,
        stop.stop_token_ids,
        request.sequences[0].seed,
        stop.min_tokens,
    )


def assert_plain(*requests: Request) -> None:
    for request in requests:
        assert request.sequences[0].error is None
        assert output_of(request)[0] == plain(request)


def widths(plans: list[StepPlan]) -> list[int]:
    return [plan.agreement.num_draft_tokens for plan in plans]


def limits(plan: StepPlan) -> list[int]:
    assert plan.limits is not None
    return plan.limits.tolist()


def stop_at(place: int, prompt: list[int] = PROMPT) -> int:
    """A token that an output has at this place and not before, so that it can be a stop token."""
    output = expected_output(prompt, 40, ())
    assert output[place] not in output[:place]
    return output[place]
