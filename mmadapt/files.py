"""Folders that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["written_folder"]


@contextmanager
def written_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder to write into, renamed to `folder` when the body ends, removed if it raises.

    A killed process leaves the old folder or the new one (and perhaps a temporary one beside it, named `.NAME.*`),
    never a half-written one under the real name: an existing folder is moved aside before it is replaced.

    Raises:
        FileExistsError: `folder` is a file.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"expected a folder or a free name, got the file {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if target.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            os.replace(target, aside)
            os.replace(temporary, target)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
