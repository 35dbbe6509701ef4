"""From one modality's clip to tokens for the shared backbone."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["TubeletTokenizer"]


class TubeletTokenizer(nn.Module):
    """Cut a clip into tubelets, embed each linearly, add a learnt positional embedding.

    dim: D. clip: (C, T, H, W) of one sample. tubelet: (t, h, w), which must divide (T, H, W).
    drop_token: share of the tokens that each sample loses in training, at random; 0.25 is a quarter less work too.
    forward: (B, C, T, H, W) -> (B, N, D) with N = T/t * H/h * W/w, in the order t, h, w.

    Source: Arnab et al. 2021, "ViViT", section 3.2; for drop_token Akbari et al. 2021, "VATT", section 3.2.

    Raises:
        ValueError: a tubelet that does not divide the clip; in forward, a clip of another shape.
    """

    def __init__(self, dim: int, clip: Sequence[int], tubelet: Sequence[int], drop_token: float = 0.0) -> None:
        super().__init__()
        if not 0 <= drop_token < 1:
            raise ValueError(f"drop_token: expected a share in [0, 1), got {drop_token}")
        self.drop_token = drop_token
        if len(clip) != 4 or min(clip) < 1:
            raise ValueError(f"clip: expected (C, T, H, W), got {tuple(clip)}")
        if (
            len(tubelet) != 3
            or min(tubelet) < 1
            or any(size % step for size, step in zip(clip[1:], tubelet, strict=True))
        ):
            raise ValueError(
                f"tubelet: expected (t, h, w) that divides the clip's (T, H, W) = {tuple(clip[1:])}, "
                f"got {tuple(tubelet)}"
            )
        self.clip = tuple(clip)
        self.tubelet = (tubelet[0], tubelet[1], tubelet[2])
        grid = [size // step for size, step in zip(clip[1:], tubelet, strict=True)]
        self.num_tokens = grid[0] * grid[1] * grid[2]
        self.proj = nn.Conv3d(clip[0], dim, kernel_size=self.tubelet, stride=self.tubelet)
        self.position = nn.Parameter(torch.empty(1, self.num_tokens, dim))
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, clips: Tensor) -> Tensor:
        if clips.ndim != 5 or tuple(clips.shape[1:]) != self.clip:
            raise ValueError(
                f"clip: expected (B, C, T, H, W) = (B, {', '.join(map(str, self.clip))}), got {tuple(clips.shape)}"
            )
        tokens = self.proj(clips).flatten(2).transpose(1, 2) + self.position  # (B, N, D)
        if self.training and self.drop_token:
            B, N, D = tokens.shape
            kept = torch.rand(B, N, device=tokens.device).argsort(dim=1)[:, : max(1, round(N * (1 - self.drop_token)))]
            tokens = tokens.gather(1, kept[..., None].expand(-1, -1, D))
        return tokens
