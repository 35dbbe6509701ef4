"""Lightning: a LightningModule of your own over two modalities; the frozen ViT is built late and checkpointed.

    python examples/lightning_module.py

(`mmadapt.MultiAdapterModule` is a ready one, with tokenizers, fusion, metrics and checkpoints without frozen weights.)
"""

import lightning as L
import torch
from peft import LoraConfig
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmadapt import AdapterBank, CheckpointPlan, checkpoint_blocks

MODALITIES = ("rgb", "depth")


class Multimodal(L.LightningModule):
    def configure_model(self) -> None:
        if hasattr(self, "vit"):  # Lightning may call this several times
            return
        self.vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=0)
        self.bank = AdapterBank(self.vit)
        for modality in MODALITIES:
            config = LoraConfig(r=4, target_modules=["attn.qkv", "attn.proj"])
            self.bank.add(modality, config, modality=modality, trainable=False)
            self.bank.add(f"{modality}_ft", config, modality=modality, trainable=True)
        checkpoint_blocks(self.vit, CheckpointPlan(segment_size=2))  # two blocks share a checkpoint
        self.head = nn.Linear(len(MODALITIES) * 32, 3)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        features = []
        for modality in MODALITIES:
            with self.bank.active(modality):
                features.append(self.vit(batch[modality]))
        loss = nn.functional.cross_entropy(self.head(torch.cat(features, dim=1)), batch["target"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for name in self.bank.trainable for _, p in self.bank.parameters(name)]
        return torch.optim.AdamW([*trained, *self.head.parameters()], lr=5e-3)


def main(epochs: int = 3) -> float:
    L.seed_everything(0)
    rows = [{"target": y, **{m: torch.randn(3, 32, 32) + y - 1 for m in MODALITIES}} for y in torch.arange(96) % 3]
    trainer = L.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, log_every_n_steps=1)
    trainer.fit(Multimodal(), DataLoader(rows, batch_size=16, shuffle=True))
    return trainer.callback_metrics["train/loss"].item()


if __name__ == "__main__":
    print(f"loss at the last step: {main():.3f}")
