"""Baselines: the statistics, the split, and the figures that they are known for."""

import builtins
from typing import Any

import numpy as np
import pytest

from mmadapt.baselines import classical_baselines, window_statistics
from mmadapt.data.watch import WatchDataModule


def test_statistics_against_numbers_by_hand() -> None:
    x = np.array([[[1.0, 3.0, 2.0, 6.0], [0.0, 0.0, 0.0, 0.0]]])  # (1, 2 channels, 4 samples)
    names = ("mean", "std", "min", "max", "range", "change")
    expected = [3, 0, np.sqrt(3.5), 0, 1, 0, 6, 0, 5, 0, 7 / 3, 0]
    np.testing.assert_allclose(window_statistics(x, names), [expected])
    assert window_statistics(np.zeros((2, 6, 9))).shape == (2, 24)
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        window_statistics(x, ["meen"])


def test_one_fold_gives_its_known_figures() -> None:
    results = classical_baselines(WatchDataModule(["accelerometer"], fold=4))
    assert {method: list(row) for method, row in results.items()} == {
        "logistic regression": ["accelerometer", "all"],
        "random forest": ["accelerometer", "all"],
    }
    assert results["logistic regression"]["accelerometer"] == pytest.approx(0.755, abs=0.02)
    assert results["random forest"]["all"] == pytest.approx(0.73, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        (("mean", "std", "change", "range"), {"accelerometer": 0.779, "gyroscope": 0.751, "all": 0.866}),
        (("mean", "std", "min", "max"), {"accelerometer": 0.742, "gyroscope": 0.654, "all": 0.827}),
    ],
)
def test_the_mean_of_five_folds(statistics: tuple[str, ...], expected: dict[str, float]) -> None:
    folds = [classical_baselines(WatchDataModule(fold=fold), statistics=statistics) for fold in range(5)]
    mean = {key: np.mean([fold["logistic regression"][key] for fold in folds]) for key in expected}
    assert mean == pytest.approx(expected, abs=0.01)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'mmadapt\[demo\]'"):
        classical_baselines(WatchDataModule())
