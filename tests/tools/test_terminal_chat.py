"""The chat of --interactive on a terminal: a pseudo-terminal types keys, and its screen is read."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers import copy_operators
from options import ROOT
from served import OPENS, demo_with

WAIT_S = 60
# where prompt_toolkit puts the cursor; colours and marks of pastes are read
CURSOR = re.compile(r"\x1b\[(?:\??(?:1|7|12|25)[hl]|\d*[A-DGJK]|0m)|\r(?=\r)|\x08")
PASTE = "\x1b[200~{}\x1b[201~\r"  # as terminals send a paste
# patterns of a screen: a prompt, an answer and a prompt, an answer that has begun, the first bytes
READY, DONE, BEGUN, LOADING = "> ?$", r"tokens/s[^>]*> ?$", r"2004l.*2004h[^\x1b]*[a-z]", r"\x1b\[\?2004h"  # fmt: skip
Steps = list[tuple[str, str]]


def command(most: int = 12, checkpoint: Path = ROOT / "checkpoints/demo") -> list[str]:
    """A chat with the demo that drafts, whether it pays on this machine or not."""
    flags = f"--interactive --compile --max_new_tokens {most} --tree dynamic"
    program = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(checkpoint)]
    return [*program, *flags.split()]


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str], **env: str):
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.environ.pop("NO_COLOR", None)
            os.environ.update({"TERM": "xterm", **env})
            os.execv(command[0], command)
        self.bytes = b""
        self.read = 0  # characters of the text that were returned

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode(errors="surrogateescape"))

    def read_to(self, pattern: str) -> str:
        """Return the screen up to a pattern."""
        end = time.monotonic() + WAIT_S
        while True:
            text = CURSOR.sub("", self.bytes.decode(errors="replace"))[self.read :]
            found = re.search(pattern, text, re.DOTALL)
            if found:
                self.read += found.end()
                return text[: found.end()]
            assert time.monotonic() < end, (pattern, text[-2000:])
            if select.select([self.screen], [], [], 1.0)[0]:
                with suppress(OSError):  # the program has ended
                    self.bytes += os.read(self.screen, 65536)

    def close(self) -> int:
        """Wait for the program's end and return its status; one that does not end is killed."""
        end = time.monotonic() + WAIT_S
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                end = float("inf")
            time.sleep(0.02)
        os.close(self.screen)
        return os.waitstatus_to_exitcode(ended[1])


def chat(
    steps: Steps, argv: list[str] | None = None, leave: str = "/bye\r", **env: str
) -> list[str]:
    """Type keys, each when the screen shows what is before. Returns: the screen behind each step."""  # fmt: skip
    talk = Terminal(argv or command(), **env)
    screens = []
    for keys, pattern in steps:
        talk.type(keys)
        screens.append(talk.read_to(pattern))
    talk.type(leave)
    assert talk.close() == 0
    return screens


def messages(file: Path) -> list[dict]:
    return json.loads(file.read_text(encoding="utf-8"))["messages"]


def test_pastes_keys_and_colours(tmp_path):
    """A paste of three lines is one turn, one of 6,020 characters is complete; drafts are coloured."""
    file = tmp_path / "c.json"
    steps = [
        ("", READY),
        ("/drafts\r", "by others[^>]*> ?$"),
        (PASTE.format("def a():\rx = 1\ry = 2"), DONE),
        ("/clear\r" + PASTE.format("x" * 6020), r"(tokens/s|the context holds)[^>]*> ?$"),
        ("/claer\x1b[D\x1b[D\x1b[D\x1b[3~a\r", "there is no /"),  # an arrow key moves in the line
        ("", READY),
        ('/clear\r"""one\rtwo"""\r', DONE),
        (f"/save {file}\r", r"1 turn\(s\) in"),
    ]
    screen = chat(steps, leave="\x15\x04")[2]
    assert screen.count("tokens/s") == 1 and "[cut at 12 tokens: --max_new_tokens]" in screen
    assert "\x1b[32m" in screen or "\x1b[36m" in screen, "the demo's head drafts what is accepted"
    said = messages(file)
    assert [m["role"] for m in said] == ["user", "assistant"] and said[0]["content"] == "one\ntwo"


def test_retry_load_and_stop(tmp_path):
    """The greedy answer again; a conversation from a file; a wrong file leaves the chat."""
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    bad = tmp_path / "bad.json"
    bad.write_text('{"messages": [{"role": "robot", "content": ""}]}')
    steps = [("", READY), ("def a():\r", DONE)]
    for file in files:
        steps += [(f"/save {file}\r", r"turn\(s\) in[^>]*> ?$"), ("/retry\r", DONE)]
    steps += [
        (f"/load {bad}\r/load {files[0]}\r", r"is\s+no\s+conversation"),
        ("", r"1 turn\(s\) of"),
    ]
    chat(steps)
    assert files[0].read_text() == files[1].read_text()


def test_no_colours_where_they_are_unwanted():
    """A lone slash is no turn. The banner and an answer keep to the width."""
    steps = [("", READY), ("/\r", r"begins a command; /help.*> ?$"), ("/drafts\r", "there are no colours here"), ("# The quick brown fox\r", DONE)]  # fmt: skip
    screens = chat(steps, command(200), NO_COLOR="1", COLUMNS="60")
    assert "\x1b[3" not in "".join(screens)
    lines = re.sub(r"\x1b\[[?\d]*\w", "", screens[0] + screens[3]).splitlines()
    assert max(map(len, lines)) < 60


def test_keys_typed_during_an_answer_wait():
    """A next question and Ctrl-D, unseen until the prompt: no key is lost, and nothing hangs."""
    steps = [("", READY), ("def a():\r", BEGUN), ("def again():\r\x04", "tokens/s"), ("", r"> def again\(\):.*tokens/s")]  # fmt: skip
    assert "again" not in chat(steps, command(300), leave="")[2]


def test_a_paste_while_it_is_busy_is_one_turn(tmp_path):
    """While the model is loaded, and while an answer is written; with and without Enter behind it."""
    lines = "".join(f"line {i}\r" for i in range(12))
    during = PASTE.format("two\rlines") + "/clear\r" + PASTE.format("a\rb")
    steps = [
        ("", LOADING),
        (PASTE.format(lines).removesuffix("\r"), "line 11"),
        ("\r", BEGUN),
        (during, r"two\r\nlines.*tokens/s.*> /clear.*> a\r\nb.*tokens/s[^>]*> ?$"),
    ]
    screen = chat(steps, leave=f"/save {tmp_path / 'c.json'}\r/bye\r")[1]
    assert "Ctrl-D to leave" in screen and "tokens/s" not in screen
    assert [m["content"] for m in messages(tmp_path / "c.json")[::2]] == ["a\nb"]


def test_no_shell_gets_what_waits():
    """A kill while an answer is written: the terminal is as before, and nothing is left in it."""
    script = f"{shlex.join(command(1800))}; echo ended $?; stty -a; read -r line; echo got $line"
    talk = Terminal(["/bin/sh", "-c", script])
    talk.read_to(READY)
    talk.type("def a():\r")
    talk.read_to(BEGUN)
    talk.type("rm -rf x\r" * 3)
    time.sleep(0.2)
    children = Path(f"/proc/{talk.pid}/task/{talk.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    assert "\x1b[?2004l" in talk.read_to("ended 143.* icanon .* echo ")
    talk.type("mine\r")
    talk.read_to("got mine")
    assert talk.close() == 0


def test_lines_of_earlier_chats_come_back(tmp_path):
    """By an arrow key. Those typed ahead are kept too, a paste of several lines among them."""
    copy_operators(tmp_path)
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    ahead = "/set seed é\r" + PASTE.format("/not\rone line")  # while it is loaded
    chat([("", LOADING), (ahead, "it is 'é'.*tokens/s[^>]*> ?$")], **home)
    chat([("", READY), ("\x1b[A" * 4 + "\r", "it is 'é'[^>]*> ?$")], **home)
    file = tmp_path / "gpt-eagle" / "history"
    lines = re.findall("^[+](.*)", file.read_text(), re.MULTILINE)
    assert lines == ["/set seed é", "/not", "one line", "/bye", "/set seed é", "/bye"]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("plain, interactive", [(False, True), (True, False)])
def test_the_thinking_is_dimmed(plain, interactive, tmp_path):
    """Without colours the text is there as it is."""
    text = "Two and two.\n</think>\n\nFour: 4."
    (tmp_path / "answer.lark").write_text(f"start: {json.dumps(text)}")
    argv = command(400, demo_with(tmp_path, OPENS))
    argv += ["--chat", "--grammar", str(tmp_path / "answer.lark")]
    if not interactive:
        argv[argv.index("--interactive")] = "--prompt=2+2?"
    talk = Terminal(argv, **({"NO_COLOR": "1"} if plain else {}))
    if interactive:
        talk.read_to(READY)
        talk.type("2+2?\r/bye\r")
    talk.read_to("tokens/s")
    assert talk.close() == 0
    seen = talk.bytes.decode().replace("\r\n", "\n").replace("\x1b[0m\x1b[2m", "")  # pieces are one
    assert (f"{text}\n" if plain else "\x1b[2mTwo and two.\x1b[0m\n\nFour: 4.\n") in seen
