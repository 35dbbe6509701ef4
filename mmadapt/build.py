"""From a validated configuration to objects: data, backbone, tokenizers, adapters, callbacks, logger, trainer."""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import peft
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from mmadapt.adapters import AdapterBank
from mmadapt.callbacks import ProgressBar
from mmadapt.config import ConfigError, instantiate
from mmadapt.data.module import MultimodalDataModule
from mmadapt.model import check_keys
from mmadapt.plans import CheckpointPlan
from mmadapt.validate import TOKENIZER_OWN, route

Config = Mapping[str, Any]


def build_data(cfg: Config, modalities: Sequence[str]) -> MultimodalDataModule:
    """The data module, for these modalities alone."""
    return _build(cfg, cfg["data"], modalities=list(modalities))


def build_backbone(cfg: Config) -> nn.Module:
    """A backbone with random weights."""
    return _build(cfg, _without(cfg["backbone"], "trainable", "weights"))


def build_tokenizers(cfg: Config, datamodule: MultimodalDataModule, dim: int) -> dict[str, nn.Module]:
    """One tokenizer per modality of the data module, trainable or not as the config says."""
    tokenizers = {}
    for modality in datamodule.modalities:
        fields = _without(cfg["tokenizer"], *TOKENIZER_OWN) | dict(cfg["tokenizer"]["modality"].get(modality, {}))
        try:
            tokenizer = _build(cfg, fields, dim=dim, clip=list(datamodule.clip_shapes[modality]))
        except ConfigError as e:
            raise ConfigError(f"tokenizer of modality {modality!r}: {e}") from e
        tokenizers[modality] = tokenizer.requires_grad_(bool(cfg["tokenizer"]["trainable"]))
    return tokenizers


def build_fusion(cfg: Config, modalities: Sequence[str], dim: int) -> nn.Module:
    return _build(cfg, cfg["fusion"], modalities=list(modalities), dim=dim)


def build_head(cfg: Config, in_dim: int, num_classes: int) -> nn.Module:
    return _build(cfg, cfg["head"], in_dim=in_dim, num_classes=num_classes)


def build_plan(cfg: Config) -> CheckpointPlan:
    return _build(cfg, cfg["checkpointing"])


def modality_route(cfg: Config, modality: str) -> tuple[str, ...]:
    """Which adapters a modality has in the joint stage: ("frozen", "trainable") or a part of it, in order."""
    own = cfg["adapters"]["modality"].get(modality, {})
    return route(own.get("route", cfg["adapters"]["route"]), "adapters.route")


def lora_fields_of(cfg: Config, modality: str) -> dict[str, Any]:
    """The values of peft.LoraConfig for a modality: the common ones under its own."""
    return {**cfg["adapters"]["lora"], **_without(cfg["adapters"]["modality"].get(modality, {}), "route")}


def build_lora(cfg: Config, modality: str) -> peft.LoraConfig:
    """Raises ConfigError if PEFT refuses the values."""
    try:
        return peft.LoraConfig(**lora_fields_of(cfg, modality))
    except (ValueError, TypeError) as e:
        raise ConfigError(f"adapters: peft.LoraConfig refuses the values of modality {modality!r}: {e}") from e


def add_adapter(bank: AdapterBank, cfg: Config, name: str, modality: str) -> None:
    """A fresh trainable adapter; a value that PEFT refuses only now (r=0) is a ConfigError too."""
    try:
        bank.add(name, build_lora(cfg, modality), modality=modality, trainable=True)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"adapter {name!r} of modality {modality!r}: {e}") from e


def load_exact(module: nn.Module, path: Path, what: str) -> None:
    """Loads a safetensors file whose tensors must be exactly the module's.

    Raises:
        ConfigError: the file is torn, or its tensors are missing, extra or misshaped, which are listed.
    """
    try:
        state = load_file(path)
    except SafetensorError as e:
        raise ConfigError(f"{what}: expected a safetensors file, got {path} ({e}); write it again") from e
    try:
        check_keys(state, module.state_dict())
    except ValueError as e:
        raise ConfigError(f"{what}: {path}: {e}") from e
    module.load_state_dict(state)


def build_callbacks(cfg: Config, folder: Path, title: str) -> list[Callback]:
    """The callbacks of the config; checkpoints go to `folder`, the bar is called `title`."""
    trainer = cfg["trainer"]
    callbacks = []
    for fields in cfg["callbacks"].values():
        if fields is None:
            continue
        callback = _build(cfg, fields)
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = str(folder)
            if trainer.get("enable_checkpointing") is False:
                continue
        if isinstance(callback, ProgressBar):
            callback.title = title
            if trainer.get("enable_progress_bar") is False:
                continue
        callbacks.append(callback)
    return callbacks


def build_trainer(cfg: Config, callbacks: list[Callback], run: Path, name: str) -> L.Trainer:
    """The trainer of one stage; its logger writes below the run's folder under the stage's name."""
    try:
        logger = _build(cfg, cfg["logger"], name=name, version="") if cfg["logger"] else False
        return _build(cfg, cfg["trainer"], logger=logger, callbacks=callbacks, default_root_dir=str(run))
    except MisconfigurationException as e:
        raise ConfigError(f"trainer: {e}") from e
    except ImportError as e:
        raise ImportError(f"{e}; pip install 'mmadapt[tensorboard]' for logger=tensorboard, or use logger=csv") from e


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with the values of `over`, mapping by mapping."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        # another class takes other fields: its node replaces the one that was there
        is_nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping) and "_target_" not in value
        merged[key] = merge(merged[key], value) if is_nested else copy.deepcopy(value)
    return merged


def _build(cfg: Config, fields: Config, **kwargs: Any) -> Any:
    return instantiate(fields, allow=cfg["allow"], **kwargs)


def _without(fields: Config, *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}


# What Lightning says to somebody who writes a training script, and that is settled here; each with its reason.
SETTLED = (
    (
        r"The '\w+' does not have many workers",
        "the built-in data fit in memory: a worker would cost more than it saves",
    ),
    (r"Checkpoint directory .* exists and is not empty", "a resumed run goes on in its folder, and is meant to"),
    (r"You're resuming from a checkpoint that ended before the epoch ended", "the sampler is put where it was"),
    (r"The number of training batches \(\d+\) is smaller than the logging interval", "small data"),
    (r"GPU available but not used", "trainer.accelerator says so"),
    (r"You defined a `validation_step` but have no", "overfit_batches and fast_dev_run"),
    (r"You are trying to `self.log\(\)` but the `self.trainer`", "steps are called by hand in notebooks"),
    (r"The dirpath has changed", "a checkpoint was moved by the user"),
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", "Lightning's own use of torch"),
    (r"You have turned on `Trainer\(overfit_batches", "that is what overfitting does"),
)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Torch computes with so many threads of the CPU; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def settled() -> Iterator[None]:
    """Keeps Lightning's notices of hardware, its tips and what SETTLED lists off the screen, and no other warning."""
    loggers = [
        logging.getLogger(name)
        for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message, _ in SETTLED:
                warnings.filterwarnings("ignore", message=f".*{message}")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
