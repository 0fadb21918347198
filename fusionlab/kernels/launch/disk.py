"""Shared parts of the caches on disk: a warning given once, a check of whose files are trusted, and a lock between processes."""

from __future__ import annotations

import contextlib
import os
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from ...errors import CacheWarning

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

LOCK_S = 10.0  # seconds until another process's lock is passed over
_warned: set[str] = set()


def warn_once(path: Path, reason: str) -> None:
    """A `CacheWarning` "<path> <reason>", once in a process."""
    warning = f"{path} {reason}"
    if warning not in _warned:
        _warned.add(warning)
        warnings.warn(warning, CacheWarning, stacklevel=3)


def why_not_trusted(path: Path) -> str:
    """Why code from a file or folder of a cache is not run: another user made it or could change it; "" where it may be.

    A file's folder is looked at as well. The user's own groups are trusted: whoever shares a folder with one means to.
    """
    user = getattr(os, "geteuid", None)
    if user is None:  # Windows, where folders of a user are that user's
        return ""
    for place in (path, *([] if path.is_dir() else [path.parent])):
        found = place.stat()
        if found.st_uid not in (0, user()):
            return f"{place} belongs to another user"
        # In a sticky folder (/tmp) nobody can replace another's file.
        if found.st_mode & stat.S_IWOTH and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
            return f"every user can write to {place}"
    return ""


def make_private(folder: Path) -> None:
    """Makes a cache's folder, private to this user; an existing one is left as it is. Raises OSError if that fails."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock for a file against all other threads and processes, for read-modify-write.

    Where the file system has no locks, or another process holds this one for `LOCK_S`, the work goes on without, with one warning; the
    file stays whole even then, as it is replaced by one rename. Nothing is left of the lock.
    """
    lock = path.with_name(f".{path.name}.lock")
    held, why = _acquire(lock)
    if why:
        warn_once(
            path, f"is written without a lock ({why}); entries that another process adds at the same time may be lost"
        )
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):
                lock.unlink()
            os.close(held)


def _acquire(lock: Path) -> tuple[int | None, str]:
    """(the file held, ""), or (None, why there is no lock: "" where writing will fail for the same reason and report it)."""
    if fcntl is None:
        return None, "this system has no file locks"
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None, ""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(lock, file):
                return file, ""
            os.close(file)  # the one who held it has removed it: a third may hold its successor
            continue
        except BlockingIOError:
            os.close(file)
        except OSError as error:
            os.close(file)
            return None, error.strerror or str(error)
        if time.monotonic() > deadline:
            return None, f"another process has held {lock} for {LOCK_S:g} s"
        time.sleep(0.02)


def _is_there(lock: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(file))
    except FileNotFoundError:
        return False
