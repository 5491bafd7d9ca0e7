"""The command `gpt-eagle` of an installed package: one name for the programs of this tree.

    gpt-eagle "Why is the sky blue?"      # generate.py --chat --prompt
    gpt-eagle --prompt "def f(" --quant int8    # flags: generate.py's
    gpt-eagle chat --checkpoint FILE.gguf
    gpt-eagle serve --port 8000

Each word runs the program that a clone runs by its path, with the same options.
"""

from __future__ import annotations

import runpy
import sys
from difflib import get_close_matches

from options import below_root, require
from run.parsing import one_line_errors

# a word and the module that it runs, with the flags that the word stands for
PROGRAMS = {
    "generate": ("generate",),
    "chat": ("generate", "--chat", "--interactive"),
    "serve": ("scripts.serve",),
    "train": ("scripts.train_head",),
    "quantize": ("quantize",),
    "export": ("scripts.export_head",),
    "datastore": ("scripts.build_datastore",),
    "measure": ("scripts.measure",),
    "bench": ("scripts.measure", "bench"),
}
USAGE = f"""usage: gpt-eagle "a question" [flags of generate]
       gpt-eagle PROGRAM [flags]

programs: {", ".join(PROGRAMS)}
gpt-eagle PROGRAM --help lists the flags of one; gpt-eagle generate --help those of a question"""


def program_of(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the module that a command line names, and its arguments.

    A first word that names no program is a question to the chat; a flag is one of generate's.
    Raises: ValueError for a word that is nearly a program's.
    """
    first = arguments[0]
    if first in PROGRAMS:
        module, *flags = PROGRAMS[first]
        return module, [*flags, *arguments[1:]]
    if first.startswith("-"):
        return "generate", arguments
    near = get_close_matches(first, PROGRAMS, 1, 0.75)
    require(not near, f"there is no program {first}; did you mean {''.join(near)}?")
    return "generate", ["--chat", "--prompt", *arguments]


def main() -> None:
    """Run the program that the command line names."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    with one_line_errors("gpt-eagle"):
        module, arguments = program_of(arguments)
    sys.argv[1:] = arguments
    runpy.run_module(below_root(module), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
