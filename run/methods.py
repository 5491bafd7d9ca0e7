"""The ways to draft: values of --draft, the modules that load them, and what they take.

Options (run/options.py), loading (run/load.py) and benchmarks ask this table. A module has
`load_method`, of (target, config, tokenizer), which returns a `DraftMethod` (run/observer.py).
Not here: the methods themselves. No torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from files.head_kinds import MTP as MTP
from options import added, load_module, load_part, present, require


class DraftMethodSpec(NamedTuple):
    """A way to draft: its module, and the options that it takes."""

    module: str
    extended: str = ""  # the module that loads it with --random, if another
    head: bool = False  # it reads a trained head
    # values of --tree, its default first; (): it has trees of its own
    trees: tuple[str, ...] = ("auto", "dynamic", "static", "chain")
    scores_children: bool = True  # by itself, so that it takes the options of trees
    searches_text: bool = False  # that so far and those of past requests, for its drafts
    static_size_option: bool = False  # its static trees have tree_size nodes
    residual: bool = True  # it takes accept=residual
    many_ranks: bool = True  # it runs under torchrun
    source: str = "head"  # of drafts, for a person


OUTSIDE = "MODULE:FUNCTION"  # a way to draft in no table: its function stands for `load_method`
OWN = {
    "none": DraftMethodSpec("run.observer", trees=(), scores_children=False, residual=False),
    "eagle": DraftMethodSpec("run.heads", extended="drafts.random_model", head=True),
}


@cache
def known_drafters() -> dict[str, DraftMethodSpec]:
    """Return the ways to draft by name: those of this folder, and those that folders add."""
    found = dict(OWN)
    for name in added().get("drafters", {}):
        found |= load_part("drafters", name).DRAFTERS
    return found


def head_kinds() -> tuple[str, ...]:
    """Return the kinds of trained heads (files/head_kinds.py)."""
    specs = known_drafters().items()
    return tuple(name for name, spec in specs if spec.head and not spec.searches_text)


def spec_of(config: Any) -> DraftMethodSpec:
    """Return the spec of a `GenerateConfig`; while its draft is undecided, that of a head."""
    return spec_named(config.draft)


def spec_named(draft: str) -> DraftMethodSpec:
    """Return the spec of a way to draft. Raises: ValueError for none that is here."""
    name = draft or "eagle"
    if ":" in name:
        kinds = {"trees": (), "scores_children": False, "residual": False, "many_ranks": False}
        return DraftMethodSpec(name, source=name, **kinds)
    specs = known_drafters()
    fault = f"--draft must be one of {', '.join((*specs, OUTSIDE))}; it is {name!r}"
    if not has_drafts():
        fault += "; more are in the folder drafts/, which is not here: restore it"
    require(name in specs, fault)
    return specs[name]


def loader_of(module: str) -> Callable[..., Any]:
    """Return the `load_method` of a module, or the function that MODULE:FUNCTION names instead.

    Raises: ValueError where such a function cannot be imported.
    """
    name, _, function = module.partition(":")
    if not function:
        return load_module(name).load_method
    if os.getcwd() not in sys.path:  # as in an installed command
        sys.path.append(os.getcwd())
    try:
        return getattr(import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--draft {module}: {error}; name {OUTSIDE} of your own") from None


def has_drafts() -> bool:
    """Return whether the folder drafts/ is there, so that defaults may use it."""
    return "drafts" in present()


def source_of(engine: Any, preset: int) -> str:
    """Return the name of what drafts in a preset; "" where nothing does."""
    drafter = engine.presets[preset]
    if drafter.size == 1:
        return ""
    return drafter.source or spec_named(engine.option("draft")).source


def told_draft(engine: Any) -> str:
    """Describe the ways to draft of an engine, for a person."""
    by_preset = {source_of(engine, preset) for preset in range(len(engine.presets))}
    return told_sources(sorted(by_preset - {""}, reverse=True))


def told_sources(sources: list[str]) -> str:
    """Describe what drafts, for a person."""
    return f"drafts by {' and '.join(sources)}" if sources else "no drafts"
