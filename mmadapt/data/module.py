"""The base of our data modules, and the conventions that the rest of mmadapt relies on."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import lightning as L
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from mmadapt.data.batch import Batch
from mmadapt.data.sampler import EpochSampler
from mmadapt.data.windows import as_is

Split = Literal["train", "val", "test"]


class MultimodalDataModule(L.LightningDataModule):
    """Subclass this to bring your own data: set the attributes, write `dataset`, and everything else works.

    Attributes that a subclass sets in `__init__`, plain values all:
        modalities: the keys of each batch's `inputs`, in a fixed order.
        class_names, num_classes: what `targets` count.
        clip_shapes: modality -> (C, T, H, W) of one sample, from which tokenizers are built.
        sha256: of the raw data; results on disk are keyed by it.
        fold: which split of the data this is.

    Conventions:
        `dataset(split, training=...)` returns a map-style data set with `__len__` and `__getitems__(items) -> Batch`.
            With `training=True` the items are `(epoch, index)` pairs, and a sample may vary as a pure function of
            (seed, epoch, index); else they are indices, and a sample is always the same, in one or several views.
        Splits are disjoint in whatever must generalise (subjects, scenes, sites), and nothing that is fitted to data,
            scaling included, has seen "test" or "val".
        The last, incomplete training batch of an epoch is left out, unless there is no other.

    Args:
        batch_size: samples per batch and process.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        seed: of the order and the variation of training samples.
    """

    modalities: tuple[str, ...]
    class_names: tuple[str, ...]
    clip_shapes: dict[str, tuple[int, ...]]
    sha256: str
    fold: int = 0

    def __init__(self, *, batch_size: int = 64, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        if batch_size < 1 or num_workers < 0:
            raise ValueError(
                f"expected batch_size >= 1 and num_workers >= 0, got {batch_size} and {num_workers};"
                " set data.batch_size and data.num_workers"
            )
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.sampler: EpochSampler | None = None  # of the latest training DataLoader: its position is (epoch, row)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def dataset(self, split: Split, *, training: bool = False) -> Dataset[Batch]:
        """The data set of one split, varied as for training or not."""
        raise NotImplementedError(
            f"expected {type(self).__name__}.dataset(split, training=...) to return a data set whose __getitems__"
            " gives a Batch; write it"
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        dataset = self.dataset("train", training=True)
        trainer = self.trainer
        size = len(dataset)  # type: ignore[arg-type]
        self.sampler = EpochSampler(
            size,
            seed=self.seed,
            epoch=trainer.current_epoch if trainer else 0,  # a resumed run asks for its loader before `set_epoch`
            num_replicas=trainer.world_size if trainer else 1,
            rank=trainer.global_rank if trainer else 0,
        )
        return self._loader(dataset, sampler=self.sampler, drop_last=len(self.sampler) >= self.batch_size)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.dataset("val"))

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.dataset("test"))

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.test_dataloader()

    def baseline_arrays(self, split: Split) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.int64]]:
        """All samples of a split as plain arrays, view 0 only: modality -> (n, C, T * H * W), and targets (n,)."""
        inputs: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.modalities}
        targets = []
        for batch in DataLoader(self.dataset(split), batch_size=256, collate_fn=as_is):
            for name in self.modalities:
                inputs[name].append(batch.inputs[name][: len(batch)].flatten(start_dim=2).numpy())
            targets.append(batch.targets.numpy())
        return {name: np.concatenate(parts) for name, parts in inputs.items()}, np.concatenate(targets)

    def _loader(self, dataset: Dataset[Batch], **kwargs: Any) -> DataLoader[Batch]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=as_is,
            **kwargs,
        )


def choose(what: str, got: Iterable[str], valid: Sequence[str]) -> tuple[str, ...]:
    """The names in `got`, once each is known to be one of `valid`.

    Raises:
        ValueError: an unknown name (with the closest valid one), none at all, or one given twice.
    """
    # A bare string would be taken apart into letters.
    names = (got,) if isinstance(got, str) else tuple(got)
    for name in names:
        if name not in valid:
            close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else "choose from these"
            raise ValueError(f"expected a known {what}, got {name!r}; valid: {list(valid)}; {hint}")
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"expected one or more {what} names, each once, got {list(names)}; valid: {list(valid)};"
            " list at least one and drop repetitions"
        )
    return names
