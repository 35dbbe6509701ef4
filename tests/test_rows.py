"""A route per row against the same rows run by themselves."""

import pytest
import torch
from torch import Tensor, nn

from mmadapt import CheckpointPlan, run_blocks
from tests.programs import DIM, PLAIN, assert_same, make_bank, snapshot

ROWS = ["rgb", "depth", "rgb", "audio", "rgb"]
MODES = pytest.mark.parametrize(
    "plan", [PLAIN, CheckpointPlan(), CheckpointPlan(segment_size=2, use_reentrant=True)], ids=str
)


def tokens() -> Tensor:
    return torch.randn(len(ROWS), 6, DIM, generator=torch.Generator().manual_seed(1))


def gradients(bank) -> dict[str, Tensor]:
    got = {n: p.grad.clone() for n, p in bank.backbone.named_parameters() if p.grad is not None}
    bank.backbone.zero_grad(set_to_none=True)
    return got


@MODES
@pytest.mark.parametrize(
    "routes", [None, {"rgb": ("rgb_ft",), "depth": ("depth", "depth_ft"), "audio": ()}], ids=["equal", "unequal"]
)
def test_rows_equal_their_modalities_run_alone(plan, routes):
    """In training mode, with routes of two, one and no adapters in one batch."""
    bank = make_bank(modalities=("rgb", "depth", "audio"), ranks=(4, 2, 3), routes=routes)
    x = tokens()
    outputs = torch.empty_like(x)
    for modality in bank.modalities:
        index = [i for i, row in enumerate(ROWS) if row == modality]
        with bank.active(modality):
            part = bank.backbone.norm(run_blocks(bank.backbone.blocks, x[index]))
        if part.requires_grad:
            part.square().sum().backward()
        outputs[index] = part.detach()
    expected = gradients(bank)
    before = snapshot(bank.backbone)
    with bank.active(rows=ROWS):
        y = bank.backbone.norm(run_blocks(bank.backbone.blocks, x, plan=plan))
    with bank.active("depth"):  # whatever is active in backward
        y.square().sum().backward()
    got = gradients(bank)
    assert_same(snapshot(bank.backbone), before)
    assert torch.allclose(y, outputs, atol=1e-5)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_the_checkpointed_run_equals_the_plain_one_bit_for_bit():
    bank = make_bank(modalities=("rgb", "depth", "audio"), dropout=0.1)
    got = []
    for plan in (PLAIN, CheckpointPlan()):
        torch.manual_seed(0)
        with bank.active(rows=ROWS):
            loss = run_blocks(bank.backbone.blocks, tokens(), plan=plan).square().sum()
        loss.backward()
        got.append(gradients(bank))
    assert len(got[0]) == 48
    assert got[0].keys() == got[1].keys()
    assert all(torch.equal(got[0][n], got[1][n]) for n in got[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda bank: bank.active(), "a modality or rows"),
        (lambda bank: bank.active("rgb", rows=["rgb"]), "a modality or rows"),
        (lambda bank: bank.active(rows=[]), "the modality of each row"),
        (lambda bank: bank.active(rows="rgb"), "the modality of each row"),
        (lambda bank: bank.active(rows=["rgb", "smell"]), r"expected modalities of .* got \['smell'\]"),
    ],
)
def test_wrong_rows_are_named(call, message):
    bank = make_bank()
    before = snapshot(bank.backbone)
    with pytest.raises(ValueError, match=message), call(bank):
        pass
    assert_same(snapshot(bank.backbone), before)


def test_a_batch_of_another_size_is_named():
    bank = make_bank()
    with bank.active(rows=["rgb", "depth"]), pytest.raises(ValueError, match=r"the 2 rows of the batch in front, got"):
        run_blocks(bank.backbone.blocks, tokens())
    assert not any("forward" in vars(m) for m in bank.backbone.modules())


def test_it_does_not_nest_in_itself():
    bank = make_bank()
    with bank.active(rows=["rgb"]), pytest.raises(ValueError, match="leave it first"), bank.active(rows=["depth"]):
        pass


def test_attention_layers_that_merge_are_refused():
    from peft import LoraConfig

    from mmadapt import AdapterBank

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    bank = AdapterBank(Net())
    bank.add("tone", LoraConfig(r=2, target_modules=["attention"]), modality="rgb", trainable=True)
    with pytest.raises(ValueError, match="MultiheadAttention"), bank.active(rows=["rgb"]):
        pass


def test_one_route_inside_a_route_per_row():
    bank = make_bank()
    x = tokens()
    with torch.no_grad():
        with bank.active("rgb"):
            expected = run_blocks(bank.backbone.blocks, x)
        with bank.active(rows=["rgb", "depth", "rgb", "depth", "rgb"]):
            first = run_blocks(bank.backbone.blocks, x)
            with bank.active("rgb"):
                assert torch.equal(run_blocks(bank.backbone.blocks, x), expected)
            assert torch.equal(run_blocks(bank.backbone.blocks, x), first)
            with bank.active("depth"), bank.active(rows=["rgb"] * 5):
                assert torch.allclose(run_blocks(bank.backbone.blocks, x), expected, atol=1e-5)
            with bank.active("rgb"):
                assert torch.equal(run_blocks(bank.backbone.blocks, x), expected)
    assert not torch.equal(first, expected)
