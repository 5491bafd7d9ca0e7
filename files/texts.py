"""The text side of a checkpoint: its tokenizer, and the text of its chat template, if it has one.

Not here: templates (files/chat.py), which are loaded where there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from files.io import is_gguf, read_text
from files.tokenizer import Tokenizer, load_tokenizer, optional_json
from options import load_part

NO_TEMPLATE = "none"  # of --chat: texts go on as they are, without a template


def template_text(path: Path, name: str = "default") -> str | None:
    """Read the Jinja template of a checkpoint; None: it has none.

    name: of several, in a directory of their own or a list; tool_use is for tools
    Raises: ValueError when it cannot be read.
    """
    only = name == "default"
    if is_gguf(path):
        return load_part("reader", "gguf template")(path, "" if only else name)
    jinja = path / "chat_template.jinja"
    more = path / "additional_chat_templates"
    wanted = jinja if only else more / f"{name}.jinja"
    try:
        if wanted.is_file():
            return read_text(wanted)
    except ValueError as error:
        raise load_part("reader", "chat").refusal(
            f"{path}: its chat template", f"cannot be read ({error})"
        ) from None
    if not only and (jinja.is_file() or more.is_dir()):
        return None  # the files are all there is, as in transformers
    template = optional_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # of {name, template}
        named = {
            each.get("name"): each.get("template") for each in template if isinstance(each, dict)
        }
        template = named.get(name, template if only else None)
    elif not only:
        template = None
    if template is not None and not isinstance(template, str):
        raise load_part("reader", "chat").refusal(
            f"{path}: its chat template",
            "is neither a text nor a list of named ones with a default",
        )
    return template


class TextFiles(NamedTuple):
    """The text side of a checkpoint."""

    tokenizer: Tokenizer | None  # None: only ids go in and out
    template: Any  # a `files.jinja.ChatTemplate`; None: texts go on as they are


def template_name(path: Path, config: Any) -> str | None:
    """Return the name of the chat template, "" for the checkpoint's own; None: texts go on.

    By default it is the checkpoint's own, where it has one. Token ids are no chat.
    Raises: ValueError for a template that cannot be read, and for --system without one.
    """
    if config.chat == NO_TEMPLATE or config.prompt_ids is not None:
        return None
    if config.chat is not None:
        return config.chat
    if template_text(path) is not None:
        return ""
    if config.system is not None:
        names = ", ".join(load_part("reader", "chat").FIXED)
        raise ValueError(
            f"--system belongs to a chat template, and {path} has none; "
            f"add --chat NAME with one of {names}"
        )
    return None


def read_text_files(path: Path, config: Any) -> TextFiles:
    """Read the tokenizer of a checkpoint, and the chat template that its texts are put into.

    Raises: ValueError for a missing or broken one that is needed.
    """
    name = template_name(path, config)
    tokenizer = load_tokenizer(path, config.prompt_ids is None, name is not None)
    template = None
    if name is not None:
        template = load_part("reader", "chat").chat_template(
            path, tokenizer, name, config.system, config.has_schema
        )
        template.stop_ids(tokenizer)  # refuses one that cannot work with it
    return TextFiles(tokenizer, template)
