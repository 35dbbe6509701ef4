"""Optimizer groups by name, and the schedule: pure functions over named parameters.

    model.parameter_groups()                   param_groups, by the name in the optimizer
    "adapter/gyroscope_ft" -> [(name, p)]  ->  "adapter/gyroscope_ft"            matrices, which decay
                                               "adapter/gyroscope_ft/no_decay"   all of one dimension, which doesn't

Which parameters are in which group is declared by the model, never read off the adapters' flags of the moment, so the
groups are the same whichever adapter is active when they are built.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mmadapt.config import ConfigError, check_names

KINDS = ("adapter", "tokenizer", "fusion", "head", "backbone")
FIELDS = ("lr", "weight_decay")  # what a kind or one group of it can set for itself
NO_DECAY = "no_decay"

Groups = Mapping[str, Sequence[tuple[str, nn.Parameter]]]


def group_settings(name: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """lr and weight_decay of one group: its own, else its kind's, else the common ones.

    `{"lr": 2e-3, "weight_decay": 0.05, "adapter": {"lr": 1e-3, "gyroscope_ft": {"lr": 1e-4}}}` gives 1e-4 for
    "adapter/gyroscope_ft" and 1e-3 for every other adapter.
    """
    kind, _, own = name.partition("/")
    of_kind = settings.get(kind) or {}
    levels = (of_kind.get(own) or {}, of_kind, settings)
    return {field: float(next(level[field] for level in levels if level.get(field) is not None)) for field in FIELDS}


def check_settings(groups: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Refuses settings for groups that no optimizer would ever have.

    Args:
        groups: the names that may occur, such as "adapter/gyroscope_ft", "head".

    Raises:
        ConfigError: an unknown kind's member, or a field other than lr and weight_decay.
    """
    for kind in KINDS:
        own = [name.partition("/")[2] for name in groups if name.partition("/")[0] == kind and "/" in name]
        for key, value in (settings.get(kind) or {}).items():
            check_names(f"optim.{kind}", [key], [*FIELDS, *own], f"Write optim.{kind}.lr=1e-3, or one group's values.")
            if key in own:
                if not isinstance(value, Mapping):
                    raise ConfigError(
                        f"optim.{kind}.{key}: expected lr or weight_decay below it, got {value!r}; "
                        f"write optim.{kind}.{key}.lr={value}"
                    )
                check_names(f"optim.{kind}.{key}", value, FIELDS, f"Write optim.{kind}.{key}.lr=1e-3.")


def param_groups(groups: Groups, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, in the model's order, with names.

    Biases, norms and all else of one dimension are in a group without decay. Parameters are named, so that an
    optimizer's state can be matched by name.

    Raises:
        ConfigError: there is no parameter at all, or one is in two groups.
    """
    result: list[dict[str, Any]] = []
    owner: dict[int, str] = {}
    for name, parameters in groups.items():
        for parameter_name, parameter in parameters:
            if id(parameter) in owner:
                raise ConfigError(
                    f"expected each parameter in one group, got {parameter_name} in {owner[id(parameter)]} and {name}; "
                    "share a module between groups by declaring it in one of them"
                )
            owner[id(parameter)] = name
        values = group_settings(name, settings)
        matrices = [(n, p) for n, p in parameters if p.ndim > 1]
        vectors = [(n, p) for n, p in parameters if p.ndim <= 1]
        if matrices:
            result.append({"params": matrices, "name": name, **values})
        if vectors:
            result.append({"params": vectors, "name": f"{name}/{NO_DECAY}", **values, "weight_decay": 0.0})
    if not result:
        raise ConfigError(
            "expected something to train, got no trainable parameter: every adapter, tokenizer, fusion and head is "
            "frozen; add a trainable adapter (adapters.route=[frozen,trainable]) or a head with parameters"
        )
    return result


def adamw(groups: Groups, settings: Mapping[str, Any]) -> torch.optim.AdamW:
    """AdamW over `param_groups`; settings: lr, weight_decay, betas, eps and per kind or group lr and weight_decay."""
    betas = tuple(settings.get("betas", (0.9, 0.999)))
    return torch.optim.AdamW(
        param_groups(groups, settings), lr=settings["lr"], betas=betas, eps=settings.get("eps", 1e-8)
    )


def cosine(steps: int, *, warmup: float = 0.1, final: float = 0.0) -> Callable[[int], float]:
    """The factor on every learning rate at step t: a linear rise over `warmup * steps`, then half a cosine to `final`.

    Raises:
        ConfigError: shares outside of [0, 1].
    """
    if not (0 <= warmup <= 1 and 0 <= final <= 1):
        raise ConfigError(
            f"optim: expected warmup and final as shares in [0, 1], got warmup={warmup}, final={final}; "
            "warmup=0.1 warms up over a tenth of all steps"
        )
    rising = round(warmup * steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        done = min(1.0, (step - rising) / max(1, steps - rising))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def cosine_schedule(optimizer: torch.optim.Optimizer, steps: int, settings: Mapping[str, Any]) -> LambdaLR:
    """`cosine` on every group of an optimizer; step it after each optimizer step."""
    return LambdaLR(optimizer, cosine(steps, warmup=settings.get("warmup", 0.0), final=settings.get("final", 0.0)))
