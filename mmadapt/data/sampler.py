"""The order of training samples, as a pure function of seed and epoch."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from mmadapt.data.augment import generator

STREAM = 2**32  # apart from the streams of the samples themselves


class EpochSampler(DistributedSampler[Any]):
    """Yields `(epoch, index)` pairs in an order that depends on nothing but (seed, epoch).

    The epoch travels with the index because workers that persist hold their copy of the data set from the first epoch
    on, and would never hear of a later one. Position: row `r` of epoch `e` is `order(e)[r]`, whatever ran before, so
    `seek(e, r)` continues an interrupted epoch exactly: after k batches of b samples, `r = k * b`.

    It is a DistributedSampler because Lightning replaces any other sampler in a distributed run, and because
    Lightning calls `set_epoch` on it before each epoch. Every replica gets the same number of samples: the remainder of
    an epoch's order is left out.
    """

    def __init__(self, size: int, *, seed: int = 0, epoch: int = 0, num_replicas: int = 1, rank: int = 0) -> None:
        dataset: Any = range(size)  # all that the base class asks of a data set is its length
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed, drop_last=True)
        self.size = size
        self.epoch = epoch
        self.start = 0

    def order(self, epoch: int) -> list[int]:
        """The indices of this replica in one epoch."""
        shuffled = generator(self.seed, epoch, 0, stream=STREAM).permutation(self.size).tolist()
        whole = self.size // self.num_replicas * self.num_replicas
        return shuffled[self.rank : whole : self.num_replicas]

    def seek(self, epoch: int, row: int) -> None:
        """Start the next iteration at this row of this epoch; later epochs are whole again."""
        if not 0 <= row <= len(self):
            raise ValueError(f"expected a row in [0, {len(self)}], got {row}; rows count this replica's samples")
        self.epoch, self.start = epoch, row

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self.size // self.num_replicas

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch, start = self.epoch, self.start
        self.start = 0
        for index in self.order(epoch)[start:]:
            yield epoch, index
