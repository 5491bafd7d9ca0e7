"""A headless Chromium over its DevTools pipe: pages and scripts in them. Standard library only."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 60
# the browser reads commands at descriptor 3 and answers at 4
AS_3_AND_4 = """
import fcntl, os, sys
commands, answers = map(int, sys.argv[1:3])
commands, answers = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (commands, answers))
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """Return the browser's path; None: there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab of a browser of its own."""

    def __init__(self, folder: Path, width: int = 1000, height: int = 760):
        """folder: empty, for its profile"""
        commands, self.send = os.pipe()
        self.receive, answers = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run"
        flags += f" --disable-dev-shm-usage --hide-scrollbars --user-data-dir={folder}"
        start = [sys.executable, "-c", AS_3_AND_4, str(commands), str(answers), chromium()]
        ends = {"pass_fds": (commands, answers), "stdout": subprocess.DEVNULL}
        command = [*start, *flags.split()]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **ends)
        os.close(commands)
        os.close(answers)
        self.held = b""
        self.count = 0
        self.session: str | None = None
        self.hosts: set[str] = set()  # that the page asked something of
        self.errors: list[str] = []  # of the page's scripts
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.held:
            ready, _, _ = select.select([self.receive], [], [], WAIT_S)
            assert ready, "the browser does not answer"
            data = os.read(self.receive, 1 << 20)
            assert data, "the browser has ended"
            self.held += data
        line, _, self.held = self.held.partition(b"\0")
        message = json.loads(line)
        told = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.hosts.add(told["request"]["url"].split("/")[2])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"])[:500])
        return message

    def size(self, width: int, height: int) -> None:
        """Set the size of the window."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"Promise.resolve({script}).then(Boolean)"):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.05)

    def close(self) -> None:
        """End the browser."""
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self.send)
        os.close(self.receive)
