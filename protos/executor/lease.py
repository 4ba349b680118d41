"""Lease of an executor: until when the router that drives it keeps others from taking it.

It is against routers that take a group from each other in turns. Steps are safe without it: they need an
answer of every member, and a member is in one epoch.
"""

LEASE_MS = 600  # without a word of the driver


def is_held(silent_ms: int, *, has_stream: bool) -> bool:
    """Whether a driver keeps other routers out. See the message Driver."""
    return has_stream and silent_ms < LEASE_MS
