"""Declare and check the keys of JSON files by others: a key is a dataclass field with a rule.

`read_fields` takes the keys that a dataclass declares with `key` out of a JSON object. `naming` puts the name of the
file before a refusal, and the remedy behind it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from files import is_gguf


class NotSupported(ValueError):
    """A file that may be right but is of no use here: no correction of it would help."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Put the file's name before a refusal of what it holds, and the remedy behind. Read the file outside."""
    try:
        yield
    except NotSupported as error:
        raise ValueError(f"{file}: {error}; use another checkpoint") from None
    except ValueError as error:
        raise ValueError(
            f"{file}: {error}; {'use another file' if is_gguf(file) else 'correct it'}"
        ) from None


class Rule(NamedTuple):
    """What a value must be."""

    text: str  # follows "must be"
    holds: Callable[[Any], bool]


def integer(least: int, most: int) -> Rule:
    """A whole number in a range; neither true nor 64.0 is one."""
    return Rule(
        f"a whole number from {least} to {most}", lambda v: type(v) is int and least <= v <= most
    )


def positive(most: float) -> Rule:
    """A number above 0."""
    return Rule(
        f"a number above 0, at most {most:g}", lambda v: type(v) in (int, float) and 0 < v <= most
    )


def only(*values: str) -> Rule:
    """One of some texts."""
    return Rule(" or ".join(values), lambda v: v in values)


FLAG = Rule("true or false", lambda v: type(v) is bool)


TEXT = Rule("a text", lambda v: type(v) is str)


NAMES = Rule("a list of names", lambda v: type(v) is list and all(type(name) is str for name in v))


OBJECT = Rule("an object", lambda v: type(v) is dict)


TOKEN_ID = integer(0, 2**32 - 1)


TOKEN_IDS = Rule(
    "a token id, a whole number from 0 on, or a list of such",
    lambda v: all(map(TOKEN_ID.holds, v if type(v) is list else [v])),
)


def key(rule: Rule, default: Any = MISSING) -> Any:
    """A dataclass field that is also a key of a JSON file. default: where the key is missing or null."""
    return field(default=default, metadata={"rule": rule})


def read_fields(raw: dict, kind: type) -> Any:
    """The keys that a dataclass declares with `key`. Raises: ValueError that names the key, its rule and the value."""
    found = {}
    for f in fields(kind):
        value, rule = raw.get(f.name), f.metadata["rule"]
        if value is None and f.default is MISSING:
            raise ValueError(f"the key {f.name!r} is missing")
        if value is not None:
            if not rule.holds(value):
                raise ValueError(f"{f.name} must be {rule.text}; it is {reprlib.repr(value)}")
            found[f.name] = value
    return kind(**found)
