"""From fused features to predictions, each head with its loss."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ClassificationHead"]


class ClassificationHead(nn.Module):
    """Dropout and one linear layer; cross entropy.

    forward: (B, in_dim) -> logits (B, num_classes). loss: logits and class indices (B,) -> mean over the batch, with
    label smoothing s: the target is 1 - s on the class plus s / num_classes on each (Szegedy et al. 2016).
    class_weights: one weight per class, in the order of the indices.

    Raises:
        ValueError: a number of weights other than num_classes.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        in_dim: int,
        num_classes: int,
        dropout: float = 0.0,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if class_weights is not None and len(class_weights) != num_classes:
            raise ValueError(f"class_weights: expected {num_classes}, one per class, got {len(class_weights)}")
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(in_dim, num_classes)
        weights = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(self.dropout(features))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, weight=self.class_weights, label_smoothing=self.label_smoothing)
