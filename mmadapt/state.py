"""What decides how the layers below a module run, captured at one moment and put back at another.

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
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter, is_, methodcaller
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["AdapterState", "RecomputationError", "StateHandle", "register_state"]

OnFlags = Literal["error", "follow"]

# The attributes that decide a tuner layer's forward; `merged_adapters` is compared but never written (see `applied`).
_ATTRIBUTES = (
    "_active_adapter",
    "_disable_adapters",
    "scaling",
    "cast_input_dtype_enabled",
    "merged_adapters",
    "forward",  # a route per row stands in for it (`mmadapt.rows`)
)
_MERGED = _ATTRIBUTES.index("merged_adapters")
_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()  # the class's default holds
_KEY = "_mmadapt_scope"

# Hooks run as part of a forward. Each kind is a dict by id, and dicts beside it say how to call some of them.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_DETAILS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_is_full_backward_hook",
)


class RecomputationError(RuntimeError):
    """A recomputation cannot see what its forward saw, so its gradients would be silently wrong."""


class Scope:
    """What lies below one module, found once and checked at each use.

    It holds the `__dict__`s and not the modules, as attributes are read from there without a descriptor call. It lies
    in the `__dict__` of its module, so that it lives and dies with it; copies and pickles of the module carry none.
    """

    __slots__ = (
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
        self.buffer_dicts = [d for d in buffers if d]
        self.children = [child for d in children for child in d.values()]
        self.parameters = [p for d in parameters for p in d.values() if p is not None]
        self.scalars = [(d, k, p) for d in parameters for k, p in d.items() if p is not None and _is_scalar(p)]
        self.buffers = [(d, name) for d in self.buffer_dicts for name in d]
        norms = {id(m._buffers) for m in modules if isinstance(m, _NormBase)}
        self.statistics = {i for i, (d, _) in enumerate(self.buffers) if id(d) in norms}
        self.module_dicts = [vars(m) for m in modules]
        self.hook_dicts = [vars(m).get(kind) for m in modules for kind in _HOOKS]
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
        if any(self.empty) or len(self.buffers) != sum(map(len, self.buffer_dicts)):
            return False
        # `==` on dicts looks at identity first. Other modules are unequal then, and other parameters have no truth
        # value, which raises, but for those of one element.
        try:
            if self.dicts != self.dicts_then:
                return False
        except RuntimeError:
            return False
        return all(d[name] is p for d, name, p in self.scalars)

    def read(self) -> tuple:
        """All that is compared between forward and recomputation, as plain lists; `_VALUES` and so on name them."""
        parameters = self.parameters
        absent = _ABSENT
        return (
            # Those of `_ATTRIBUTES`, by hand: this is half of what capturing costs.
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
            list(map(_read_training, self.module_dicts)),
            list(map(_read_flag, parameters)),
            _versions(parameters),
            _pointers(parameters),
            {i: h for i, d in enumerate(self.module_dicts) if any((h := _hooks_of(d))[: len(_HOOKS)])}
            if any(self.hook_dicts)
            else {},
        )

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return bool, ()  # unpickles as False, without mmadapt: the copy finds its own


_VALUES, _TRAINING, _FLAGS, _VERSIONS, _POINTERS, _HOOKED = range(6)  # the fields of `Scope.read`
_read_training = methodcaller("get", "training")  # compiled modules have none of their own
_read_flag = attrgetter("requires_grad")


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


def _is_scalar(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.numel() == 1


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects. (`==` on lists would compare tensors by value.)"""
    return len(these) == len(those) and all(map(is_, these, those))


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _pointers(tensors: Sequence[Tensor]) -> list[int] | None:
    """Where the tensors' data lies; None for fake tensors, which have none."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return None


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    try:
        return list(map(_read_version, tensors))
    except RuntimeError:  # some were made in inference mode, where nothing counts edits
        return list(map(version_of, tensors))


_read_version = attrgetter("_version")


def version_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def _hooks_of(module_dict: dict) -> list:
    """Copies of a module's hooks, and of what says how to call them."""
    values = [module_dict.get(name) for name in (*_HOOKS, *_HOOK_DETAILS)]
    return [value.copy() if isinstance(value, dict) else value for value in values]


class Buffers:
    """The buffers below some modules at one forward, and their values before it where that forward writes them.

    A forward that updates a buffer (running statistics, the vectors of a power iteration) must find the same value
    when it is recomputed, and must not update it twice. Which buffers a forward writes shows only afterwards, so under
    each mode (train or eval of every module) the first one keeps a copy of all; later ones of those that it wrote.
    (Batch norm's update does not count as an edit for torch: its statistics are always copied.)
    """

    __slots__ = ("_before", "_copies", "_key", "_scopes", "_surprises", "tensors", "versions")

    def __init__(self, scopes: Sequence[Scope], key: tuple) -> None:
        self._scopes = scopes
        self._key = key
        self.tensors: list[list[Tensor | None]] = [[d[name] for d, name in scope.buffers] for scope in scopes]
        self.versions = [[version_of(t) for t in tensors] for tensors in self.tensors]
        self._surprises: list[str] = []
        self._copies: list[dict[int, Tensor]] = []
        for scope, tensors in zip(scopes, self.tensors, strict=True):
            which = scope.written.get(key, set(range(len(tensors)))) | scope.statistics
            self._copies.append({i: t.detach().clone() for i in which if (t := tensors[i]) is not None})

    def forward_done(self) -> None:
        """Note which buffers the forward wrote, and keep only their copies."""
        for n, scope in enumerate(self._scopes):
            edited = {
                i
                for i, (d, name) in enumerate(scope.buffers)
                if d.get(name) is not self.tensors[n][i] or version_of(d.get(name)) != self.versions[n][i]
            }
            known = scope.written.get(self._key)
            if known is None:
                # By value too: `.data` and fused kernels do not count as edits. (Once, as it waits for the device.)
                by_value = {
                    i
                    for i, copy in self._copies[n].items()
                    if i not in edited and not torch.equal(copy, scope.buffers[i][0][scope.buffers[i][1]])
                }
                known = edited | by_value | scope.statistics
            else:
                self._surprises += [scope.buffers[i][1] for i in sorted(edited - known)]
            scope.written[self._key] = edited | known
            self._copies[n] = {i: copy for i, copy in self._copies[n].items() if i in scope.written[self._key]}

    def check(self, label: str) -> None:
        """Refuse buffers whose value at the forward is lost."""
        edited = list(self._surprises)
        for scope, tensors, versions, copies in zip(
            self._scopes, self.tensors, self.versions, self._copies, strict=True
        ):
            edited += [
                scope.buffers[i][1]
                for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True))
                if i not in copies and version_of(tensor) != version
            ]
        if edited:
            raise RecomputationError(
                f"{_named(label)}: expected the buffers of its forward, but {len(edited)} were edited in place since "
                f"it began: {_listed(edited)}. Do: edit buffers before the forward or after backward; one that a "
                "forward updates now and then, have it updated in every forward."
            )

    def swap_in(self, undo: list[tuple[dict, str, Any]]) -> None:
        """Put the forward's buffers in place: copies of those that it writes, so that the live ones stay untouched."""
        for scope, tensors, copies in zip(self._scopes, self.tensors, self._copies, strict=True):
            for i, (d, name) in enumerate(scope.buffers):
                live = d.get(name, _ABSENT)
                copy = copies.get(i)
                then = tensors[i] if copy is None else copy.clone()  # a second backward needs the copy again
                if live is not then:
                    undo.append((d, name, live))
                    d[name] = then


def _read_globals() -> tuple:
    """Process-wide settings that decide which kernel runs and in which type."""
    c = torch._C
    return (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
        torch.get_default_dtype(),
    )


def _write_globals(values: tuple) -> None:
    c = torch._C
    c._set_sdp_use_flash(values[0])
    c._set_sdp_use_mem_efficient(values[1])
    c._set_sdp_use_math(values[2])
    c._set_sdp_use_cudnn(values[3])
    torch.set_default_dtype(values[4])


Restore = Callable[[], AbstractContextManager[Any]]
_registered: list[Callable[[], Restore]] = []
_lock = threading.RLock()  # one recomputation at a time: two would write the state of the same layers


_counts_fused_steps = False


def _count_fused_steps() -> None:
    """From the first forward on, have a fused optimizer's step count as an edit in place, as other optimizers' do."""
    global _counts_fused_steps
    if not _counts_fused_steps:
        _counts_fused_steps = True
        register_optimizer_step_post_hook(_note_fused_step)


def _note_fused_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    torch.autograd.graph.increment_version(parameter)


class StateHandle:
    """What `register_state` returns; `remove()` ends the registration."""

    def __init__(self, capture: Callable[[], Restore]) -> None:
        self._capture = capture

    def remove(self) -> None:
        if self._capture in _registered:
            _registered.remove(self._capture)


def register_state(capture: Callable[[], Restore]) -> StateHandle:
    """Have further state restored for every recomputation: whatever a forward reads and no module or ContextVar holds.

    `capture()` is called at each checkpointed forward and returns a function that is called at its recomputation and
    returns a context manager, under which that runs:

        def capture():
            then = library.current_context()
            return lambda: library.use_context(then)

        handle = register_state(capture)

    Raises:
        TypeError: `capture` is not callable.
    """
    if not callable(capture):
        raise TypeError(f"register_state: expected a function, got {capture!r}")
    _registered.append(capture)
    return StateHandle(capture)


class AdapterState:
    """The state of all layers below some modules at the moment of `capture`.

    Of PEFT's layers the active adapters, disabled and merged marks and scalings; of every module the train or eval
    mode, the hooks and the buffers; the `requires_grad` flag of every parameter; torch's choice of attention kernels
    and default dtype; and what `register_state` adds. Two states of the same modules compare equal if nothing of what
    the modules hold differs.
    """

    __slots__ = ("_buffers", "_globals", "_reads", "_restores", "_roots", "_scopes")

    def __init__(self, roots: Sequence[nn.Module], scopes: Sequence[Scope]) -> None:
        """The live state, read without what `capture` notes beside it; the scopes are those of the roots."""
        self._roots = roots
        self._scopes = scopes
        self._reads = [scope.read() for scope in scopes]
        self._buffers: Buffers | None = None
        self._globals: tuple = ()
        self._restores: list[Restore] = []

    @classmethod
    def capture(cls, *modules: nn.Module) -> "AdapterState":
        """Note the state of all layers at or below `modules`."""
        return cls._capture(modules, [scope_of(module) for module in modules])

    @classmethod
    def _capture(cls, modules: Sequence[nn.Module], scopes: Sequence[Scope]) -> "AdapterState":
        _count_fused_steps()
        state = cls(modules, scopes)
        if any(scope.buffers for scope in scopes):
            state._buffers = Buffers(scopes, tuple(tuple(read[_TRAINING]) for read in state._reads))
        state._globals = _read_globals()
        if _registered:
            state._restores = [capture() for capture in _registered]
        return state

    def forward_done(self) -> None:
        """Say that the forward has run whose state this is: the buffers that it wrote are known now.

        Without it, buffers that were edited in place since `capture` are restored from copies.
        """
        if self._buffers is not None:
            self._buffers.forward_done()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AdapterState):
            return NotImplemented
        return _same(self._scopes, other._scopes) and self._reads == other._reads

    __hash__ = None  # type: ignore[assignment]

    @property
    def route(self) -> tuple[str, ...] | None:
        """The active adapters, in order; None if the tuner layers differ in it or there is none."""
        routes = {tuple(_names(values[0])) for values in self._tuner_values()}
        return routes.pop() if len(routes) == 1 else None

    def describe(self) -> str:
        """One line for error messages: the route and whatever is not usual."""
        all_values = self._tuner_values()
        routes = sorted({tuple(_names(values[0])) for values in all_values})
        text = "route " + " or ".join(str(list(route)) for route in routes) if routes else "no tuner layer"
        if any(values[1] is True for values in all_values):
            text += ", adapters disabled"
        merged = sorted({name for values in all_values if values[_MERGED] is not _ABSENT for name in values[_MERGED]})
        if merged:
            text += f", merged {merged}"
        if any(read[_HOOKED] for read in self._reads):
            text += ", with hooks"
        modes = {mode for read in self._reads for mode in read[_TRAINING]}
        return text + ", " + "/".join("train" if mode else "eval" for mode in sorted(modes, reverse=True)) + " mode"

    @contextmanager
    def applied(self, *, label: str = "", on_flags: OnFlags = "error") -> Iterator[None]:
        """Run the body under this state; afterwards the live state is back, the very objects that it was made of.

        `label` names the block in errors. A parameter that required grad at capture and does not now gets no gradient
        from autograd, whatever the recomputation does: `on_flags="error"` refuses that, `"follow"` accepts it as an
        un-checkpointed backward would. One thread at a time is in such a body; the others wait.

        Raises:
            RecomputationError: what was captured cannot be brought back: a module or parameter was replaced or
                removed, a tuner layer was added, an adapter was merged or unmerged, a parameter or buffer was edited
                in place or moved, or (`on_flags="error"`) a flag was turned off.
        """
        with _lock, ExitStack() if self._restores else nullcontext() as stack:
            undo: list[tuple[dict, str, Any]] = []
            flipped: list[tuple[nn.Parameter, bool]] = []
            live = self._checked(label, on_flags)
            globals_now = _read_globals()
            try:
                if live._reads != self._reads:
                    self._write_over(live, undo, flipped)
                if self._buffers is not None:
                    self._buffers.swap_in(undo)
                if self._globals and globals_now != self._globals:
                    _write_globals(self._globals)
                if stack is not None:
                    for restore in self._restores:
                        stack.enter_context(restore())
                yield
            finally:
                for d, name, value in reversed(undo):
                    _write(d, name, value)
                for parameter, flag in flipped:
                    parameter.requires_grad_(flag)
                # What the function itself writes; stopped early, it does not come to undo it.
                after = AdapterState(self._roots, self._scopes)
                if after._reads != live._reads:
                    live._write_over(after, [], [])
                if self._globals and globals_now != self._globals:
                    _write_globals(globals_now)

    def _checked(self, label: str, on_flags: OnFlags) -> "AdapterState":
        """The live state, where this one can be brought back over it."""
        live_scopes = [scope_of(root) for root in self._roots]
        if not _same(live_scopes, self._scopes):
            self._check_replaced(live_scopes, label)
        live = AdapterState(self._roots, self._scopes)
        if live._reads != self._reads:
            self._check_merged(live, label)
            if on_flags == "error":
                self._check_flags(live, label)
            self._check_edited(live, label)
        if self._buffers is not None:
            self._buffers.check(label)
        return live

    def _write_over(
        self, live: "AdapterState", undo: list[tuple[dict, str, Any]], flipped: list[tuple[nn.Parameter, bool]]
    ) -> None:
        """Write what differs from the live state, noting what was there before anything else can go wrong."""
        for scope, then, now in zip(self._scopes, self._reads, live._reads, strict=True):
            for d, values, found in zip(scope.tuner_dicts, then[_VALUES], now[_VALUES], strict=True):
                for name, value, live_value in zip(_ATTRIBUTES, values, found, strict=True):
                    if value != live_value:
                        undo.append((d, name, d.get(name, _ABSENT)))
                        _write(d, name, _copied(value))
            for d, mode, live_mode in zip(scope.module_dicts, then[_TRAINING], now[_TRAINING], strict=True):
                if mode is not live_mode:
                    undo.append((d, "training", live_mode))
                    d["training"] = mode
            for i in then[_HOOKED].keys() | now[_HOOKED].keys():
                if then[_HOOKED].get(i) != now[_HOOKED].get(i):
                    d = scope.module_dicts[i]
                    none = [OrderedDict() if name in _HOOKS else d.get(name) for name in (*_HOOKS, *_HOOK_DETAILS)]
                    for name, value in zip((*_HOOKS, *_HOOK_DETAILS), then[_HOOKED].get(i, none), strict=True):
                        undo.append((d, name, d.get(name, _ABSENT)))
                        d[name] = value.copy() if isinstance(value, dict) else value
            for parameter, flag, live_flag in zip(scope.parameters, then[_FLAGS], now[_FLAGS], strict=True):
                if flag != live_flag:
                    flipped.append((parameter, live_flag))
                    parameter.requires_grad_(flag)

    def _tuner_values(self) -> list[tuple]:
        return [values for read in self._reads for values in read[_VALUES]]

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
        for then, now in zip(self._tuner_values(), live._tuner_values(), strict=True):
            if _names(then[_MERGED]) != _names(now[_MERGED]):
                raise RecomputationError(
                    f"{_named(label)}: adapters merged at forward: {_names(then[_MERGED])}, at the recomputation: "
                    f"{_names(now[_MERGED])}. A merge edits the base weight in place and cannot be undone for a "
                    f"recomputation. At forward: {self.describe()}; found: {live.describe()}. "
                    "Do: merge or unmerge before the forward or after backward."
                )

    def _check_flags(self, live: "AdapterState", label: str) -> None:
        lost = self._parameters_where(live, _FLAGS, lambda then, now: then and not now)
        if lost:
            raise RecomputationError(
                f"{_named(label)}: {len(lost)} parameters required grad at forward and do not at the recomputation, so "
                f"autograd would drop their gradients: {_listed(lost)}. At forward: {self.describe()}; found: "
                f"{live.describe()}. Likely cause: PEFT's set_adapter was called in between, which freezes the "
                "adapters that it deactivates. Do: switch with AdapterBank.active, which writes no flag, or set "
                'requires_grad of all trainable adapters again after each switch, or pass on_flags="follow" to accept '
                "that these parameters get no gradient."
            )

    def _check_edited(self, live: "AdapterState", label: str) -> None:
        """Without checkpointing, autograd itself refuses a tensor that it saved and that was then edited in place."""
        edited = self._parameters_where(live, _VERSIONS)
        moved = [name for name in self._parameters_where(live, _POINTERS) if name not in edited]
        for names, what in (
            (edited, "were edited in place since its forward (an optimizer step, load_state_dict)"),
            (moved, "were given other data since its forward (`.data = ...`, a change of dtype or device)"),
        ):
            if names:
                raise RecomputationError(
                    f"{_named(label)}: {len(names)} parameters {what}, so it would compute something else: "
                    f"{_listed(names)}. At forward: {self.describe()}. "
                    "Do: call backward before the edit, or run the forward after it."
                )

    def _parameters_where(
        self, live: "AdapterState", field: int, differs: Callable[[Any, Any], bool] = lambda then, now: then != now
    ) -> list[str]:
        """Names of the parameters whose `field` differs, but for those that the forward did not use."""
        found = [
            parameter
            for scope, then, now in zip(self._scopes, self._reads, live._reads, strict=True)
            if then[field] is not None and now[field] is not None
            for parameter, before, after in zip(scope.parameters, then[field], now[field], strict=True)
            if differs(before, after)
        ]
        if not found:
            return []
        idle = self._idle_parameters()
        names = {id(p): name for root in self._roots for name, p in root.named_parameters()}
        return [names.get(id(p), "?") for p in found if id(p) not in idle]

    def _idle_parameters(self) -> set[int]:
        """Ids of the parameters of adapters that were not active at capture: they decide nothing here."""
        idle: set[int] = set()
        tuners = [tuner for scope in self._scopes for tuner in scope.tuners]
        for tuner, values in zip(tuners, self._tuner_values(), strict=True):
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


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _write(attributes: dict, name: str, value: Any) -> None:
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value
