"""The table that a run ends with, and results.json beside it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mmadapt.results import StageResult

__all__ = ["print_report", "print_sweep", "summarise"]

TOGETHER = "all"


def summarise(
    results: Mapping[str, StageResult],
    baselines: Mapping[str, Mapping[str, float]],
    paths: Mapping[str, str],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """What a run returns and writes to results.json, plain values all.

    `accuracy`: row of the table -> modality or "all" -> test accuracy; `parameters` and `costs` are those of the last
    stage; `stages`: name -> metrics, folder, whether it was skipped.
    """
    last = list(results.values())[-1]
    modalities = list(config["modalities"])
    accuracy: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        if name.startswith("single-"):
            row = accuracy.setdefault("one modality's own adapter (stage 1)", {})
            row[name.partition("-")[2]] = result.metrics["test/accuracy"]
        else:
            label = {"pretrain": "pretrained backbone (stage 0)", "multi": "joint model (stage 2)"}[name]
            row = {m: a for m in modalities if (a := result.accuracy(m)) is not None}
            accuracy[label] = {**row, TOGETHER: result.metrics["test/accuracy"]}
    accuracy |= {method: dict(values) for method, values in baselines.items()}
    return {
        "name": config["name"],
        "stage": last.name,
        "is_debug": bool(config["trainer"].get("fast_dev_run")),
        "seed": config["seed"],
        "fold": config["data"].get("fold"),
        "modalities": modalities,
        "accuracy": accuracy,
        "test": {key: value for key, value in last.metrics.items() if key.startswith("test/")},
        "parameters": last.details["parameters"],
        "costs": last.details["costs"],
        "stages": {
            name: {
                "folder": str(result.folder),
                "skipped": result.skipped,
                "metrics": result.metrics,
                **{key: result.details[key] for key in ("epoch", "steps", "seconds", "step_seconds", "confusion")},
            }
            for name, result in results.items()
        },
        "paths": dict(paths),
    }


def print_report(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Accuracies, parameters, cost of a step, and where everything lies."""
    console = console or Console()
    modalities = [*summary["modalities"], TOGETHER]
    fold = "" if summary["fold"] is None else f", fold {summary['fold']}"
    if summary["is_debug"]:
        console.print("A debug run: the figures below say nothing about the model.")
    table = _table(f"Test accuracy ({summary['name']}{fold}, seed {summary['seed']})", "", *modalities)
    for label, row in summary["accuracy"].items():
        table.add_row(label, *(f"{row[m]:.3f}" if m in row else "" for m in modalities))
    f1 = {m: summary["test"].get(f"test/f1/{m}" if m != TOGETHER else "test/f1") for m in modalities}
    if summary["stage"].startswith("single-"):  # one modality's figure is no figure of all
        del f1[TOGETHER]
    table.add_section()
    table.add_row(f"{summary['stage']}: macro F1", *(f"{v:.3f}" if v is not None else "" for v in f1.values()))
    console.print(table)

    table = _table("Parameters", "part", "in all", "trainable")
    for part, count in summary["parameters"].items():
        if part == "total":
            table.add_section()
        if count["parameters"]:
            table.add_row(part, f"{count['parameters']:,}", f"{count['trainable']:,}")
    console.print(table)

    table = _table("One training step", "checkpointing", "milliseconds", "held activations")
    for label, cost in summary["costs"].items():
        table.add_row(label, f"{1000 * cost['seconds']:.0f}", megabytes(cost["held_bytes"]))
    console.print(table)

    skipped = [name for name, stage in summary["stages"].items() if stage["skipped"]]
    if skipped:
        text = f"Found on disk, not run again: {', '.join(skipped)} (fresh=true runs them)"
        console.print(text, highlight=False, soft_wrap=True)
    for what, path in summary["paths"].items():
        console.print(f"{what + ':':<13} {path}", highlight=False, markup=False, soft_wrap=True)


def print_sweep(summaries: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Mean and standard deviation of the test accuracies over the runs of a multirun."""
    console = console or Console()
    modalities = [*summaries[0]["modalities"], TOGETHER]
    table = _table(f"Test accuracy, mean and deviation of {len(summaries)} runs", "", *modalities)
    for label in summaries[0]["accuracy"]:
        cells = []
        for modality in modalities:
            values = [s["accuracy"].get(label, {}).get(modality) for s in summaries]
            known = [v for v in values if v is not None]
            spread = statistics.stdev(known) if len(known) > 1 else 0.0
            cells.append(f"{statistics.mean(known):.3f} ± {spread:.3f}" if known else "")
        table.add_row(label, *cells)
    console.print(table)


def _table(title: str, label: str, *columns: str) -> Table:
    """A table of numbers: what the rows are on the left, the numbers to the right."""
    table = Table(title=title, title_justify="left")
    table.add_column(label)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
