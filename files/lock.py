"""A lock on a folder, for what only one process may make: operators, fetched and rounded files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from options import log_note

LOCK = ".gpt-eagle-lock"  # file in the folder


@contextmanager
def folder_lock(folder: Path, note: str = "") -> Iterator[bool]:
    """Lock a folder; wait while another process holds the lock.

    Where a file system has no locks, two processes may make the same file, which does no harm.

    note: logged if the lock is held
    Yields: True with the lock, False without locks.
    """
    lock = FileLock(folder / LOCK)
    with suppress(OSError, NotImplementedError):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if note:
                log_note(note)
            lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()
