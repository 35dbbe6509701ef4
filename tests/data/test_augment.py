"""Augmentation: draws are a function of (seed, epoch, index); what is done with them is what it is called."""

import numpy as np
import pytest

from mmadapt.data.augment import MAX_SPEED, Augment, draw, generator, positions, rotation_matrix


def test_rotations_turn_by_their_angle_and_keep_norms_and_handedness() -> None:
    random = np.random.default_rng(0)
    axis, angle = random.normal(size=(50, 3)), random.uniform(-3, 3, size=50)
    matrix = rotation_matrix(axis, angle)
    x = random.normal(size=(50, 20, 3))
    turned = x @ matrix.transpose(0, 2, 1)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=2), np.linalg.norm(x, axis=2))
    np.testing.assert_allclose(np.linalg.det(matrix), 1)
    np.testing.assert_allclose((np.trace(matrix, axis1=1, axis2=2) - 1) / 2, np.cos(angle))
    np.testing.assert_allclose((matrix @ axis[..., None])[..., 0], axis, atol=1e-12)
    quarter = rotation_matrix(np.array([[0.0, 0, 2]]), np.array([np.pi / 2]))[0]
    np.testing.assert_allclose(quarter @ [1, 0, 0], [0, 1, 0], atol=1e-15)


def test_a_rotation_stays_within_its_angle() -> None:
    matrix = draw(Augment(rotation=10, roll=0), 0, [0] * 300, range(300), 8, 2).rotation
    angle = np.rad2deg(np.arccos(np.clip((np.trace(matrix, axis1=1, axis2=2) - 1) / 2, -1, 1)))
    assert 9 < angle.max() <= 10 + 1e-6


def test_a_roll_is_about_x_and_stays_within_its_angle() -> None:
    matrix = draw(Augment(rotation=0, roll=20), 0, [0] * 300, range(300), 8, 2).rotation
    np.testing.assert_allclose(matrix @ [1.0, 0, 0], np.tile([1.0, 0, 0], (300, 1)), atol=1e-12)
    angle = np.rad2deg(np.arccos(np.clip((np.trace(matrix, axis1=1, axis2=2) - 1) / 2, -1, 1)))
    assert 18 < angle.max() <= 20 + 1e-6


def test_positions_are_the_identity_at_zero_strength_and_increase_at_any() -> None:
    still = draw(Augment(tempo=0, warp=0), 0, [0, 0], [0, 1], 256, 2)
    np.testing.assert_array_equal(positions(still.log_speed), np.tile(np.arange(256), (2, 1)))
    wild = positions(draw(Augment(tempo=2, warp=2), 0, [0] * 100, range(100), 256, 2).log_speed)
    steps = np.diff(wild, axis=1)
    assert (wild[:, 0] == 0).all()
    assert steps.min() >= 1 / MAX_SPEED - 1e-9
    assert steps.max() <= MAX_SPEED + 1e-9


def test_a_warp_is_smooth() -> None:
    log_speed = draw(Augment(tempo=0, warp=0.3), 0, [0] * 50, range(50), 256, 2).log_speed
    assert np.abs(np.diff(log_speed, axis=1)).max() < 0.05 * log_speed.std() * 4


def test_nothing_is_drawn_at_zero_strength() -> None:
    draws = draw(Augment.none(), 3, [1, 1], [4, 5], 16, 2)
    assert not draws.mirror.any()
    assert not draws.log_speed.any()
    assert not draws.log_gain.any()
    np.testing.assert_array_equal(draws.rotation, np.tile(np.eye(3), (2, 1, 1)))


def test_strengths_are_what_they_say() -> None:
    draws = draw(Augment(tempo=0.2, warp=0, mirror=0.25, gain=0.3, jitter=0.1), 0, [0] * 4000, range(4000), 4, 2)
    assert draws.mirror.mean() == pytest.approx(0.25, abs=0.03)
    assert draws.log_speed.std() == pytest.approx(0.2 / 3**0.5, rel=0.05)  # uniform
    assert np.abs(draws.log_speed).max() <= 0.2
    assert draws.log_gain.std() == pytest.approx(0.3, rel=0.05)
    assert draws.noise.std() == pytest.approx(1, rel=0.05)
    assert 0 <= draws.start.min() < 0.01 < 0.99 < draws.start.max() < 1


def test_one_strength_does_not_move_the_draws_of_another() -> None:
    one = draw(Augment(), 0, [2], [7], 16, 2)
    two = draw(Augment(warp=0, gain=0, jitter=0), 0, [2], [7], 16, 2)
    np.testing.assert_array_equal(one.rotation, two.rotation)
    np.testing.assert_array_equal(one.start, two.start)


def test_generators_differ_in_each_part_of_their_key_and_never_in_their_history() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (-1, 0, 0), (-2, 0, 0)]
    first = [generator(*key).random(4).tolist() for key in keys]
    assert len({tuple(x) for x in first}) == len(keys)
    assert first == [generator(*key).random(4).tolist() for key in reversed(keys)][::-1]
    assert generator(0, 0, 0, stream=1).random() != generator(0, 0, 0).random()


@pytest.mark.parametrize("bad", [{"mirror": 1.5}, {"jitter": -0.1}, {"rotation": 181}, {"warp": float("nan")}])
def test_impossible_strengths_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"expected augment.{next(iter(bad))} in"):
        Augment(**bad)  # type: ignore[arg-type]
