"""Plans: which blocks of a stack are checkpointed, and how; and the loop that runs a stack under one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmadapt.checkpointing import checkpoint

__all__ = ["CheckpointPlan", "run_blocks"]


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
