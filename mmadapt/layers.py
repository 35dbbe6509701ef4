"""PEFT's tuner layers in a model: all of them, what a switch writes to them, and their parameters by adapter."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from mmadapt.rows import RoutedForward, RowRoutes, refuse_rows

__all__: list[str] = []


class TunerLayers:
    """The tuner layers of a model, found once; `holds`: they and the modules above them still are where they were."""

    def __init__(self, root: nn.Module, peft_model: PeftModel | None) -> None:
        paths = [path for path, module in root.named_modules() if isinstance(module, BaseTunerLayer)]
        self.layers = [root.get_submodule(path) for path in paths]
        self._dicts = [vars(layer) for layer in self.layers]
        # Every link on the way from the root to a tuner layer, once: (parent's children, name, child).
        links = {path.rsplit(".", up)[0] for path in paths for up in range(path.count(".") + 1)}
        parts = [path.rpartition(".") for path in links]
        self._parents = [root.get_submodule(parent)._modules for parent, _, _ in parts]
        self._names = [name for _, _, name in parts]
        self._children = [root.get_submodule(path) for path in links]
        self._adapters = list(peft_model.peft_config) if peft_model is not None else []

    def holds(self, peft_model: PeftModel | None) -> bool:
        adapters = list(peft_model.peft_config) if peft_model is not None else []
        return adapters == self._adapters and all(map(is_, map(dict.get, self._parents, self._names), self._children))

    def activate(self, route: Sequence[str]) -> list:
        """Write the active adapters of all layers; returns what was there."""
        before = [d.get("_active_adapter", []) for d in self._dicts]
        active = list(route)
        for d in self._dicts:
            d["_active_adapter"] = active
        return before

    def suspend_rows(self) -> list[tuple[dict, RoutedForward]]:
        """Take off what `rows_routed` put on all layers, and return it."""
        if not self._dicts or "forward" not in self._dicts[0]:  # the usual switch
            return []
        return [(d, d.pop("forward")) for d in self._dicts if isinstance(d.get("forward"), RoutedForward)]

    @contextmanager
    def rows_routed(self, routes: RowRoutes) -> Iterator[None]:
        refuse_rows(self.layers)
        for layer, d in zip(self.layers, self._dicts, strict=True):
            d["forward"] = RoutedForward(layer, routes)
        try:
            yield
        finally:
            for d in self._dicts:
                del d["forward"]

    def restore(self, before: list) -> None:
        for d, active in zip(self._dicts, before, strict=True):
            d["_active_adapter"] = active


def linear_names(root: nn.Module) -> list[str]:
    """The last parts of the names of a model's linear layers, adapted ones included: what targets are made of."""
    inside = [path for path, module in root.named_modules() if isinstance(module, BaseTunerLayer)]
    linear = {path for path, module in root.named_modules() if isinstance(module, nn.Linear)} | set(inside)
    return sorted({path.rsplit(".", 1)[-1] for path in linear if not path.startswith(tuple(p + "." for p in inside))})


def adapter_parameters(root: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    """An adapter's parameters by the layers' structure: names are never matched by substring."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, layer in root.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        for attribute in layer.adapter_layer_names:
            group = getattr(layer, attribute, None)
            if not isinstance(group, nn.ModuleDict | nn.ParameterDict) or name not in group:
                continue
            part, prefix = group[name], f"{path}.{attribute}.{name}"
            named = [("", part)] if isinstance(part, nn.Parameter) else list(part.named_parameters())
            for suffix, parameter in named:
                found.setdefault(id(parameter), (f"{prefix}.{suffix}" if suffix else prefix, parameter))
    return list(found.values())
