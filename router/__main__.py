"""Router program, ``python -m router``: from settings to a running router."""

import os

import uvloop

from protos.memory import give_back_memory
from protos.settings import command
from router.config import RouterConfig


@command(RouterConfig, "router")
def main(config: RouterConfig) -> None:
    """Routes generation requests to groups of executors, and schedules every step of them."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log would write past ours
    from router import app

    give_back_memory()
    uvloop.run(app.run(config))


if __name__ == "__main__":
    main(prog_name="python -m router")
