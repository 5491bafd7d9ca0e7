"""Reading files by other people's libraries: errors in one line, and no noise."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from files.io import LocalError, lfs_fault
from options import one_line

_stderr_lock = threading.RLock()  # held while standard error, which is the process's, goes nowhere


@contextmanager
def read_untrusted(
    file: Path,
    remedy: str = "download it again",
    fault: str = "is corrupt, truncated or of another kind",
) -> Iterator[None]:
    """Let a library read a file, and turn its error into one ValueError with the file's name.

    A panic in Rust is a BaseException. A ValueError that names the file already, as our own do,
    passes unchanged. The library's output on standard error is dropped.
    """
    try:
        with silence_stderr():
            yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, ValueError) and str(file) in str(error):
            raise
        if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch's words
            raise ValueError(
                f"{file} needs more memory than there is; free some, or use a smaller file"
            ) from None
        if lfs_fault(file):
            raise ValueError(f"{file}: {lfs_fault(file)}") from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = one_line(lines[0], 300)
        plain = f"{file.name} {fault} ({reason})"
        raise LocalError(f"{file} {fault} ({reason}); {remedy}", plain) from None


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Drop warnings, and the output of C++ and Rust on standard error, for a thread at a time."""
    with _stderr_lock, warnings.catch_warnings(), open(os.devnull, "wb") as nowhere:
        warnings.simplefilter("ignore")
        try:
            kept = os.dup(2)
        except OSError:  # there is no standard error, as after 2>&-
            yield
            return
        try:
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def load_pickle(file: Path, mmap: bool) -> Any:
    """Load tensors and plain values that torch.save wrote. Call it in `read_untrusted`."""
    import torch

    try:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError:  # its own message advises to turn weights_only off
        raise ValueError("its pickle holds more than tensors") from None
