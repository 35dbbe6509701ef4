"""Shoulder exercises recorded with a smartwatch: real data that a Python package carries, so nothing is downloaded.

140 recordings: 10 subjects perform 7 exercises with either arm, about 20 repetitions each; accelerometer (in g) and
gyroscope (in rad/s) together at 50 Hz.

Source: Burns et al. 2018, arXiv:1802.01489; the recordings are part of seglearn (BSD 3-Clause).
"""

import hashlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mmadapt.data.augment import Augment
from mmadapt.data.gravity import gravity
from mmadapt.data.module import MultimodalDataModule, Split, choose
from mmadapt.data.windows import VIEWS, Recordings, Scaling, Sensor, WindowDataset

SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
CLASS_NAMES = (
    "pendulum",
    "abduction",
    "forward elevation",
    "internal rotation",
    "external rotation",
    "trapezius extension",
    "row",
)
SIZE, HOP, FRAMES = 256, 128, 16  # samples of a window, between two windows; frames of a clip
FOLDS = 5
RATE = 50.0  # samples per second

# The watch sits on the wrist of the exercising arm, so the other arm sees the world reflected in a plane across the
# x axis. Acceleration is a vector and its x flips; angular velocity is a pseudovector, which a reflection also turns
# round as a whole, so its y and z flip. The recordings agree: of all 64 choices of signs this one brings the mean
# levels and the channel correlations of a subject's left arm closest to those of the right.
SENSORS = {
    "accelerometer": Sensor(columns=(0, 1, 2), mirror=(-1, 1, 1), order=2, has_level=True),
    "gyroscope": Sensor(columns=(3, 4, 5), mirror=(1, -1, -1), order=1),
}


class WatchDataModule(MultimodalDataModule):
    """Windows of 256 samples (5.12 s), every 128, as clips of 3 axes x 16 frames x 1 x 16 samples per modality.

    Split by subject: fold f tests subjects 2f + 1 and 2f + 2; the next one (after the last, the first) is the
    validation subject; the other seven train, and they alone give the scaling.

    Args:
        modalities: which of `SENSORS` a batch has.
        fold: 0 to 4.
        augment: strengths as `Augment` or a mapping of its fields; True for the defaults, False for none.
        test_views: deterministic views per test window, to be averaged (see `Batch`); 1 to 8.
        val_views: the same for validation windows, which are looked at every epoch; None for `test_views`.
        val_subject: another training subject (1 to 10) for validation.
        path: the recordings file, where the package that carries it isn't installed.

    Raises:
        ValueError: unknown modality, fold, subject, number of views or strength; a file with other contents.
        ImportError: the package that carries the recordings isn't installed.
    """

    def __init__(
        self,
        modalities: Sequence[str] = tuple(SENSORS),
        *,
        fold: int = 0,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        augment: Augment | Mapping[str, Any] | bool = True,
        test_views: int = 4,
        val_views: int | None = 1,
        val_subject: int | None = None,
        path: str | Path | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.modalities = choose("modality", modalities, tuple(SENSORS))
        self.class_names = CLASS_NAMES
        self.clip_shapes = dict.fromkeys(self.modalities, (3, FRAMES, 1, SIZE // FRAMES))
        self.sha256 = SHA256
        self.fold = fold
        self.augment = _augment(augment)
        self.test_views = _views("test_views", test_views)
        self.val_views = self.test_views if val_views is None else _views("val_views", val_views)
        self.path = path
        self.subjects = split_subjects(fold, val_subject)

    def prepare_data(self) -> None:
        load_recordings(self.path)

    def dataset(self, split: Split, *, training: bool = False) -> WindowDataset:
        choose("split", [split], tuple(self.subjects))
        recordings = load_recordings(self.path)
        return WindowDataset(
            recordings,
            SENSORS,
            self.modalities,
            Scaling.of(recordings, self.subjects["train"]),
            self.subjects[split],
            size=SIZE,
            hop=HOP,
            frames=FRAMES,
            augment=self.augment if training else None,
            views={"train": 1, "val": self.val_views, "test": self.test_views}[split],
            seed=self.seed,
        )


def split_subjects(fold: int, val_subject: int | None = None) -> dict[str, tuple[int, ...]]:
    """Subjects (1 to 10) of each split of a fold.

    Raises:
        ValueError: a fold that doesn't exist, or a validation subject that is tested or doesn't exist.
    """
    if fold not in range(FOLDS):
        raise ValueError(f"data.fold: expected one of {list(range(FOLDS))}, got {fold!r}")
    everyone = range(1, 2 * FOLDS + 1)
    test = (2 * fold + 1, 2 * fold + 2)
    val = (2 * fold + 2) % len(everyone) + 1 if val_subject is None else val_subject
    rest = [subject for subject in everyone if subject not in test]
    if val not in rest:
        raise ValueError(
            f"expected a validation subject that fold {fold} doesn't test, got {val!r}; valid: {rest};"
            " set data.val_subject, or leave it null"
        )
    return {"train": tuple(subject for subject in rest if subject != val), "val": (val,), "test": test}


def recordings_path() -> Path:
    """The recordings file inside the installed package.

    Raises:
        ImportError: the package isn't installed.
    """
    # Found by path: importing the package would need pandas, which it doesn't declare.
    spec = importlib.util.find_spec("seglearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / "data" / "watch_dataset.npy").is_file():
            return path
    raise ImportError(
        "expected the package seglearn, which carries the watch recordings, got none;"
        " pip install 'mmadapt[demo]', or give data.path the file watch_dataset.npy"
    )


def load_recordings(path: str | Path | None = None) -> Recordings:
    """Read the recordings, once per process and file.

    Raises:
        ImportError: no path, and the package that carries the file isn't installed.
        FileNotFoundError: nothing at that path.
        ValueError: the file isn't the one that is known.
    """
    return _load(recordings_path() if path is None else Path(path).expanduser())


@cache
def _load(path: Path) -> Recordings:
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the watch recordings at {path}, got no file; set data.path, or leave it null"
        )
    raw = path.read_bytes()
    # The file is a pickle, which runs what it says: it is read from the very bytes that were checked.
    if (digest := hashlib.sha256(raw).hexdigest()) != SHA256:
        raise ValueError(
            f"expected {path} with sha256 {SHA256}, got {digest}; it isn't the file of seglearn 1.2.5 and wasn't"
            " opened; pip install --force-reinstall 'mmadapt[demo]'"
        )
    data = np.load(io.BytesIO(raw), allow_pickle=True).item()
    lengths = [len(x) for x in data["X"]]
    signals = np.concatenate(data["X"]).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Recordings(
        signals=signals,
        offsets=offsets,
        level=gravity(signals[:, :3], signals[:, 3:], offsets, RATE),
        targets=data["y"].astype(np.int64),
        subjects=data["subject"].astype(np.int64),
    )


def _augment(value: Augment | Mapping[str, Any] | bool) -> Augment:
    if isinstance(value, Mapping):
        if value:
            choose("augment field", value, [field.name for field in fields(Augment)])
        return Augment(**value)
    if isinstance(value, bool):
        return Augment() if value else Augment.none()
    return value


def _views(name: str, views: int) -> int:
    if views not in range(1, len(VIEWS) + 1):
        raise ValueError(f"expected 1 to {len(VIEWS)} views, got {views!r}; set data.{name}")
    return views
