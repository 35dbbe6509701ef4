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

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mmadapt.buffers import Buffers
from mmadapt.errors import RecomputationError, cannot_recompute, listed
from mmadapt.scopes import ABSENT, ATTRIBUTES, HOOK_DETAILS, HOOKS, MERGED, Scope, View, copied, same, scope_of

__all__ = ["AdapterState", "StateHandle", "register_state"]

OnFlags = Literal["error", "follow"]


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


def has_registered() -> bool:
    return bool(_registered)


class AdapterState:
    """The state of all layers below some modules at the moment of `capture`.

    Of PEFT's layers the active adapters, disabled and merged marks and scalings; of every module the train or eval
    mode, the hooks and the buffers; the `requires_grad` flag of every parameter; torch's choice of attention kernels
    and default dtype; and what `register_state` adds. What belongs to adapters that are not active decides nothing and
    is left aside. Two states of the same modules compare equal if nothing of what the modules hold differs.
    """

    __slots__ = ("_added", "_buffers", "_globals", "_reads", "_restores", "_roots", "_scopes", "_views")

    def __init__(
        self, roots: Sequence[nn.Module], scopes: Sequence[Scope], views: Sequence[View] | None = None
    ) -> None:
        """The live state, read without what `capture` notes beside it; the scopes are those of the roots.

        views: of what of each scope; by default of what runs now.
        """
        self._roots = roots
        self._scopes = scopes
        self._views = [scope.view() for scope in scopes] if views is None else views
        self._reads = [scope.read(view) for scope, view in zip(scopes, self._views, strict=True)]
        self._added: list[tuple[dict, str]] = []  # buffers that the forward registered
        self._buffers: Buffers | None = None
        self._globals: tuple = ()
        self._restores: list[Restore] = []

    @classmethod
    def capture(cls, *modules: nn.Module) -> "AdapterState":
        """Note the state of all layers at or below `modules`."""
        return cls.capture_in(modules, [scope_of(module) for module in modules])

    @classmethod
    def capture_in(cls, modules: Sequence[nn.Module], scopes: Sequence[Scope]) -> "AdapterState":
        _count_fused_steps()
        state = cls(modules, scopes)
        if any(scope.buffers for scope in scopes):
            key = tuple((view, *read.training) for view, read in zip(state._views, state._reads, strict=True))
            state._buffers = Buffers(scopes, key)
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
        for scope, view in zip(self._scopes, self._views, strict=True):
            if any(view.no_buffers) or scope.has_new_buffers():
                self._added += scope.new_buffers()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AdapterState):
            return NotImplemented
        return same(self._scopes, other._scopes) and self._reads == other._reads

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
        merged = sorted({name for values in all_values if values[MERGED] is not ABSENT for name in values[MERGED]})
        if merged:
            text += f", merged {merged}"
        if any(read.hooks for read in self._reads):
            text += ", with hooks"
        modes = {bool(mode) for read in self._reads for mode in read.training if mode is not None}
        names = "/".join("train" if mode else "eval" for mode in sorted(modes, reverse=True))
        return f"{text}, {names} mode"

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
            settings = [scope.read_settings() for scope in self._scopes]
            globals_now = _read_globals()
            try:
                if live._reads != self._reads:
                    _write_over(self._scopes, self._views, self._reads, live._reads, undo, flipped)
                if self._buffers is not None:
                    self._buffers.swap_in(undo)
                for d, name in self._added:
                    undo.append((d, name, d.pop(name, ABSENT)))
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
                settings_now = [scope.read_settings() for scope in self._scopes]
                if settings_now != settings:
                    views = [scope.full for scope in self._scopes]
                    _write_over(self._scopes, views, settings, settings_now, [], [])
                if self._globals and globals_now != self._globals:
                    _write_globals(globals_now)

    def _checked(self, label: str, on_flags: OnFlags) -> "AdapterState":
        """The live state of what ran at the forward, where this one can be brought back over it."""
        live_scopes = [scope_of(root) for root in self._roots]
        if not same(live_scopes, self._scopes) or not all(view.holds() for view in self._views):
            self._check_replaced(label)
        live = AdapterState(self._roots, self._scopes, self._views)
        if live._reads != self._reads:
            self._check_merged(live, label)
            if on_flags == "error":
                self._check_flags(live, label)
            self._check_edited(live, label)
        if self._buffers is not None:
            self._buffers.check(label)
        return live

    def _tuner_values(self) -> list[tuple]:
        return [values for read in self._reads for values in read.values]

    def _check_replaced(self, label: str) -> None:
        """Refuse a model whose layers or parameters are no longer those of the forward; allow mere additions."""
        for root, scope, then in zip(self._roots, self._scopes, self._views, strict=True):
            now = Scope(root)
            what = ""
            if not set(map(id, then.children)) <= set(map(id, now.full.children)):
                what = "a module below it was replaced or removed (an adapter deleted, a layer swapped)"
            elif not set(map(id, then.parameters)) <= set(map(id, now.full.parameters)):
                what = "a parameter below it was replaced (load_state_dict(assign=True), a new nn.Parameter)"
            elif len(now.tuners) != len(scope.tuners):
                what = "tuner layers were added to it"
            if what:
                raise RecomputationError(
                    f"{cannot_recompute(label)}: expected the layers of the forward at the recomputation, but {what}. "
                    f"At forward: {self.describe()}. Do: change the model before the forward or after backward."
                )

    def _check_merged(self, live: "AdapterState", label: str) -> None:
        for then, now in zip(self._tuner_values(), live._tuner_values(), strict=True):
            if _names(then[MERGED]) != _names(now[MERGED]):
                raise RecomputationError(
                    f"{cannot_recompute(label)}: adapters merged at forward: {_names(then[MERGED])}, at the "
                    f"recomputation: {_names(now[MERGED])}. A merge edits the base weight in place and cannot "
                    f"be undone for a recomputation. At forward: {self.describe()}; found: {live.describe()}. "
                    "Do: merge or unmerge before the forward or after backward."
                )

    def _check_flags(self, live: "AdapterState", label: str) -> None:
        lost = self._parameters_where(live, "flags", lambda then, now: then and not now)
        if lost:
            raise RecomputationError(
                f"{cannot_recompute(label)}: {len(lost)} parameters required grad at forward and do not at the "
                f"recomputation, so autograd would drop their gradients: {listed(lost)}. At forward: "
                f"{self.describe()}; found: {live.describe()}. Likely cause: PEFT's set_adapter was called in "
                "between, which freezes the adapters that it deactivates. Do: switch with AdapterBank.active, which "
                "writes no flag, or set requires_grad of all trainable adapters again after each switch, or pass "
                'on_flags="follow" to accept '
                "that these parameters get no gradient."
            )

    def _check_edited(self, live: "AdapterState", label: str) -> None:
        """Without checkpointing, autograd itself refuses a tensor that it saved and that was then edited in place."""
        edited = self._parameters_where(live, "versions")
        moved = [name for name in self._parameters_where(live, "pointers") if name not in edited]
        for names, what in (
            (edited, "were edited in place since its forward (an optimizer step, load_state_dict)"),
            (moved, "were given other data since its forward (`.data = ...`, a change of dtype or device)"),
        ):
            if names:
                raise RecomputationError(
                    f"{cannot_recompute(label)}: {len(names)} parameters {what}, so it would compute something else: "
                    f"{listed(names)}. At forward: {self.describe()}. "
                    "Do: call backward before the edit, or run the forward after it."
                )

    def _parameters_where(
        self, live: "AdapterState", field: str, differs: Callable[[Any, Any], bool] = lambda then, now: then != now
    ) -> list[str]:
        """Names of the parameters whose `field` differs."""
        found = [
            parameter
            for view, then, now in zip(self._views, self._reads, live._reads, strict=True)
            if getattr(then, field) is not None and getattr(now, field) is not None
            for parameter, before, after in zip(view.parameters, getattr(then, field), getattr(now, field), strict=True)
            if differs(before, after)
        ]
        names = {id(p): name for root in self._roots for name, p in root.named_parameters()} if found else {}
        return [names.get(id(p), "?") for p in found]


def _write_over(
    scopes: Sequence[Scope],
    views: Sequence[View],
    thens: Sequence[tuple],
    nows: Sequence[tuple],
    undo: list[tuple[dict, str, Any]],
    flipped: list[tuple[nn.Parameter, bool]],
) -> None:
    """Write the settings of then where they differ from those of now, noting each before anything can go wrong.

    thens, nows: the first four fields of readings. undo, flipped: what was written is added to them.
    """
    for scope, view, then, now in zip(scopes, views, thens, nows, strict=True):
        for d, values, found in zip(scope.tuner_dicts, then[0], now[0], strict=True):
            for name, value, live_value in zip(ATTRIBUTES, values, found, strict=True):
                if value != live_value:
                    undo.append((d, name, d.get(name, ABSENT)))
                    _write(d, name, copied(value))
        for d, mode, live_mode in zip(view.module_dicts, then[1], now[1], strict=True):
            if mode is not live_mode:
                undo.append((d, "training", live_mode))
                d["training"] = mode
        for i in then[2].keys() | now[2].keys():
            if then[2].get(i) != now[2].get(i):
                d = view.module_dicts[i]
                none: list[Any] = [OrderedDict() if name in HOOKS else d.get(name) for name in (*HOOKS, *HOOK_DETAILS)]
                for name, value in zip((*HOOKS, *HOOK_DETAILS), then[2].get(i, none), strict=True):
                    undo.append((d, name, d.get(name, ABSENT)))
                    d[name] = value.copy() if isinstance(value, dict) else value
        for parameter, flag, live_flag in zip(view.parameters, then[3], now[3], strict=True):
            if flag != live_flag:
                flipped.append((parameter, live_flag))
                parameter.requires_grad_(flag)


def _names(value: Any) -> list[str]:
    return [] if value is ABSENT else [value] if isinstance(value, str) else list(value)


def _write(attributes: dict, name: str, value: Any) -> None:
    if value is ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value
