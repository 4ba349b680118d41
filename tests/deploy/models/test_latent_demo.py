"""The demo model with latent attention. Without this, weights that no server can load, or that have
forgotten their tasks, would show only in a demo that somebody starts.
"""

from deploy.local.demo_tasks import STOP, problems, token_ids
from tests.executor.support.serving import NUM_ROWS, Rank
from tests.support.paths import DEMO_MODEL_MLA

PROBLEMS_OF_A_ROW = 4


def test_the_latent_demo_model_knows_the_answers_of_its_tasks():
    rank = Rank(DEMO_MODEL_MLA)
    asked = list(problems(seed=2, count=NUM_ROWS * PROBLEMS_OF_A_ROW))
    rows = [asked[at : at + PROBLEMS_OF_A_ROW] for at in range(0, len(asked), PROBLEMS_OF_A_ROW)]
    ids = [token_ids("".join(problem.line for problem in row) + STOP) for row in rows]

    logits = rank.step(dict(enumerate(ids)))

    for number, row in enumerate(rows):
        following = logits[number].argmax(dim=-1).tolist()
        start = 0
        for problem in row:
            begin, end = start + len(problem.prompt), start + len(problem.line)
            assert following[begin - 1 : end] == ids[number][begin : end + 1], problem
            start = end
