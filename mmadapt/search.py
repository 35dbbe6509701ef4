"""Where the tuner layers are that a call runs: found through the call, and seen to be all when it runs.

A function shows some of what it runs: itself if it is a Module, Modules among its arguments, in closure cells, in
partials. It can also reach a tuner layer as a global, or as a Module that another keeps in a plain list. So what was
found is checked by watching a run: a tuner layer that runs without having been found is an error at the forward, not
a wrong gradient in backward.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FrameType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mmadapt.scopes import Scope, scope_of, tuner_types

_TORCHS = inspect.unwrap(torch_checkpoint).__code__


def find_modules(function: Any, args: tuple, kwargs: dict) -> list[nn.Module]:
    """The modules that a call runs, as far as the call shows them.

    The function itself, Modules among the arguments, what a partial holds, closure cells; `__self__` of a bound method
    only if none of them has a tuner layer, as it is often the whole model.
    """
    is_plain = isinstance(function, nn.Module) and not isinstance(function, ScriptModule)
    if is_plain and not kwargs and all(isinstance(arg, Tensor) for arg in args):
        return [function]
    is_method = isinstance(function, MethodType)
    found = {id(m): m for m in _modules_in((args, kwargs) if is_method else (function, args, kwargs))}
    if is_method and not any(scope_of(module).tuners for module in found.values()):
        found |= {id(m): m for m in _modules_in(function.__self__)}
    return list(found.values())


def _is_under_torchs(frame: FrameType | None) -> bool:
    """Whether the innermost checkpoint that a frame runs in is one of torch's own."""
    while frame is not None:
        if frame.f_code is _TORCHS:
            return True
        if frame.f_code.co_qualname == "_Run._forward" and frame.f_globals["__name__"] == "mmadapt.checkpointing":
            return False
        frame = frame.f_back
    return False


def _modules_in(value: Any, depth: int = 0) -> Iterator[nn.Module]:
    """The Modules that a value holds: itself, in containers, in a partial, in a method's object, in closure cells."""
    if isinstance(value, nn.Module):
        if not isinstance(value, ScriptModule):  # cannot hold PEFT layers, nor anything of ours
            yield value
    elif isinstance(value, Tensor):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from _modules_in(item, depth)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _modules_in(item, depth)
    elif isinstance(value, functools.partial) and depth < 4:
        yield from _modules_in((value.func, value.args, value.keywords), depth + 1)
    elif isinstance(value, MethodType) and depth < 4:
        yield from _modules_in(value.__self__, depth + 1)
    elif depth < 4 and getattr(value, "__closure__", None):
        yield from _modules_in([cell_content(cell) for cell in value.__closure__], depth + 1)


def cells_of(function: Any, depth: int = 0) -> list[tuple[CellType, Any]]:
    """The closure cells that a function and the functions in them read, with what they hold now."""
    if isinstance(function, nn.Module) or depth > 4:
        return []
    if isinstance(function, functools.partial):
        return cells_of(function.func, depth + 1)
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        content = cell_content(cell)
        if content is not UNBOUND:
            found += [(cell, content), *(cells_of(content, depth + 1) if callable(content) else [])]
    return found


UNBOUND = object()


def cell_content(cell: CellType) -> Any:
    """What a closure cell holds; `UNBOUND` for a name that is not bound yet, or no more."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNBOUND


def note_run(function: Any, scopes: Sequence[Scope]) -> tuple:
    """Keep with each module under which adapters it runs; returns what `is_known` and `watching` know this run by."""
    routes = []
    for scope in scopes:
        gets = scope.tuner_gets
        route = tuple(gets[0]("_active_adapter", ())) if gets else ()
        scope.routes.add(route)
        routes.append(route)
    modes = [scope.module_dicts[0].get("training") if scope.module_dicts else None for scope in scopes]
    return getattr(function, "__code__", type(function)), *modes, *routes


def is_known(key: tuple, scopes: Sequence[Scope]) -> bool:
    """Whether a run of this function, as far as its code goes, has been watched under the adapters and mode of now.

    Modules run the same layers in each step under the same adapters and mode, so one watched run tells for all.
    """
    return bool(scopes) and key in scopes[0].watched


@contextmanager
def watching(key: tuple, scopes: Sequence[Scope], name: str) -> Iterator[None]:
    """Run the body and refuse a tuner layer that is in none of the scopes, or under a checkpoint of torch's in it.

    Raises:
        ValueError: such a layer is about to run.
    """
    known = {id(tuner) for scope in scopes for tuner in scope.tuners}
    types, thread = tuner_types(), threading.get_ident()

    def check(module: nn.Module, _: Any) -> None:
        if not isinstance(module, types) or threading.get_ident() != thread:
            return
        if _is_under_torchs(sys._getframe(1)):
            raise ValueError(
                f"checkpoint({name}): expected that PEFT layers in it run under mmadapt.checkpoint, got a "
                "torch.utils.checkpoint inside, whose own recomputation would see other adapters. "
                "Do: call mmadapt.checkpoint there too, or drop the inner one."
            )
        if id(module) not in known:
            found = f"{len(known)} others" if known else "none"
            raise ValueError(
                f"checkpoint({name}): expected to find all PEFT layers that it runs, got {found}, but it runs a "
                f"{type(module).__name__} of {module.__class__.__module__} that is not below any module found, so its "
                "adapters could not be restored in backward. Valid: a Module, its method, a partial or a closure that "
                "holds it, a Module among the arguments; not seen: a global, a Module in a plain list. "
                "Do: pass modules=[the modules it runs]."
            )

    # A hook for all modules of the process, through torch's own function, for the time of this forward.
    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
    if scopes:
        scopes[0].watched.add(key)
