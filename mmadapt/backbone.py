"""The shared backbone: a stack of transformer blocks between the tokens of a modality and its features."""

from timm.models.vision_transformer import Block
from torch import Tensor, nn

from mmadapt.plans import CheckpointPlan, run_blocks

__all__ = ["Backbone", "ViViT"]


class Backbone(nn.Module):
    """What mmadapt needs of a transformer: `blocks`, `dim` and `norm`.

    A subclass sets them in its `__init__`. The modules that turn a modality into tokens lie outside, one per modality
    (`mmadapt.tokenizers`), so that the backbone holds nothing that belongs to one modality.
    """

    blocks: nn.ModuleList
    dim: int
    norm: nn.Module

    @property
    def peft_module(self) -> nn.Module:
        """The module that PEFT wraps; its parameter names are those in adapter files."""
        return self

    def forward(self, tokens: Tensor, plan: CheckpointPlan | None = None) -> Tensor:
        """tokens: (B, N, D) -> (B, N, D), under whatever adapters are active, with the blocks checkpointed by `plan`.

        Raises:
            ValueError: tokens of another shape or dimension.
        """
        if tokens.ndim != 3 or tokens.shape[-1] != self.dim:
            raise ValueError(
                f"tokens: expected (B, N, {self.dim}), got {tuple(tokens.shape)}. Do: check the tokenizer's dim."
            )
        return self.norm(run_blocks(self.blocks, tokens, plan=plan))


class ViViT(Backbone):
    """The encoder of ViViT with joint space-time attention: every token attends to every other.

    dim: D. depth: number of blocks. num_heads: heads per block. mlp_ratio: hidden width of the MLP over D. drop,
    attn_drop, drop_path: dropout of projections, of attention weights, and stochastic depth (growing linearly to the
    last block). The blocks are timm's, so LoRA's usual targets are `qkv`, `proj`, `fc1` and `fc2`.

    Linear layers keep torch's own initialisation, which scales with 1 / sqrt(width): the normal of deviation 0.02 that
    large ViTs start from is far too small at widths like 96 and learns much slower there.

    Source: Arnab et al. 2021, "ViViT: A Video Vision Transformer", model 1. Features are the mean over tokens and not a
    class token's, as in that paper's ablations, which needs no token of one modality in the shared part.
    """

    def __init__(
        self,
        dim: int = 96,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"ViViT.depth: expected at least 1, got {depth}")
        if dim < 1 or num_heads < 1:
            raise ValueError(f"ViViT: expected dim and num_heads of at least 1, got dim={dim}, num_heads={num_heads}")
        if dim % num_heads:
            raise ValueError(f"ViViT.dim: expected a multiple of num_heads={num_heads}, got {dim}")
        self.dim = dim
        self.blocks = nn.ModuleList(
            Block(
                dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                qkv_bias=True,
                proj_drop=drop,
                attn_drop=attn_drop,
                drop_path=drop_path * i / max(depth - 1, 1),
            )
            for i in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
