"""The one thing that travels from a data module to a model."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """Synchronised samples of several modalities, their targets and their names.

    Shapes, for B samples and V views:
        inputs: modality -> (V * B, C, T, H, W), or whatever that modality's tokenizer takes. A modality that is
            missing from the batch has no key.
        targets: (B,) int64.
        ids: B strings, each unique in the data set, e.g. `"rec012:w03"`. (Under random crops the id names the place
            that the crop was drawn for, so that it stays the same in every epoch.)
        views: V, the number of deterministic variants of each sample, 1 in training. Rows of `inputs` are view-major:
            row `v * B + b` is view v of sample b, and view 0 is the sample itself. Targets and ids stand once per
            sample; `average_views` turns the logits of all rows into one prediction per sample.

    `len(batch)` is B.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    ids: list[str]
    views: int = 1

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: Any, **kwargs: Any) -> "Batch":
        """The same batch with its tensors moved as `Tensor.to` moves them."""
        inputs = {name: x.to(device, **kwargs) for name, x in self.inputs.items()}
        return replace(self, inputs=inputs, targets=self.targets.to(device, **kwargs))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; a DataLoader calls this where it pins."""
        inputs = {name: x.pin_memory() for name, x in self.inputs.items()}
        return replace(self, inputs=inputs, targets=self.targets.pin_memory())

    def check(self, modalities: Iterable[str]) -> None:
        """Refuse a batch that would train silently wrong.

        Raises:
            ValueError: no modality; one that is not in `modalities`; unequal batch sizes; NaN or Inf.
        """
        valid = tuple(modalities)
        if not self.inputs:
            raise ValueError(
                f"expected a batch with at least one modality, got none; valid: {list(valid)};"
                " drop this batch, or keep at least one modality of each sample"
            )
        if unknown := [name for name in self.inputs if name not in valid]:
            raise ValueError(
                f"expected modalities that the model has, got {unknown}; valid: {list(valid)};"
                " rename the keys of Batch.inputs, or give the model a tokenizer for them"
            )
        if len(self.ids) != len(self.targets):
            raise ValueError(
                f"expected one id per target, got {len(self.ids)} ids and {len(self.targets)} targets;"
                " give targets and ids once per sample, also where there are several views"
            )
        rows = {name: len(x) for name, x in self.inputs.items()}
        if set(rows.values()) != {self.views * len(self)}:
            raise ValueError(
                f"expected {self.views} view(s) x {len(self)} samples = {self.views * len(self)} rows in each"
                f" modality, got {rows}; modalities of one batch must be aligned row by row"
            )
        for name, x in self.inputs.items():
            if x.is_floating_point() and not torch.isfinite(x).all():
                bad = (~torch.isfinite(x.reshape(len(x), -1)).all(dim=1)).nonzero().flatten().tolist()
                ids = list(dict.fromkeys(self.ids[row % len(self)] for row in bad))
                raise ValueError(
                    f"expected finite values, got NaN or Inf in modality {name!r} of {len(ids)} sample(s):"
                    f" {ids[:8]}{' ...' if len(ids) > 8 else ''}; repair or drop these samples"
                )


def average_views(logits: Tensor, views: int) -> Tensor:
    """Average the class probabilities of each sample's views.

    Shapes: logits (V * B, K), view-major as in `Batch` -> (B, K) log-probabilities of the mean. With one view, the
    logits themselves come back.
    """
    if views == 1:
        return logits
    if len(logits) % views:
        raise ValueError(f"expected rows divisible by {views} views, got {len(logits)} rows; pass batch.views")
    return logits.unflatten(0, (views, -1)).log_softmax(dim=-1).logsumexp(dim=0) - torch.tensor(views).log()
