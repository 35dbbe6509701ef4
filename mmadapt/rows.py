"""A route per row: one batch whose rows belong to different modalities, in training too.

PEFT's own `adapter_names` refuses training mode and takes one adapter per row. Here each tuner layer splits its input
by route, runs each part under the adapters of its route, and puts the rows back in order. What is above and below the
layers runs once for the whole batch.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__: list[str] = []


class RowRoutes:
    """Which rows of a batch run under which adapters.

    rows: the modality of each row, B of them. routes: the adapters of each modality, in order.

    Raises:
        ValueError: no row, or a modality without a route.
    """

    def __init__(self, rows: Sequence[str], routes: Mapping[str, Sequence[str]]) -> None:
        self.size = len(rows)
        if isinstance(rows, str) or not rows:
            raise ValueError(f"rows: expected the modality of each row of the batch, got {rows!r}")
        unknown = sorted({row for row in rows if row not in routes}, key=str)
        if unknown:
            raise ValueError(f"rows: expected modalities of {sorted(routes)}, got {unknown}")
        modalities = list(dict.fromkeys(rows))
        self.routes = [list(routes[modality]) for modality in modalities]
        self.indices = [torch.tensor([i for i, row in enumerate(rows) if row == m]) for m in modalities]
        self.inverse = torch.cat(self.indices).argsort()  # parts in a row -> rows of the batch

    def to(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        if self.inverse.device != device:
            self.indices = [index.to(device) for index in self.indices]
            self.inverse = self.inverse.to(device)
        return self.indices, self.inverse


class RoutedForward:
    """Stands in for `forward` of one tuner layer: runs each route's rows by themselves."""

    def __init__(self, layer: nn.Module, routes: RowRoutes) -> None:
        self.layer = layer
        self.routes = routes

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[0] != self.routes.size:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"active(rows=...): expected inputs of {type(self.layer).__name__} with the {self.routes.size} rows of "
                f"the batch in front, got {got}. Do: use one route for the whole batch with a model that folds rows."
            )
        indices, inverse = self.routes.to(x.device)
        attributes = vars(self.layer)
        before = attributes.get("_active_adapter", [])
        parts = []
        try:
            for route, index in zip(self.routes.routes, indices, strict=True):
                attributes["_active_adapter"] = route
                part_args, part_kwargs = pytree.tree_map_only(Tensor, partial(self._rows, index), (args, kwargs))
                parts.append(type(self.layer).forward(self.layer, x[index], *part_args, **part_kwargs))
        finally:
            attributes["_active_adapter"] = before
        return torch.cat(parts)[inverse]

    def _rows(self, index: Tensor, tensor: Tensor) -> Tensor:
        return tensor[index] if tensor.dim() and tensor.shape[0] == self.routes.size else tensor


def refuse_rows(layers: Sequence[nn.Module]) -> None:
    """Refuse tuner layers whose rows cannot run apart.

    Raises:
        ValueError: a layer with the batch not in front, or with `forward` replaced by something else.
    """
    for layer in layers:
        base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
        if isinstance(base, nn.MultiheadAttention):
            raise ValueError(
                "active(rows=...): expected layers with the rows of the batch in front, got an adapter on "
                "nn.MultiheadAttention, which PEFT merges for the time of a forward. Do: adapt linear layers."
            )
        if "forward" in vars(layer):
            raise ValueError(
                f"active(rows=...): expected tuner layers with their own forward, got a {type(layer).__name__} that "
                "has another one (another active(rows=...), or a patch). Do: leave it first."
            )
