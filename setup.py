"""Build the wheel: the files of this tree below one name, `gpt_eagle.core`, for `pip install .`

The modules of the tree have short names (`model`, `load`), which would be in the way of others
among a Python's packages. So the build puts `gpt_eagle.core.` before the names of our modules
wherever they are imported, and changes nothing else: the installed code is the tree's, line by
line. Above it `gpt_eagle` has the functions of the library alone (run/front.py).
What is installed runs as `gpt-eagle` (run/program.py). Not installed: tests, pages, the demo.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGE = "gpt_eagle"
NAME = f"{PACKAGE}.core"
MODULES = {file.stem for file in ROOT.glob("*.py")} - {"setup"}
FOLDERS = {"backends", "drafts", "files", "models", "run", "scripts", "server"}
OURS = MODULES | FOLDERS
DATA = (
    "backends/cpp/*.cpp",
    "backends/cpp/*.h",
    "backends/triton/measured/*.json",
    "server/*.html",
    "checkpoints/SmolLM2-135M-Instruct.Q4_1-eagle/*",
    "data/eval/*.jsonl",
    "data/licenses/*",
    "data/train/*",
    "files/HEADS.md",  # its table of published heads
)
ROOT_LINE = "sys.path.insert(0"  # by which a program of scripts/ finds the tree


def below_one_name(source: str) -> str:
    """Return a module's source with our modules imported from `gpt_eagle.core`.

    Raises: ValueError for one statement that imports several modules.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        row = node.lineno - 1 if hasattr(node, "lineno") else 0
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module.split(".")[0] in OURS:
                lines[row] = lines[row].replace("from ", f"from {NAME}.", 1)
        elif isinstance(node, ast.Import) and node.names[0].name.split(".")[0] in OURS:
            if len(node.names) > 1:
                raise ValueError(f"one module an import: {lines[row].strip()}")
            lines[row] = _import_below(lines[row], node.names[0].name)
    return "".join(line for line in lines if not line.startswith(ROOT_LINE))


def _import_below(line: str, name: str) -> str:
    """Return the line `import NAME` or `import NAME as OTHER`, which binds what it bound before."""
    top, _, inner = name.partition(".")
    if not inner:
        return line.replace("import ", f"from {NAME} import ", 1)
    both = f"import {NAME}.{name}; from {NAME} import {top}"
    return re.sub(rf"import {re.escape(name)}\b", both, line, count=1)


def packages() -> list[str]:
    """Return the folders that hold modules, as names below `gpt_eagle.core`."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    folders = {file.parent.relative_to(ROOT) for file in files}
    return [NAME, *sorted(".".join((NAME, *folder.parts)) for folder in folders)]


class BuildBelowOneName(build_py):
    """Copy the files, then change the imports of the copies."""

    def run(self) -> None:
        """Write the package into the build folder, which may hold an older tree."""
        package = Path(self.build_lib, PACKAGE)
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        folder = package / "core"
        shutil.copy(folder / "run" / "front.py", package / "__init__.py")
        (package / "py.typed").touch()
        (folder / "setup.py").unlink(missing_ok=True)  # pip's way to build copies it, too
        for file in package.rglob("*.py"):
            source = below_one_name(file.read_text(encoding="utf-8"))
            file.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    setup(
        packages=packages(),
        package_dir={NAME: "."},
        package_data={NAME: list(DATA)},
        include_package_data=False,
        cmdclass={"build_py": BuildBelowOneName},
    )
