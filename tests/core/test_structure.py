"""Laws of the code: ruff, imports, lengths, true names in its text; and what runs without torch or drafts/."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from test_options import run_without

import options
from helpers import FOLDERS

ROOT = options.ROOT
# from the ground up; a module may import its own folder's modules and those of lower floors
FLOORS = (
    ("options", "draft_tree"),
    ("reference",),
    ("quantize", "runtime", "kv_cache", "sampling"),
    ("steps",),
    ("model",),
    ("drafters",),
    ("eagle_draft",),
    ("decode",),
    ("backends", "files"),
    ("models", "run"),
    ("drafts",),
    ("server",),
    ("generate", "scripts", "examples", "setup"),
)
# their __init__ files import nothing
PACKAGES = {"backends", "backends.cpp", "backends.triton", *options.FOLDERS}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def sources() -> list[Path]:
    """The project's code but the tests; an environment beside it (.venv) is not the project's."""
    folders = [f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*"))]
    return [f for f in (*ROOT.glob("*.py"), *folders) if f.suffix in (".py", ".cpp", ".h")]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the project but the tests, by its dotted name. Shared between tests."""
    files = [f for f in sources() if f.suffix == ".py"]
    names = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
        for f in files
    }
    return {name: ast.parse(f.read_text(encoding="utf-8")) for name, f in names.items()}


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """The project's modules that a module imports, in functions too, and by a name in a text.

    What only the program at its end needs (`if __name__ == "__main__"`) is not imported by a module.
    """
    found = set()
    body = [x for x in tree.body if "TYPE_CHECKING" not in ast.dump(getattr(x, "test", x))]
    body = [x for x in body if not (isinstance(x, ast.If) and "__main__" in ast.dump(x.test))]
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and re.search(r"(import|load)_module", ast.dump(node.func)):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found & known


def room(name: str) -> str:
    """The folder or file at the top that holds a module."""
    return name.partition(".")[0]


def floor(name: str) -> int:
    """The floor of a module's folder or file."""
    return FLOOR.get(room(name), -1)


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    trees = modules()
    found = {name: imports(tree, set(trees)) - {name} for name, tree in trees.items()}
    return found


def test_no_circle(arrows):
    assert not any(arrows[name] for name in PACKAGES)
    order = TopologicalSorter({name: found - PACKAGES for name, found in arrows.items()})
    assert set(order.static_order()) >= set(arrows) - PACKAGES


def test_folders_need_only_what_they_say(arrows):
    """A folder imports flat files, and the folders that its `NEEDS` name: each else may be missing."""
    for name, found in arrows.items():
        if room(name) not in options.FOLDERS:
            continue
        allowed = {room(name), *import_module(room(name)).NEEDS}
        others = {room(each) for each in found} & {*options.FOLDERS, "scripts", "examples"}
        assert others <= allowed, (name, others - allowed)


def test_arrows_point_down(arrows):
    assert {room(name) for name in arrows} == {*FLOOR}
    for name, found in arrows.items():
        up = {b for b in found if room(name) != room(b) and floor(name) <= floor(b)}
        assert not up, (name, up)


@pytest.mark.parametrize("rules", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(rules):
    if shutil.which("ruff") is None:
        pytest.skip("ruff is not installed; pip install -r requirements-dev.txt")
    done = subprocess.run(["ruff", *rules, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_functions_are_short():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 60, f"{name}.{node.name}"


def pages() -> list[Path]:
    """The pages for readers."""
    folders = [ROOT / name for name in ("benchmarks", "data", "docs", "heads", "tests")]
    found = [ROOT / "README.md", *(ROOT / "scripts").rglob("README.md")]
    return [*found, *(page for folder in folders for page in folder.glob("*.md"))]


def test_links_of_pages_lead_to_files():
    for page in pages():
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)


# files of others, and of worked changes in docs/CONTRIBUTING.md
OF_OTHERS = {"backends.cpp", "encoder.py", "llama.cpp", "ik_llama.cpp", "config.cpp", "rows.h"}
OF_OTHERS |= {"echo_draft.py", "gemma.py", "typical.py", "test_typical.py", "test_float8.py"}


def test_names_of_files_in_the_text_are_true():
    """Every file that docstrings, comments and pages name exists."""
    known = {f.name for f in [*sources(), *(ROOT / "tests").rglob("*")]} | {"__init__.py"}
    for file in [*sources(), *pages()]:
        text = re.sub(r"^#include <.*", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        unknown = set(re.findall(r"\b[a-z_]\w*\.(?:py|cpp|h)\b", text)) - known - OF_OTHERS
        assert not unknown, (file.name, unknown)


# ---------------------------------------------------------------------------------------- what runs


def test_steps_change_records_as_every_torch_compiles_it():
    """torch 2.11 compiles `NamedTuple._replace` to an empty tuple: nothing that may be compiled calls it."""
    others = {"files", "scripts", "server"}
    steps = [
        f for f in sources() if f.suffix == ".py" and not others & {*f.relative_to(ROOT).parts}
    ]
    assert len(steps) > 20 and not [file for file in steps if "._replace(" in file.read_text()]


def test_every_program_prints_its_help_before_pip_has_run():
    """One process tries them one after the other, since starts take longest."""
    programs = []
    for name, tree in modules().items():
        ends = [x for x in tree.body if isinstance(x, ast.If) and "__main__" in ast.dump(x.test)]
        if ends and name != "setup":  # pip's
            programs.append(f"{name.replace('.', '/')}.py")
    assert {"generate.py", "scripts/measure.py", "scripts/train/train_block.py"} <= {*programs}
    missing = ("torch", "safetensors", "numpy", "sentencepiece", "jinja2", "tokenizers")
    missing += ("tqdm", "uvicorn")
    ran = run_without(missing, [f"{program} --help" for program in programs])
    assert all(run.status == 0 and run.err == "" and "--help" in run.out for run in ran), ran
