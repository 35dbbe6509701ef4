"""Each example runs, and its output says what its text says; so does each line of examples/README.md."""

import functools
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig
from timm.models.vision_transformer import VisionTransformer
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import mmadapt
from tests.programs import draw_adapters

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.usefixtures("quiet"),
]


def run(name: str, *args: object) -> object:
    return runpy.run_path(str(EXAMPLES / name))["main"](*args)


def test_peft_2832(capsys):
    results = run("peft_2832.py")
    printed = capsys.readouterr().out
    readme = (EXAMPLES.parent / "README.md").read_text()
    rows = [line.split("│")[1].strip() + line.split("│")[-2] for line in printed.splitlines() if line.startswith("│")]
    assert len(rows) == 5
    assert rows == [
        r.split("│")[1].strip() + r.split("│")[-2]
        for r in readme.splitlines()
        if r.endswith(("equal     │", "wrong     │"))
    ]
    assert len({result["loss"] for result in results.values()}) == 1  # no loss shows it
    right = {name for name, result in results.items() if result["right"]}
    assert right == {"none", "mmadapt", "torch, whole backbone"}
    for name in results.keys() - right:
        *earlier, last = results[name]["errors"].values()
        assert min(earlier) > 0.5 > last
    peak = {name: result["peak"] for name, result in results.items()}
    assert peak["mmadapt"] < 0.5 * peak["torch, whole backbone"] < 0.5 * peak["none"]


def test_torch_timm():
    losses = run("torch_timm.py", 8)
    assert losses[-1] < 0.8 * losses[0]


def test_transformers_trainer(tmp_path):
    losses = run("transformers_trainer.py", str(tmp_path), 2)
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "rgb_ft/adapter_model.safetensors").is_file()


def test_lightning_module():
    assert run("lightning_module.py", 2) < 0.9


def test_alora(capsys):
    assert run("alora.py")
    assert "32 gradients with checkpointing, equal to those without: True" in capsys.readouterr().out


def test_they_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert path.name == "peft_2832.py" or len(path.read_text().splitlines()) < 60, path


def lines_of_the_table() -> list[tuple[str, str, str]]:
    text = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (.*?) \| (.*) \|$", text, flags=re.MULTILINE)
    return [row for row in rows if row[0] != "from"]


@pytest.fixture
def there(tmp_path):
    """What the lines of the table speak of."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    config = LoraConfig(r=2, target_modules=["attn.qkv"])
    bank = mmadapt.AdapterBank(vit, ["plain"])
    for name in ("rgb", "depth"):
        bank.add(name, config, modality=name, trainable=True)
    draw_adapters(bank)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))
    return {
        "torch": torch, "mmadapt": mmadapt, "vit": vit, "blocks": vit.blocks, "block": vit.blocks[0], "bank": bank,
        "peft_model": bank.model, "model": model, "x": torch.randn(2, 5, 16), "images": torch.randn(2, 3, 16, 16),
        "config": config, "folder": str(bank.save("rgb", tmp_path / "rgb")),
    }  # fmt: skip


@pytest.mark.parametrize(("library", "before", "now"), lines_of_the_table())
def test_each_line_of_the_table_runs(library, before, now, there):
    code = re.findall(r"`(.*?)`", now)[0]
    exec(code, there)  # one line, as it stands there


def test_the_table_is_whole():
    assert {row[0] for row in lines_of_the_table()} == {"torch", "timm", "transformers", "PEFT"}
    assert len(lines_of_the_table()) == 12


def test_transformers_own_places_run_our_checkpoint():
    """The line for `_set_gradient_checkpointing`: equal gradients; with torch's in the same places, other ones."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes)).train()
    bank = mmadapt.AdapterBank(model)
    for modality in ("rgb", "depth"):
        bank.add(modality, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), modality=modality, trainable=True)
    draw_adapters(bank)
    images = torch.randn(2, 3, 16, 16)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = torch.zeros(())
        for modality in ("rgb", "depth"):
            with bank.active(modality):
                loss = loss + model(images).last_hidden_state.square().mean()
        with bank.active("depth"):  # as after PEFT's set_adapter
            loss.backward()
        return [p.grad.clone() for name in bank.names for _, p in bank.parameters(name)]

    expected = gradients()
    model._set_gradient_checkpointing(True, mmadapt.checkpoint)
    assert all(map(torch.equal, gradients(), expected))
    model._set_gradient_checkpointing(True, functools.partial(torch_checkpoint, use_reentrant=False))
    assert not all(map(torch.equal, gradients(), expected))
