"""The watch recordings: their windows, their split, their scaling, and what training and testing see of them."""

import dataclasses
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmadapt.data import watch
from mmadapt.data.augment import Augment
from mmadapt.data.batch import Batch
from mmadapt.data.module import Split
from mmadapt.data.sampler import EpochSampler
from mmadapt.data.watch import HOP, SENSORS, SIZE, WatchDataModule, load_recordings, recordings_path
from mmadapt.data.windows import WindowDataset, as_is

MODALITIES = tuple(SENSORS)
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def signals(batch: Batch, name: str) -> torch.Tensor:
    """Clips back to signals: (rows, 3, 16, 1, 16) -> (rows, 256, 3)."""
    return batch.inputs[name].flatten(start_dim=2).transpose(1, 2)


def raw_windows(dataset: WindowDataset, name: str) -> np.ndarray:
    """Windows cut from the recordings one by one and scaled, (windows, 256, 3): the reference."""
    recordings, columns = dataset.recordings, list(SENSORS[name].columns)
    windows = []
    for r, start in zip(dataset.recording, dataset.start, strict=True):
        x = recordings.signals[recordings.offsets[r] :][start : start + SIZE, columns]
        windows.append((x - dataset.scaling.mean[columns]) / dataset.scaling.std[columns])
    return np.stack(windows)


def test_the_recordings_are_those_that_were_published() -> None:
    recordings = load_recordings()
    assert recordings.signals.shape == (244_102, 6)
    assert len(recordings.targets) == 140
    assert np.bincount(recordings.targets).tolist() == [20] * 7
    assert np.bincount(recordings.subjects)[1:].tolist() == [14] * 10
    gravity = np.linalg.norm(recordings.signals[:, :3], axis=1)
    assert np.median(gravity) == pytest.approx(1, abs=0.1)  # in g, and the arm moves


@pytest.mark.parametrize("fold", range(5))
def test_every_window_is_in_one_split_and_every_subject_too(fold: int) -> None:
    module = WatchDataModule(fold=fold)
    datasets = [module.dataset(split) for split in SPLITS]
    subjects = [set(dataset.recordings.subjects[dataset.recording].tolist()) for dataset in datasets]
    assert sum(map(len, datasets)) == 1693
    assert [len(s) for s in subjects] == [7, 1, 2]
    assert set.union(*subjects) == set(range(1, 11))
    ids = [name for dataset in datasets for name in dataset.ids]
    assert len(set(ids)) == 1693
    assert all(start % HOP == 0 for dataset in datasets for start in dataset.start)


def test_every_subject_is_tested_once() -> None:
    tested = [subject for fold in range(5) for subject in WatchDataModule(fold=fold).subjects["test"]]
    assert sorted(tested) == list(range(1, 11))


def test_scaling_comes_from_the_training_subjects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = WatchDataModule(fold=1)
    recordings = load_recordings()
    scaling = module.dataset("test").scaling
    own = np.concatenate(
        [
            recordings.signals[recordings.offsets[r] : recordings.offsets[r + 1]]
            for r in range(140)
            if recordings.subjects[r] in module.subjects["train"]
        ]
    ).astype(np.float64)
    np.testing.assert_allclose(scaling.mean, own.mean(axis=0))
    np.testing.assert_allclose(scaling.std, own.std(axis=0))
    # Whatever the others' recordings hold, training sees the same bytes.
    before = module.dataset("train", training=True).__getitems__([(0, i) for i in range(8)])
    other = ~np.isin(np.repeat(recordings.subjects, np.diff(recordings.offsets)), module.subjects["train"])
    spoilt = np.where(other[:, None], np.float32(1e6), recordings.signals)
    spoilt_recordings = dataclasses.replace(
        recordings, signals=spoilt, level=np.where(other[:, None], np.float32(1e6), recordings.level)
    )
    monkeypatch.setattr(watch, "load_recordings", lambda path: spoilt_recordings)
    after = module.dataset("train", training=True).__getitems__([(0, i) for i in range(8)])
    for name in MODALITIES:
        assert torch.equal(before.inputs[name], after.inputs[name])


@pytest.mark.parametrize("name", MODALITIES)
def test_a_test_window_is_the_recorded_one(name: str) -> None:
    dataset = WatchDataModule(test_views=8).dataset("test")
    batch = dataset.__getitems__(range(len(dataset)))
    batch.check(MODALITIES)
    assert batch.inputs[name].shape == (8 * len(dataset), 3, 16, 1, 16)
    assert batch.inputs[name].dtype == torch.float32
    whole = signals(batch, name)[: len(dataset)]
    np.testing.assert_allclose(whole, raw_windows(dataset, name), atol=2e-5, rtol=1e-5)
    # Gravity, the mean level of a window, is still there: it differs between exercises.
    if name == "accelerometer":
        assert whole.mean(dim=1).std(dim=0).min() > 0.2
    # Frame t of the clip is samples 16 t to 16 t + 15.
    assert torch.equal(batch.inputs[name][0, :, 3, 0], whole[0, 48:64].T)


def test_views_are_fixed_variants_of_the_window_itself() -> None:
    dataset = WatchDataModule(test_views=8).dataset("test")
    batch = dataset.__getitems__([5, 40])
    assert (batch.views, len(batch), len(batch.ids)) == (8, 2, 2)
    alone = dataset.__getitems__([40])
    for name in MODALITIES:
        views = signals(batch, name).unflatten(0, (8, 2))  # (views, windows, 256, 3)
        assert torch.equal(views[:, 1], signals(alone, name))
        scale = {"mean": dataset.scaling.mean, "std": dataset.scaling.std}
        mean, std = (torch.tensor(scale[key][list(SENSORS[name].columns)]) for key in ("mean", "std"))
        raw = views * std + mean
        torch.testing.assert_close(raw[1], raw[0] * torch.tensor(SENSORS[name].mirror), atol=1e-5, rtol=1e-5)
        # Linear reading inside the window cannot leave its range: no neighbour's sample is looked at.
        for view in (2, 4, 6):
            assert (raw[view].amax(dim=1) <= raw[0].amax(dim=1) + 1e-5).all()
            assert (raw[view].amin(dim=1) >= raw[0].amin(dim=1) - 1e-5).all()


def test_mirroring_maps_one_arm_onto_the_other() -> None:
    """Of all choices of signs, the one in `SENSORS` brings a subject's two arms closest."""
    data = np.load(recordings_path(), allow_pickle=True).item()  # the sha256 is checked by what ran before
    level = np.array([x.mean(axis=0)[:3] for x in data["X"]])
    correlation = np.array([np.corrcoef(x.T) for x in data["X"]])
    left, right = (np.flatnonzero(data["side"] == side) for side in (0, 1))
    order = {(data["subject"][i], data["y"][i]): i for i in right}
    pairs = [(i, order[data["subject"][i], data["y"][i]]) for i in left]
    assert len(pairs) == 70

    def distance(signs: tuple[int, ...]) -> float:
        sign = np.array(signs)
        levels = [np.abs(sign[:3] * level[i] - level[j]).mean() for i, j in pairs]
        correlations = [np.abs(np.outer(sign, sign) * correlation[i] - correlation[j]).mean() for i, j in pairs]
        return float(np.mean(levels) + np.mean(correlations))

    choices = [tuple(1 - 2 * (code >> bit & 1) for bit in range(6)) for code in range(64)]
    best = min(choices, key=distance)
    assert best == SENSORS["accelerometer"].mirror + SENSORS["gyroscope"].mirror
    assert distance(best) < 0.4 * distance((1,) * 6)


def test_training_windows_at_zero_strength_are_the_windows_of_the_grid() -> None:
    dataset = WatchDataModule(augment=False).dataset("train", training=True)
    batch = dataset.__getitems__([(3, i) for i in range(len(dataset))])
    for name in MODALITIES:
        np.testing.assert_allclose(signals(batch, name), raw_windows(dataset, name), atol=2e-5, rtol=1e-5)


def test_a_crop_starts_anywhere_in_its_own_recording() -> None:
    crop = {**vars(Augment.none()), "crop": True}
    dataset = WatchDataModule(augment=crop).dataset("train", training=True)
    recordings = dataset.recordings
    found = []
    for name in MODALITIES:
        columns = list(SENSORS[name].columns)
        batch = dataset.__getitems__([(epoch, 30) for epoch in range(40)])
        r = dataset.recording[30]
        own = recordings.signals[recordings.offsets[r] : recordings.offsets[r + 1], columns]
        places = np.lib.stride_tricks.sliding_window_view(own, SIZE, axis=0).transpose(0, 2, 1)
        scaled = (places - dataset.scaling.mean[columns]) / dataset.scaling.std[columns]
        distance = [np.abs(scaled - x.numpy()).max(axis=(1, 2)) for x in signals(batch, name)]
        assert max(d.min() for d in distance) < 1e-4
        found.append([int(d.argmin()) for d in distance])
    assert found[0] == found[1]  # both sensors are cut at the same place
    assert len({place % HOP for place in found[0]}) > 20
    assert min(found[0]) < 0.2 * len(places)
    assert max(found[0]) > 0.8 * len(places)


def test_strong_warps_stay_inside_the_recording() -> None:
    dataset = WatchDataModule(augment={"tempo": 2.0, "warp": 1.0}).dataset("train", training=True)
    last = len(dataset) - 1
    dataset.__getitems__([(epoch, index) for epoch in range(20) for index in (0, last)]).check(MODALITIES)


def test_a_training_sample_is_a_function_of_seed_epoch_and_index() -> None:
    dataset = WatchDataModule(seed=5).dataset("train", training=True)
    together = dataset.__getitems__([(1, 7), (2, 7), (1, 9), (1, 7)])
    for row, pair in enumerate([(1, 7), (2, 7), (1, 9), (1, 7)]):
        alone = dataset[pair]
        for name in MODALITIES:
            assert torch.equal(alone.inputs[name][0], together.inputs[name][row])
    one, two, three, again = together.inputs["gyroscope"]
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert not torch.equal(one, three)
    assert not torch.equal(WatchDataModule(seed=6).dataset("train", training=True)[1, 7].inputs["gyroscope"][0], one)
    # Nor does it depend on which other modalities are served.
    gyroscope = WatchDataModule(["gyroscope"], seed=5).dataset("train", training=True)[1, 7]
    assert torch.equal(gyroscope.inputs["gyroscope"][0], one)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_persist_serve_every_epoch_as_no_worker_does() -> None:
    def epochs(workers: int) -> list[Batch]:
        module = WatchDataModule(batch_size=100, num_workers=workers, seed=2)
        loader = module.train_dataloader()
        assert loader.sampler is module.sampler
        batches = []
        for epoch in range(2):
            assert module.sampler is not None
            module.sampler.set_epoch(epoch)
            batches += list(loader)
        return batches

    here, there = epochs(0), epochs(2)
    assert len(here) == len(there) == 2 * 11
    assert here[0].ids != here[11].ids
    for a, b in zip(here, there, strict=True):
        assert a.ids == b.ids
        assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in MODALITIES)


def test_an_interrupted_epoch_continues_with_the_very_same_batches() -> None:
    module = WatchDataModule(batch_size=32)
    loader = module.train_dataloader()
    assert isinstance(module.sampler, EpochSampler)
    module.sampler.set_epoch(4)
    whole = list(loader)
    module.sampler.seek(4, 10 * 32)
    rest = list(loader)
    assert [batch.ids for batch in rest] == [batch.ids for batch in whole[10:]]
    assert torch.equal(rest[0].inputs["gyroscope"], whole[10].inputs["gyroscope"])


def test_validation_and_test_loaders_serve_every_window_once() -> None:
    module = WatchDataModule(test_views=2, val_views=1)
    cases: list[tuple[DataLoader[Batch], Split, int]] = [
        (module.val_dataloader(), "val", 1),
        (module.test_dataloader(), "test", 2),
    ]
    for loader, split, views in cases:
        batches = list(loader)
        assert [name for batch in batches for name in batch.ids] == module.dataset(split).ids
        assert {batch.views for batch in batches} == {views}


def test_one_modality_alone() -> None:
    module = WatchDataModule("gyroscope")  # as a command line gives it
    assert module.modalities == ("gyroscope",)
    assert module.clip_shapes == {"gyroscope": (3, 16, 1, 16)}
    assert list(next(iter(module.val_dataloader())).inputs) == ["gyroscope"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WatchDataModule(["acelerometer"]), "got 'acelerometer'; valid: .*; did you mean 'accelerometer'"),
        (lambda: WatchDataModule([]), "expected one or more modality names"),
        (lambda: WatchDataModule(["gyroscope", "gyroscope"]), "each once"),
        (lambda: WatchDataModule(fold=5), r"data\.fold: expected one of \[0, 1, 2, 3, 4\], got 5"),
        (lambda: WatchDataModule(fold=-1), "got -1"),
        (lambda: WatchDataModule(fold=0, val_subject=2), "that fold 0 doesn't test, got 2"),
        (lambda: WatchDataModule(test_views=9), "expected 1 to 8 views, got 9; set data.test_views"),
        (lambda: WatchDataModule(val_views=0), "set data.val_views"),
        (lambda: WatchDataModule(augment={"jiter": 0.1}), "did you mean 'jitter'"),
        (lambda: WatchDataModule(batch_size=0), "batch_size >= 1"),
        (lambda: WatchDataModule().dataset("training"), "expected a known split, got 'training'"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_refused_with_what_is_valid(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_file_with_other_contents_is_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "watch.npy", np.array({"X": []}, dtype=object), allow_pickle=True)
    digest = hashlib.sha256((tmp_path / "watch.npy").read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=f"got {digest}"):
        WatchDataModule(path=tmp_path / "watch.npy").prepare_data()
    with pytest.raises(FileNotFoundError, match=r"set data\.path"):
        WatchDataModule(path=tmp_path / "none.npy").prepare_data()


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'mmadapt\[demo\]'"):
        WatchDataModule().prepare_data()


def test_the_file_is_found_without_importing_its_package() -> None:
    import sys

    load_recordings()
    assert "seglearn" not in sys.modules


def test_a_path_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "copy.npy").write_bytes(recordings_path().read_bytes())
    assert len(WatchDataModule(path=tmp_path / "copy.npy").dataset("val")) == len(WatchDataModule().dataset("val"))


def test_any_loader_takes_the_data_set() -> None:
    """In one's own loop, without the sampler: plain indices are those of epoch 0."""
    dataset = WatchDataModule().dataset("train", training=True)
    batch = next(iter(DataLoader(dataset, batch_size=4, collate_fn=as_is)))
    assert torch.equal(batch.inputs["gyroscope"][2], dataset[0, 2].inputs["gyroscope"][0])
