import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from mmadapt.callbacks import EMA, Interrupt, Interrupted, ProgressBar, ResumePoint, StepTimer
from mmadapt.config import ConfigError
from mmadapt.module import MultiAdapterModule
from tests.toys import CLASSES, ToyData, quiet_trainer, state_of, toy_model

pytestmark = pytest.mark.usefixtures("quiet")


def module() -> MultiAdapterModule:
    return MultiAdapterModule(toy_model(dropout=0.1), CLASSES, {"lr": 0.05})


class Record(Callback):
    """The head's weights after each step, and while validating."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.steps.append(pl_module.model.head.linear.weight.detach().clone())

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.validated.append(pl_module.model.head.linear.weight.detach().clone())


class CtrlC(Callback):
    """Sends SIGINT to this process while a step runs."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_ema_is_the_average_and_is_what_is_validated_and_left() -> None:
    record, trained = Record(), module()
    start = trained.model.head.linear.weight.detach().clone()
    trainer = quiet_trainer(max_epochs=1, callbacks=[EMA(0.5), record])
    trainer.fit(trained, datamodule=ToyData())
    average = start
    for t, weight in enumerate(record.steps):
        decay = min(0.5, (1 + t) / (10 + t))
        average = decay * average + (1 - decay) * weight
    torch.testing.assert_close(record.validated[-1], average)
    torch.testing.assert_close(trained.model.head.linear.weight.detach(), average)
    assert not torch.equal(average, record.steps[-1])


def test_ema_waits_for_the_accumulated_step() -> None:
    ema = EMA(0.5)
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=3, callbacks=[ema])
    trainer.fit(module(), datamodule=ToyData())
    assert ema._updates == trainer.global_step == 2


def test_ema_copies_no_frozen_weight_and_is_saved(tmp_path: Path) -> None:
    trained, record = module(), Record()
    trainer = quiet_trainer(max_epochs=1, callbacks=[EMA(0.9), record])
    trainer.fit(trained, datamodule=ToyData())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    declared = {f"model.{name}" for group in trained.model.parameter_groups().values() for name, _ in group}
    assert checkpoint["ema"]["parameters"].keys() == declared
    key = "model.head.linear.weight"
    torch.testing.assert_close(checkpoint["state_dict"][key], trained.model.head.linear.weight.detach())


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_ema_refuses_a_decay_that_never_learns(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"ema.decay: expected a number in \[0, 1\)"):
        EMA(decay)


@pytest.mark.parametrize("step", [2, 5, 6, 8], ids=["mid-epoch", "last step of an epoch", "first step", "later epoch"])
def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path: Path, step: int) -> None:
    """6 batches an epoch, 3 epochs: dropout, EMA, schedule, optimizer and the data's order all go on."""

    def fit(folder: Path, *more: Callback, resume: Path | None = None) -> MultiAdapterModule:
        trained = module()
        torch.manual_seed(5)
        callbacks = [
            *more,
            EMA(0.9),
            ModelCheckpoint(dirpath=folder, save_last=True, monitor="val/loss", filename="best"),
            Interrupt(),
            ResumePoint({"stage": "toy", "hash": "0"}),
        ]
        trainer = quiet_trainer(max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
        ckpt: dict[str, Any] = {"ckpt_path": str(resume), "weights_only": True} if resume else {}
        trainer.fit(trained, datamodule=ToyData(), **ckpt)
        assert trainer.global_step == 18
        return trained

    whole = state_of(fit(tmp_path / "whole"))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path / "part", CtrlC(step))
    assert signal.getsignal(signal.SIGINT) is before
    path = caught.value.path
    assert path == tmp_path / "part" / "interrupted.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == step + 1
    assert checkpoint["mmadapt"] == {"stage": "toy", "hash": "0"}
    for name, tensor in state_of(fit(tmp_path / "part", resume=path)).items():
        assert torch.equal(tensor, whole[name]), name


def test_ctrl_c_in_the_last_batch_of_an_epoch_validates_first(tmp_path: Path) -> None:
    def trainer(*more: Callback) -> L.Trainer:
        best = ModelCheckpoint(dirpath=tmp_path, monitor="val/loss", filename="best")
        return quiet_trainer(max_epochs=3, callbacks=[*more, best, Interrupt()], enable_checkpointing=True)

    with pytest.raises(Interrupted):
        trainer(CtrlC(5)).fit(module(), datamodule=ToyData())
    assert (tmp_path / "best.ckpt").is_file()
    again = trainer()
    again.fit(module(), datamodule=ToyData(), ckpt_path=str(tmp_path / "interrupted.ckpt"), weights_only=True)
    assert again.global_step == 18


def test_step_times_are_logged() -> None:
    timer = StepTimer()
    trainer = quiet_trainer(max_epochs=1, callbacks=[timer])
    trainer.fit(module(), datamodule=ToyData())
    assert len(timer.seconds) == 6
    assert timer.median is not None
    assert 0 < timer.median < 5
    assert trainer.callback_metrics["train/step_seconds"] > 0
    assert trainer.callback_metrics["train/lr"] > 0


def test_the_bar_names_the_stage_and_counts_steps(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(max_epochs=2, enable_progress_bar=True, callbacks=[ProgressBar("1/4 pretrain")])
    trainer.fit(module(), datamodule=ToyData())
    shown = capsys.readouterr().err
    assert "1/4 pretrain" in shown
    assert "12/12" in shown
    assert "loss" in shown
