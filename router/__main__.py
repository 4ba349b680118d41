"""Router program, ``python -m router``: from settings to a running router."""

import os
import signal
import sys

# While it imports. By itself the kernel drops the signal where this is a container's first process.
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

# gRPC reads these as it is imported. Its own log would write past ours; what it does in each process that
# is started, in case that goes on with its channels, has ended some of them before they began.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import uvloop

from protos.memory import manage_memory, uncollected
from protos.settings import command
from router.config import RouterConfig


@command(RouterConfig, "router")
def main(config: RouterConfig) -> None:
    """Routes generation requests to groups of executors, and schedules every step of them."""
    with uncollected():
        from router import app
    manage_memory()
    uvloop.run(app.run(config))


if __name__ == "__main__":
    main(prog_name="python -m router")
