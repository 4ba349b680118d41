"""What an operator can set, checked once at start and never changed after."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from protos.telemetry.metrics import split_address
from protos.transport.port import PortSecurity
from router.executors.credentials import ExecutorSecurity
from router.executors.discovery import check_address, check_group
from router.scheduling.speculation import DraftSettings

ON_OFF = ("on", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(PortSecurity):
    """Every setting of a router; python -m router has a flag for each.

    Attributes, besides those of PortSecurity for `listen`:
        groups: The addresses ("host:port") of each group's executors, in any order, or one DNS
            form that resolves to them (router/executors/discovery.py).
        listen: Where to serve, "host:port"; port 0 takes a free one.
        model_name: What clients may call the model.
        tokenizer: The model's tokenizer.json, or a directory that has one; None: clients send
            token ids only.
        vllm_engine: "on" serves vllm.grpc.engine.VllmEngine too, for gateways such as smg
            (router/api/vllm_engine.py); needs the package smg-grpc-proto.
        max_waiting_sequences: Sequences that may wait in each group; more are refused.
        max_waiting_tokens: Prompt tokens that may wait in each group; more are refused.
        priority_step_s: Seconds of waiting that one level of priority is worth, so that nobody
            waits for ever; 0 is the order of arrival alone (router/requests/waiting_queue.py).
        max_calls: Generate calls and GenerateMany streams open at once; more are refused.
        max_connection_streams: Of these, at most so many on one connection; more wait at the
            client. Above max_calls, so that they are refused with a reason instead, and probes
            on the same connection never wait.
        max_connection_age_s: A connection this old, give or take a tenth, is replaced by its
            client, which may find a better place then; its calls end as usual. 0 is never.
        pipeline_depth: Steps in flight at most. 2 hides the way to the executors; 1 helps when
            something is to be debugged.
        min_chunk_tokens: A prompt runs at least this far in a step, however unequal the ranks.
        speculation: "off" plans no speculative steps, whatever the executors could draft.
        min_tokens_per_draft_step: Tokens that a sequence must gain in a speculative step, on
            average, for it to pay; below, a group decodes plainly for some hundred steps before it
            tries again (router/scheduling/speculation.py). 1 never gives up.
        prompt_steps_between_drafts: While prompts wait, steps that run some of them between two
            that are speculative and run none (router/scheduling/speculation.py). More of them: prompts begin
            their answers sooner, and answers come slower. A great number: prompts always go first.
        form_timeout_s: For each call that forms a group.
        step_timeout_s: For the answer to a step, at most; past it, the executor counts as lost.
        step_deadline_factor: The same past so many times what steps of its kind take, once a few
            of them were seen.
        min_step_deadline_s: But not before this.
        failover_after_s: A group that is down for longer gives the requests that it ran to
            another group; those that had not begun go there at once.
        retry_delay_s: Between attempts to form a group.
        shutdown_delay_s: From SIGTERM, how long new requests are still taken, since load
            balancers are slow to notice.
        shutdown_grace_s: How long running requests may then go on; a second SIGTERM ends both.
        metrics_listen: Where Prometheus may scrape metrics, "host:port"; None: nowhere.
        otlp_endpoint: Where traces go, "http://host:4317" of an OpenTelemetry collector, or https;
            None: there are none.
        executor_ca: This and the rest: how to talk to executors, see ExecutorSecurity.
    """

    groups: tuple[tuple[str, ...], ...]
    listen: str = "127.0.0.1:50051"
    model_name: str = "default"
    tokenizer: Path | None = None
    vllm_engine: str = "off"
    max_waiting_sequences: int = 4096
    max_waiting_tokens: int = 4_000_000
    priority_step_s: float = 10.0
    max_calls: int = 8192
    max_connection_streams: int = 16384
    max_connection_age_s: float = 1800.0
    pipeline_depth: int = 2
    min_chunk_tokens: int = 512
    speculation: str = "on"
    min_tokens_per_draft_step: float = 1.5
    prompt_steps_between_drafts: int = 2
    form_timeout_s: float = 120.0
    step_timeout_s: float = 60.0
    step_deadline_factor: float = 20.0
    min_step_deadline_s: float = 5.0
    failover_after_s: float = 10.0
    retry_delay_s: float = 0.5
    shutdown_delay_s: float = 0.0
    shutdown_grace_s: float = 30.0
    metrics_listen: str | None = None
    otlp_endpoint: str | None = None
    executor_ca: Path | None = None
    executor_cert: Path | None = None
    executor_key: Path | None = None
    executor_name: str | None = None
    executor_token: Path | None = None
    executor_plaintext: str = "off"

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups: none was given; give the addresses of at least one group")
        for group in self.groups:
            check_group(group)
        check_address("listen", self.listen)
        addresses = [address for group in self.groups for address in group]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(f"group: {address} is given twice; an executor has one place")
        if self.vllm_engine not in ON_OFF:
            raise ValueError(f"vllm_engine={self.vllm_engine}: need one of {', '.join(ON_OFF)}")
        if self.vllm_engine == "on" and find_spec("smg_grpc_proto") is None:
            raise ValueError(
                "vllm_engine=on: the package smg-grpc-proto is not installed; install it with "
                "pip install smg-grpc-proto, or leave the service off"
            )
        for name in (
            "max_waiting_sequences",
            "max_waiting_tokens",
            "max_calls",
            "max_connection_streams",
            "pipeline_depth",
            "min_chunk_tokens",
            "prompt_steps_between_drafts",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: need at least 1")
        if self.speculation not in ON_OFF:
            raise ValueError(f"speculation={self.speculation}: need one of {', '.join(ON_OFF)}")
        if not 1 <= self.min_tokens_per_draft_step < float("inf"):
            raise ValueError(
                f"min_tokens_per_draft_step={self.min_tokens_per_draft_step}: need at least 1, the "
                f"token that each sequence gains in any step"
            )
        for name in ("form_timeout_s", "step_timeout_s", "min_step_deadline_s", "retry_delay_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: need more than 0 seconds")
        if not self.step_deadline_factor > 1:
            raise ValueError(
                f"step_deadline_factor={self.step_deadline_factor}: need more than 1, or steps that "
                f"take as long as usual would be overdue"
            )
        for name in (
            "failover_after_s",
            "shutdown_delay_s",
            "shutdown_grace_s",
            "max_connection_age_s",
            "priority_step_s",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: need 0 seconds or more")
        if self.health_listen is not None:
            check_address("health_listen", self.health_listen)
        if self.metrics_listen is not None:
            split_address(self.metrics_listen)  # raises what is wrong with it
        self.check_security(self.listen, metrics_listen=self.metrics_listen)
        self.executor_security.check(addresses)
        if self.otlp_endpoint is not None:
            self._check_otlp_endpoint(self.otlp_endpoint)
        if self.tokenizer_file is not None and not self.tokenizer_file.is_file():
            raise ValueError(
                f"tokenizer={self.tokenizer}: there is no file {self.tokenizer_file}; give the "
                f"model's tokenizer.json or its directory, or nothing to serve token ids only"
            )

    def _check_otlp_endpoint(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.username or parts.password:
            raise ValueError(
                "otlp_endpoint: it has a user or a password, and settings are logged; give them in "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"otlp_endpoint={endpoint}: need http://host:4317 of an OpenTelemetry collector that "
                f"takes OTLP over gRPC, or https"
            )
        if find_spec("opentelemetry") is None:
            raise ValueError(
                f"otlp_endpoint={endpoint}: OpenTelemetry is not installed; install it with "
                f"pip install 'lockstep[tracing]', or set no endpoint"
            )

    @property
    def drafts(self) -> DraftSettings:
        """The settings for speculative steps."""
        return DraftSettings(
            is_on=self.speculation == "on",
            min_tokens_per_step=self.min_tokens_per_draft_step,
            prompt_steps_between=self.prompt_steps_between_drafts,
        )

    @property
    def executor_security(self) -> ExecutorSecurity:
        """The settings for the way to executors."""
        return ExecutorSecurity(
            ca=self.executor_ca,
            cert=self.executor_cert,
            key=self.executor_key,
            name=self.executor_name,
            token=self.executor_token,
            plaintext=self.executor_plaintext,
        )

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json itself."""
        if self.tokenizer is not None and self.tokenizer.is_dir():
            return self.tokenizer / "tokenizer.json"
        return self.tokenizer
