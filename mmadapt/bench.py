"""`python -m mmadapt.bench NAME`: what checkpointing with adapters costs, measured on this machine.

    python -m mmadapt.bench --list                 # the names, and what each measures
    python -m mmadapt.bench overhead               # a table of figures and targets; exits with 1 if one is missed
    python -m mmadapt.bench switch --json out.json

Two ways to do the same work run by turns in one process, so that a busy machine slows both: a figure is the median over
pairs, with the interval in which 95 % of the medians of resampled pairs lie.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmadapt.files import write_json
from mmadapt.machine import machine_and_versions

__all__ = ["Figure", "main"]

PAIRS = 15


@dataclass(frozen=True)
class Figure:
    """One measured value: `low` and `high` bound the median's 95 % interval; `target` is an upper bound or None."""

    what: str
    value: float
    unit: str
    low: float
    high: float
    target: float | None = None

    @property
    def is_met(self) -> bool:
        return self.target is None or self.value <= self.target


def figure(what: str, values: Sequence[float], unit: str, target: float | None = None) -> Figure:
    """The median of some values as a figure (percentile bootstrap, Efron 1979, 2000 resamples)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return Figure(what, statistics.median(values), unit, medians[50], medians[-51], target)


def by_turns(arms: Sequence[Callable[[], Any]], pairs: int, calls: int = 1) -> list[list[float]]:
    """Seconds per call of each arm, one value per turn; the first turn of each warms up. The order alternates."""
    taken: list[list[float]] = [[] for _ in arms]
    for turn in range(pairs + 1):
        order = list(range(len(arms)))
        for n in order if turn % 2 else reversed(order):
            start = time.perf_counter()
            for _ in range(calls):
                arms[n]()
            if turn:
                taken[n].append((time.perf_counter() - start) / calls)
    return taken


def _adapted(dim: int, depth: int, heads: int, image: int) -> Any:
    """A ViT of timm with a frozen and a trainable LoRA adapter for each of two modalities."""
    import torch
    from peft import LoraConfig
    from timm.models.vision_transformer import VisionTransformer

    from mmadapt.adapters import AdapterBank

    torch.manual_seed(0)
    vit = VisionTransformer(img_size=image, embed_dim=dim, depth=depth, num_heads=heads, num_classes=0)
    bank = AdapterBank(vit)
    for modality in ("rgb", "depth"):
        config = LoraConfig(r=8, target_modules=["attn.qkv", "attn.proj"])
        bank.add(modality, config, modality=modality, trainable=False)
        bank.add(f"{modality}_ft", config, modality=modality, trainable=True)
    return bank


def _step(blocks: Sequence[Any], x: Any, checkpoint: Callable[..., Any]) -> None:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    x.sum().backward()


def overhead() -> list[Figure]:
    """mmadapt.checkpoint against torch's with adapters that never change, where torch's is right too."""
    import torch
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    from mmadapt.checkpointing import checkpoint

    bank = _adapted(dim=384, depth=12, heads=6, image=112)
    x = torch.randn(4, 50, 384, requires_grad=True)
    with bank.active("rgb"):
        theirs, ours = by_turns(
            [
                lambda: _step(bank.backbone.blocks, x, torch_checkpoint),
                lambda: _step(bank.backbone.blocks, x, checkpoint),
            ],
            PAIRS,
        )
    ratio = figure("step of a ViT-S, 4 x 50 tokens: ours / torch's", _ratios(ours, theirs), "", 1.02)
    bank = _adapted(dim=32, depth=40, heads=2, image=32)
    blocks, small = bank.backbone.blocks, torch.randn(1, 2, 32, requires_grad=True)

    def forward(call: Callable[..., Any]) -> None:
        y = small
        for block in blocks:
            y = call(block, y, use_reentrant=False)

    with bank.active("rgb"):
        theirs, ours = by_turns([lambda: forward(torch_checkpoint), lambda: forward(checkpoint)], PAIRS)
        both = by_turns(
            [lambda: _step(blocks, small, torch_checkpoint), lambda: _step(blocks, small, checkpoint)], PAIRS
        )
    return [
        ratio,
        figure("added to a block's forward", _differences(ours, theirs, 40), "us", 20.0),
        figure("added to its forward, recomputation and backward", _differences(both[1], both[0], 40), "us"),
    ]


def switch() -> list[Figure]:
    """From one modality's adapters to another's in a backbone of 40 blocks; PEFT's set_adapter beside it."""
    bank = _adapted(dim=32, depth=40, heads=2, image=32)

    def ours() -> None:
        for _ in range(50):
            with bank.active("rgb"), bank.active("depth"):
                pass

    def theirs() -> None:
        for route in (["rgb", "rgb_ft"], ["depth", "depth_ft"]):
            bank.model.base_model.set_adapter(route)

    fast, slow = by_turns([ours, theirs], PAIRS)
    own = [seconds / 200 * 1e6 for seconds in fast]  # two switches there and two back in each of 50
    return [
        figure("AdapterBank.active, 80 layers", own, "us", 20.0),
        figure("PEFT's set_adapter", [seconds / 2 * 1e6 for seconds in slow], "us"),
    ]


BENCHES: dict[str, Callable[[], list[Figure]]] = {"overhead": overhead, "switch": switch}


def _ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(these, those, strict=True)]


def _differences(these: Sequence[float], those: Sequence[float], calls: int) -> list[float]:
    """Microseconds per call."""
    return [(a - b) / calls * 1e6 for a, b in zip(these, those, strict=True)]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mmadapt.bench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name", nargs="?", choices=list(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--list", action="store_true", help="the names, and what each measures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, the machine and versions there")
    given = parser.parse_args(args)
    if given.list or not given.name:
        for name, bench in BENCHES.items():
            print(f"{name:10} {(bench.__doc__ or '').strip()}")
        return 0
    import torch
    from rich.console import Console
    from rich.table import Table

    figures = BENCHES[given.name]()
    table = Table(given.name, "median", "95 % of medians", "target", "")
    for f in figures:
        target = "" if f.target is None else f"<= {f.target:g} {f.unit}"
        verdict = "" if f.target is None else "met" if f.is_met else "missed"
        table.add_row(f.what, f"{f.value:.3g} {f.unit}", f"{f.low:.3g} to {f.high:.3g}", target, verdict)
    Console().print(table)
    if given.json is not None:
        write_json(
            {
                "bench": given.name,
                "figures": [asdict(f) for f in figures],
                "threads": torch.get_num_threads(),
                **machine_and_versions(),
            },
            given.json,
        )
    return 0 if all(f.is_met for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
