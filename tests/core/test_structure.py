"""Laws of the code: ruff, imports, lengths, true names in its text; and what runs without torch or drafts/."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import model
import options
from helpers import FOLDERS
from run import generate
from run.options import DEMO, GenerateConfig

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
    files = [
        *ROOT.glob("*.py"),
        *(f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*"))),
    ]
    return [f for f in files if f.suffix in (".py", ".cpp", ".h")]


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


def test_folders_form_no_circle(arrows):
    """A folder, or a file at the top, needs no folder that needs it."""
    rooms: dict[str, set[str]] = {}
    for name, found in arrows.items():
        rooms.setdefault(room(name), set()).update({room(x) for x in found} - {room(name)})
    assert set(TopologicalSorter(rooms).static_order()) == {*rooms}


def test_the_ground_floor_imports_no_torch():
    """It is read before torch is imported, so that a mistake is answered at once."""
    ground = {name: tree for name, tree in modules().items() if floor(name) == 0}
    assert ground
    for name, tree in ground.items():
        assert not imports(tree, {"torch", "numpy"}), name


def test_every_import_is_followed():
    text = """
import a
def f():
    from b import c
    import_module("d.e")
    importlib.import_module("g")
    load_module("i")
if __name__ == "__main__":
    import h
"""
    known = {"a", "b", "b.c", "d.e", "g", "h", "i"}
    assert imports(ast.parse(text), known) == known - {"h"}


def test_folders_need_only_what_they_say(arrows):
    """A folder imports flat files, and the folders that its `NEEDS` name: each else may be missing."""
    for name, found in arrows.items():
        if room(name) not in options.FOLDERS:
            continue
        allowed = {room(name), *import_module(room(name)).NEEDS}
        others = {room(each) for each in found} & {*options.FOLDERS, "scripts", "examples"}
        assert others <= allowed, (name, others - allowed)


def test_needs_are_whole():
    """What a needed folder needs is needed, too: a folder is present only with all of it."""
    for folder in options.FOLDERS:
        needs = import_module(folder).NEEDS
        assert all({*import_module(need).NEEDS} <= {*needs} for need in needs), folder


def test_arrows_point_down(arrows):
    assert {room(name) for name in arrows} == {*FLOOR}
    up = [
        (a, b)
        for a, found in arrows.items()
        for b in found
        if room(a) != room(b) and floor(a) <= floor(b)
    ]
    assert not up


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


def test_check_is_said_of_what_raises_and_return_whether_of_what_answers():
    """A docstring tells a function that returns a bool from one that raises."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            text = ast.get_docstring(node) or ""
            returns = ast.unparse(node.returns) if node.returns else ""
            raises = "Raises:" in text or any(isinstance(x, ast.Raise) for x in ast.walk(node))
            if text.startswith("Check "):
                assert returns != "bool" and (returns == "None" or raises), f"{name}.{node.name}"
            if returns == "bool":
                assert not text.startswith(("Whether ", "Return true ", "Tell ")), (
                    f"{name}.{node.name}"
                )


def pages() -> list[Path]:
    """The pages for readers."""
    folders = [ROOT / name for name in ("benchmarks", "data", "docs", "heads", "tests")]
    found = [ROOT / "README.md", *(ROOT / "scripts").rglob("README.md")]
    return [*found, *(page for folder in folders for page in folder.glob("*.md"))]


def test_links_of_pages_lead_to_files():
    for page in pages():
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)


def test_the_usage_page_has_every_option_and_variable():
    usage = (ROOT / "docs" / "USAGE.md").read_text(encoding="utf-8")
    options = {f"--{f.name}" for f in fields(GenerateConfig) if f.metadata["flag"]}
    assert options <= set(re.findall(r"`(--\w+)`", usage))
    code = [f.read_text(encoding="utf-8") for f in sources()]
    variables = re.compile(r"GPT_EAGLE_[A-Z]+")
    assert set(variables.findall(usage)) == set(variables.findall("\n".join(code)))


def test_names_of_files_in_the_text_are_true():
    """Every file that docstrings, comments and pages name exists."""
    known = {f.name for f in [*sources(), *(ROOT / "tests").rglob("*")]} | {"__init__.py"}
    known |= {"echo_draft.py", "gemma.py"}  # of worked changes in docs/CONTRIBUTING.md
    for file in [*sources(), *pages()]:
        lines = [
            x
            for x in file.read_text(encoding="utf-8").splitlines()
            if not x.startswith("#include <")
        ]
        named = set(re.findall(r"\b[a-z_]\w*\.(?:py|cpp|h)\b", "\n".join(lines)))
        assert named <= known | {
            "backends.cpp",  # a folder
            "encoder.py",
            "llama.cpp",
            "ik_llama.cpp",
            "config.cpp",
            "rows.h",
        }, (
            file.name,
            named - known,
        )  # others'


def test_notes_go_through_logging():
    """`base.io.log_note` is the way, so that a Python caller can silence them; programs may print."""
    runtime = [f for f in sources() if "scripts" not in f.parts]
    assert [f.name for f in runtime if '"note: ' in f.read_text(encoding="utf-8")] == ["parsing.py"]


# ---------------------------------------------------------------------------------------- what runs

EAGER = ["--checkpoint", DEMO, "--max_new_tokens", "12", "--device", "cpu"]


def test_what_one_edits_is_what_runs(monkeypatch):
    """With compile=False, as with --plain, the modules of model.py run, in every format."""

    def edited(*inputs):
        raise RuntimeError("Layer.forward was edited")

    for own in ({}, {"quant": "int8"}, {"quant": "int4"}, {"draft": "none"}):
        with monkeypatch.context() as patch:
            patch.setattr(model.Layer, "forward", edited)
            with pytest.raises(RuntimeError, match="was edited"):
                generate.generate(
                    generate.load(
                        checkpoint=DEMO, max_new_tokens=4, device="cpu", compile=False, **own
                    ),
                    [[5]],
                )


def test_steps_change_records_as_every_torch_compiles_it():
    """torch 2.11 compiles `NamedTuple._replace` to an empty tuple: nothing that may be compiled calls it."""
    steps = [
        file
        for file in sources()
        if file.suffix == ".py"
        and not {"files", "scripts", "server"} & set(file.relative_to(ROOT).parts)
    ]
    assert len(steps) > 20 and not [file for file in steps if "._replace(" in file.read_text()]


class Ran(NamedTuple):
    """How a program ended."""

    status: int
    out: str
    err: str


RUN = """
import contextlib, io, json, runpy, sys
missing, lines = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(missing)
ran = []
for program, *argv in lines:
    sys.argv = [program, *argv]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
    ran.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(ran))
"""


def run_without(modules: tuple[str, ...], lines: list[str]) -> list[Ran]:
    """Run command lines, one after the other in one process in which imports of some modules fail."""
    given = json.dumps([modules, [shlex.split(line) for line in lines]])
    command = [sys.executable, "-c", RUN, given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Ran(*each) for each in json.loads(done.stdout)]


def test_every_program_prints_its_help_before_pip_has_run():
    """One process tries them one after the other, since starts take longest."""
    programs = [
        f"{name.replace('.', '/')}.py"
        for name, tree in modules().items()
        if any(isinstance(x, ast.If) and "__main__" in ast.dump(x.test) for x in tree.body)
    ]
    programs.remove("setup.py")  # pip's
    assert {"generate.py", "scripts/measure.py", "scripts/train/train_block.py"} <= {*programs}
    missing = ("torch", "safetensors", "numpy", "sentencepiece", "jinja2", "tokenizers")
    missing += ("tqdm", "uvicorn")
    ran = run_without(missing, [f"{program} --help" for program in programs])
    assert all(run.status == 0 and run.err == "" and "--help" in run.out for run in ran), ran


SMOLLM2_HEAD = "checkpoints/SmolLM2-135M-Instruct.Q4_1-eagle"


REFUSED = [
    ("generate.py --checkpoint {odd} --prompt a", "architecture PhiForCausalLM is not supported"),
    (f"generate.py --checkpoint {DEMO} --head {SMOLLM2_HEAD} --prompt a",
     "hidden_size is 576, the target's is 256; use the head made for this target"),
    (f"generate.py --checkpoint {DEMO} --grammar {{odd}}/bad.lark --prompt a",
     "the grammar is refused: 1(10): lexer error"),
    (f"generate.py --checkpoint {DEMO} --grammar {{odd}}/bad.json --prompt a",
     "the grammar is refused: Invalid type: strin; correct it"),
    (f"quantize.py --checkpoint {DEMO} --out {{odd}}", "exists; give --overwrite"),
    ("quantize.py --checkpoint nowhere --out {odd}/new", "no such directory: nowhere"),
    ("scripts/serve.py --checkpoint {odd}", "architecture PhiForCausalLM is not supported"),
    ("scripts/train_head.py --checkpoint {odd} --out {odd}/new",
     "architecture PhiForCausalLM is not supported"),
    (f"scripts/train_head.py --checkpoint {DEMO} --out {{odd}}/new", "has no chat template"),
    (f"scripts/train_head.py --checkpoint {DEMO} --chat vicuna --out {{odd}}",
     "holds something else than a run of train_head.py"),
]  # fmt: skip


def test_a_refusal_that_needs_only_a_header_imports_no_torch(tmp_path):
    """And leaves no folder behind."""
    pytest.importorskip("llguidance")
    for file in Path(DEMO).iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    raw |= {"architectures": ["PhiForCausalLM"], "model_type": "phi"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "bad.lark").write_text('start: "a')
    (tmp_path / "bad.json").write_text('{"type": "strin"}')
    lines = [line.format(odd=tmp_path) for line, _ in REFUSED]
    for run, (line, message) in zip(run_without(("torch", "safetensors"), lines), REFUSED):
        assert run.status == 2 and message in run.err and len(run.err.splitlines()) == 1, (
            line,
            run,
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.smollm2
def test_the_header_of_a_gguf_file_refuses_a_head(smollm2):
    line = f"generate.py --checkpoint {smollm2} --head {DEMO}-eagle --prompt a"
    (run,) = run_without(("torch", "safetensors"), [line])
    message = "hidden_size is 256, the target's is 576; use the head made for this target"
    assert run.status == 2 and message in run.err and len(run.err.splitlines()) == 1, run


def test_a_program_without_a_package_says_so_in_a_line():
    """Without torch, tokenizer and template are read before."""
    demo = f"generate.py --checkpoint {DEMO}"
    without_torch = {
        f"{demo} --chat": "has no chat template",
        demo: "generate.py: torch is not installed; run: pip install -r requirements.txt",
        f"scripts/serve.py --checkpoint {DEMO}": "serve.py: torch is not installed; run: pip install",
    }
    cases = {
        ("torch", "numpy", "safetensors"): without_torch,
        ("sentencepiece",): {demo: "generate.py: sentencepiece is not installed; run: pip install"},
        ("uvicorn",): {
            "scripts/serve.py": "uvicorn is missing; pip install -r scripts/requirements-"
        },
    }
    for missing, told in cases.items():
        for run, message in zip(run_without(missing, list(told)), told.values()):
            assert run.status == 2 and message in run.err and len(run.err.splitlines()) == 1, run
