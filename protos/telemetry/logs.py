"""Logs of both services: JSON lines, or text for people where stderr is a terminal."""

import logging
import sys

import structlog
from structlog.types import Processor


def configure_logging(level: str = "info") -> None:
    """Sends structlog and the standard library's logging to stderr, in one form.

    Args:
        level: Least severe level that is written, such as "info".
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks as they are: with `rich` at hand, structlog would print the values of all variables
    # beside them, and tokens are among those.
    last: list[Processor] = [
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    ]
    if not sys.stderr.isatty():
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
