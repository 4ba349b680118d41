"""Settings of a program, each written once: a field of its configuration, with a description.

    @dataclass(frozen=True, kw_only=True)
    class RouterConfig(ServiceConfig):
        max_calls: int = setting(8192, at_least(1))
        \"\"\"Calls open at once; more are refused.\"\"\"

`command` makes the flag ``--max-calls`` and the variable ``LOCKSTEP_ROUTER_MAX_CALLS`` of it, and
``python -m router --help`` shows both with description, range and default. `check_settings` checks
the value, from wherever it came.
"""

import ast
import inspect
import itertools
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import click
import structlog

from protos import __version__
from protos.telemetry.logs import configure_logging

BAD_CONFIGURATION = 2  # exit code


@dataclass(frozen=True, slots=True)
class Rule:
    """Values that fit a setting.

    Attributes:
        need: The same in words, which follow "need" in an error.
        fits: Whether a value, which is not None, is one of them.
        form: The same as a placeholder for --help, where that can be.
    """

    need: str
    fits: Callable[[Any], Any]
    form: str | None = None


NO_RULE = Rule("", lambda value: True)


def at_least(bound: float, why: str = "") -> Rule:
    """Finite numbers from `bound` up; `why` follows in the error."""
    return Rule(f"at least {bound}{why}", lambda value: bound <= value < math.inf)


def above(bound: float, why: str = "") -> Rule:
    """Finite numbers above `bound`; `why` follows in the error."""
    return Rule(f"more than {bound}{why}", lambda value: bound < value < math.inf)


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", choices.__contains__, f"[{'|'.join(choices)}]")


def folder_with(file: str) -> Rule:
    return Rule(f"a folder that holds a {file}", lambda path: (path / file).is_file())


ON_OFF = one_of("on", "off")
_ADDRESS = re.compile(r"(\[[0-9a-zA-Z:.%]+\]|[^\[\]:\s]+):(\d{1,5})")
ADDRESS = Rule(
    "host:port, such as 127.0.0.1:50051 or [::]:0",
    lambda text: (match := _ADDRESS.fullmatch(text)) and int(match[2]) <= 65535,
    "HOST:PORT",
)


def setting(
    default: Any = MISSING,
    rule: Rule = NO_RULE,
    *,
    unset: str = "",
    flag: str = "",
    variables: tuple[str, ...] = (),
) -> Any:
    """Returns a dataclass field that is a setting. A plain default is one too, without a rule.

    Args:
        default: Its value where none is given; without one, it must be given.
        rule: The values that fit, besides None.
        unset: What None stands for, in a few words for --help.
        flag: Its flag, if that is not named as the field.
        variables: Further environment variables that set it where its own does not.
    """
    extra = {"rule": rule, "unset": unset, "flag": flag, "variables": variables}
    return field(default=default, metadata=extra)


def check_settings(config: Any) -> None:
    """Checks each setting of a configuration by its rule.

    Raises:
        ValueError: Names the setting, its value and what fits.
    """
    for each in fields(config):
        value, rule = getattr(config, each.name), each.metadata.get("rule", NO_RULE)
        if value is not None and not rule.fits(value):
            raise ValueError(f"{each.name}={value}: need {rule.need}")


def command(
    config_type: type[Any], program: str
) -> Callable[[Callable[[Any], None]], click.Command]:
    """Decorates the function that runs a program: returns the command that reads its configuration.

    Wrong usage, invalid settings, and an OSError or ValueError of the function are logged in one
    line and end the process with BAD_CONFIGURATION.

    Args:
        config_type: Dataclass of the settings; one is named ``log_level``.
        program: Name of the program, such as "router".
    """
    prefix = f"LOCKSTEP_{program.upper()}_"
    options = _options(config_type, prefix)

    def decorate(run: Callable[[Any], None]) -> click.Command:
        @wraps(run)
        def main(**values: Any) -> None:
            configure_logging()
            try:
                check_variables(
                    os.environ, prefix, {name for o in options for name in o.envvar or ()}
                )
                config = config_type(**values)
                configure_logging(config.log_level)
                structlog.stdlib.get_logger(run.__module__).info(
                    "configuration", version=__version__, **_printable(config)
                )
                run(config)
            except (OSError, ValueError) as error:
                _refuse(str(error))

        made = _Program(
            program,
            callback=main,
            params=list(options),
            help=run.__doc__,
            epilog=f"A flag comes before its variable. A variable that begins with {prefix} and is "
            f"no setting stops the start.",
            context_settings={"max_content_width": 100},
        )
        return click.version_option(__version__, message=f"lockstep-{program} %(version)s")(made)

    return decorate


class _Program(click.Command):
    """A command that says in one line what is wrong with its flags and variables."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            configure_logging()
            _refuse(error.format_message())


def _refuse(problem: str) -> NoReturn:
    structlog.stdlib.get_logger(__name__).error("cannot_start", problem=problem)
    sys.exit(BAD_CONFIGURATION)


def check_variables(names: Collection[str], prefix: str, known: Collection[str]) -> None:
    """Checks that each variable of a program is the variable of a setting.

    Variables with another prefix belong to others, such as the other program or the tests, and
    some with this one to Kubernetes, which describes a Service named lockstep-router in them.

    Raises:
        ValueError: Names one that is not, and the nearest that is.
    """
    services = [
        name.removesuffix("SERVICE_HOST") for name in names if name.endswith("_SERVICE_HOST")
    ]
    of_services = tuple(name + kind for name in services for kind in ("SERVICE_", "PORT"))
    for name in sorted(names):
        if name.startswith(prefix) and name not in known and not name.startswith(of_services):
            rest = name.removeprefix(prefix)
            near = get_close_matches(rest, [other.removeprefix(prefix) for other in known], n=1)
            guess = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ValueError(f"{name}: there is no such setting; {guess}--help lists all")


def _options(config_type: type[Any], prefix: str) -> list[click.Option]:
    """Returns a flag for each setting, the class's own before its bases'."""
    types, texts = get_type_hints(config_type), _descriptions(config_type)
    own = config_type.__annotations__
    each_field = sorted(fields(config_type), key=lambda each: each.name not in own)
    return [_option(each, types[each.name], texts[each.name], prefix) for each in each_field]


def _option(each: Field[Any], type_: Any, text: str, prefix: str) -> click.Option:
    extra = each.metadata
    # Not None: click would take that for given.
    default = {} if each.default is MISSING else {"default": each.default}
    if isinstance(type_, UnionType):  # with None
        type_ = get_args(type_)[0]
    item = get_args(type_)[0] if get_origin(type_) is tuple else None
    is_repeated = get_origin(item) is tuple  # of lists: the flag is given once for each
    if is_repeated:
        item = get_args(item)[0]
    rule = extra.get("rule", NO_RULE)
    if rule.need and rule.form is None:
        text = f"{text}  [{rule.need}]"
    return click.Option(
        [extra.get("flag") or "--" + each.name.replace("_", "-"), each.name],
        type=type_ if item is None else _List(item),
        multiple=is_repeated,
        **default,
        required=not default,
        show_default=extra.get("unset") or default.get("default") is not None,
        envvar=[prefix + each.name.upper(), *extra.get("variables", ())],
        show_envvar=True,
        metavar=rule.form,
        help=text,
    )


class _List(click.ParamType[Any]):
    """Values of one type with commas between them."""

    name = "list"

    def __init__(self, item: type[Any]) -> None:
        self._item = click.types.convert_type(item)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(self._item.convert(part, param, ctx) for part in value.split(","))


def _descriptions(config_type: type[Any]) -> dict[str, str]:
    """Returns the text below each field of a dataclass, of its bases too."""
    texts = {}
    for each in filter(is_dataclass, config_type.__mro__):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        for node, text in itertools.pairwise(getattr(tree, "body", ())):
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(node.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return texts


def _printable(config: Any) -> dict[str, Any]:
    values = asdict(config).items()
    return {name: str(value) if isinstance(value, Path) else value for name, value in values}
