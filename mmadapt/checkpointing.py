"""Context-aware activation checkpointing: a recomputed block sees exactly what its own forward saw.

torch's checkpoint calls the function again during backward, under whatever adapters are active by then. Here the
function is wrapped so that its first run notes the adapter state and every later run gets that state back:

    forward   modality 1: [note route 1] block_1 .. block_n      modality 2: [note route 2] block_1 .. block_n
    backward  modality 2: [set route 2] block_n .. block_1       modality 1: [set route 1] block_n .. block_1
              and after each recomputation the live state is what it was

The wrapping is the same for both of torch's modes, as both call the function a second time.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from contextvars import Context, ContextVar, copy_context
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError, noop_context_fn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mmadapt.errors import RecomputationError
from mmadapt.scopes import Scope, scope_of, tuner_types, version_of
from mmadapt.search import (
    UNBOUND,
    Watch,
    cell_content,
    cells_of,
    find_modules,
    is_known,
    note_run,
    snapshot,
    tensors_in,
)
from mmadapt.state import AdapterState, OnFlags, has_registered

__all__ = ["checkpoint"]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    modules: Iterable[nn.Module] | None = None,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    on_flags: OnFlags = "error",
    label: str | None = None,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)`, keep only its inputs, and run it again in backward under the same adapters.

    A drop-in for `torch.utils.checkpoint.checkpoint`, whose further keywords (`context_fn`, `determinism_check`,
    `debug`, `early_stop`, `respect_saved_tensors_hooks`) it takes and hands on. In reentrant mode too, keyword
    arguments, nested containers and inputs that need no grad get the gradients of an un-checkpointed run.

    modules: where the tuner layers are; `()` says that there are none. By default they are looked for in the function
        if it is a Module, else among the arguments (nested), in what a partial holds, in closure cells, and last in
        `__self__` of a bound method. What a Module keeps in a plain list, or what a function reaches as a global, is
        not found; if it has PEFT layers, running it is an error until it is named here.
    on_flags: `"error"` refuses a parameter that required grad at forward and does not at recomputation (autograd would
        drop its gradient); `"follow"` accepts it, as an un-checkpointed backward does.
    label: the block's name in errors; by default the function's class or name.

    The recomputation also gets the hooks, buffers, modes, context variables, closure variables, attention kernels and
    default dtype of its forward, and what `register_state` adds. Where no PEFT was imported, nothing was registered and
    no module found has buffers, it is torch's own checkpoint.

    Raises:
        ValueError: a PEFT layer runs that was not found, or an argument that torch refuses.
        RecomputationError: in backward, if the state of the forward cannot be brought back.
    """
    if on_flags not in ("error", "follow"):
        raise ValueError(f"on_flags: expected one of ['error', 'follow'], got {on_flags!r}")
    options = {name: kwargs.pop(name) for name in _TORCH_OPTIONS if name in kwargs} if kwargs else {}
    if use_reentrant:
        _refuse_reentrant(options)
    if modules is None:
        roots = tuple(find_modules(function, args, kwargs))
    else:
        roots = (modules,) if isinstance(modules, nn.Module) else tuple(modules)
    label = label or _name(function)
    scopes = None if torch.compiler.is_compiling() else _scopes_with_state(roots, modules is None)
    key = () if scopes is None else note_run(function, scopes)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if scopes is not None:
        is_fixed = modules is not None or isinstance(function, nn.Module)  # anything else may reach other globals
        is_watched = not (is_fixed and is_known(key, scopes)) and not any(s.is_compiled for s in scopes)
        function = _Run(
            function, roots, scopes, key if is_watched else None, label, on_flags, preserve_rng_state, use_reentrant
        )
    if use_reentrant:
        return _reentrant(function, roots, args, kwargs, preserve_rng_state)
    return torch_checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **options, **kwargs
    )


_TORCH_OPTIONS = ("context_fn", "determinism_check", "debug", "early_stop", "respect_saved_tensors_hooks")


class RecomputationMismatch(RecomputationError, CheckpointError):
    """torch found that a recomputation differs from its forward; says in which block and under which states."""


class _Run:
    """A function whose first call notes what it runs under and whose later calls, the recomputations, get it back."""

    __slots__ = (
        "cells",
        "context",
        "function",
        "inputs",
        "is_reentrant",
        "label",
        "on_flags",
        "preserve_rng_state",
        "roots",
        "scopes",
        "state",
        "strays",
        "versions",
        "watched",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        roots: tuple[nn.Module, ...],
        scopes: Sequence[Scope],
        watched: tuple | None,
        label: str,
        on_flags: OnFlags,
        preserve_rng_state: bool,
        is_reentrant: bool,
    ) -> None:
        self.function = function
        self.roots = roots
        self.scopes: Sequence[Scope] | None = scopes  # at the forward
        self.watched = watched
        self.label = label
        self.on_flags = on_flags
        self.preserve_rng_state = preserve_rng_state
        self.is_reentrant = is_reentrant
        self.state: AdapterState | None = None
        self.strays: list[AdapterState] = []  # of modules that were not found and ran
        self.inputs: tuple | None = None  # where the caller may change them: plain containers
        self.context: Context | None = None
        self.versions: list[int | None] = []
        self.cells: list[tuple[CellType, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state is None:
            return self._forward(args, kwargs)
        assert self.context is not None
        # A copy: one Context cannot be entered twice, and what is written in it must not be seen by a second backward.
        return self.context.copy().run(self._recompute, args, kwargs)

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        self.context = copy_context()
        self.cells = cells_of(self.function)
        self.versions = self.versions_of(args, kwargs)
        if not self.is_reentrant and (kwargs or not are_tensors(args)):
            self.inputs = snapshot(args), snapshot(kwargs)
        scopes, self.scopes = self.scopes, None
        assert scopes is not None
        if torch._C._current_graph_task_id() != -1 and not _recomputing.get():
            _refuse_foreign_recomputation(scopes, self.label)
        # Set before the run: a gradient taken in the function recomputes parts of it there and then.
        self.state = AdapterState.capture_in(self.roots, scopes)
        with _NamedMismatch(self):
            result = self._run_watched(scopes, args, kwargs) if self.watched else self.function(*args, **kwargs)
        self.state.forward_done()
        return result

    def _run_watched(self, scopes: Sequence[Scope], args: tuple, kwargs: dict) -> Any:
        random = None if self.preserve_rng_state else _random_states()
        assert self.watched is not None
        with Watch(self.watched, self.roots, scopes, self.label) as watch:
            result = self.function(*args, **kwargs)
            if random is not None and not all(map(torch.equal, random, _random_states())):
                raise ValueError(
                    f"checkpoint({self.label}, preserve_rng_state=False): expected a function that draws no random "
                    "numbers, but it drew some, and its recomputation would draw others: wrong gradients. "
                    "Do: leave preserve_rng_state=True."
                )
        self.strays = watch.strays
        for state in self.strays:
            state.forward_done()
        return result

    def _recompute(self, args: tuple, kwargs: dict) -> Any:
        assert self.state is not None
        if self.inputs is not None:
            args, kwargs = snapshot(self.inputs)
        if self.versions != self.versions_of(args, kwargs):
            raise RecomputationError(
                f"cannot recompute {self.label}: expected its inputs and the tensors of its closure as they were at "
                f"the forward, but they were edited in place, by it or after it. At forward: {self.state.describe()}. "
                "Do: edit a copy (x = x + y, x.clone(), inplace=False)."
            )
        with self.state.applied(label=self.label, on_flags=self.on_flags), ExitStack() as stack:
            for state in self.strays:
                stack.enter_context(state.applied(label=self.label, on_flags=self.on_flags))
            # A loop variable in a closure has moved on since: `for block in blocks: checkpoint(lambda x: block(x), x)`.
            # (A container is always another one: see `snapshot`.)
            moved = [(cell, now, then) for cell, then in self.cells if (now := cell_content(cell)) is not then]
            for cell, _, then in moved:
                cell.cell_contents = snapshot(then)
            token = _recomputing.set(True)
            try:
                return self.function(*args, **kwargs)
            finally:
                _recomputing.reset(token)
                for cell, now, _ in moved:
                    if now is UNBOUND:
                        del cell.cell_contents
                    else:
                        cell.cell_contents = now

    def versions_of(self, args: tuple, kwargs: dict) -> list[int | None]:
        versions = versions_in(args, kwargs)
        if self.cells:
            versions += [version_of(t) for _, then in self.cells for t in tensors_in(then)]
        return versions


_recomputing: ContextVar[bool] = ContextVar("mmadapt_recomputing", default=False)


def _refuse_foreign_recomputation(scopes: Sequence[Scope], label: str) -> None:
    """A forward that runs inside backward is a part of torch's own checkpoint, which restores no adapters.

    That is right only while the adapters never change, which a module tells that has been run under one set of them.
    """
    if any(len(scope.routes) > 1 for scope in scopes):
        raise RecomputationError(
            f"cannot recompute {label}: expected all checkpoints around it to be mmadapt.checkpoint, got one of "
            "torch's, which recomputes it under the adapters that are active now; it has run under others too. "
            "Do: call mmadapt.checkpoint for the outer one too."
        )


def _scopes_with_state(roots: Sequence[nn.Module], is_searched: bool) -> list[Scope] | None:
    """The scopes of the modules, if there is something to restore; else None.

    There is if they may run PEFT layers (found or not), if they have buffers, or if `register_state` adds something.

    Without either the call is left to torch's own checkpoint, at its speed and with its limits.
    """
    scopes = list(map(scope_of, roots))
    if (tuner_types() and (roots or is_searched)) or has_registered() or any(scope.buffers for scope in scopes):
        return scopes
    return None


class _NamedMismatch:
    """Says in torch's CheckpointError, which is raised in backward, which block and states it is about.

    torch recomputes when a saved tensor is unpacked, in a hook that is the innermost one here; the one that stands in
    for it, in the body, calls it and adds to what it raises.
    """

    __slots__ = ("hooks", "run", "unpack")

    def __init__(self, run: _Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        self.hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:  # reentrant mode saves nothing in a forward
            pack, self.unpack = hooks
            self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, self.named_unpack)
            self.hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        hooks, self.hooks = self.hooks, None  # they hold this object: a cycle would keep what the graph saved
        if hooks is not None:
            hooks.__exit__(*error)

    def named_unpack(self, held: Any) -> Tensor:
        try:
            return self.unpack(held)
        except CheckpointError as error:
            run = self.run
            if run.state is None or isinstance(error, RecomputationMismatch):
                raise
            found = AdapterState.capture(*run.roots)
            raise RecomputationMismatch(
                f"cannot recompute {run.label}: torch found another computation than at its forward. "
                f"At forward: {run.state.describe()}; found now: {found.describe()}. {error}"
            ) from error


def versions_in(args: tuple, kwargs: dict) -> list[int | None]:
    """The version counters of all tensors among the arguments: torch adds 1 at each edit in place."""
    if not kwargs and are_tensors(args):
        return list(map(version_of, args))
    return [version_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def are_tensors(args: tuple) -> bool:
    """Whether all arguments are plain tensors, as those of most blocks are."""
    return {*map(type, args)} <= {Tensor}


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def _refuse_reentrant(options: dict[str, Any]) -> None:
    """Refuse what torch's reentrant mode refuses, by the same rule and in the same class of error."""
    refused = {
        "context_fn": options.get("context_fn", noop_context_fn) is not noop_context_fn,
        "debug": options.get("debug", False) is not False,
        "respect_saved_tensors_hooks": options.get("respect_saved_tensors_hooks") is not None,
    }
    if any(refused.values()):
        names = [name for name, is_given in refused.items() if is_given]
        raise ValueError(
            f"use_reentrant=True: got {names}, which only use_reentrant=False supports. Do: drop one of them."
        )


def _reentrant(
    function: Callable[..., Any],
    roots: Sequence[nn.Module],
    args: tuple,
    kwargs: dict,
    preserve_rng_state: bool,
) -> Any:
    """torch's reentrant checkpoint with every tensor of the arguments and results where autograd sees it.

    torch looks at top-level positional tensors only, and its output needs no grad if no input does. So the tensors are
    passed flat, and where none of them needs grad an empty tensor that does is sent through beside them.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in where]
    anchors: list[Tensor] = []
    if not any(t.requires_grad for t in tensors):
        if roots and not any(p.requires_grad for root in roots for p in scope_of(root).view().parameters):
            return function(*args, **kwargs)  # nothing below needs a gradient: there is no graph to save
        anchors = [torch.empty(0, requires_grad=True)]
    leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # do not hold what autograd holds
    result_spec: list[Any] = []
    originals = [(args, kwargs)]  # for the first run: it may write into a container of the caller

    def flat(*inputs: Tensor) -> tuple:
        if originals:
            inner_args, inner_kwargs = originals.pop()
        else:
            filled = list(leaves)
            for i, tensor in zip(where, inputs[len(anchors) :], strict=True):
                filled[i] = tensor
            inner_args, inner_kwargs = pytree.tree_unflatten(filled, spec)
        results, out_spec = pytree.tree_flatten(function(*inner_args, **inner_kwargs))
        result_spec[:] = [out_spec]
        return tuple(anchor.view_as(anchor) for anchor in inputs[: len(anchors)]) + tuple(results)

    outputs = torch_checkpoint(flat, *anchors, *tensors, use_reentrant=True, preserve_rng_state=preserve_rng_state)
    return pytree.tree_unflatten(list(outputs[len(anchors) :]), result_spec[0])


def _name(function: Any) -> str:
    if isinstance(function, nn.Module):  # asking one for an attribute that it does not have is slow
        return type(function).__name__
    return getattr(function, "__qualname__", None) or type(function).__name__
