"""Finished stages on disk: one folder per stage and hash, there whole or not at all."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from mmadapt.files import written_folder
from mmadapt.model import MultimodalModel

# Raise it when a change of the code makes results of before wrong or unreadable: they are then made anew.
SCHEMA = 1
METRICS = "metrics.json"


@dataclass(frozen=True)
class StageResult:
    """A finished stage: what its metrics.json says, where it lies, and whether it was found there.

    `metrics` holds plain numbers by Lightning's names (`test/accuracy/gyroscope`), `details` the rest of the file.
    """

    name: str  # pretrain, single-<modality> or multi
    hash: str
    folder: Path
    metrics: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict, repr=False)
    skipped: bool = False

    def accuracy(self, modality: str | None = None, split: str = "test") -> float | None:
        """Accuracy of all modalities together, or of the model given one of them."""
        return self.metrics.get(f"{split}/accuracy" + (f"/{modality}" if modality else ""))


def stage_hash(key: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of everything that a stage's result depends on."""
    text = json.dumps({"schema": SCHEMA, **key}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_hash(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find(root: Path, name: str, key_hash: str) -> StageResult | None:
    """The result of a stage if it lies on disk whole; a torn one is named on stderr and ignored."""
    folder = root / f"{name}-{key_hash}"
    if not folder.is_dir():
        return None
    problem = None
    try:
        content = json.loads((folder / METRICS).read_text())
        sizes = {str(file): int(size) for file, size in content["files"].items()}
        wrong = [f for f, size in sizes.items() if not (folder / f).is_file() or (folder / f).stat().st_size != size]
        if wrong:
            problem = f"{', '.join(wrong)} missing or of another size"
        elif content["hash"] != key_hash or content["schema"] != SCHEMA:
            problem = "it belongs to another configuration"
        else:
            return StageResult(name, key_hash, folder, content["metrics"], content, skipped=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        problem = f"{METRICS}: {type(e).__name__}: {e}"
    print(f"mmadapt: the result in {folder} is torn ({problem}); the stage runs again", file=sys.stderr)
    return None


def store(
    root: Path,
    name: str,
    key_hash: str,
    write: Callable[[Path], None],
    metrics: Mapping[str, float],
    details: Mapping[str, Any],
) -> StageResult:
    """Writes a stage's folder under a temporary name, metrics.json last, and renames it.

    Args:
        write: puts the stage's tensors into the folder that it is given.
        details: plain values beside the metrics.
    """
    folder = root / f"{name}-{key_hash}"
    with written_folder(folder) as temporary:
        write(temporary)
        files = {
            p.relative_to(temporary).as_posix(): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()
        }
        content = {
            "schema": SCHEMA,
            "stage": name,
            "hash": key_hash,
            "metrics": dict(metrics),
            **details,
            "files": files,
        }
        (temporary / METRICS).write_text(json.dumps(content, indent=2) + "\n")
    return StageResult(name, key_hash, folder, dict(metrics), content)


def save_module(module: nn.Module, path: Path) -> None:
    """A module's state as safetensors, its parent folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().cpu().contiguous() for key, value in module.state_dict().items()}, path)


def write_stage(name: str, model: MultimodalModel, folder: Path) -> None:
    """The stage's tensors: safetensors, and adapters in PEFT's own format."""
    if name.startswith("single"):
        (modality,) = model.modalities
        model.bank.save(modality, folder / "adapter")
        save_module(model.tokenizers[modality], folder / "tokenizer.safetensors")
    else:
        for modality, tokenizer in model.tokenizers.items():
            save_module(tokenizer, folder / "tokenizer" / f"{modality}.safetensors")
        for adapter in model.bank.names:
            model.bank.save(adapter, folder / "adapters" / adapter)
        if not model.bank.freeze:
            save_backbone(model, folder / "backbone.safetensors")
        if next(model.fusion.parameters(), None) is not None:
            save_module(model.fusion, folder / "fusion.safetensors")
    save_module(model.head, folder / "head.safetensors")


def save_backbone(model: MultimodalModel, path: Path) -> None:
    """The backbone under the names that it has before PEFT wraps its layers."""
    adapters = {id(p) for name in model.bank.names for _, p in model.bank.parameters(name)}
    own = {n.replace(".base_layer.", "."): p for n, p in model.backbone.named_parameters() if id(p) not in adapters}
    save_file({name: p.detach().cpu().contiguous() for name, p in own.items()}, path)
