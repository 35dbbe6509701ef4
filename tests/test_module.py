from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmadapt.config import ConfigError
from mmadapt.data.batch import Batch, average_views
from mmadapt.module import MultiAdapterModule
from tests.toys import CLASSES, MODALITIES, ToyData, quiet_trainer, toy_batch, toy_model

pytestmark = pytest.mark.usefixtures("quiet")


def fitted(module: MultiAdapterModule, **kwargs: object) -> MultiAdapterModule:
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0, **kwargs)
    trainer.fit(module, datamodule=ToyData())
    return module


def test_training_changes_what_is_declared_trainable_and_nothing_else() -> None:
    module = MultiAdapterModule(toy_model(), CLASSES, {"lr": 0.1, "warmup": 0.0})
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    declared = {f"model.{name}" for group in module.model.parameter_groups().values() for name, _ in group}
    fitted(module)
    assert {name for name, p in module.named_parameters() if not torch.equal(p, before[name])} == declared


def test_a_subclass_overrides_the_loss() -> None:
    class Mine(MultiAdapterModule):
        def loss(self, logits: Tensor, batch: Batch) -> Tensor:
            assert logits.shape == (len(batch), CLASSES)
            return 7 + 0 * logits.sum()

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Mine(toy_model(), CLASSES), datamodule=ToyData())
    assert trainer.callback_metrics["train/loss"] == 7
    assert trainer.callback_metrics["val/loss"] == 7


def test_metrics_together_and_of_each_modality_alone() -> None:
    module, data = MultiAdapterModule(toy_model(), CLASSES), ToyData()
    trainer = quiet_trainer()
    (metrics,) = trainer.test(module, datamodule=data, verbose=False)
    whole = data.dataset("test").__getitems__(list(range(9)))
    with torch.no_grad():
        expected = {"": module.model(whole)} | {f"/{m}": module.model({m: whole.inputs[m]}) for m in MODALITIES}
    for suffix, logits in expected.items():
        right = (logits.argmax(-1) == whole.targets).float().mean().item()
        assert metrics[f"test/accuracy{suffix}"] == pytest.approx(right)
        assert 0 <= metrics[f"test/f1{suffix}"] <= 1
    matrix = torch.tensor(module.confusion["test"]["all"])
    assert matrix.sum(dim=1).tolist() == [3, 3, 3]  # rows are the true classes
    assert matrix.trace() / 9 == pytest.approx(metrics["test/accuracy"])
    assert set(module.confusion["test"]) == {"all", *MODALITIES}


def test_views_are_averaged() -> None:
    module, batch = MultiAdapterModule(toy_model(), CLASSES).eval(), toy_batch(size=4, views=3)
    with torch.no_grad():
        rows = module(batch)
        assert rows.shape == (12, CLASSES)
        torch.testing.assert_close(module.subset_logits(batch)["all"], average_views(rows, 3))
    probabilities = module.predict_step(batch, 0)["probabilities"]
    assert probabilities.shape == (4, CLASSES)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(4))


def test_a_modality_that_a_batch_lacks_is_left_out_of_its_metrics() -> None:
    module = MultiAdapterModule(toy_model(), CLASSES)
    assert set(module.subset_logits(toy_batch(modalities=("right",)))) == {"all", "right"}


def test_a_checkpoint_holds_everything_but_the_frozen_backbone(tmp_path: Path) -> None:
    module = MultiAdapterModule(toy_model(), CLASSES, {"lr": 0.1})
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(module, datamodule=ToyData())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with module.model.bank.active("left"):
        trainer.save_checkpoint(tmp_path / "b.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == torch.load(tmp_path / "b.ckpt", weights_only=True)["state_dict"].keys()
    assert set(checkpoint["state_dict"]) == {f"model.{name}" for name in module.model.trainable_state()}
    assert not any(".mlp." in name for name in checkpoint["state_dict"])  # the backbone's
    assert any("left.weight" in name for name in checkpoint["state_dict"])  # frozen adapters are small, and needed

    fresh = MultiAdapterModule.load_from_checkpoint(tmp_path / "a.ckpt", model=toy_model(), weights_only=True)
    assert fresh.optim["lr"] == 0.1
    for name, tensor in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(MultiAdapterModule(toy_model(), CLASSES), datamodule=ToyData())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = toy_model({"left": ("left_ft",), "right": ("right_ft", "more")}, trainable=("left_ft", "right_ft"))
    with pytest.raises(ValueError, match=r"missing: \[.*more.*extra: \[.*left"):
        MultiAdapterModule.load_from_checkpoint(tmp_path / "a.ckpt", model=other, weights_only=True)


def test_hyper_parameters_are_plain(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    module = MultiAdapterModule(toy_model(), CLASSES, OmegaConf.create({"lr": 0.1, "adapter": {"lr": 0.2}}))  # type: ignore[arg-type]
    assert type(module.hparams["optim"]) is dict
    assert type(module.hparams["optim"]["adapter"]) is dict
    assert "model" not in module.hparams


def test_nothing_trainable_is_said_at_the_start() -> None:
    model = toy_model(trainable=())
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        fitted(MultiAdapterModule(model, CLASSES))


def test_an_adapter_without_gradient_is_said_at_the_first_step() -> None:
    class Detached(MultiAdapterModule):
        def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
            features = self.model.features(batch.inputs)
            features["left"] = features["left"].detach()
            return self.model.head(self.model.fusion(features))

    with pytest.raises(RuntimeError, match=r"adapter 'left_ft' of modality 'left'.*no gradient"):
        fitted(Detached(toy_model(), CLASSES))


def test_a_modality_that_comes_late_is_no_error() -> None:
    class Late(MultiAdapterModule):
        steps = 0

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if batch_idx == 0:
                batch = Batch({"right": batch.inputs["right"]}, batch.targets, batch.ids)
            Late.steps += 1
            return super().training_step(batch, batch_idx)

    fitted(Late(toy_model(), CLASSES))
    assert Late.steps == 2


def test_a_model_in_eval_mode_is_trained_in_training_mode() -> None:
    class Watched(MultiAdapterModule):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            assert all(part.training for part in self.modules())
            return super().training_step(batch, batch_idx)

    fitted(Watched(toy_model(dropout=0.1).eval(), CLASSES))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_with_nan_is_refused_by_name(value: float) -> None:
    batch = toy_batch()
    batch.inputs["right"][2] = value
    with pytest.raises(ValueError, match=r"'right'.*row2"):
        MultiAdapterModule(toy_model(), CLASSES).training_step(batch, 0)


def test_a_batch_without_or_with_an_unknown_modality_is_refused() -> None:
    module, batch = MultiAdapterModule(toy_model(), CLASSES), toy_batch()
    with pytest.raises(ValueError, match="at least one modality"):
        module.training_step(Batch({}, batch.targets, batch.ids), 0)
    with pytest.raises(ValueError, match=r"middle.*valid"):
        module.training_step(Batch({"middle": batch.inputs["left"]}, batch.targets, batch.ids), 0)


def test_accumulation_and_bf16_run() -> None:
    module = MultiAdapterModule(toy_model(), CLASSES)
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2, precision="bf16-mixed", gradient_clip_val=1.0)
    trainer.fit(module, datamodule=ToyData())
    assert trainer.global_step == 3  # 6 batches


def test_parameters_of_a_subclass_are_trained_and_saved(tmp_path: Path) -> None:
    class Scaled(MultiAdapterModule):
        def __init__(self, model: torch.nn.Module, num_classes: int) -> None:
            super().__init__(model, num_classes)  # type: ignore[arg-type]
            self.scale = torch.nn.Parameter(torch.ones(()))

        def loss(self, logits: Tensor, batch: Batch) -> Tensor:
            return super().loss(self.scale * logits, batch)

    module = Scaled(toy_model(), CLASSES)
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(module, datamodule=ToyData())
    assert module.scale != 1
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert "scale" in torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
