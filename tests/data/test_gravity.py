"""The gravity filter against movements whose gravity is known."""

from itertools import pairwise

import numpy as np

from mmadapt.data.augment import rotation_matrix
from mmadapt.data.gravity import gravity
from mmadapt.data.watch import load_recordings

RATE = 50.0


def swinging(seconds: float, amplitude: float, frequency: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A wrist that swings about x: its gravity, what the accelerometer and what the gyroscope read."""
    t = np.arange(0, seconds, 1 / RATE)
    angle = amplitude * np.sin(2 * np.pi * frequency * t)
    rate = amplitude * 2 * np.pi * frequency * np.cos(2 * np.pi * frequency * t)
    turn = rotation_matrix(np.tile([1.0, 0, 0], (len(t), 1)), -angle)  # the world turns against the wrist
    down = (turn @ np.array([0, 0, 1.0])[:, None])[..., 0]
    shake = 0.3 * np.sin(2 * np.pi * 2 * frequency * t)[:, None] * np.array([0, 1.0, 0])
    return down, down + shake, np.stack([rate, 0 * rate, 0 * rate], axis=1)


def test_it_follows_a_swing_that_a_low_pass_would_smear() -> None:
    down, a, w = swinging(20, amplitude=0.8, frequency=0.5)
    found = gravity(a, w, np.array([0, len(a)]), RATE)
    late = slice(200, -100)
    error = np.linalg.norm(found - down, axis=1)[late].mean()
    kernel = np.ones(100) / 100
    smeared = np.stack([np.convolve(a[:, i], kernel, mode="same") for i in range(3)], axis=1)
    assert error < 0.15 < np.linalg.norm(smeared - down, axis=1)[late].mean()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


def test_recordings_do_not_touch_each_other() -> None:
    _, a, w = swinging(8, 0.5, 0.4)
    _, b, v = swinging(5, 1.0, 0.7)
    together = gravity(np.concatenate([a, b]), np.concatenate([w, v]), np.array([0, len(a), len(a) + len(b)]), RATE)
    np.testing.assert_allclose(together[: len(a)], gravity(a, w, np.array([0, len(a)]), RATE), atol=1e-6)
    np.testing.assert_allclose(together[len(a) :], gravity(b, v, np.array([0, len(b)]), RATE), atol=1e-6)


def test_gravity_is_most_of_what_the_accelerometer_reads() -> None:
    recordings = load_recordings()
    assert recordings.level is not None
    movement = recordings.signals[:, :3] - recordings.level
    means = [np.linalg.norm(movement[start:end].mean(axis=0)) for start, end in pairwise(recordings.offsets)]
    assert np.median(means) < 0.25  # a fast swing adds its centripetal acceleration
    assert movement.std() < 0.7 * recordings.signals[:, :3].std()
