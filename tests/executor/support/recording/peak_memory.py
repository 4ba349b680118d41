"""Memory that PyTorch's operators take."""

from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Adds up the storages that operators make within it and that are still alive.

    Attributes:
        bytes: The most at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._storages: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in given:
                self._storages.add(leaf.untyped_storage())
        self.bytes = max(self.bytes, self.alive)
        return out

    @property
    def alive(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)
