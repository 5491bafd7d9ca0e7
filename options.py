"""The options of the flat command, the folders that are present, and how mistakes are told.

1. The door. A folder says in `ADDS`, a table in its `__init__.py`, what it adds: for each kind (a
   backend, an architecture, a drafter, a program) names, and for each name the module that has it.
   `added` asks every folder once. `load_part` imports what a name stands for. No other place
   imports what may be missing, and what a command does not use is not imported.
2. An option is a field of a dataclass: its default, its help text, its range. `Options` are those
   of the flat files; the folder run/ extends them.
3. A mistake of a user is a ValueError with the rule, the value and the remedy.

No torch is imported, so that a mistake is reported before it is.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

PREFIX = __name__.removesuffix("options")  # "" in a clone, "gpt_eagle." where installed
FOLDERS = {  # a folder -> the kinds of parts that nobody else adds
    "backends": ("backend", "functions", "machine"),
    "models": ("architecture", "step", "config"),
    "files": ("reader",),
    "drafts": ("drafters", "extension", "acceptance"),
    "run": ("program", "command", "ranks"),
    "server": ("server",),
}
WITH_OPTIONS = ("files", "run", "drafts")  # whose options the flat command lacks
NOTES = logging.getLogger("gpt_eagle")
ROOT = Path(__file__).resolve().parent
DEMO = str(ROOT / "checkpoints" / "demo")
FORMAT_NAMES = ("int8", "int4")  # of quantized weights (quantize.py)
MOST = 2**31 - 1  # the default upper bound of a number: sums of such numbers fit 64 bits


# ---------------------------------------------------------------------- what the folders add


def cache_folder() -> Path:
    """Return the folder of what can be made or fetched again. It may not exist.

    A user without a home directory has it in the system's folder of temporary files.
    """
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if parent.startswith("~"):
        return Path(gettempdir(), f"gpt-eagle-{os.getuid()}")
    return Path(parent, "gpt-eagle")


def private_folder(*parts: str) -> Path:
    """Make `cache_folder`, or a folder in it, which the user alone may write, whatever the umask.

    Raises: OSError.
    """
    folder = cache_folder()
    for name in ("", *parts):
        folder = folder / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a parent has the umask's mode
    return folder


def below_root(name: str) -> str:
    """Return the whole name of a module that is named as in the tree, such as `models.qwen`."""
    return PREFIX + name


def load_module(name: str) -> ModuleType:
    """Import a module that is named as in the tree."""
    return import_module(below_root(name))


@cache
def present() -> tuple[str, ...]:
    """Return the folders that are here, and that have here what they need."""
    here = [name for name in FOLDERS if find_spec(below_root(name)) is not None]
    return tuple(name for name in here if {*load_module(name).NEEDS} <= {*here})


@cache
def added() -> dict[str, dict[str, str]]:
    """Return kind -> name -> "module" or "module:attribute", of all folders that are present."""
    found: dict[str, dict[str, str]] = {}
    for folder in present():
        for kind, rows in load_module(folder).ADDS.items():
            found.setdefault(kind, {}).update(rows)
    return found


def has_part(kind: str, name: str) -> bool:
    """Return whether a folder adds a part."""
    return name in added().get(kind, {})


def load_part(kind: str, name: str) -> Any:
    """Import a part. Raises: ValueError where no folder that is present adds it."""
    home = next((folder for folder, kinds in FOLDERS.items() if kind in kinds), None)
    fault = f"the {kind} {name} is in the folder {home}/, which is not here; restore it"
    require(has_part(kind, name), fault)
    module, _, attribute = added()[kind][name].partition(":")
    part = load_module(module)
    return getattr(part, attribute) if attribute else part


def part_or(kind: str, name: str, otherwise: Any) -> Any:
    """Return a part, or `otherwise` where no folder that is present adds it."""
    return load_part(kind, name) if has_part(kind, name) else otherwise


def run_program(name: str) -> None:
    """Run the program of a folder, where one has it, to its end; else return."""
    if has_part("program", name):
        load_part("program", name)()
        sys.exit()


# ---------------------------------------------------------------------- options


# what an option may say besides its help and choices; alias and short: other spellings of its flag
TRAITS = {"least": None, "above": None, "most": MOST, "flag": True, "alias": "", "short": ""}
SWITCHES = ("bool", "bool | None")  # the types of an option without a value; None: by default
NUMBERS = {"int": int, "float": float}


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, **traits: Any) -> Any:
    """Make a dataclass field that is also a flag. traits: some of `TRAITS`, or of a program's."""
    return field(default=default, metadata=TRAITS | {"help": help, "choices": choices} | traits)


class Sampling(NamedTuple):
    """The parameters that turn the target's logits into a distribution (sampling.py)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # drop tokens below this share of the likeliest one


@dataclass(frozen=True)
class Options:
    """Options of the flat command. Units and effects are in the help texts."""

    checkpoint: str = option(DEMO, "the target: a Hugging Face directory in safetensors", short="m")
    head: str = option(
        "", "a trained head, a directory; default: CHECKPOINT-eagle, if it exists", alias="eagle"
    )
    draft: str = option("", "default: eagle, if there is a head", ("none", "eagle"))
    tree: str = option(
        "",
        "chain:3, dynamic:6,8,32 (levels, children of a node, nodes in all) or static; default: "
        "dynamic on CUDA, elsewhere a chain",
    )
    quant: str = option("none", "round the target's weights while loading", ("none", *FORMAT_NAMES))
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    dtype: str = option(
        "",
        "number type of weights and activations; default: the checkpoint's",
        ("float32", "bfloat16", "float16"),
    )
    compile: bool | None = option(
        None,
        "on CUDA, compile the steps by torch.compile before they are captured: 4 to 11 % faster, "
        "but seconds to minutes later; on a CPU nothing changes, as C++ operators run anyway",
    )
    plain: bool = option(
        False,
        "run PyTorch in place of our operators and captured graphs, from now on in this process: "
        "slow, and what one edits in model.py and reference.py is what runs",
    )
    prompt: str | None = option(None, "text to continue", short="p")
    prompt_ids: str | None = option(None, "token ids to continue, as 5,17,3; needs no tokenizer")
    max_new_tokens: int = option(128, "tokens to generate", least=1, short="n")
    ignore_eos: bool = option(False, "go on after an end-of-sequence token")
    temperature: float = option(0.0, "0 is greedy", least=0)
    top_k: int = option(0, "sample among the k likeliest tokens; 0: all", least=0)
    top_p: float = option(
        1.0,
        "sample among the likeliest tokens whose probabilities add up to this",
        above=0,
        most=1,
    )
    seed: int = option(0, "of the sampling noise", least=0, most=2**64 - 1)
    compare: bool = option(
        False, "also decode without drafting, check that the tokens agree, print the speedup"
    )
    json: str = option("", "write results to this file; - is standard output")

    batch_size = 1  # sequences that are decoded together: run/ has an option

    @property
    def sampling(self) -> Sampling:
        """The parameters of the target's distribution."""
        return Sampling(self.temperature, self.top_k, self.top_p)


class Parser(argparse.ArgumentParser):
    """A parser that reports an error on one line, which a missing folder may explain."""

    def error(self, message: str) -> NoReturn:
        gone = [f"{name}/" for name in WITH_OPTIONS if name not in present()]
        if gone and message.startswith(("unrecognized", "argument --draft", "argument --tree")):
            message += f"; more are in the folder {', '.join(gone)}: restore what is missing"
        fail(self.prog, f"{message}; see --help")


def add_flag(parser: Any, f: Field, **further: Any) -> None:
    """Add an option to a parser. further: arguments of argparse that replace those of its type"""
    default = "" if f.default in ("", None, False, ()) else f" (default: {f.default})"
    given: dict[str, Any] = {"help": (f.metadata["help"] + default).replace("%", "%%")}
    if f.type in SWITCHES:
        given["action"] = "store_true"
    else:
        given |= {"type": NUMBERS.get(f.type, str), "choices": f.metadata["choices"]}
    others = [f"--{f.metadata['alias']}", f"-{f.metadata['short']}"]
    flags = [f"--{f.name}", *(flag for flag in others if flag.strip("-"))]
    parser.add_argument(*flags, dest=f.name, **given | further)


def check_number(name: str, f: Field, value: Any) -> None:
    """Check a number; a default may lie below its range, as 0 for automatic. name: in the message

    Raises: ValueError for another kind of value, or one out of its range.
    """
    least, above, most = (f.metadata[bound] for bound in ("least", "above", "most"))
    kinds = (Integral, "whole number") if f.type == "int" else (Real, "number")
    is_number = isinstance(value, kinds[0]) and not isinstance(value, bool) and value == value
    require(is_number, f"{name} must be a {kinds[1]}; it is {value!r}")
    if value != f.default:
        in_range = above is None or above < value <= most
        require(in_range, f"{name} must be in ({above}, {most}]; it is {value}")
        require(least is None or value >= least, f"{name} must be at least {least}; it is {value}")
        require(value <= most, f"{name} must be at most {most}; it is {value}")


def read_options(argv: list[str] | None = None) -> Options:
    """Read the command line. Exits with status 2. Raises: ValueError for a number out of range."""
    about = "Generate text, exactly, with draft trees."
    parser = Parser(prog="generate.py", description=about, argument_default=argparse.SUPPRESS)
    for f in fields(Options):
        add_flag(parser, f)
    given = vars(parser.parse_args(argv))
    for f in fields(Options):
        if f.name in given and f.type in NUMBERS:
            check_number(f"--{f.name}", f, given[f.name])
    return Options(**given)


def parse_prompt_ids(text: str) -> list[int]:
    """Read the token ids of `--prompt_ids`. Raises: ValueError for another text."""
    parts = text.replace(" ", "").split(",")
    fault = f"--prompt_ids must be numbers like 5,17,3; it is {text!r}"
    require(all(re.fullmatch(r"-?\d+", part) for part in parts), fault)
    return [int(part) for part in parts]


# ---------------------------------------------------------------------- notes and mistakes


def require(holds: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)


def log_note(text: str, level: int = logging.WARNING) -> None:
    """Log a line that tells a person what was done. A command prints it."""
    NOTES.log(level, text, stacklevel=2)


def one_line(message: Any, most: int = 1000) -> str:
    """Return an error's message on one printable line.

    most: characters; the middle of a longer message is left out
    """
    text = str(message)
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split()) or type(message).__name__


def fail(program: str, message: str) -> NoReturn:
    """End the program on a user's mistake: one line, exit status 2."""
    print(f"{'gpt-eagle' if PREFIX else program}: {one_line(message)}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Report a user's mistake inside as one line and exit status 2."""
    try:
        yield
    except ValueError as error:
        fail(program, str(error))
    except OSError as error:
        if error.filename is None:
            raise
        fail(program, f"cannot use {error.filename}: {error.strerror}; name another file")
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports it
