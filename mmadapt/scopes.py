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
    """All that is compared between a forward and its recomputation, in the order of the scope's lists."""

    values: list[tuple]  # `ATTRIBUTES` of each tuner layer; these four can be written back
    training: list[bool | None]  # of each module
    hooks: dict[int, list]  # of the modules that have any
    flags: list[bool]  # requires_grad of each parameter
    versions: list[int | None]  # how often each parameter was edited in place
    pointers: list[int] | None  # where the data of each parameter lies


# They have no forward: their hooks decide nothing.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Scope:
    """What lies below one module, found once and checked at each use.

    It holds the `__dict__`s and not the modules, as attributes are read from there without a descriptor call. It lies
    in the `__dict__` of its module, so that it lives and dies with it; copies and pickles of the module carry none.
    """

    __slots__ = (
        "all_buffers",
        "buffer_dicts",
        "buffers",
        "children",
        "dicts",
        "dicts_then",
        "empty",
        "hook_dicts",
        "is_compiled",
        "module_dicts",
        "parameters",
        "root_children",
        "routes",
        "scalars",
        "statistics",
        "tuner_dicts",
        "tuner_gets",
        "tuners",
        "watched",
        "written",
    )

    def __init__(self, root: nn.Module) -> None:
        modules = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
        types = tuner_types()
        children: list[dict] = [m._modules for m in modules]
        parameters: list[dict] = [m._parameters for m in modules]
        buffers: list[dict] = [m._buffers for m in modules]
        self.root_children = root._modules
        self.empty = [d for d in (*children, *parameters, *buffers) if not d]  # `holds` checks that they still are
        self.dicts = [d for d in (*children, *parameters) if d]
        self.dicts_then = [dict(d) for d in self.dicts]
        self.all_buffers = buffers
        self.buffer_dicts = [d for d in buffers if d]
        self.children = [child for d in children for child in d.values()]
        self.parameters = [p for d in parameters for p in d.values() if p is not None]
        self.scalars = [(d, k, p) for d in parameters for k, p in d.items() if p is not None and _is_scalar(p)]
        self.buffers = [(d, name) for d in self.buffer_dicts for name in d]
        norms = {id(m._buffers) for m in modules if isinstance(m, _NormBase)}
        self.statistics = {i for i, (d, _) in enumerate(self.buffers) if id(d) in norms}
        self.module_dicts = [vars(m) for m in modules]
        runnable = [vars(m) for m in modules if type(m) not in _CONTAINERS]
        self.hook_dicts = [hooks for d in runnable for kind in HOOKS if (hooks := d.get(kind)) is not None]
        self.tuners = [m for m in modules if isinstance(m, types)] if types else []
        self.tuner_dicts = [vars(m) for m in self.tuners]
        self.tuner_gets = [d.get for d in self.tuner_dicts]
        # A compiled module traces the hooks of the process into its graph, so its runs are not watched.
        self.is_compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules)
        self.watched: set[tuple] = set()  # see `mmadapt.search`
        self.routes: set[tuple] = set()
        self.written: dict[tuple, set[int]] = {}  # see `Buffers`

    def holds(self, root: nn.Module) -> bool:
        """Whether the same modules and parameters, and the same names of buffers, are still below `root`."""
        if self.root_children is not root._modules:  # a shallow copy of the module shares our entry
            return False
        if self.has_grown():
            return False
        # `==` on dicts looks at identity first. Other modules are unequal then, and other parameters have no truth
        # value, which raises, but for those of one element.
        try:
            if self.dicts != self.dicts_then:
                return False
        except RuntimeError:
            return False
        return all(d[name] is p for d, name, p in self.scalars)

    def has_grown(self) -> bool:
        """Whether a module got its first child, parameter or buffer, or another number of buffers."""
        return any(self.empty) or len(self.buffers) != sum(map(len, self.buffer_dicts))

    def new_buffers(self) -> list[tuple[dict, str]]:
        """The buffers that were registered since, with the dicts that they are in."""
        known = {(id(d), name) for d, name in self.buffers}
        return [(d, name) for d in self.all_buffers for name in d if (id(d), name) not in known]

    def read(self) -> Reading:
        """What holds at this moment."""
        return Reading(*self.read_settings(), versions_of(self.parameters), pointers_of(self.parameters))

    def read_settings(self) -> tuple[list[tuple], list[bool | None], dict[int, list], list[bool]]:
        """The first four fields of a reading."""
        absent = ABSENT
        return (
            # Those of `ATTRIBUTES`, by hand: this is half of what capturing costs.
            [
                (
                    active.copy() if type(active := get("_active_adapter", absent)) is list else active,
                    get("_disable_adapters", absent),
                    scaling.copy() if type(scaling := get("scaling", absent)) is dict else scaling,
                    get("cast_input_dtype_enabled", absent),
                    merged.copy() if type(merged := get("merged_adapters", absent)) is list else merged,
                    get("forward", absent),
                )
                for get in self.tuner_gets
            ],
            self._read_training(),
            {i: h for i, d in enumerate(self.module_dicts) if any((h := hooks_of(d))[: len(HOOKS)])}
            if any(self.hook_dicts)
            else {},
            list(map(_read_flag, self.parameters)),
        )

    def _read_training(self) -> list[bool | None]:
        try:
            return list(map(_read_mode, self.module_dicts))
        except KeyError:  # compiled modules have none of their own
            return [d.get("training") for d in self.module_dicts]

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
