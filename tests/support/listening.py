"""Listening sockets of this machine's processes, as Linux tells them in /proc."""

import ipaddress
import os
import struct
from pathlib import Path

_LISTEN = "0A"


def listening_sockets() -> dict[str, tuple[str, int]]:
    """Returns the address and the port of every listening socket, by its inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, port = fields[1].split(":")
                found[fields[9]] = (_address(host), int(port, 16))
    return found


def listening_at(pid: int) -> set[tuple[str, int]]:
    """Returns the address and the port of every socket that a process listens on."""
    sockets, found = listening_sockets(), set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # it was closed just now
            continue
        if target.startswith("socket:[") and target[8:-1] in sockets:
            found.add(sockets[target[8:-1]])
    return found


def _address(text: str) -> str:
    """Reads an address as the kernel shows it: its 32-bit words as this machine's numbers."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
