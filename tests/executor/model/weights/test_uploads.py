"""A buffer that is filled while it is still copied from, or rows that miss one, are wrong weights."""

from typing import Any

import pytest
import torch

from executor.model.weights import uploads
from executor.model.weights.uploads import NUM_BUFFERS, Uploads


class FakeDevice:
    """Copies from a buffer when its event is waited for; ``record`` is called behind each copy."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pending: list[Any] = []
        self.num_pinned = 0
        patch.setattr(uploads, "BUFFER_BYTES", 64)
        patch.setattr(torch.cuda, "Event", lambda blocking: Event(self))
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.Tensor, "pin_memory", lambda x: self._pin(x))
        copy = torch.Tensor.copy_

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
            if non_blocking:
                self.pending.append(lambda: copy(target, source))
                return target
            return copy(target, source)

        patch.setattr(torch.Tensor, "copy_", copy_)

    def _pin(self, x: torch.Tensor) -> torch.Tensor:
        self.num_pinned += 1
        return x


class Event:
    """The point behind the copy that was begun last."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._copies: list[Any] = []

    def record(self, stream: None) -> None:
        self._copies.append(self._device.pending.pop())

    def synchronize(self) -> None:
        while self._copies:
            self._copies.pop()()


@pytest.mark.parametrize(
    ("target", "values"),
    [
        (torch.zeros(300), torch.rand(300)),
        (torch.zeros(40, 6, dtype=torch.bfloat16), torch.rand(40, 6)),
        (torch.zeros(40, 6).T, torch.rand(40, 6).T),
        (torch.zeros(9, 8)[:7, 2:6], torch.rand(4, 7).T),
        (torch.zeros(3, 5, 20), torch.rand(5, 1).expand(3, 5, 20)),  # no row fits a buffer
    ],
)
def test_what_is_sent_arrives_in_pieces_of_few_buffers(
    target: torch.Tensor, values: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    sent = Uploads()
    sent.send(target, values)
    sent.wait()
    torch.testing.assert_close(target, values.to(target.dtype), rtol=0, atol=0)
    assert 1 < device.num_pinned <= NUM_BUFFERS
