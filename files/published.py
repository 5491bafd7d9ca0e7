"""The table of published heads, files/HEADS.md: each target's in the order of preference.

Names are compared without their owner, the form of the files and their quantization.
Not here: choosing and fetching a head (known_heads.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from files.fetch import title_of
from files.io import read_text
from options import ROOT

TABLE = ROOT / "files" / "HEADS.md"
TITLE = "| target | head | layout |"
QUANTIZATION = re.compile(r"(?<![^-._/])(UD-)?(I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP?16|FP?32)$", re.I)


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


def published_tau(path: str) -> float:
    """Return the tau that was published of a head, known by its name; 0: none is known.

    path: of its files, in a hub's cache or in a folder of that name
    Raises: ValueError where the table cannot be read.
    """
    own = plain_name(title_of(Path(path)))
    taus = [head.tau for head in published_heads() if plain_name(head.name) == own]
    return float(taus[0]) if taus and taus[0] != "?" else 0.0
