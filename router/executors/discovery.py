"""Discovery of a group's executors: a list that the operator gave, or a DNS name asked each time.

    10.0.0.7:50061,10.0.0.8:50061       a list; each may be a name that resolves to one executor
    dns:executor:50061?size=2           what the name resolves to, one executor on each host
    dns:executor:50061-50068?size=16    eight executors on each host, at these ports

On Kubernetes the name is that of a headless Service, which resolves to every pod behind it. It is
asked at each forming of the group, because a pod that starts again has a new address. ``size`` is
the executors of the group: a name that resolves to fewer, or to some of an older set besides, is
no group yet.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from protos.settings import ADDRESS
from router.errors import ExecutorLost

DNS = "dns:"
DNS_FORM = "dns:NAME:PORT?size=N or dns:NAME:FIRST-LAST?size=N, such as dns:executor:50061?size=2"

FindAddresses = Callable[[], Awaitable[Sequence[str]]]
Resolve = Callable[[str], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class DnsGroup:
    """A group behind a DNS name.

    Attributes:
        name: Resolves to the hosts of all its executors and to nothing else.
        ports: Of the executors on each host.
        size: Executors of the group, on all hosts.
    """

    name: str
    ports: range
    size: int

    @classmethod
    def parse(cls, text: str) -> "DnsGroup":
        """Reads what follows --group.

        Raises:
            ValueError: It has another form. The message says which fits.
        """
        match = re.fullmatch(r"dns:([^\s:/?,]+):(\d{1,5})(?:-(\d{1,5}))?\?size=(\d{1,6})", text)
        if match is None:
            raise ValueError(f"group: {text!r} is no group behind a DNS name: need {DNS_FORM}")
        first, last, size = int(match[2]), int(match[3] or match[2]), int(match[4])
        if not 1 <= first <= last <= 65535:
            raise ValueError(f"group: {text!r}: ports go up from 1 to 65535 at most")
        ports = range(first, last + 1)
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
            ExecutorLost: Too few or too many.
        """
        if len(hosts) != self.num_hosts:
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
        ExecutorLost: The name is not known, or the resolver failed.
    """
    try:
        found = await asyncio.to_thread(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that cannot be in a name
        raise ExecutorLost(f"{name} cannot be resolved: {error}") from error
    hosts = {str(address[0]) for family, *_, address in found if family == found[0][0]}
    return tuple(sorted(hosts))


def check_addresses(addresses: Sequence[str]) -> None:
    """Checks one --group: addresses, or only one DNS form.

    Raises:
        ValueError: Says what is wrong and what fits.
    """
    for address in addresses:
        if not address.startswith(DNS):
            if not ADDRESS.fits(address):
                raise ValueError(f"group: {address!r}: need {ADDRESS.need}")
            continue
        DnsGroup.parse(address)
        if len(addresses) > 1:
            raise ValueError(
                f"group: {address!r} is a whole group, and stands with {len(addresses) - 1} more "
                f"addresses: give it a --group of its own"
            )


def find_addresses(addresses: Sequence[str], resolve: Resolve = resolve_hosts) -> FindAddresses:
    """Returns a function that finds the addresses of a checked group's executors as they are then.

    Args:
        addresses: One --group.
        resolve: Returns the hosts of a name.
    """
    group = DnsGroup.parse(addresses[0]) if addresses[0].startswith(DNS) else None

    async def find() -> Sequence[str]:
        return addresses if group is None else group.addresses(await resolve(group.name))

    return find
