"""The command line: a dataclass field is an option, a flag, a help text and a range.

`parse` turns a command line into a dataclass of options, here and in scripts/. `one_line_errors` turns a user's mistake
into one line and exit status 2. This module imports no torch, so that a mistake is answered before torch is there.
Not here: the options of generate.py (options.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any, NoReturn

from files import one_line

MOST = 2**31 - 1  # of any number, unless its option says otherwise: sums of them fit 64 bits


def option(
    default: Any, help: str, choices: tuple[str, ...] | None = None, needs: tuple[Any, ...] = (),
    least: int | None = None, most: int = MOST, flag: bool = True, **extra: Any,
) -> Any:  # fmt: skip
    """A dataclass field that is also a flag, unless `flag` is False. least, most: the range of a number."""
    metadata = {
        "help": help,
        "choices": choices,
        "needs": needs,
        "least": least,
        "most": most,
        "flag": flag,
        **extra,
    }
    return field(default=default, metadata=metadata)


def check_ranges(options: Any) -> None:
    """Check the numbers of a dataclass of options. Raises: ValueError for one that is out of its range."""
    for f in fields(options):
        value, least, most = getattr(options, f.name), f.metadata["least"], f.metadata["most"]
        if f.type in ("int", "float"):
            fits = isinstance(value, Integral if f.type == "int" else Real) and not isinstance(
                value, bool
            )
            require(
                fits,
                f"--{f.name} must be a {'whole ' if f.type == 'int' else ''}number; it is {value!r}",
            )
            require(
                least is None or value == f.default or value >= least,
                f"--{f.name} must be at least {least}; it is {value}",
            )
            require(value <= most, f"--{f.name} must be at most {most}; it is {value}")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, no usage block
        fail(self.prog, f"{message}; see --help")


def fail(program: str, message: str) -> NoReturn:
    """End the program on a user's mistake: one line, exit status 2."""
    print(f"{program}: {one_line(message)}", file=sys.stderr)
    sys.exit(2)


def parse(
    options: type,
    program: str,
    description: str,
    argv: list[str] | None = None,
    settings: bool = False,
) -> Any:
    """Read the command line into a dataclass whose fields are made by `option`. Exits with status 2 on a mistake.

    settings: take fields with `flag=False` too
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=program, description=description, allow_abbrev=False, formatter_class=raw)
    kinds = {"int": int, "float": float}
    for f in fields(options):
        assert f.default is not MISSING, f.name
        if not (f.metadata["flag"] or settings):
            continue
        shown = "" if f.default in ("", None, False) else f" (default: {f.default})"
        extra: dict[str, Any] = {
            "help": (f.metadata["help"] + shown).replace("%", "%%"),
            "default": f.default,
        }
        if f.type == "bool":
            extra["action"] = "store_true"
        else:
            extra |= {"type": kinds.get(str(f.type), str), "choices": f.metadata["choices"]}
        if f.metadata.get("optional"):
            extra |= {"nargs": "?", "const": "", "metavar": "NAME"}
        if f.metadata.get("positional"):  # may be left out, as every option
            extra |= {"nargs": "?"}
        parser.add_argument(f.name if f.metadata.get("positional") else f"--{f.name}", **extra)
    made = options(**vars(parser.parse_args(argv)))
    with one_line_errors(program):
        check_ranges(made)
    return made


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """A user's mistake inside becomes one line and exit status 2; Ctrl-C and a closed pipe become no traceback."""
    try:
        yield
    except ValueError as error:
        fail(program, str(error))
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.filename is None:
            raise
        fail(program, f"cannot use {error.filename}: {error.strerror}; name another file")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("extras"):
            raise
        fail(
            program,
            f"{error.name} is not here; restore the folder extras/, or use --draft none or --tree dynamic",
        )
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports it
