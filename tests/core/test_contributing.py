"""The worked changes of docs/CONTRIBUTING.md apply to this tree, and their own tests pass."""

import re
import shutil
import subprocess
import sys

import pytest

from helpers import FOLDERS
from run.options import ROOT

PAGE = ROOT / "docs" / "CONTRIBUTING.md"
NEW_TESTS = {
    "echo": 7,
    "2024": 8,
    "typical_acceptance": 1,
    "e4m3_rounds": 1,
}  # chosen by -k: cases


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git, which applies the changes")
def test_the_worked_changes_work(tmp_path):
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(file, tmp_path)
    for folder in (*FOLDERS, "tests", "checkpoints/demo", "checkpoints/demo-eagle"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    changes = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(changes) == 4
    for change in changes:
        applied = subprocess.run(
            ["git", "apply", "-"], input=change, cwd=tmp_path, capture_output=True, text=True
        )
        assert applied.returncode == 0, applied.stderr
    files = ["core/test_lossless.py", "files/test_families.py", "core/test_steps.py"]
    files += ["core/test_typical.py", "files/test_float8.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", " or ".join(NEW_TESTS)]
    command += [f"tests/{file}" for file in files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"{sum(NEW_TESTS.values())} passed" in done.stdout, done.stdout
