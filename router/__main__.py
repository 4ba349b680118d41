"""Router program, ``python -m router``: from settings to a running router."""

import os

# gRPC's own log would write past ours. It reads this as it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

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
