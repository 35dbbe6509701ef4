"""The buffers that a forward reads and writes: the same for its recomputation, and written once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmadapt.errors import RecomputationError, cannot_recompute, listed
from mmadapt.scopes import ABSENT, Scope, version_of

__all__: list[str] = []


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
                f"{cannot_recompute(label)}: expected the buffers of its forward, but {len(edited)} were edited in "
                f"place since it began: {listed(edited)}. Do: edit buffers before the forward or after backward; "
                "one that a forward updates now and then, have it updated in every forward."
            )

    def swap_in(self, undo: list[tuple[dict, str, Any]]) -> None:
        """Put the forward's buffers in place: copies of those that it writes, so that the live ones stay untouched."""
        for scope, tensors, copies in zip(self._scopes, self.tensors, self._copies, strict=True):
            for i, (d, name) in enumerate(scope.buffers):
                live = d.get(name, ABSENT)
                copy = copies.get(i)
                then = tensors[i] if copy is None else copy.clone()  # a second backward needs the copy again
                if live is not then:
                    undo.append((d, name, live))
                    d[name] = then
