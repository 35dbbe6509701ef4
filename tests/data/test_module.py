"""A data module of one's own, by the documented conventions, in a Lightning run; and what importing costs."""

import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mmadapt.data.batch import Batch
from mmadapt.data.module import MultimodalDataModule, Split


class Numbers(Dataset[Batch]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, items: Sequence[Any]) -> Batch:
        pairs = [item if isinstance(item, tuple) else (0, item) for item in items]
        x = torch.tensor([[float(epoch), float(index)] for epoch, index in pairs])
        return Batch({"numbers": x}, torch.tensor([i % 2 for _, i in pairs]), [f"{e}:{i}" for e, i in pairs])


class OwnModule(MultimodalDataModule):
    def __init__(self, size: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modalities, self.class_names = ("numbers",), ("even", "odd")
        self.clip_shapes, self.sha256, self.size = {"numbers": (2,)}, "0", size

    def dataset(self, split: Split, *, training: bool = False) -> Numbers:
        return Numbers(self.size if split == "train" else 3)


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), []  # type: ignore[var-annotated]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        assert isinstance(batch, Batch)
        self.seen.append((self.current_epoch, batch.ids))
        return self.layer(batch.inputs["numbers"]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(module: OwnModule, **kwargs: Any) -> list[tuple[int, list[str]]]:
    model = Recorder()
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **kwargs,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers and devices: not what is tested
        trainer.fit(model, datamodule=module)
    return model.seen


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_trainer_hands_the_epoch_to_every_sample(workers: int) -> None:
    module = OwnModule(batch_size=4, num_workers=workers, seed=1)
    seen = fit(module, max_epochs=3, limit_val_batches=0)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1, 2, 2]  # 10 samples: two whole batches of 4
    assert module.sampler is not None
    for epoch in range(3):
        ids = [name for e, names in seen if e == epoch for name in names]
        assert ids == [f"{epoch}:{index}" for index in module.sampler.order(epoch)[:8]]


def test_a_small_data_set_still_gives_one_batch() -> None:
    assert len(list(OwnModule(size=3, batch_size=8).train_dataloader())) == 1


def test_overfitting_on_a_few_batches_runs() -> None:
    assert len(fit(OwnModule(batch_size=4), max_epochs=2, overfit_batches=1, limit_val_batches=0)) == 2


def test_arrays_for_baselines_hold_every_sample_of_the_split() -> None:
    class Clips(OwnModule):
        def dataset(self, split: Split, *, training: bool = False) -> Any:
            class WithViews(Numbers):
                def __getitems__(self, items: Sequence[Any]) -> Batch:
                    batch = super().__getitems__(items)
                    clip = batch.inputs["numbers"].reshape(-1, 1, 1, 1, 2)
                    return Batch({"numbers": torch.cat([clip, -clip])}, batch.targets, batch.ids, views=2)

            return WithViews(5)

    arrays, targets = Clips().baseline_arrays("test")
    np.testing.assert_array_equal(arrays["numbers"][:, 0], [[0, i] for i in range(5)])
    assert targets.tolist() == [0, 1, 0, 1, 0]


def test_the_base_alone_says_what_to_write() -> None:
    with pytest.raises(NotImplementedError, match=r"MultimodalDataModule\.dataset"):
        MultimodalDataModule().train_dataloader()


def test_importing_the_package_loads_no_framework() -> None:
    code = "import sys, mmadapt.data as d; dir(d); assert not {'lightning', 'sklearn'} & set(sys.modules); d.Batch"
    subprocess.run([sys.executable, "-c", code], check=True)
    import mmadapt.data

    with pytest.raises(AttributeError, match="valid:"):
        _ = mmadapt.data.Wach
