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
    when it is recomputed, and must not update it twice. Which buffers a forward edits in place shows only afterwards,
    so under each mode (train or eval of every module) the first one keeps a copy of all; later ones of those that it
    edited. One that is replaced by another tensor (a cache that grows) needs no copy.
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
            self._copies.append(_copied_together({i: t for i in which if (t := tensors[i]) is not None}))

    def forward_done(self) -> None:
        """Note which buffers the forward edited, and keep only their copies."""
        for n, scope in enumerate(self._scopes):
            pairs = zip(self.tensors[n], self.versions[n], strict=True)
            edited = {i for i, (tensor, version) in enumerate(pairs) if version_of(tensor) != version}
            known = scope.written.get(self._key)
            if known is None:
                # By value too: `.data` and fused kernels do not count as edits. (Once, as it waits for the device.)
                by_value = {
                    i
                    for i, copy in self._copies[n].items()
                    if i not in edited and not torch.equal(copy, _given(self.tensors[n][i]))
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
            fresh = _copied_together(copies)  # a second backward needs the copies again
            for i, (d, name) in enumerate(scope.buffers):
                live = d.get(name, ABSENT)
                then = fresh.get(i, tensors[i])
                if live is not then:
                    undo.append((d, name, live))
                    d[name] = then


def _copied_together(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copies, of which those share memory whose originals do."""
    copies = {i: tensor.detach().clone() for i, tensor in tensors.items()}
    if len(tensors) > 1:
        sharing: dict[int, list[int]] = {}
        for i, tensor in tensors.items():
            if tensor.layout is torch.strided and tensor.numel():
                sharing.setdefault(tensor.untyped_storage()._cdata, []).append(i)
        for group in sharing.values():
            if len(group) > 1:
                storage = tensors[group[0]].untyped_storage().clone()
                for i in group:
                    t = tensors[i]
                    copies[i] = t.new_empty(0).set_(storage, t.storage_offset(), t.size(), t.stride())
    return copies


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
