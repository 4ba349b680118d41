"""Keeps log lines out of the tables."""

import logging

import structlog


def quiet() -> None:
    """Lets only errors through, in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
