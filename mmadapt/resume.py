"""Which checkpoint a stage goes on from, found by the stage's hash."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mmadapt.config import ConfigError

IDENTITY = "mmadapt"  # the key of a checkpoint under which its stage and hash stand


def checkpoint_identity(path: Path) -> dict[str, Any]:
    """stage and hash of a checkpoint of ours.

    Raises:
        ConfigError: the file is torn, or was not written by mmadapt.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # torch raises RuntimeError, EOFError, UnpicklingError and more for torn files
        raise ConfigError(
            f"resume: expected a checkpoint that loads with weights_only=True, got {path} "
            f"({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}); give another one, or resume=last"
        ) from e
    identity = checkpoint.get(IDENTITY) if isinstance(checkpoint, dict) else None
    if not isinstance(identity, dict):
        raise ConfigError(f"resume: expected a checkpoint that mmadapt.train wrote, got {path}, which names no stage")
    return identity


def checkpoint_for(cfg: Mapping[str, Any], name: str, key_hash: str) -> Path | None:
    """The checkpoint that a stage resumes from: that of `resume` if it is this stage's, for "last" its newest.

    None without `resume`, and if there is none of this stage.
    """
    resume = cfg["resume"]
    if resume is None:
        return None
    if resume != "last":
        path = Path(resume).expanduser()
        return path if checkpoint_identity(path).get("hash") == key_hash else None
    for path in sorted(_candidates(cfg, name, key_hash), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            if checkpoint_identity(path).get("hash") == key_hash:
                return path
        except ConfigError as e:
            print(f"mmadapt: skipped: {e}", file=sys.stderr)
    return None


def _candidates(cfg: Mapping[str, Any], name: str, key_hash: str) -> Iterator[Path]:
    folder = f"checkpoints/{name}-{key_hash}"
    seen = set()
    for root in (Path(cfg["paths"]["run"]), Path(cfg["paths"]["output"])):
        for path in root.glob(f"**/{folder}/*.ckpt") if root.is_dir() else ():
            # the best checkpoint is there to be evaluated; the newest state is the last or the interrupted one
            if path.stem != "best" and path.resolve() not in seen:
                seen.add(path.resolve())
                yield path
