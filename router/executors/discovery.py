"""Discovery of a group's executors: a list that the operator gave, or a DNS name asked each time.

    10.0.0.7:50061,10.0.0.8:50061               a list; each may be a name that resolves to one executor
    10.0.0.7:50061,10.0.0.8:50061?size=2&min=1  an elastic group of them
    dns:executor:50061?size=2                   what the name resolves to, one executor on each host
    dns:executor:50061-50068?size=16            eight executors on each host, at these ports
    dns:executor:50061?size=2&min=1             an elastic group, of as many as the name resolves to

On Kubernetes the name is that of a headless Service, which resolves to every pod behind it. It is
asked at each forming of the group, because a pod that starts again has a new address. ``size`` is
the executors of the group: a name that resolves to fewer, or to some of an older set besides, is
no group yet. With ``min`` the group is elastic: it serves with so many of them, and what there is beyond
``size`` are spares. Its executors must be elastic, too.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from protos.settings import ADDRESS
from router.errors import ExecutorLost, ResolverFailed
from router.executors.elastic import Strength

DNS = "dns:"
DNS_FORM = (
    "dns:NAME:PORT?size=N or dns:NAME:FIRST-LAST?size=N, with &min=M if it is elastic, such as "
    "dns:executor:50061?size=2"
)

# A resolver that hangs keeps its thread for half a minute, so these are not those in which texts become tokens.
_RESOLVERS = ThreadPoolExecutor(max_workers=32, thread_name_prefix="resolve")
NO_ANSWER = socket.EAI_AGAIN, socket.EAI_FAIL  # of whom the resolver asks

_COUNT = r"\d{1,6}"
_SIZES = rf"size=({_COUNT})&min=({_COUNT})"

FindAddresses = Callable[[], Awaitable[Sequence[str]]]
Resolve = Callable[[str], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class DnsGroup:
    """A group behind a DNS name.

    Attributes:
        name: Resolves to the hosts of all its executors and to nothing else.
        ports: Of the executors on each host.
        size: Executors of the group, on all hosts.
        least: With how many it serves; None: it is not elastic.
    """

    name: str
    ports: range
    size: int
    least: int | None = None

    @classmethod
    def parse(cls, text: str) -> "DnsGroup":
        """Reads what follows --group.

        Raises:
            ValueError: It has another form. The message says which fits.
        """
        match = re.fullmatch(
            rf"dns:([^\s:/?,]+):(\d{{1,5}})(?:-(\d{{1,5}}))?\?size=({_COUNT})(?:&min=({_COUNT}))?",
            text,
        )
        if match is None:
            raise ValueError(f"group: {text!r} is no group behind a DNS name: need {DNS_FORM}")
        first, last, size = int(match[2]), int(match[3] or match[2]), int(match[4])
        if not 1 <= first <= last <= 65535:
            raise ValueError(f"group: {text!r}: ports go up from 1 to 65535 at most")
        ports = range(first, last + 1)
        if match[5]:
            _check_strength(text, Strength(size, int(match[5])))
            return cls(match[1], ports, size, int(match[5]))
        if size < 1 or size % len(ports):
            raise ValueError(
                f"group: {text!r}: size={size} executors cannot be shared out evenly over hosts with "
                f"{len(ports)} each; size counts the executors of the group, not its hosts"
            )
        return cls(match[1], ports, size)

    @property
    def num_hosts(self) -> int:
        return self.size // len(self.ports)

    def addresses(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Returns the executors' addresses.

        Args:
            hosts: Hosts of the name, in any order.

        Raises:
            ExecutorLost: Too few or too many, and it is not elastic.
        """
        if self.least is None and len(hosts) != self.num_hosts:
            found = ", ".join(hosts) or "nothing"
            raise ExecutorLost(
                f"{self.name} resolves to {len(hosts)} of {self.num_hosts} hosts ({found}): "
                f"waiting for size={self.size} executors, {len(self.ports)} on each host"
            )
        bracketed = [f"[{host}]" if ":" in host else host for host in hosts]
        return tuple(f"{host}:{port}" for host in bracketed for port in self.ports)


async def resolve_hosts(name: str) -> tuple[str, ...]:
    """Returns the addresses of a name, sorted, by the system's resolver.

    A host with an IPv4 and an IPv6 address counts once: only the family that the resolver puts
    first is looked at.

    Raises:
        ResolverFailed: The resolver got no answer.
        ExecutorLost: The name is not known.
    """
    try:
        ask = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, ask)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that cannot be in a name
        is_open = isinstance(error, socket.gaierror) and error.errno in NO_ANSWER
        kind = ResolverFailed if is_open else ExecutorLost
        raise kind(f"{name} cannot be resolved: {error}") from error
    hosts = {str(address[0]) for family, *_, address in found if family == found[0][0]}
    return tuple(sorted(hosts))


class Lookup:
    """Asks where a group's executors are, once at a time.

    Args:
        find: Returns their addresses as they are then.
    """

    def __init__(self, find: FindAddresses) -> None:
        self._find = find
        self._asking: asyncio.Future[Sequence[str]] | None = None

    async def addresses(self, timeout_s: float | None) -> Sequence[str] | None:
        """Returns the addresses; None if that takes longer: who asks next gets what is found meanwhile.

        Raises:
            ExecutorLost: They cannot be found.
        """
        asking = self._asking = self._asking or asyncio.ensure_future(self._find())
        await asyncio.wait((asking,), timeout=timeout_s)
        if not asking.done():
            return None
        self._asking = None
        return asking.result()

    def forget(self) -> None:
        """Gives up what is being asked, and what was found since `addresses` returned."""
        asking, self._asking = self._asking, None
        if asking is not None and not asking.cancel() and not asking.cancelled():
            asking.exception()  # counts as seen


def _check_strength(group: str, strength: Strength) -> None:
    if not 1 <= strength.least <= strength.size:
        raise ValueError(
            f"group: {group!r}: min={strength.least} of size={strength.size} executors: need min from 1 to "
            f"size"
        )


def check_addresses(group: Sequence[str]) -> None:
    """Checks one --group: addresses, or only one DNS form.

    Raises:
        ValueError: Says what is wrong and what fits.
    """
    for address in group:
        if address.startswith(DNS):
            DnsGroup.parse(address)
            if len(group) > 1:
                raise ValueError(
                    f"group: {address!r} is a whole group, and stands with {len(group) - 1} more "
                    f"addresses: give it a --group of its own"
                )
            return
    for address in plain_addresses(group):
        if not ADDRESS.fits(address):
            raise ValueError(f"group: {address!r}: need {ADDRESS.need}")
    strength, text = strength_of(group), ",".join(group)
    if strength is not None:
        _check_strength(text, strength)
        if strength.size > len(group):
            raise ValueError(
                f"group: {text!r}: size={strength.size}, and there are {len(group)} addresses"
            )
    elif "?" in text:
        raise ValueError(f"group: {text!r}: need ?size=N&min=M behind the last address")


def strength_of(group: Sequence[str]) -> Strength | None:
    """Returns how many executors a checked group has; None if it is not elastic."""
    match = re.search(rf"\?{_SIZES}$", group[-1])
    return Strength(int(match[1]), int(match[2])) if match else None


def plain_addresses(group: Sequence[str]) -> list[str]:
    """Returns the addresses of one --group, or its DNS form, without its sizes."""
    return [*group[:-1], group[-1].partition("?")[0]]


def find_addresses(group: Sequence[str], resolve: Resolve = resolve_hosts) -> FindAddresses:
    """Returns a function that finds the addresses of a checked group's executors as they are then.

    Args:
        group: One --group.
        resolve: Returns the hosts of a name.
    """
    dns = DnsGroup.parse(group[0]) if group[0].startswith(DNS) else None

    async def find() -> Sequence[str]:
        return plain_addresses(group) if dns is None else dns.addresses(await resolve(dns.name))

    return find
