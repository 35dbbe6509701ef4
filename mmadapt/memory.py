"""What a model costs: its parameters, the time of a step, and the bytes held between forward and backward."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmadapt.data.batch import Batch, average_views
from mmadapt.meter import MemoryMeter
from mmadapt.model import MultimodalModel
from mmadapt.plans import CheckpointPlan

__all__ = ["StepCost", "compare_plans", "count_parameters", "held_bytes"]


@dataclass(frozen=True)
class StepCost:
    """seconds: median of forward and backward. held_bytes: what is kept for backward at the end of forward."""

    seconds: float
    held_bytes: int


def held_bytes(model: MultimodalModel, batch: Batch) -> tuple[Tensor, int]:
    """A forward's loss, and the bytes that are alive because of it: what its graph keeps for backward."""
    with MemoryMeter(known=(*model.parameters(), *model.buffers(), *batch.inputs.values())) as meter:
        loss = _loss(model, batch)
        return loss, meter.live


def compare_plans(
    model: MultimodalModel, batch: Batch, plans: Mapping[str, CheckpointPlan], repeats: int = 5
) -> dict[str, StepCost]:
    """Costs of one step under several plans, measured in turns, so that a busy machine slows all of them alike.

    Parameters, gradients, the model's plan and the RNG stay as they are.
    """
    before, mode = model.plan, model.training
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    held: dict[str, int] = {}
    model.train()
    try:
        with torch.random.fork_rng(devices=_devices(model)):
            for turn in range(repeats + 1):
                for name, plan in plans.items():
                    model.plan = plan
                    model.zero_grad(set_to_none=True)
                    if turn == 0:  # also the warm-up
                        loss, held[name] = held_bytes(model, batch)
                        loss.backward()
                        continue
                    start = _now(model)
                    _loss(model, batch).backward()
                    seconds[name].append(_now(model) - start)
    finally:
        model.plan = before
        model.train(mode)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    return {name: StepCost(statistics.median(seconds[name]), held[name]) for name in plans}


def count_parameters(model: MultimodalModel) -> dict[str, dict[str, int]]:
    """Parameters in all and trainable, by part: backbone, each adapter, tokenizer, fusion, head, total."""
    trained = {id(p) for parameters in model.parameter_groups().values() for _, p in parameters}
    parts = {f"adapter {name}": [p for _, p in model.bank.parameters(name)] for name in model.bank.names}
    adapters = {id(p) for parameters in parts.values() for p in parameters}
    parts = {"backbone": [p for p in model.backbone.parameters() if id(p) not in adapters], **parts}
    parts |= {f"tokenizer {name}": list(t.parameters()) for name, t in model.tokenizers.items()}
    parts |= {"fusion": list(model.fusion.parameters()), "head": list(model.head.parameters())}
    parts["total"] = list(model.parameters())
    return {
        part: {
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if id(p) in trained),
        }
        for part, parameters in parts.items()
    }


def _loss(model: MultimodalModel, batch: Batch) -> Tensor:
    return model.head.loss(average_views(model(batch), batch.views), batch.targets)  # type: ignore[operator]


def _devices(model: MultimodalModel) -> list[torch.device]:
    device = next(model.parameters()).device
    return [device] if device.type == "cuda" else []


def _now(model: MultimodalModel) -> float:
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
