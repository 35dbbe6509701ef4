"""Augmentation of synchronised motion signals: what is drawn for a window, and what is done with it.

Drawing and applying are apart. `draw` is the only place with randomness, and it is a pure function of
(seed, epoch, index): a counter-based generator is keyed by them, so that neither the number of workers, nor the
composition of a batch, nor an interrupted run changes a sample. Everything after it is deterministic array code over
the whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

KNOTS = 5  # of the smooth speed curve: about one change of tempo per second in a window of 5 s
LIMITS = {"crop": 1.0, "mirror": 1.0, "rotation": 180.0, "roll": 180.0}  # of strengths; the others have none
MAX_SPEED = 2.0  # nobody performs an exercise at more than twice or less than half the speed


@dataclass(frozen=True)
class Augment:
    """How strongly training windows are varied; 0 (False) switches a part off.

    Fields:
        crop: start anywhere in the window's recording instead of on the grid of hops.
        tempo: largest logarithm of a window's overall speed, drawn uniformly: 0.5 is 0.6 to 1.65 times the speed.
        warp: standard deviation of the logarithm of the speed at each knot of a smooth curve within the window.
        mirror: probability of swapping left and right.
        rotation: largest angle in degrees, about a random axis (how the device sits on the wrist).
        roll: largest angle in degrees, about x on top of that (how far it slid round the forearm).
        gain: standard deviation of the logarithm of the movement's size, the same for all sensors.
        jitter: standard deviation of white noise, in units of the training standard deviation.

    Raises:
        ValueError: a strength that is negative, or a probability above 1.
    """

    crop: bool = True
    tempo: float = 0.5
    warp: float = 0.2
    mirror: float = 0.5
    rotation: float = 10.0
    roll: float = 20.0
    gain: float = 0.2
    jitter: float = 0.1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            limit = LIMITS.get(field.name, float("inf"))
            if not 0 <= value <= limit:
                raise ValueError(f"expected augment.{field.name} in [0, {limit:g}], got {value!r}; 0 switches it off")

    @classmethod
    def none(cls) -> "Augment":
        """No variation at all: training windows are the windows of the grid."""
        return cls(crop=False, tempo=0, warp=0, mirror=0, rotation=0, roll=0, gain=0, jitter=0)


@dataclass(frozen=True)
class Draws:
    """What was drawn for B windows of N samples of S sensors.

    Shapes: start (B,) in [0, 1); log_speed (B, N); mirror (B,) bool; rotation (B, 3, 3); log_gain (B,); noise
    (B, S, N, 3) of unit variance, empty without jitter.
    """

    start: Array
    log_speed: Array
    mirror: Array
    rotation: Array
    log_gain: Array
    noise: Array


def generator(seed: int, epoch: int, index: int, *, stream: int = 0) -> np.random.Generator:
    """The random generator of one sample in one epoch, independent of every other.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (Philox).
    """
    # The lowest word of the counter is the one that runs; the others name the sample. (As uint64 from the start: numpy
    # would take a list with one number beyond int64 for floats, and round it.)
    key = np.array([seed % 2**64, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, stream, index, epoch], dtype=np.uint64)))


def draw(augment: Augment, seed: int, epochs: Sequence[int], indices: Sequence[int], size: int, sensors: int) -> Draws:
    """Draw the variation of each window; everything is drawn always, so one strength doesn't move another's draws."""
    uniforms = np.empty((len(indices), 5))
    normals = np.empty((len(indices), KNOTS + 3 + 1))
    noise = np.empty((len(indices), sensors, size, 3) if augment.jitter else (len(indices), 0), dtype=np.float32)
    for row, (epoch, index) in enumerate(zip(epochs, indices, strict=True)):
        random = generator(seed, epoch, index)
        random.random(out=uniforms[row])
        random.standard_normal(out=normals[row])
        random.standard_normal(out=noise[row], dtype=np.float32)
    start, mirror, turn, tempo, roll = uniforms.T
    knots, axis, gain = np.split(normals, [KNOTS, KNOTS + 3], axis=1)
    log_speed = augment.tempo * (2 * tempo[:, None] - 1) + augment.warp * knots @ _knot_basis(size)  # (B, N)
    return Draws(
        start=start,
        log_speed=np.clip(log_speed, -np.log(MAX_SPEED), np.log(MAX_SPEED)),
        mirror=mirror < augment.mirror,
        rotation=rotation_matrix(np.eye(1, 3).repeat(len(roll), axis=0), np.deg2rad(augment.roll) * (2 * roll - 1))
        @ rotation_matrix(axis, np.deg2rad(augment.rotation) * (2 * turn - 1)),
        log_gain=augment.gain * gain[:, 0],
        noise=noise,
    )


def positions(log_speed: Array) -> Array:
    """Where, relative to its start, a window reads its recording: the integral of its speed.

    Shapes: (B, N) -> (B, N), increasing, 0 at the start; exactly 0, 1, 2, ... at zero log-speed.
    """
    steps = np.exp(log_speed[:, :-1])
    return np.concatenate([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)], axis=1)


def rotation_matrix(axis: Array, angle: Array) -> Array:
    """Rotations by `angle` radians about `axis`, of any length (Rodrigues).

    Shapes: (B, 3), (B,) -> (B, 3, 3).
    """
    x, y, z = (axis / np.linalg.norm(axis, axis=1, keepdims=True)).T
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=1).reshape(-1, 3, 3)
    sin, cos = np.sin(angle)[:, None, None], np.cos(angle)[:, None, None]
    return np.eye(3) + sin * cross + (1 - cos) * cross @ cross


def _knot_basis(size: int) -> Array:
    """Raised-cosine interpolation from knots to samples, (KNOTS, size): smooth, and it sums to 1 at each sample."""
    at = np.linspace(0, KNOTS - 1, size)
    distance = np.abs(at - np.arange(KNOTS)[:, None])
    return np.where(distance < 1, 0.5 + 0.5 * np.cos(np.pi * distance), 0.0)
