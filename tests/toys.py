"""Tiny data and models that the tests of the training side share."""

from collections.abc import Mapping, Sequence

import lightning as L
import peft
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmadapt.adapters import AdapterBank
from mmadapt.backbone import ViViT
from mmadapt.data.batch import Batch
from mmadapt.data.module import MultimodalDataModule, Split
from mmadapt.fusion import ConcatFusion
from mmadapt.heads import ClassificationHead
from mmadapt.model import MultimodalModel
from mmadapt.tokenizers import TubeletTokenizer

CLIP = (2, 4, 1, 4)
CLASSES = 3
MODALITIES = ("left", "right")


class ToyDataset(Dataset[Batch]):
    """Classes are told apart by the mean of each modality's clip."""

    def __init__(self, size: int, seed: int, modalities: Sequence[str]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.arange(size) % CLASSES
        shift = self.targets.float().view(-1, 1, 1, 1, 1)
        self.inputs = {m: torch.randn(size, *CLIP, generator=generator) + shift for m in modalities}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, items: list) -> Batch:
        rows = [item[1] if isinstance(item, tuple) else item for item in items]
        return Batch({m: x[rows] for m, x in self.inputs.items()}, self.targets[rows], [f"row{row}" for row in rows])


class ToyData(MultimodalDataModule):
    def __init__(
        self, modalities: Sequence[str] = MODALITIES, size: int = 24, batch_size: int = 4, seed: int = 0
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed)
        self.modalities = tuple(modalities)
        self.class_names = ("a", "b", "c")
        self.clip_shapes = dict.fromkeys(self.modalities, CLIP)
        self.sha256 = "0"
        self.size = size

    def dataset(self, split: Split, *, training: bool = False) -> ToyDataset:
        return ToyDataset(self.size if split == "train" else 9, ("train", "val", "test").index(split), self.modalities)


def toy_model(
    routes: Mapping[str, Sequence[str]] | None = None,
    *,
    trainable: Sequence[str] = ("left_ft", "right_ft"),
    dropout: float = 0.0,
    freeze: bool = True,
) -> MultimodalModel:
    """routes: modality -> adapter names, by default a frozen and a trainable one each; B is drawn, not zero."""
    torch.manual_seed(0)
    routes = {m: (m, f"{m}_ft") for m in MODALITIES} if routes is None else routes
    backbone = ViViT(dim=8, depth=2, num_heads=2, drop=dropout)
    bank = AdapterBank(backbone, tuple(routes), freeze=freeze)
    for modality, names in routes.items():
        for name in names:
            config = peft.LoraConfig(r=2, target_modules=["attn.qkv"], init_lora_weights=False)
            bank.add(name, config, modality=modality, trainable=name in trainable)
    tokenizers = {m: TubeletTokenizer(8, CLIP, (1, 1, 4)) for m in routes}
    fusion = ConcatFusion(tuple(routes), 8)
    return MultimodalModel(
        backbone, tokenizers, bank, fusion, ClassificationHead(fusion.out_dim, CLASSES, dropout=dropout)
    )


def toy_batch(size: int = 4, modalities: Sequence[str] = MODALITIES, views: int = 1) -> Batch:
    batch = ToyDataset(size * views, 3, modalities).__getitems__(list(range(size * views)))
    return Batch(batch.inputs, batch.targets[:size], batch.ids[:size], views)


def quiet_trainer(**kwargs: object) -> L.Trainer:
    """A trainer that prints and writes nothing unless it is told to."""
    settings: dict = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**(settings | kwargs))


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
