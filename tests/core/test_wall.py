"""The wall: the flat files run alone, and each folder may be deleted."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import options

ROOT = options.ROOT
FLAT = [file for file in sorted(ROOT.glob("*.py")) if file.name != "setup.py"]
MOST_FILES = 13
MOST_LINES = 4983  # the aim is 4,600; the figure may only fall
# packages that the flat files may name
PACKAGES = {"torch", "numpy", "safetensors", "sentencepiece", "tokenizers", "triton"}
PROMPT = "def read_lines(path):"
TREES = ("chain:3", "static", "dynamic:6,8,32")
DEMO = ["--checkpoint", "checkpoints/demo", "--device", "cpu", "--prompt", PROMPT]
RUN = """
import contextlib, io, json, sys
import generate
found = []
for argv in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        generate.main([*argv, "--json", "-"])
    found.append(json.loads(out.getvalue())["tokens"])
print(json.dumps(found))
"""


def copied(folder: Path, without: str = "") -> Path:
    """Copy the flat files and the demo; the folders but one are links. Returns: the folder."""
    for file in FLAT:
        shutil.copy(file, folder)
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    for name in ("demo", "demo-eagle"):
        (checkpoints / name).symlink_to(ROOT / "checkpoints" / name)
    if without:
        for name in (*options.FOLDERS, "data"):
            if name != without:
                (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_flat_files_are_few_and_name_only_each_other():
    assert len(FLAT) <= MOST_FILES
    assert sum(len(file.read_text().splitlines()) for file in FLAT) <= MOST_LINES
    own = {file.stem for file in FLAT}
    for file in FLAT:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            roots = {name.partition(".")[0] for name in names}
            assert roots <= own | PACKAGES | sys.stdlib_module_names, (file.name, roots)


def test_the_flat_files_alone_decode_exactly(tmp_path):
    """Chains, static and dynamic trees have vanilla's tokens, in 32, 8 and 4 bits, T = 0 and 0.8."""
    commands = []
    for quant in ("none", "int8", "int4"):
        for sampled in ([], ["--temperature", "0.8", "--seed", "7"]):
            own = [*DEMO, "--dtype", "float32", "--max_new_tokens", "48", "--quant", quant]
            commands.append([*own, *sampled, "--draft", "none"])
            commands += [[*own, *sampled, "--draft", "eagle", "--tree", tree] for tree in TREES]
    command = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(command, cwd=copied(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size = 1 + len(TREES)
    runs = [found[first : first + size] for first in range(0, len(found), size)]
    assert len(runs) == 6
    for vanilla, *drafted in runs:
        assert all(each == vanilla for each in drafted) and len(vanilla[0]) > 40
    assert len({str(vanilla) for vanilla, *_ in runs}) > 3  # formats and draws differ
    whole = [sys.executable, "generate.py", *commands[0], "--plain", "--json", "-"]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stdout)["tokens"] == runs[0][0], done.stderr


# a folder -> arguments for something that it adds; none: nothing is refused
ADDED = {
    "backends": [],
    "models": ["--checkpoint", "qwen"],
    "files": ["--checkpoint", "model.gguf"],
    "drafts": ["--draft", "ngram"],
    "run": ["--interactive"],
    "server": ["scripts/serve.py", "--checkpoint", "checkpoints/demo"],
}


@pytest.mark.parametrize("folder", options.FOLDERS)
def test_a_folder_may_be_deleted(tmp_path, folder):
    """A demo's answer is what it was; what the folder adds is refused in one line that names it."""
    where = copied(tmp_path, without=folder)

    def run(*argv: str) -> subprocess.CompletedProcess:
        program = [] if argv[0].endswith(".py") else ["generate.py", *DEMO]
        command = [sys.executable, *program, *argv]
        return subprocess.run(command, cwd=where, capture_output=True, text=True)

    short = ("--max_new_tokens", "12", "--json", "-")
    done = run(*short)
    assert done.returncode == 0, done.stderr
    tokens = json.loads(done.stdout)["tokens"]
    assert tokens == json.loads(run("--draft", "none", *short).stdout)["tokens"]
    assert len(tokens[0]) == 12
    if ADDED[folder]:
        add_files(where)
        refused = run(*ADDED[folder])
        lines = refused.stderr.splitlines()
        assert refused.returncode == 2 and len(lines) == 1 and f"{folder}/" in lines[0], lines


def add_files(where: Path) -> None:
    """Add a checkpoint of an architecture of models/, the first bytes of a GGUF file, scripts/."""
    checkpoint = where / "qwen"
    checkpoint.mkdir()
    for file in (ROOT / "checkpoints" / "demo").iterdir():
        (checkpoint / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps(config))
    (where / "model.gguf").write_bytes(b"GGUF")
    (where / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "serve.py", where / "scripts")


def test_readme_counts_the_flat_files():
    """Within a tenth, so that not every commit changes README."""
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(\w+\.py)\]\(\w+\.py\) \| ([\d,]+) \|", readme, re.MULTILINE))
    assert rows.keys() == {file.name for file in FLAT}
    for file in FLAT:
        lines = len(file.read_text().splitlines())
        assert abs(int(rows[file.name].replace(",", "")) - lines) <= lines / 10, file.name


@pytest.mark.parametrize(
    "mistake",
    ["--device abacus", "--prompt_ids a,b", "--tree chain:0", "--tree bush", "--head nowhere"],
)
def test_a_mistake_in_the_flat_files_is_one_line(tmp_path, mistake):
    """No traceback, and the line has the value."""
    command = [sys.executable, "generate.py", *DEMO, "--draft", "eagle", *mistake.split()]
    done = subprocess.run(command, cwd=copied(tmp_path), capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and mistake.split()[1] in lines[0], lines
