"""Fixtures of all tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# As mmadapt.train does; here, since torch reads it when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from mmadapt.build import settled

# A run of all stages in seconds: a model of 16 dimensions, two batches an epoch, one epoch.
TINY = (
    "backbone.dim=16",
    "backbone.depth=2",
    "backbone.num_heads=2",
    "adapters.lora.r=2",
    "data.batch_size=8",
    "data.test_views=1",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
    "trainer.enable_progress_bar=false",
    "stages.pretrain.epochs=1",
    "stages.single.epochs=1",
    "baselines=false",
)


@pytest.fixture
def quiet() -> Iterator[None]:
    """What Lightning says to script writers is off, as in mmadapt.train."""
    with settled():
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., list[str]]:
    """Overrides of a run of seconds that writes below tmp_path: tiny("+experiment=vivit_multi", ...)."""

    def overrides(*more: str) -> list[str]:
        return [*TINY, f"paths.output={tmp_path / 'outputs'}", *more]

    return overrides
