"""The program generate.py: the command, the tokenizer and the chat template; then torch.

`import torch` takes seconds. `read_command` reads the command line and the prompts before it, so
that --help and mistakes are answered at once. `with_text` reads a checkpoint's tokenizer and chat
template, whose mistakes are answered before it too. `main` then goes on in run/generate.py.
Not here: the weights (run/load.py).
"""

from __future__ import annotations

import gc
import importlib.util
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from files.fetch import with_files
from files.head_kinds import head_kind
from files.io import is_gguf, is_terminal, read_json
from files.rank import is_alone, of_ranks
from files.registry import check_architecture
from options import load_part, require
from run.options import GenerateConfig
from run.parsing import one_line_errors, parse_given
from run.prompts import Conversation, read_grammar, read_prompts

if TYPE_CHECKING:  # its imports take time that --help has not
    from files.texts import TextFiles
    from run.keyboard import Keyboard


class Command(NamedTuple):
    """Options, the prompts that they name, and the text side of the checkpoint, once it is read."""

    config: GenerateConfig
    prompts: list[Conversation]
    text: TextFiles | None = None
    to_end: bool = False  # no length was asked for: a chat's answers go on to their end
    keys: Keyboard | None = None  # of --interactive on a terminal


def main() -> None:
    """Run generate.py: answer mistakes, then import torch, then decode.

    torchrun's ranks answer mistakes together, behind the imports (run/ranks.py).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported
    gc.disable()  # a collection would visit torch's 180,000 objects, which stay
    command = with_text(read_command()) if is_alone() else None
    decode = load_part("command", "decode")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # later collections, and those at the end, leave the imports' objects out
    gc.enable()
    try:
        decode(command=command)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_command(argv: list[str] | None = None) -> Command:
    """Read the command line and the prompts. Exit with status 2 on a mistake."""
    about = "Generate text, exactly, with draft trees."
    config, given = parse_given(GenerateConfig, "generate.py", about, argv)
    with one_line_errors("generate.py"):
        of_ranks("check", GenerateConfig.check)(config)
        read_grammar(config)
        prompts = [] if config.interactive else read_prompts(config)
    if config.interactive and "seed" not in given:  # a temperature may come in the chat
        config = replace(config, seed=random.getrandbits(31))
    to_end = not config.prompt_file and "max_new_tokens" not in given
    keys = None
    if config.interactive and sys.stdin.isatty() and is_terminal(sys.stdout):
        with one_line_errors("generate.py"):  # prompt_toolkit may be missing
            keys = load_part("command", "keys")()
        keys.hold()
    return Command(config, prompts, to_end=to_end, keys=keys)


def with_text(command: Command) -> Command:
    """Read the text side of the checkpoint. Exit with status 2 on a mistake."""
    config = command.config
    with one_line_errors("generate.py"):
        config = with_checked_files(config)
        text = load_part("reader", "texts")(Path(config.checkpoint), config)
        if importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError(name="torch")
        return Command(config, command.prompts, text, command.to_end, command.keys)


def with_checked_files(config: GenerateConfig) -> GenerateConfig:
    """Return options that name files where they name models, as far as headers tell that they fit.

    Raises: ValueError, also for a missing or broken header.
    """
    config = with_files(config)
    path = Path(config.checkpoint)
    check_architecture(path)
    check_head_width(path, config)
    return config


def check_head_width(target: Path, config: GenerateConfig) -> None:
    """Check that an EAGLE head in a directory is of the target's width, where both say theirs.

    Raises: ValueError for another width, and for a broken header.
    """
    head = Path(config.head)
    in_directory = config.head and not is_gguf(head)
    if not in_directory or config.draft not in ("", "eagle", "eagle+ngram"):
        return
    if head_kind(head) != "eagle":
        return
    of_head = read_json(head / "config.json")
    name = "target_hidden_size" if of_head.get("target_hidden_size") else "hidden_size"
    own = of_head.get(name)
    if is_gguf(target):
        keys = load_part("reader", "gguf header")(target).metadata
        width = keys.get(f"{keys.get('general.architecture')}.embedding_length")
    else:
        width = read_json(target / "config.json").get("hidden_size")
    fault = f"{head}: {name} is {own}, the target's is {width}; use the head made for this target"
    require(own == width or type(own) is not int or type(width) is not int, fault)
