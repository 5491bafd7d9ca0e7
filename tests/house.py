"""Measure how the project reads: density, words and sizes, per folder or for some files.

    python tests/house.py                       # one row per folder
    python tests/house.py decode.py hf/*.py     # each place in these files that a rule of test_structure.py refuses

A code line is a line of Python without blanks, comments and docstrings. A parallel assignment has a tuple on both sides
and is no swap; unpacking one value is none.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "",
    "hf",
    "ops",
    "extras",
    "scripts",
    "scripts/train",
    "scripts/bench",
    "scripts/gpu",
    "tests",
)
WIDE = 90  # columns
LONGEST = 100
NO_SUBJECT = "what, who or whose for a subject"
SUBJECT = re.compile(r"(?:^|(?<=[.:;(] ))(?:what|who|whose|whoever|whatever)\b", re.IGNORECASE)


class Place(NamedTuple):
    """A place that a rule refuses."""

    line: int
    rule: str
    text: str


class Measures(NamedTuple):
    """Sums over files."""

    lines: int = 0
    code_lines: int = 0
    assignments: int = 0
    parallel: int = 0
    conditional: int = 0  # expressions: `a if b else c`
    wide: int = 0  # code lines of WIDE columns and more
    what: int = 0  # the word

    def __add__(self, other: Measures) -> Measures:
        return Measures(*(a + b for a, b in zip(self, other)))


def sources(folder: str) -> list[Path]:
    """The Python files of a folder; of `tests` and `ops` those below it, too."""
    deep = folder in ("tests", "ops")
    return sorted((ROOT / folder).rglob("*.py") if deep else (ROOT / folder).glob("*.py"))


def texts(source: str) -> list[tuple[int, str]]:
    """The docstrings and comments of a file: the line where each begins, and its text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                found.append((node.body[0].lineno, text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string.lstrip("# ")))
    return found


def is_parallel(node: ast.AST) -> bool:
    """Tell `a, b = x, y`, which is two assignments, from unpacking and from a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = sorted(ast.unparse(each) for each in target.elts)
    values = sorted(ast.unparse(each) for each in node.value.elts)
    return names != values


def refused(source: str) -> list[Place]:
    """Every place in a file that a rule refuses, in the order of lines."""
    found = []
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST:
            found.append(Place(number, f"longer than {LONGEST} columns", line.strip()))
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if is_parallel(node):
            found.append(Place(line, "parallel assignment", ast.unparse(node)))
        if isinstance(node, ast.Expr) and isinstance(node.value, (ast.IfExp, ast.Tuple)):
            found.append(Place(line, "expression as a statement", ast.unparse(node)))
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(each, ast.NamedExpr) for each in arguments):
                found.append(Place(line, "walrus in an argument list", ast.unparse(node)))
    return sorted(found + without_subject(source))


def without_subject(source: str) -> list[Place]:
    """Every sentence of a file's docstrings and comments that has no noun for its subject."""
    found = []
    for line, text in texts(source):
        for match in SUBJECT.finditer(text):
            sentence = text[match.start() :].lstrip(".:;( ").split("\n\n")[0]
            if not sentence.split(". ")[0].rstrip().endswith("?"):
                found.append(Place(line, NO_SUBJECT, sentence[:80].replace("\n", " ")))
    return found


def measure(source: str) -> Measures:
    """Count what the table shows."""
    tree = ast.parse(source)
    code = code_lines(source, tree)
    nodes = list(ast.walk(tree))
    return Measures(
        lines=len(source.splitlines()),
        code_lines=len(code),
        assignments=sum(isinstance(node, ast.Assign) for node in nodes),
        parallel=sum(is_parallel(node) for node in nodes),
        conditional=sum(isinstance(node, ast.IfExp) for node in nodes),
        wide=sum(len(line) >= WIDE for line in code),
        what=sum(len(re.findall(r"\bwhat\b", text, re.IGNORECASE)) for _, text in texts(source)),
    )


def code_lines(source: str, tree: ast.Module) -> list[str]:
    """The lines that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            if ast.get_docstring(node):
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    numbered = enumerate(source.splitlines(), 1)
    return [
        x
        for number, x in numbered
        if x.strip() and x.strip()[0] != "#" and number not in docstrings
    ]


def table() -> str:
    """The measures of every folder, as a table in Markdown."""
    head = (
        "| folder | lines | parallel | >= 90 columns | conditional per 100 lines | what per 1,000 |"
    )
    rows = [head, "|---|---|---|---|---|---|"]
    for folder in FOLDERS:
        total = sum((measure(file.read_text()) for file in sources(folder)), Measures())
        code = max(total.code_lines, 1)
        rows.append(
            f"| {folder or 'top'} | {total.lines} | {total.parallel} of {total.assignments} | "
            f"{100 * total.wide / code:.1f} % | {100 * total.conditional / code:.1f} | "
            f"{1000 * total.what / max(total.lines, 1):.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    for name in sys.argv[1:]:
        for place in refused(Path(name).read_text()):
            print(f"{name}:{place.line}: {place.rule}: {place.text[:120]}")
    if not sys.argv[1:]:
        print(table())


if __name__ == "__main__":
    main()
