"""Poisoned executor: one that dies or hangs in certain prompts.

Takes the flags of ``python -m executor`` and is one, but for steps that compute the tokens of
`POISON` or of `SNARE` one after another. The first end the process in the middle of the step, the
others never end, as with a bug in a kernel or in the driver.
"""

import os
import signal
import threading

import numpy as np

from deploy.local.demo_tasks import token_ids
from executor.__main__ import main
from executor.worker import Pending, Worker
from protos.executor.v1 import executor_pb2 as pb

POISON, SNARE = "@poison@", "@snare@"
_POISON_BYTES, _SNARE_BYTES = (
    np.array(token_ids(text), dtype="<i4").tobytes() for text in (POISON, SNARE)
)
_launch = Worker.launch


def _launch_or_die(worker: Worker, request: pb.StepRequest) -> Pending:
    if any(_POISON_BYTES in rank.sequences.token_ids for rank in request.ranks):
        os.kill(os.getpid(), signal.SIGKILL)
    if any(_SNARE_BYTES in rank.sequences.token_ids for rank in request.ranks):
        threading.Event().wait()
    return _launch(worker, request)


if __name__ == "__main__":
    Worker.launch = _launch_or_die  # type: ignore[method-assign, assignment]
    main()
