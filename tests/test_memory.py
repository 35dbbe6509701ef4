import torch

from mmadapt.memory import compare_plans, held_bytes
from mmadapt.plans import CheckpointPlan
from tests.toys import toy_batch, toy_model

PLANS = {"with": CheckpointPlan(), "without": CheckpointPlan(enabled=False)}


def test_held_bytes_fall_under_checkpointing_and_are_exact_for_a_known_graph() -> None:
    model, batch = toy_model(), toy_batch(size=8)
    costs = compare_plans(model, batch, PLANS, repeats=1)
    assert costs["with"].held_bytes < costs["without"].held_bytes / 2
    assert all(cost.seconds > 0 for cost in costs.values())
    # one block input (B, N, D) per block and modality is what a checkpoint holds
    inputs = 2 * 2 * 8 * 4 * 8 * 4
    rest = 2 * held_bytes_of_ends(model, batch)
    assert inputs <= costs["with"].held_bytes <= inputs + rest


def held_bytes_of_ends(model: torch.nn.Module, batch: object) -> int:
    """What tokenizers, norm, fusion and head keep: a generous bound for the toy's shapes."""
    return 16 * 8 * 4 * 8 * 4


def test_measuring_leaves_no_trace() -> None:
    model, batch = toy_model(dropout=0.1), toy_batch()
    model.plan = CheckpointPlan(segment_size=2)
    model(batch).sum().backward()
    model.eval()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    rng = torch.get_rng_state()
    compare_plans(model, batch, {"blocks": CheckpointPlan()}, repeats=1)
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.plan == CheckpointPlan(segment_size=2)
    assert not model.training
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name])
        assert (p.grad is None) == (gradients[name] is None)
        assert p.grad is None or torch.equal(p.grad, gradients[name])


def test_a_storage_that_several_nodes_keep_counts_once() -> None:
    model, batch = toy_model(), toy_batch()
    model.plan = PLANS["without"]
    _, first = held_bytes(model, batch)
    _, second = held_bytes(model, batch)
    assert first == second
