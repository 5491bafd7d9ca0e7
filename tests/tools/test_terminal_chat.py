"""The chat of --interactive on a terminal: a pseudo-terminal types, and its screen is read."""

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

DEMO = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(ROOT / "checkpoints/demo")]
DEMO += ["--interactive", "--compile", "--max_new_tokens", "12"]
DEMO += ["--tree", "dynamic"]  # drafts, whether it pays on this machine or not
WAIT_S = 60
# where prompt_toolkit puts the cursor; colours and marks of pastes are read
CURSOR = re.compile(r"\x1b\[(?:\??(?:1|7|12|25)[hl]|\d*[A-DGJK]|0m)|\r(?=\r)|\x08")


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
        os.write(self.screen, text.encode())

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


@pytest.fixture
def terminal():
    talk = Terminal(DEMO)
    talk.read_to("> ?$")
    talk.type("/drafts\r")
    talk.read_to("by others[^>]*> ?$")
    yield talk
    talk.type("\x15\x04")
    assert talk.close() == 0


PASTE = "\x1b[200~{}\x1b[201~\r"  # as terminals send a paste


def test_pastes_keys_and_colours(terminal, tmp_path):
    """A paste of three lines is one turn, one of 6,020 characters is complete; drafts are coloured."""
    terminal.type(PASTE.format("def a():\rx = 1\ry = 2"))
    screen = terminal.read_to(r"tokens/s[^>]*> ?$")
    assert screen.count("tokens/s") == 1 and "[cut at 12 tokens: --max_new_tokens]" in screen
    assert "\x1b[32m" in screen or "\x1b[36m" in screen, "the demo's head drafts what is accepted"
    terminal.type("/clear\r" + PASTE.format("x" * 6020))
    terminal.read_to(r"(tokens/s|the context holds)[^>]*> ?$")
    terminal.type("/claer\x1b[D\x1b[D\x1b[D\x1b[3~a\r")  # an arrow key moves in the line
    terminal.read_to(r"there is no /")
    terminal.read_to("> ?$")
    terminal.type('/clear\r"""one\rtwo"""\r')
    terminal.read_to(r"tokens/s[^>]*> ?$")
    file = tmp_path / "c.json"
    terminal.type(f"/save {file}\r")
    terminal.read_to(r"1 turn\(s\) in")
    said = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in said] == ["user", "assistant"] and said[0]["content"] == "one\ntwo"


def test_retry_load_and_stop(terminal, tmp_path):
    """The greedy answer again; a conversation from a file; a wrong file leaves the chat."""
    terminal.type("def a():\r")
    terminal.read_to(r"tokens/s[^>]*> ?$")
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for file in files:
        terminal.type(f"/save {file}\r")
        terminal.read_to(r"turn\(s\) in[^>]*> ?$")
        terminal.type("/retry\r")
        terminal.read_to(r"tokens/s[^>]*> ?$")
    assert files[0].read_text() == files[1].read_text()
    (tmp_path / "bad.json").write_text('{"messages": [{"role": "robot", "content": ""}]}')
    terminal.type(f"/load {tmp_path / 'bad.json'}\r/load {files[0]}\r")
    terminal.read_to(r"is\s+no\s+conversation")
    terminal.read_to(r"1 turn\(s\) of")


def test_no_colours_where_they_are_unwanted():
    talk = Terminal(DEMO, NO_COLOR="1")
    talk.read_to("Ctrl-D to leave")
    talk.type("/drafts\rdef a():\r")
    screen = talk.read_to("there are no colours here.*tokens/s")
    talk.type("/bye\r")
    assert talk.close() == 0 and "\x1b[3" not in screen


def test_keys_typed_during_an_answer_wait():
    """A next question and Ctrl-D, unseen until the prompt: no key is lost, and nothing hangs."""
    talk = Terminal([word if word != "12" else "300" for word in DEMO])
    talk.read_to("> ?$")
    talk.type("def a():\r")
    talk.read_to(r"2004l.*2004h[^\x1b]*[a-z]")
    talk.type("def again():\r\x04")
    answer = talk.read_to("tokens/s")
    assert "again" not in answer
    talk.read_to(r"> def again\(\):.*tokens/s")
    assert talk.close() == 0


LONG = [word if word != "12" else "1800" for word in DEMO]
ANSWERS = r"2004l.*2004h[^\x1b]*[a-z]"  # an answer has begun


def test_a_paste_while_it_is_busy_is_one_turn(tmp_path):
    """While the model is loaded, and while an answer is written; with and without Enter behind it."""
    lines = "".join(f"line {i}\r" for i in range(12))
    talk = Terminal(DEMO)
    talk.read_to(re.escape("\x1b[?2004h"))  # the first that it writes
    talk.type(PASTE.format(lines).removesuffix("\r"))
    screen = talk.read_to("line 11")
    assert "Ctrl-D to leave" in screen and "tokens/s" not in screen
    talk.type("\r")
    talk.read_to(ANSWERS)
    talk.type(PASTE.format("two\rlines") + "/clear\r" + PASTE.format("a\rb"))
    talk.read_to(r"two\r\nlines.*tokens/s.*> /clear.*> a\r\nb.*tokens/s[^>]*> ?$")
    talk.type(f"/save {tmp_path / 'c.json'}\r/bye\r")
    assert talk.close() == 0
    said = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert [m["content"] for m in said[::2]] == ["a\nb"]


def test_ctrl_c_drops_what_waits():
    """Lines and a paste that is longer than a terminal's own buffer; the chat goes on."""
    talk = Terminal(LONG)
    talk.read_to("> ?$")
    talk.type("def a():\r")
    talk.read_to(ANSWERS)
    talk.type("one\rtwo\r" + PASTE.format("line\r" * 2000) + "\x03")
    talk.read_to(r"\[stopped; 200[23] waiting line\(s\) dropped\][^>]*> ?$")
    talk.type("/bye\r")
    assert talk.close() == 0


def test_no_shell_gets_what_waits():
    """A kill while an answer is written: the terminal is as before, and nothing is left in it."""
    script = f"{shlex.join(LONG)}; echo ended $?; stty -a; read -r line; echo got $line"
    talk = Terminal(["/bin/sh", "-c", script])
    talk.read_to("> ?$")
    talk.type("def a():\r")
    talk.read_to(ANSWERS)
    talk.type("rm -rf x\r" * 3)
    time.sleep(0.2)
    children = Path(f"/proc/{talk.pid}/task/{talk.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    screen = talk.read_to("ended 143.* icanon .* echo ")
    assert "\x1b[?2004l" in screen
    talk.type("mine\r")
    talk.read_to("got mine")
    assert talk.close() == 0


def test_a_screen_has_whole_words_and_short_lines():
    """The banner and an answer keep to the width; a lone slash is no turn."""
    talk = Terminal([word if word != "12" else "200" for word in DEMO], COLUMNS="60")
    banner = talk.read_to("> ?$")
    talk.type("/\r")
    assert "begins a command; /help" in talk.read_to("> ?$")
    talk.type("# The quick brown fox\r")
    screen = banner + talk.read_to(r"tokens/s.*> ?$")
    assert max(map(len, re.sub(r"\x1b\[[?\d]*\w", "", screen).splitlines())) < 60
    talk.type("/bye\r")
    assert talk.close() == 0


def test_lines_of_earlier_chats_come_back(tmp_path):
    """By an arrow key. Those typed ahead are kept too, a paste of several lines among them."""
    copy_operators(tmp_path)
    for first in (True, False):
        talk = Terminal(DEMO, XDG_CACHE_HOME=str(tmp_path))
        talk.read_to(re.escape("\x1b[?2004h"))
        if first:
            talk.type("/set seed é\r" + PASTE.format("/not\rone line"))  # while it is loaded
            talk.read_to("it is 'é'.*tokens/s[^>]*> ?$")
        else:
            talk.read_to("> ?$")
            talk.type("\x1b[A" * 4 + "\r")
            talk.read_to("it is 'é'[^>]*> ?$")
        talk.type("/bye\r")
        assert talk.close() == 0
    lines = re.findall("^[+](.*)", (tmp_path / "gpt-eagle" / "history").read_text(), re.MULTILINE)
    assert lines == ["/set seed é", "/not", "one line", "/bye", "/set seed é", "/bye"]
    assert (tmp_path / "gpt-eagle" / "history").stat().st_mode & 0o777 == 0o600


def test_a_chat_goes_on_where_no_line_can_be_kept(tmp_path):
    (tmp_path / "gpt-eagle").touch()
    talk = Terminal(DEMO, XDG_CACHE_HOME=str(tmp_path), CXX="none")
    talk.read_to("lines are not kept for the next chat: File exists[^>]*> ?$")
    talk.type("/bye\r")
    assert talk.close() == 0


def test_letters_of_others_in_the_c_locale(tmp_path):
    """On a narrow terminal. Bytes that are no letters are refused, and the chat goes on."""
    talk = Terminal(DEMO, LC_ALL="C", COLUMNS="40")
    talk.read_to("> ?$")
    os.write(talk.screen, b"\xff\xfea\r")
    talk.read_to("half a character[^>]*> ?$")
    talk.type("é ü €\r")
    talk.read_to("tokens/s[^>]*> ?$")
    talk.type(f"/save {tmp_path / 'c.json'}\r/bye\r")
    assert talk.close() == 0
    said = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert said["messages"][0]["content"] == "é ü €"
