"""Find a head for a model: among the published ones, and in the folders beside it.

files/published.py reads the published ones. A head on this machine names its target in config.json,
by a key that depends on who trained it.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from files.head_kinds import head_kind
from files.hub import hub_model
from files.io import is_gguf, read_json
from files.published import plain_name, published_heads
from options import load_part, log_note

# keys of a head's config.json, beside speculators'
TARGETS = ("base_model", "target_model", "base_model_name_or_path", "target_model_name_or_path")


def published_head(config: Any) -> str:
    """Fetch the first head that is published for a model of a hub, with a note.

    Returns: its directory; "" where none is known, or wanted, or comes.
    """
    kind = config.draft.removesuffix("+ngram")
    names = hub_model(config.checkpoint, False).names
    found = [head for name in names for head in published_heads(name)]
    found = [head for head in found if kind in ("", head.kind)]
    if not found or config.random:
        return ""
    head = found[0]
    listed = f"{head.name}, which files/HEADS.md lists for {head.target}"
    try:
        path = hub_model(f"hf:{head.name}", True).path
    except ValueError as error:
        log_note(f"drafting without {listed}: {error}")
        return ""
    log_note(
        f"drafts come from {listed}; --head names another, --draft ngram does without", logging.INFO
    )
    return str(path)


@cache  # the note comes once
def head_beside(path: Path, kind: str) -> str:
    """Find a head in the folders beside a checkpoint, with a note.

    kind: of the head; "": any. Returns: its path; "": there is none.
    """
    names = _names_of(path)
    found = []
    for config in sorted(path.absolute().parent.glob("*/config.json")):
        try:
            target = _target_of(read_json(config))
            fits = plain_name(target) in names and kind in ("", head_kind(config.parent))
            if fits and _is_head(config.parent):
                found.append((config.parent, target))
        except (ValueError, OSError):  # a folder that is not asked for may be broken
            continue
    if not found:
        return ""
    head, target = found[0]
    several = f", the first of {len(found)}" if len(found) > 1 else ""
    log_note(
        f"drafts come from {head}{several}, whose config names {target}; --head names another",
        logging.INFO,
    )
    return str(head)


def _is_head(folder: Path) -> bool:
    """Return whether a directory holds no whole model: a head's embedding has another name."""
    return head_kind(folder) != "eagle" or (
        "model.embed_tokens.weight" not in load_part("reader", "weights")(folder).readers
    )


def _target_of(raw: dict) -> str:
    """Return the target that a head's config.json names; "": none."""
    named = [raw.get(key) for key in TARGETS]
    speculators = raw.get("speculators_config")
    if isinstance(speculators, dict) and isinstance(speculators.get("verifier"), dict):
        named.append(speculators["verifier"].get("name_or_path"))
    return next((name for name in named if isinstance(name, str)), "")


def _names_of(path: Path) -> set[str]:
    """Return the names that a checkpoint on this machine has, as `plain_name` has them."""
    names = [path.absolute().name]
    if is_gguf(path):
        metadata = load_part("reader", "gguf header")(path).metadata
        names += [metadata.get("general.name"), metadata.get("general.base_model.0.repo_url")]
    else:
        names.append(read_json(path / "config.json").get("_name_or_path"))
    return {plain_name(name) for name in names if isinstance(name, str)} - {""}
