"""Command-line options of benchmarks."""

import argparse
from typing import Any


def parse_options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Reads an option for each default, of the same type.

    Args:
        doc: Shown by --help.
        defaults: By name. A tuple is given with commas, False as a flag without a value; for a
            type, the default is None.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, default in defaults.items():
        flag, kind = f"--{name.replace('_', '-')}", type(default)
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, tuple):
            values = _tuple_of(type(default[0]))
            parser.add_argument(flag, type=values, default=default, help="with commas")
        else:
            parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    return parser.parse_args()


def _tuple_of(kind: type) -> Any:
    return lambda text: tuple(kind(value) for value in text.split(","))
