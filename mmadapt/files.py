"""Folders that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["written_folder"]


@contextmanager
def written_folder(folder: str | os.PathLike, *, replaces: Collection[str] | None = None) -> Iterator[Path]:
    """A temporary folder to write into, renamed to `folder` when the body ends, removed if it raises.

    A killed process leaves the old folder or the new one (and perhaps a temporary one beside it, named `.NAME.*`),
    never a half-written one under the real name: an existing folder is moved aside before it is replaced. A link is
    followed.

    replaces: names that an existing folder may hold; with None it may hold anything.

    Raises:
        FileExistsError: `folder` is a file, holds other names than `replaces`, or is or holds the working directory.
    """
    target = Path(os.path.realpath(Path(folder).expanduser()))
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"expected a folder or a free name, got the file {target}")
    if target in (here := Path.cwd().resolve(), *here.parents):
        raise FileExistsError(f"expected a folder of its own, got {target}, which holds the working directory")
    if replaces is not None and target.exists():
        others = sorted({file.name for file in target.iterdir()} - set(replaces))
        if others:
            raise FileExistsError(
                f"expected a free name or a folder of {list(replaces)}, got {target} with {others[:5]}"
            )
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
