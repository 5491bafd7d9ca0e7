"""Reading files by other people's libraries: errors in one line, no noise, bounded memory."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from files.io import LocalError, lfs_fault
from options import one_line

PICKLE_BYTES = 250 * 10**6  # memory that reading a pickle may take besides the size of its file

# held while standard error, the warnings or a limit of the process is changed
_process_lock = threading.RLock()


@contextmanager
def read_untrusted(
    file: Path,
    remedy: str = "download it again",
    fault: str = "is corrupt, truncated or of another kind",
) -> Iterator[None]:
    """Let a library read a file, with errors as in `errors_as_value_error`.

    The library's output on standard error is dropped, such as the message of a panic in Rust.
    """
    with errors_as_value_error(file, remedy, fault), silence_stderr():
        yield


@contextmanager
def errors_as_value_error(
    file: Path,
    remedy: str = "download it again",
    fault: str = "is corrupt, truncated or of another kind",
) -> Iterator[None]:
    """Turn a library's error about a file into one ValueError with the file's name.

    It can be used in any thread. A panic in Rust is a BaseException. A ValueError that names the
    file already, as our own do, passes unchanged.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, ValueError) and str(file) in str(error):
            raise
        if lacks_memory(error):
            raise ValueError(
                f"{file} needs more memory than there is; free some, or use a smaller file"
            ) from None
        if lfs_fault(file):
            raise ValueError(f"{file}: {lfs_fault(file)}") from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = one_line(lines[0], 300)
        plain = f"{file.name} {fault} ({reason})"
        raise LocalError(f"{file} {fault} ({reason}); {remedy}", plain) from None


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out, which torch reports as a RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    reports = ("allocate memory", "tried to allocate")
    return isinstance(error, RuntimeError) and any(report in text for report in reports)


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Drop warnings, and the output of C++ and Rust on standard error.

    Standard error belongs to the whole process, so one thread at a time is inside.
    """
    with _process_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sys.stderr.flush()
            kept = os.dup(2)
            nowhere = os.open(os.devnull, os.O_WRONLY)
        except (AttributeError, OSError, ValueError):
            kept = None  # there is no standard error, as after 2>&-; 2 may be another file
        if kept is None:
            yield
            return
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)


def load_pickle(file: Path, mmap: bool) -> Any:
    """Load a file of torch.save that holds tensors and plain values. Call it in `read_untrusted`.

    A pickle may request any amount of memory, as bytearray(10**12). It gets the file's size and
    `PICKLE_BYTES`.
    """
    try:
        with limited_memory(file.stat().st_size + PICKLE_BYTES):
            import torch

            return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError:  # its own message advises to turn weights_only off
        raise ValueError("its pickle holds more than tensors") from None
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise ValueError("its pickle asks for more memory than its tensors need") from None


@contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Limit the memory that is taken inside, on systems that can (Linux)."""
    try:
        import resource

        statm = Path("/proc/self/statm").read_bytes().split()
        pages = int(statm[5])  # of data, as the limit counts them
    except (ImportError, OSError):
        yield
        return
    with _process_lock:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
        limits.append(pages * resource.getpagesize() + more_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
