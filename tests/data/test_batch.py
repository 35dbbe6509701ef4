"""A batch refuses what would train silently wrong, and averages its views."""

import pytest
import torch

from mmadapt.data.batch import Batch, average_views

VALID = ("accelerometer", "gyroscope")


def make(batch: int = 3, views: int = 1, **inputs: torch.Tensor) -> Batch:
    clips = inputs or {name: torch.randn(views * batch, 3, 4, 1, 8) for name in VALID}
    return Batch(clips, torch.arange(batch), [f"rec{i}" for i in range(batch)], views)


def test_a_good_batch_passes_with_views_and_with_a_modality_missing() -> None:
    assert len(make()) == 3
    make().check(VALID)
    make(views=4).check(VALID)
    make(gyroscope=torch.randn(3, 2)).check(VALID)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch({}, torch.arange(2), ["a", "b"]), "at least one modality"),
        (make(radar=torch.zeros(3, 2)), r"got \['radar'\]; valid: \['accelerometer', 'gyroscope'\]"),
        (make(accelerometer=torch.zeros(3, 2), gyroscope=torch.zeros(2, 2)), "'gyroscope': 2"),
        (make(accelerometer=torch.zeros(2, 2)), "3 rows"),
        (Batch({"gyroscope": torch.zeros(4, 2)}, torch.arange(2), ["a", "b"], views=3), "3 view"),
        (Batch({"gyroscope": torch.zeros(2, 2)}, torch.arange(2), ["a"]), "one id per target"),
    ],
)
def test_a_bad_batch_is_refused(batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch.check(VALID)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_named_by_modality_and_sample(value: float) -> None:
    batch = make(views=2)
    batch.inputs["gyroscope"][3 + 1, 0, 0, 0, 0] = value  # view 1 of sample 1
    with pytest.raises(ValueError, match=r"modality 'gyroscope' of 1 sample\(s\): \['rec1'\]"):
        batch.check(VALID)


def test_moving_keeps_everything_and_touches_nothing() -> None:
    batch = make(views=2)
    moved = batch.to(torch.device("meta"))
    assert moved.targets.is_meta
    assert all(x.is_meta for x in moved.inputs.values())
    assert (moved.ids, moved.views) == (batch.ids, 2)
    assert not batch.targets.is_meta


def test_views_are_averaged_as_probabilities() -> None:
    logits = torch.randn(2 * 3, 5)
    expected = (logits[:3].softmax(-1) + logits[3:].softmax(-1)) / 2
    torch.testing.assert_close(average_views(logits, 2).exp(), expected)
    assert average_views(logits, 1) is logits
    with pytest.raises(ValueError, match="divisible by 4 views"):
        average_views(logits, 4)
