"""Whether the weights of a GGUF file, or of a directory in MXFP4, stay in their blocks.

The layouts are in backends/blocks.py; without that folder blocks become numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from files.checkpoint import is_mxfp4
from files.io import is_gguf, read_json
from files.machine import blocks
from files.rank import this_rank


def keeps_blocks(config: Any, path: Path) -> bool:
    """Return whether a checkpoint's weights stay in the bits of the file's blocks.

    config: a `run.options.GenerateConfig`, with `dtype` as the user gave it
    Returns: True for a GGUF file or a directory in MXFP4 on one device, unless dtype is given.
    """
    as_stored = not config.dtype and not config.random and _has_blocks(path)
    if not as_stored or blocks() is None or this_rank().world_size > 1:
        return False
    return blocks().can_stay(config.device)


def _has_blocks(path: Path) -> bool:
    """Return whether a checkpoint is one whose weights may be in blocks."""
    if is_gguf(path):
        return True
    return (path / "config.json").is_file() and is_mxfp4(read_json(path / "config.json"))
