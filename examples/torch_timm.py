"""Plain torch and timm: one frozen ViT, RGB and depth images, each under its own adapters; blocks checkpointed.

python examples/torch_timm.py
"""

import timm
import torch
from peft import LoraConfig
from torch import Tensor, nn

from mmadapt import AdapterBank, checkpoint_blocks

MODALITIES = ("rgb", "depth")
CLASSES = 3


def make_batch(size: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    """Images (B, 3, 32, 32) whose brightness tells the class, in the one modality or in the other."""
    target = torch.randint(CLASSES, (size,))
    seen_in_rgb = (torch.rand(size) < 0.5).float()
    shift = target.float() - 1
    shifts = {"rgb": shift * seen_in_rgb, "depth": shift * (1 - seen_in_rgb)}
    return {m: torch.randn(size, 3, 32, 32) + s.view(-1, 1, 1, 1) for m, s in shifts.items()}, target


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    # With a network: pretrained=True
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, num_classes=0)
    bank = AdapterBank(vit)  # freezes it
    for modality in MODALITIES:
        config = LoraConfig(r=4, target_modules=["attn.qkv", "attn.proj"])
        # bank.load(modality, FOLDER, ...) where you have an adapter that was trained on the modality
        bank.add(modality, config, modality=modality, trainable=False)
        bank.add(f"{modality}_ft", config, modality=modality, trainable=True)
    head = nn.Linear(len(MODALITIES) * vit.num_features, CLASSES)
    trained = [p for name in bank.trainable for _, p in bank.parameters(name)]
    optimizer = torch.optim.AdamW([*trained, *head.parameters()], lr=3e-3)
    losses = []
    with checkpoint_blocks(vit):  # instead of vit.set_grad_checkpointing()
        for _ in range(steps):
            batch, target = make_batch()
            features = []
            for modality, images in batch.items():
                with bank.active(modality):
                    features.append(vit(images))
            loss = nn.functional.cross_entropy(head(torch.cat(features, dim=1)), target)
            optimizer.zero_grad()
            loss.backward()  # each block is recomputed under the adapters of its own forward
            optimizer.step()
            losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} after {steps}")
    return losses


if __name__ == "__main__":
    main()
