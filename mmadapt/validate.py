"""Checks every name and path in a composed configuration before anything is built or written.

YAML files cannot say which names an open mapping takes (modalities, fields of peft.LoraConfig, arguments of Lightning's
Trainer, optimizer groups); this file can.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mmadapt.config import CONFIG_NAME, OPEN, ConfigError, check_names, choices, closest, conf_dir, plain

STAGES = ("pretrain", "single", "multi")
STAGE_OWN = ("enabled", "epochs")  # the rest of stages.NAME overrides keys of the configuration
ROUTE = ("frozen", "trainable")
TOKENIZER_OWN = ("trainable", "modality", "pretrained")  # ours, the rest are arguments of the tokenizer


def validate(config: Any) -> dict[str, Any]:
    """The configuration as plain Python, once all of its names and paths are known to be valid.

    Raises:
        ConfigError: expected, got, the valid names, the closest one, and what to do.
    """
    with _interpolation():
        cfg = plain(config)
    check_names("configuration", cfg, top_level(), "`--cfg job` prints all of it.")
    _modalities(cfg)
    _adapters(cfg)
    _tokenizers(cfg)
    _optim(cfg)
    _trainer(cfg["trainer"], "trainer")
    _plan(cfg["checkpointing"])
    _stages(cfg)
    _callbacks(cfg)
    _data(cfg)
    _paths(cfg)
    return cfg


def top_level() -> list[str]:
    """The keys of a configuration: those of conf/train.yaml and its groups."""
    own = [str(key) for key in OmegaConf.load(conf_dir() / f"{CONFIG_NAME}.yaml") if key != "defaults"]
    return sorted({*own, *choices("")} - {"experiment", "debug", "hydra"})


def _interpolation() -> Any:
    from mmadapt.config import translated

    return translated()


def _modalities(cfg: Mapping[str, Any]) -> None:
    modalities = cfg["modalities"]
    if not isinstance(modalities, list) or not modalities or len(set(map(str, modalities))) != len(modalities):
        raise ConfigError(
            f"modalities: expected a list of at least one name, each once, got {modalities!r}; "
            "write 'modalities=[accelerometer,gyroscope]'"
        )
    check_names("stage", [cfg["stage"]], STAGES, "Experiments set it: +experiment=vivit_multi.")
    if cfg["modality"] is not None:
        check_names("modality", [cfg["modality"]], modalities, "Name one of `modalities`.")
        if cfg["stage"] != "single":
            raise ConfigError(
                f"modality: expected null unless the stage is single, got {cfg['modality']!r} with stage "
                f"{cfg['stage']}; write +experiment=vivit_single modality={cfg['modality']}, or "
                f"'modalities=[{cfg['modality']}]'"
            )
    whole("seed", cfg["seed"], 7, most=2**32 - 1)  # numpy's limit
    if cfg["threads"] is not None:
        whole("threads", cfg["threads"], 2, least=1)
    for key in ("fresh", "baselines"):
        flag(key, cfg[key])
    flag("tokenizer.trainable", cfg["tokenizer"]["trainable"])
    flag("backbone.trainable", cfg["backbone"]["trainable"])


def whole(where: str, value: Any, example: int, *, least: int = 0, most: int | None = None) -> None:
    """Raises ConfigError for anything but a whole number in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{where}: expected a whole number {limit}, got {value!r}; write {where}={example}")


def number(where: str, value: Any, example: str, *, most: float = math.inf) -> None:
    """Raises ConfigError for anything but a finite number in [0, most]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or math.isinf(value):
        limit = "of at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise ConfigError(f"{where}: expected a finite number {limit}, got {value!r}; write {where}={example}")


def flag(where: str, value: Any) -> None:
    """Raises ConfigError for anything but true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false, got {value!r}; write {where}=true")


def _adapters(cfg: Mapping[str, Any]) -> None:
    adapters, modalities = cfg["adapters"], cfg["modalities"]
    check_names(
        "adapters", adapters, ("route", "lora", "modality", "pretrained"), "Fields of LoRA: adapters.lora.r=16."
    )
    fields = lora_fields()
    check_names("adapters.lora", adapters["lora"], fields, "These are the fields of peft.LoraConfig.")
    _lora_numbers("adapters.lora", adapters["lora"])
    route(adapters["route"], "adapters.route")
    check_names("adapters.modality", adapters["modality"], modalities, "Name one of `modalities`.")
    for modality, own in adapters["modality"].items():
        where = f"adapters.modality.{modality}"
        if not isinstance(own, Mapping):
            raise ConfigError(f"{where}: expected fields below it, got {own!r}; write {where}.r=4")
        check_names(where, own, [*fields, "route"], "These are `route` and the fields of peft.LoraConfig.")
        _lora_numbers(where, own)
        if "route" in own:
            route(own["route"], f"{where}.route")
    check_names("adapters.pretrained", adapters["pretrained"], modalities, "Name one of `modalities`.")


def _lora_numbers(where: str, own: Mapping[str, Any]) -> None:
    """The fields that are typed most; PEFT itself checks the rest when the adapter is made."""
    if "r" in own:
        whole(f"{where}.r", own["r"], 8, least=1)
    if "lora_alpha" in own:
        number(f"{where}.lora_alpha", own["lora_alpha"], "16")
    if "lora_dropout" in own:
        number(f"{where}.lora_dropout", own["lora_dropout"], "0.1", most=1)


def lora_fields() -> list[str]:
    import peft

    return [field.name for field in dataclasses.fields(peft.LoraConfig) if field.init]


def route(value: Any, where: str) -> tuple[str, ...]:
    """A route as the config gives it: which of its frozen and trainable adapters a modality has, in order.

    Raises:
        ConfigError: anything but a list of these two, each at most once.
    """
    if not isinstance(value, list) or len(set(map(str, value))) != len(value):
        raise ConfigError(
            f"{where}: expected a list of frozen and trainable, each at most once, got {value!r}; "
            f"write '{where}=[frozen,trainable]', [trainable], [frozen] or []"
        )
    check_names(where, value, ROUTE, f"Write '{where}=[frozen,trainable]'.")
    return tuple(value)


def _tokenizers(cfg: Mapping[str, Any]) -> None:
    tokenizer = cfg["tokenizer"]
    fields = [key for key in tokenizer if key not in TOKENIZER_OWN and key != "_target_"]
    check_names("tokenizer.modality", tokenizer["modality"], cfg["modalities"], "Name one of `modalities`.")
    for modality, own in tokenizer["modality"].items():
        where = f"tokenizer.modality.{modality}"
        if not isinstance(own, Mapping):
            raise ConfigError(f"{where}: expected fields below it, got {own!r}; write {where}.{fields[0]}=VALUE")
        if "_target_" not in own:  # another class takes what it takes
            check_names(where, own, fields, "These are the tokenizer's fields.")
    check_names("tokenizer.pretrained", tokenizer["pretrained"], cfg["modalities"], "Name one of `modalities`.")


def _optim(cfg: Mapping[str, Any]) -> None:
    from mmadapt.optim import check_settings

    modalities = cfg["modalities"]
    groups = [f"tokenizer/{m}" for m in modalities]
    groups += [f"adapter/{name}" for m in modalities for name in (m, f"{m}_ft")]
    check_settings([*groups, "fusion", "head", "backbone"], cfg["optim"])
    _optim_numbers("optim", cfg["optim"])


def _optim_numbers(where: str, own: Mapping[str, Any]) -> None:
    examples = {"lr": "2e-3", "weight_decay": "0.05", "eps": "1e-8", "warmup": "0.1", "final": "0.01"}
    for key, value in own.items():
        if isinstance(value, Mapping):
            _optim_numbers(f"{where}.{key}", value)
        elif key in examples and value is not None:
            number(f"{where}.{key}", value, examples[key], most=1 if key in ("warmup", "final") else math.inf)


def _trainer(trainer: Mapping[str, Any], where: str) -> None:
    import lightning as L

    if trainer.get("max_epochs") is not None:
        whole(f"{where}.max_epochs", trainer["max_epochs"], 10, least=-1)  # -1: until max_steps

    valid = [name for name in inspect.signature(L.Trainer.__init__).parameters if name != "self"]
    check_names(where, trainer, [*valid, "_target_"], "These are the arguments of lightning.Trainer.")


def _plan(plan: Mapping[str, Any]) -> None:
    from mmadapt.plans import CheckpointPlan

    valid = [field.name for field in dataclasses.fields(CheckpointPlan)]
    check_names("checkpointing", plan, [*valid, "_target_"], "These are the fields of CheckpointPlan.")
    try:
        CheckpointPlan(**{name: value for name, value in plan.items() if name != "_target_"})
    except ValueError as error:
        raise ConfigError(str(error).replace("CheckpointPlan", "checkpointing")) from error


def _stages(cfg: Mapping[str, Any]) -> None:
    check_names("stages", cfg["stages"], STAGES, "Write stages.pretrain.enabled=false, for example.")
    for stage, own in cfg["stages"].items():
        if own is None:
            continue
        if not isinstance(own, Mapping):
            raise ConfigError(
                f"stages.{stage}: expected keys below it, got {own!r}; write stages.{stage}.enabled=false"
            )
        flag(f"stages.{stage}.enabled", own.get("enabled", True))
        if "epochs" in own:
            whole(f"stages.{stage}.epochs", own["epochs"], 10)
        _below(own, cfg, f"stages.{stage}", STAGE_OWN)


def _below(own: Mapping[str, Any], base: Mapping[str, Any], where: str, extra: tuple[str, ...] = ()) -> None:
    """Each key of `own` is one of `base`, down to the open mappings."""
    check_names(where, own, [*base, *extra], "A stage overrides keys of the configuration.")
    for key, value in own.items():
        path = f"{where}.{key}"
        inner = path.split(".", 2)[2]
        if key == "trainer" and isinstance(value, Mapping):
            _trainer(value, path)
        elif isinstance(value, Mapping) and isinstance(base.get(key), Mapping) and inner not in OPEN:
            _below(value, base[key], path)


def _callbacks(cfg: Mapping[str, Any]) -> None:
    for name, callback in cfg["callbacks"].items():
        if callback is not None and (not isinstance(callback, Mapping) or "_target_" not in callback):
            raise ConfigError(
                f"callbacks.{name}: expected a callback with _target_, or null for none, got {callback!r}; write "
                f"+callbacks.{name}._target_=mypackage.MyCallback"
            )


def _data(cfg: Mapping[str, Any]) -> None:
    for key in ("batch_size", "fold"):
        whole(f"data.{key}", cfg["data"].get(key, 1), 64 if key == "batch_size" else 0, least=int(key == "batch_size"))


def _paths(cfg: Mapping[str, Any]) -> None:
    """Everything that is to be read is there, and what is to be written can be."""
    for key in ("output", "run", "stages"):
        writable(f"paths.{key}", Path(cfg["paths"][key]))
    weights = cfg["backbone"].get("weights")
    if weights is not None:
        backbone_file(weights)
    for modality, path in cfg["adapters"]["pretrained"].items():
        adapter_folder(path, f"adapters.pretrained.{modality}")
    for modality, path in cfg["tokenizer"]["pretrained"].items():
        if not Path(str(path)).expanduser().is_file():
            raise ConfigError(
                f"tokenizer.pretrained.{modality}: expected a safetensors file, got {path!r}, which is none"
            )
    resume = cfg["resume"]
    if resume is not None and resume != "last" and not Path(str(resume)).expanduser().is_file():
        hint = closest(str(resume), ["last"])
        raise ConfigError(f"resume: expected last or the path of a checkpoint, got {resume!r}, which is no file.{hint}")


def writable(where: str, path: Path) -> None:
    """Raises ConfigError unless a folder can be made, or written to, at that path."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "which may not be written to" if there.is_dir() else "which is no folder"
        raise ConfigError(f"{where}: expected a folder to write to, got {path} below {there}, {what}; give another one")


def backbone_file(path: str) -> Path:
    """The safetensors file of a backbone: the path itself, or `backbone.safetensors` in a stage's folder.

    Raises:
        ConfigError: there is none.
    """
    given = Path(path).expanduser()
    file = given / "backbone.safetensors" if given.is_dir() else given
    if not file.is_file() or file.suffix != ".safetensors":
        raise ConfigError(
            f"backbone.weights: expected a .safetensors file, or a folder with backbone.safetensors, got {path!r}; "
            "`+experiment=vivit_pretrain` prints the folder that it wrote"
        )
    return file


def adapter_folder(path: str, where: str = "adapter") -> Path:
    """The PEFT folder of an adapter: the path itself, or `adapter` in a stage's folder.

    Raises:
        ConfigError: it does not hold adapter_config.json and adapter_model.safetensors.
    """
    given = Path(str(path)).expanduser()
    folder = given / "adapter" if (given / "adapter").is_dir() else given
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
            got = f"got {path!r}, which holds {there}" if folder.is_dir() else f"got {path!r}, which is no folder"
            raise ConfigError(
                f"{where}: expected a folder that PEFT wrote (adapter_config.json, adapter_model.safetensors), "
                f"{got}; give the folder of one adapter"
            )
    return folder
