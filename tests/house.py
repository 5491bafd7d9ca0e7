"""Measure the house: what one has to read, what the core names, and how many kinds of records a cycle makes.

python tests/house.py        # one row per measure, with its aim; test_structure.py holds the aims
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CORE = ("decode", "draft_tree", "drafters", "session", "eagle_draft", "load", "generate")
EAGLE = ("decode.py", "draft_tree.py", "ops/tree.py", "drafters.py", "eagle_draft.py")
# words that belong to an extra
EXTRA = re.compile(
    r"(?i)\bauto\b|autosize|auto_trees|grammar|look(ed)?_?(up|s up)|ngram|defer|residual|logprob|log-prob|recycl|medusa"
    r"|hydra|lookahead|\brest\b\"|rest_draft|datastore|kept|stand_in|stand-in|inflate|draft_store|extras"
)
# measure: (text, aim)
AIMS = {
    "files at the top": 14,
    "files that `import generate` reads": 30,
    "their lines": 8000,
    "files of EAGLE": 5,
    "lines of EAGLE": 1600,
    "lines of the core that name an extra (per mille)": 20,
    "members of Drafter": 10,
    "kinds of records in an EAGLE cycle": 14,
}


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def source_of(name: str) -> Path | None:
    """Return the file of one of the project's modules; None for other modules."""
    path = ROOT.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is imported."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.dump(node.test) and "__main__" not in ast.dump(node.test):
                yield from at_import(node.body)
            yield from at_import(node.orelse)
        elif isinstance(node, (ast.Try, ast.With, ast.ClassDef)):
            yield from at_import(node.body)


def reads(name: str) -> set[Path]:
    """Return the project's files that an import reads, lazy imports left out."""
    seen: set[Path] = set()
    waiting = [name]
    while waiting:
        file = source_of(waiting.pop())
        if file is None or file in seen:
            continue
        seen.add(file)
        for node in at_import(ast.parse(file.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {file for file in seen if lines(file)}


def named_extras() -> float:
    """Return the share of the core's lines that name an extra, per mille."""
    all_lines = [
        line
        for name in CORE
        for line in (ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()
    ]
    return 1000 * sum(bool(EXTRA.search(line)) for line in all_lines) / len(all_lines)


def members(cls: type) -> list[str]:
    """Return the public members that a class declares."""
    names = {*cls.__annotations__, *(name for name in vars(cls) if not name.startswith("_"))}
    return sorted(names)


def records_of_a_cycle() -> set[str]:
    """Decode with EAGLE's dynamic tree, and return the kinds of records that one cycle makes."""
    from generate import load
    from options import DEMO
    from session import Session

    engine = load(checkpoint=DEMO, draft="eagle", tree="dynamic", temperature=1.0, device="cpu")
    decoding = Session(engine).decode_turn([[5, 17, 3]])
    next(decoding)
    next(decoding)
    made: set[str] = set()

    def see(frame, event, argument):
        if event == "call" and "_cls" in frame.f_locals:  # the constructor of a NamedTuple
            made.add(frame.f_locals["_cls"].__name__)
        if event == "call" and frame.f_code.co_name == "__init__":
            kind = type(frame.f_locals["self"])
            if source_of(kind.__module__) and kind.__name__.endswith("Result"):
                made.add(kind.__name__)

    sys.setprofile(see)
    try:
        next(decoding)
    finally:
        sys.setprofile(None)
    return made


def measures() -> dict[str, float]:
    """Return every measure of AIMS."""
    from drafters import Drafter

    imported = reads("generate")
    return {
        "files at the top": len(list(ROOT.glob("*.py"))),
        "files that `import generate` reads": len(imported),
        "their lines": sum(map(lines, imported)),
        "files of EAGLE": len(EAGLE),
        "lines of EAGLE": sum(lines(ROOT / name) for name in EAGLE),
        "lines of the core that name an extra (per mille)": named_extras(),
        "members of Drafter": len(members(Drafter)),
        "kinds of records in an EAGLE cycle": len(records_of_a_cycle()),
    }


def tracked_lines() -> int:
    """Return the lines of all tracked text but data, models and golden traces."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    kinds = (".py", ".cpp", ".h", ".md", ".sh", ".toml", ".txt", ".html")
    files = [ROOT / name for name in listed.split("\n") if name.endswith(kinds)]
    skipped = ("data", "checkpoints", "golden")
    files = [file for file in files if file.is_file() and not {*file.parts} & {*skipped}]
    return sum(map(lines, files))


def main() -> None:
    """Print the measures, the files that an import reads, and the lines that name an extra."""
    for name, value in measures().items():
        print(f"{name:52} {value:8.0f}   aim {AIMS[name]}")
    print(f"{'tracked lines without data and weights':52} {tracked_lines():8}")
    if "--long" in sys.argv:
        for file in sorted(reads("generate"), key=lines):
            print(f"{lines(file):6} {file.relative_to(ROOT)}")
        print(*sorted(records_of_a_cycle()))
        for name in CORE:
            text = (ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(text, 1):
                if EXTRA.search(line):
                    print(f"{name}.py:{number}: {line.strip()}")


if __name__ == "__main__":
    main()
