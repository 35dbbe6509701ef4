import os
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mmadapt import config
from mmadapt.config import ConfigError, choices, compose, conf_dir, instantiate, prepare_overrides
from mmadapt.train import main
from mmadapt.validate import validate

FILES = sorted(path.relative_to(conf_dir()).as_posix() for path in conf_dir().rglob("*.yaml"))
GROUPS = [g for g in choices("") if g not in ("experiment", "debug", "hydra", "paths", "stages")]
RUN = "+experiment=vivit_multi"

# As a user types them.
TYPED = [
    ["adapters.lora.r=16"],
    ["adapters.lora.use_rslora=true"],
    ["adapters.lora.use_dora=true", "adapters.lora.target_modules=[attn.qkv]"],
    ["adapters.modality.gyroscope.r=4"],
    ["adapters.modality.gyroscope.route=[trainable]"],
    ["adapters.route=[]"],
    ["checkpointing=segments", "checkpointing.segment_size=4"],
    ["checkpointing=disabled"],
    ["checkpointing=every"],
    ["trainer.max_epochs=3"],
    ["trainer.accumulate_grad_batches=2"],
    ["trainer.precision=bf16-mixed"],
    ["trainer.limit_train_batches=3"],
    ["data.batch_size=64"],
    ["data.fold=4"],
    ["modalities=[accelerometer]"],
    ["seed=7"],
    ["debug=fast_dev_run"],
    ["debug=overfit"],
    ["debug=profiler"],
    ["logger=tensorboard"],
    ["logger=csv"],
    ["fusion=gated"],
    ["optim.adapter.lr=1e-3"],
    ["optim.adapter.gyroscope_ft.lr=1e-4", "optim.tokenizer.gyroscope.weight_decay=0"],
    ["tokenizer.modality.gyroscope.tubelet=[2,1,16]"],
    ["tokenizer.trainable=false"],
    ["backbone.trainable=true"],
    ["stages.pretrain.enabled=false"],
    ["stages.single.head.dropout=0.1"],
    ["callbacks=minimal"],
]

# What is wrong, and what its message must hold: expected and got always, and the closest valid choice.
WRONG = [
    (["adaptres.lora.r=16"], ["'adaptres.lora.r'", "adapters"]),
    (["adapters.lora.rank=16"], ["'rank'", "rank_pattern", "peft.LoraConfig"]),
    (["adapters.modality.gyroscop.r=4"], ["'gyroscop'", "accelerometer, gyroscope", "Did you mean gyroscope?"]),
    (["adapters.modality.gyroscope.rr=4"], ["'rr'"]),
    (["adapters.modality.gyroscope=4"], ["adapters.modality.gyroscope", "r=4"]),
    (["adapters.route=[frozen,trainabel]"], ["'trainabel'", "Did you mean trainable?"]),
    (["adapters.route=frozen"], ["adapters.route", "[frozen,trainable]"]),
    (
        ["adapters.pretrained.gyroscope=/nowhere"],
        ["adapters.pretrained.gyroscope", "'/nowhere'", "adapter_config.json"],
    ),
    (["adapters.pretrained.gyro=/nowhere"], ["'gyro'", "Did you mean gyroscope?"]),
    (["adapters.lora.r=0"], ["adapters.lora.r", "at least 1", "got 0"]),
    (["adapters.lora.r=abc"], ["adapters.lora.r", "whole number", "'abc'"]),
    (["adapters.modality.gyroscope.lora_dropout=2"], ["adapters.modality.gyroscope.lora_dropout", "from 0 to 1"]),
    (["adapters.lora.target_modules=[nope]"], ["accelerometer", "nope"]),
    (["backbone.dim=0"], ["dim=0"]),
    (["backbone.trainable=maybe"], ["backbone.trainable", "true or false"]),
    (["trainer.max_epochs=abc"], ["trainer.max_epochs", "whole number", "'abc'"]),
    (["stages.single.epochs=abc"], ["stages.single.epochs", "'abc'"]),
    (["stages.pretrain.enabled=maybe"], ["stages.pretrain.enabled", "true or false", "'maybe'"]),
    (["threads=0"], ["threads", "at least 1", "got 0"]),
    (["optim.lr=nan"], ["optim.lr", "finite", "nan"]),
    (["optim.lr=abc"], ["optim.lr", "'abc'"]),
    (["optim.adapter.gyroscope.lr=-1"], ["optim.adapter.gyroscope.lr", "-1"]),
    (["optim.warmup=3"], ["optim.warmup", "from 0 to 1"]),
    (["seed=99999999999"], ["seed", "4294967295"]),
    (["paths.output=/dev/null/x"], ["paths.output", "/dev/null", "no folder"]),
    (["paths.output="], ["paths.output", "expected a folder"]),
    (["optim.lr=inf"], ["optim.lr", "finite", "inf"]),
    (["paths.stages=/dev/null/x"], ["paths.stages", "/dev/null", "no folder"]),
    (["backbone.weights=/nowhere"], ["backbone.weights", "'/nowhere'", ".safetensors"]),
    (["checkpointing=segmnts"], ["'segmnts'", "blocks, disabled, every, segments", "Did you mean segments?"]),
    (["checkpointing=segments", "checkpointing.segment_size=0"], ["segment_size", "0"]),
    (["checkpointing.segmentsize=2"], ["'checkpointing.segmentsize'", "Did you mean checkpointing.segment_size?"]),
    (["checkpointing.segments=2", "checkpointing.segment_size=2"], ["segments", "segment_size"]),
    (["data.fold=7"], ["fold", "7", "[0, 1, 2, 3, 4]"]),
    (["data.fold=two"], ["data.fold", "'two'"]),
    (["fold=1"], ["'fold'", "Did you mean data.fold?"]),
    (["data=wach"], ["'wach'", "Did you mean watch?"]),
    (["data.batch_size=0"], ["batch_size", "0"]),
    (["data.batchsize=4"], ["Did you mean data.batch_size?"]),
    (["modalities=[accelerometer,gyro]"], ["'gyro'", "gyroscope"]),
    (["modalities=accelerometer"], ["modalities", "'accelerometer'", "modalities=[accelerometer"]),
    (["modalities=[]"], ["modalities", "at least one"]),
    (["modality=gyroscope"], ["vivit_single"]),
    (["trainer.max_epoch=3"], ["'max_epoch'", "Did you mean max_epochs?"]),
    (["optim.adapter.gyroscope.lrr=1"], ["'lrr'", "Did you mean lr?"]),
    (["optim.adapters.lr=1"], ["'optim.adapters.lr'"]),
    (["stages.pretrian.enabled=false"], ["'pretrian'", "Did you mean pretrain?"]),
    (["stages.pretrain.optm.lr=1"], ["'optm'", "Did you mean optim?"]),
    (["tokenizer.modality.gyroscope.tube=[1,1,16]"], ["'tube'", "Did you mean tubelet?"]),
    (["tokenizer.tubelet=[3,1,16]"], ["tubelet", "accelerometer"]),
    (["resume=/nowhere.ckpt"], ["resume", "/nowhere.ckpt", "last"]),
    (["seed=x"], ["seed", "'x'"]),
    (["+something=1"], ["'something'"]),
    (["fusion._target_=os.system"], ["'os.system'", "allow="]),
    (["fusion._target_=mmadapt.config.os.system"], ["'mmadapt.config.os.system'"]),
    (["fusion._target_=mmadapt.fusion.Concat"], ["'mmadapt.fusion.Concat'"]),
    (["head.dropuot=0.1"], ["Did you mean head.dropout?"]),
    (["modalities=[accelerometer"], ["modalities"]),
    (["callbacks.ema.decay=2"], ["decay", "2"]),
    (["stages.single.enabled=false"], ["stages.single.enabled=false", "adapters.pretrained.accelerometer"]),
]


def test_the_conf_folder_is_the_checkouts() -> None:
    assert conf_dir() == Path(config.__file__).parents[1] / "conf"


@pytest.mark.parametrize("file", FILES)
def test_every_yaml_opens_with_what_it_runs_and_a_command_that_composes(file: str) -> None:
    lines = [line for line in (conf_dir() / file).read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# Runs: ")
    command = next(line for line in lines if line.startswith("# Command: "))
    program, *args = shlex.split(command.removeprefix("# Command: python -m "))
    assert program == "mmadapt.train"
    cfg = compose([a.replace("PATH.safetensors", "null").replace("PATH", "null") for a in args])
    assert set(cfg) >= {"data", "trainer"}


@pytest.mark.parametrize("choice", [f"{g}={c}" for g in GROUPS for c in choices(g) if g != "logger"])
@pytest.mark.usefixtures("quiet")
def test_every_config_instantiates(choice: str, tmp_path: Path, quiet: None) -> None:
    cfg = validate(compose([choice, f"paths.output={tmp_path}"]))
    name = choice.split("=")[0]
    extra = {
        "tokenizer": {"dim": 8, "clip": [3, 16, 1, 16]},
        "fusion": {"modalities": ["a", "b"], "dim": 8},
        "head": {"in_dim": 8, "num_classes": 3},
        "trainer": {"logger": False},
    }.get(name, {})
    ours = ("trainable", "modality", "pretrained", "weights")
    node = cfg[name]
    if name == "callbacks":
        assert all(instantiate(callback) for callback in node.values() if callback)
    elif name == "adapters":
        from mmadapt.build import build_lora

        assert build_lora(cfg, "gyroscope").r == node["lora"]["r"]
    elif name == "optim":
        from mmadapt.optim import adamw
        from tests.toys import toy_model

        assert adamw(toy_model().parameter_groups(), node)
    else:
        assert instantiate({k: v for k, v in node.items() if k not in ours}, **extra) is not None


@pytest.mark.parametrize("experiment", choices("experiment"))
@pytest.mark.parametrize("debug", [None, *choices("debug")])
def test_every_experiment_composes_with_every_debug(experiment: str, debug: str | None) -> None:
    cfg = validate(compose([f"+experiment={experiment}", *([f"debug={debug}"] if debug else [])]))
    assert cfg["name"] == experiment
    own = cfg["stages"][cfg["stage"]]["epochs"]
    assert cfg["stage"] == experiment.removeprefix("vivit_")
    assert cfg["trainer"]["max_epochs"] == {"overfit": 50, "profiler": 2}.get(str(debug), own)


@pytest.mark.parametrize("overrides", TYPED, ids=" ".join)
def test_overrides_work_as_typed(overrides: list[str]) -> None:
    cfg = validate(compose([RUN, *overrides]))
    for override in overrides:
        key, value = override.split("=", 1)
        if "." in key:
            node = OmegaConf.create(cfg)
            assert OmegaConf.select(node, key) == OmegaConf.create({"x": OmegaConf.create(f"x: {value}")["x"]})["x"]


def test_the_values_arrive() -> None:
    cfg = validate(compose([RUN, "adapters.lora.r=16", "adapters.modality.gyroscope.r=4", "seed=7"]))
    from mmadapt.build import build_lora

    assert build_lora(cfg, "accelerometer").r == 16
    assert build_lora(cfg, "gyroscope").r == 4
    assert cfg["data"]["seed"] == 7


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("adapters.lora.use_rslora=true", "++adapters.lora.use_rslora=true"),
        ("+adapters.lora.use_rslora=true", "+adapters.lora.use_rslora=true"),
        ("++trainer.max_time=1", "++trainer.max_time=1"),
        ("data.fold=1", "data.fold=1"),
        ("resume=runs/epoch=3, a.ckpt", "resume='runs/epoch=3, a.ckpt'"),
        ("resume='runs/a b.ckpt'", "resume='runs/a b.ckpt'"),
        ("adapters.pretrained.gyroscope=/a b/it's", "++adapters.pretrained.gyroscope='/a b/it\\'s'"),
        ("~callbacks.ema", "~callbacks.ema"),
        ("-m", "-m"),
        ("checkpointing=disabled", "checkpointing=disabled"),
    ],
)
def test_overrides_are_prepared(given: str, expected: str) -> None:
    assert prepare_overrides([given]) == [expected]


def test_paths_with_special_characters_arrive() -> None:
    for path in ("a b/epoch=3.ckpt", "it's", "x,[y]{z}", "back\\slash"):
        assert compose([f"resume={path}"]).resume == path


def test_an_experiment_without_its_plus_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=vivit_multi"]) == 1
    assert "write +experiment=vivit_multi" in capsys.readouterr().err
    assert main(["+experiment=vivit_mutli"]) == 1
    assert "Did you mean vivit_multi?" in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "parts"), WRONG, ids=lambda value: " ".join(value)[:60])
def test_what_is_wrong_is_one_message(
    overrides: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main([RUN, f"paths.output={output}", "baselines=false", *overrides]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mmadapt: ")
    assert "Traceback" not in said.err
    assert len(said.err.strip().splitlines()) == 1, said.err
    for part in parts:
        assert part in said.err
    assert not list(output.glob("**/*.safetensors"))
    assert not list(output.glob("stages/*"))


def test_the_traceback_is_there_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError):
        main([RUN, f"paths.output={tmp_path}", "data.fold=7"])


def test_a_user_extends_the_packages_that_may_be_instantiated() -> None:
    with pytest.raises(ConfigError, match=r"got 'collections.Counter'.*allow="):
        instantiate({"_target_": "collections.Counter"})
    assert instantiate({"_target_": "collections.Counter"}, allow=["collections"]) == {}
    with pytest.raises(ConfigError, match=r"torch.load"):
        instantiate({"_target_": "torch.load", "f": "x"})
    with pytest.raises(ConfigError, match=r"subprocess.run"):  # nested ones too
        instantiate({"_target_": "torch.nn.Identity", "x": [{"_target_": "subprocess.run", "args": "x"}]})


def test_instantiated_objects_get_plain_containers() -> None:
    cfg = OmegaConf.create({"_target_": "collections.OrderedDict", "a": {"b": [1]}})
    made = instantiate(cfg, allow=["collections"])
    assert type(made["a"]) is dict
    assert type(made["a"]["b"]) is list


def test_a_refused_value_names_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"num_heads=5"):
        instantiate({"_target_": "mmadapt.backbone.ViViT", "dim": 16, "num_heads": 5})
    with pytest.raises(ConfigError, match=r"ViViT.*depht"):
        instantiate({"_target_": "mmadapt.backbone.ViViT", "depht": 5})


def test_composing_leaves_no_global_state() -> None:
    from hydra.core.global_hydra import GlobalHydra

    first, second = compose([RUN]), compose([RUN])
    assert not GlobalHydra.instance().is_initialized()
    assert first.paths.run != second.paths.run


def test_config_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose([RUN]).name == "vivit_multi"
    assert not os.listdir(tmp_path)


def test_a_missing_conf_folder_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "__file__", str(tmp_path / "mmadapt" / "config.py"))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "mmadapt" / "conf"))):
        conf_dir()
