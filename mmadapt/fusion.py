"""From the features of the modalities that are present to one vector per sample.

Each takes `dict[modality, (B, D)]` and returns `(B, out_dim)`; a modality without a key is missing for the whole batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["ConcatFusion", "GatedFusion", "MeanFusion"]


class _Fusion(nn.Module):
    """modalities: all that can occur, in the order of the output. dim: D of each feature."""

    def __init__(self, modalities: Sequence[str], dim: int) -> None:
        super().__init__()
        if not modalities:
            raise ValueError(f"{type(self).__name__}.modalities: expected at least one, got none")
        self.modalities = tuple(modalities)
        self.dim = dim
        self.out_dim = dim

    def _present(self, features: Mapping[str, Tensor]) -> list[str]:
        unknown = sorted(set(features) - set(self.modalities))
        present = [modality for modality in self.modalities if modality in features]
        if unknown or not present:
            raise ValueError(f"features: expected at least one of {list(self.modalities)}, got {sorted(features)}")
        return present


class ConcatFusion(_Fusion):
    """The features side by side, zeros where a modality is missing: (B, len(modalities) * D)."""

    def __init__(self, modalities: Sequence[str], dim: int) -> None:
        super().__init__(modalities, dim)
        self.out_dim = len(self.modalities) * dim

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        present = self._present(features)
        absent = torch.zeros_like(features[present[0]])
        return torch.cat([features.get(modality, absent) for modality in self.modalities], dim=-1)


class MeanFusion(_Fusion):
    """The mean over the modalities that are present: (B, D)."""

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([features[modality] for modality in self._present(features)]).mean(dim=0)


class GatedFusion(_Fusion):
    """A weighted mean over the modalities that are present: (B, D).

    w_m = softmax over present m of score_m(f_m), with one linear score per modality, so that a sample's own features
    decide how much each modality counts.

    Source: after Arevalo et al. 2017, "Gated Multimodal Units", with a softmax so that missing modalities drop out.
    """

    def __init__(self, modalities: Sequence[str], dim: int) -> None:
        super().__init__(modalities, dim)
        self.scores = nn.ModuleList(nn.Linear(dim, 1) for _ in self.modalities)
        for parameter in self.scores.parameters():
            nn.init.zeros_(parameter)  # starts as the mean

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        present = self._present(features)
        scores = dict(zip(self.modalities, self.scores, strict=True))
        weights = torch.stack([scores[m](features[m]) for m in present]).softmax(dim=0)  # (M, B, 1)
        return (weights * torch.stack([features[m] for m in present])).sum(dim=0)
