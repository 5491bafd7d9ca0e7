"""The installed package: the tree below one name, beside other programs' modules.

Not here: the installation by pip and uvx, which fetch packages.
"""

import ast
import os
import subprocess
import sys

import pytest

import setup
from run.options import DEMO, ROOT
from run.program import PROGRAMS, program_of

IMPORTS = {  # a line of the checkout, of the package
    "import sampling": "from gpt_eagle.core import sampling",
    "import model as m  # ours": "from gpt_eagle.core import model as m  # ours",
    "from files.io import read_json": "from gpt_eagle.core.files.io import read_json",
    "import backends.triton.tree": "import gpt_eagle.core.backends.triton.tree; from gpt_eagle.core import backends",
    "import modeling": "import modeling",
    "from torch.ops import load": "from torch.ops import load",
    'text = """\nimport model\n"""': 'text = """\nimport model\n"""',
}


def test_imports_of_our_modules_get_the_name():
    """Several in one import are refused."""
    for line, installed in IMPORTS.items():
        assert setup.below_one_name(f"{line}\n") == f"{installed}\n"
    with pytest.raises(ValueError, match="one module an import: import model, load"):
        setup.below_one_name("import model, load\n")


LINES = [  # the words of a command, the module, the arguments
    ("Why?", "generate", "--chat --prompt Why?"), ("Why? --seed 3", "generate", "--chat --prompt Why? --seed 3"),
    ("--prompt def", "generate", "--prompt def"), ("chat --tree auto", "generate", "--chat --interactive --tree auto"),
    ("bench DIR", "scripts.measure", "bench DIR"), ("train --hours 2", "scripts.train_head", "--hours 2"),
]  # fmt: skip


def test_the_first_word_names_a_program_or_is_a_question():
    """A word that is nearly a program is no question."""
    for line, module, arguments in LINES:
        assert program_of(line.split()) == (module, arguments.split())
    with pytest.raises(ValueError, match="there is no program serv; did you mean serve"):
        program_of(["serv"])


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build the package, beside a foreign model.py. Returns: the folder of both."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("model", "load", "options"):
        (folder / f"{name}.py").write_text("raise RuntimeError('another program')\n")
    return folder


def run(folder, *command):
    """Run Python beside the package. Returns: the finished process."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    pipes = {"capture_output": True, "text": True}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, **pipes)


def test_every_program_is_there_and_none_imports_a_short_name(installed):
    package = installed / "gpt_eagle" / "core"
    for module, *_ in PROGRAMS.values():
        assert package.joinpath(*module.split(".")).with_suffix(".py").is_file()
    files = [*package.rglob("*.py")]
    assert len(files) > 100 and not (package / "setup.py").exists()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert not {name.split(".")[0] for name in names} & setup.OURS, file


def test_an_installed_command_decodes_beside_another_programs_modules(installed):
    """It finds the optional folders; a mistake is one line."""
    program = ["-m", "gpt_eagle.core.run.program"]
    flags = ["--prompt", "def f(", "--checkpoint", DEMO, "--max_new_tokens", "8", "--context", "64"]
    done = run(installed, *program, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(ROOT, "generate.py", *flags).stdout != ""
    code = "from gpt_eagle.core.run.methods import has_drafts; print(has_drafts())"
    assert run(installed, "-c", code).stdout == "True\n"
    done = run(installed, *program, "serve", "--checkpoint", "nowhere")
    assert done.returncode == 2 and done.stderr.startswith("gpt-eagle: no such directory: nowhere")
    assert len(done.stderr.splitlines()) == 1


FRONT = f"""
import sys
import gpt_eagle
assert "torch" not in sys.modules and gpt_eagle.__version__
engine = gpt_eagle.load({DEMO!r}, device="cpu")
import gpt_eagle.core.generate
answer = gpt_eagle.generate(engine, "def f(", max_new_tokens=8)
assert len(answer.tokens) == 8 and answer.finish_reason == "length"
pieces = list(gpt_eagle.stream(engine, "def f(", max_new_tokens=8))
assert "".join(pieces) == answer.text and pieces[-1].answer.tokens == answer.tokens
try:
    gpt_eagle.Engine
except AttributeError as error:
    print(error)
"""


def test_the_package_has_the_library_alone(installed):
    """Typed, without PyTorch before it is needed, and no module hides a function."""
    done = run(installed, "-c", FRONT)
    said = "gpt_eagle has no Engine; it has astream, generate, load, stream\n"
    assert done.stdout == said, done.stderr
    assert (installed / "gpt_eagle" / "py.typed").is_file()
