"""Report what the default command loads: the project's modules in memory after it, and their lines.

python tests/house.py        # decodes a few tokens of the demo, and prints one row per file
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COMMAND = ("--checkpoint", "checkpoints/demo", "--prompt", "def", "--device", "cpu")


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def loaded() -> list[Path]:
    """Run the default command, and return the project's Python files that it loaded."""
    import generate

    generate.main([*COMMAND, "--max_new_tokens", "16"])
    files = {Path(module.__file__) for module in list(sys.modules.values()) if has_file(module)}
    own = {file for file in files if file.is_relative_to(ROOT) and lines(file)}
    return sorted(own - {Path(__file__)})


def has_file(module: object) -> bool:
    return bool(getattr(module, "__file__", None))


def imports_in_functions(file: Path) -> int:
    """Count a file's imports that wait for a call."""
    functions = [
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    imports = {
        node.lineno
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    return len(imports)


def main() -> None:
    """Print a row per loaded file, the longest first, and the sums."""
    files = sorted(loaded(), key=lines, reverse=True)
    late = {file: imports_in_functions(file) for file in files}
    print(f"\n{'lines':>6} {'late':>5}   file (late: imports inside functions)")
    for file in files:
        print(f"{lines(file):6} {late[file]:5}   {file.relative_to(ROOT)}")
    kernels = [file for file in (ROOT / "ops/cpu").iterdir() if file.suffix in (".cpp", ".h")]
    print(f"{sum(map(lines, files)):6} {sum(late.values()):5}   {len(files)} Python files")
    print(f"{sum(map(lines, kernels)):6} {'':5}   {len(kernels)} C++ files of ops/cpu")


if __name__ == "__main__":
    main()
