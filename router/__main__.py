"""``python -m router``: flags and environment to a RouterConfig, then run it.

What takes long to import is imported when it is needed, so that ``--help`` answers at once.
"""

import os
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import click

from protos.logs import configure_logging
from router.config import RouterConfig

BAD_CONFIGURATION = 2

HELP = {
    "listen": "Where to serve, HOST:PORT. Port 0 takes a free one.",
    "model_name": "What clients may call the model.",
    "tokenizer": "The model's tokenizer.json, or a directory that has one.",
    "max_waiting_sequences": "Sequences that may wait in each group; more are refused.",
    "max_waiting_tokens": "Prompt tokens that may wait in each group; more are refused.",
    "max_calls": "Calls open at once; more are refused.",
    "pipeline_depth": "Steps in flight at most.",
    "min_chunk_tokens": "A prompt runs at least this far in a step, however unequal the ranks.",
    "form_timeout_s": "Seconds for each call that forms a group.",
    "step_timeout_s": "Seconds for the answer to a step; past it, the executor counts as lost.",
    "retry_delay_s": "Seconds between attempts to form a group.",
    "shutdown_delay_s": "Seconds after SIGTERM in which new requests are still taken.",
    "shutdown_grace_s": "Seconds that running requests then have to finish.",
}


def _options(command: Any) -> Any:
    """Adds a flag for each field that HELP names, with the field's type and default."""
    for field in reversed(fields(RouterConfig)):
        if field.name in HELP:
            assert field.default is not MISSING
            option = click.option(
                "--" + field.name.replace("_", "-"),
                type=Path if field.name == "tokenizer" else type(field.default),
                default=field.default,
                show_default=field.default is not None,
                show_envvar=True,
                help=HELP[field.name],
            )
            command = option(command)
    return command


@click.command(context_settings={"auto_envvar_prefix": "LOCKSTEP_ROUTER"})
@click.option(
    "--group",
    "groups",
    multiple=True,
    required=True,
    metavar="HOST:PORT,...|dns:NAME:PORT?size=N",
    envvar="LOCKSTEP_ROUTER_GROUPS",
    show_envvar=True,
    help="The executors of one group: their addresses, or a DNS name and how many executors it "
    "stands for. Repeat it for each group; in the environment, groups are separated by spaces.",
)
@_options
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    show_envvar=True,
    help="Least severe level that is logged.",
)
def main(groups: tuple[str, ...], log_level: str, **settings: Any) -> None:
    """Routes generation requests to groups of executors, and schedules every step of them."""
    import structlog
    import uvloop

    configure_logging(log_level)
    log = structlog.stdlib.get_logger(__name__)
    try:
        config = RouterConfig(groups=tuple(tuple(g.split(",")) for g in groups), **settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # gRPC's own log would write past ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from router import app

    log.info("configuration", **_plain(asdict(config)))
    try:
        uvloop.run(app.run(config))
    except OSError as error:
        log.error("cannot_start", problem=str(error))
        sys.exit(BAD_CONFIGURATION)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}


if __name__ == "__main__":
    main(prog_name="python -m router")
