"""gpt-eagle as a library: what `import gpt_eagle` gives where the package is installed.

    engine = gpt_eagle.load("DIR or FILE.gguf")
    print(gpt_eagle.generate(engine, "Why is the sky blue?").text)

The build puts this file above all others, as the package's `__init__.py` (setup.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from options import load_part
from run.parsing import VERSION as __version__

if TYPE_CHECKING:
    from run.library import astream, generate, stream
    from run.load import load

__all__ = ["__version__", "astream", "generate", "load", "stream"]
FUNCTIONS = ("astream", "generate", "load", "stream")


def __getattr__(name: str) -> Any:
    """Return a function; the first one imports PyTorch, which takes seconds."""
    if name in FUNCTIONS:
        return load_part("library", name)
    raise AttributeError(f"gpt_eagle has no {name}; it has {', '.join(FUNCTIONS)}")
