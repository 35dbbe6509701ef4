"""What lies below a module, found once and kept on it: the layers, parameters and buffers that its forward reads.

Capturing the state of a block must take microseconds, so nothing is searched for at a forward. `scope_of` finds the
parts once; each use checks that they are still in place, because users also call PEFT and torch directly.
"""

import sys
from collections.abc import Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

__all__: list[str] = []

# The attributes that decide a tuner layer's forward; `merged_adapters` is compared but never written (see `applied`).
ATTRIBUTES = (
    "_active_adapter",
    "_disable_adapters",
    "scaling",
    "cast_input_dtype_enabled",
    "merged_adapters",
    "forward",  # a route per row stands in for it (`mmadapt.rows`)
)
MERGED = ATTRIBUTES.index("merged_adapters")
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()  # the class's default holds
KEY = "_mmadapt_scope"

# Hooks run as part of a forward. Each kind is a dict by id, and dicts beside it say how to call some of them.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOK_DETAILS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_is_full_backward_hook",
)


class Reading(NamedTuple):
    """All that is compared between a forward and its recomputation, in the order of the scope's or the view's lists."""

    values: list[tuple]  # `ATTRIBUTES` of each tuner layer; these four can be written back
    training: list[bool | None]  # of each module
    hooks: dict[int, list]  # of the modules that have any
    flags: list[bool]  # requires_grad of each parameter
    versions: list[int | None]  # how often each parameter was edited in place
    pointers: list[int] | None  # where the data of each parameter lies


# They have no forward: their hooks and modes decide nothing.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class View:
    """The part of a scope that runs under some adapters: all but what belongs to the other adapters.

    What a forward costs must not grow with the number of modalities, so of adapters that are not active nothing is
    read. It goes through one list of like things after the other, each in C, as it runs at every forward.
    """

    __slots__ = (
        "children",
        "dicts",
        "dicts_then",
        "empty",
        "hook_dicts",
        "module_dicts",
        "no_buffers",
        "parameters",
        "scalars",
    )

    def __init__(self, modules: Sequence[nn.Module], groups: dict[int, set[str]] | None) -> None:
        """`groups` says of which parts of some containers the view consists, by the container's id; None: of all."""
        children: list[dict] = [m._modules for m in modules]
        parameters: list[dict] = [m._parameters for m in modules]
        dicts = [*children, *parameters]
        # `holds` checks that they still are empty.
        self.no_buffers: list[dict] = [m._buffers for m in modules if not m._buffers]
        self.empty = [*(d for d in dicts if not d), *self.no_buffers]
        self.dicts = [d for d in dicts if d]
        self.dicts_then = [dict(d) for d in self.dicts]
        self.children = modules
        named = [(m, k, p) for m in modules for k, p in m._parameters.items() if p is not None]
        if groups is not None:
            named = [(m, k, p) for m, k, p in named if id(m) not in groups or k in groups[id(m)]]
            modules = [m for m in modules if type(m) not in _CONTAINERS]
        self.parameters = list({id(p): p for _, _, p in named}.values())
        self.scalars = [(m._parameters, k, p) for m, k, p in named if _is_scalar(p)]
        self.module_dicts = [vars(m) for m in modules]
        self.hook_dicts = [hooks for d in self.module_dicts for kind in HOOKS if (hooks := d.get(kind)) is not None]

    def holds(self) -> bool:
        """Whether the same modules and parameters are still in place."""
        if any(self.empty):
            return False
        # `==` on dicts looks at identity first. Other modules are unequal then, and other parameters have no truth
        # value, which raises, but for those of one element.
        try:
            if self.dicts != self.dicts_then:
                return False
        except RuntimeError:
            return False
        return not self.scalars or all(d[name] is p for d, name, p in self.scalars)

    def read_settings(self) -> tuple[list[bool | None], dict[int, list], list[bool]]:
        """Modes, hooks and flags."""
        dicts = self.module_dicts
        try:
            training: list[bool | None] = list(map(_read_mode, dicts))
        except KeyError:  # compiled modules have none of their own
            training = [d.get("training") for d in dicts]
        hooks = (
            {i: h for i, d in enumerate(dicts) if any((h := hooks_of(d))[: len(HOOKS)])} if any(self.hook_dicts) else {}
        )
        return training, hooks, list(map(_read_flag, self.parameters))


class Scope:
    """What lies below one module, found once and checked at each use.

    It holds the `__dict__`s and not the modules, as attributes are read from there without a descriptor call. It lies
    in the `__dict__` of its module, so that it lives and dies with it; copies and pickles of the module carry none.
    """

    __slots__ = (
        "all_buffers",
        "buffer_dicts",
        "buffers",
        "full",
        "is_compiled",
        "root_children",
        "root_dict",
        "routes",
        "statistics",
        "tuner_dicts",
        "tuner_gets",
        "tuners",
        "views",
        "watched",
        "written",
    )

    def __init__(self, root: nn.Module) -> None:
        modules = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
        types = tuner_types()
        self.root_dict = vars(root)
        self.root_children = root._modules
        self.full = View(modules, None)
        self.views: dict[tuple, View] = {}
        self.all_buffers: list[dict] = [m._buffers for m in modules]
        self.buffer_dicts = [d for d in self.all_buffers if d]
        self.buffers = [(d, name) for d in self.buffer_dicts for name in d]
        norms = {id(m._buffers) for m in modules if isinstance(m, _NormBase)}
        self.statistics = {i for i, (d, _) in enumerate(self.buffers) if id(d) in norms}
        self.tuners = [m for m in modules if isinstance(m, types)] if types else []
        self.tuner_dicts = [vars(m) for m in self.tuners]
        self.tuner_gets = [d.get for d in self.tuner_dicts]
        # A compiled module traces the hooks of the process into its graph, so its runs are not watched.
        self.is_compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules)
        self.watched: set[tuple] = set()  # see `mmadapt.search`
        self.routes: set[tuple] = set()
        self.written: dict[tuple, set[int]] = {}  # see `Buffers`

    def holds(self, root: nn.Module) -> bool:
        """Whether the same modules, parameters and names of buffers are below `root`, idle adapters left aside."""
        # A shallow copy of the module shares our entry.
        if self.root_children is not root._modules or self.has_new_buffers():
            return False
        key = self._running()
        view = self.full if key is None else self.views.get(key)
        # Adapters that did not run before: a view of them, taken from a changed tree, would hold what this scope lacks.
        return self.full.holds() if view is None else view.holds()

    def view(self) -> View:
        """What runs under the adapters of now; for a scope that holds."""
        key = self._running()
        if key is None:
            return self.full
        found = self.views.get(key)
        if found is None:
            found = self.views[key] = self._view_of(key)
        return found

    def _running(self) -> tuple[tuple[str, ...], ...] | None:
        """The adapters that run in each tuner layer; None where something else may choose: a route per row, hooks."""
        key: list[tuple[str, ...]] = []
        for get in self.tuner_gets:
            if get("forward") is not None or get("_forward_pre_hooks"):
                return None
            active = get("_active_adapter", ()) if get("_disable_adapters") is not True else ()
            names = (active,) if type(active) is str else tuple(active)
            key.append((*names, *merged) if (merged := get("merged_adapters")) else names)
        return tuple(key) or None

    def _view_of(self, running: tuple[tuple[str, ...], ...]) -> View:
        """The view under which these adapters of each tuner layer run."""
        groups: dict[int, set[str]] = {}
        for names, tuner in zip(running, self.tuners, strict=True):
            for attribute in getattr(tuner, "adapter_layer_names", ()):
                group = getattr(tuner, attribute, None)
                if isinstance(group, nn.ModuleDict | nn.ParameterDict):
                    groups[id(group)] = set(names)
        modules: dict[int, nn.Module] = {}

        def walk(module: nn.Module) -> None:
            modules[id(module)] = module
            names = groups.get(id(module))
            for name, child in module._modules.items():
                if (
                    child is not None
                    and id(child) not in modules
                    and (names is None or name in names)
                    and not isinstance(child, torch.jit.ScriptModule)
                ):
                    walk(child)

        walk(self.full.children[0])
        return View(list(modules.values()), groups)

    def has_new_buffers(self) -> bool:
        """Whether one of the modules that have buffers has another number of them."""
        return len(self.buffers) != sum(map(len, self.buffer_dicts)) if self.buffer_dicts else False

    def new_buffers(self) -> list[tuple[dict, str]]:
        """The buffers that were registered since, with the dicts that they are in."""
        known = {(id(d), name) for d, name in self.buffers}
        return [(d, name) for d in self.all_buffers for name in d if (id(d), name) not in known]

    def read_values(self) -> list[tuple]:
        """Those of `ATTRIBUTES` of each tuner layer."""
        absent = ABSENT
        return [
            (
                active.copy() if type(active := get("_active_adapter", absent)) is list else active,
                get("_disable_adapters", absent),
                scaling.copy() if type(scaling := get("scaling", absent)) is dict else scaling,
                get("cast_input_dtype_enabled", absent),
                merged.copy() if type(merged := get("merged_adapters", absent)) is list else merged,
                get("forward", absent),
            )
            for get in self.tuner_gets
        ]

    def read(self, view: View) -> Reading:
        """What holds at this moment."""
        parameters = view.parameters
        return Reading(self.read_values(), *view.read_settings(), versions_of(parameters), pointers_of(parameters))

    def read_settings(self) -> tuple:
        """The first four fields of a reading, of everything, idle adapters included."""
        return self.read_values(), *self.full.read_settings()

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return bool, ()  # unpickles as False, without mmadapt: the copy finds its own


_read_mode = itemgetter("training")
_read_flag = attrgetter("requires_grad")


def scope_of(root: nn.Module) -> Scope:
    """The scope of a module: the one kept on it while it holds, else a new one."""
    scope = vars(root).get(KEY)
    if not isinstance(scope, Scope) or not scope.holds(root):
        scope = vars(root)[KEY] = Scope(root)
    return scope


_tuner_types: tuple[type, ...] = ()


def tuner_types() -> tuple[type, ...]:
    """PEFT's layer classes; none while nothing has imported PEFT, for then no layer of it can exist."""
    global _tuner_types
    if not _tuner_types and "peft" in sys.modules:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        _tuner_types = BaseTunerLayer, AuxiliaryTrainingWrapper
    return _tuner_types


def _is_scalar(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.numel() == 1


def same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects. (`==` on lists would compare tensors by value.)"""
    return len(these) == len(those) and all(map(is_, these, those))


def copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def pointers_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Where the tensors' data lies; None for fake tensors, which have none."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return None


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    try:
        return list(map(_read_version, tensors))
    except RuntimeError:  # some were made in inference mode, where nothing counts edits
        return list(map(version_of, tensors))


_read_version = attrgetter("_version")


def version_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def hooks_of(module_dict: dict) -> list:
    """Copies of a module's hooks, and of what says how to call them."""
    values = [module_dict.get(name) for name in (*HOOKS, *HOOK_DETAILS)]
    return [value.copy() if isinstance(value, dict) else value for value in values]
