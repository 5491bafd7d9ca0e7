"""Tell whether files were edited of which our operators replace parts, where an edit does nothing.

C++ and Triton run in place of the functions of reference.py, and whole passes in place of
model.py, steps.py and a head's layers in eagle_draft.py. A fingerprint of each file is below;
tests/core/test_plain.py holds them, and prints the new ones. They leave out what changes no result:
docstrings, comments, spaces and imports.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from options import log_note

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = "reference.py"
FINGERPRINTS = {
    "eagle_draft.py": "adb06432",
    "model.py": "6068447b",
    "reference.py": "607cc24b",
    "steps.py": "5097c799",
}
IMPORT = r"^ *(?:from|import) [^\n(]*(?:\([^)]*\))?"
WITHOUT_EFFECT = re.compile(rf'"""[\s\S]*?"""|#.*|{IMPORT}', re.MULTILINE)


def fingerprint(source: str) -> str:
    """Return a hash of the part of a Python file that changes results."""
    code = WITHOUT_EFFECT.sub("", source)
    return hashlib.sha256("".join(code.split()).encode()).hexdigest()[:8]


def fingerprints() -> dict[str, str]:
    """Return those of the files as they are."""
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in FINGERPRINTS}
    return {name: fingerprint(source) for name, source in sources.items()}


def note_edits(functions: bool, passes: bool) -> None:
    """Print a note where a file was edited of which our operators replace parts.

    functions, passes: whether they replace the backend's functions, and passes of the model
    """
    found = fingerprints()
    edited = [name for name, of_file in FINGERPRINTS.items() if found[name] != of_file]
    replaced = [name for name in edited if (functions if name == FUNCTIONS else passes)]
    if replaced:
        log_note(
            f"edited: {', '.join(replaced)}; our operators run in place of parts of it, where an "
            "edit does nothing; --plain runs it as it is"
        )
