"""The folders that are present, and how a person is told of notes and mistakes.

1. The door. A folder says in `ADDS`, a table in its `__init__.py`, what it adds: for each kind (a
   backend, an architecture, a drafter, a program) names, and for each name the module that has it.
   `added` asks every folder once. `load_part` imports what a name stands for. No other place
   imports what may be missing, and what a command does not use is not imported.
2. A mistake of a user is a ValueError with the rule, the value and the remedy.

No torch is imported, so that a mistake is reported before it is.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PREFIX = __name__.removesuffix("options")  # "" in a clone, "gpt_eagle." where installed
FOLDERS = ("backends", "models", "files", "drafts", "run", "server")
# a kind of part -> the folder that has the parts which the flat files lack
HOMES = {
    "backend": "backends",
    "architecture": "models",
    "reader": "files",
    "drafter": "drafts",
    "program": "run",
}
NOTES = logging.getLogger("gpt_eagle")


# ---------------------------------------------------------------------- what the folders add


def below_root(name: str) -> str:
    """Return the whole name of a module that is named as in the tree, such as `models.qwen`."""
    return PREFIX + name


def load_module(name: str) -> ModuleType:
    """Import a module that is named as in the tree."""
    return import_module(below_root(name))


@cache
def present() -> tuple[str, ...]:
    """Return the folders that are here, and that have here what they need."""
    here = [name for name in FOLDERS if find_spec(below_root(name)) is not None]
    tables = {name: load_module(name) for name in here}
    return tuple(name for name in here if all(need in here for need in tables[name].NEEDS))


@cache
def added() -> dict[str, dict[str, str]]:
    """Return kind -> name -> "module" or "module:attribute", of all folders that are present."""
    found: dict[str, dict[str, str]] = {}
    for folder in present():
        for kind, rows in load_module(folder).ADDS.items():
            found.setdefault(kind, {}).update(rows)
    return found


def has_part(kind: str, name: str) -> bool:
    """Return whether a folder adds a part."""
    return name in added().get(kind, {})


def load_part(kind: str, name: str) -> Any:
    """Import a part. Raises: ValueError where no folder that is present adds it."""
    fault = f"the {kind} {name} is in the folder {HOMES.get(kind)}/, which is not here; restore it"
    require(has_part(kind, name), fault)
    module, _, attribute = added()[kind][name].partition(":")
    part = load_module(module)
    return getattr(part, attribute) if attribute else part


# ---------------------------------------------------------------------- notes and mistakes


def require(holds: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)


def log_note(text: str) -> None:
    """Tell a person what was done, in one line, by the logger `gpt_eagle`.

    A command prints the line; a Python caller configures the logger.
    """
    NOTES.warning(text, stacklevel=2)


def one_line(message: Any, most: int = 1000) -> str:
    """Return an error's message on one printable line.

    most: characters; the middle of a longer message is left out
    """
    text = str(message)
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split()) or type(message).__name__
