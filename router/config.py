"""What an operator can set, checked once at start and never changed after."""

from dataclasses import dataclass
from pathlib import Path

from router.discovery import check_address, check_group


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Every setting of a router; python -m router has a flag for each.

    Attributes:
        groups: The addresses ("host:port") of each group's executors, in any order, or one DNS
            form that resolves to them (router/discovery.py).
        listen: Where to serve, "host:port"; port 0 takes a free one.
        model_name: What clients may call the model.
        tokenizer: The model's tokenizer.json, or a directory that has one; None: clients send
            token ids only.
        max_waiting_sequences: Sequences that may wait in each group; more are refused.
        max_waiting_tokens: Prompt tokens that may wait in each group; more are refused.
        max_calls: Generate calls and GenerateMany streams open at once; more are refused.
        pipeline_depth: Steps in flight at most. 2 hides the way to the executors; 1 helps when
            something is to be debugged.
        min_chunk_tokens: A prompt runs at least this far in a step, however unequal the ranks.
        form_timeout_s: For each call that forms a group.
        step_timeout_s: For the answer to a step; past it, the executor counts as lost.
        retry_delay_s: Between attempts to form a group.
        shutdown_delay_s: From SIGTERM, how long new requests are still taken, since load
            balancers are slow to notice.
        shutdown_grace_s: How long running requests may then go on.
    """

    groups: tuple[tuple[str, ...], ...]
    listen: str = "127.0.0.1:50051"
    model_name: str = "default"
    tokenizer: Path | None = None
    max_waiting_sequences: int = 4096
    max_waiting_tokens: int = 4_000_000
    max_calls: int = 8192
    pipeline_depth: int = 2
    min_chunk_tokens: int = 512
    form_timeout_s: float = 120.0
    step_timeout_s: float = 60.0
    retry_delay_s: float = 0.5
    shutdown_delay_s: float = 0.0
    shutdown_grace_s: float = 30.0

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
        for name in (
            "max_waiting_sequences",
            "max_waiting_tokens",
            "max_calls",
            "pipeline_depth",
            "min_chunk_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: need at least 1")
        for name in ("form_timeout_s", "step_timeout_s", "retry_delay_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: need more than 0 seconds")
        for name in ("shutdown_delay_s", "shutdown_grace_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: need 0 seconds or more")
        if self.tokenizer_file is not None and not self.tokenizer_file.is_file():
            raise ValueError(
                f"tokenizer={self.tokenizer}: there is no file {self.tokenizer_file}; give the "
                f"model's tokenizer.json or its directory, or nothing to serve token ids only"
            )

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json itself."""
        if self.tokenizer is not None and self.tokenizer.is_dir():
            return self.tokenizer / "tokenizer.json"
        return self.tokenizer
