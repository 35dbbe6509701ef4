"""What the default run reaches on the watch recordings, and what each of its parts is worth.

Every fold and seed runs the configuration of `+experiment=vivit_multi` and, with stages shared where they are the same,
arms that leave one part out or give it up for longer training of the rest, so that all arms cost about the same number
of epochs. Checkpointing is off here: it changes no gradient, and time is all that it would cost.

    python tests/scripts/accuracy.py                       # 5 folds, 3 seeds, all arms; two hours or more on 2 cores
    python tests/scripts/accuracy.py --folds 0 --seeds 0   # one of them
    python tests/scripts/accuracy.py --show --seeds 0      # the table of what lies in tests/results/accuracy.json

Results are added to the JSON file as they come; what is there is not run again. Exits 1 below the target.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from mmadapt.files import write_json
from mmadapt.machine import machine_and_versions

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "tests/results/accuracy.json"
TARGET = 0.91
FULL = "frozen and trainable adapters (the default run)"

# Epochs are counted for all modalities together: the default run is P (pretraining) + S (single) + M (joint).
ARMS: dict[str, list[str]] = {
    FULL: [],
    "random frozen backbone": [
        "stages.pretrain.enabled=false", "stages.single.epochs={P2+S}", "trainer.max_epochs={P2+M}",
    ],
    "without frozen adapters": ["adapters.route=[trainable]", "trainer.max_epochs={S+M}"],
    "without trainable adapters": ["adapters.route=[frozen]"],
    "without any adapter": ["adapters.route=[]", "trainer.max_epochs={S+M}"],
    "frozen tokenizers": ["tokenizer.trainable=false"],
    "end to end": [
        "stages.pretrain.enabled=false", "adapters.route=[]", "backbone.trainable=true", "trainer.max_epochs={P+S+M}",
    ],
}  # fmt: skip


def overrides(arm: str, fold: int, seed: int, output: Path) -> list[str]:
    from mmadapt.config import compose

    stages = compose(["+experiment=vivit_multi"]).stages
    p, s, m = stages.pretrain.epochs, stages.single.epochs, stages.multi.epochs
    numbers = {"{P2+S}": p // 2 + s, "{P2+M}": p - p // 2 + m, "{S+M}": s + m, "{P+S+M}": p + s + m}
    text = ["+experiment=vivit_multi", "checkpointing=disabled", f"data.fold={fold}", f"seed={seed}", *ARMS[arm]]
    for key, value in numbers.items():
        text = [override.replace(key, str(value)) for override in text]
    return [
        *text,
        "trainer.enable_progress_bar=false",
        f"paths.output={output}",
        f"baselines={str(arm == FULL).lower()}",
    ]


def run(task: tuple[str, int, int, str]) -> dict[str, Any]:
    arm, fold, seed, output = task
    import torch

    torch.set_num_threads(1)
    from mmadapt.config import compose
    from mmadapt.train import train

    start = time.perf_counter()
    summary = train(compose(overrides(arm, fold, seed, Path(output))), show=False)
    return {
        "arm": arm,
        "fold": fold,
        "seed": seed,
        "accuracy": summary["accuracy"],
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(runs: list[dict[str, Any]]) -> tuple[Any, dict[str, float]]:
    """Mean over folds and seeds; spread between seeds (of the mean over folds) and between folds (over seeds)."""
    from rich.table import Table

    cells: dict[str, dict[tuple[int, int], float]] = {}
    for result in runs:
        for label, row in result["accuracy"].items():
            for modality, value in row.items():
                if label.startswith("joint model"):
                    name = result["arm"] if modality == "all" else f"{result['arm']}, given {modality} only"
                elif result["arm"] == FULL:
                    name = f"{label}, {modality}"
                else:
                    continue
                cells.setdefault(name, {})[result["fold"], result["seed"]] = value
    out = Table(
        "test accuracy", "mean", "sd of seeds", "sd of folds", "runs", title="5 folds by subject", title_justify="left"
    )
    means = {}
    for name, values in cells.items():
        means[name] = statistics.fmean(values.values())
        by_seed = [statistics.fmean(v for (_, s), v in values.items() if s == seed) for seed in {s for _, s in values}]
        by_fold = [statistics.fmean(v for (f, _), v in values.items() if f == fold) for fold in {f for f, _ in values}]
        out.add_row(name, f"{means[name]:.3f}", *(_sd(v) for v in (by_seed, by_fold)), str(len(values)))
    return out, means


def _sd(values: list[float]) -> str:
    return f"{statistics.stdev(values):.3f}" if len(values) > 1 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(3)))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/accuracy")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    content = json.loads(args.results.read_text()) if args.results.is_file() else {"runs": []}
    done = {(r["arm"], r["fold"], r["seed"]) for r in content["runs"]}
    # All arms of a fold and seed one after another in one process: they share their stages.
    groups = [
        [(arm, fold, seed, str(args.output)) for arm in args.arms if (arm, fold, seed) not in done]
        for seed in args.seeds
        for fold in args.folds
    ]
    groups = [] if args.show else [group for group in groups if group]
    if groups:
        content |= machine_and_versions("lightning", "scikit-learn", "seglearn")
        with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
            for finished, results in enumerate(pool.imap_unordered(_run_group, groups, chunksize=1), start=1):
                content["runs"] += results
                write_json(content, args.results)
                last = results[-1]
                print(f"{finished}/{len(groups)}: fold {last['fold']}, seed {last['seed']}, "
                      f"{sum(r['seconds'] for r in results):.0f} s", flush=True)  # fmt: skip
    from rich.console import Console

    shown, means = table([r for r in content["runs"] if r["seed"] in args.seeds and r["fold"] in args.folds])
    Console(width=120).print(shown)
    reached = means.get(FULL, 0.0)
    rest = [v for name, v in means.items() if "stage 1" in name or "logistic" in name or "forest" in name]
    is_met = reached >= TARGET and reached > max(rest, default=0.0)
    print(f"both: {reached:.3f}, target: >= {TARGET} and above each modality alone and the baselines "
          f"({max(rest, default=0.0):.3f}): {'met' if is_met else 'missed'}")  # fmt: skip
    return 0 if is_met else 1


def _run_group(group: list[tuple[str, int, int, str]]) -> list[dict[str, Any]]:
    return [run(task) for task in group]


if __name__ == "__main__":
    sys.exit(main())
