"""transformers, PEFT and the Hugging Face Trainer: two modalities in one step, checkpointed.

python examples/transformers_trainer.py
"""

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTModel

from mmadapt import AdapterBank, checkpoint_blocks

MODALITIES = ("rgb", "depth")


class Multimodal(nn.Module):
    """A ViT that runs each modality under its own adapters, then a linear head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
        self.vit = ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes))  # or ViTModel.from_pretrained(NAME)
        self.bank = AdapterBank(self.vit)  # bank.model is a genuine PeftModel
        for modality in MODALITIES:
            config = LoraConfig(r=4, target_modules=r".*layers\.\d+\.attention\.[qv]_proj")
            self.bank.add(modality, config, modality=modality, trainable=False)
            self.bank.add(f"{modality}_ft", config, modality=modality, trainable=True)
        self.head = nn.Linear(len(MODALITIES) * 32, 3)
        checkpoint_blocks(self.vit)  # stays in charge if gradient_checkpointing=True is set somewhere

    def forward(self, labels: Tensor, **images: Tensor) -> dict[str, Tensor]:
        features = []
        for modality in MODALITIES:
            with self.bank.active(modality):
                features.append(self.vit(images[modality]).last_hidden_state.mean(dim=1))
        logits = self.head(torch.cat(features, dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_rows(count: int = 96) -> list[dict[str, Tensor]]:
    labels = torch.arange(count) % 3
    return [{"labels": y, **{m: torch.randn(3, 32, 32) + y - 1 for m in MODALITIES}} for y in labels]


def main(folder: str = "outputs/transformers_trainer", epochs: int = 3) -> list[float]:
    model = Multimodal()
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, learning_rate=5e-3, per_device_train_batch_size=16, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(), remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=make_rows())
    trainer.train()
    model.bank.save("rgb_ft", f"{folder}/rgb_ft")  # PEFT's format
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
