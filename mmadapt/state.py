"""What decides how a tuner layer runs, captured at one moment and put back at another.

A PEFT layer reads its active adapters, its disabled and merged marks and its scalings from plain attributes at every
forward. Activation checkpointing runs a forward twice, the second time during backward, when those attributes may say
something else. `AdapterState.capture` notes them; `AdapterState.applied` restores them around the second run and puts
the live values back, also when that run raises or is stopped early.

    forward:    state = AdapterState.capture(block); y = block(x)
    backward:   with state.applied(): block(x)

Capturing is O(modules below the given ones) and takes microseconds: what lies below a module is found once and kept on
it; each use checks that it still holds, because users also call PEFT directly.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Literal

from torch import nn

__all__ = ["AdapterState", "RecomputationError"]

OnFlags = Literal["error", "follow"]

# The attributes that decide a tuner layer's forward; `merged_adapters` is compared but never written (see `applied`).
_ATTRIBUTES = (
    "_active_adapter",
    "_disable_adapters",
    "scaling",
    "cast_input_dtype_enabled",
    "merged_adapters",
)
_MERGED = _ATTRIBUTES.index("merged_adapters")
_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()  # the class's default holds
_KEY = "_mmadapt_scope"


class RecomputationError(RuntimeError):
    """A recomputation cannot see what its forward saw, so its gradients would be silently wrong."""


class Scope:
    """The modules, tuner layers and parameters below one module, found once and checked at each use.

    It holds the `__dict__`s and not the modules, as attributes are read from there without a descriptor call. It lies
    in the `__dict__` of its module, so that it lives and dies with it; copies and pickles of the module carry none.
    """

    __slots__ = (
        "child_dicts",
        "children",
        "module_dicts",
        "parameter_dicts",
        "parameters",
        "tuner_dicts",
        "tuners",
        "watched",
    )

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        types = tuner_types()
        self.child_dicts = [m._modules for m in modules]
        self.children = list(chain.from_iterable(map(dict.values, self.child_dicts)))
        self.module_dicts = [vars(m) for m in modules]
        self.tuners = [m for m in modules if isinstance(m, types)] if types else []
        self.tuner_dicts = [vars(m) for m in self.tuners]
        self.parameter_dicts = [m._parameters for m in modules if m._parameters]
        self.parameters = list(chain.from_iterable(map(dict.values, self.parameter_dicts)))
        self.watched: set[tuple] = set()  # active adapters under which a run was seen to need nothing else

    def holds(self, root: nn.Module) -> bool:
        """Whether the same modules and parameters are still below `root`, by identity."""
        if self.child_dicts[0] is not root._modules:  # a shallow copy of the module shares our entry
            return False
        if list(chain.from_iterable(map(dict.values, self.child_dicts))) != self.children:
            return False
        parameters = list(chain.from_iterable(map(dict.values, self.parameter_dicts)))
        return len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters))

    def flags(self) -> list[bool]:
        return [p is not None and p.requires_grad for p in self.parameters]

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return bool, ()  # unpickles as False, without mmadapt: the copy finds its own


def scope_of(root: nn.Module) -> Scope:
    """The scope of a module: the one kept on it while it holds, else a new one."""
    scope = vars(root).get(_KEY)
    if not isinstance(scope, Scope) or not scope.holds(root):
        scope = vars(root)[_KEY] = Scope(root)
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


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


class AdapterState:
    """The state of all tuner layers below some modules at the moment of `capture`.

    Active adapters, disabled and merged marks, scalings, the train or eval mode of every module and the
    `requires_grad` flag of every parameter. Two states of the same modules compare equal if nothing of it differs.
    """

    __slots__ = ("_flags", "_roots", "_scopes", "_training", "_values", "_versions")

    def __init__(self, roots: Sequence[nn.Module], scopes: Sequence[Scope]) -> None:
        self._roots = roots
        self._scopes = scopes
        self._values = [
            [_copied(d.get(name, _ABSENT)) for name in _ATTRIBUTES] for scope in scopes for d in scope.tuner_dicts
        ]
        self._training = [d["training"] for scope in scopes for d in scope.module_dicts]
        self._flags = [flag for scope in scopes for flag in scope.flags()]
        self._versions = [None if p is None else p._version for scope in scopes for p in scope.parameters]

    @classmethod
    def capture(cls, *modules: nn.Module) -> "AdapterState":
        """Note the state of all tuner layers at or below `modules`."""
        return cls(modules, [scope_of(module) for module in modules])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AdapterState):
            return NotImplemented
        return (
            all(map(is_, self._scopes, other._scopes))
            and len(self._scopes) == len(other._scopes)
            and self._values == other._values
            and self._training == other._training
            and self._flags == other._flags
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def route(self) -> tuple[str, ...] | None:
        """The active adapters, in order; None if the tuner layers differ in it or there is none."""
        routes = {tuple(_names(values[0])) for values in self._values}
        return routes.pop() if len(routes) == 1 else None

    def describe(self) -> str:
        """One line for error messages: the route and whatever is not usual."""
        routes = sorted({tuple(_names(values[0])) for values in self._values})
        text = "route " + " or ".join(str(list(route)) for route in routes) if routes else "no tuner layer"
        if any(values[1] is True for values in self._values):
            text += ", adapters disabled"
        merged = sorted({name for values in self._values if values[_MERGED] is not _ABSENT for name in values[_MERGED]})
        if merged:
            text += f", merged {merged}"
        modes = {True: "train", False: "eval"}
        return text + ", " + "/".join(modes[mode] for mode in sorted(set(self._training), reverse=True)) + " mode"

    @contextmanager
    def applied(self, *, label: str = "", on_flags: OnFlags = "error") -> Iterator[None]:
        """Run the body under this state; afterwards the live state is back, the very objects that it was made of.

        `label` names the block in errors. A parameter that required grad at capture and does not now gets no gradient
        from autograd, whatever the recomputation does: `on_flags="error"` refuses that, `"follow"` accepts it as an
        un-checkpointed backward would.

        Raises:
            RecomputationError: what was captured cannot be brought back: a module or parameter was replaced or
                removed, a tuner layer was added, an adapter was merged or unmerged, a parameter was edited in place,
                or (`on_flags="error"`) a flag was turned off.
        """
        undo: list[tuple[dict, str, Any]] = []
        flipped: list[tuple[nn.Parameter, bool]] = []
        live_scopes = [scope_of(root) for root in self._roots]
        if not all(map(is_, live_scopes, self._scopes)):
            self._check_replaced(live_scopes, label)
        live = AdapterState(self._roots, self._scopes)
        if live._values != self._values:
            self._check_merged(live, label)
        if live._flags != self._flags and on_flags == "error":
            self._check_flags(live, label)
        if live._versions != self._versions:
            self._check_versions(live, label)
        try:
            if live._values != self._values:
                dicts = [d for scope in self._scopes for d in scope.tuner_dicts]
                for d, then, now in zip(dicts, self._values, live._values, strict=True):
                    for name, value, found in zip(_ATTRIBUTES, then, now, strict=True):
                        if value != found:
                            undo.append((d, name, d.get(name, _ABSENT)))
                            _write(d, name, _copied(value))
            if live._training != self._training:
                dicts = [d for scope in self._scopes for d in scope.module_dicts]
                for d, mode in zip(dicts, self._training, strict=True):
                    if d["training"] is not mode:
                        undo.append((d, "training", d["training"]))
                        d["training"] = mode
            if live._flags != self._flags:
                for parameter, flag, found in zip(self._parameters(), self._flags, live._flags, strict=True):
                    if flag != found:
                        flipped.append((parameter, found))
                        parameter.requires_grad_(flag)
            yield
        finally:
            for d, name, value in reversed(undo):
                _write(d, name, value)
            for parameter, flag in flipped:
                parameter.requires_grad_(flag)

    def _parameters(self) -> list:
        return [parameter for scope in self._scopes for parameter in scope.parameters]

    def _check_replaced(self, live_scopes: Sequence[Scope], label: str) -> None:
        """Refuse a model whose layers or parameters are no longer those of the forward; allow mere additions."""
        for then, now in zip(self._scopes, live_scopes, strict=True):
            what = ""
            if not set(map(id, then.children)) <= set(map(id, now.children)):
                what = "a module below it was replaced or removed (an adapter deleted, a layer swapped)"
            elif not set(map(id, then.parameters)) <= set(map(id, now.parameters)):
                what = "a parameter below it was replaced (load_state_dict(assign=True), a new nn.Parameter)"
            elif len(now.tuners) != len(then.tuners):
                what = "tuner layers were added to it"
            if what:
                raise RecomputationError(
                    f"{_named(label)}: expected the layers of the forward at the recomputation, but {what}. "
                    f"At forward: {self.describe()}. Do: change the model before the forward or after backward."
                )

    def _check_merged(self, live: "AdapterState", label: str) -> None:
        for then, now in zip(self._values, live._values, strict=True):
            if _names(then[_MERGED]) != _names(now[_MERGED]):
                raise RecomputationError(
                    f"{_named(label)}: adapters merged at forward: {_names(then[_MERGED])}, at the recomputation: "
                    f"{_names(now[_MERGED])}. A merge edits the base weight in place and cannot be undone for a "
                    f"recomputation. At forward: {self.describe()}; found: {live.describe()}. "
                    "Do: merge or unmerge before the forward or after backward."
                )

    def _check_flags(self, live: "AdapterState", label: str) -> None:
        idle = self._idle_parameters()
        lost = [
            parameter
            for parameter, then, now in zip(self._parameters(), self._flags, live._flags, strict=True)
            if then and not now and id(parameter) not in idle
        ]
        if lost:
            names = {id(p): name for root in self._roots for name, p in root.named_parameters()}
            listed = ", ".join(names.get(id(p), "?") for p in lost[:4]) + (", ..." if len(lost) > 4 else "")
            raise RecomputationError(
                f"{_named(label)}: {len(lost)} parameters required grad at forward and do not at the recomputation, so "
                f"autograd would drop their gradients: {listed}. At forward: {self.describe()}; found: "
                f"{live.describe()}. Likely cause: PEFT's set_adapter was called in between, which freezes the "
                "adapters that it deactivates. Do: switch with AdapterBank.active, which writes no flag, or set "
                'requires_grad of all trainable adapters again after each switch, or pass on_flags="follow" to accept '
                "that these parameters get no gradient."
            )

    def _check_versions(self, live: "AdapterState", label: str) -> None:
        """Without checkpointing, autograd itself refuses a tensor that it saved and that was then edited in place."""
        idle = self._idle_parameters()
        names = {id(p): name for root in self._roots for name, p in root.named_parameters()}
        edited = [
            names.get(id(parameter), "?")
            for parameter, then, now in zip(self._parameters(), self._versions, live._versions, strict=True)
            if then != now and id(parameter) not in idle
        ]
        if edited:
            listed = ", ".join(edited[:4]) + (", ..." if len(edited) > 4 else "")
            raise RecomputationError(
                f"{_named(label)}: {len(edited)} parameters were edited in place since its forward (an optimizer step, "
                f"load_state_dict), so it would compute something else: {listed}. At forward: {self.describe()}. "
                "Do: call backward before the edit, or run the forward after it."
            )

    def _idle_parameters(self) -> set[int]:
        """Ids of the parameters of adapters that were not active at capture: their flags decide nothing here."""
        idle: set[int] = set()
        tuners = [tuner for scope in self._scopes for tuner in scope.tuners]
        for tuner, values in zip(tuners, self._values, strict=True):
            active = () if values[1] is True else _names(values[0])
            for attribute in getattr(tuner, "adapter_layer_names", ()):
                group = getattr(tuner, attribute, None)
                if isinstance(group, nn.ModuleDict | nn.ParameterDict):
                    for name, part in group.items():
                        if name not in active:
                            idle |= {id(p) for p in (part.parameters() if isinstance(part, nn.Module) else [part])}
        return idle


def _names(value: Any) -> list[str]:
    return [] if value is _ABSENT else [value] if isinstance(value, str) else list(value)


def _named(label: str) -> str:
    return f"cannot recompute {label}" if label else "cannot recompute"


def _write(attributes: dict, name: str, value: Any) -> None:
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value
