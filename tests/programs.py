"""Tiny random models and one training program over several modalities, for tests that compare two ways to run it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from peft import LoraConfig
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmadapt import AdapterBank, CheckpointPlan, ViViT, run_blocks

DIM, DEPTH, BATCH = 16, 4, 3
MODALITIES = ("rgb", "depth", "audio")
TARGETS = r".*blocks\.\d+\.attn\.(qkv|proj)"
PLAIN = CheckpointPlan(enabled=False)

Runner = Callable[[Sequence[nn.Module], Tensor, CheckpointPlan], Tensor]


def make_backbone(kind: str, dropout: float = 0.0, depth: int = DEPTH) -> nn.Module:
    if kind == "vivit":
        return ViViT(dim=DIM, depth=depth, num_heads=2, drop=dropout, attn_drop=dropout)
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=DIM, depth=depth, num_heads=2, num_classes=0,
        proj_drop_rate=dropout, attn_drop_rate=dropout,
    )  # fmt: skip


def make_bank(
    kind: str = "vivit",
    modalities: Sequence[str] = MODALITIES[:2],
    dropout: float = 0.0,
    ranks: Sequence[int] = (4, 4, 4),
    depth: int = DEPTH,
    routes: dict[str, Sequence[str]] | None = None,
    seed: int = 0,
) -> AdapterBank:
    """A backbone with a frozen and a trainable adapter per modality, or with those that `routes` names.

    All adapters are drawn at random: with PEFT's zero-initialised B every gradient of A is exactly zero, and a
    comparison of gradients would compare nothing.
    """
    torch.manual_seed(seed)
    bank = AdapterBank(make_backbone(kind, dropout, depth), modalities)
    for modality, rank in zip(modalities, ranks, strict=False):
        for name in (routes or {}).get(modality, (modality, f"{modality}_ft")):
            config = LoraConfig(r=rank, target_modules=TARGETS, lora_dropout=dropout)
            bank.add(name, config, modality=modality, trainable=name.endswith("_ft"))
    draw_adapters(bank)
    return bank


def draw_adapters(bank: AdapterBank, std: float = 0.3) -> None:
    with torch.no_grad():
        for name in bank.names:
            for _, parameter in bank.parameters(name):
                parameter.normal_(std=std)


def make_tokens(
    modalities: Sequence[str] = MODALITIES[:2], requires_grad: bool = False, seed: int = 1
) -> dict[str, Tensor]:
    """(B, N, D) per modality, N differing between them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        modality: torch.randn(BATCH, 5 + 2 * i, DIM, generator=generator).requires_grad_(requires_grad)
        for i, modality in enumerate(modalities)
    }


def run_ours(blocks: Sequence[nn.Module], x: Tensor, plan: CheckpointPlan) -> Tensor:
    return run_blocks(blocks, x, plan=plan)


def run_torch(blocks: Sequence[nn.Module], x: Tensor, plan: CheckpointPlan) -> Tensor:
    """The control: the same segments under torch's own checkpoint."""
    for indices, is_checkpointed in plan.split(len(blocks)):
        segment = nn.Sequential(*[blocks[i] for i in indices])
        if is_checkpointed:
            x = torch.utils.checkpoint.checkpoint(segment, x, use_reentrant=plan.use_reentrant)
        else:
            x = segment(x)
    return x


@dataclass
class Outcome:
    loss: float
    gradients: dict[str, Tensor]  # of every parameter that has one, by name
    tokens: dict[str, Tensor | None]


def step(
    bank: AdapterBank,
    tokens: dict[str, Tensor],
    plan: CheckpointPlan = PLAIN,
    run: Runner = run_ours,
    *,
    context: AbstractContextManager | None = None,
    batches: int = 1,
    seed: int = 2,
) -> Outcome:
    """Forward each modality under its route, concatenate, one loss, one backward; `batches` steps accumulate."""
    bank.backbone.zero_grad(set_to_none=True)
    head = torch.randn(DIM * len(tokens), 4, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    loss = torch.zeros(())
    for batch in range(batches):
        with context or nullcontext():
            features = []
            for modality, x in tokens.items():
                with bank.active(modality):
                    features.append(bank.backbone.norm(run(bank.backbone.blocks, x + batch, plan)).mean(dim=1))
            logits = torch.cat(features, dim=-1) @ head
            loss = nn.functional.cross_entropy(logits.float(), torch.tensor([0, 1, 2]))
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in bank.backbone.named_parameters() if p.grad is not None}
    return Outcome(loss.item(), gradients, {m: x.grad for m, x in tokens.items()})


def trainable_names(bank: AdapterBank) -> set[str]:
    return {name for adapter in bank.trainable for name, _ in bank.parameters(adapter)}


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor], part: str = "") -> float:
    """|got - expected| / |expected| over all tensors whose name holds `part`; a missing gradient counts as zero."""
    names = [name for name in expected if part in name]
    difference = sum(float((got.get(n, torch.zeros_like(expected[n])) - expected[n]).square().sum()) for n in names)
    return (difference / sum(float(expected[n].square().sum()) for n in names)) ** 0.5


def snapshot(root: nn.Module) -> dict[str, object]:
    """All that must be untouched after backward: flags, adapter state, hooks, parameters and buffers."""
    state: dict[str, object] = {}
    for name, parameter in root.named_parameters():
        state[f"{name}: parameter"] = (id(parameter), parameter.requires_grad, parameter.detach().clone())
    for name, buffer in root.named_buffers():
        state[f"{name}: buffer"] = (id(buffer), buffer.requires_grad, buffer.clone())
    for name, module in root.named_modules():
        kept = {"training", "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"}
        state[f"{name}: attributes"] = {key: _copy(value) for key, value in vars(module).items() if key in kept}
        hooks = [key for key in vars(module) if key.endswith("hooks")]
        state[f"{name}: hooks"] = {key: list(vars(module)[key]) for key in hooks}
    return state


def _copy(value: object) -> object:
    return value.copy() if isinstance(value, list | dict) else value


def assert_same(after: dict[str, object], before: dict[str, object]) -> None:
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, tuple):
            got = after[name]
            assert isinstance(got, tuple)
            assert got[:2] == value[:2], name
            assert torch.equal(got[2], value[2]), name
        else:
            assert after[name] == value, name
