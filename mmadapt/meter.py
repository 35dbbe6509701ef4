"""How much memory a piece of code holds, on any device, by the storages that are alive."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MemoryMeter"]


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of the storages that operators make while it is entered, until each is freed.

    `live` is what they hold now, `peak` the most that they held at once, both in bytes; tensors that were there before
    do not count. A storage that autograd keeps is alive for as long as its graph, so `live` between forward and
    backward is what the graph holds, and `peak` after backward includes recomputations. Every operator costs
    microseconds more: measure times without it.

    known: tensors whose storages do not count, such as parameters that operators only see through views.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)  # dies with the storage, not with this Python object
        self.live += size
        self.peak = max(self.peak, self.live)
