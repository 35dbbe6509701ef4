"""Files and folders that appear whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["write_json", "written_folder"]


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


def write_json(content: Mapping[str, Any], path: Path) -> Path:
    """Writes under a temporary name and renames: the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
