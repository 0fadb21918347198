"""Writing of results: checked before the work starts; a file is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import ArgumentError, OutputError
from .processes import speaks


@contextlib.contextmanager
def output_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder to write into; on success its files become those of `target`, on an error nothing is left.

    A new `target` appears by one rename. In a folder that exists already, files of the same name are replaced one by
    one and others are left alone. Of several processes one writes (`processes.speaks`); the output of the others is discarded.

    Raises:
      OutputError: `target` cannot be written to; raised on entering, before any work.
    """
    if not speaks():
        with tempfile.TemporaryDirectory(prefix="fusionlab-") as nowhere:
            yield Path(nowhere)
        return
    target = Path(target)
    new_folders: list[Path] = []
    try:
        existed = target.is_dir()
        parent = target if existed else target.absolute().parent
        for folder in reversed([p for p in (parent, *parent.parents) if not p.exists()]):
            folder.mkdir()
            new_folders.append(folder)
        if not existed and target.exists():
            raise NotADirectoryError(f"{target} is a file")
        work = Path(tempfile.mkdtemp(prefix=".fusionlab-", dir=parent))
    except OSError as e:
        _remove_empty(new_folders)
        raise OutputError(
            f"cannot write to the folder {str(target)!r} ({e.strerror or e}); give a folder you can write to"
        ) from e
    try:
        yield work
        _publish(work, target, existed)
        new_folders = []
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _remove_empty(new_folders)


def check_file(target: str | os.PathLike[str], suffix: str | None, folders: bool = False) -> Path:
    """The path of a file that could be written now; asked before the work whose result it will hold.

    Args:
      target: the file.
      suffix: the required ending of its name; None takes any.
      folders: make those that are missing.

    Raises:
      OutputError: its folder does not exist or cannot be written to, or it is a folder. ArgumentError: another suffix.
    """
    path = Path(target)
    if suffix is not None and path.suffix.lower() != suffix:
        raise ArgumentError(f"path: got {str(path)!r}, needed a name that ends in {suffix}")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as e:
        raise OutputError(
            f"cannot write the file {str(path)!r} ({e.strerror or e}); give a file in a folder you can write to"
        ) from e
    return path


def write_file(
    path: str | os.PathLike[str],
    content: str | bytes,
    *,
    folders: bool = False,
    advice: str = "choose a folder that exists and is yours",
    mode: int = 0o666,
    every_process: bool = False,
) -> Path:
    """Writes a whole file or nothing: to a temporary file in the same folder, then renamed. An interrupted write leaves nothing
    behind.

    Args:
      path: the file; an existing one is replaced.
      content: text is written as UTF-8.
      folders: make those that are missing.
      advice: ends the message of the error.
      mode: permissions of the file, less the umask.
      every_process: where several processes run one program, all of them write; else one does (`processes.speaks`), and in the others
        nothing happens.

    Raises:
      OutputError: the file cannot be written.
    """
    target = Path(path)
    if not (every_process or speaks()):
        return target
    data = content.encode() if isinstance(content, str) else content
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
    try:
        if folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {str(target)!r}: {error.strerror or error}; {advice}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return target


def _publish(work: Path, target: Path, existed: bool) -> None:
    try:
        if not existed:
            umask = os.umask(0)
            os.umask(umask)
            work.chmod(0o777 & ~umask)  # mkdtemp's folders are private to the user
            work.rename(target)
            return
        for path in sorted(work.rglob("*")):
            place = target / path.relative_to(work)
            if path.is_dir():
                place.mkdir(exist_ok=True)
            else:
                path.replace(place)
    except OSError as e:
        raise OutputError(f"cannot write to the folder {str(target)!r} ({e.strerror or e})") from e


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()
