"""The order of samples is a function of (seed, epoch), and a position in it can be found again."""

import pytest

from mmadapt.data.sampler import EpochSampler


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    sampler = EpochSampler(50, seed=3)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        pairs = list(sampler)
        assert {e for e, _ in pairs} == {epoch}
        assert sorted(index for _, index in pairs) == list(range(50))
        epochs.append([index for _, index in pairs])
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs == [EpochSampler(50, seed=3).order(epoch) for epoch in range(3)]
    assert EpochSampler(50, seed=4).order(0) != epochs[0]


def test_seek_continues_an_epoch_exactly_and_only_that_one() -> None:
    sampler = EpochSampler(20)
    sampler.set_epoch(2)
    whole = list(sampler)
    resumed = EpochSampler(20)
    resumed.seek(2, 12)
    resumed.set_epoch(2)  # what a trainer calls before the epoch that it resumes
    assert list(resumed) == whole[12:]
    resumed.set_epoch(3)
    assert len(list(resumed)) == 20
    with pytest.raises(ValueError, match=r"expected a row in \[0, 20\], got 21"):
        resumed.seek(0, 21)


def test_replicas_share_an_epoch_without_overlap() -> None:
    parts = [EpochSampler(11, num_replicas=2, rank=rank).order(5) for rank in (0, 1)]
    assert [len(part) for part in parts] == [5, 5]
    assert not set(parts[0]) & set(parts[1])
    assert set(parts[0]) | set(parts[1]) <= set(range(11))
