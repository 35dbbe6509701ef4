import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from mmadapt.backbone import ViViT
from mmadapt.config import ConfigError, compose
from mmadapt.stages import Stages
from mmadapt.train import main, train

pytestmark = pytest.mark.usefixtures("quiet")
RUN = "+experiment=vivit_multi"
Tiny = Callable[..., list[str]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished stages of the tiny run, made once; tests copy them."""
    from mmadapt.build import settled
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("shared") / "outputs"
    with settled():
        Stages(compose([*TINY, f"paths.output={folder}", RUN])).run()
    return folder


@pytest.fixture
def done(shared: Path, tmp_path: Path) -> Path:
    """The finished stages where `tiny` writes."""
    shutil.copytree(shared, tmp_path / "outputs")
    return tmp_path / "outputs"


def folder_of(output: Path, name: str) -> Path:
    (found,) = (output / "stages").glob(f"{name}-[0-9a-f]*")
    return found


def ran(result: dict[str, Any]) -> dict[str, bool]:
    return {name: not stage["skipped"] for name, stage in result["stages"].items()}


ALL = ("pretrain", "single-accelerometer", "single-gyroscope", "multi")


def test_each_stage_leaves_what_the_next_ones_and_others_need(done: Path) -> None:
    pretrain, single, multi = (folder_of(done, name) for name in ("pretrain", "single-gyroscope", "multi"))
    backbone = ViViT(dim=16, depth=2, num_heads=2)
    backbone.load_state_dict(load_file(pretrain / "backbone.safetensors"))
    assert (pretrain / "tokenizer" / "gyroscope.safetensors").is_file()
    for adapter in (single / "adapter", multi / "adapters" / "gyroscope", multi / "adapters" / "gyroscope_ft"):
        PeftModel.from_pretrained(ViViT(dim=16, depth=2, num_heads=2), str(adapter))  # PEFT alone reads it
    frozen = [
        load_file(f / "adapter_model.safetensors") for f in (single / "adapter", multi / "adapters" / "gyroscope")
    ]
    assert frozen[0].keys() == frozen[1].keys()
    assert all(torch.equal(frozen[0][key], frozen[1][key]) for key in frozen[0])
    assert (multi / "head.safetensors").is_file()
    metrics = json.loads((multi / "metrics.json").read_text())
    assert {"test/accuracy", "test/accuracy/gyroscope", "test/f1", "val/accuracy"} <= set(metrics["metrics"])
    assert metrics["parameters"]["adapter gyroscope"]["trainable"] == 0
    assert metrics["parameters"]["adapter gyroscope_ft"]["trainable"] > 0
    assert metrics["parameters"]["backbone"]["trainable"] == 0
    assert metrics["costs"]["with"]["held_bytes"] < metrics["costs"]["without"]["held_bytes"]
    assert not list(done.glob("**/*.bin"))
    assert not list(done.glob("**/*.pt"))


def test_a_second_run_finds_every_result(done: Path, tiny: Tiny) -> None:
    result = train(compose(tiny(RUN)), show=False)
    assert ran(result) == dict.fromkeys(ALL, False)
    assert json.loads(Path(result["paths"]["results"]).read_text()) == json.loads(json.dumps(result))


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("seed=1", ALL),
        ("data.fold=1", ALL),
        ("backbone.depth=1", ALL),
        ("stages.pretrain.epochs=2", ALL),
        ("adapters.lora.r=3", ALL[1:]),
        ("adapters.modality.gyroscope.r=3", ALL[2:]),
        ("optim.adapter.gyroscope_ft.lr=1e-3", ALL[3:]),
        ("trainer.max_epochs=2", ALL[3:]),
        ("fusion=mean", ("multi",)),
        ("checkpointing=disabled", ("multi",)),
        ("trainer.log_every_n_steps=1", ()),
        ("data.num_workers=1", ()),
    ],
)
def test_hashes_change_with_what_they_depend_on(tiny: Tiny, override: str, again: tuple[str, ...]) -> None:
    before, after = Stages(compose(tiny(RUN))), Stages(compose(tiny(RUN, override)))
    assert {name for name in ALL if before.hash_of(name) != after.hash_of(name)} == set(again)


def test_a_torn_result_is_ignored_and_made_again(done: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    (folder_of(done, "multi") / "head.safetensors").write_bytes(b"half")
    (folder_of(done, "single-gyroscope") / "metrics.json").write_text('{"metr')
    result = train(compose(tiny(RUN)), show=False)
    assert ran(result) == dict(zip(ALL, (False, False, True, True), strict=True))
    said = capsys.readouterr().err
    assert said.count("is torn") == 2
    assert ran(train(compose(tiny(RUN)), show=False)) == dict.fromkeys(ALL, False)


def test_fresh_runs_all_again(done: Path, tiny: Tiny) -> None:
    before = folder_of(done, "multi").stat().st_ino
    assert all(ran(train(compose(tiny(RUN, "fresh=true")), show=False)).values())
    assert folder_of(done, "multi").stat().st_ino != before


def test_results_are_reproducible(done: Path, tiny: Tiny) -> None:
    first = load_file(folder_of(done, "multi") / "head.safetensors")
    train(compose(tiny(RUN, "fresh=true")), show=False)
    second = load_file(folder_of(done, "multi") / "head.safetensors")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_given_weights_and_adapters_take_the_place_of_stages(done: Path, tiny: Tiny) -> None:
    given = [
        f"backbone.weights={folder_of(done, 'pretrain')}",
        f"adapters.pretrained.accelerometer={folder_of(done, 'single-accelerometer') / 'adapter'}",
        f"adapters.pretrained.gyroscope={folder_of(done, 'single-gyroscope')}",
    ]
    stages = Stages(compose(tiny(RUN, *given)))
    assert stages.names == ["multi"]
    result = stages.run()["multi"]
    # the same start as with the stages, so the same result
    assert result.metrics == Stages(compose(tiny(RUN))).multi().metrics


@pytest.mark.parametrize(
    ("route", "adapters", "stages"),
    [
        ("[frozen,trainable]", ("accelerometer", "accelerometer_ft", "gyroscope", "gyroscope_ft"), ALL),
        ("[trainable]", ("accelerometer", "accelerometer_ft", "gyroscope_ft"), (ALL[0], ALL[1], ALL[3])),
        ("[frozen]", ("accelerometer", "accelerometer_ft", "gyroscope"), ALL),
        ("[]", ("accelerometer", "accelerometer_ft"), (ALL[0], ALL[1], ALL[3])),
    ],
)
def test_a_modality_has_both_adapters_one_or_none(
    done: Path, tiny: Tiny, route: str, adapters: tuple[str, ...], stages: tuple[str, ...]
) -> None:
    result = Stages(compose(tiny(RUN, f"adapters.modality.gyroscope.route={route}"))).run()
    assert tuple(result) == stages
    found = {path.name for path in (result["multi"].folder / "adapters").iterdir()}
    assert found == set(adapters)
    assert 0 <= result["multi"].metrics["test/accuracy"] <= 1


@pytest.mark.parametrize(
    ("overrides", "trained", "names"),
    [
        (["stages.pretrain.enabled=false"], {"backbone": False, "tokenizer gyroscope": True}, ALL[1:]),
        (["tokenizer.trainable=false"], {"tokenizer gyroscope": False, "head": True}, ALL),
        (["adapters.route=[]"], {"head": True}, (ALL[0], ALL[3])),
        (
            ["adapters.route=[]", "backbone.trainable=true", "stages.pretrain.enabled=false"],
            {"backbone": True, "tokenizer gyroscope": True},
            ALL[3:],
        ),
        (
            ["backbone.trainable=true"],
            {"backbone": True, "adapter gyroscope_ft": True, "adapter gyroscope": False},
            ALL,
        ),
    ],
    ids=["random backbone", "frozen tokenizers", "no adapters", "end to end", "everything"],
)
def test_arms_of_a_comparison(
    done: Path, tiny: Tiny, overrides: list[str], trained: dict[str, bool], names: tuple[str, ...]
) -> None:
    stages = Stages(compose(tiny(RUN, *overrides)))
    assert tuple(stages.names) == names
    result = stages.run()
    counts = result["multi"].details["parameters"]
    assert {part: counts[part]["trainable"] > 0 for part in trained} == trained
    if "pretrain" in names:
        assert result["pretrain"].skipped  # arms share the pretraining


def test_one_stage_alone(done: Path, tiny: Tiny) -> None:
    shutil.rmtree(folder_of(done, "single-gyroscope"))
    result = train(compose(tiny("+experiment=vivit_single", "modality=gyroscope", "trainer.max_epochs=1")), show=False)
    assert ran(result) == {"pretrain": False, "single-gyroscope": True}
    assert set(result["accuracy"]["one modality's own adapter (stage 1)"]) == {"gyroscope"}
    result = train(compose(tiny("+experiment=vivit_pretrain")), show=False)
    assert ran(result) == {"pretrain": False}


def test_one_modality_alone(tiny: Tiny) -> None:
    stages = Stages(compose(tiny(RUN, "modalities=[accelerometer]")))
    assert stages.names == ["pretrain", "single-accelerometer", "multi"]
    assert "test/accuracy/gyroscope" not in stages.run()["multi"].metrics


def test_a_foreign_adapter_is_refused_before_training(
    done: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = folder_of(done, "single-gyroscope") / "adapter"
    args = tiny(RUN, "backbone.depth=3", f"adapters.pretrained.gyroscope={adapter}")
    before = sorted(done.glob("stages/*"))
    assert main(args) == 1
    said = capsys.readouterr().err
    assert "missing" in said
    assert "Traceback" not in said
    assert sorted(done.glob("stages/*")) == before
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"target_modules": ["q_proj"]}
    other = done / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text(json.dumps(config))
    shutil.copy(adapter / "adapter_model.safetensors", other)
    runs = sorted(done.glob("runs/*/*"))
    assert main(tiny(RUN, f"adapters.pretrained.gyroscope={other}")) == 1
    said = capsys.readouterr().err
    for part in ("adapters.pretrained.gyroscope", str(other), "['fc1', 'fc2', 'proj', 'qkv']", "q_proj"):
        assert part in said
    assert sorted(done.glob("runs/*/*")) == runs  # no folder of a refused run


def test_foreign_weights_are_refused(done: Path, tiny: Tiny) -> None:
    weights = folder_of(done, "pretrain") / "backbone.safetensors"
    with pytest.raises(ConfigError, match=r"backbone.weights.*missing.*blocks.2"):
        Stages(compose(tiny(RUN, "backbone.depth=3", f"backbone.weights={weights}"))).run()


def test_a_trial_run_leaves_no_result_that_others_would_find(tiny: Tiny, tmp_path: Path) -> None:
    result = train(compose(tiny(RUN, "debug=fast_dev_run")), show=False)
    assert ran(result) == dict.fromkeys(ALL, True)
    assert not (tmp_path / "outputs" / "stages").exists()


def test_plans_give_the_same_weights(done: Path, tiny: Tiny) -> None:
    plans = (["checkpointing=blocks"], ["checkpointing=segments"], ["checkpointing=disabled"])
    heads = [load_file(Stages(compose(tiny(RUN, *plan))).multi().folder / "head.safetensors") for plan in plans]
    for head in heads[1:]:
        assert all(torch.equal(head[key], heads[0][key]) for key in head)
