"""Commands in the pages: the program of each reads it by its own parser, and nothing runs.

A page may write a path or a name as a word in capitals (DIR, HEAD, FILE.gguf); only values that a
parser checks have to be real. Lines that continue, variables of the same page (`$train --steps 9`),
the first round of a loop and several commands in one line are read as a shell would.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import run.parsing
import run.quantize
from helpers import FOLDERS as SOURCES
from run.options import ROOT, GenerateConfig
from run.start import read_command
from scripts.bench.cases import is_peer
from scripts.bench.methods import Setting, method_config

CODE = (".py", ".sh", ".cpp", ".h")
FOLDERS = ("benchmarks", "data", "docs", "heads", "scripts", "tests")
# an option may name files that a page's reader has and this checkout has not
NO_FILE = re.compile(r"no such (file|directory)|there is no directory|cannot read")
WORKED = {"echo"}  # values that exist after the worked changes of docs/CONTRIBUTING.md


class Parsed(Exception):  # noqa: N818
    """Ends a program once its command line is read; holds the options."""


class Command(NamedTuple):
    """A command of a page. `str` of it names the test."""

    page: str
    variables: tuple[str, ...]  # set before it
    words: tuple[str, ...]  # the program's path in the project, then its arguments

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *(file for each in FOLDERS for file in (ROOT / each).rglob("*.md"))]


def code() -> list[Path]:
    folders = [file for each in (*SOURCES, "tests") for file in (ROOT / each).rglob("*")]
    return [file for file in (*ROOT.glob("*.py"), *folders) if file.suffix in CODE]


# -------------------------------------------------------------------------------- reading the pages

BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")


def snippets(text: str) -> Iterator[list[str]]:
    """Yield the lines of every code block, and every inline code as one line."""
    for kind, block in BLOCK.findall(text):
        if kind != "diff":
            joined = re.sub(r"\\\n\s*", " ", block)
            yield [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    for span in SPAN.findall(BLOCK.sub("", text)):
        yield [" ".join(span.split())]


def shell_commands(lines: list[str], values: dict[str, str]) -> Iterator[list[str]]:
    """Yield the words of every command.

    values: of the page's variables, which take their places. Writes: `values`.
    """
    for line in lines:
        values |= re.findall(r"\bfor (\w+) in (\S+)", line)
        assigned = re.fullmatch(r"(\w+)=(\"[^\"]*\"|\S+)", line)
        for name, value in values.items():
            line = re.sub(rf"\${name}\b", value, line)
        if assigned:
            values[assigned[1]] = line.partition("=")[2].strip('"')
        elif re.search(r"\bpython3?\b|\w\.py\b|\btorchrun\b|\.sh\b", line):
            reader = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            reader.whitespace_split = True
            words: list[str] = []
            for word in [*reader, ";"]:
                if set(word) <= set(";&|"):
                    yield words
                    words = []
                elif word not in ("do", "done"):
                    words.append(word)


def program_of(words: list[str]) -> int:
    """Return the place of the program's file in a command of ours; -1 in other commands."""
    if words and words[0] in ("torchrun", "python", "python3", "bash"):
        files = [place for place, word in enumerate(words) if re.search(r"\w\.(py|sh)$", word)]
        return files[0] if files else -1
    if len(words) > 1 and re.fullmatch(r"[\w/]+\.py", words[0]):
        return 0  # `measure.py speed --report FILE` in a sentence
    return -1


def commands() -> list[Command]:
    """Return every command of the pages that runs a file of this project."""
    short = {file.name: file.relative_to(ROOT) for file in code()}
    found = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        values: dict[str, str] = {}
        for lines in snippets(page.read_text(encoding="utf-8")):
            for words in shell_commands(lines, values):
                variables = []
                while words and re.match(r"\w+=", words[0]):
                    variables.append(words.pop(0).partition("=")[0])
                place = program_of(words)
                if place < 0:
                    continue
                program = words[place]
                if "/" not in program and not (ROOT / program).is_file():
                    program = str(short.get(program, program))
                if not WORKED & set(words):
                    found.append(Command(name, tuple(variables), (program, *words[place + 1 :])))
    return sorted(set(found))


# -------------------------------------------------------------------------- the programs' own parsers


def module_of(program: str) -> ModuleType:
    return importlib.import_module(program.removesuffix(".py").replace("/", "."))


def options_of(program: str, argv: list[str], patch: pytest.MonkeyPatch) -> Any:
    """Return the options that a program reads from a command line. It ends there."""
    read = run.parsing.parse_given

    def stop(*values: Any) -> None:
        raise Parsed(values[0])

    if program == "generate.py":
        patch.setattr(GenerateConfig, "check", stop)
        with pytest.raises(Parsed) as parsed:
            read_command(argv)
        patch.undo()
    else:
        module = run.quantize if program == "quantize.py" else module_of(program)
        for reader in [run.parsing, *sys.modules.values()]:  # which have it by its own name
            if getattr(reader, "parse_given", None) is read:
                patch.setattr(reader, "parse_given", lambda *values: stop(read(*values)[0]))
        patch.setattr(sys, "argv", [program, *argv])
        with pytest.raises(Parsed) as parsed:
            module.main()
        patch.undo()
    return parsed.value.args[0]


def check_methods(options: Any) -> None:
    """Check the methods of measure.py speed, which hold options of generate.py."""
    temperatures = getattr(options, "temperatures", "0").split(",")
    setting = Setting("none", 1.0 if temperatures[-1] == "T" else float(temperatures[-1]), 1)
    for method in options.methods.split(","):
        if method != "all" and not is_peer(method):
            check_files_aside(lambda method=method: method_config(method, setting, options))


def check_files_aside(check: Any) -> None:
    """Check values, but for files that this checkout has not."""
    try:
        check()
    except ValueError as error:
        assert NO_FILE.search(str(error)), error


def check_command(command: Command, patch: pytest.MonkeyPatch) -> None:
    program, *argv = command.words
    assert (ROOT / program).is_file(), program
    if program.endswith(".py") and not program.startswith("tests/c"):  # by pytest
        options = options_of(program, argv, patch)
        if program == "generate.py":
            check_files_aside(options.check)
        if hasattr(options, "methods"):
            check_methods(options)


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_command_of_a_page_can_be_typed(command, monkeypatch, capsys):
    try:
        check_command(command, monkeypatch)
    except SystemExit as stop:
        assert stop.code == 0, capsys.readouterr().err  # 0: --help


def test_pages_have_commands():
    """The search for them finds what it is to find, so that the test above is not empty."""
    found = {command.words[0] for command in commands()}
    assert {"generate.py", "quantize.py", "scripts/measure.py", "scripts/serve.py"} <= found
