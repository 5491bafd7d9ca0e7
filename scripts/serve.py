"""Serve a model to OpenAI clients: completions and chat, streamed or whole.

    pip install -r scripts/requirements-serve.txt
    python scripts/serve.py --batch_size 4 --port 8000
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "def f(", "temperature": 0.8, "seed": 3}'

The server itself is in server/app.py.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from run import parsing
from run.prompts import read_grammar
from run.start import with_checked_files
from server.options import ABOUT, ServeConfig


def check_packages() -> None:
    """Check that the server's own packages are there. Raises: ValueError."""
    try:
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
        import server.app  # a package that is missing is named

    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a regular exit saves the measurements of --tree auto
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    server.app.main(config, given)


if __name__ == "__main__":
    main()
