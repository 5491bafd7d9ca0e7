"""The program generate.py, where the folder run/ is present.

Mistakes are answered by run/start.py, without torch; then comes torch, and run/generate.py.
"""

from __future__ import annotations

import gc
import signal

from files.rank import is_alone
from options import load_module
from run.start import read_command, with_text


def main() -> None:
    """Run generate.py: answer mistakes, then import torch, then decode.

    torchrun's ranks answer mistakes together, behind the imports (run/ranks.py).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported
    gc.disable()  # a collection would visit torch's 180,000 objects, which stay
    command = None
    if is_alone():
        command = with_text(read_command())
    program = load_module("run.generate")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # later collections, and those at the end, leave the imports' objects out
    gc.enable()
    try:
        program.main_of_rank(command)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
