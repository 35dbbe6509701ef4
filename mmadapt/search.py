"""Where the tuner layers are that a call runs: found through the call, and seen to be all when it runs.

A function shows some of what it runs: itself if it is a Module, Modules among its arguments, in closure cells, in
partials. It can also reach a tuner layer as a global, or as a Module that another keeps in a plain list. So what was
found is checked by watching a run: a tuner layer that runs without having been found is an error at the forward, not
a wrong gradient in backward; any other module that was not found is restored as those that were.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from types import CellType, FrameType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mmadapt.scopes import Scope, scope_of, tuner_types
from mmadapt.state import AdapterState

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


def _modules_in(value: Any, depth: int = 0, seen: frozenset[int] = frozenset()) -> Iterator[nn.Module]:
    """The Modules that a value holds: itself, in containers, in a partial, in a method's object, in closure cells."""
    if isinstance(value, nn.Module):
        if not isinstance(value, ScriptModule):  # cannot hold PEFT layers, nor anything of ours
            yield value
    elif isinstance(value, Tensor | str | int | float) or id(value) in seen:  # a container may hold itself
        return
    elif isinstance(value, dict | list | tuple | set | frozenset):
        if len(value) <= _ITEMS:
            for item in value.values() if isinstance(value, dict) else value:
                yield from _modules_in(item, depth, seen | {id(value)})
    elif depth < 4:
        if isinstance(value, functools.partial):
            yield from _modules_in((value.func, value.args, value.keywords), depth + 1, seen)
        elif isinstance(value, MethodType):
            yield from _modules_in(value.__self__, depth + 1, seen)
        elif closure := getattr(value, "__closure__", None):
            yield from _modules_in([cell_content(cell) for cell in closure], depth + 1, seen)


def cells_of(function: Any, depth: int = 0) -> list[tuple[CellType, Any]]:
    """The closure cells that a function and the functions in them read, with what they hold now (see `snapshot`)."""
    if isinstance(function, nn.Module) or depth > 4:
        return []
    if isinstance(function, functools.partial):
        return cells_of(function.func, depth + 1)
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        content = cell_content(cell)
        if content is not UNBOUND:
            found += [(cell, snapshot(content)), *(cells_of(content, depth + 1) if callable(content) else [])]
    return found


_DEPTH, _ITEMS = 4, 10_000  # what is deeper or longer is no argument of a block, and costs too much to copy


def snapshot(value: Any, depth: int = 0) -> Any:
    """Plain containers copied, nested ones too, with the very objects that are in them; anything else is itself."""
    if not _is_container(value) or depth > _DEPTH:
        return value
    if type(value) is dict:
        return {key: snapshot(item, depth + 1) for key, item in value.items()}
    return value.copy() if type(value) is set else type(value)(snapshot(item, depth + 1) for item in value)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value and in the containers that `snapshot` copies."""
    if isinstance(value, Tensor):
        yield value
    elif _is_container(value) and depth <= _DEPTH:
        for item in value.values() if type(value) is dict else value:
            yield from tensors_in(item, depth + 1)


def _is_container(value: Any) -> bool:
    return type(value) in (dict, list, tuple, set) and len(value) <= _ITEMS


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
    modes = [scope.root_dict.get("training") for scope in scopes]
    code = type(function) if isinstance(function, nn.Module) else getattr(function, "__code__", type(function))
    return code, *modes, *routes


def is_known(key: tuple, scopes: Sequence[Scope]) -> bool:
    """Whether a run of this function, as far as its code goes, has been watched under the adapters and mode of now.

    Modules run the same layers in each step under the same adapters and mode, so one watched run tells for all.
    """
    return bool(scopes) and key in scopes[0].watched


class Watch:
    """Sees each module that a function runs: one that was not found has its state captured before it runs.

    So the running statistics of a norm that a function reaches as a global are restored too. A PEFT layer that was not
    found is refused, as is one under a checkpoint of torch's inside.
    """

    def __init__(self, key: tuple, roots: Sequence[nn.Module], scopes: Sequence[Scope], name: str) -> None:
        self.key = key
        self.scopes = scopes
        self.name = name
        self.thread = threading.get_ident()
        self.types = tuner_types()
        self.known = {id(module) for module in roots} | {id(m) for scope in scopes for m in scope.full.children}
        self.strays: list[AdapterState] = []

    def __enter__(self) -> "Watch":
        # A hook for all modules of the process, through torch's own function, for the time of this forward.
        self.handle = register_module_forward_pre_hook(self.check)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.handle.remove()
        if kind is None and self.scopes and not self.strays:
            self.scopes[0].watched.add(self.key)

    def check(self, module: nn.Module, _: Any) -> None:
        """
        Raises:
            ValueError: a PEFT layer is about to run that would not be restored.
        """
        if threading.get_ident() != self.thread:
            return
        if isinstance(module, self.types):
            self.check_tuner(module)
        elif id(module) not in self.known and not isinstance(module, ScriptModule):
            scope = scope_of(module)
            self.strays.append(AdapterState.capture_in([module], [scope]))
            self.known |= {id(module)} | {id(m) for m in scope.full.children if not isinstance(m, self.types)}

    def check_tuner(self, layer: nn.Module) -> None:
        if _is_under_torchs(sys._getframe(1)):
            raise ValueError(
                f"checkpoint({self.name}): expected that PEFT layers in it run under mmadapt.checkpoint, got a "
                "torch.utils.checkpoint inside, whose own recomputation would see other adapters. "
                "Do: call mmadapt.checkpoint there too, or drop the inner one."
            )
        if id(layer) not in self.known:
            count = sum(len(scope.tuners) for scope in self.scopes)
            raise ValueError(
                f"checkpoint({self.name}): expected to find all PEFT layers that it runs, got "
                f"{f'{count} others' if count else 'none'}, but it runs a {type(layer).__name__} of "
                f"{type(layer).__module__} that is not below any module found, so its adapters could not be restored "
                "in backward. Valid: a Module, its method, a partial or a closure that holds it, a Module among the "
                "arguments; not seen: a global, a Module in a plain list. Do: pass modules=[the modules it runs]."
            )
