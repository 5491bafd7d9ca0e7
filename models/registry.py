"""The architectures that are served: a row names the file of this folder that describes one.

A row costs nothing until its file is asked for, so that an unknown architecture is refused before
torch is imported. docs/CONTRIBUTING.md, "A model", says how to add one.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from files.fields import text_part
from files.gguf_header import read_header
from files.head_kinds import ARCHITECTURES as HEADS
from files.io import is_gguf, read_json
from options import load_module

PAGE = 'docs/CONTRIBUTING.md, "A model", says how to add one'


class Row(NamedTuple):
    """One architecture."""

    module: str  # its file in this folder
    name: str  # in `architectures` of config.json, and of the config that a GGUF file becomes
    model_type: str  # of config.json
    gguf: str = ""  # `general.architecture` of GGUF files; "": it has none of its own

    def load(self) -> ModuleType:
        """Import the file. It has `read_config` and `GGUF`."""
        return load_module(f"models.{self.module}")


ROWS = (
    Row("llama", "LlamaForCausalLM", "llama", "llama"),
    Row("llama", "MistralForCausalLM", "mistral"),
    Row("qwen", "Qwen2ForCausalLM", "qwen2", "qwen2"),
    Row("qwen", "Qwen2MoeForCausalLM", "qwen2_moe", "qwen2moe"),
    Row("qwen", "Qwen3ForCausalLM", "qwen3", "qwen3"),
    Row("qwen", "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe"),
    Row("mimo", "MiMoForCausalLM", "mimo"),
    Row("mixtral", "MixtralForCausalLM", "mixtral"),
    Row("gemma3", "Gemma3ForCausalLM", "gemma3_text", "gemma3"),
    Row("gemma4", "Gemma4ForCausalLM", "gemma4_text", "gemma4"),
    Row("qwen3_5", "Qwen3_5ForCausalLM", "qwen3_5_text", "qwen35"),
    Row("qwen3_5", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "qwen35moe"),
    Row("qwen3_next", "Qwen3NextForCausalLM", "qwen3_next", "qwen3next"),
    Row("lfm2", "Lfm2ForCausalLM", "lfm2", "lfm2"),
    Row("lfm2", "Lfm2MoeForCausalLM", "lfm2_moe", "lfm2moe"),
    Row("glm4", "Glm4ForCausalLM", "glm4", "glm4"),
    Row("glm4_moe", "Glm4MoeForCausalLM", "glm4_moe", "glm4moe"),
    Row("gpt_oss", "GptOssForCausalLM", "gpt_oss", "gpt-oss"),
)
NAMES = tuple(row.name for row in ROWS)
GGUF_NAMES = tuple(row.gguf for row in ROWS if row.gguf)


def row_of(architectures: list[str] | None, model_type: str) -> Row | None:
    """Find the row of a config.json by its two keys; None: the architecture is not served.

    A config.json may name none, or that of the layers alone.
    """
    of_type = next((row for row in ROWS if row.model_type == model_type), None)
    name = architectures[0] if architectures else None
    if of_type and name in (None, of_type.name.replace("ForCausalLM", "Model")):
        return of_type
    return next((row for row in ROWS if row.name == name), None)


def row_named(name: str) -> Row:
    """Return the row of an architecture that is served."""
    return next(row for row in ROWS if row.name == name)


def row_of_gguf(architecture: str, has_experts: bool) -> Row:
    """Return the row of a GGUF file, whose architecture llama with experts is Mixtral's."""
    if architecture == "llama" and has_experts:
        return row_named("MixtralForCausalLM")
    llama = row_named("LlamaForCausalLM")  # the layers of a draft head
    return next((row for row in ROWS if row.gguf == architecture), llama)


def check_architecture(path: Path) -> None:
    """Check that a checkpoint's architecture is served, by its header alone.

    Raises: ValueError for another one, or a missing or broken header.
    """
    if is_gguf(path):
        name = read_header(path).metadata.get("general.architecture")
        if name not in (*GGUF_NAMES, *HEADS):  # the loader names a head's own remedy
            raise ValueError(f"{path}: {gguf_refusal(name)}")
        return
    raw = read_json(path / "config.json")
    names = raw.get("architectures")
    if type(names) is not list or not names:
        return
    text = text_part(raw)
    if row_of(text["architectures"], text.get("model_type")) is None:
        raise ValueError(f"{path}: {refusal(names[0])}")


def gguf_refusal(name: object) -> str:
    """Return the line about a GGUF file of an architecture that nobody has described."""
    known = ", ".join(GGUF_NAMES)
    return f"the architecture {name} is not supported; supported are {known}; {PAGE}"


def refusal(name: str) -> str:
    """Return the line about an architecture that nobody has described."""
    return f"architecture {name} is not supported; supported are {', '.join(NAMES)}; {PAGE}"
