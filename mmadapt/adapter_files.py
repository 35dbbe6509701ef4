"""Adapter folders in PEFT's format: read, and compared with what a backbone expects."""

import json
from pathlib import Path

from peft import PeftConfig
from peft.utils.save_and_load import load_peft_weights
from torch import Tensor

from mmadapt.errors import listed

__all__: list[str] = []

# What PEFT writes for an adapter; a folder that holds anything else is not replaced.
FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "README.md")


def read_adapter(path: Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Config and tensors of a folder in PEFT's format."""
    if not path.is_dir():
        raise ValueError(
            f"adapter folder: expected a folder with adapter_config.json, got {str(path)!r}, which is none"
        )
    present = sorted(file.name for file in path.iterdir())
    if "adapter_config.json" not in present:
        raise ValueError(
            f"adapter folder {path}: expected adapter_config.json and adapter_model.safetensors, got {present}. "
            "PEFT's save_pretrained writes an adapter that is not named 'default' to a sub-folder: give that one."
        )
    if not {"adapter_model.safetensors", "adapter_model.bin"} & set(present):
        raise ValueError(f"adapter folder {path}: expected adapter_model.safetensors beside the config, got {present}")
    try:
        config = PeftConfig.from_pretrained(str(path))
        weights = load_peft_weights(str(path), device="cpu")
    except (ValueError, KeyError, TypeError, OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"adapter folder {path}: expected a config and tensors that PEFT reads, got: {error}"
        ) from error
    except Exception as error:  # safetensors raises a class of its own for a torn file
        raise ValueError(f"adapter folder {path}: cannot read its tensors: {error}") from error
    return config, weights


def check_fit(path: str | Path, got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing = sorted(expected.keys() - got.keys())
    extra = sorted(got.keys() - expected.keys())
    misshaped = [
        f"{key}: expected {tuple(expected[key].shape)}, got {tuple(got[key].shape)}"
        for key in sorted(expected.keys() & got.keys())
        if expected[key].shape != got[key].shape
    ]
    if missing or extra or misshaped:
        parts = [f"{len(keys)} {what}: {listed(keys)}" for what, keys in
                 (("missing", missing), ("extra", extra), ("misshaped", misshaped)) if keys]  # fmt: skip
        raise ValueError(
            f"adapter folder {path}: expected exactly the tensors of this backbone, got {len(got)}; "
            + "; ".join(parts)
            + ". Do: give an adapter that was trained on this backbone."
        )
