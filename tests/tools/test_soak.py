"""Thousands of short requests through eight clients, cancelled and broken ones among them: none lost, memory flat.

The table is printed: pytest -m slow -s tests/tools/test_soak.py
"""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from run.generate import generate, load  # noqa: E402
from run.options import DEMO, ROOT  # noqa: E402

CLIENTS = 8
PROMPTS = ("def read_lines(path):", "import ", "class A", "x = [" * 30, "def f(a, b):\n    return")
RULES = ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20}, {"temperature": 1.2})  # fmt: skip
# as many of each kind in a hundred; who leaves: behind the first event, in a body, before the answer
KINDS = {"whole": 55, "streamed": 20, "cancelled": 10, "broken": 5, "unsent": 5, "unread": 5}
BROKEN = (b"{", b"[1]", b'{"prompt": 1}', b'{"prompt": "a", "n": "x"}', b"\xff")
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
GROWTH = 16  # MiB that the server may grow by after a quarter of the requests


@contextmanager
def server():
    """A server in a process of its own. Yields: its process and port."""
    flags = f"--checkpoint {DEMO} --device cpu --compile --port 0"
    command = [sys.executable, str(ROOT / "scripts/serve.py"), *flags.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "http" in line)
        yield process, int(line.partition("/v1")[0].rpartition(":")[2])
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130 and process.stderr.read() == ""
    finally:
        process.kill()


def memory(process: subprocess.Popen) -> float:
    """The resident memory of a process (MiB)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024


def ask(port: int, kind: str, body: dict, want: str, rng: random.Random) -> bool:
    """Send a request of a kind. Returns: whether the answer is as it must be"""
    if kind == "unsent":
        with socket.create_connection(("127.0.0.1", port), timeout=600) as client:
            client.sendall(HEAD)
        return True
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    if kind in ("cancelled", "unread"):
        body = body | {"max_tokens": 400}
    body = body | {"stream": kind in ("streamed", "cancelled")}
    data = rng.choice(BROKEN) if kind == "broken" else json.dumps(body).encode()
    connection.request("POST", "/v1/completions", data, JSON)
    try:
        if kind == "unread":
            return True
        response = connection.getresponse()
        if kind == "cancelled":
            return response.readline().startswith(b"data: ")
        found = response.read().decode()
    finally:
        connection.close()
    if kind == "broken":
        return response.status == 400 and bool(json.loads(found)["error"])
    if kind == "whole":
        return json.loads(found)["choices"][0]["text"] == want
    *events, done, end = found.split("\n\n")
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    return ("".join(parts), done, end) == (want, "data: [DONE]", "")


def expected_texts() -> list[tuple[dict, str]]:
    """Requests, and the text of each, decoded alone."""
    engine = load(checkpoint=DEMO, device="cpu", compile=True)
    found = []
    for number, (prompt, rule) in enumerate(product(PROMPTS, RULES)):
        most = 1 + 5 * number % 24
        text = generate(engine, [prompt], seed=number, max_new_tokens=most, **rule).text[0]
        found.append(({"prompt": prompt, "max_tokens": most, "seed": number, **rule}, text))
    return found


@pytest.mark.slow  # test_serve.py has a request of every kind
@pytest.mark.parametrize("count", [40, 1000, 10_000])
def test_many_requests(count):
    expected = expected_texts()
    seen: Counter[str] = Counter()

    def run(number: int) -> str:
        rng = random.Random(number)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            fits = ask(port, kind, *rng.choice(expected), rng)
        except (OSError, http.client.HTTPException, ValueError) as error:
            fits = repr(error)
        return kind if fits is True else f"request {number}, {kind}: {fits}"

    with server() as (process, port), ThreadPoolExecutor(CLIENTS) as clients:
        began = time.monotonic()
        sizes = [memory(process)]
        print(f"\n{'requests':>8} {'seconds':>8} {'MiB':>6}\n{0:8d} {0:8.1f} {sizes[0]:6.0f}")
        for part in range(8):
            seen.update(clients.map(run, range(part * count // 8, (part + 1) * count // 8)))
            sizes.append(memory(process))
            seconds = time.monotonic() - began
            print(f"{(part + 1) * count // 8:8d} {seconds:8.1f} {sizes[-1]:6.0f}", flush=True)
        print(dict(seen))
    assert seen.keys() <= KINDS.keys() and seen.total() == count, seen
    assert count < 1000 or sizes[-1] - sizes[2] < GROWTH, sizes
