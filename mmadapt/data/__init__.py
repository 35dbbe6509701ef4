"""Data: what a batch is, the data module that users subclass, and the built-in recordings."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmadapt.data.augment import Augment
    from mmadapt.data.batch import Batch
    from mmadapt.data.module import MultimodalDataModule
    from mmadapt.data.sampler import EpochSampler
    from mmadapt.data.watch import WatchDataModule

__all__ = ["Augment", "Batch", "EpochSampler", "MultimodalDataModule", "WatchDataModule"]

# Resolved on first use: the data modules import Lightning, which costs seconds.
_HOME = {
    "Augment": "augment",
    "Batch": "batch",
    "EpochSampler": "sampler",
    "MultimodalDataModule": "module",
    "WatchDataModule": "watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; valid: {sorted(_HOME)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
