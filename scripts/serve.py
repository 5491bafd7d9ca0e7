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

from base.parsing import one_line_errors, parse


def main() -> None:
    """Run the command line."""
    with one_line_errors("serve.py"):  # a package that is missing is named
        from server.parameters import ABOUT, ServeConfig
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        parse(ServeConfig, "serve.py", ABOUT)  # --help needs no package
        print(
            f"serve.py: {error.name} is missing; pip install -r scripts/requirements-serve.txt",
            file=sys.stderr,
        )
        sys.exit(2)
    import server.app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a regular exit saves the measurements of --tree auto
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    server.app.main()


if __name__ == "__main__":
    main()
