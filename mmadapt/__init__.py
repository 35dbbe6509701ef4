"""mmadapt: train one frozen transformer on several modalities at once, with right gradients in little memory.

The public names are imported when they are first used, so that importing mmadapt stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmadapt.adapters import AdapterBank as AdapterBank
    from mmadapt.backbone import Backbone as Backbone
    from mmadapt.backbone import ViViT as ViViT
    from mmadapt.blocks import checkpoint_blocks as checkpoint_blocks
    from mmadapt.blocks import remove_checkpointing as remove_checkpointing
    from mmadapt.checkpointing import checkpoint as checkpoint
    from mmadapt.data import Batch as Batch
    from mmadapt.data import MultimodalDataModule as MultimodalDataModule
    from mmadapt.errors import RecomputationError as RecomputationError
    from mmadapt.model import MultimodalModel as MultimodalModel
    from mmadapt.module import MultiAdapterModule as MultiAdapterModule
    from mmadapt.plans import CheckpointPlan as CheckpointPlan
    from mmadapt.plans import run_blocks as run_blocks
    from mmadapt.state import AdapterState as AdapterState
    from mmadapt.state import register_state as register_state

__version__ = "0.1.0"

_HOMES = {
    "AdapterBank": "adapters",
    "AdapterState": "state",
    "Backbone": "backbone",
    "Batch": "data",
    "CheckpointPlan": "plans",
    "MultiAdapterModule": "module",
    "MultimodalDataModule": "data",
    "MultimodalModel": "model",
    "RecomputationError": "errors",
    "register_state": "state",
    "remove_checkpointing": "blocks",
    "ViViT": "backbone",
    "checkpoint": "checkpointing",
    "checkpoint_blocks": "blocks",
    "run_blocks": "plans",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmadapt' has no attribute {name!r}; valid: {__all__}")
    return getattr(import_module(f"mmadapt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
