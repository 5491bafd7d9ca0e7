"""Declare and check the keys of JSON files by others: a key is a dataclass field with a rule.

`read_fields` reads the keys that a dataclass declares with `key` from a JSON object. `naming` puts
the name of the file before an error message, and the remedy after it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from files.io import is_gguf


class NotSupported(ValueError):
    """A file that may be right but is of no use here: no correction of it would help."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Put the file's name before an error about its content, and the remedy after it.

    Read the file outside of this context.
    """
    try:
        yield
    except NotSupported as error:
        raise ValueError(f"{file}: {error}; use another checkpoint") from None
    except ValueError as error:
        remedy = "use another file" if is_gguf(file) else "correct it"
        raise ValueError(f"{file}: {error}; {remedy}") from None


class Rule(NamedTuple):
    """A condition that a value must meet."""

    text: str  # follows "must be"
    holds: Callable[[Any], bool]


def integer(least: int, most: int) -> Rule:
    """Return the rule for a whole number in a range; neither true nor 64.0 is one."""
    return Rule(
        f"a whole number from {least} to {most}", lambda v: type(v) is int and least <= v <= most
    )


def positive(most: float) -> Rule:
    """Return the rule for a number above 0."""
    return Rule(
        f"a number above 0, at most {most:g}", lambda v: type(v) in (int, float) and 0 < v <= most
    )


def only(*values: str) -> Rule:
    """Return the rule for one of some texts."""
    return Rule(" or ".join(values), lambda v: v in values)


FLAG = Rule("true or false", lambda v: type(v) is bool)
YES = Rule("true", lambda v: v is True)
NO = Rule("false", lambda v: v is False)
TEXT = Rule("a text", lambda v: type(v) is str)
NAMES = Rule("a list of names", lambda v: type(v) is list and all(type(name) is str for name in v))
OBJECT = Rule("an object", lambda v: type(v) is dict)
TOKEN_ID = integer(0, 2**32 - 1)
TOKEN_IDS = Rule(
    "a token id, a whole number from 0 on, or a list of such; -1: none",
    lambda v: all(map(integer(-1, 2**32 - 1).holds, v if type(v) is list else [v])),
)


def key(rule: Rule, default: Any = MISSING, name: str = "") -> Any:
    """Declare a dataclass field that is also a key of a JSON file.

    default: the value where the key is missing or null; without one, the key is required
    name: of the key; default: the field's
    """
    return field(default=default, metadata={"rule": rule, "key": name})


def translated(keys: Any) -> dict[str, Any]:
    """Return the fields of a record whose keys have names of their own, by the fields' names."""
    own = [declared.name for declared in fields(keys) if declared.metadata["key"]]
    return {name: getattr(keys, name) for name in own}


def given(raw: dict, defaults: dict) -> dict:
    """Return the keys of a JSON object that are not null, behind defaults of the others."""
    return defaults | {name: value for name, value in raw.items() if value is not None}


def key_of(declared: Field) -> str:
    """Return the key that a field is read from; "": it is none."""
    if "rule" not in declared.metadata:
        return ""
    return declared.metadata["key"] or declared.name


def read_fields(raw: dict, kind: type, **others: Any) -> Any:
    """Read the keys that the dataclass `kind` declares with `key` from a JSON object.

    others: values of its other fields, or in place of the keys'
    Raises: ValueError that names the key, its rule and the value.
    """
    values = {}
    for declared in fields(kind):
        name = key_of(declared)
        if not name:
            continue
        value = raw.get(name)
        rule = declared.metadata["rule"]
        is_needed = declared.default is MISSING and declared.name not in others
        if value is None and is_needed:
            raise ValueError(f"the key {name!r} is missing")
        if value is None:
            continue
        if not rule.holds(value):
            raise ValueError(f"{name} must be {rule.text}; it is {reprlib.repr(value)}")
        values[declared.name] = value
    return kind(**values | others)


# keys of config.json that hold for the text part of a model, too
SHARED_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "torch_dtype",
    "dtype",
    "quantization_config",
    "tie_word_embeddings",
)


def text_part(raw: dict) -> dict:
    """Return the config.json of the text part, for a model that also takes pictures or sound.

    Its `model_type` names its architecture.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    shared = {name: raw[name] for name in SHARED_KEYS if raw.get(name) is not None}
    return text | shared | {"architectures": None}
