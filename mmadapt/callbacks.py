"""What a run records beside its metrics: averaged weights, a bar, step times, and a checkpoint on Ctrl-C."""

import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from mmadapt.config import ConfigError

__all__ = ["EMA", "Interrupt", "Interrupted", "ProgressBar", "ResumePoint", "StepTimer"]


class EMA(Callback):
    """Exponential moving average of the trained parameters: what is validated, selected and saved.

        average_t = d_t * average_{t-1} + (1 - d_t) * parameters_t,    d_t = min(decay, (1 + t) / (10 + t))

    Costs one copy of what is trained, never of the frozen backbone. A checkpoint's `state_dict` holds the averages,
    since those were evaluated; the step's own parameters are beside them under "ema", so that a resumed run goes on.

    Raises:
        ConfigError: decay outside of [0, 1).
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(
                f"callbacks.ema.decay: expected a number in [0, 1), got {decay}; 0.99 averages ~100 steps"
            )
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] | None = None  # the step's own parameters while the averages are in the model
        self._updates = 0
        self._seen = 0  # optimizer steps that the average knows

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("ema")
        if saved is None or trainer.state.fn != "fit":
            return  # then the average starts from the loaded parameters
        self._updates = int(saved["updates"])
        self._average = {name: checkpoint["state_dict"][name].clone() for name in saved["parameters"]}
        _write(_trained(pl_module), saved["parameters"])

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._average:
            return
        step = self._step or {name: p.detach() for name, p in _trained(pl_module).items()}
        checkpoint["ema"] = {"updates": self._updates, "parameters": {name: t.clone() for name, t in step.items()}}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **{n: t.clone() for n, t in self._average.items()}}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        parameters = _trained(pl_module)
        if self._average.keys() != parameters.keys():
            self._updates = 0
            self._average = {name: p.detach().clone() for name, p in parameters.items()}
        self._average = {name: average.to(parameters[name].device) for name, average in self._average.items()}
        self._step = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._seen:
            return  # gradients are being accumulated
        self._seen = trainer.global_step
        parameters = _trained(pl_module)
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        self._updates += 1
        averages = [self._average[name] for name in parameters]
        torch._foreach_lerp_(averages, [p.detach() for p in parameters.values()], 1 - decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._average and self._step is None and trainer.state.fn == "fit":
            parameters = _trained(pl_module)
            self._step = {name: p.detach().clone() for name, p in parameters.items()}
            _write(parameters, self._average)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore(pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The model leaves a fit with the averages, which are what was evaluated."""
        _write(_trained(pl_module), self._average)

    def _restore(self, pl_module: L.LightningModule) -> None:
        if self._step is not None:
            _write(_trained(pl_module), self._step)
            self._step = None


def _trained(pl_module: Any) -> dict[str, nn.Parameter]:
    """The parameters in the module's groups, by their names in the module's state_dict."""
    names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
    groups = pl_module.parameter_groups()
    return {names[id(p)]: p for parameters in groups.values() for _, p in parameters}


@torch.no_grad()
def _write(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


class StepTimer(Callback):
    """Logs `train/step_seconds`, wall time from one training batch to the next, data included, and `train/lr`.

    `median` is that of all steps but the first three.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds[3:] or self.seconds) if self.seconds else None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = None  # validation lies between two epochs

    def on_train_batch_start(self, *args: Any) -> None:
        if self._last is None:
            self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now
        optimizer = trainer.optimizers[0]
        pl_module.log_dict({"train/step_seconds": self.seconds[-1], "train/lr": optimizer.param_groups[0]["lr"]})


class ProgressBar(LightningProgressBar):
    """One line per fit: steps done, loss, validation accuracy, time. Without a terminal, a line at start and end."""

    def __init__(self, title: str = "fit") -> None:
        super().__init__()
        self.title = title
        self._progress: Progress | None = None
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._progress.start()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._progress is not None:
            steps = trainer.estimated_stepping_batches
            total = None if steps == float("inf") else int(steps)
            self._task = self._progress.add_task(self.title, total=total, completed=trainer.global_step, metrics="")
            if not self._progress.console.is_terminal:  # where the bar shows only when it is finished
                of = "" if total is None else f" of {total}"
                self._progress.console.print(f"{self.title}: from step {trainer.global_step}{of}, {time.ctime()}")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._update(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._update(trainer)

    def _update(self, trainer: L.Trainer) -> None:
        if self._progress is not None and self._progress.tasks:
            shown = {"train/loss": "loss", "val/accuracy": "val accuracy"}
            metrics = trainer.callback_metrics
            text = "  ".join(f"{name} {float(metrics[key]):.3f}" for key, name in shown.items() if key in metrics)
            self._progress.update(self._task, completed=trainer.global_step, metrics=text)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Interrupted(Exception):
    """A fit was stopped by Ctrl-C after a whole step; `path` is the checkpoint that it left."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"interrupted; a checkpoint to go on from is {path}")
        self.path = path


class Interrupt(Checkpoint):
    """Ctrl-C: the step in progress is finished, a checkpoint that resumes is written, the fit ends with Interrupted.

    A second Ctrl-C stops at once, without a checkpoint. It is a Checkpoint callback so that it runs after all that
    change or record state, ModelCheckpoint included if that is listed before.

    Args:
        filename: of the checkpoint, in the folder of the run's ModelCheckpoint, or in `folder`.
    """

    def __init__(self, filename: str = "interrupted.ckpt", folder: str | None = None) -> None:
        self.filename = filename
        self.folder = folder
        self.requested = False
        self._before: Any = None
        self._installed = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # not earlier: Lightning notes all handlers just before, and puts them back after the fit
        self.requested = False
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nCtrl-C: finishing this step; once more to stop without a checkpoint", file=sys.stderr)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        batch_idx = args[-1]
        # half-accumulated gradients are in no checkpoint; the last batch's epoch ends with its validation first
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and not trainer.is_last_batch:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop(trainer)

    def _stop(self, trainer: L.Trainer) -> None:
        if not self.requested:
            return
        folder = self.folder or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(folder) / self.filename
        trainer.save_checkpoint(path)
        raise Interrupted(path)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._uninstall()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._uninstall()

    def _uninstall(self) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)
            self._installed = False


class ResumePoint(Callback):
    """What a checkpoint needs beside Lightning's to be resumed: whose it is, the RNG, and the sampler's position.

    Args:
        identity: plain values by which the run finds its own checkpoints again.
    """

    def __init__(self, identity: dict[str, str]) -> None:
        self.identity = identity
        self._rng: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["mmadapt"] = dict(self.identity)
        checkpoint["rng"] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            checkpoint["rng"]["cuda"] = torch.cuda.get_rng_state_all()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._rng = checkpoint.get("rng")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._rng is None:
            return
        # processed, not completed: a checkpoint of on_train_batch_end was written before its batch counted as complete
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        datamodule: Any = getattr(trainer, "datamodule", None)
        sampler: Any = getattr(datamodule, "sampler", None)
        fetcher = trainer.fit_loop._data_fetcher
        if 0 < done < trainer.num_training_batches:
            if hasattr(sampler, "seek"):
                sampler.seek(trainer.current_epoch, done * datamodule.batch_size)
                if datamodule.num_workers > 0 and fetcher is not None:
                    iter(fetcher)  # the workers were already sent the epoch's first rows
            self._restore_rng()
        else:
            # a DataLoader draws a seed for its workers at the start of an epoch, which was after this checkpoint
            self._restore_rng()
            if fetcher is not None:
                iter(fetcher)

    def _restore_rng(self) -> None:
        assert self._rng is not None
        torch.set_rng_state(self._rng["cpu"].cpu())
        if "cuda" in self._rng and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([state.cpu() for state in self._rng["cuda"]])
        self._rng = None
