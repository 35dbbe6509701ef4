"""Checkpoint the blocks of any model: timm, transformers, PEFT-wrapped or hand-written; the model knows nothing of it.

Each block gets an instance attribute `forward` that runs the block's own forward under `mmadapt.checkpoint`. Nothing of
a class or of a library is changed and no module is added, so names of parameters and keys of `state_dict` stay.

    model.blocks[3](x)  ->  the block's own hooks  ->  block.forward, ours  ->  checkpoint(its own forward, x)

A segment of several blocks is one checkpoint over calls that the model's own loop makes. So all but the last block of
it return a placeholder, and the last one runs them all:

    x -> block 0 -> placeholder -> block 1 -> placeholder -> block 2: checkpoint(blocks 0 to 2, x) -> y

That holds as long as the loop only hands the value on. Whatever else it does with it is an error, at that forward.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from mmadapt.checkpointing import checkpoint, versions_in
from mmadapt.errors import listed
from mmadapt.plans import CheckpointPlan
from mmadapt.scopes import KEY, scope_of
from mmadapt.stacks import Stack, find_stacks, lists_text, modules_above, text_of
from mmadapt.state import AdapterState

__all__ = ["CheckpointedBlocks", "checkpoint_blocks", "remove_checkpointing"]

Blocks = str | re.Pattern[str] | nn.Module | Iterable[nn.Module]

_EVERY_BLOCK = CheckpointPlan()


def checkpoint_blocks(
    model: nn.Module, plan: CheckpointPlan = _EVERY_BLOCK, blocks: Blocks | None = None
) -> "CheckpointedBlocks":
    """Have a model checkpoint its blocks, in train and in eval mode alike, whenever grad is enabled.

    Each recomputation sees the adapters of its own forward. A library's own checkpointing of the same blocks
    (`gradient_checkpointing_enable`, `set_grad_checkpointing`) is off until `remove()`. A cache of keys and values,
    which a recomputation would fill twice, is not handed to the blocks; a filled one is an error.

    plan: which blocks are checkpointed; it applies to each stack of blocks by itself (encoder, decoder, each stage).
    blocks: by default found by structure: transformers' layers, else lists of modules of one class. Or the modules
        themselves; a list of them (`model.blocks`); or a regular expression that matches the whole name of lists or
        blocks, with or without PEFT's prefix (`"encoder.layers"`, `r"stages\\.\\d+\\.blocks"`).

    Blocks that are replaced or appear later are seen when `model` itself is called; if none is there yet, `blocks` must
    be a regular expression. Copies and pickles of the model are checkpointed too, and run their own weights.

    Under `torch.compile` segments of several blocks are refused by it.

    Returns a handle, also a context manager: `remove()` puts everything back.

    Raises:
        ValueError: no blocks found, or not those of this model, or nested or repeated ones; checkpointed already; a
            plan that does not fit. At a forward: a filled cache; or a segment of several blocks whose model does
            more between them than to hand the value on (`segment_size=1` always works).
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"checkpoint_blocks: model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(plan, CheckpointPlan):
        raise ValueError(
            f"checkpoint_blocks: plan: expected one CheckpointPlan, got {plan!r}. Do: a plan per modality is for our "
            "own backbone; here, call checkpoint_blocks once with one plan."
        )
    if isinstance(blocks, str | re.Pattern):
        try:
            blocks = re.compile(blocks)
        except re.error as error:
            raise ValueError(
                f"checkpoint_blocks: blocks: expected a regular expression, got {blocks!r}: {error}"
            ) from None
    elif blocks is not None and not isinstance(blocks, nn.Module):
        blocks = list(blocks)
    handle = CheckpointedBlocks(model, plan, blocks)
    handle._install()
    return handle


def remove_checkpointing(model: nn.Module) -> None:
    """Undo `checkpoint_blocks` where no handle is at hand, such as on a copy; nothing to undo is no error."""
    for module in list(model.modules()):
        for handle in _handles_on(module):
            handle.remove()
    for module in model.modules():  # copies of single blocks
        forward = vars(module).get("forward")
        if isinstance(forward, _Forward):
            forward.restore()


class CheckpointedBlocks:
    """What `checkpoint_blocks` returns: the blocks of a model that it checkpoints, until `remove()`.

    It lies among the hooks of the model, so that a copy of the model has a copy of it, over the copied blocks.
    """

    def __init__(self, model: nn.Module, plan: CheckpointPlan, blocks: re.Pattern | nn.Module | list | None) -> None:
        self.model = model
        self.plan = plan
        self._blocks = blocks
        self._settings = _Settings(plan)
        self._forwards: list[_Forward] = []
        self._seen: list[tuple[nn.Module, dict]] = []  # modules above the blocks, with their children
        self._switches: list[tuple[nn.Module, str]] = []  # where a library's own checkpointing may be switched on
        self._switched: list[tuple[nn.Module, str, bool]] = []  # what was; whether the object itself said so
        self._hooks: list[tuple[str, int]] = []

    @property
    def names(self) -> list[str]:
        """The names of the blocks that the plan checkpoints."""
        return [f.name for f in self._forwards if f.stack.segments[f.index][1]]

    def remove(self) -> None:
        """Put every object back as it was before; a second call does nothing."""
        for kind, key in self._hooks:
            for name in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
                vars(self.model).get(name, {}).pop(key, None)
        self._hooks = []
        self._unwrap()

    def __enter__(self) -> "CheckpointedBlocks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"CheckpointedBlocks({self.plan}, {self.names})"

    def _install(self) -> None:
        if not self.plan.enabled:
            return
        stacks = find_stacks(self.model, self._blocks, is_first=True)
        wrapped = [name for s in stacks for name, b in s.blocks if isinstance(vars(b).get("forward"), _Forward)]
        if wrapped or _handles_on(self.model):
            raise ValueError(
                "checkpoint_blocks: expected a model that is not checkpointed yet, but it is"
                f"{', at ' + listed(wrapped) if wrapped else ''}. Do: call remove() on its handle, or "
                "remove_checkpointing(model), first."
            )
        self._wrap(stacks)
        before = self.model.register_forward_pre_hook(self._before_forward)
        after = self.model.register_forward_hook(self._after_forward)
        self._hooks = [("_forward_pre_hooks", before.id), ("_forward_hooks", after.id)]

    def _wrap(self, stacks: "list[Stack]") -> None:
        splits = [found.split(self.plan) for found in stacks]  # may raise: before anything is written
        known: set[int] = set()
        for found, segments in zip(stacks, splits, strict=True):
            stack = _Stack(self._settings, found.name if len(stacks) > 1 else "", segments)
            for i, (name, block) in enumerate(found.blocks):
                if id(block) in known:  # a list may hold a block several times
                    continue
                known.add(id(block))
                stray = vars(block).get("forward")
                if isinstance(stray, _Forward):  # a copy of a block that we wrapped was put into the model
                    stray.restore()
                self._forwards.append(_Forward(name, block, stack, i))
        forwards = self._forwards
        above = self._see()
        # Also below the blocks: what recomputes by itself there does so after our recomputation is over, when the
        # adapters of the forward are no longer in place.
        candidates = {id(m): m for m in above} | {id(m): m for f in forwards for m in f.block.modules()}
        # (Not hasattr: PEFT's wrappers pass on the attributes of what they wrap.)
        self._switches = [
            (m, name) for m in candidates.values() for name in _SWITCHES if name in vars(m) or hasattr(type(m), name)
        ]
        self._switch_off()

    def _see(self) -> list[nn.Module]:
        """Note the children of the modules above the blocks; returns these modules."""
        above = list(modules_above(self.model, [f.name for f in self._forwards]))
        self._seen = [(module, dict(module._modules)) for module in above]
        return above

    def _unwrap(self) -> None:
        for forward in self._forwards:
            forward.restore()
        for module, name, is_own in reversed(self._switched):
            if is_own:
                vars(module)[name] = True
            else:
                vars(module).pop(name, None)
        self._forwards, self._seen, self._switches, self._switched = [], [], [], []

    def _switch_off(self) -> None:
        for module, name in self._switches:
            if getattr(module, name) is True:
                self._switched.append((module, name, name in vars(module)))
                vars(module)[name] = False

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        """See blocks that came or went, and a library's own checkpointing that was switched on since."""
        if not self._forwards or any(module._modules != children for module, children in self._seen):
            stacks = find_stacks(self.model, self._blocks, is_first=False)
            found = {id(block): name for stack in stacks for name, block in stack.blocks}
            if list(found) != [id(f.block) for f in self._forwards]:
                self._unwrap()
                self._wrap(stacks)
            else:
                for forward in self._forwards:
                    forward.name = found[id(forward.block)]
                self._see()
            if not found and torch.is_grad_enabled():
                self._settings.warn(
                    f"checkpoint_blocks: expected blocks at {text_of(self._blocks)} by now, got none, so nothing is "
                    f"checkpointed. Lists in the model: {lists_text(model)}."
                )
        self._switch_off()

    def _after_forward(self, model: nn.Module, _: Any, output: Any) -> None:
        if self.plan.segment_size > 1 or self.plan.segments is not None:
            for placeholder in _placeholders_in(output):
                raise placeholder.pending.error(
                    "the model returns the value between two blocks (collected hidden states, or a loop that ended "
                    "within the segment)"
                )


_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")  # transformers, timm


def _handles_on(module: nn.Module) -> list[CheckpointedBlocks]:
    hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return [owner for owner in hooks if isinstance(owner, CheckpointedBlocks)]


# ---- one block


class _Settings:
    """What all blocks of one call share."""

    def __init__(self, plan: CheckpointPlan) -> None:
        self.plan = plan
        self.warned: set[str] = set()

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=2)


class _Stack:
    """Blocks that run one after another. It holds none of them, so that a copy of one block is not one of all."""

    def __init__(self, settings: _Settings, name: str, segments: list[tuple[range, bool]]) -> None:
        self.settings = settings
        self.name = name  # of the list, where there are several
        self.segments = [(indices, is_checkpointed) for indices, is_checkpointed in segments for _ in indices]

    def label(self, first: int, last: int | None = None) -> str:
        text = f"block {first}" if last is None or last == first else f"blocks {first} to {last}"
        return f"{text} of {self.name}" if self.name else text


class _Forward:
    """What stands in for a block's forward.

    The block holds it and it holds the block. Deepcopy and pickle resolve such a cycle: a copy runs the copied block.
    """

    def __init__(self, name: str, block: nn.Module, stack: _Stack, index: int) -> None:
        self.name = name
        self.block = block
        self.stack = stack
        self.index = index
        self.is_active = True
        self.had_forward = "forward" in vars(block)
        self.original = vars(block).get("forward")
        self.had_scope = KEY in vars(block)
        vars(block)["forward"] = self

    def restore(self) -> None:
        self.is_active = False  # somebody may have wrapped this object and keep it
        attributes = vars(self.block)
        if attributes.get("forward") is self:
            if self.had_forward:
                attributes["forward"] = self.original
            else:
                del attributes["forward"]
        if not self.had_scope:
            attributes.pop(KEY, None)

    @property
    def __wrapped__(self) -> Any:
        """For `inspect.signature`, by which some loops choose what they pass."""
        return self.original if self.had_forward else type(self.block).forward.__get__(self.block)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.had_forward:
            return self.original(*args, **kwargs)  # type: ignore[misc]
        return type(self.block).forward(self.block, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Only what is at the top is looked for, as this runs for each block; what is nested raises when it is read.
        placeholders = [a for a in (*args, *kwargs.values()) if type(a) is _Placeholder]
        indices, is_checkpointed = self.stack.segments[self.index]
        if placeholders:
            return placeholders[0].pending.proceed(self, args, kwargs)
        if not (self.is_active and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        args, kwargs = self.without_cache(args, kwargs)
        if not is_checkpointed:
            return self.plain(*args, **kwargs)
        if len(indices) == 1:
            return self.checkpoint([self], args, kwargs)
        pending = _Pending(self, args, kwargs)
        if self.index != indices[0]:
            raise pending.error(
                f"{self.stack.label(self.index)} was given an ordinary value, expected that of "
                f"{self.stack.label(self.index - 1)} (LayerDrop skips blocks; or a loop calls some of them only)"
            )
        return pending.proceed(self, args, kwargs)

    def checkpoint(self, forwards: "list[_Forward]", args: tuple, kwargs: dict) -> Any:
        """Run the segment that this block ends."""

        def segment(kwargs: dict, *args: Any) -> Any:  # a dict, as a block's keywords may be named like checkpoint's
            for forward in forwards[:-1]:
                x = forward.plain(*args, **kwargs)
                if not isinstance(x, Tensor):
                    raise _segment_error(
                        forwards[0],
                        f"{forward.stack.label(forward.index)} returns a {type(x).__name__}, expected a tensor",
                    )
                args = (x, *args[1:])
            return forwards[-1].plain(*args, **kwargs)

        return checkpoint(
            segment,
            kwargs,
            *args,
            modules=[forward.block for forward in forwards],
            use_reentrant=self.stack.settings.plan.use_reentrant,
            label=self.stack.label(forwards[0].index, self.index),
        )

    def without_cache(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments without transformers' cache, which each run of a block appends to.

        Blocks that run plainly get none either, as half a cache is of no use.
        """
        module = sys.modules.get("transformers.cache_utils")
        if module is None or getattr(self.block, "_can_checkpoint_with_cache", False):  # it only reads the cache
            return args, kwargs
        caches = [a for a in (*args, *kwargs.values()) if isinstance(a, module.Cache)]
        if not caches:
            return args, kwargs
        if any(cache.get_seq_length() > 0 for cache in caches):
            raise ValueError(
                f"checkpoint_blocks: {self.stack.label(self.index)}: expected no cache or an empty one, got "
                f"{type(caches[0]).__name__} that holds tokens, which a recomputation would append to again. "
                "Do: run it under torch.no_grad(), or without past_key_values, or call remove() first."
            )
        self.stack.settings.warn("checkpoint_blocks: caching does not go with checkpointing: use_cache=False, no cache")
        kwargs = {name: None if isinstance(a, module.Cache) else a for name, a in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        return tuple(None if isinstance(a, module.Cache) else a for a in args), kwargs


# ---- a segment of several blocks


class _Pending:
    """A segment whose blocks are being called: their arguments, and what they would have run under."""

    def __init__(self, first: _Forward, args: tuple, kwargs: dict) -> None:
        self.first = first
        self.args = args
        self.kwargs = kwargs
        self.versions = versions_in(args, kwargs)
        self.autocast = _autocast()
        self.forwards: list[_Forward] = []
        self.states: list[AdapterState] = []

    def error(self, reason: str) -> ValueError:
        return _segment_error(self.first, reason)

    def proceed(self, forward: _Forward, args: tuple, kwargs: dict) -> Any:
        """Take the next block of the segment: a placeholder, or after the last one the segment's result.

        Raises:
            ValueError: it is not the next one, or it is not called as the first one was.
        """
        stack, position = forward.stack, len(self.forwards)
        if position:
            self._check(forward, args, kwargs)
        elif not args or not isinstance(args[0], Tensor):
            got = type(args[0]).__name__ if args else "keywords only"
            raise self.error(f"{stack.label(forward.index)}: expected a tensor as first argument, got {got}")
        self.forwards.append(forward)
        indices, _ = stack.segments[forward.index]
        if forward.index < indices[-1]:
            self.states.append(_state(forward.block))
            return _placeholder(self)
        if any(state != _state(f.block) for f, state in zip(self.forwards, self.states, strict=False)):
            raise self.error("adapters, modes or flags of a block were changed before the next block ran")
        return forward.checkpoint(self.forwards, self.args, self.kwargs)

    def _check(self, forward: _Forward, args: tuple, kwargs: dict) -> None:
        label = forward.stack.label(forward.index)
        expected = self.forwards[-1].index + 1
        if forward.stack is not self.first.stack or forward.index != expected:
            reason = f"expected {self.first.stack.label(expected)} next, got {label} (LayerDrop skips blocks)"
            raise self.error(reason)
        if not forward.is_active or not torch.is_grad_enabled():
            raise self.error(f"{label} runs without grad or after remove()")
        if not args or type(args[0]) is not _Placeholder or args[0].pending is not self:
            raise self.error(f"{label} gets the value of the block before it as another argument than the first")
        args, kwargs = forward.without_cache(args[1:], kwargs)
        if not _same_arguments((args, kwargs), (self.args[1:], self.kwargs)):
            raise self.error(
                f"{label} is called with other arguments than {self.first.stack.label(self.first.index)} (a mask or a "
                "position bias per layer); expected the very same objects"
            )
        if self.versions != versions_in(self.args, self.kwargs):
            raise self.error(f"an argument was edited in place before {label} ran")
        if self.autocast != _autocast():
            raise self.error(f"{label} runs under another autocast")


class _Placeholder(Tensor):
    """Stands for the value between two blocks of a segment, which does not exist; reading it is an error."""

    pending: _Pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        for placeholder in _placeholders_in((args, kwargs or {})):
            last = placeholder.pending.forwards[-1]
            raise placeholder.pending.error(
                f"{name} reads the value after {last.stack.label(last.index)}, which is not there yet (the loop, a "
                "hook or a block that returns a tuple)"
            )
        raise ValueError(f"checkpoint_blocks: {name} reads the value between two blocks of a segment")


def _placeholder(pending: _Pending) -> _Placeholder:
    placeholder = Tensor._make_subclass(_Placeholder, torch.empty(0, device="meta"))
    placeholder.pending = pending
    return placeholder


def _segment_error(first: _Forward, reason: str) -> ValueError:
    indices, _ = first.stack.segments[first.index]
    return ValueError(
        f"checkpoint_blocks: {first.stack.label(indices[0], indices[-1])} in one checkpoint: expected a model that "
        f"only hands the value from one block to the next, but {reason}. Do: segment_size=1."
    )


def _placeholders_in(value: Any) -> Iterator[_Placeholder]:
    if isinstance(value, _Placeholder):
        yield value
    elif isinstance(value, Tensor):
        return
    elif isinstance(value, Mapping):  # transformers' ModelOutput is one
        for item in value.values():
            yield from _placeholders_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _placeholders_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _placeholders_in(getattr(value, field.name, None))


def _same_arguments(these: Any, those: Any) -> bool:
    """Whether all tensors and objects are the identical ones; plain values are compared as such."""
    leaves, spec = pytree.tree_flatten(these)
    others, other_spec = pytree.tree_flatten(those)
    return spec == other_spec and all(
        a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)
        for a, b in zip(leaves, others, strict=True)
    )


def _state(block: nn.Module) -> AdapterState:
    return AdapterState([block], [scope_of(block)])


def _autocast() -> tuple:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
