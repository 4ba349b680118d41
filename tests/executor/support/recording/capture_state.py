"""Input buffers as a runner's capture finds them."""

from typing import Any

import pytest
import torch

from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry, PaddingPolicy
from tests.executor.support.runner_cases import captured


def check_reset_before_capture(
    runner: Any, registries: list[CudaGraphBufferRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asserts that a runner captures with no row left that another runner has written.

    Before the first fill of each registry, what is followed as an index must be zero and sentinels
    must be in place: a warm-up run reads buffers that runners share.
    """
    for registry in registries:
        for name in registry.slot_names():
            registry.get_slot(name).allocated().fill_(1 << 6)
    found: dict[int, bool] = {}
    fill_from = CudaGraphBufferRegistry.fill_from

    def noting(registry: CudaGraphBufferRegistry, *args: Any, **sizes: Any) -> None:
        found.setdefault(id(registry), _is_reset(registry))
        fill_from(registry, *args, **sizes)

    monkeypatch.setattr(CudaGraphBufferRegistry, "fill_from", noting)
    captured(runner)
    assert found == dict.fromkeys(map(id, registries), True)


def _is_reset(registry: CudaGraphBufferRegistry) -> bool:
    slots = [registry.get_slot(name) for name in registry.slot_names()]
    expected = [
        (slot.allocated(), 0 if slot.padding_policy is PaddingPolicy.ZERO else slot.pad_value)
        for slot in slots
        if slot.padding_policy in (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL)
    ]
    assert expected
    return all(torch.equal(x, torch.full_like(x, value or 0)) for x, value in expected)
