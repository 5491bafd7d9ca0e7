"""Find a head for a model: among the published ones, and in the folders beside it.

files/HEADS.md has the table of published heads, each target's in the order of preference. A head
on this machine names its target in config.json, by a key that depends on who trained it.
Names are compared without their owner, the form of the files and their quantization.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from files.fetch import title_of
from files.head_kinds import head_kind
from files.hub import QUANTIZATION, hub_model
from files.io import is_gguf, read_json, read_text
from options import ROOT, load_part, log_note

TABLE = ROOT / "files" / "HEADS.md"
TITLE = "| target | head | layout |"
# keys of a head's config.json, beside speculators'
TARGETS = ("base_model", "target_model", "base_model_name_or_path", "target_model_name_or_path")


class PublishedHead(NamedTuple):
    """A row of the table."""

    target: str  # OWNER/NAME on the hub, as `name`
    name: str
    layout: str
    vocabulary: str
    tau: str  # a number, or ?
    licence: str

    @property
    def kind(self) -> str:
        """The value of --draft."""
        kinds = {"Medusa": "medusa", "Hydra": "hydra", "assistant": "assistant", "EAGLE": "eagle"}
        return next((kind for word, kind in kinds.items() if word in self.layout), "block")


def published_heads(name: str = "") -> list[PublishedHead]:
    """Return the published heads of a model; without a name, those of every model.

    Raises: ValueError where the table cannot be read.
    """
    _, title, table = read_text(TABLE).partition(TITLE)
    rows = []
    target = ""
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        target = cells[0] or target  # a target is named in its first row
        rows.append(PublishedHead(target, *cells[1:]))
    return [row for row in rows if not name or plain_name(row.target) == plain_name(name)]


def plain_name(name: str) -> str:
    """Return the part of a model's name that all forms of the model share, in lower case."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace(" ", "-")
    last = re.sub(r"[-.]gguf$", "", last)
    return QUANTIZATION.sub("", last).rstrip("-._").removeprefix("meta-")


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


def published_tau(path: str) -> float:
    """Return the tau that was published of a head, known by its name; 0: none is known.

    path: of its files, in a hub's cache or in a folder of that name
    Raises: ValueError where the table cannot be read.
    """
    own = plain_name(title_of(Path(path)))
    taus = [head.tau for head in published_heads() if plain_name(head.name) == own]
    return float(taus[0]) if taus and taus[0] != "?" else 0.0


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
