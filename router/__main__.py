"""``python -m router``: flags and environment to a RouterConfig, then run it.

What takes long to import is imported when it is needed, so that ``--help`` answers at once.
"""

import os
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import click

from protos.telemetry.logs import configure_logging
from protos.transport.port import HELP as SECURITY_HELP
from protos.transport.port import PATHS, PLAINTEXT
from router.config import ON_OFF, RouterConfig

BAD_CONFIGURATION = 2
ENVIRONMENT = "LOCKSTEP_ROUTER"

HELP = {
    "listen": "Where to serve, HOST:PORT. Port 0 takes a free one.",
    "model_name": "What clients may call the model.",
    "tokenizer": "The model's tokenizer.json, or a directory that has one.",
    "vllm_engine": "Whether to serve vllm.grpc.engine.VllmEngine too, for gateways such as smg.",
    "max_waiting_sequences": "Sequences that may wait in each group; more are refused.",
    "max_waiting_tokens": "Prompt tokens that may wait in each group; more are refused.",
    "priority_step_s": "Seconds of waiting that one level of priority is worth.",
    "max_calls": "Calls open at once; more are refused.",
    "max_connection_streams": "Calls open at once on one connection; more wait at the client.",
    "max_connection_age_s": "Seconds after which a client is asked to connect anew; 0 is never.",
    "pipeline_depth": "Steps in flight at most.",
    "min_chunk_tokens": "A prompt runs at least this far in a step, however unequal the ranks.",
    "speculation": "Whether steps are speculative where executors have a draft model.",
    "min_tokens_per_draft_step": "Tokens that a sequence must gain in a speculative step to pay.",
    "prompt_steps_between_drafts": "While prompts wait, steps that run some between two that draft.",
    "form_timeout_s": "Seconds for each call that forms a group.",
    "step_timeout_s": "Seconds for the answer to a step; past it, the executor counts as lost.",
    "step_deadline_factor": "The same past so many times what such steps take, once that is known.",
    "min_step_deadline_s": "But not before so many seconds.",
    "failover_after_s": "Seconds after which a group that is down gives its requests to another.",
    "retry_delay_s": "Seconds between attempts to form a group.",
    "shutdown_delay_s": "Seconds after SIGTERM in which new requests are still taken.",
    "shutdown_grace_s": "Seconds that running requests then have to finish.",
    "metrics_listen": "Where Prometheus may scrape metrics, HOST:PORT.  [default: nowhere]",
    "otlp_endpoint": "Where traces go: http://HOST:4317 or https.  [default: nowhere]",
    **SECURITY_HELP,
    "executor_ca": "CA certificates of the executors, in PEM.  [default: no TLS to executors]",
    "executor_cert": "Certificate that executors are shown, in PEM.",
    "executor_key": "Its private key, in PEM.",
    "executor_name": "Name in executors' certificates.  [default: host, or a group's DNS name]",
    "executor_token": "File whose first token goes with every call to executors.",
    "executor_plaintext": "on: what goes to executors may be plain text off loopback.",
}
# Of the flags whose defaults do not tell.
TYPES: dict[str, Any] = {
    "tokenizer": Path,
    "vllm_engine": click.Choice(ON_OFF),
    "speculation": click.Choice(ON_OFF),
    "metrics_listen": str,
    "otlp_endpoint": str,
    **dict.fromkeys(PATHS, Path),
    **dict.fromkeys(("executor_ca", "executor_cert", "executor_key", "executor_token"), Path),
    "plaintext": click.Choice(PLAINTEXT),
    "executor_plaintext": click.Choice(ON_OFF),
    **dict.fromkeys(("tls_client_names", "health_listen", "executor_name"), str),
}
# Other variables that set a field where its own does not.
VARIABLES = {
    "otlp_endpoint": ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
}


def _options(command: Any) -> Any:
    """Adds a flag for each field that HELP names, with the field's type and default."""
    for field in reversed(fields(RouterConfig)):
        if field.name in HELP:
            assert field.default is not MISSING
            option = click.option(
                "--" + field.name.replace("_", "-"),
                type=TYPES.get(field.name, type(field.default)),
                default=field.default,
                show_default=field.default is not None,
                envvar=[f"{ENVIRONMENT}_{field.name.upper()}", *VARIABLES[field.name]]
                if field.name in VARIABLES
                else None,
                show_envvar=True,
                help=HELP[field.name],
            )
            command = option(command)
    return command


@click.command(context_settings={"auto_envvar_prefix": ENVIRONMENT})
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
