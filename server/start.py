"""The start of scripts/serve.py: the command, its mistakes without torch, then the server."""

from __future__ import annotations

import signal
import sys

from options import load_part
from run import parsing
from run.prompts import read_grammar
from run.start import with_checked_files
from server.options import ABOUT, ServeConfig


def check_packages() -> None:
    """Check that the server's own packages are there. Raises: ValueError."""
    try:
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        remedy = "pip install -r scripts/requirements-serve.txt"
        raise ValueError(f"{error.name} is missing; {remedy}") from None


def main() -> None:
    """Run the command line. Mistakes that need only a header come before torch is imported."""
    config, given = parsing.parse_given(ServeConfig, "serve.py", ABOUT)
    with parsing.one_line_errors("serve.py"):
        config.check()
        check_packages()
        with_checked_files(config)
        read_grammar(config)
        app = load_part("server", "app")  # a package that is missing is named

    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a regular exit saves the measurements of --tree auto
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app.main(config, given)
