"""Context-aware activation checkpointing: a recomputed block sees exactly what its own forward saw.

torch's checkpoint calls the function again during backward, under whatever adapters are active by then. Here the
function is wrapped so that its first run notes the adapter state and every later run gets that state back:

    forward   modality 1: [note route 1] block_1 .. block_n      modality 2: [note route 2] block_1 .. block_n
    backward  modality 2: [set route 2] block_n .. block_1       modality 1: [set route 1] block_n .. block_1
              and after each recomputation the live state is what it was

The wrapping is the same for both of torch's modes, as both call the function a second time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from mmadapt.search import find_modules, is_known, watching
from mmadapt.state import AdapterState, OnFlags, Scope, scope_of, tuner_types

__all__ = ["CheckpointPlan", "checkpoint", "run_blocks"]


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

    Raises:
        ValueError: a PEFT layer runs that was not found, or an argument that torch refuses.
        RecomputationError: in backward, if the state of the forward cannot be brought back.
    """
    if on_flags not in ("error", "follow"):
        raise ValueError(f"on_flags: expected one of ['error', 'follow'], got {on_flags!r}")
    options = {name: kwargs.pop(name) for name in _TORCH_OPTIONS if name in kwargs}
    if use_reentrant:
        _refuse_reentrant(options)
    if modules is None:
        roots = tuple(find_modules(function, args, kwargs))
    else:
        roots = (modules,) if isinstance(modules, nn.Module) else tuple(modules)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    label = label or _name(function)
    if tuner_types() and (roots or modules is None) and not torch.compiler.is_compiling():
        scopes = [scope_of(root) for root in roots]
        is_fixed = modules is not None or isinstance(function, nn.Module)  # anything else may reach other globals
        if not (is_fixed and is_known(scopes)):
            function = _Watched(function, scopes, label)
        if any(scope.tuners for scope in scopes):
            function = _Run(function, roots, label, on_flags)
    if use_reentrant:
        return _reentrant(function, roots, args, kwargs, preserve_rng_state)
    return torch_checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **options, **kwargs
    )


_TORCH_OPTIONS = ("context_fn", "determinism_check", "debug", "early_stop", "respect_saved_tensors_hooks")


class _Watched:
    """A function whose first call is watched for tuner layers that were not found."""

    __slots__ = ("function", "label", "scopes")

    def __init__(self, function: Callable[..., Any], scopes: Sequence[Scope], label: str) -> None:
        self.function = function
        self.scopes: Sequence[Scope] | None = scopes
        self.label = label

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.scopes is None:
            return self.function(*args, **kwargs)
        scopes, self.scopes = self.scopes, None
        with watching(scopes, self.label):
            return self.function(*args, **kwargs)


class _Run:
    """A function whose first call notes the adapter state and whose later calls, the recomputations, get it back."""

    __slots__ = ("function", "label", "on_flags", "roots", "state")

    def __init__(self, function: Callable[..., Any], roots: tuple, label: str, on_flags: OnFlags) -> None:
        self.function = function
        self.roots = roots
        self.label = label
        self.on_flags = on_flags
        self.state: AdapterState | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state is None:
            self.state = AdapterState.capture(*self.roots)
            return self.function(*args, **kwargs)
        with self.state.applied(label=self.label, on_flags=self.on_flags):
            return self.function(*args, **kwargs)


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
        if roots and not any(any(scope_of(root).flags()) for root in roots):
            return function(*args, **kwargs)  # nothing below needs a gradient: there is no graph to save
        anchors = [torch.empty(0, requires_grad=True)]
    leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # do not hold what autograd holds
    result_spec: list[Any] = []

    def flat(*inputs: Tensor) -> tuple:
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
    return getattr(function, "__qualname__", None) or type(function).__name__


@dataclass(frozen=True)
class CheckpointPlan:
    """Which blocks are checkpointed, and how.

    enabled: off: every block runs plainly.
    segment_size: k consecutive blocks share one checkpoint: less memory held, one recomputation of k blocks at a time.
    segments: the same by count, as in `torch.utils.checkpoint.checkpoint_sequential`; excludes `segment_size`.
    every: segment i is checkpointed if and only if i % every == 0, the others run plainly: faster, more memory held.
    last_plain: the last segment runs plainly, as `checkpoint_sequential` does.
    use_reentrant: torch's reentrant mode; the gradients are the same.

    Raises:
        ValueError: a number below 1, or `segments` together with `segment_size`.
    """

    enabled: bool = True
    segment_size: int = 1
    segments: int | None = None
    every: int = 1
    last_plain: bool = False
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        for name in ("enabled", "last_plain", "use_reentrant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"CheckpointPlan.{name}: expected true or false, got {getattr(self, name)!r}")
        for name in ("segment_size", "segments", "every"):
            value = getattr(self, name)
            if name == "segments" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"CheckpointPlan.{name}: expected an integer of at least 1, got {value!r}")
        if self.segments is not None and self.segment_size != 1:
            raise ValueError(
                f"CheckpointPlan: expected segments or segment_size, got both (segments={self.segments}, "
                f"segment_size={self.segment_size}). Do: leave one of them out."
            )

    def split(self, depth: int) -> list[tuple[range, bool]]:
        """The segments of `depth` blocks, in order: the indices of their blocks and whether they are checkpointed.

        Raises:
            ValueError: more `segments` than blocks.
        """
        if self.segments is not None:
            if self.segments > depth:
                raise ValueError(f"CheckpointPlan.segments: expected at most the {depth} blocks, got {self.segments}")
            size = depth // self.segments  # the last one takes the rest, as in torch
            starts = [i * size for i in range(self.segments)]
        else:
            starts = list(range(0, depth, self.segment_size))
        bounds = [*starts, depth]
        ranges = [range(bounds[i], bounds[i + 1]) for i in range(len(starts))]
        last = len(ranges) - 1
        return [
            (r, self.enabled and i % self.every == 0 and not (self.last_plain and i == last))
            for i, r in enumerate(ranges)
        ]


def run_blocks(
    blocks: Sequence[nn.Module] | nn.ModuleList | nn.Sequential,
    x: Tensor,
    *args: Any,
    plan: CheckpointPlan | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run tokens through a stack of blocks under a plan.

    x: (B, N, D); each block is called as `block(x, *args, **kwargs)` and returns (B, N, D). `plan=None` runs plainly.

    Raises:
        ValueError: the plan does not fit the number of blocks.
    """
    for indices, is_checkpointed in (plan or _PLAIN).split(len(blocks)):
        segment = [blocks[i] for i in indices]
        if is_checkpointed:
            assert plan is not None
            first, last = indices[0], indices[-1]
            x = checkpoint(
                segment[0] if len(segment) == 1 else _Segment(segment),
                x,
                *args,
                modules=segment,
                use_reentrant=plan.use_reentrant,
                label=f"block {first}" if first == last else f"blocks {first} to {last}",
                **kwargs,
            )
        else:
            x = _Segment(segment)(x, *args, **kwargs)
    return x


_PLAIN = CheckpointPlan(enabled=False)


class _Segment:
    """Consecutive blocks as one function."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x
