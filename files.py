"""Files: read with one line about the fault, as text, JSON or by a library; written whole or not at all.

`read_untrusted` is the boundary to libraries: an error inside becomes one line that names the file.
This module imports no torch, so that a mistake on the command line is answered before torch is there.
Not here: which keys a JSON file may have (hf/fields.py); tensors by name (checkpoint.py).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PICKLE_BYTES = 250 * 10**6  # what reading a pickle may take besides its file
TEMPORARY = ".tmp"  # ends the name of a file while it is written


def one_line(message: Any, most: int = 1000) -> str:
    """What an error says, on one line that can be printed, its middle left out beyond `most` characters."""
    text = str(message)
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"
    return (
        " ".join("".join(char if char.isprintable() else " " for char in text).split())
        or type(message).__name__
    )


def _begins_as_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(4) == b"GGUF"
    except OSError:
        return False


def read_text(path: Path) -> str:
    """A file's text. Raises: ValueError when it cannot be read, is no UTF-8, or never ends."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISBLK(mode) or stat.S_ISCHR(mode) and not os.path.samefile(path, "/dev/stdin"):
            raise ValueError(f"{path} is a device; name a file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name another file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from None


def parse_json(text: str, where: Any) -> Any:
    """Any JSON value. Raises: ValueError for what is none, or one that is nested or written too long to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {one_line(error, 200)}; correct it") from None


def check_directory(path: Path) -> None:
    """Check that a model directory is there. Raises: ValueError when it is not, or is a file."""
    if path.is_file():
        if path.suffix.lower() != ".gguf" and _begins_as_gguf(path):
            raise ValueError(
                f"{path} is a GGUF file without its suffix; rename it to {path.name}.gguf"
            )
        raise ValueError(f"{path} is a file; a Hugging Face model directory is expected here")
    if not path.is_dir():
        raise ValueError(
            f"no such directory: {path}; for a hub model run: python scripts/download.py {path}"
        )


def read_json(path: Path) -> dict:
    """Read one JSON object. Raises: ValueError with the path when it is missing or broken."""
    check_directory(path.parent)
    if not path.is_file():
        raise ValueError(
            f"{path.parent} has no {path.name}; a Hugging Face model directory is expected"
        )
    value = parse_json(read_text(path), path)
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} must hold a JSON object, not a {type(value).__name__}; correct it"
        )
    return value


def read_jsonl(path: Path, what: str, check: Callable[[dict], str] = lambda row: "") -> list[dict]:
    """Read one JSON object a line (or a JSON array of them).

    what: the flag that named the file
    check: says what is wrong with an object; "" when nothing is
    Raises: ValueError that names the file and the line.
    """
    text, rows = read_named(path, what), []
    lines = [(1, text)] if text.lstrip().startswith("[") else enumerate(text.split("\n"), 1)
    for number, line in lines:
        if line.strip():
            where = f"{what}: {path} line {number}"
            value = parse_json(line, where)
            found = value if isinstance(value, list) else [value]
            wrong = next(filter(None, (check(row) for row in found if isinstance(row, dict))), "")
            if wrong:
                raise ValueError(f"{where}: {wrong}")
            rows += found
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{what}: {path} must hold one JSON object a line; correct it")
    return rows


def read_named(path: Path, what: str) -> str:
    """A file's text, as `read_text`. what: the flag that named it."""
    try:
        return read_text(path)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write under a temporary name, then rename, so that a kill or a full disk leaves the old file whole.

    It keeps its mode. A link stays, and what it names is replaced; a device or a queue is written into.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    real = Path(os.path.realpath(path))
    temporary = real.with_name(real.name + TEMPORARY)
    try:
        temporary.unlink(missing_ok=True)
        if real.exists():
            temporary.touch(
                stat.S_IMODE(real.stat().st_mode) | stat.S_IWUSR
            )  # who may not read the old may not now
        write(temporary)
        if real.exists():
            shutil.copymode(real, temporary)
        os.replace(temporary, real)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(where: str, text: str) -> None:
    """Write a whole file, as `replace_file`, or to standard output for `-`. Raises: ValueError where that fails."""
    if where == "-":
        print(text, flush=True)
        return
    try:
        replace_file(Path(where), lambda path: path.write_text(text + "\n", encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot write {where}: {error.strerror}; name another file") from None


# ---------------------------------------------------------------------- by libraries


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint is a GGUF file (hf/gguf.py), and not a model directory."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


@contextmanager
def read_untrusted(
    file: Path,
    remedy: str = "download it again",
    fault: str = "is corrupt, truncated or of another kind",
) -> Iterator[None]:
    """Let a library read a file: as `errors_as_value_error`, and what it prints is dropped, as a panic in Rust does."""
    with errors_as_value_error(file, remedy, fault), silence_stderr():
        yield


@contextmanager
def errors_as_value_error(
    file: Path,
    remedy: str = "download it again",
    fault: str = "is corrupt, truncated or of another kind",
) -> Iterator[None]:
    """Turn what a library raises about a file into one ValueError with the file's name. For any thread.

    A panic in Rust is a BaseException. What names the file already, as our own refusals do, passes.
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
        reason = one_line(next(iter(str(error).strip().splitlines()), type(error).__name__), 300)
        raise ValueError(f"{file} {fault} ({reason}); {remedy}") from None


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, which torch reports as a RuntimeError."""
    words = "allocate memory", "tried to allocate"
    return (
        isinstance(error, MemoryError)
        or isinstance(error, RuntimeError)
        and any(w in str(error) for w in words)
    )


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Drop warnings, and what C++ and Rust print on standard error. One thread at a time: it is the whole process's."""
    with _of_the_process, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sys.stderr.flush()
            kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        except (
            AttributeError,
            OSError,
            ValueError,
        ):  # there is none, as after 2>&-; 2 may be another file
            kept = None
        if kept is None:
            yield
            return
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept), os.close(nowhere)


_of_the_process = (
    threading.RLock()
)  # standard error, warnings and limits, while they are replace_fields


def load_pickle(file: Path, mmap: bool) -> Any:
    """What torch.save wrote, if that is tensors and plain values. Call it within `reading`.

    A pickle may ask for any amount of memory, as bytearray(10**12): it gets the file's size and `PICKLE_BYTES`.
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
    """Let no more memory be taken inside, where the system can hold this process to it (Linux)."""
    try:
        import resource

        pages = int(
            Path("/proc/self/statm").read_bytes().split()[5]
        )  # of data, as the limit counts them
    except (ImportError, OSError):
        yield
        return
    with _of_the_process:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        finite = [each for each in before if each != resource.RLIM_INFINITY]
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (min([pages * resource.getpagesize() + more_bytes, *finite]), before[1]),
        )
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
