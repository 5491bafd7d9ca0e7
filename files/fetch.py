"""Find the files of a checkpoint.

`with_files` puts files in the place of names: of models on a hub (files/hub.py) and of ollama's.
Not here: the default model, which needs no hub and no account (files/packaged.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from files.io import DEFAULT, is_model_name, model_file
from options import load_part


def fetched(checkpoint: str, is_head: bool = False) -> Path:
    """Return the path of a model or a head, and fetch the default model, or one of a hub.

    A folder that holds one GGUF file alone, as hubs' programs make them, stands for that file.

    checkpoint: a path, or a name of a model on a hub or of ollama

    Raises: ValueError that names the cause and the remedy.
    """
    if is_model_name(checkpoint):
        if checkpoint.startswith("ollama:"):
            return load_part("reader", "ollama")(checkpoint)
        return load_part("reader", "hub")(checkpoint, is_head).path
    path = Path(os.path.abspath(checkpoint))
    if path == Path(DEFAULT):
        return load_part("reader", "packaged")(path.parent)
    return model_file(Path(checkpoint))


def with_files(config: Any) -> Any:
    """Return options that name files where they name models, and fetch what is missing.

    A model of a hub comes with a published head where one is known and no other draft is asked for.

    Raises: ValueError that names the cause and the remedy.
    """
    named = {}
    for name in ("checkpoint", "head", "draft_checkpoint"):
        given = getattr(config, name)
        if given:
            named[name] = str(fetched(given, is_head=name == "head"))
    of_hub = is_model_name(config.checkpoint) and not config.checkpoint.startswith("ollama:")
    if of_hub and not config.head:
        named["head"] = load_part("reader", "published head")(config)
    return replace(config, **named)


def title_of(path: Path) -> str:
    """Return the name of a checkpoint for a person, also where a cache has a number as its name."""
    if path.parent.name == "snapshots":  # of models--OWNER--NAME
        return path.parent.parent.name.partition("--")[2].replace("--", "/")
    if path.name.startswith("sha256-"):
        return str(load_part("reader", "gguf header")(path).metadata.get("general.name", path.name))
    return path.name
