"""Hosts on one machine: network namespaces with an address each, on one switch.

    router 10.77.0.1 ──┐
                       ├── bridge      nothing of it is seen from outside
    0      10.77.0.2 ──┤
    1      10.77.0.3 ──┘

The bridge may delay frames and lose some (lossy_switch.py). Needs Linux, the `ip` command and the right to make namespaces (CAP_NET_ADMIN and CAP_SYS_ADMIN).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NETWORK = "10.77.0"


class Hosts:
    """The namespaces and what connects them. Made by `hosts`.

    Args:
        prefix: Of the namespaces' names.
        names: Of the hosts.
        delay_s: Of each frame between two of them.
        loss: Share of the frames that is lost.
    """

    def __init__(
        self, prefix: str, names: Sequence[str], delay_s: float = 0.0, loss: float = 0.0
    ) -> None:
        self.prefix = prefix
        self._names = names
        self._delay_s = delay_s
        self._loss = loss
        self._lossy_switch: subprocess.Popen[str] | None = None

    def address(self, name: str) -> str:
        return f"{NETWORK}.{1 + self._names.index(name)}"

    def command(self, name: str) -> list[str]:
        """Returns what comes before a command to run it on a host."""
        return ["ip", "netns", "exec", f"{self.prefix}{name}"]

    def set_link(self, name: str, state: str) -> None:
        """Cuts a host's cable at the switch, "down", or plugs it in again, "up"."""
        _ip("-n", self._switch, "link", "set", f"to-{name}", state)

    @property
    def _switch(self) -> str:
        return f"{self.prefix}switch"

    def make(self) -> None:
        is_lossy = self._delay_s > 0 or self._loss > 0
        _ip("netns", "add", self._switch)
        if not is_lossy:
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
        for name in self._names:
            host, port = f"{self.prefix}{name}", f"to-{name}"
            _ip("netns", "add", host)
            _ip(
                *("-n", self._switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", host),
            )
            if not is_lossy:
                _ip("-n", self._switch, "link", "set", port, "master", "bridge")
            _ip("-n", self._switch, "link", "set", port, "up")
            _ip("-n", host, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")
        if is_lossy:
            self._start_lossy_switch()

    def _start_lossy_switch(self) -> None:
        ports = [f"to-{name}" for name in self._names]
        program = [sys.executable, "-m", "tests.e2e.support.lossy_switch"]
        command = ["ip", "netns", "exec", self._switch, *program]
        self._lossy_switch = subprocess.Popen(
            [*command, str(self._delay_s), str(self._loss), *ports],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._lossy_switch.stdout is not None
        if not self._lossy_switch.stdout.readline():
            raise OSError("the lossy switch did not start; its error is above")

    def remove(self) -> None:
        if self._lossy_switch is not None:
            self._lossy_switch.kill()
            self._lossy_switch.communicate()
        for name in (*self._names, "switch"):
            subprocess.run(
                ["ip", "netns", "del", f"{self.prefix}{name}"], capture_output=True, check=False
            )


@contextmanager
def hosts(names: Sequence[str], delay_s: float = 0.0, loss: float = 0.0) -> Iterator[Hosts]:
    """Makes hosts, and removes them after the block. The arguments are those of Hosts.

    Raises:
        OSError: They cannot be made here; says why.
    """
    made = Hosts(f"lockstep-{os.getpid()}-", names, delay_s, loss)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def why_not() -> str | None:
    """Returns why no hosts can be made here; None if they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and the ip command (iproute2)"
    try:
        with hosts(["probe"]):
            return None
    except OSError as error:
        return str(error)


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")
