"""Limits of a service's ports: the most that callers may take of them.

README.md has all of them in one table. A port that faces more than one tenant belongs behind a
proxy: gRPC reads frames and headers before it asks any of these.
"""

from dataclasses import dataclass

from protos.settings import above, at_least, setting

MAX_OPTION = (1 << 31) - 2  # gRPC counts in 32 bits, and aborts at the last number


@dataclass(frozen=True, kw_only=True)
class PortLimits:
    """Settings of both services: limits of each of their ports."""

    max_connections: int = setting(512, at_least(1))
    """Connections open at once on each gRPC port; more are closed."""
    max_connection_idle_s: float = setting(60.0, above(0))
    """Seconds that a connection may be open without a call; it is then closed, and a client opens
    another with its next call."""
    max_connection_streams: int = setting(100, at_least(1))
    """Calls open at once on one connection; more wait at the client, which may open another
    connection. Each may cost a megabyte before it is refused."""
    max_calls: int = setting(4096, at_least(1))
    """Calls open at once on each gRPC port, whatever they call; more are refused. Generate and
    Complete may have all of them, any other method an eighth."""
    max_message_bytes: int | None = setting(
        None, at_least(1024), unset="router: 1 MiB; executor: what its largest step may take"
    )
    """Bytes of one message; a call with a longer one is ended."""
    max_metadata_bytes: int = setting(8192, at_least(1024))
    """Bytes of a call's metadata, with 32 for each entry; a call with more is ended."""
    first_message_timeout_s: float = setting(10.0, above(0))
    """Seconds for a call's first message to come, and for a connection's handshake."""
    max_scrapes: int = setting(16, at_least(1))
    """Connections open at once on the port for metrics; a new one then ends the oldest."""

    @property
    def default_message_bytes(self) -> int:
        """Bytes of the longest message where `max_message_bytes` is not set.

        These are 260,000 token ids, or as many words. To read 16 MiB would take 0.1 s, in which
        nothing else is done.
        """
        return 1 << 20

    def server_options(self, message_bytes: int | None = None) -> list[tuple[str, int]]:
        """Returns gRPC's options of a port.

        Args:
            message_bytes: The longest message; None: as the settings say.
        """
        if message_bytes is None:
            message_bytes = self.max_message_bytes or self.default_message_bytes
        timeout_ms = max(1, round(1000 * self.first_message_timeout_s))
        options = [
            # A second process at one address shall fail, rather than take half the connections.
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_connection_idle_ms", max(1, round(1000 * self.max_connection_idle_s))),
            ("grpc.max_concurrent_streams", self.max_connection_streams),
            # Calls that no handler runs yet. From the first number to the second gRPC would end some
            # at random, with CANCELLED and no reason; its own numbers, 1,000 and 3,000, are less
            # than a dozen busy connections may bring at once.
            ("grpc.server.max_pending_requests", self.max_calls),
            ("grpc.server.max_pending_requests_hard_limit", self.max_calls),
            ("grpc.max_receive_message_length", message_bytes),
            # The second is the bound beyond which none comes through; between them it is chance.
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.server_handshake_timeout_ms", timeout_ms),
            ("grpc.http2.settings_timeout", timeout_ms),
            # Callers may ask ten times a second whether the port is there; gRPC's 5 minutes would shut
            # them out. The key has no "recv" in it: with that, gRPC ignores it.
            ("grpc.http2.min_ping_interval_without_data_ms", 100),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        return [(name, min(value, MAX_OPTION)) for name, value in options]
