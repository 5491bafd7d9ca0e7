"""Measure: one program for every figure of the pages.

    python scripts/measure.py WHAT [options]
    python scripts/measure.py WHAT --help

bench     one table of a model's tokens per second, beside llama.cpp
speed     tokens per second, speedup and tau of ways to draft, and of other runtimes, by task
fidelity  what each weight format loses: KL, perplexity, right answers
passes    passes of a whole model over some rows
linear    one linear layer in every weight format
attention on CUDA: attention of trees, beside torch's
start     from the command to the first text
race      one prompt with drafts and without, as a moving picture
bars      a table and a picture of rates that were measured
plans     on CUDA: the fastest tiles of our matmuls, which decoding loads

scripts/bench/cases.py has their options and names their functions.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from options import load_module
from run.parsing import did_you_mean, fail, one_line_errors, parse
from scripts.bench.cases import CASES


def main() -> None:
    """Run the command line."""
    what = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if what in ("--help", "-h"):
        with one_line_errors("measure.py"):
            print(__doc__)
        sys.exit(0)
    if what not in CASES:
        hint = did_you_mean(what, CASES) or f"; use one of {', '.join(CASES)}"
        fail("measure.py", f"there is no case {what}{hint}")
    program = f"measure.py {what}"
    options, place = CASES[what]
    config = parse(options, program, options.__doc__, sys.argv[2:])
    with one_line_errors(program):
        config.check()
        module, _, function = place.partition(":")
        # after the checks, since its imports take seconds
        getattr(load_module(f"scripts.bench.{module}"), function)(config)


if __name__ == "__main__":
    main()
