"""Settings of a router, checked once at start and never changed after."""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from protos.settings import ON_OFF, Rule, above, at_least, setting
from protos.transport.port import ServiceConfig, check_files
from router.engine.settings import EngineSettings
from router.executors.discovery import check_addresses, plain_addresses
from router.executors.group import GroupSettings
from router.executors.security import ExecutorSecurity
from router.requests.callers import CallerSettings
from router.requests.flow_limits import read_flow_limits
from router.requests.waiting_queue import MAX_RESUMED_TOKENS


@dataclass(frozen=True, kw_only=True)
class RouterConfig(EngineSettings, GroupSettings, CallerSettings, ExecutorSecurity, ServiceConfig):
    """Every setting of a router: its own, of its engines and groups, its callers, its ports and the
    way to executors."""

    groups: tuple[tuple[str, ...], ...] = setting(
        rule=Rule("at least one group", bool, "HOST:PORT,...|dns:NAME:PORT?size=N"), flag="--group"
    )
    """The executors of one group: their addresses in any order, or a DNS name and how many
    executors it stands for. ?size=N&min=M behind either makes it elastic: with M to N executors it
    serves, and any more are spares. Repeat the flag for each group; in the variable, groups are
    separated by spaces."""
    tokenizer: Path | None = setting(None, unset="clients send token ids only")
    """The model's tokenizer.json, or a folder that holds it."""
    chat_template: Path | None = setting(None, unset="the checkpoint's own, beside its tokenizer")
    """A file with the chat template, in Jinja, by which chats become prompts."""
    chat_template_timeout_s: float = setting(2.0, above(0))
    """Seconds of processor time that a chat template may take; past it, its request ends."""
    vllm_engine: str = setting("off", ON_OFF)
    """Whether to serve vllm.grpc.engine.VllmEngine too, for gateways such as smg; needs the package
    smg-grpc-proto."""
    status_page: str = setting("on", ON_OFF)
    """Whether the port for metrics serves a page for browsers too: groups, ranks, load and last
    events, no prompts. It has what concerns operators where callers are not told apart or scrapes
    need a token."""
    max_waiting_sequences: int = setting(4096, at_least(1))
    """Sequences that may wait in each group; more are refused."""
    max_waiting_tokens: int = setting(4_000_000, at_least(1))
    """Prompt tokens that may wait in each group; more are refused."""
    max_resumed_tokens: int = setting(MAX_RESUMED_TOKENS, at_least(1))
    """Tokens of resumed requests, of prompts and outputs so far, that may wait in each group to be
    computed again, beside the others; more are refused. Each output counts as 256 at least."""
    priority_step_s: float = setting(10.0, at_least(0))
    """Seconds of waiting that one level of priority is worth, so that no request waits for ever; 0
    is the order of arrival only."""
    max_connection_age_s: float = setting(1800.0, at_least(0))
    """Seconds, give or take a tenth, after which a client is asked to connect anew, perhaps to
    another router; its running calls go on. 0 is never."""
    failover_after_s: float = setting(10.0, at_least(0))
    """Seconds after which a group that is down gives the requests that it ran to another group;
    requests that had not begun go there at once."""
    shutdown_delay_s: float = setting(0.0, at_least(0))
    """Seconds after SIGTERM in which new requests are still taken, since load balancers are slow to
    notice."""
    shutdown_grace_s: float = setting(30.0, at_least(0))
    """Seconds that running requests then have to finish; a second SIGTERM ends both."""
    otlp_endpoint: str | None = setting(
        None,
        unset="nowhere",
        variables=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    )
    """Where traces go: http://HOST:4317 of an OpenTelemetry collector, or https."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for group in self.groups:
            check_addresses(group)
        addresses = [address for group in self.groups for address in plain_addresses(group)]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(f"group: {address} is given twice; an executor is in one group")
        self.check_executor_security(addresses)
        if self.vllm_engine == "on" and find_spec("smg_grpc_proto") is None:
            raise ValueError(
                "vllm_engine=on: the package smg-grpc-proto is not installed; install it with "
                "pip install smg-grpc-proto, or leave the service off"
            )
        if self.flow_limits is not None:
            check_files("flow_limits", partial(read_flow_limits, self.flow_limits))
        if self.otlp_endpoint is not None:
            _check_otlp_endpoint(self.otlp_endpoint)
        if self.tokenizer_file is not None:
            _check_tokenizer(self.tokenizer_file)
        elif self.chat_template is not None:
            raise ValueError(
                f"chat_template={self.chat_template}: without a tokenizer it makes no prompts; give the "
                f"model's with --tokenizer"
            )

    @property
    def tells_scrapes(self) -> bool:
        """Whether who reaches the port for metrics is told what concerns operators only."""
        return not self.identifies_callers or self.metrics_tokens is not None

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json itself."""
        if self.tokenizer is not None and self.tokenizer.is_dir():
            return self.tokenizer / "tokenizer.json"
        return self.tokenizer


# Files of other tokenizers, and what makes a tokenizer.json of them, once and elsewhere.
_CONVERTERS = {
    "tiktoken.model": "python -m deploy.convert_tiktoken {folder}",
    "tokenizer.model": (
        'python -c "from transformers import AutoTokenizer; '
        "AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\" "
        "where transformers, sentencepiece and protobuf are installed"
    ),
}


def _check_tokenizer(file: Path) -> None:
    for name, command in _CONVERTERS.items():
        other = file.parent / name
        if file == other or (other.is_file() and not file.is_file()):
            raise ValueError(
                f"tokenizer={other}: a router reads tokenizer.json only; convert it with "
                f"{command.format(folder=other.parent)}"
            )
    if not file.is_file():
        raise ValueError(
            f"tokenizer={file}: there is no such file; give the model's tokenizer.json or its "
            f"folder, or nothing to serve token ids only"
        )


def _check_otlp_endpoint(endpoint: str) -> None:
    if "@" in endpoint:
        raise ValueError(
            "otlp_endpoint: it has a user or a password, and settings are logged; give them in "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    try:
        parts = urlsplit(endpoint)
        # Without a port gRPC takes that of https, also where it is to send plain text.
        fits = parts.hostname and (parts.port, parts.scheme) != (None, "http")
    except ValueError:  # of brackets or a port
        fits = False
    if not fits or parts.scheme not in ("http", "https"):
        raise ValueError(
            f"otlp_endpoint={endpoint}: need http://host:4317 of an OpenTelemetry collector that "
            f"takes OTLP over gRPC, or https"
        )
    if find_spec("opentelemetry") is None:
        raise ValueError(
            f"otlp_endpoint={endpoint}: OpenTelemetry is not installed; install it with "
            f"pip install '.[tracing]', or set no endpoint"
        )
