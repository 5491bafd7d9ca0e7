"""The names of this project's modules: short in a clone, below `gpt_eagle` where it is installed.

setup.py changes the imports of what it installs. A module that a text names goes through here.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

PREFIX = __name__.removesuffix("run.modules")  # "" in a clone, "gpt_eagle." where installed


def below_root(name: str) -> str:
    """Return the whole name of a module that is named as in the tree, such as `models.llama`."""
    return PREFIX + name


def load_module(name: str) -> ModuleType:
    """Import a module that is named as in the tree."""
    return import_module(below_root(name))
