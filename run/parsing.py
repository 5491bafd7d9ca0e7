"""The command line: a dataclass field is an option with a flag, a help text and a range.

`parse` reads a command line into a dataclass of options, for generate.py and scripts/.
`one_line_errors` reports a user's mistake as one line and exit status 2; `show_notes` prints notes.
This module imports no torch, so that a mistake is reported before torch is imported.
Not here: the options of generate.py (run/options.py).
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import Field, fields
from typing import IO, Any

from options import (
    MOST,
    NOTES,
    NUMBERS,
    PREFIX,
    SWITCHES,
    Parser,
    add_flag,
    check_number,
    fail,
    require,
)
from options import one_line_errors as mistakes_in_one_line
from options import option as option
from run.methods import OUTSIDE

VERSION = "0.1.0"  # pyproject.toml reads it here
OF_GPT_FAST = {
    "--speculate_k": "--draft model --draft_checkpoint DIR --tree chain:K",
    "--mode": "--quant",
}
SEVERAL = "tuple[str, ...]"  # the type of an option that may be given several times
# of requirements.txt
PACKAGES = (
    "torch", "sentencepiece", "safetensors", "numpy", "jinja2", "huggingface_hub", "filelock",
    "prompt_toolkit",
)  # fmt: skip


def processors() -> int:
    """Return the number of processors that this process may use, at most as many threads help."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or MOST


def flag_of(f: Field) -> str:
    """Return an option's name as messages have it: what a user writes."""
    usual = f"--{f.name}" if f.metadata["flag"] else f.name
    return f.metadata.get("spelled", usual)


def by_names(options: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return values by the fields' names, where some are given by an alias.

    A path becomes a text, and one text or a list of them a tuple where a field takes several. A
    text that stands for several options becomes these.

    Raises: ValueError for a field that is given twice, and for one that is not there.
    """
    named = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in values.items()}
    for f in fields(options):
        alias = f.metadata["alias"]
        if alias and alias in named:
            require(f.name not in named, f"{alias} is another name of {f.name}; give one of them")
            named[f.name] = named.pop(alias)
        if f.type == SEVERAL and f.name in named:
            value = named[f.name]
            if isinstance(value, (str, list)):
                named[f.name] = (value,) if isinstance(value, str) else tuple(value)
        if "parts" in f.metadata and isinstance(named.get(f.name), str):
            parts = f.metadata["parts"](named.pop(f.name))
            for name in parts.keys() & named.keys():
                raise ValueError(f"--{f.name} has {name} already; give it once")
            named |= parts
        if isinstance(named.get(f.name), dict):  # as JSON, which a command line has
            named[f.name] = json.dumps(named[f.name]) if named[f.name] else ""
    known = [f.name for f in fields(options)]
    for name in named.keys() - set(known):
        raise ValueError(f"there is no option {name}{did_you_mean(name, known)}")
    return named


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the closest of the known names; "" where none is close."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def check_values(options: Any) -> None:
    """Check each value alone: its kind, that a name is among its choices, a number in its range.

    Raises: ValueError.
    """
    for f in fields(options):
        value = getattr(options, f.name)
        choices = f.metadata["choices"]
        name = flag_of(f)
        if f.type in NUMBERS:
            check_number(name, f, value)
        elif f.type in SWITCHES:
            is_switch = isinstance(value, bool) or value is f.default
            require(is_switch, f"{name} must be True or False; it is {value!r}")
        elif f.type == SEVERAL:
            texts = isinstance(value, tuple) and all(isinstance(t, str) and t for t in value)
            require(texts, f"{name} must be texts that are not empty; it is {value!r}")
            most = f.metadata["most"]
            require(len(value) <= most, f"{name} may have {most} texts, not {len(value)}")
        elif value != f.default:
            require(isinstance(value, str), f"{name} must be a text; it is {value!r}")
            known = f"{name} must be one of {', '.join(choices or ())}; it is {value!r}"
            is_open = not choices or OUTSIDE in choices
            require(is_open or value in choices, known)


class _Parser(Parser):
    """A parser with hints and with a help that may fail."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all words; a hint goes with a flag that is not there."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = did_you_mean(flag, self._option_string_actions)
            if flag in OF_GPT_FAST:
                hint = f"; here it is {OF_GPT_FAST[flag]}"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known

    def print_help(self, file: IO[str] | None = None) -> None:
        """Print the help; argparse keeps quiet where the output is full."""
        with one_line_errors(self.prog):
            print(self.format_help(), end="", file=file)


def parse(
    options: type,
    program: str,
    description: str,
    argv: list[str] | None = None,
) -> Any:
    """Read the command line into a dataclass with fields made by `option`, as `parse_given`."""
    return parse_given(options, program, description, argv)[0]


def parse_given(
    options: type,
    program: str,
    description: str,
    argv: list[str] | None = None,
) -> tuple[Any, set[str]]:
    """Read the command line into a dataclass with fields made by `option`.

    A flag may have hyphens in the place of underscores. Exits with status 2 on a mistake.
    argv: default: that of the process, whose text is then UTF-8 in every locale
    Returns: the options; the names of those that were given.
    """
    show_notes()
    if argv is None:
        argv = _utf8_arguments()
    parser = _Parser(
        prog=program,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # so that the options that were given are known
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags = {f.name: f for f in fields(options) if f.metadata["flag"]}
    for title, names in getattr(options, "GROUPS", {}).items():
        group = parser.add_argument_group(title)
        for f in filter(None, (flags.pop(name, None) for name in names)):
            _add_argument(group, f)
    for f in flags.values():
        _add_argument(parser, f)
    if not any(f.name == "version" for f in fields(options)):
        parser.add_argument("--version", action="version", version=f"gpt-eagle {VERSION}")
    values = vars(parser.parse_args([_with_underscores(word) for word in argv]))
    with one_line_errors(program):
        given = by_names(options, values)
        for f in fields(options):
            if f.name in given and f.type in NUMBERS:
                check_number(flag_of(f), f, given[f.name])
        return options(**given), set(given)


def read_settings(options: type, texts: list[str]) -> dict[str, Any]:
    """Return the values of texts such as name=value, by the names of options.

    They come from `/set` in a chat, and from the methods of benchmarks. A value that is no number
    or truth value, where one is needed, stays a text for the checks.

    Raises: ValueError for a text without a value, and for a name that is not there.
    """
    known = {f.name: f for f in fields(options)}
    known |= {f.metadata["alias"]: f for f in known.values() if f.metadata["alias"]}
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        require(equals != "", f"an option is set by name=value, as seed=1; it is {text!r}")
        require(name in known, f"there is no option {name}{did_you_mean(name, known)}")
        kind = known[name].type
        if kind in SWITCHES:
            value = {"true": True, "false": False}.get(value.lower(), value)
        if kind in NUMBERS:
            with suppress(ValueError):
                value = NUMBERS[kind](value)
        values[name] = value
    return values


def _with_underscores(word: str) -> str:
    """Return a flag with underscores for hyphens; other words as they are."""
    flag, equals, value = word.partition("=")
    if re.fullmatch(r"--\w[\w-]*", flag) is None:
        return word
    return f"--{flag[2:].replace('-', '_')}{equals}{value}"


def _utf8_arguments() -> list[str]:
    """Return the process's arguments, decoded as UTF-8. Its streams become UTF-8 too.

    Bytes that are no UTF-8 go through, in arguments and in standard input alike.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None)  # None: of no stream, or of text in memory
        if encoding and encoding.lower() != "utf-8":
            stream.reconfigure(encoding="utf-8")
    if isinstance(sys.stdin, io.TextIOWrapper):
        with suppress(io.UnsupportedOperation):  # something was read already
            sys.stdin.reconfigure(errors="surrogateescape")
    return [os.fsencode(text).decode("utf-8", "surrogateescape") for text in sys.argv[1:]]


def _add_argument(parser: argparse._ActionsContainer, f: Field) -> None:
    if f.metadata.get("positional"):
        parser.add_argument(f.name, nargs="?", help=f.metadata["help"])  # as a flag it may miss
        return
    further: dict[str, Any] = {}
    # texts that others check
    if "parts" in f.metadata or OUTSIDE in (f.metadata["choices"] or ()):
        further = {"choices": None, "metavar": "|".join(f.metadata["choices"])}
    if f.type == SEVERAL:
        further = {"action": "append", "metavar": "TEXT"}
    if f.metadata.get("optional"):
        further = {"nargs": "?", "const": "", "metavar": "NAME"}
    add_flag(parser, f, **further)
    if f.metadata.get("bare"):  # it may stand without its flag, too
        parser.add_argument(f.name, nargs="?", help=argparse.SUPPRESS)


def _drop_output() -> None:
    """Let standard output lead nowhere, so that the rest of its buffer cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _PrintNotes(logging.Handler):
    """Prints notes to what is standard error at that moment, in the order of other lines."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr, flush=True)


def show_notes() -> None:
    """Let notes appear on standard error, as a command does; the logger's level still holds."""
    if not any(isinstance(handler, _PrintNotes) for handler in NOTES.handlers):
        NOTES.addHandler(_PrintNotes())
        NOTES.propagate = False
        NOTES.setLevel(NOTES.level or logging.INFO)


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Report a user's mistake inside as one line and exit status 2.

    Ctrl-C, a closed pipe and a full standard output end the program without a traceback.
    """
    try:
        with mistakes_in_one_line(program):
            yield
            sys.stdout.flush()  # at the end of the process a failure would be a traceback
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        _drop_output()
        sys.exit(141)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            _drop_output()
            fail(program, f"cannot write standard output: {error.strerror}; name a file or a pipe")
        raise
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which this module does not import
            raise
        # the bytes wanted, the device's, the free ones
        facts = ". ".join(str(error).split(". ")[:3])
        remedy = "lower --batch_size, --context or NODES of --tree, or use --quant int4"
        fail(program, f"{facts}; {remedy}")
    except ModuleNotFoundError as error:
        package = str(error.name).removeprefix(PREFIX).partition(".")[0]
        if package in PACKAGES:
            fail(program, f"{package} is not installed; run: pip install -r requirements.txt")
        if package != "drafts":
            raise
        fail(
            program,
            f"{error.name} is not here; restore the folder drafts/, "
            "or use --draft none or --tree dynamic",
        )
