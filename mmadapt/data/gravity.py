"""The direction of gravity in a wrist's frame, from an accelerometer and a gyroscope."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gravity(acceleration: Array, rotation: Array, offsets: Array, rate: float, seconds: float = 2.0) -> Array:
    """Gravity in g, a unit vector per sample: what of the acceleration is no movement.

    A complementary filter: the gyroscope turns the last estimate, the accelerometer pulls it back within `seconds`. A
    plain low-pass would take slow repetitions of an exercise for changes of gravity.

        g_t = normalise((1 - k) turned + k a_t),    turned = g_{t-1} - (w_t / rate) x g_{t-1},    k = 1 / (rate seconds)

    Shapes, for recordings end to end: acceleration (T, 3) in g, rotation (T, 3) in rad/s, offsets (R + 1,) -> (T, 3)
    float32. rate: samples per second. Each recording starts from the mean of its first `seconds`.

    Source: Mahony et al. 2008, "Nonlinear complementary filters on the special orthogonal group".
    """
    lengths = np.diff(offsets)
    a, w = (_side_by_side(x, offsets) for x in (acceleration, rotation))  # (R, longest, 3)
    pull = 1 / (rate * seconds)
    first = int(rate * seconds)
    starts = [x[: min(n, first)].mean(axis=0) for x, n in zip(a, lengths, strict=True)]
    estimate = _unit(np.stack(starts))
    out = np.empty_like(a)
    for t in range(a.shape[1]):  # all recordings at once; what comes after a recording's end is thrown away
        turned = estimate - np.cross(w[:, t], estimate) / rate
        estimate = _unit((1 - pull) * turned + pull * a[:, t])
        out[:, t] = estimate
    return np.concatenate([x[:n] for x, n in zip(out, lengths, strict=True)]).astype(np.float32)


def _side_by_side(x: Array, offsets: Array) -> Array:
    out = np.zeros((len(offsets) - 1, int(np.diff(offsets).max()), 3))
    for row, (start, end) in enumerate(pairwise(offsets)):
        out[row, : end - start] = x[start:end]
    return out


def _unit(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
