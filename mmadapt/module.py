"""The LightningModule that users subclass: steps, loss, metrics, optimizer, and what a checkpoint holds.

class Mine(MultiAdapterModule):
    def loss(self, logits, batch):
        return focal_loss(logits, batch.targets)
"""

from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from mmadapt.config import ConfigError, plain
from mmadapt.data.batch import Batch, average_views
from mmadapt.model import MultimodalModel, check_keys
from mmadapt.optim import adamw, cosine_schedule

__all__ = ["MultiAdapterModule"]

TOGETHER = "all"  # the metrics' key of all modalities together; theirs alone are under their names
SPLITS = ("val", "test")
OPTIM = {"lr": 2e-3, "weight_decay": 0.05, "warmup": 0.1, "final": 0.01}


class MultiAdapterModule(L.LightningModule):
    """Trains a MultimodalModel on Batches.

    Override `loss`, `configure_optimizers` or any step. Logged: `train/loss`, and for val and test the loss, `accuracy`
    and macro `f1` of all modalities together (`val/accuracy`) and of the model given one of them
    (`val/accuracy/gyroscope`). `confusion[split]["all" or modality]` is the last epoch's matrix, rows the true classes.

    Args:
        model: what is trained; not part of the hyper-parameters, so `load_from_checkpoint(path, model=model)`.
        num_classes: of the head.
        optim: plain values as in conf/optim/adamw.yaml: lr, weight_decay, warmup, final, and per kind or group.

    Raises:
        ConfigError: at the start of a fit if nothing is trainable.
        RuntimeError: at the first backward with a modality whose trainable adapter got no gradient.
        ValueError: a batch with no or an unknown modality, NaN or Inf; an adapter whose flags PEFT changed; a
            checkpoint of another model.
    """

    def __init__(self, model: MultimodalModel, num_classes: int, optim: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.optim = {**OPTIM, **plain(optim or {})}
        # plain values only: a config object among them could not be loaded with weights_only=True
        self.save_hyperparameters({"num_classes": int(num_classes), "optim": self.optim})
        self.model = model
        self.num_classes = int(num_classes)
        self.confusion: dict[str, dict[str, list[list[int]]]] = {}
        self.metrics = nn.ModuleDict({split: self._metrics() for split in SPLITS})
        self._unproven: set[str] = set()  # trainable adapters that no backward has reached yet
        self._present: set[str] = set()  # modalities of the batches since the last backward

    def forward(self, batch: Batch | Mapping[str, Tensor]) -> Tensor:
        """A batch, or its inputs, to logits (rows, classes), one row per view."""
        return self.model(batch)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The scalar that is minimised: logits (B, classes) against `batch.targets` (B,), by the head's own loss."""
        head: Any = self.model.head
        return head.loss(logits, batch.targets)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch.check(self.model.modalities)
        self.model.bank.check_flags()
        self._present.update(batch.inputs)
        loss = self.loss(average_views(self(batch), batch.views), batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """ids of the batch and class probabilities (B, classes), views averaged."""
        batch.check(self.model.modalities)
        logits = average_views(self(batch), batch.views)
        return {"ids": batch.ids, "probabilities": logits.softmax(dim=-1)}

    def subset_logits(self, batch: Batch) -> dict[str, Tensor]:
        """Logits (B, classes), views averaged, of all present modalities and of the model given only one of them."""
        features = self.model.features(batch.inputs)  # each modality runs once, whatever it is then fused with
        subsets = {TOGETHER: features} | {name: {name: feature} for name, feature in features.items()}
        return {
            name: average_views(self.model.head(self.model.fusion(subset)), batch.views)
            for name, subset in subsets.items()
        }

    def _evaluate(self, batch: Batch, split: str) -> None:
        batch.check(self.model.modalities)
        logits = self.subset_logits(batch)
        self.log(f"{split}/loss", self.loss(logits[TOGETHER], batch), batch_size=len(batch))
        for name, subset in logits.items():
            for metric in self._of(split, name).values():
                metric.update(subset, batch.targets)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    def _metrics(self) -> nn.ModuleDict:
        def of_one() -> nn.ModuleDict:
            return nn.ModuleDict(
                {
                    "accuracy": MulticlassAccuracy(self.num_classes, average="micro"),
                    "f1": MulticlassF1Score(self.num_classes, average="macro"),
                    "confusion": MulticlassConfusionMatrix(self.num_classes),
                }
            )

        return nn.ModuleDict({name: of_one() for name in (TOGETHER, *self.model.modalities)})

    def _of(self, split: str, name: str) -> dict[str, Metric]:
        return dict(self.metrics[split][name].items())  # type: ignore[index]

    def _log_metrics(self, split: str) -> None:
        for name in (TOGETHER, *self.model.modalities):
            metrics = self._of(split, name)
            if not metrics["accuracy"].update_called:
                continue  # no batch of this split had the modality
            suffix = "" if name == TOGETHER else f"/{name}"
            for key in ("accuracy", "f1"):
                self.log(f"{split}/{key}{suffix}", metrics[key].compute(), prog_bar=not suffix and key == "accuracy")
            self.confusion.setdefault(split, {})[name] = metrics["confusion"].compute().tolist()
            for metric in metrics.values():
                metric.reset()

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The model's groups, and as "module" what a subclass put beside the model."""
        groups = self.model.parameter_groups()
        own = [(n, p) for n, p in self.named_parameters() if not n.startswith("model.") and p.requires_grad]
        return groups | ({"module": own} if own else {})

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameter_groups(), self.optim)
        schedule = cosine_schedule(optimizer, int(self.trainer.estimated_stepping_batches), self.optim)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        # Lightning keeps the mode a model has, and models come in eval mode from `from_pretrained`: dropout and
        # checkpointing would be off without a word.
        self.train()
        if not any(parameters for parameters in self.parameter_groups().values()):
            raise ConfigError(
                "expected something to train, got no trainable parameter: every adapter, tokenizer, fusion and head is "
                "frozen; add a trainable adapter (adapters.route=[frozen,trainable]) or a head with parameters"
            )
        self._unproven = set(self.model.bank.trainable)
        self._present.clear()

    def on_after_backward(self) -> None:
        if not self._unproven:
            return
        bank = self.model.bank
        for modality in self.model.modalities:
            if modality not in self._present:
                continue  # its adapter rightly has no gradient yet
            for name in self._unproven.intersection(bank.route(modality)):
                if all(parameter.grad is None for _, parameter in bank.parameters(name)):
                    raise RuntimeError(
                        f"adapter {name!r} of modality {modality!r} is declared trainable, but the first backward with "
                        "that modality gave it no gradient at all; valid: a loss that needs every present modality, "
                        "adapters switched by AdapterBank.active only. Look for a detach(), a no_grad(), or PEFT's "
                        "set_adapter (which freezes what it deactivates) between forward and backward"
                    )
                self._unproven.discard(name)
        self._present.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        frozen = self._frozen_keys()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in frozen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own, frozen = self.state_dict(), self._frozen_keys()
        check_keys(checkpoint["state_dict"], own, frozen)
        # with this model's own frozen weights the state is whole, and Lightning's strict loading holds
        checkpoint["state_dict"] = {**{key: own[key] for key in frozen}, **checkpoint["state_dict"]}

    def _frozen_keys(self) -> set[str]:
        kept = self.model.trainable_state()
        return {f"model.{name}" for name in self.model.state_dict() if name not in kept}
