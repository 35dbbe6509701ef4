"""The memory meter against counts by hand."""

import torch
from torch import nn

from mmadapt.meter import MemoryMeter


def test_storages_count_once_and_until_they_are_freed():
    with MemoryMeter() as meter:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a.view(10, 100)
        assert meter.live == 4000
        c = a + 1
        assert meter.live == meter.peak == 8000
        del c
        assert (meter.live, meter.peak) == (4000, 8000)
        del a
        assert meter.live == 4000  # b is a view of it
        del b
        assert (meter.live, meter.peak) == (0, 8000)


def test_what_autograd_keeps_is_alive():
    x = torch.zeros(1000, requires_grad=True)
    with MemoryMeter(known=[x]) as meter:
        y = x.sin().sin().sin()  # keeps the input of each: x, and two of its own
        assert meter.live == 3 * 4000
        y.sum().backward()
        del y
        assert meter.live == 4000  # the gradient


def test_known_tensors_do_not_count():
    layer = nn.Linear(100, 100)
    x = torch.zeros(1, 100)
    with MemoryMeter(known=[*layer.parameters(), x]) as meter:
        y = layer(x)
        assert meter.live == y.untyped_storage().nbytes()
