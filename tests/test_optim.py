import pytest
import torch
from torch import nn

from mmadapt.config import ConfigError
from mmadapt.optim import adamw, check_settings, cosine, cosine_schedule, group_settings, param_groups
from tests.toys import toy_model

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def names(groups: list[dict]) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def test_groups_are_the_same_whichever_adapter_is_active() -> None:
    model = toy_model()
    expected = names(param_groups(model.parameter_groups(), SETTINGS))
    for modality in model.modalities:
        with model.bank.active(modality):
            assert names(param_groups(model.parameter_groups(), SETTINGS)) == expected
    assert {"adapter/left_ft", "adapter/right_ft", "tokenizer/left", "tokenizer/right", "head"} <= set(expected)


def test_every_trainable_and_no_frozen_parameter_is_in_exactly_one_group() -> None:
    model = toy_model()
    grouped = [id(p) for group in param_groups(model.parameter_groups(), SETTINGS) for _, p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}
    frozen = {id(p) for _, p in model.bank.parameters("left")} | {id(p) for p in model.backbone.norm.parameters()}
    assert not frozen & set(grouped)


def test_nothing_of_one_dimension_decays() -> None:
    for group in param_groups(toy_model().parameter_groups(), SETTINGS):
        is_vector = {p.ndim <= 1 for _, p in group["params"]}
        assert is_vector == {group["name"].endswith("/no_decay")}
        assert group["weight_decay"] == (0.0 if is_vector == {True} else 0.1)


def test_a_group_takes_its_own_values_then_its_kinds_then_the_common_ones() -> None:
    settings = SETTINGS | {"adapter": {"lr": 1e-3, "left_ft": {"lr": 1e-4, "weight_decay": 0.0}}, "head": {"lr": 0.5}}
    assert group_settings("adapter/left_ft", settings) == {"lr": 1e-4, "weight_decay": 0.0}
    assert group_settings("adapter/right_ft", settings) == {"lr": 1e-3, "weight_decay": 0.1}
    assert group_settings("head", settings) == {"lr": 0.5, "weight_decay": 0.1}
    assert group_settings("tokenizer/left", settings) == {"lr": 1e-2, "weight_decay": 0.1}


def test_zero_is_a_value() -> None:
    assert group_settings("head", SETTINGS | {"head": {"lr": 0.0}})["lr"] == 0.0


def test_the_optimizer_steps_by_these_values() -> None:
    model = toy_model()
    optimizer = adamw(model.parameter_groups(), SETTINGS | {"head": {"lr": 0.0}, "betas": [0.8, 0.9]})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {n for n, p in model.named_parameters() if p.requires_grad and not n.startswith("head")}
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.state_dict()["param_groups"][0]["param_names"]  # state can be matched by name


def test_a_parameter_in_two_groups_is_refused() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match=r"in one group, got w in a and b"):
        param_groups({"a": [("w", p)], "b": [("w", p)]}, SETTINGS)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        param_groups({}, SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter": {"lrr": 1}}, r"optim.adapter.*'lrr'.*Did you mean lr\?"),
        ({"adapter": {"left": 1}}, r"optim.adapter.left: expected lr or weight_decay below it"),
        ({"tokenizer": {"left": {"decay": 1}}}, r"'decay'.*Did you mean weight_decay\?"),
        ({"head": {"left": {"lr": 1}}}, r"optim.head"),
    ],
)
def test_misspelt_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(["adapter/left", "tokenizer/left", "head"], settings)


def test_cosine_rises_then_falls() -> None:
    factor = cosine(100, warmup=0.1, final=0.05)
    values = [factor(step) for step in range(101)]
    assert 0 < values[0] < 0.2
    assert values[10] == 1.0 == max(values)
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[55] == pytest.approx(0.05 + 0.95 / 2)
    assert values[100] == pytest.approx(0.05) == factor(1000)


def test_cosine_without_warmup_and_of_one_step() -> None:
    assert cosine(10, warmup=0.0)(0) == 1.0
    assert cosine(1, warmup=0.5)(0) > 0


def test_shares_outside_of_their_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="shares in"):
        cosine(10, warmup=2)


def test_the_schedule_scales_each_groups_own_rate() -> None:
    optimizer = adamw(toy_model().parameter_groups(), SETTINGS | {"head": {"lr": 1e-3}})
    schedule = cosine_schedule(optimizer, 10, {"warmup": 0.0, "final": 0.0})
    for _ in range(5):
        optimizer.step()
        schedule.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["head"] == pytest.approx(5e-4)
    assert rates["adapter/left_ft"] == pytest.approx(5e-3)
