"""Serve a model to OpenAI clients: completions and chat, streamed or whole.

    pip install -r scripts/requirements-serve.txt
    python scripts/serve.py --batch_size 4 --port 8000
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "def f(", "temperature": 0.8, "seed": 3}'

The server itself is in server/app.py; server/options.py reads the command.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from options import load_part, one_line_errors


def main() -> None:
    """Run the command line. Mistakes that need only a header come before torch is imported."""
    with one_line_errors("serve.py"):
        program = load_part("server", "program")
    program()


if __name__ == "__main__":
    main()
