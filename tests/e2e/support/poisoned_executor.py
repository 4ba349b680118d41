"""Poisoned executor: one that dies or hangs in certain prompts.

Takes the flags of ``python -m executor`` and is one, but for steps that compute the token of
`POISON` or of `SNARE`. The first end the process in the middle of the step, the others never end, as
with a bug in a kernel or in the driver. It is one token, as a prompt may be cut anywhere.
"""

import os
import signal
import threading

import numpy as np

from deploy.local.demo_tasks import token_ids
from executor.__main__ import main
from executor.worker import Pending, Worker
from protos.executor.v1 import executor_pb2 as pb

POISON, SNARE = "@", "$"
_POISON_ID, _SNARE_ID = (token_ids(text)[0] for text in (POISON, SNARE))
_launch = Worker.launch


def _computes(request: pb.StepRequest, token_id: int) -> bool:
    ranks = (np.frombuffer(rank.sequences.token_ids, dtype="<i4") for rank in request.ranks)
    return any(token_id in ids for ids in ranks)


def _launch_or_die(worker: Worker, request: pb.StepRequest) -> Pending:
    if _computes(request, _POISON_ID):
        os.kill(os.getpid(), signal.SIGKILL)
    if _computes(request, _SNARE_ID):
        threading.Event().wait()
    return _launch(worker, request)


if __name__ == "__main__":
    Worker.launch = _launch_or_die  # type: ignore[method-assign, assignment]
    main()
