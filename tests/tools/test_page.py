"""The page of the server in a real browser: chats, options, drafts, and texts that must not run."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
from browser import Browser, chromium  # noqa: E402
from served import OPENS, Running, demo_with, wait_for  # noqa: E402

in_a_browser = pytest.mark.skipif(
    chromium() is None, reason="there is no chromium; apt-get install chromium"
)
ANSWER = "document.querySelector('.message.assistant .body').textContent"
SAID = "chat.messages[1].content"


@pytest.fixture(scope="module")
def running():
    running = Running("--temperature", "0", "--ignore_eos")
    yield running
    running.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
    assert {host.partition(":")[0] for host in browser.hosts} <= {"127.0.0.1"}, "of no other host"
    assert not browser.errors


def opened(browser: Browser, running: Running) -> Browser:
    """The page of a server, without conversations."""
    url = f"http://127.0.0.1:{running.port}/"
    browser.open(url)
    browser.run("localStorage.clear()")
    browser.open(url)
    browser.wait("document.title === 'demo' && $('most').value")
    return browser


@pytest.fixture
def page(browser, running):
    return opened(browser, running)


def ask(page, text: str, most: int = 60) -> None:
    page.run(f"$('most').value = {most}; $('text').value = {json.dumps(text)}")
    page.run("$('ask').requestSubmit()")


def answered(page, text: str, most: int = 60, messages: int = 2) -> None:
    ask(page, text, most)
    page.wait(f"!running && chat.messages.length === {messages}")


def press(page, button: str) -> None:
    buttons = "[...document.querySelectorAll('button')]"
    page.run(f"{buttons}.find(e => e.textContent === '{button}').click()")


def texts(page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")


def test_the_page_is_alone(running):
    """One file, which names no other host, and may ask none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/") as answer:
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
        assert not re.search("innerHTML|src=|@import", answer.read().decode())


@in_a_browser
def test_a_chat_is_streamed_kept_and_retried(page):
    """Its drafts are shaded; an answer again is the same, and so is the page behind a reload."""
    answered(page, "Hello")
    first = page.run(SAID)
    assert first and "tokens a pass" in texts(page, ".message .line")[-1]
    press(page, "Drafts")
    assert page.run(ANSWER) == first and texts(page, ".body .by-head, .body .by-lookup")
    press(page, "Retry")
    page.wait("!running && chat.messages.length === 2")
    assert page.run(SAID) == first, "greedy"
    page.open(page.run("location.href"))
    page.wait("chat.messages.length === 2")
    assert page.run(SAID) == first
    page.run("show(fresh()); document.querySelector('nav .open').click()")
    assert page.run(SAID) == first


@in_a_browser
def test_options_belong_to_a_conversation(page):
    """A new one begins with those of the last; an empty field is the server's own."""
    names = ["temperature", "top_p", "top_k", "min_p"]
    assert page.run(f"{names}.map(id => $(id).placeholder)") == ["0", "1", "0", "0"]

    def choose(**values: str) -> None:
        for name, value in values.items():
            page.run(f"$('{name}').value = {json.dumps(value)}; $('{name}').onchange()")

    page.run("window.bodies = []; window.before = window.fetch; true")
    page.run("window.fetch = (path, more) => { if (more && more.body) bodies.push(JSON.parse(more.body)); return before(path, more); }")  # fmt: skip
    choose(system="Be brief.", temperature="0.7", top_k="20")
    answered(page, "Hello", 5)
    body = page.run("bodies.pop()")
    assert (body["temperature"], body["top_k"]) == (0.7, 20) and "min_p" not in body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    press(page, "New chat")
    assert page.run("[$('temperature').value, $('system').value]") == ["0.7", "Be brief."]
    choose(temperature="", min_p="0.1")
    answered(page, "Bye", 5)
    assert "temperature" not in page.run("bodies.pop()")
    page.open(page.run("location.href"))
    page.wait("chat.messages.length === 2 && $('most').value")
    assert page.run(f"{names}.map(id => $(id).value)") == ["", "", "20", "0.1"]
    page.run("show(stored()[1])")
    assert page.run(f"{names}.map(id => $(id).value)") == ["0.7", "", "20", ""]


@in_a_browser
def test_a_full_context_drops_the_oldest_turns(page, running):
    """As on the terminal, and the page says so; the answer before says what cut it."""
    context = running.engine.context
    long = "x = 1\n" * 300
    for number in (1, 2):
        answered(page, f"{number} {long}", 2000, 2 * number)
    lines = texts(page, ".message .line")
    assert all(f"cut at the context of {context} tokens" in line for line in lines), lines
    assert page.run("chat.first") == 2
    assert "the oldest 2 messages are no longer read" in texts(page, ".full")[0]
    answered(page, "Hello", 5, 6)
    assert "cut at the most tokens (Options)" in texts(page, ".message .line")[-1]
    page.run("show(stored()[0])")
    assert len(texts(page, ".full")) == 1, "a reload keeps it"


@in_a_browser
def test_a_click_or_a_key_shows_the_tree_of_a_cycle(page):
    """Its accepted nodes are the text of the cycle, but for the root; a second click closes it."""
    answered(page, "Hello")
    press(page, "Drafts")
    click = "document.querySelector('.body .by-head, .body .by-lookup').click()"
    cycle = page.run("chat.messages[1].spans.find(each => each[0])[2]")
    page.run(click)
    told = page.run("document.querySelector('.tree').firstChild.textContent")
    accepted = texts(page, ".tree b")
    said = page.run(SAID)
    text = ""
    for _, count, number in page.run("chat.messages[1].spans"):
        text += said[:count] if number == cycle else ""
        said = said[count:]
    assert told.startswith("cycle ") and f", {len(accepted) - 2} accepted, " in told
    assert "".join(accepted[1:]) == json.dumps(text, ensure_ascii=False)[1:-1]
    page.run(click)
    assert page.run("document.querySelector('.tree')") is None
    assert "trees" not in page.run("localStorage.getItem(STORE)")
    # Tab reaches one token of an answer, arrow keys the others, and Enter shows the tree
    tokens = "[...document.querySelectorAll('.cycle')]"
    assert page.run(f"{tokens}.map(e => e.tabIndex).filter(i => i === 0).length") == 1
    page.run(f"{tokens}[0].focus()")
    for key, code in (("ArrowRight", 39), ("ArrowRight", 39), ("ArrowLeft", 37), ("Enter", 13)):
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            page.call("Input.dispatchKeyEvent", **pressed)
    assert page.run(f"{tokens}.indexOf(document.activeElement)") == 1
    second = page.run("chat.messages[1].spans.filter(each => each[2] >= 0)[1][2]")
    assert page.run("document.querySelector('.tree').cycle") == second


@in_a_browser
def test_an_answer_is_stopped(page, running):
    """The server evicts it; what came is kept. So it is with a reload in the middle."""
    for leave in ("$('stop').click()", "location.reload()"):
        ask(page, "def f(", 1500)
        page.wait(f"running && {SAID}.length > 5")
        page.run(leave)
        page.wait("document.readyState === 'complete' && !running && $('model').textContent === 'demo'")  # fmt: skip
        assert page.run("stored()[0].messages[1].content.length") > 5
        wait_for(lambda: not running.batcher.jobs)
        page.run("show(fresh())")


@in_a_browser
def test_the_thinking_is_folded(browser, tmp_path):
    """A reload keeps it so; a race counts it as text."""
    (tmp_path / "answer.lark").write_text(r'start: "Two and two.\n</think>\n\nFour: 4."')
    demo = str(demo_with(tmp_path, OPENS))
    own = Running("--checkpoint", demo, "--chat", "--grammar", str(tmp_path / "answer.lark"))
    page = opened(browser, own)
    answered(page, "2+2?", 400)
    for _ in range(2):
        assert page.run(ANSWER) == "Four: 4."
        assert texts(page, ".message.assistant .thought div") == ["Two and two."]
        assert page.run("document.querySelector('.thought').open") is False
        page.open(page.run("location.href"))
        page.wait("document.querySelector('nav .open')")
        page.run("document.querySelector('nav .open').click()")
    spans = page.run("chat.messages[1].spans")
    assert sum(count for _, count, _ in spans) == len("Four: 4.")
    page.run("$('most').value = 60; $('mode').click(); $('start').requestSubmit()")
    page.wait("!running && laps.length === 2")
    assert page.run("laps[0].text") == page.run("laps[1].text") == "Two and two.Four: 4."
    own.close()


HOSTILE = """<script>fault = 1</script> <img src=x onerror="fault = 1"> [a](javascript:fault=1)
# <b onclick="fault = 1">title</b>
- **<svg onload=fault=1>** `</code><script>fault = 1</script>`
| <i>a</i> | b |
|---|---|
| [x](https://a.example/"onmouseover="fault=1) | c |
```html
</pre><script>fault = 1</script>
```"""


@in_a_browser
def test_nothing_in_an_answer_runs(page):
    page.run("fault = 0")
    page.run(f"markdown($('messages'), {json.dumps(HOSTILE)})")
    page.run(f"shade($('messages'), {json.dumps(HOSTILE)}, [['<b>', 9], ['', 500]])")
    for role in ("user", "assistant"):
        message = {"role": role, "content": HOSTILE, "line": HOSTILE, "spans": []}
        page.run(f"chat.messages = [{json.dumps(message)}]; save(); show(chat)")
    every = "[...document.querySelectorAll('#messages *')]"
    page.run(f"{every}.forEach(e => e.click && e.localName !== 'a' && e.click())")
    assert page.run("fault") == 0
    tags = page.run(f"{every}.map(e => e.localName)")
    assert not {"script", "img", "svg", "b", "i"} & set(tags), tags
    links = page.run("[...document.querySelectorAll('#messages a')].map(e => e.protocol)")
    assert set(links) <= {"https:"}


@in_a_browser
def test_a_server_that_is_gone_and_comes_back(page):
    """It may have another model then: a page left open asks what there is."""
    page.run("window.before = window.fetch")
    page.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
    ask(page, "Hello")
    page.wait("!running && document.querySelector('.message .fault')")
    assert "does not answer" in texts(page, ".message .fault")[0], "beside the turn"
    assert page.run("chat.messages.length") == 1, "the turn stays for another try"
    page.run("window.fetch = before; props = { model: 'old', chat: !props.chat, rests: false }")
    press(page, "Retry")
    page.wait("!running && chat.messages.length === 2")
    assert page.run("document.querySelector('.fault')") is None
    assert page.run("[document.title, props.rests]") == ["demo", True]
