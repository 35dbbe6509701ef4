"""Several adapters, one backward, per-block checkpointing: the program of peft #2832, run in five ways.

A multimodal model over a PeftModel of a ViViT: each modality has a frozen and a trainable LoRA adapter, switched with
`set_adapter` of a list, after which the flags are set by name; every block runs under a checkpoint; the features are
concatenated and go through a linear head. Compared with the run without checkpointing, which is right.

    python examples/peft_2832.py
"""

import torch
import torch.utils.checkpoint as cp
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mmadapt
from mmadapt.meter import MemoryMeter

MODALITIES = ("rgb", "flow", "audio")
DIM, DEPTH, BATCH, TOKENS = 64, 12, 4, 32
WAYS = ("none", "torch", "mmadapt", "torch, whole backbone", "torch, switch in the first segment")


class MultimodalClassifier(nn.Module):
    """One PeftModel, one linear head; `checkpointing` says how a modality's blocks run."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        config = LoraConfig(r=8, target_modules=["qkv", "proj"])
        self.peft = get_peft_model(mmadapt.ViViT(dim=DIM, depth=DEPTH, num_heads=4), config, adapter_name=MODALITIES[0])
        for name in [*MODALITIES[1:], *(f"{m}_ft" for m in MODALITIES)]:
            self.peft.add_adapter(name, config)
        for name, parameter in self.peft.named_parameters():
            if "lora_B" in name:  # PEFT starts B at zero, where every gradient of A is zero: nothing to compare
                nn.init.normal_(parameter, std=0.1)
        self.head = nn.Linear(DIM * len(MODALITIES), 7)

    def switch(self, modality: str) -> None:
        """Activate a modality's two adapters, then enforce the flags by name, as set_adapter writes its own."""
        self.peft.base_model.set_adapter([modality, f"{modality}_ft"])
        for name, parameter in self.peft.named_parameters():
            parameter.requires_grad_(any(f".{m}_ft." in name for m in MODALITIES))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        features = []
        for modality, x in inputs.items():
            self.switch(modality)
            features.append(self.run_blocks(modality, x).mean(dim=1))
        return self.head(torch.cat(features, dim=-1))

    def run_blocks(self, modality: str, x: Tensor) -> Tensor:
        blocks = self.peft.base_model.model.blocks
        match self.checkpointing:
            case "none":
                for block in blocks:
                    x = block(x)
            case "torch":
                for block in blocks:
                    x = cp.checkpoint(block, x, use_reentrant=False)
            case "mmadapt":
                for block in blocks:
                    x = mmadapt.checkpoint(block, x)
            case "torch, whole backbone":  # a workaround: right, but recomputes, and so holds, a whole modality at once

                def whole(x: Tensor) -> Tensor:
                    self.switch(modality)
                    for block in blocks:
                        x = block(x)
                    return x

                x = cp.checkpoint(whole, x, use_reentrant=False)
            case "torch, switch in the first segment":  # a workaround: segments recompute last to first, so it is late

                def first(x: Tensor) -> Tensor:
                    self.switch(modality)
                    return blocks[0](x)

                x = cp.checkpoint(first, x, use_reentrant=False)
                for block in blocks[1:]:
                    x = cp.checkpoint(block, x, use_reentrant=False)
        return x


def run(checkpointing: str) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients, and the peak of the memory that the step allocates, in bytes."""
    torch.manual_seed(0)
    model = MultimodalClassifier(checkpointing)
    inputs = {m: torch.randn(BATCH, TOKENS, DIM, requires_grad=True) for m in MODALITIES}
    targets = torch.randint(7, (BATCH,))
    with MemoryMeter(known=[*model.parameters(), *inputs.values()]) as meter:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, meter.peak


def error(got: dict[str, Tensor], expected: dict[str, Tensor], modality: str) -> float:
    """Relative error of the gradients of a modality's trainable adapter; a missing gradient counts as zero."""
    names = [n for n in expected if f".{modality}_ft." in n]
    difference = sum(float((got.get(n, torch.zeros(())) - expected[n]).square().sum()) for n in names)
    return (difference / sum(float(expected[n].square().sum()) for n in names)) ** 0.5


def main() -> dict[str, dict]:
    table = Table("checkpointing", "loss", *(f"error, {m}" for m in MODALITIES), "peak MiB", "gradients")
    expected: dict[str, Tensor] = {}
    results = {}
    for checkpointing in WAYS:
        loss, gradients, peak = run(checkpointing)
        expected = expected or gradients
        errors = {m: error(gradients, expected, m) for m in MODALITIES}
        is_right = all(torch.equal(gradients[n], expected[n]) for n in expected)
        results[checkpointing] = {"loss": loss, "errors": errors, "peak": peak, "right": is_right}
        table.add_row(
            checkpointing,
            f"{loss:.6f}",
            *(f"{e:.2g}" for e in errors.values()),
            f"{peak / 2**20:.1f}",
            "[green]equal[/]" if is_right else "[red]wrong[/]",
        )
    console = Console()
    console.width = max(console.width, 114)  # the table whole, in a narrow terminal or a file too
    console.print(table)
    return results


if __name__ == "__main__":
    main()
