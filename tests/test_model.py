"""Tokenizers, backbone, fusion, head, and the model that they make."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import VivitConfig, VivitModel

from mmadapt import AdapterBank, CheckpointPlan, MultimodalModel, ViViT
from mmadapt.fusion import ConcatFusion, GatedFusion, MeanFusion
from mmadapt.heads import ClassificationHead
from mmadapt.tokenizers import TubeletTokenizer
from tests.programs import TARGETS, draw_adapters

CLIPS = {"rgb": (3, 4, 8, 8), "depth": (1, 4, 8, 8)}
TUBELETS = {"rgb": (2, 4, 4), "depth": (4, 4, 8)}


def make_model(plan: CheckpointPlan | None = None, freeze: bool = True, fusion=ConcatFusion) -> MultimodalModel:
    torch.manual_seed(0)
    backbone = ViViT(dim=16, depth=3, num_heads=2)
    bank = AdapterBank(backbone, freeze=freeze)
    for modality in CLIPS if freeze else ():
        for name in (modality, f"{modality}_ft"):
            config = LoraConfig(r=2, target_modules=TARGETS)
            bank.add(name, config, modality=modality, trainable=name != modality)
    draw_adapters(bank)
    tokenizers = {m: TubeletTokenizer(16, CLIPS[m], TUBELETS[m]) for m in CLIPS}
    fused = fusion(tuple(CLIPS), 16)
    return MultimodalModel(backbone, tokenizers, bank, fused, ClassificationHead(fused.out_dim, 5), plan)


def make_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {m: torch.randn(2, *clip, generator=generator) for m, clip in CLIPS.items()}


# ---- tokenizer


def test_a_tubelet_is_embedded_linearly():
    """Against unfolding by hand: token (t, h, w) is W times the values of its tubelet."""
    tokenizer = TubeletTokenizer(16, (3, 4, 8, 8), (2, 4, 4))
    clips = torch.randn(2, 3, 4, 8, 8)
    tubelets = clips.unfold(2, 2, 2).unfold(3, 4, 4).unfold(4, 4, 4)  # (B, C, T', H', W', t, h, w)
    tubelets = tubelets.permute(0, 2, 3, 4, 1, 5, 6, 7).reshape(2, 8, -1)
    expected = tubelets @ tokenizer.proj.weight.reshape(16, -1).T + tokenizer.proj.bias + tokenizer.position
    torch.testing.assert_close(tokenizer(clips), expected)
    assert tokenizer.num_tokens == 8


def test_dropped_tokens_are_a_random_share_in_training_only():
    tokenizer = TubeletTokenizer(16, (3, 4, 8, 8), (2, 4, 4), drop_token=0.25)
    clips = torch.randn(50, 3, 4, 8, 8)
    got = tokenizer(clips)
    assert got.shape == (50, 6, 16)
    whole = tokenizer.eval()(clips)
    assert whole.shape == (50, 8, 16)
    kept = (got[:, :, None] == whole[:, None]).all(-1)  # (B, kept, N)
    assert (kept.sum(2) == 1).all()
    assert (kept.any(1).sum(1) == 6).all()
    assert kept.any(1).float().mean(0).std() < 0.15  # every place is dropped about as often
    with pytest.raises(ValueError, match="drop_token"):
        TubeletTokenizer(16, (3, 4, 8, 8), (2, 4, 4), drop_token=1.0)


@pytest.mark.parametrize(
    ("clip", "tubelet"),
    [
        ((3, 4, 8, 8), (3, 4, 4)),
        ((3, 4, 8, 8), (2, 4)),
        ((3, 4, 8, 8), (0, 4, 4)),
        ((3, 4, 8), (2, 4, 4)),
        ((0, 4, 8, 8), (2, 4, 4)),
    ],
)
def test_tubelets_that_do_not_divide_the_clip_are_refused(clip, tubelet):
    with pytest.raises(ValueError, match="expected"):
        TubeletTokenizer(16, clip, tubelet)


# ---- backbone


def test_the_blocks_compute_what_transformers_vivit_computes():
    """The same weights in transformers' Vivit encoder give the same tokens."""
    theirs = VivitModel(
        VivitConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, hidden_act="gelu",
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-6,
        )
    ).eval()  # fmt: skip
    ours = ViViT(dim=16, depth=3, num_heads=2).eval()
    for block, layer in zip(
        ours.blocks, theirs.encoder.layer if hasattr(theirs, "encoder") else theirs.layers, strict=True
    ):
        found = {name.split(".")[-1]: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        norms = [module for module in layer.modules() if isinstance(module, nn.LayerNorm)]
        assert len(linears) == 6, found
        q, k, v, o, up, down = linears
        with torch.no_grad():
            block.attn.qkv.weight.copy_(torch.cat([q.weight, k.weight, v.weight]))
            block.attn.qkv.bias.copy_(torch.cat([q.bias, k.bias, v.bias]))
        for mine, their in zip((block.attn.proj, block.mlp.fc1, block.mlp.fc2), (o, up, down), strict=True):
            mine.load_state_dict(their.state_dict())
        for mine, their in zip((block.norm1, block.norm2), norms, strict=True):
            mine.load_state_dict(their.state_dict())
    x = torch.randn(2, 7, 16)
    expected = x
    for layer in theirs.encoder.layer if hasattr(theirs, "encoder") else theirs.layers:
        out = layer(expected)
        expected = out[0] if isinstance(out, tuple) else out
    got = x
    for block in ours.blocks:
        got = block(got)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_wrong_backbones_and_tokens_are_refused():
    with pytest.raises(ValueError, match="multiple of num_heads=4"):
        ViViT(dim=18, num_heads=4)
    with pytest.raises(ValueError, match="at least 1"):
        ViViT(depth=0)
    with pytest.raises(ValueError, match=r"expected \(B, N, 96\), got \(2, 3, 5\)"):
        ViViT()(torch.zeros(2, 3, 5))


# ---- fusion


def test_fusions_of_all_and_of_some_modalities():
    features = {"rgb": torch.randn(2, 4), "depth": torch.randn(2, 4)}
    alone = {"depth": features["depth"]}
    concat, mean, gated = (kind(("rgb", "depth"), 4) for kind in (ConcatFusion, MeanFusion, GatedFusion))
    assert torch.equal(concat(features), torch.cat([features["rgb"], features["depth"]], -1))
    assert torch.equal(concat(alone), torch.cat([torch.zeros(2, 4), features["depth"]], -1))
    torch.testing.assert_close(mean(features), (features["rgb"] + features["depth"]) / 2)
    torch.testing.assert_close(mean(alone), features["depth"])
    torch.testing.assert_close(gated(features), mean(features))  # at initialisation
    torch.testing.assert_close(gated(alone), features["depth"])
    nn.init.normal_(gated.scores[0].weight)
    weight = torch.sigmoid(gated.scores[0](features["rgb"]) - gated.scores[1](features["depth"]))
    torch.testing.assert_close(gated(features), weight * features["rgb"] + (1 - weight) * features["depth"])
    assert (concat.out_dim, mean.out_dim, gated.out_dim) == (8, 4, 4)


@pytest.mark.parametrize("kind", [ConcatFusion, MeanFusion, GatedFusion])
def test_fusions_refuse_no_and_unknown_modalities(kind):
    with pytest.raises(ValueError, match=r"at least one of \['rgb'\], got \[\]"):
        kind(("rgb",), 4)({})
    with pytest.raises(ValueError, match=r"got \['audio', 'rgb'\]"):
        kind(("rgb",), 4)({"rgb": torch.zeros(1, 4), "audio": torch.zeros(1, 4)})
    with pytest.raises(ValueError, match="at least one"):
        kind((), 4)


# ---- head


def test_label_smoothing_and_class_weights_against_the_closed_form():
    head = ClassificationHead(4, 3, label_smoothing=0.1, class_weights=[1.0, 2.0, 4.0])
    logits, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    log_p = logits.log_softmax(-1)
    weights = torch.tensor([1.0, 2.0, 4.0])
    hard = -(weights[targets] * log_p[range(6), targets]).sum() / weights[targets].sum()
    smooth = -(weights * log_p).sum() / weights[targets].sum() / 3
    torch.testing.assert_close(head.loss(logits, targets), 0.9 * hard + 0.1 * smooth)
    with pytest.raises(ValueError, match="expected 3, one per class, got 2"):
        ClassificationHead(4, 3, class_weights=[1.0, 2.0])


# ---- model


@pytest.mark.parametrize("fusion", [ConcatFusion, MeanFusion, GatedFusion])
@pytest.mark.parametrize("plan", [CheckpointPlan(), CheckpointPlan(segment_size=2, use_reentrant=True)], ids=str)
def test_gradients_of_the_whole_model(fusion, plan):
    gradients = []
    for each in (CheckpointPlan(enabled=False), plan):
        model = make_model(each, fusion=fusion)
        model.head.loss(model(make_inputs()), torch.tensor([0, 3])).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    expected, got = gradients
    trained = {name for group in model.parameter_groups().values() for name, _ in group}
    assert got.keys() == expected.keys() == trained
    assert all(torch.equal(got[n], expected[n]) for n in expected)


def test_a_modality_sees_its_own_adapters_only():
    model = make_model()
    before = model.features(make_inputs())
    with torch.no_grad():
        for _, parameter in model.bank.parameters("depth_ft"):
            parameter.normal_()
    after = model.features(make_inputs())
    assert torch.equal(after["rgb"], before["rgb"])
    assert not torch.equal(after["depth"], before["depth"])


def test_a_missing_modality_and_the_order_of_keys():
    model, inputs = make_model(), make_inputs()
    alone = model.features({"depth": inputs["depth"]})
    assert list(alone) == ["depth"]
    assert torch.equal(alone["depth"], model.features(inputs)["depth"])
    assert torch.equal(model(dict(reversed(inputs.items()))), model(inputs))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"at least one of the modalities \['rgb', 'depth'\], got \[\]"),
        ({"audio": torch.zeros(1)}, r"got \['audio'\]"),
        ({"rgb": torch.zeros(2, 3, 4, 8, 7)}, r"modality 'rgb': clip: expected .*3, 4, 8, 8.*got \(2, 3, 4, 8, 7\)"),
        ({"depth": torch.zeros(1, 4, 8, 8)}, r"modality 'depth': clip: expected"),
    ],
)
def test_batches_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_model()(inputs)


def test_parameter_groups_do_not_depend_on_what_is_active():
    model = make_model()

    def names():
        return {group: [name for name, _ in members] for group, members in model.parameter_groups().items()}

    expected = names()
    assert list(expected) == ["adapter/rgb_ft", "adapter/depth_ft", "tokenizer/rgb", "tokenizer/depth", "head"]
    for modality in CLIPS:
        with model.bank.active(modality):
            assert names() == expected
    everything = dict(model.named_parameters())
    for group, members in model.parameter_groups().items():
        assert all(everything[name] is parameter and parameter.requires_grad for name, parameter in members), group


def test_a_backbone_that_is_trained_has_a_group_of_its_own():
    groups = make_model(freeze=False).parameter_groups()
    assert list(groups) == ["backbone", "tokenizer/rgb", "tokenizer/depth", "head"]
    assert len(groups["backbone"]) == sum(1 for _ in ViViT(dim=16, depth=3, num_heads=2).parameters())


def test_the_state_holds_all_but_the_frozen_backbone_whatever_is_active():
    model = make_model()
    state = model.trainable_state()
    assert {n for n in model.state_dict() if n not in state} == {
        f"backbone.{n}" for n, _ in model.backbone.named_parameters() if "lora_" not in n
    }
    with model.bank.active("rgb"):
        assert model.trainable_state().keys() == state.keys()
    other = make_model()
    draw_adapters(other.bank)
    nn.init.normal_(other.head.linear.weight)
    assert not torch.equal(other(make_inputs()), model(make_inputs()))
    other.load_trainable_state(state)
    assert torch.equal(other(make_inputs()), model(make_inputs()))


@pytest.mark.parametrize("how", ["missing", "extra", "misshaped"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(how):
    model = make_model()
    state = {n: torch.ones_like(t) for n, t in model.trainable_state().items()}
    match how:
        case "missing":
            del state["head.linear.bias"]
        case "extra":
            state["head.other"] = torch.zeros(1)
        case "misshaped":
            state["head.linear.bias"] = torch.zeros(6)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{how}: .*head"):
        model.load_trainable_state(state)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_checkpointing_changes_no_name():
    plain, checkpointed = make_model(CheckpointPlan(enabled=False)), make_model()
    checkpointed(make_inputs()).sum().backward()
    assert plain.state_dict().keys() == checkpointed.state_dict().keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_trained_copy_leaves_the_original_untouched(copied):
    model = make_model()
    model(make_inputs()).sum().backward()  # fills the caches that copies must not share
    model.zero_grad(set_to_none=True)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    other = copied(model)
    assert torch.equal(other(make_inputs()), model(make_inputs()))
    other(make_inputs()).square().sum().backward()
    gradients = {n for n, p in other.named_parameters() if p.grad is not None}
    assert gradients == {n for group in model.parameter_groups().values() for n, _ in group}
    assert all(p.grad is None for p in model.parameters())
    torch.optim.SGD([p for p in other.parameters() if p.grad is not None], lr=0.1).step()
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_a_model_is_freed_when_it_is_dropped():
    """No cache of ours keeps a model alive."""
    import gc
    import weakref

    model = make_model()
    model(make_inputs()).sum().backward()
    alive = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in alive)
