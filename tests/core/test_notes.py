"""Notes to a person: a command prints them, and a Python caller silences or keeps them by `logging`."""

import subprocess
import sys

from helpers import OPERATORS
from options import log_note
from run.options import ROOT

NOTE = "attention in float16 is PyTorch's: slower, and a draft may change a token where the best two are nearly equal"
NOTE += "; use --dtype bfloat16"


def run(code: str) -> list[str]:
    """Return a program's lines on standard error that hold the note or JSON, each JSON as {."""
    command = [sys.executable, "-c", f"import logging\n{code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = ["{" if line.startswith("{") else line for line in done.stderr.splitlines()]
    return [line for line in lines if NOTE in line or line == "{"]


@OPERATORS
def test_a_python_caller_sees_notes_silences_them_and_takes_them_into_a_log():
    assert run("""
from run.load import load
options = {"checkpoint": "checkpoints/demo", "draft": "none", "device": "cpu", "dtype": "float16"}
load(**options)
logging.getLogger("gpt_eagle").setLevel(logging.ERROR)
load(**options)
logging.getLogger("gpt_eagle").setLevel(logging.INFO)
logging.basicConfig(format="%(name)s %(levelname)s %(module)s %(message)s")
load(**options)
""") == [NOTE, f"gpt_eagle WARNING load {NOTE}"]


@OPERATORS
def test_a_command_prints_a_note_once_before_its_result_whatever_the_log_is():
    assert run("""
from run import generate
options = "--checkpoint checkpoints/demo --draft none --device cpu --dtype float16 -n 1".split()
options += ["--prompt", "x", "--json", "/dev/stderr"]
generate.main(options)
logging.basicConfig()
generate.main(options)
logging.getLogger("gpt_eagle").setLevel(logging.ERROR)
generate.main(options)
""") == [f"note: {NOTE}", "{", f"note: {NOTE}", "{", "{"]


def test_a_note_appears_as_it_is_where_standard_error_is_now(capsys):
    log_note("100 % of %s")
    assert capsys.readouterr().err == "note: 100 % of %s\n"
