"""The three stages of an experiment, each runnable alone, each skipped when its result lies on disk.

    0 pretrain            backbone and tokenizers, all modalities jointly, no adapter        -> backbone, tokenizers
    1 single-<modality>   frozen backbone, LoRA adapter <modality>, its tokenizer and head   -> adapter, tokenizer
    2 multi               frozen <modality> and trainable <modality>_ft, fusion, head        -> all of them

A stage's hash covers its own configuration, the data, the seed and the hashes of what it starts from, so all hashes are
known before anything runs. Each stage seeds itself and builds its backbone first: a random backbone is the same in all.
"""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mmadapt import build
from mmadapt.adapters import AdapterBank
from mmadapt.backbone import Backbone
from mmadapt.baselines import classical_baselines
from mmadapt.callbacks import ResumePoint, StepTimer
from mmadapt.config import ConfigError, instantiate
from mmadapt.data.module import MultimodalDataModule
from mmadapt.fusion import ConcatFusion
from mmadapt.memory import compare_plans, count_parameters
from mmadapt.model import MultimodalModel
from mmadapt.module import MultiAdapterModule
from mmadapt.optim import group_settings
from mmadapt.plans import CheckpointPlan
from mmadapt.results import StageResult, file_hash, find, stage_hash, store, write_stage
from mmadapt.resume import checkpoint_for, checkpoint_identity
from mmadapt.validate import STAGE_OWN, adapter_folder, backbone_file, validate

__all__ = ["Stages"]

# Arguments of the trainer and callbacks that change no result, and so no hash.
UNHASHED_TRAINER = (
    "enable_progress_bar", "enable_model_summary", "log_every_n_steps", "profiler", "default_root_dir", "barebones",
    "num_sanity_val_steps",
)  # fmt: skip
UNHASHED_CALLBACKS = ("mmadapt.callbacks.ProgressBar", "mmadapt.callbacks.StepTimer", "mmadapt.callbacks.Interrupt")
UNHASHED_DATA = ("num_workers", "path", "modalities")


class Stages:
    """Runs the stages of a configuration.

    Args:
        config: as `mmadapt.config.compose` gives it; checked here.

    `run` does what the command line does. `pretrain`, `single` and `multi` run one stage each, with the ones it starts
    from, and give a StageResult; those of other configurations are shared through `paths.stages`.

    Raises:
        ConfigError: whatever is wrong with the configuration, before anything is built or written.
        Interrupted: Ctrl-C during a fit.
    """

    def __init__(self, config: Any) -> None:
        self.cfg = validate(config)
        self.run_folder = Path(self.cfg["paths"]["run"])
        is_trial = bool(self.cfg["trainer"].get("fast_dev_run"))
        self.root = self.run_folder / "stages" if is_trial else Path(self.cfg["paths"]["stages"])
        self.modalities: list[str] = list(self.cfg["modalities"])
        self._done: dict[str, StageResult] = {}
        self._check_routes()
        self._check_resume()

    def run(self) -> dict[str, StageResult]:
        """All stages that the configuration asks for, in order, by name."""
        self.datamodule.prepare_data()  # what is missing of the data is said before a result is looked for
        self.check()
        for name in self.names:
            self._stage(name)
        return dict(self._done)

    def pretrain(self) -> StageResult:
        return self._stage("pretrain")

    def single(self, modality: str) -> StageResult:
        return self._stage(f"single-{modality}")

    def multi(self) -> StageResult:
        return self._stage("multi")

    def baselines(self) -> dict[str, dict[str, float]]:
        """Test accuracy of the data set's classical baselines, by method and modality; kept on disk as a stage is."""
        if not self.cfg["baselines"]:
            return {}
        self.datamodule.prepare_data()
        name, key = "baselines", self._key("pretrain")
        key_hash = stage_hash({"stage": name, **{k: key[k] for k in ("modalities", "data", "fold", "seed")}})
        result = None if self.cfg["fresh"] else find(self.root, name, key_hash)
        if result is None:
            methods = classical_baselines(self.datamodule, seed=self.cfg["seed"])
            result = store(self.root, name, key_hash, lambda folder: None, {}, {"methods": methods})
        return result.details["methods"]

    def check(self) -> None:
        """Builds everything that the stages will need, so that what is wrong with stage 2 is not said after stage 1.

        Raises:
            ConfigError: a value that a model, PEFT, a callback or the trainer refuses.
        """
        for name in self.names:
            c = self.config_of(name)
            with build.settled(), torch.random.fork_rng(devices=[]):
                model = self._model(c, name, build.build_data(c, self._modalities_of(name)), is_trial=True)
            model.plan.split(len(model.backbone.blocks))
            build.build_trainer(c, build.build_callbacks(c, self.run_folder, name), self.run_folder, name)

    @cached_property
    def names(self) -> list[str]:
        """The stages that `run` runs: the run's own and those that it starts from."""
        own = self.cfg["stage"]
        names = ["pretrain"] if own == "pretrain" or self._pretrains else []
        if own == "single":
            names += [f"single-{m}" for m in self.modalities if self.cfg["modality"] in (None, m)]
        elif own == "multi":
            names += [f"single-{m}" for m in self.modalities if self._needs_single(m)]
            names.append("multi")
        return names

    @cached_property
    def datamodule(self) -> MultimodalDataModule:
        return build.build_data(self.cfg, self.modalities)

    def config_of(self, name: str) -> dict[str, Any]:
        """The configuration under which a stage runs: its part of `stages` over the rest."""
        stage = name.partition("-")[0]
        over = self.cfg["stages"].get(stage) or {}
        own = stage == self.cfg["stage"]  # then the trainer's epochs are this stage's
        epochs = {} if own or "epochs" not in over else {"trainer": {"max_epochs": over["epochs"]}}
        merged = build.merge(self.cfg, epochs)
        return build.merge(merged, {key: value for key, value in over.items() if key not in STAGE_OWN})

    def hash_of(self, name: str) -> str:
        """The hash of a stage, known before it runs."""
        return stage_hash(self._key(name))

    @property
    def _pretrains(self) -> bool:
        return self._enabled("pretrain") and self.cfg["backbone"]["weights"] is None

    def _enabled(self, stage: str) -> bool:
        return bool((self.cfg["stages"].get(stage) or {}).get("enabled", True))

    def _needs_single(self, modality: str) -> bool:
        return "frozen" in self._route(modality) and modality not in self.cfg["adapters"]["pretrained"]

    def _route(self, modality: str) -> tuple[str, ...]:
        return build.modality_route(self.cfg, modality)

    def _check_routes(self) -> None:
        if self.cfg["stage"] == "multi" and not self._enabled("single"):
            for modality in self.modalities:
                if self._needs_single(modality):
                    raise ConfigError(
                        f"adapters: modality {modality!r} has a frozen adapter in its route, and "
                        f"stages.single.enabled=false; give adapters.pretrained.{modality}=PATH, or "
                        f"adapters.modality.{modality}.route=[trainable]"
                    )

    def _check_resume(self) -> None:
        resume = self.cfg["resume"]
        if resume in (None, "last"):
            return
        identity = checkpoint_identity(Path(resume))
        hashes = {name: self.hash_of(name) for name in self.names}
        if identity.get("hash") not in hashes.values():
            raise ConfigError(
                f"resume: expected a checkpoint of one of this run's stages [{', '.join(hashes)}], got one of stage "
                f"{identity.get('stage')!r} with another configuration; give the overrides that it was made with"
            )

    def _key(self, name: str) -> dict[str, Any]:
        """Everything that a stage's result depends on."""
        c, modalities = self.config_of(name), self._modalities_of(name)
        tokenizer = c["tokenizer"]
        key: dict[str, Any] = {
            "stage": name,
            "seed": c["seed"],
            "modalities": modalities,
            "data": {**build._without(c["data"], *UNHASHED_DATA), "sha256": self.datamodule.sha256},
            "fold": self.datamodule.fold,
            "backbone": build._without(c["backbone"], "trainable", "weights"),
            "tokenizer": {
                **build._without(tokenizer, "modality", "pretrained"),
                "modality": {m: tokenizer["modality"].get(m) for m in modalities},
                "pretrained": {m: file_hash(Path(p)) for m, p in tokenizer["pretrained"].items() if m in modalities},
            },
            "head": c["head"],
            "module": c["module"],
            "optim": self._optim_key(c, name),
            "trainer": build._without(c["trainer"], *UNHASHED_TRAINER),
            "callbacks": {k: v for k, v in c["callbacks"].items() if v and v["_target_"] not in UNHASHED_CALLBACKS},
            "start": self._start_key(name),
        }
        if name == "multi":
            key["backbone_trainable"] = c["backbone"]["trainable"]
            key["checkpointing"] = c["checkpointing"]  # its cost is part of the result
        if name != "pretrain":
            key["adapters"] = {m: build.lora_fields_of(c, m) for m in modalities}
        if name in ("multi", "pretrain"):
            key["fusion"] = c["fusion"]
        if name == "multi":
            key["routes"] = {m: self._route(m) for m in modalities}
        return key

    def _start_key(self, name: str) -> dict[str, Any]:
        """Hashes of what a stage starts from: other stages, or files."""
        weights = self.cfg["backbone"]["weights"]
        start: dict[str, Any] = {}
        if weights is not None:
            start["backbone"] = file_hash(backbone_file(weights))
            start["tokenizers"] = {m: file_hash(p) for m in self.modalities if (p := self._weights_tokenizer(m))}
        elif name != "pretrain" and self._pretrains:
            start["pretrain"] = self.hash_of("pretrain")
        if name == "multi":
            for m in self.modalities:
                if "frozen" not in self._route(m):
                    continue
                if (path := self.cfg["adapters"]["pretrained"].get(m)) is not None:
                    folder = adapter_folder(path)
                    files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
                    start[m] = file_hash(*files, *filter(None, [_beside(folder)]))
                else:
                    start[m] = self.hash_of(f"single-{m}")
        return start

    def _optim_key(self, c: Mapping[str, Any], name: str) -> dict[str, Any]:
        optim, modalities = c["optim"], self._modalities_of(name)
        groups = [f"tokenizer/{m}" for m in modalities] + ["fusion", "head"]
        if name == "pretrain" or (name == "multi" and c["backbone"]["trainable"]):
            groups.append("backbone")
        if name != "pretrain":
            groups += [f"adapter/{m}_ft" if name == "multi" else f"adapter/{m}" for m in modalities]
        common = build._without(optim, "adapter", "tokenizer", "fusion", "head", "backbone")
        return {**common, "groups": {group: group_settings(group, optim) for group in groups}}

    def _modalities_of(self, name: str) -> list[str]:
        stage, _, modality = name.partition("-")
        if stage != "single":
            return self.modalities
        if modality not in self.modalities:
            raise ConfigError(f"stage single: expected one of the modalities {self.modalities}, got {modality!r}")
        return [modality]

    def _stage(self, name: str) -> StageResult:
        if name in self._done:
            return self._done[name]
        key_hash = self.hash_of(name)
        result = None if self.cfg["fresh"] else find(self.root, name, key_hash)
        if result is None:
            with build.settled():
                result = self._train(name, key_hash)
        self._done[name] = result
        return result

    def _train(self, name: str, key_hash: str) -> StageResult:
        c = self.config_of(name)
        datamodule = build.build_data(c, self._modalities_of(name))
        if name != "pretrain" and self._pretrains:
            self._stage("pretrain")  # before this one is seeded
        for m in self.modalities if name == "multi" else ():
            if self._needs_single(m):
                self._stage(f"single-{m}")
        L.seed_everything(c["seed"], workers=True, verbose=False)
        model = self._model(c, name, datamodule)
        module = instantiate(c["module"], model, num_classes=datamodule.num_classes, optim=c["optim"], allow=c["allow"])
        metrics, details = self._fit(c, name, key_hash, datamodule, module)
        details["parameters"] = count_parameters(module.model)
        details["costs"] = _costs(module.model, datamodule)
        details["modalities"], details["classes"] = list(datamodule.modalities), list(datamodule.class_names)
        return store(
            self.root, name, key_hash, lambda folder: write_stage(name, module.model, folder), metrics, details
        )

    def _model(
        self, c: Mapping[str, Any], name: str, datamodule: MultimodalDataModule, *, is_trial: bool = False
    ) -> MultimodalModel:
        """The stage's model, with what it starts from loaded; a trial leaves out what stages have yet to write."""
        backbone = build.build_backbone(c)
        if not isinstance(backbone, Backbone):
            raise ConfigError(f"backbone: expected a mmadapt.Backbone, got {type(backbone).__name__}; subclass it")
        self._load_backbone(backbone, name, is_trial)
        is_frozen = not (name == "pretrain" or (name == "multi" and c["backbone"]["trainable"]))
        bank = AdapterBank(backbone, datamodule.modalities, freeze=is_frozen)
        for m in datamodule.modalities if name != "pretrain" else ():
            if name != "multi":
                build.add_adapter(bank, c, m, m)
                continue
            for kind in self._route(m):
                if kind == "frozen" and is_trial and self._needs_single(m):
                    build.add_adapter(bank, c, m, m)
                elif kind == "frozen":
                    self._load_frozen(bank, m)
                else:
                    build.add_adapter(bank, c, f"{m}_ft", m)
        tokenizers = build.build_tokenizers(c, datamodule, backbone.dim)
        for m, tokenizer in tokenizers.items():
            if (path := None if is_trial else self._tokenizer_start(name, m)) is not None:
                build.load_exact(tokenizer, path, f"tokenizer of modality {m!r}")
        if name.startswith("single"):
            fusion: Any = ConcatFusion(datamodule.modalities, backbone.dim)  # of one: nothing to choose
        else:
            fusion = build.build_fusion(c, datamodule.modalities, backbone.dim)
        head = build.build_head(c, fusion.out_dim, datamodule.num_classes)
        return MultimodalModel(backbone, tokenizers, bank, fusion, head, build.build_plan(c))

    def _load_backbone(self, backbone: Backbone, name: str, is_trial: bool) -> None:
        weights = self.cfg["backbone"]["weights"]
        if weights is not None:
            build.load_exact(backbone, backbone_file(weights), "backbone.weights")
        elif name != "pretrain" and self._pretrains and not is_trial:
            build.load_exact(backbone, self._done["pretrain"].folder / "backbone.safetensors", "backbone")

    def _load_frozen(self, bank: AdapterBank, modality: str) -> None:
        folder = self._frozen_adapter(modality)
        try:
            bank.load(modality, folder, modality=modality, trainable=False)
        except ValueError as e:
            key = "adapters.pretrained." if modality in self.cfg["adapters"]["pretrained"] else "stage 1, "
            raise ConfigError(f"{key}{modality}: {e}") from e

    def _frozen_adapter(self, modality: str) -> Path:
        given = self.cfg["adapters"]["pretrained"].get(modality)
        return adapter_folder(given) if given is not None else self._done[f"single-{modality}"].folder / "adapter"

    def _tokenizer_start(self, name: str, modality: str) -> Path | None:
        """The file that a tokenizer starts from: that of the stage before, since adapters expect its tokens."""
        if (given := self.cfg["tokenizer"]["pretrained"].get(modality)) is not None:
            return Path(given).expanduser()
        if name == "pretrain":
            return None
        if name == "multi" and "frozen" in self._route(modality):
            beside = _beside(self._frozen_adapter(modality))
            if beside is not None:
                return beside
        if self._pretrains:
            return self._done["pretrain"].folder / "tokenizer" / f"{modality}.safetensors"
        return self._weights_tokenizer(modality)

    def _weights_tokenizer(self, modality: str) -> Path | None:
        weights = self.cfg["backbone"]["weights"]
        if weights is None:
            return None
        path = backbone_file(weights).parent / "tokenizer" / f"{modality}.safetensors"
        return path if path.is_file() else None

    def _fit(
        self,
        c: Mapping[str, Any],
        name: str,
        key_hash: str,
        datamodule: MultimodalDataModule,
        module: MultiAdapterModule,
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Trains, goes back to the epoch that the validation split chose, and evaluates it on validation and test."""
        folder = self.run_folder / "checkpoints" / f"{name}-{key_hash}"
        resumed = checkpoint_for(self.cfg, name, key_hash)
        if resumed is None and self.cfg["resume"] == "last":
            print(f"resume=last: no checkpoint of {name} with these overrides, so it starts afresh", file=sys.stderr)
        if resumed is not None:
            print(f"resuming {name} from {resumed}", file=sys.stderr)
            folder = resumed.parent  # the best checkpoint so far lies there
        title = f"{self.names.index(name) + 1}/{len(self.names)} {name}" if name in self.names else name
        callbacks = build.build_callbacks(c, folder, f"{title:<{max(map(len, self.names), default=0) + 4}}")
        callbacks.append(ResumePoint({"stage": name, "hash": key_hash}))
        trainer = build.build_trainer(c, callbacks, self.run_folder, name)
        start = time.perf_counter()
        try:
            ckpt: dict[str, Any] = {"ckpt_path": str(resumed), "weights_only": True} if resumed else {}
            trainer.fit(module, datamodule=datamodule, **ckpt)
            seconds = time.perf_counter() - start
            epoch = _load_best(trainer, module)
            metrics = dict(trainer.validate(module, datamodule=datamodule, verbose=False)[0])
            metrics |= trainer.test(module, datamodule=datamodule, verbose=False)[0]
        except SystemExit as e:  # Lightning's answer to a KeyboardInterrupt
            raise KeyboardInterrupt from e
        lost = [key for key in ("val/loss", "test/loss") if not math.isfinite(metrics.get(key, 0.0))]
        if lost:
            raise ValueError(
                f"stage {name}: expected finite losses after training, got {lost[0]}={metrics[lost[0]]}: it "
                "diverged, and nothing of it is kept; give a smaller optim.lr, or trainer.gradient_clip_val"
            )
        timer = next((cb for cb in callbacks if isinstance(cb, StepTimer)), None)
        details = {
            "epoch": epoch,
            "steps": trainer.global_step,
            "seconds": seconds,
            "step_seconds": timer.median if timer else None,
            "confusion": module.confusion,
        }
        return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}, details


def _load_best(trainer: L.Trainer, module: MultiAdapterModule) -> int:
    """Loads the weights of the best checkpoint; without one the last step's stay. Returns the epoch."""
    callback = trainer.checkpoint_callback
    path = callback.best_model_path if isinstance(callback, ModelCheckpoint) else ""
    if not path or not Path(path).is_file():
        return trainer.current_epoch
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"])
    return int(checkpoint["epoch"])


def _costs(model: MultimodalModel, datamodule: MultimodalDataModule) -> dict[str, Any]:
    """Time and held bytes of one step of a training batch, with the stage's plan (or every block) and with none."""
    batch = next(iter(datamodule.train_dataloader())).to(next(model.parameters()).device)
    with_plan = model.plan if model.plan.enabled else CheckpointPlan()
    plans = {"with": with_plan, "without": CheckpointPlan(enabled=False)}
    return {name: asdict(cost) for name, cost in compare_plans(model, batch, plans, repeats=3).items()}


def _beside(adapter: Path) -> Path | None:
    """The tokenizer of the stage that wrote an adapter: the adapter was trained on its tokens."""
    path = adapter.parent / "tokenizer.safetensors"
    return path if adapter.name == "adapter" and path.is_file() else None
