"""Which modules of a model are its blocks: by transformers' own layers, by structure, by name, or as given."""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmadapt.errors import listed
from mmadapt.plans import CheckpointPlan
from mmadapt.scopes import tuner_types

__all__: list[str] = []


@dataclass
class Stack:
    """A stack of blocks with their names in the model; `name` is that of the list that holds them."""

    name: str
    blocks: list[tuple[str, nn.Module]]

    def split(self, plan: CheckpointPlan) -> list[tuple[range, bool]]:
        segments = plan.split(len(self.blocks))
        is_mixed = any(len(r) > 1 for r, _ in segments) or len({c for _, c in segments}) > 1
        if is_mixed and len({id(block) for _, block in self.blocks}) < len(self.blocks):
            raise ValueError(
                f"checkpoint_blocks: {self.name or 'the model'} holds the same block several times, so {plan} does not "
                "say what each of its calls does. Do: a plan that checkpoints every block by itself."
            )
        return segments

    @property
    def parameters(self) -> int:
        return sum(map(_count, {id(b): b for _, b in self.blocks}.values()))


def find_stacks(model: nn.Module, blocks: re.Pattern | nn.Module | list | None, *, is_first: bool) -> list[Stack]:
    """The stacks of blocks in a model.

    Raises:
        ValueError: none, nested ones, or (`is_first`) modules that are not below the model.
    """
    if blocks is None:
        found = _transformers_layers(model) or _by_structure(model)
    elif isinstance(blocks, re.Pattern):
        found = _by_pattern(model, blocks)
    else:
        found = _given(model, blocks, is_first)
    if not found and blocks is None:
        raise ValueError(
            "checkpoint_blocks: expected a list of blocks in the model, found none. Lists in it: "
            f"{lists_text(model)}. Do: pass blocks=, the modules or a regular expression for their names."
        )
    chosen = {id(block): name for stack in found for name, block in stack.blocks}
    for stack in found:
        for name, block in stack.blocks:
            inner = next((chosen[id(m)] for m in block.modules() if m is not block and id(m) in chosen), None)
            if inner is not None:
                raise ValueError(
                    f"checkpoint_blocks: expected blocks that do not hold each other, but {name} holds {inner}. "
                    "Do: pass either of them as blocks=."
                )
    return found


def _transformers_layers(model: nn.Module) -> list[Stack]:
    """The outermost of the layers that transformers itself would checkpoint, by the list that holds them."""
    module = sys.modules.get("transformers.modeling_layers")
    if module is None:
        return []
    found: list[tuple[str, nn.Module]] = []
    known: set[int] = set()

    def walk(parent: nn.Module, prefix: str) -> None:
        for name, child in parent._modules.items():
            if isinstance(child, module.GradientCheckpointingLayer):
                found.append((prefix + name, child))
            elif child is not None and id(child) not in known:
                known.add(id(child))  # a part may be reached by several names
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return _grouped(found)


_USUAL_NAMES = ("blocks", "layers", "layer", "block", "h", "stages")


def _by_structure(model: nn.Module) -> list[Stack]:
    """Lists of modules of one class, without what is small beside the largest (a list of heads)."""
    units: list[list[Stack]] = []  # the lists of one list of stages belong together
    known: set[int] = set()

    def walk(module: nn.Module, name: str) -> None:
        if isinstance(module, tuner_types()) or id(module) in known:
            return
        known.add(id(module))
        if _is_list_of_blocks(module):
            units.append(_stages(module, name))
            return
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name)

    walk(model, "")
    sizes = [sum(stack.parameters for stack in unit) for unit in units]

    def is_usual(unit: list[Stack]) -> bool:
        return any(re.sub(r"\d+$", "", part) in _USUAL_NAMES for part in unit[0].name.split("."))

    # A name of one of the usual lists decides over a larger list of another name.
    chosen = [u for u, size in zip(units, sizes, strict=True) if is_usual(u) or 2 * size >= max(sizes)]
    return [stack for unit in chosen for stack in unit]


def _stages(container: nn.Module, name: str) -> list[Stack]:
    """The blocks of a list; of a list of stages those in the stages' own lists, where these are most of the stages."""
    children = [(f"{name}.{n}" if name else n, child) for n, child in container._modules.items() if child is not None]
    inner = []
    for child_name, child in children:
        if _is_list_of_blocks(child):
            inner.append((child_name, child))
        else:
            inner += [
                (f"{child_name}.{n}", m)
                for n, m in child.named_children()
                if "expert" not in n and _is_list_of_blocks(m)
            ]
    if inner and 2 * sum(_count(m) for _, m in inner) > sum(_count(child) for _, child in children):
        return [stack for inner_name, m in inner for stack in _stages(m, inner_name)]
    return [Stack(name, children)]


def _is_list_of_blocks(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
        return False
    first = module[0]
    is_plain_layer = not any(True for _ in first.children()) and type(first).__module__.startswith("torch.nn")
    return (
        all(type(child) is type(first) for child in module)
        and not is_plain_layer
        and not isinstance(first, (*tuner_types(), nn.ModuleDict))
        and _count(first) > 0
        and (not isinstance(first, nn.ModuleList) or all(map(_is_list_of_blocks, module)))  # those cannot be called
    )


def _by_pattern(model: nn.Module, pattern: re.Pattern) -> list[Stack]:
    found: dict[str, nn.Module] = {}  # a pattern may match a list and its blocks
    for name, module in model.named_modules():
        if pattern.fullmatch(name) or pattern.fullmatch(name.removeprefix("base_model.model.")):
            parent = model.get_submodule(name.rpartition(".")[0]) if name else None
            # A Sequential is a list, or one block of a list.
            is_list = isinstance(module, nn.ModuleList) or (
                isinstance(module, nn.Sequential) and not isinstance(parent, nn.ModuleList | nn.Sequential)
            )
            prefix = f"{name}." if name else ""
            inner = [(prefix + n, m) for n, m in module._modules.items() if m is not None]
            found |= dict(inner if is_list else [(name, module)])
    return _grouped(list(found.items()))


def _given(model: nn.Module, blocks: nn.Module | list, is_first: bool) -> list[Stack]:
    names = {id(module): name for name, module in model.named_modules()}
    given: list[nn.Module] = []
    for item in [blocks] if isinstance(blocks, nn.Module) else blocks:
        is_list = isinstance(item, nn.ModuleList) or (item is blocks and isinstance(item, nn.Sequential))
        given += list(item.children()) if is_list else [item]
    if is_first:
        wrong = [type(b).__name__ for b in given if id(b) not in names or b is model]
        if wrong or not given:
            raise ValueError(
                f"checkpoint_blocks: blocks: expected modules below the model, got {listed(wrong) or 'none'}. "
                f"Lists in it: {lists_text(model)}."
            )
    return _grouped([(names[id(b)], b) for b in given if id(b) in names])


def _grouped(blocks: list[tuple[str, nn.Module]]) -> list[Stack]:
    """By the module that holds them."""
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in blocks:
        groups.setdefault(name.rpartition(".")[0], []).append((name, block))
    return [Stack(name, group) for name, group in groups.items()]


def modules_above(model: nn.Module, names: Iterable[str]) -> Iterator[nn.Module]:
    """Each module on the way from the model to the named ones, once; at least the model."""
    paths = {""}
    for name in names:
        parts = name.split(".")
        paths |= {".".join(parts[:i]) for i in range(len(parts))}
    for path in sorted(paths):
        yield model.get_submodule(path)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not nn.parameter.is_lazy(p))


def lists_text(model: nn.Module) -> str:
    lists = [
        f"{name or 'the model'} ({len(m)} {'/'.join(sorted({type(child).__name__ for child in m}))})"
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)
    ]
    return listed(lists, 12) or "none"


def text_of(blocks: Any) -> str:
    return f"blocks={blocks.pattern!r}" if isinstance(blocks, re.Pattern) else "the places given by blocks="
