"""Errors, and how they are worded: expected, got, valid choices, what to do."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = ["RecomputationError"]


class RecomputationError(RuntimeError):
    """A recomputation cannot see what its forward saw, so its gradients would be silently wrong."""


def cannot_recompute(label: str) -> str:
    """How a RecomputationError begins; `label` is the block's name, if it has one."""
    return f"cannot recompute {label}" if label else "cannot recompute"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names for a message, the first ones of many."""
    return ", ".join(names[:most]) + (f", ... ({len(names) - most} more)" if len(names) > most else "")


def unknown(what: str, got: object, valid: Iterable[object]) -> str:
    """The message about a name that is none of the valid ones."""
    names = list(valid)
    close = get_close_matches(str(got), [str(v) for v in names], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{what}: expected one of {names}, got {got!r}.{hint}"
