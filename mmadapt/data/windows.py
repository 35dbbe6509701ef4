"""Windows of synchronised recordings, as batches of clips: the data set between raw signals and a DataLoader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mmadapt.data.augment import Augment, draw, positions
from mmadapt.data.batch import Batch

Array = NDArray[Any]


@dataclass(frozen=True)
class Sensor:
    """Three columns of a recording that form one vector, and how they change with what a window is varied by.

    mirror: the signs of its axes under a swap of left and right.
    order: the power of the speed that it grows with when a movement is performed faster: 1 for a velocity, 2 for an
        acceleration.
    has_level: it holds `Recordings.level` too, which is there without any movement and grows with nothing.
    """

    columns: tuple[int, int, int]
    mirror: tuple[int, int, int]
    order: int = 0
    has_level: bool = False


@dataclass(frozen=True)
class Recordings:
    """Recordings of all sensors end to end.

    Shapes, for R recordings with T samples in all: signals (T, columns) float32; offsets (R + 1,), recording r is
    `signals[offsets[r]:offsets[r + 1]]`; targets (R,) int64; subjects (R,); level (T, 3) float32, such as gravity, for
    the sensors that have one.
    """

    signals: Array
    offsets: Array
    targets: Array
    subjects: Array
    level: Array | None = None


@dataclass(frozen=True)
class Scaling:
    """Mean and standard deviation of each column, (columns,), of the training subjects alone.

    One constant shift per column: the absolute level of a window, which is the direction of gravity, is kept.
    """

    mean: Array
    std: Array

    @classmethod
    def of(cls, recordings: Recordings, subjects: Sequence[int]) -> "Scaling":
        keep = np.isin(np.repeat(recordings.subjects, np.diff(recordings.offsets)), subjects)
        values = recordings.signals[keep].astype(np.float64)
        return cls(values.mean(axis=0), values.std(axis=0))


@dataclass(frozen=True)
class View:
    """A deterministic variant of one window: mirrored, or its middle part stretched to full length."""

    mirror: bool = False
    part: float = 1.0


# Views of a window use its own samples only. The whole window and its mirror image come first.
VIEWS = (
    View(),
    View(mirror=True),
    View(part=0.9),
    View(mirror=True, part=0.9),
    View(part=0.8),
    View(mirror=True, part=0.8),
    View(part=0.7),
    View(mirror=True, part=0.7),
)


def window_starts(length: int, size: int, hop: int) -> list[int]:
    """Starts of the whole windows in a recording: 0, hop, 2 hop, ... while `size` samples remain."""
    return list(range(0, length - size + 1, hop))


class WindowDataset(Dataset[Batch]):
    """All windows of some subjects, served as whole batches.

    Indexed by window, or by `(epoch, window)` as `EpochSampler` yields. `__getitems__` builds a batch at once with
    array code, so a DataLoader needs no collation (`collate_fn=as_is`). With `augment`, a window is varied as a pure
    function of (seed, epoch, window); without, it comes as it is, in its `views`.

    Shapes: each modality is a clip (rows, 3 axes, frames, 1, size / frames): a stretch of signal is a frame of one
    line.
    """

    def __init__(
        self,
        recordings: Recordings,
        sensors: Mapping[str, Sensor],
        modalities: Sequence[str],
        scaling: Scaling,
        subjects: Sequence[int],
        *,
        size: int,
        hop: int,
        frames: int,
        augment: Augment | None = None,
        views: int = 1,
        seed: int = 0,
    ) -> None:
        self.recordings = recordings
        self.sensors = dict(sensors)
        self.modalities = tuple(modalities)
        self.scaling = scaling
        self.signals = {
            name: np.ascontiguousarray(recordings.signals[:, list(sensors[name].columns)]) for name in modalities
        }
        self.levels = {name: recordings.level for name in modalities if sensors[name].has_level}
        self.subjects = tuple(subjects)
        self.size, self.frames = size, frames
        self.augment, self.seed = augment, seed
        self.views = VIEWS[:views]
        lengths = np.diff(recordings.offsets)
        windows = [
            (r, w, start)
            for r in np.flatnonzero(np.isin(recordings.subjects, subjects)).tolist()
            for w, start in enumerate(window_starts(int(lengths[r]), size, hop))
        ]
        self.recording = np.array([r for r, _, _ in windows], dtype=np.int64)  # (windows,)
        self.start = np.array([start for _, _, start in windows], dtype=np.int64)
        self.ids = [f"rec{r:03d}:w{w:02d}" for r, w, _ in windows]
        self.targets = torch.from_numpy(recordings.targets[self.recording])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, item: int | tuple[int, int]) -> Batch:
        return self.__getitems__([item])

    def __getitems__(self, items: Sequence[int | tuple[int, int]]) -> Batch:
        pairs = [item if isinstance(item, tuple) else (0, item) for item in items]
        epochs, indices = [epoch for epoch, _ in pairs], [index for _, index in pairs]
        signals = self._views(indices) if self.augment is None else self._varied(epochs, indices)
        return Batch(
            inputs={name: self._clip(x) for name, x in signals.items()},
            targets=self.targets[indices],
            ids=[self.ids[index] for index in indices],
            views=len(self.views) if self.augment is None else 1,
        )

    def _varied(self, epochs: Sequence[int], indices: Sequence[int]) -> dict[str, Array]:
        """Training windows, modality -> (B, size, 3): every sensor gets the same crop, warp, mirror and rotation."""
        augment = self.augment
        assert augment is not None
        draws = draw(augment, self.seed, epochs, indices, self.size, len(self.sensors))
        at = positions(draws.log_speed)  # (B, size)
        first, last = self._bounds(indices)
        if augment.crop:
            room = np.maximum(last - first - np.ceil(at[:, -1]), 0)
            start = first + np.floor(draws.start * (room + 1))
        else:
            start = first + self.start[indices]
        at = np.minimum(start[:, None] + at, last[:, None])
        speed, gain = np.exp(draws.log_speed), np.exp(draws.log_gain)[:, None]
        signals = {}
        for name in self.modalities:
            # A sensor's draws are the same whichever other modalities are served.
            sensor, number = self.sensors[name], list(self.sensors).index(name)
            x = self._moved(at, name, speed**sensor.order * gain)
            x *= np.where(draws.mirror[:, None], np.array(sensor.mirror, x.dtype), 1)[:, None]
            turn = draws.rotation.transpose(0, 2, 1)  # rows are vectors, so it stands on the right and transposed
            x = self._scale(x @ turn.astype(x.dtype), sensor)
            if augment.jitter:
                x += augment.jitter * draws.noise[:, number]
            signals[name] = x
        return signals

    def _views(self, indices: Sequence[int]) -> dict[str, Array]:
        """Windows as they are and their variants, modality -> (V * B, size, 3), view-major."""
        first, _ = self._bounds(indices)
        begin = (first + self.start[indices])[:, None]
        steps = np.arange(self.size, dtype=np.float64)
        middle = (self.size - 1) / 2
        signals = {}
        for name in self.modalities:
            sensor = self.sensors[name]
            views = []
            for view in self.views:
                # Symmetric about the middle; the whole window comes out exactly.
                at = begin + steps + (1 - view.part) * (middle - steps)
                x = self._read(at, self.signals[name])  # not slowed as movement: the level looks back beyond the window
                x *= np.array(sensor.mirror if view.mirror else (1, 1, 1), x.dtype)
                views.append(self._scale(x, sensor))
            signals[name] = np.concatenate(views)
        return signals

    def _bounds(self, indices: Sequence[int]) -> tuple[Array, Array]:
        """First and last sample of the recording of each window, (B,) each."""
        recording = self.recording[indices]
        return self.recordings.offsets[recording], self.recordings.offsets[recording + 1] - 1

    def _moved(self, at: Array, name: str, factor: Array) -> Array:
        """A sensor with its movement, not its level, times a factor (B, N): (B, N) positions -> (B, N, 3) float32."""
        x = self._read(at, self.signals[name])
        if (factor == 1).all():
            return x
        level = self.levels.get(name)
        rest = 0 if level is None else self._read(at, level)
        return rest + (x - rest) * factor[..., None].astype(x.dtype)

    def _read(self, at: Array, signal: Array) -> Array:
        """A signal at fractional positions, linear between samples, exact at them: (B, N) -> (B, N, 3) float32."""
        low = np.floor(at).astype(np.int64)
        high = np.ceil(at).astype(np.int64)  # = low on a recording's last sample: never the next recording's first
        weight = (at - low).astype(np.float32)[..., None]
        x = signal[low]
        x += weight * (signal[high] - x)
        return x

    def _scale(self, x: Array, sensor: Sensor) -> Array:
        columns = list(sensor.columns)
        return (x - self.scaling.mean[columns].astype(x.dtype)) / self.scaling.std[columns].astype(x.dtype)

    def _clip(self, x: Array) -> torch.Tensor:
        """(rows, size, 3) -> (rows, 3, frames, 1, size / frames)"""
        clip = x.transpose(0, 2, 1).reshape(len(x), 3, self.frames, 1, -1)
        return torch.from_numpy(np.ascontiguousarray(clip, dtype=np.float32))


def as_is(batch: Any) -> Any:
    """The collation of a data set whose `__getitems__` returns a batch."""
    return batch
