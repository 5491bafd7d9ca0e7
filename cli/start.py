"""The first part of a start: the command, the tokenizer and the chat template, without torch.

`import torch` takes seconds. `read_command` reads the command line and the prompts before it, so
that --help and mistakes are answered at once. `with_text` reads a checkpoint's tokenizer and chat
template, whose mistakes are answered before it too.
Not here: the import (generate.py), the weights (load.py).
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from base.parsing import one_line_errors, parse_given
from cli.prompts import Conversation, read_grammar, read_prompts
from options import GenerateConfig

if TYPE_CHECKING:  # its imports take time that --help has not
    from cli.terminal import TypedAhead
    from hf.chat import TextFiles


class Command(NamedTuple):
    """Options, the prompts that they name, and the text side of the checkpoint, once it is read."""

    config: GenerateConfig
    prompts: list[Conversation]
    text: TextFiles | None = None
    to_end: bool = False  # no length was asked for: a chat's answers go on to their end
    keys: TypedAhead | None = None  # of --interactive


def read_command(argv: list[str] | None = None, check: Callable = GenerateConfig.check) -> Command:
    """Read the command line and the prompts. Exit with status 2 on a mistake."""
    about = "Generate text, exactly, with draft trees."
    config, given = parse_given(GenerateConfig, "generate.py", about, argv)
    with one_line_errors("generate.py"):
        check(config)
        read_grammar(config)
        prompts = [] if config.interactive else read_prompts(config)
    if config.interactive and config.temperature > 0 and "seed" not in given:
        config = replace(config, seed=random.getrandbits(31))
    to_end = not config.prompt_file and "max_new_tokens" not in given
    keys = None
    if config.interactive:
        from cli.terminal import TypedAhead

        keys = TypedAhead()
        keys.hold()
    return Command(config, prompts, to_end=to_end, keys=keys)


def with_text(command: Command) -> Command:
    """Read the text side of the checkpoint. Exit with status 2 on a mistake."""
    config = command.config
    with one_line_errors("generate.py"):
        from hf.chat import read_text_files
        from hf.fetch import fetched
        from models.registry import check_architecture

        path = fetched(config.checkpoint)
        check_architecture(path)
        text = read_text_files(path, config)
        if importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError(name="torch")
        return command._replace(text=text)
