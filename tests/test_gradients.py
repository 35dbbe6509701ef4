"""Gradients under checkpointing equal those of the un-checkpointed run; those of torch's own checkpoint do not."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from mmadapt import CheckpointPlan, run_blocks
from tests.programs import (
    DEPTH,
    MODALITIES,
    assert_same,
    make_bank,
    make_tokens,
    relative_error,
    run_torch,
    snapshot,
    step,
    trainable_names,
)

PLANS = [
    CheckpointPlan(segment_size=size, every=every, use_reentrant=reentrant)
    for size, every, reentrant in itertools.product((1, 2, 3, DEPTH), (1, 2), (False, True))
] + [
    CheckpointPlan(segments=4, use_reentrant=False),
    CheckpointPlan(segments=4, use_reentrant=True, last_plain=True),
    CheckpointPlan(segments=1, use_reentrant=True),
]


def cells():
    """All combinations; the half with an odd number of second choices, which holds every pair of choices, is fast."""
    choices = [("vivit", "timm"), (2, 3), (0.0, 0.1), ((4, 4, 4), (2, 4, 3)), (False, True)]
    for cell in itertools.product((0, 1), repeat=len(choices)):
        values = [options[i] for options, i in zip(choices, cell, strict=True)]
        yield pytest.param(*values, marks=[] if sum(cell) % 2 else [pytest.mark.slow])


@pytest.mark.parametrize(("kind", "count", "dropout", "ranks", "inputs_need_grad"), list(cells()))
def test_gradients_are_those_of_the_plain_run(kind, count, dropout, ranks, inputs_need_grad):
    modalities = MODALITIES[:count]
    bank = make_bank(kind, modalities, dropout, ranks)
    tokens = make_tokens(modalities, requires_grad=inputs_need_grad)
    before = snapshot(bank.backbone)
    expected = step(bank, tokens)
    expected_tokens = {m: None if x.grad is None else x.grad.clone() for m, x in tokens.items()}
    assert set(expected.gradients) == trainable_names(bank)  # frozen parameters have none
    assert all(gradient.abs().sum() > 0 for gradient in expected.gradients.values())
    for plan in PLANS:
        for x in tokens.values():
            x.grad = None
        got = step(bank, tokens, plan)
        assert got.loss == expected.loss, plan
        assert got.gradients.keys() == expected.gradients.keys(), plan
        for name, gradient in expected.gradients.items():
            assert torch.equal(got.gradients[name], gradient), (plan, name)
        for modality, x in tokens.items():
            assert (x.grad is None) == (not inputs_need_grad)
            if x.grad is not None:
                assert torch.equal(x.grad, expected_tokens[modality]), (plan, modality)
        bank.backbone.zero_grad(set_to_none=True)
        assert_same(snapshot(bank.backbone), before)


@pytest.mark.parametrize("routes", [
    {"rgb": (), "depth": ("depth", "depth_ft")},
    {"rgb": ("rgb_ft",), "depth": ("depth",)},
    {"rgb": ("rgb",), "depth": ("depth_ft",)},
    {"rgb": (), "depth": ("depth_ft",)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("reentrant", [False, True])
def test_empty_and_one_adapter_routes(routes, reentrant):
    bank = make_bank(routes=routes)
    tokens = make_tokens()
    expected = step(bank, tokens)
    assert set(expected.gradients) == trainable_names(bank)
    for size in (1, 2, DEPTH):
        got = step(bank, tokens, CheckpointPlan(segment_size=size, use_reentrant=reentrant))
        assert got.gradients.keys() == expected.gradients.keys()
        assert all(torch.equal(got.gradients[n], expected.gradients[n]) for n in expected.gradients)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_accumulation_over_two_batches(plan, dropout):
    bank, tokens = make_bank(dropout=dropout), make_tokens()
    expected = step(bank, tokens, batches=2)
    got = step(bank, tokens, plan, batches=2)
    assert got.gradients.keys() == expected.gradients.keys() == trainable_names(bank)
    for name, gradient in expected.gradients.items():
        if plan.use_reentrant:
            torch.testing.assert_close(
                got.gradients[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max())
            )
        else:
            assert torch.equal(got.gradients[name], gradient), name


@pytest.mark.parametrize("kind", ["vivit", "timm"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bf16_autocast(kind, dropout):
    bank, tokens = make_bank(kind, dropout=dropout, ranks=(2, 4)), make_tokens()
    expected = step(bank, tokens, context=torch.autocast("cpu", torch.bfloat16))
    assert set(expected.gradients) == trainable_names(bank)
    assert relative_error(step(bank, tokens).gradients, expected.gradients) > 1e-4 or dropout  # autocast took effect
    for plan in PLANS:
        got = step(bank, tokens, plan, context=torch.autocast("cpu", torch.bfloat16))
        assert got.gradients.keys() == expected.gradients.keys()
        assert all(torch.equal(got.gradients[n], expected.gradients[n]) for n in expected.gradients), plan


# ---- the fault, with torch's own checkpoint


@pytest.mark.parametrize("size", [1, 2, 3, DEPTH])
def test_torch_with_the_plain_backbone_left_active(size):
    """A recomputation without adapters saves fewer tensors: non-reentrant torch notices, reentrant torch does not."""
    bank, tokens = make_bank(), make_tokens(requires_grad=True)
    with pytest.raises(CheckpointError):
        step(bank, tokens, CheckpointPlan(segment_size=size), run_torch)
    got = step(bank, tokens, CheckpointPlan(segment_size=size, use_reentrant=True), run_torch)
    assert not got.gradients


@pytest.mark.parametrize("kind", ["vivit", "timm"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, DEPTH])
@pytest.mark.parametrize("ranks", ["equal", "unequal"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_with_the_last_modality_left_active(kind, count, size, ranks, reentrant):
    """The usual program: switch, forward, switch, forward, backward, all flags right."""
    modalities = MODALITIES[:count]
    bank = make_bank(kind, modalities, ranks=(4, 4, 4) if ranks == "equal" else (2, 3, 4))
    tokens = make_tokens(modalities, requires_grad=True)  # else torch's reentrant mode gives no gradient at all
    expected = step(bank, tokens)
    plan = CheckpointPlan(segment_size=size, use_reentrant=reentrant)
    last = modalities[-1]

    def program(run):
        with bank.active(last):  # what is active when backward runs
            return step(bank, tokens, plan, run)

    if ranks == "unequal" and not reentrant:
        with pytest.raises(CheckpointError):
            program(run_torch)
    else:
        got = program(run_torch)
        assert got.loss == expected.loss
        for modality in modalities[:-1]:
            if reentrant:  # nothing
                assert not any(f".{modality}_ft." in name for name in got.gradients)
            else:
                wrong = relative_error(got.gradients, expected.gradients, f".{modality}_ft.")
                assert wrong > 0.5
        if reentrant:  # the last one gets what was meant for all
            polluted = relative_error(got.gradients, expected.gradients, f".{last}_ft.")
            assert polluted > 0.1
    ours = program(lambda blocks, x, plan: run_blocks(blocks, x, plan=plan))
    assert all(torch.equal(ours.gradients[n], expected.gradients[n]) for n in expected.gradients)


@pytest.mark.parametrize("size", [1, 2, 3, DEPTH])
@pytest.mark.parametrize("reentrant", [False, True])
def test_switching_in_the_first_segment_only_is_wrong(size, reentrant):
    """The workaround that circulates: segments recompute last to first, so the switch comes too late."""
    bank, tokens = make_bank(), make_tokens(requires_grad=True)
    expected = step(bank, tokens)
    layers = bank._layers()
    modality_of = {id(x): m for m, x in tokens.items()}

    def run(blocks, x, plan):
        route = bank.route(modality_of[id(x._base_tokens)])
        for start in range(0, len(blocks), plan.segment_size):
            segment = list(blocks)[start : start + plan.segment_size]

            def forward(y, start=start, segment=segment):
                if start == 0:
                    layers.activate(route)
                for block in segment:
                    y = block(y)
                return y

            x = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant)
        return x

    bank.backbone.zero_grad(set_to_none=True)
    features = []
    for x in tokens.values():
        shifted = x + 0
        shifted._base_tokens = x
        features.append(
            bank.backbone.norm(run(bank.backbone.blocks, shifted, CheckpointPlan(segment_size=size))).mean(1)
        )
    head = torch.randn(features[0].shape[-1] * 2, 4, generator=torch.Generator().manual_seed(2))
    loss = torch.nn.functional.cross_entropy(torch.cat(features, -1) @ head, torch.tensor([0, 1, 2]))
    loss.backward()
    assert loss.item() == expected.loss
    got = {n: p.grad for n, p in bank.backbone.named_parameters() if p.grad is not None}
    wrong = relative_error(got, expected.gradients, ".rgb_ft.")
    if size == DEPTH:  # one segment is the whole backbone: right, but it holds a whole modality at once
        assert wrong == 0
    else:
        assert wrong > 0.1


def test_weights_after_twenty_steps_are_identical():
    """On, off and in segments: the same weights to the last bit."""
    results = []
    for plan in (
        CheckpointPlan(enabled=False),
        CheckpointPlan(),
        CheckpointPlan(segment_size=3),
        CheckpointPlan(use_reentrant=True),
    ):
        bank = make_bank(dropout=0.1)
        tokens = make_tokens()
        parameters = [p for name in bank.trainable for _, p in bank.parameters(name)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for seed in range(20):
            step(bank, tokens, plan, seed=seed)
            optimizer.step()
        results.append([p.detach().clone() for p in parameters])
    fresh = make_bank()
    start = [p for name in fresh.trainable for _, p in fresh.parameters(name)]
    assert not any(torch.equal(a, b) for a, b in zip(start, results[0], strict=True))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
