"""If these fail, a group drafts although it does not pay, or says that it gains what nobody gets."""

import pytest

from router.scheduling.speculation import DraftSettings
from tests.router.scheduling.test_speculation import speculation
from tests.router.support.stepper import Stepper, make_shape
from tests.sim.fake_rank import expected_output

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_comes_behind_a_stop_is_no_gain(depth: int) -> None:
    """Of the first run of four, the third token stops; the step behind it runs for nobody."""
    stop = expected_output(PROMPT, 40, ())[3]
    shape = make_shape(speculation=speculation())
    world = Stepper(shape, acceptance=1.0, drafts=DraftSettings(min_tokens_per_step=1))
    request = world.submit(PROMPT, 30, stop_token_ids=(stop,))
    world.run(depth)
    assert request.sequences[0].num_output_tokens == 4
    assert world.scheduler.gate.tokens_per_step == 3.0


def test_rows_without_a_stop_gain_all_that_they_are_given() -> None:
    shape = make_shape(speculation=speculation())
    world = Stepper(shape, acceptance=1.0, drafts=DraftSettings(min_tokens_per_step=1))
    world.submit(PROMPT, 1 + 2 * speculation().max_gain)
    world.run(2)
    assert world.scheduler.gate.tokens_per_step == speculation().max_gain
