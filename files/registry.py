"""The architectures that are served: a row names the file that describes one.

LLaMA's and Mixtral's files are in this folder; models/ adds others in its table. A row costs
nothing until its file is asked for, so that an unknown architecture is refused before torch is
imported. docs/CONTRIBUTING.md, "A model", says how to add one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from files.fields import text_part
from files.head_kinds import ARCHITECTURES as HEADS
from files.io import is_gguf, read_json
from options import added, load_module, load_part, present

PAGE = 'docs/CONTRIBUTING.md, "A model", says how to add one'


class Row(NamedTuple):
    """One architecture."""

    module: str  # its file
    name: str  # in `architectures` of config.json, and of the config that a GGUF file becomes
    model_type: str  # of config.json
    gguf: str = ""  # `general.architecture` of GGUF files; "": it has none of its own

    def load(self) -> ModuleType:
        """Import the file. It has `read_config` and `GGUF`, and maybe `rename`."""
        return load_module(self.module)


OWN = (
    Row("files.llama", "LlamaForCausalLM", "llama", "llama"),
    Row("files.llama", "MistralForCausalLM", "mistral"),
    Row("files.mixtral", "MixtralForCausalLM", "mixtral"),
)


@cache
def rows() -> tuple[Row, ...]:
    """Return the architectures of this folder, and those that other folders add."""
    modules = added().get("architecture", {})
    types = {name: key for key, name in added().get("model type", {}).items()}
    in_gguf = {name: key for key, name in added().get("gguf architecture", {}).items()}
    others = (
        Row(module, name, types[name], in_gguf.get(name, "")) for name, module in modules.items()
    )
    return (*OWN, *others)


def names() -> list[str]:
    """Return the names of all architectures, as config.json has them."""
    return [row.name for row in rows()]


def gguf_names() -> list[str]:
    """Return the names of all architectures, as GGUF files have them."""
    return [row.gguf for row in rows() if row.gguf]


def row_of(architectures: list[str] | None, model_type: str) -> Row | None:
    """Find the row of a config.json by its two keys; None: the architecture is not served.

    A config.json may name none, or that of the layers alone.
    """
    of_type = next((row for row in rows() if row.model_type == model_type), None)
    name = architectures[0] if architectures else None
    if of_type and name in (None, of_type.name.replace("ForCausalLM", "Model")):
        return of_type
    return next((row for row in rows() if row.name == name), None)


def row_named(name: str) -> Row:
    """Return the row of an architecture that is served."""
    return next(row for row in rows() if row.name == name)


def row_of_gguf(architecture: str, has_experts: bool) -> Row:
    """Return the row of a GGUF file, whose architecture llama with experts is Mixtral's."""
    if architecture == "llama" and has_experts:
        return row_named("MixtralForCausalLM")
    llama = row_named("LlamaForCausalLM")  # the layers of a draft head
    return next((row for row in rows() if row.gguf == architecture), llama)


def check_architecture(path: Path) -> None:
    """Check that a checkpoint's architecture is served, by its header alone.

    Raises: ValueError for another one, or a missing or broken header.
    """
    if is_gguf(path):
        name = load_part("reader", "gguf header")(path).metadata.get("general.architecture")
        if name not in (*gguf_names(), *HEADS):  # the loader names a head's own remedy
            raise ValueError(f"{path}: {gguf_refusal(name)}")
        return
    raw = read_json(path / "config.json")
    held = raw.get("architectures")
    if type(held) is not list or not held:
        return
    text = text_part(raw)
    if row_of(text["architectures"], text.get("model_type")) is None:
        raise ValueError(f"{path}: {refusal(held[0])}")


def gguf_refusal(name: object) -> str:
    """Return the line about a GGUF file of an architecture that nobody has described."""
    known = ", ".join(gguf_names())
    return f"the architecture {name} is not supported; supported are {known}; {_page()}"


def _page() -> str:
    """Return where others are: in models/, if that is missing; else a page tells how to add one."""
    return PAGE if "models" in present() else "others are in the folder models/; restore it"


def refusal(name: str) -> str:
    """Return the line about an architecture that nobody has described."""
    return f"architecture {name} is not supported; supported are {', '.join(names())}; {_page()}"
