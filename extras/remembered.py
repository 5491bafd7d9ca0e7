"""What one process has learned and the next begins with: a small JSON file per key, in the user's cache folder.

A key stands for everything that a cycle's time and its accepted tokens depend on: the files of the target and of the
draft, formats, options of the draft, rows, whether tokens are sampled, threads, and the processor. Files are told apart
by path, size and time of change.
What cannot be read is as if it were not there; what cannot be written is said in one line. A file is replaced whole, by
one process at a time; the last one to end is remembered.

`GPT_EAGLE_TREES` in the environment names another folder; empty, nothing is read or written.
Not here: what the numbers mean, and whether they can be true (autosize.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from decode import Engine
from files import replace_file
from ops.cpu.build import alone, check_own, processor

# options that change what a cycle costs or what is accepted
OPTIONS = (
    "inflate", "random_twin", "draft", "draft_vocab", "token_ranks", "ngram_tokens", "ngram_branches", "ngram_max",
    "ngram_min", "children", "sharpness", "quant", "group_size", "quant_draft", "dtype", "device", "compile",
    "batch_size",
)  # fmt: skip
WEIGHTS = (".gguf", ".safetensors", ".bin")  # files of a directory that say which model it holds
MOST_BYTES = 2**16  # of a file


def folder() -> Path | None:
    """The folder of the files; None where nothing is remembered. Raises: RuntimeError without a home."""
    named = os.environ.get("GPT_EAGLE_TREES")
    if named is not None:
        return Path(named) if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-eagle" / "trees"


def file_of(engine: Engine) -> Path | None:
    """The file for an engine's presets; None where nothing is remembered."""
    config = engine.config
    try:
        place = folder()
        models = [
            _identity(path)
            for path in (config.checkpoint, config.eagle, config.draft_checkpoint)
            if path
        ]
    except (OSError, RuntimeError):
        return None
    chip = torch.cuda.get_device_name() if config.device.startswith("cuda") else processor()
    options = [getattr(config, name) for name in OPTIONS]
    presets = [preset.name for preset in engine.drafter.presets]
    key = json.dumps(
        [models, options, config.temperature > 0, presets, torch.get_num_threads(), chip]
    )
    return place and place / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _identity(path: str) -> list[Any]:
    """Facts that change with the weights of a file or a directory."""
    real = Path(os.path.realpath(path))
    files = (
        sorted(file for file in real.iterdir() if file.suffix in WEIGHTS)
        if real.is_dir()
        else [real]
    )
    facts = [(file.name, file.stat()) for file in files]
    return [str(real), *([name, each.st_size, each.st_mtime_ns] for name, each in facts)]


def recall(file: Path) -> Any:
    """The JSON value that was remembered; None where there is none, or the folder is not the user's own."""
    with suppress(OSError, RuntimeError, ValueError, RecursionError):
        check_own(file.parent)
        facts = file.lstat()
        if stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_BYTES:
            return json.loads(file.read_text(encoding="utf-8"))
    return None


def remember(file: Path, value: Any) -> None:
    """Replace what is remembered. Writes: the file; where that fails, one line to standard error."""
    place = file.parent
    try:
        for made in (place.parent, place):  # `mkdir` gives parents that it makes another mode
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(place)
        with alone(place):
            replace_file(
                file, lambda path: path.write_text(json.dumps(value) + "\n", encoding="utf-8")
            )
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed by now
            print(
                f"note: --tree auto cannot write to {place} ({reason}) and will start anew",
                file=sys.stderr,
            )
