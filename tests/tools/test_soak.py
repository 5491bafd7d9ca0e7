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
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from run.generate import generate, load  # noqa: E402
from run.options import DEMO  # noqa: E402

CLIENTS = 8
OPTIONS = {"checkpoint": DEMO, "device": "cpu", "compile": True}
PROMPTS = ("def read_lines(path):", "import ", "class A", "x = [" * 30, "def f(a, b):\n    return")
RULES = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2},
)
# as many of each kind in a hundred
KINDS = {"whole": 55, "streamed": 20, "cancelled": 10, "broken": 5, "unsent": 5, "unread": 5}
GROWTH = 16  # MiB that the server may grow by after a quarter of the requests


@contextmanager
def server(checkpoint: str = DEMO):
    """A server in a process of its own. Yields: its process and port."""
    argv = ["--checkpoint", checkpoint, "--device", "cpu", "--compile", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve().parents[2] / "scripts/serve.py"), *argv],
        stderr=subprocess.PIPE,
        text=True,
    )
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


class Soak:
    """Requests to one server, and the answers that they must get."""

    def __init__(self, port: int, expected: dict):
        self.port = port
        self.expected = expected
        self.seen: Counter[str] = Counter()  # requests that ended as they should
        self.faults: list[str] = []
        self.lock = threading.Lock()

    def run(self, number: int) -> None:
        """Send one request of a kind that its number decides."""
        rng = random.Random(number)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        key = rng.choice(list(self.expected))
        body = {"prompt": key[0], "seed": key[1], "max_tokens": key[2], **RULES[key[3]]}
        try:
            fits = getattr(self, kind)(body, self.expected[key])
        except (OSError, http.client.HTTPException, ValueError) as error:
            fits = repr(error)
        with self.lock:
            self.seen[kind] += fits is True
            if fits is not True:
                self.faults.append(f"request {number}, {kind}: {fits}")

    def send(self, data: bytes) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        return connection

    def read(self, data: bytes) -> tuple[int, str]:
        """Send a request. Returns: the status and the text of the answer."""
        connection = self.send(data)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def whole(self, body: dict, want: str) -> bool:
        status, found = self.read(json.dumps(body).encode())
        return status == 200 and json.loads(found)["choices"][0]["text"] == want

    def streamed(self, body: dict, want: str) -> bool:
        _, found = self.read(json.dumps(body | {"stream": True}).encode())
        *events, done, end = found.split("\n\n")
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
        text = "".join(part["choices"][0]["text"] for part in parts)
        return (text, done, end) == (want, "data: [DONE]", "")

    def cancelled(self, body: dict, want: str) -> bool:
        """Leave after the first event of a long answer."""
        connection = self.send(json.dumps(body | {"stream": True, "max_tokens": 400}).encode())
        response = connection.getresponse()
        begun = response.readline().startswith(b"data: ")
        response.close()
        connection.close()
        return begun

    def broken(self, body: dict, want: str) -> bool:
        bodies = [b"{", b"[1]", b'{"prompt": 1}', b'{"prompt": "a", "n": "x"}', b"\xff"]
        status, found = self.read(random.Random(want).choice(bodies))
        return status == 400 and bool(json.loads(found)["error"])

    def unsent(self, body: dict, want: str) -> bool:
        """Leave in the middle of a body."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=600) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
            client.sendall(f'{head}Content-Type: application/json\r\n\r\n{{"prompt"'.encode())
        return True

    def unread(self, body: dict, want: str) -> bool:
        """Leave without reading a whole answer."""
        self.send(json.dumps(body | {"max_tokens": 400}).encode()).close()
        return True


def expected_texts() -> dict:
    """The text of every (prompt, seed, max_tokens, rule), each decoded alone."""
    engine = load(**OPTIONS)
    rng = random.Random(0)
    keys = [(p, rng.randrange(2**40), rng.randint(1, 24), r) for p in PROMPTS for r in range(4)]
    found = {}
    for prompt, seed, most, rule in keys:
        options = RULES[rule] | {"seed": seed, "max_new_tokens": most}
        found[prompt, seed, most, rule] = generate(engine, [prompt], **options).text[0]
    return found


@pytest.mark.slow  # test_serve.py has a request of every kind
@pytest.mark.parametrize("count", [40, 1000, 10_000])
def test_many_requests(count):
    expected = expected_texts()
    with server() as (process, port), ThreadPoolExecutor(CLIENTS) as clients:
        soak = Soak(port, expected)
        sizes = [memory(process)]
        print(f"\n{'requests':>8} {'seconds':>8} {'MiB':>6}\n{0:8d} {0:8.1f} {sizes[0]:6.0f}")
        began = time.monotonic()
        for part in range(8):
            list(clients.map(soak.run, range(part * count // 8, (part + 1) * count // 8)))
            sizes.append(memory(process))
            seconds = time.monotonic() - began
            print(f"{(part + 1) * count // 8:8d} {seconds:8.1f} {sizes[-1]:6.0f}", flush=True)
        print(dict(soak.seen))
    assert not soak.faults, soak.faults[:5]
    assert soak.seen.total() == count
    assert count < 1000 or sizes[-1] - sizes[2] < GROWTH, sizes
