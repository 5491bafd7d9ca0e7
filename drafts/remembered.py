"""Measurements that one process saves for the next: a small JSON file per key in the user's cache.

A key covers everything that the time and the accepted tokens of a cycle depend on: the files of the
target and of the draft, formats, options of the draft, batch size, greedy or sampled decoding,
threads, the processor, the C++ operators. Files are distinguished by path, size and time of change.
An unreadable file counts as missing; a failed write prints one line. A file is replaced as a unit,
by one process at a time; the last process to end wins.

Not here: the meaning of the numbers and the check of their ranges (autosize.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from files.io import replace_file
from files.lock import folder_lock
from files.machine import describe_cpu
from options import cache_folder, log_note, part_or
from run.engine import Engine

# the check that a folder is the user's own; without backends/ nothing is remembered
check_own = part_or("machine", "check_own", None)
# options that change the time or the accepted tokens of a cycle
OPTIONS = (
    "random", "draft", "quant", "group_size", "quant_draft", "dtype", "device",
    "compile", "batch_size", "grammar", "children",
)  # fmt: skip
# suffixes of the files in a directory that identify the model
WEIGHTS = (".gguf", ".safetensors", ".bin")
# largest file that is read
MOST_BYTES = 2**16


def folder() -> Path | None:
    """Return the folder of the files; None where nothing is remembered.

    Raises: RuntimeError without a home directory.
    """
    return cache_folder() / "trees" if check_own else None


def file_of(engine: Engine) -> Path | None:
    """Return the file for an engine's presets; None where nothing is remembered."""
    config = engine.config
    paths = (config.checkpoint, engine.option("head"), config.draft_checkpoint)
    try:
        parent = folder()
        models = [_identity(path) for path in paths if path]
    except (OSError, RuntimeError):
        return None
    if parent is None:
        return None
    on_cuda = engine.device.type == "cuda"
    # on a CPU the operators' name covers the processor that they are built for
    chip = torch.cuda.get_device_name() if on_cuda else describe_cpu()
    options = [engine.option(name) for name in OPTIONS]
    samples = config.temperature > 0
    presets = [preset.name for preset in engine.presets]
    key = json.dumps([models, options, samples, presets, torch.get_num_threads(), chip])
    return parent / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _identity(path: str) -> list[Any]:
    """Return values that change with the weights of a file or a directory."""
    real = Path(os.path.realpath(path))
    files = [real]
    if real.is_dir():
        files = sorted(file for file in real.iterdir() if file.suffix in WEIGHTS)
    identity: list[Any] = [str(real)]
    for file in files:
        status = file.stat()
        identity.append([file.name, status.st_size, status.st_mtime_ns])
    return identity


def recall(file: Path) -> Any:
    """Read the remembered JSON value.

    Returns: the value; None where there is none, or where the folder is not the user's own.
    """
    with suppress(OSError, RuntimeError, ValueError, RecursionError):
        check_own(file.parent)
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= MOST_BYTES:
            return json.loads(file.read_text(encoding="utf-8"))
    return None


def remember(file: Path, value: Any) -> None:
    """Replace the remembered value.

    Writes: the file; where that fails, one line to standard error.
    """
    parent = file.parent
    text = json.dumps(value) + "\n"
    try:
        for made in (parent.parent, parent):  # `mkdir` creates missing parents with another mode
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(parent)
        with folder_lock(parent):
            replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed by now
            log_note(f"--tree auto cannot write to {parent} ({reason}) and will start anew")
