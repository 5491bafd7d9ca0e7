"""Lets a script find the project's modules. Import it before any of them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts")) if path not in sys.path]
