"""The build backend of pyproject.toml: refuses to install what runs from its folder.

The modules have short names (`model`, `load`), which would be in the way of others among a Python's
packages, and the models that are fetched belong beside the code.
"""

from __future__ import annotations

import sys
from typing import Any

RULE = (
    "gpt-eagle is not installed, it runs from its folder: pip install -r requirements.txt, then "
    "python generate.py --help; other programs import it with the folder in PYTHONPATH"
)


def build_wheel(*_: Any) -> None:
    """Refuse. pip calls this, and what follows."""
    sys.exit(RULE)


build_editable = build_sdist = build_wheel
