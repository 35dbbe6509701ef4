"""The adapter bank: flags are written once, switches write none, files are PEFT's, and what does not fit is refused."""

import contextlib
import copy
import pickle
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer

from mmadapt import AdapterBank, ViViT
from tests.programs import DIM, TARGETS, assert_same, draw_adapters, make_backbone, make_bank, make_tokens, snapshot

CONFIG = {"r": 4, "target_modules": TARGETS}


def flags(bank: AdapterBank) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in bank.backbone.named_parameters()}


def outputs(bank: AdapterBank, modality: str) -> torch.Tensor:
    with torch.no_grad(), bank.active(modality):
        return bank.backbone(make_tokens()["rgb"])


@pytest.fixture
def bank() -> AdapterBank:
    return make_bank()


def test_flags_are_as_declared_whatever_was_added_or_activated_before():
    bank = AdapterBank(make_backbone("vivit"))
    bank.add("rgb", LoraConfig(**CONFIG), modality="rgb", trainable=False)
    with bank.active("rgb"):
        bank.add("rgb_ft", LoraConfig(**CONFIG), modality="rgb", trainable=True)
        bank.add("depth_ft", LoraConfig(**CONFIG), modality="depth", trainable=True)
    for name, flag in flags(bank).items():
        assert flag == (".rgb_ft." in name or ".depth_ft." in name), name
    assert bank.trainable == ("rgb_ft", "depth_ft")


def test_a_switch_writes_no_flag(bank, monkeypatch):
    def refuse(*_):
        raise AssertionError("requires_grad was written")

    before = flags(bank)
    monkeypatch.setattr(torch.nn.Parameter, "requires_grad_", refuse)
    monkeypatch.setattr("peft.tuners.tuners_utils._set_layer_requires_grad", refuse)
    for modality in ("rgb", "depth"):
        with bank.active(modality):
            assert flags(bank) == before
    assert flags(bank) == before
    with pytest.raises(AssertionError, match="was written"):  # the control: PEFT's own switch does
        bank.model.set_adapter("rgb")


def test_routes_nest_and_survive_exceptions(bank):
    def active():
        return bank.backbone.blocks[0].attn.qkv.active_adapters

    assert active() == []
    with bank.active("rgb"):
        assert active() == ["rgb", "rgb_ft"]
        with contextlib.suppress(KeyError), bank.active("depth"):
            assert active() == ["depth", "depth_ft"]
            raise KeyError
        assert active() == ["rgb", "rgb_ft"]
    assert active() == []


def test_an_empty_route_is_the_plain_backbone():
    bank = AdapterBank(make_backbone("vivit"), ["thermal"])
    plain = outputs(bank, "thermal")
    bank.add("rgb", LoraConfig(**CONFIG), modality="rgb", trainable=True)
    draw_adapters(bank)
    assert torch.equal(outputs(bank, "thermal"), plain)
    assert not torch.equal(outputs(bank, "rgb"), plain)


def test_a_route_adds_its_adapters_in_order(bank):
    """Against the closed form: W x + sum of scaling * B A x."""
    layer = bank.backbone.blocks[0].attn.qkv
    x = torch.randn(5, DIM)
    with torch.no_grad(), bank.active("rgb"):
        got = layer(x)
        base = layer.base_layer(x)
        delta = sum(
            layer.scaling[n] * x @ layer.lora_A[n].weight.T @ layer.lora_B[n].weight.T for n in ("rgb", "rgb_ft")
        )
    torch.testing.assert_close(got, base + delta)


def test_one_adapter_shared_by_two_modalities():
    bank = AdapterBank(make_backbone("vivit"))
    bank.add("shared", LoraConfig(**CONFIG), modality=("rgb", "depth"), trainable=True)
    bank.add("rgb_ft", LoraConfig(**CONFIG), modality="rgb", trainable=True)
    assert bank.route("rgb") == ("shared", "rgb_ft")
    assert bank.route("depth") == ("shared",)


def test_changes_made_through_peft_are_noticed(bank):
    """The cache of tuner layers is checked at each use."""
    with bank.active("rgb"):
        pass
    bank.model.add_adapter("mlp", LoraConfig(r=2, target_modules=["fc1"]))
    with bank.active("rgb"):
        assert bank.backbone.blocks[0].mlp.fc1.active_adapters == ["rgb", "rgb_ft"]
    fresh = copy.deepcopy(bank.backbone.blocks[1].attn)
    bank.backbone.blocks[0].attn = fresh
    with bank.active("depth"):
        assert fresh.qkv.active_adapters == ["depth", "depth_ft"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))])
def test_copies_switch_their_own_layers(bank, copied):
    with bank.active("rgb"):
        expected = outputs(bank, "rgb")
        other = copied(bank)
    with bank.active("depth"):
        assert torch.equal(outputs(other, "rgb"), expected)
        assert bank.backbone.blocks[0].attn.qkv.active_adapters == ["depth", "depth_ft"]
    draw_adapters(other)
    assert torch.equal(outputs(bank, "rgb"), expected)


@pytest.mark.parametrize("call", ["set_adapter", "disable_adapter"])
def test_flags_that_peft_wrote_are_noticed(bank, call):
    bank.check_flags()
    if call == "set_adapter":
        bank.model.set_adapter("depth_ft")
    else:
        with bank.model.disable_adapter():
            pass
    with pytest.raises(ValueError, match=r"adapter 'rgb.*expected requires_grad=.*as declared.*AdapterBank\.active"):
        bank.check_flags()


# ---- files


@pytest.mark.parametrize("kind", ["vivit", "timm"])
@pytest.mark.parametrize("name", ["rgb", "rgb_ft", "depth", "depth_ft"])
def test_peft_alone_reads_what_we_write(kind, name, tmp_path):
    """Also where one adapter's name is part of another's."""
    bank = make_bank(kind)
    folder = bank.save(name, tmp_path / name)
    assert {f.name for f in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert [f.name for f in tmp_path.iterdir()] == [name]  # nothing else is left
    torch.manual_seed(0)
    plain = PeftModel.from_pretrained(make_backbone(kind), folder)
    ours = {n.replace(f".{name}.", "."): p for n, p in bank.parameters(name)}
    theirs = {
        n.removeprefix("base_model.model.").replace(".default.", "."): p
        for n, p in plain.named_parameters()
        if "lora_" in n
    }
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("trainable", [True, False])
def test_we_read_what_peft_alone_writes(tmp_path, trainable):
    torch.manual_seed(0)
    plain = get_peft_model(make_backbone("vivit"), LoraConfig(**CONFIG, use_rslora=True, lora_alpha=3))
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    plain.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(0)
    bank = AdapterBank(make_backbone("vivit"))
    bank.load("rgb", tmp_path / "adapter", modality="rgb", trainable=trainable)
    assert all(p.requires_grad == trainable for _, p in bank.parameters("rgb"))
    assert bank.backbone.training
    with torch.no_grad():
        expected = plain.base_model.model(make_tokens()["rgb"])
    assert torch.equal(outputs(bank, "rgb"), expected)


def test_saving_replaces_an_older_folder_and_leaves_it_on_failure(bank, tmp_path, monkeypatch):
    folder = bank.save("rgb", tmp_path / "rgb")
    first = load_file(folder / "adapter_model.safetensors")
    draw_adapters(bank)

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", fail)
        with pytest.raises(OSError, match="disk full"):
            bank.save("rgb", folder)
    assert all(torch.equal(first[k], v) for k, v in load_file(folder / "adapter_model.safetensors").items())
    assert [f.name for f in tmp_path.iterdir()] == ["rgb"]
    bank.save("rgb", folder)
    assert not all(torch.equal(first[k], v) for k, v in load_file(folder / "adapter_model.safetensors").items())
    assert [f.name for f in tmp_path.iterdir()] == ["rgb"]


def spoil(folder, how: str) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = sorted(tensors)[0]
    match how:
        case "missing":
            del tensors[key]
        case "extra":
            tensors["base_model.model.blocks.9.attn.qkv.lora_A.weight"] = torch.zeros(4, DIM)
        case "misshaped":
            tensors[key] = torch.zeros(3, DIM)
        case "empty":
            tensors = {}
    save_file(tensors, file)
    match how:
        case "torn":
            file.write_bytes(file.read_bytes()[:100])
        case "no config":
            (folder / "adapter_config.json").unlink()
        case "no weights":
            file.unlink()
        case "broken config":
            (folder / "adapter_config.json").write_text('{"peft_type": ')
        case "unknown family":
            (folder / "adapter_config.json").write_text('{"peft_type": "NOPE"}')
        case "no folder":
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"1 missing: .*blocks\.0"),
        ("extra", r"1 extra: .*blocks\.9"),
        ("misshaped", r"1 misshaped: .*expected \(4, 16\), got \(3, 16\)"),
        ("empty", r"got 0; 16 missing"),
        ("torn", "cannot read|expected a config and tensors"),
        ("no config", r"expected adapter_config\.json"),
        ("no weights", r"expected adapter_model\.safetensors"),
        ("broken config", "expected a config and tensors"),
        ("unknown family", "expected a config and tensors"),
        ("no folder", "which is none"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_folder_that_does_not_fit_is_refused_and_changes_nothing(bank, tmp_path, how, message, is_first):
    folder = bank.save("rgb", tmp_path / "rgb")
    spoil(folder, how)
    target = AdapterBank(make_backbone("vivit")) if is_first else bank
    before = snapshot(target.backbone)
    with pytest.raises(ValueError, match=message):
        target.load("other", folder, modality="rgb", trainable=False)
    assert "other" not in target.names
    assert_same(snapshot(target.backbone), before)
    target.add("other", LoraConfig(**CONFIG), modality="rgb", trainable=True)  # the bank still works


def test_an_adapter_of_another_backbone_is_refused(bank, tmp_path):
    folder = bank.save("rgb", tmp_path / "rgb")
    with pytest.raises(ValueError, match="16 misshaped"):
        AdapterBank(ViViT(dim=32, depth=4, num_heads=2)).load("rgb", folder, modality="rgb", trainable=False)
    with pytest.raises(ValueError, match="8 extra"):
        AdapterBank(ViViT(dim=DIM, depth=2, num_heads=2)).load("rgb", folder, modality="rgb", trainable=False)


def test_saving_deletes_nothing_of_anybody_else(bank, tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        bank.save("rgb", folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="got the file"):
        bank.save("rgb", tmp_path / "file")
    monkeypatch.chdir(folder)
    with pytest.raises(FileExistsError, match="working directory"):
        bank.save("rgb", ".")
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "results"]


def test_a_link_is_followed(bank, tmp_path):
    bank.save("rgb", tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    bank.save("rgb_ft", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    saved = load_file(tmp_path / "real/adapter_model.safetensors")
    assert all(
        torch.equal(saved[f"base_model.model.{n.replace('.rgb_ft.', '.')}"], p) for n, p in bank.parameters("rgb_ft")
    )
    assert sorted(f.name for f in tmp_path.iterdir()) == ["link", "real"]


# ---- refusals at creation


@pytest.mark.parametrize(
    "config", [{"r": "four"}, {"r": 2.5}, {"r": -1}, {"target_modules": ["qkv", "norm1"]}], ids=str
)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_adapter_that_peft_fails_to_inject_leaves_no_trace(config, is_first):
    bank = AdapterBank(make_backbone("vivit")) if is_first else make_bank()
    before = snapshot(bank.backbone)
    with pytest.raises((ValueError, TypeError)):
        bank.add("new", LoraConfig(**{**CONFIG, **config}), modality="rgb", trainable=True)
    assert_same(snapshot(bank.backbone), before)
    bank.add("new", LoraConfig(**CONFIG), modality="rgb", trainable=True)
    assert len(bank.parameters("new")) == 16


@pytest.mark.parametrize(
    "name", ["a.b", "", "a/b", "a b", 3, "blocks", "attn", "qkv", "weight", "lora_A", "lora_B", "rgb"]
)
def test_names_that_peft_cannot_save_are_refused(bank, name):
    before = snapshot(bank.backbone)
    with pytest.raises(ValueError, match="adapter name: expected"):
        bank.add(name, LoraConfig(**CONFIG), modality="rgb", trainable=True)
    assert_same(snapshot(bank.backbone), before)
    assert bank.names == ("rgb", "rgb_ft", "depth", "depth_ft")


@pytest.mark.parametrize(
    "names", [("a", "ab", "abc"), ("ft", "rgb_ft2", "x_ft"), ("lora", "ora", "l"), ("A", "B", "w")]
)
def test_names_that_hold_each_other_are_saved_whole(names, tmp_path):
    bank = AdapterBank(make_backbone("vivit"))
    for rank, name in enumerate(names, start=1):
        try:
            bank.add(name, LoraConfig(r=rank, target_modules=TARGETS), modality="rgb", trainable=True)
        except ValueError as error:
            assert "PEFT" in str(error)  # noqa: PT017  refused with the reason, or saved whole
    draw_adapters(bank)
    for name in bank.names:
        saved = load_file(bank.save(name, tmp_path / name) / "adapter_model.safetensors")
        expected = {f"base_model.model.{n.replace(f'.{name}.', '.')}": p for n, p in bank.parameters(name)}
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[n], expected[n]) for n in saved)


def test_targets_outside_the_blocks_are_refused():
    bank = AdapterBank(VisionTransformer(img_size=8, patch_size=4, embed_dim=DIM, depth=2, num_heads=2))
    with pytest.raises(ValueError, match=r"patch_embed\.proj"):
        bank.add("rgb", LoraConfig(target_modules=["proj"]), modality="rgb", trainable=True)
    assert bank.names == ()
    bank.add(
        "rgb", LoraConfig(target_modules=["proj"], exclude_modules=["patch_embed.proj"]), modality="rgb", trainable=True
    )
    assert bank.targets("rgb") == ["blocks.0.attn.proj", "blocks.1.attn.proj"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["nowhere"]), "nowhere"),
        (LoraConfig(target_modules=["qkv"], modules_to_save=["norm"]), "no modules_to_save"),
        (IA3Config(target_modules=["qkv"], feedforward_modules=[]), "one family per model"),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "family that injects layers"),
        ({"r": 4}, "family that injects layers"),
    ],
)
def test_configs_that_cannot_be_are_refused(bank, config, message):
    before = snapshot(bank.backbone)
    with pytest.raises(ValueError, match=message):
        bank.add("other", config, modality="rgb", trainable=True)
    assert_same(snapshot(bank.backbone), before)


@pytest.mark.parametrize("call", [
    lambda bank: bank.route("rgbb"),
    lambda bank: bank.active("rgbb").__enter__(),
    lambda bank: bank.parameters("rgbb"),
    lambda bank: bank.save("rgbb", "anywhere"),
])  # fmt: skip
def test_unknown_names_are_errors_with_the_valid_ones(bank, call):
    with pytest.raises(ValueError, match=r"expected one of \['rgb', .*got 'rgbb'. Did you mean 'rgb'"):
        call(bank)


def test_a_bank_without_adapters_has_no_peft_model():
    with pytest.raises(ValueError, match="call add or load first"):
        _ = AdapterBank(make_backbone("vivit")).model


def test_a_bank_that_does_not_freeze_leaves_the_flags_of_the_backbone():
    backbone = make_backbone("vivit")
    backbone.norm.requires_grad_(False)
    bank = AdapterBank(backbone, freeze=False)
    bank.add("rgb", LoraConfig(**CONFIG), modality="rgb", trainable=False)
    assert all(
        p.requires_grad == ("norm." not in n or "blocks" in n)
        for n, p in backbone.named_parameters()
        if "lora_" not in n
    )
    assert not any(p.requires_grad for _, p in bank.parameters("rgb"))


# ---- a PeftModel that is there already


def peft_model() -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["attn.qkv"], init_lora_weights=False)
    model = get_peft_model(make_backbone("timm"), config, adapter_name="rgb")
    for name in ("rgb_ft", "depth", "depth_ft"):
        model.add_adapter(name, config)
    return model


ROUTES = {"rgb": ["rgb", "rgb_ft"], "depth": ["depth", "depth_ft"], "plain": []}


def test_a_bank_over_a_peft_model_that_is_there():
    model = peft_model()
    x = torch.randn(2, 3, 8, 8)
    expected = {}
    with torch.no_grad():
        for modality in ("rgb", "depth"):
            model.base_model.set_adapter(ROUTES[modality])
            expected[modality] = model(x)
        with model.disable_adapter():
            expected["plain"] = model(x)
    bank = AdapterBank.from_peft(model, ROUTES, trainable=["rgb_ft", "depth_ft"])
    assert bank.model is model
    assert (bank.names, bank.trainable) == (("rgb", "rgb_ft", "depth", "depth_ft"), ("rgb_ft", "depth_ft"))
    with torch.no_grad():
        for modality, output in expected.items():
            with bank.active(modality):
                assert torch.equal(model(x), output)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "_ft." in name}
    assert trained


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, r, t: (m.get_base_model(), r, t), "expected a peft.PeftModel, got VisionTransformer"),
        (lambda m, r, t: (m, r | {"rgb": ["rgb", "rbg_ft"]}, t), "got 'rbg_ft'. Did you mean 'rgb_ft'?"),
        (lambda m, r, t: (m, r, ["detph_ft"]), "got 'detph_ft'. Did you mean 'depth_ft'?"),
        (
            lambda m, r, t: (m, {"rgb": ["rgb", "rgb_ft"]}, t[:1]),
            r"a route for each adapter, got none for \['depth', 'd",
        ),
    ],
)
def test_a_bank_over_a_peft_model_refuses_and_changes_nothing(change, message):
    model = peft_model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        AdapterBank.from_peft(*change(model, ROUTES, ["rgb_ft", "depth_ft"]))
    assert_same(snapshot(model), before)
