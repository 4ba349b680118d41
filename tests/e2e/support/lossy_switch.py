"""Switch that delays frames and loses some: ``... lossy_switch DELAY_S LOSS DEVICE DEVICE ...``.

Stands in for the kernel's bridge where that, as on kernels without netem, can do neither. Sends what
comes in at a device out at all others.
"""

import asyncio
import random
import socket
import sys
from contextlib import suppress

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 263, 15, 4
MAX_FRAME_BYTES = 1 << 17  # with segmentation offload, a frame is as long as what TCP sends at once


class LossySwitch:
    """Ports of a switch.

    Args:
        devices: Names of its network devices.
        delay_s: Of each frame.
        loss: Share of frames that are lost.
    """

    def __init__(self, devices: list[str], delay_s: float, loss: float) -> None:
        self._ports = [self._open(device) for device in devices]
        self._delay_s = delay_s
        self._loss = loss
        self._rng = random.Random(1)

    def run(self) -> None:
        """Switches frames until the loop ends."""
        loop = asyncio.get_running_loop()
        for port in self._ports:
            loop.add_reader(port, self._receive, port)

    @staticmethod
    def _open(device: str) -> socket.socket:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        # Each frame comes, and goes, with a header that says what of it a device is yet to do.
        port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        port.bind((device, 0))
        port.setblocking(False)
        return port

    def _receive(self, port: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                frame, (_, _, kind, *_) = port.recvfrom(MAX_FRAME_BYTES)
                if kind != PACKET_OUTGOING and self._rng.random() >= self._loss:
                    loop = asyncio.get_running_loop()
                    loop.call_later(self._delay_s, self._send, port, frame)

    def _send(self, source: socket.socket, frame: bytes) -> None:
        for port in self._ports:
            if port is not source:
                with suppress(OSError):  # no room, or its host is cut off: lost, as in any switch
                    port.send(frame)


async def main() -> None:
    delay_s, loss, *devices = sys.argv[1:]
    LossySwitch(devices, float(delay_s), float(loss)).run()
    print("switching", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
