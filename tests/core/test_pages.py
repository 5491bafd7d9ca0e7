"""Commands in the pages: the program of each reads it by its own parser; those of README run, shortened.

A page may write a path or a name as a word in capitals (DIR, HEAD, FILE.gguf); only values that a
parser checks have to be real. Lines that continue, variables of the same page (`$train --steps 9`),
the first round of a loop and several commands in one line are read as a shell would.
"""

from __future__ import annotations

import importlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import run.generate
import run.load
import run.parsing
import run.quantize
from helpers import FOLDERS as SOURCES
from helpers import record
from run.options import DEFAULT, ROOT, GenerateConfig
from run.start import read_command
from scripts.bench import speed as bench
from scripts.bench.cases import is_peer
from scripts.bench.common import Series
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


# ------------------------------------------------------------------------------ README's commands, run

SHORT = {  # flags behind a command of README, by the program and its first word
    "generate.py": "--max_new_tokens 6", "scripts/measure.py race": "--max_new_tokens 4 --rounds 1 --out F/race.svg",
    "scripts/measure.py bench": "--max_new_tokens 3", "scripts/measure.py speed": "--max_new_tokens 3 --limit 1 --methods none,auto",
}  # fmt: skip
# these run elsewhere: on a GPU; from a hub (test_hub.py); as a server (test_serve.py)
ELSEWHERE = ("scripts/gpu/call.sh", "Qwen/Qwen3-8B", "scripts/serve.py")
NAMED = {"DIR": DEFAULT, "FILE.gguf": DEFAULT, "HEAD": f"{DEFAULT.removesuffix('.gguf')}-eagle"}
READ = [
    c
    for c in commands()
    if c.page == "README.md" and not {*c.words} & {*ELSEWHERE} and len(c.words) > 1
]


@pytest.mark.smollm2
@pytest.mark.parametrize("command", READ, ids=str)
def test_a_command_of_readme_runs(command, smollm2, tmp_path, monkeypatch, capsys):
    """It loads the default model, as README says, and a table or a picture names it."""
    prompts = tmp_path / "FILE.txt"
    prompts.write_text("Why is the sky blue?")
    program, *words = ((NAMED | {"FILE": str(prompts)}).get(word, word) for word in command.words)
    short = SHORT[program if program in SHORT else f"{program} {words[0]}"].replace(
        "F/", f"{tmp_path}/"
    )
    monkeypatch.setattr(sys, "argv", [program, *words, *short.split()])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    monkeypatch.setattr(bench, "read_bandwidth", lambda device, runs: Series.of([1e10]))
    loaded = record(monkeypatch, run.load, "load_model")
    main = run.generate.main if program == "generate.py" else module_of(program).main
    main()
    assert [call.args[0] for call in loaded] == [smollm2]
    said = capsys.readouterr()
    assert said.out.strip()
    if "--compare" in words or program != "generate.py":
        assert smollm2.name in said.out + said.err
        assert re.search(r"device \w.*commit \w.*date 20", said.out + said.err)


@pytest.mark.smollm2
def test_the_loop_of_readme_prints_one_text(smollm2, capsys):
    """Whatever drafts."""
    (loop,) = re.findall(
        r"for D in (.*?); do\n(.*?)\ndone", (ROOT / "README.md").read_text(), re.DOTALL
    )
    texts = set()
    for draft in loop[0].split():
        words = shlex.split(loop[1].replace("$D", draft))
        run.generate.main([*words[2:], "--max_new_tokens", "12"])
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1 and len(loop[0].split()) == 4
