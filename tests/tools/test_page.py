"""The page of the server in a real browser, and what the server tells it of drafts; keys and origins."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import replace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
from test_serve import PROMPT, Running, wait_for  # noqa: E402

from browser import Browser, chromium  # noqa: E402
from drafts.by_value import ByValue  # noqa: E402
from run.generate import generate, load  # noqa: E402
from run.options import DEMO  # noqa: E402
from server import app as serve  # noqa: E402

in_a_browser = pytest.mark.skipif(
    chromium() is None, reason="there is no chromium; apt-get install chromium"
)


@pytest.fixture(scope="module")
def running():
    """A server that drafts, whether it pays on this machine or not."""
    load_engine = serve.load_engine
    with pytest.MonkeyPatch.context() as patch:
        drafts = {"policy": ByValue()}
        patch.setattr(serve, "load_engine", lambda config: replace(load_engine(config), **drafts))
        running = Running("--temperature", "0", "--ignore_eos")
    yield running
    running.close()


@pytest.fixture(scope="module")
def browser(running, tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
    assert browser.hosts <= {f"127.0.0.1:{running.port}"}, "nothing of another host is asked for"
    assert not browser.errors


@pytest.fixture
def page(browser, running):
    browser.open(f"http://127.0.0.1:{running.port}/")
    browser.run("localStorage.clear()")
    browser.open(f"http://127.0.0.1:{running.port}/")
    browser.wait("document.title === 'demo' && $('most').value")
    return browser


def ask(page, text: str, most: int = 60) -> None:
    page.run(f"$('most').value = {most}")
    page.run(f"$('text').value = {json.dumps(text)}; $('ask').requestSubmit()")


def answered(page, text: str, most: int = 60, messages: int = 2) -> None:
    ask(page, text, most)
    page.wait(f"!running && chat.messages.length === {messages}")


def press(page, button: str) -> None:
    buttons = "[...document.querySelectorAll('button')]"
    page.run(f"{buttons}.find(e => e.textContent === '{button}').click()")


# ---------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("temperature", [0, 1])
def test_without_drafts_the_text_is_the_same(running, temperature):
    """Alone, no token is drafted; beside another answer it may be."""
    options = {"seed": 3, "max_tokens": 60, "temperature": temperature}
    drafted = running.complete(**options)
    plain = running.complete(**options, extra_body={"draft": False})
    assert drafted.choices[0].text == plain.choices[0].text
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert drafted.usage.completion_tokens_details.accepted_prediction_tokens > 0
    both = running.complete([PROMPT] * 2, **options)
    assert both.choices[0].text == plain.choices[0].text


def test_drafted_tokens_of_a_request(running):
    """A request may say how many at most; the acceptance has vLLM's names."""
    texts = set()
    for asked in (None, 0, 3, 7, 11.0):
        body = {} if asked is None else {"draft_tokens": asked}
        most = 11 if asked is None else asked
        answer = running.complete(temperature=1, seed=3, max_tokens=60, extra_body=body)
        texts.add(answer.choices[0].text)
        told = answer.metrics["speculative_decoding"]
        steps, histogram = told["num_spec_steps"], told["acceptance_histogram"]
        assert sum(histogram) == steps and (steps == 0) == (most == 0)
        assert sum(i * n for i, n in enumerate(histogram)) == told["num_accepted_draft_tokens"]
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == told["num_accepted_draft_tokens"]
        assert told["num_draft_tokens"] <= most * steps
        if steps:
            accepted = told["num_accepted_draft_tokens"]
            assert told["mean_acceptance_length"] == 1 + accepted / steps > 1
            assert told["draft_acceptance_rate"] == accepted / told["num_draft_tokens"]
    assert len(texts) == 1
    usage = {"stream_options": {"include_usage": True}}
    *_, last = running.complete(seed=3, max_tokens=60, stream=True, **usage)
    assert last.metrics["speculative_decoding"]["num_spec_steps"] > 0
    each = {"draft_tokens": [0, None]}
    answer = running.complete([PROMPT, PROMPT], seed=3, max_tokens=60, extra_body=each)
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_a_tree_of_one_size_takes_no_smaller_number():
    engine = load(checkpoint=DEMO, device="cpu", tree="dynamic:3,2,6", max_new_tokens=8)
    assert generate(engine, ["def f("], draft=5).tokens == generate(engine, ["def f("]).tokens
    fault = "draft must be a whole number from 5 on, as draft trees have one size here; it is 4"
    with pytest.raises(ValueError, match=fault):
        generate(engine, ["def f("], draft=4)


@pytest.mark.parametrize("options", [{}, {"stop": ["e", "zz"]}], ids=["", "stops"])
def test_events_tell_what_was_drafted(running, options):
    """The spans of an event are its text; the sums are those of the usage."""
    usage = {"stream_options": {"include_usage": True}}
    *events, last = running.complete(stream=True, max_tokens=60, seed=3, **usage, **options)
    told = [event.choices[0].drafted for event in events]
    for event, drafted in zip(events, told):
        assert sum(count for _, count in drafted["spans"]) == len(event.choices[0].text)
        assert {source for source, _ in drafted["spans"]} <= {"", "head", "lookup"}
        assert drafted["accepted"] <= drafted["tokens"]
    details = last.usage.completion_tokens_details
    assert sum(drafted["tokens"] for drafted in told) == last.usage.completion_tokens
    assert sum(drafted["accepted"] for drafted in told) == details.accepted_prediction_tokens
    assert sum(drafted["rejected"] for drafted in told) == details.rejected_prediction_tokens


def test_events_have_trees_where_they_are_asked_for(running):
    """Every cycle of the spans has one; the accepted nodes below the root are the answer."""
    options = {"stream": True, "max_tokens": 60, "seed": 3}
    events = list(running.complete(**options, extra_body={"trees": True}))
    told = [event.choices[0].drafted for event in events]
    trees = [tree for drafted in told for tree in drafted["trees"]]
    assert len(trees) == sum(drafted["passes"] for drafted in told)
    assert {cycle for drafted in told for *_, cycle in drafted["spans"]} <= {*range(-1, len(trees))}
    kept = [[text for _, text, accepted in tree if accepted][1:] for tree in trees]
    text = "".join(event.choices[0].text for event in events)
    found = trees[0][0][1] + "".join(map("".join, kept))  # the last cycle goes beyond the limit
    assert found.startswith(text) and max(map(len, trees)) > 4
    for tree in trees:
        assert tree[0][0] == -1 and all(parent < i for i, (parent, *_) in enumerate(tree))
    assert "trees" not in next(iter(running.complete(**options))).choices[0].drafted


def test_the_page_is_alone(running):
    """One file, which names no other host, and may ask none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/") as answer:
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
        assert not re.search("innerHTML|src=|@import", answer.read().decode())


# ---------------------------------------------------------------------------------------- the page


@in_a_browser
def test_a_chat_is_streamed_kept_and_retried(page):
    answered(page, "Hello")
    first = page.run("chat.messages[1].content")
    assert first and "tokens a pass" in page.run(
        "document.querySelector('.message .line').textContent"
    )
    press(page, "Drafts")
    assert page.run("document.querySelector('.message.assistant .body').textContent") == first
    assert page.run("document.querySelectorAll('.body .by-head, .body .by-lookup').length") > 0
    press(page, "Retry")
    page.wait("!running && chat.messages.length === 2")
    assert page.run("chat.messages[1].content") == first, "greedy"
    page.open(page.run("location.href"))
    page.wait("chat.messages.length === 2")
    assert page.run("chat.messages[1].content") == first, "a reload shows it again"
    page.run("show(fresh()); document.querySelector('nav .open').click()")
    assert page.run("chat.messages[1].content") == first


@in_a_browser
def test_options_belong_to_a_conversation(page):
    """A new one begins with those of the last; an empty field is the server's own."""
    assert page.run("['temperature', 'top_p', 'top_k', 'min_p'].map(id => $(id).placeholder)") == ["0", "1", "0", "0"]  # fmt: skip

    def choose(**values) -> None:
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
    assert page.run("[$('temperature').value, $('min_p').value]") == ["", "0.1"]
    page.run("show(stored()[1])")
    assert page.run("[$('temperature').value, $('top_k').value, $('min_p').value]") == ["0.7", "20", ""]  # fmt: skip


@in_a_browser
def test_a_full_context_drops_the_oldest_turns(page, running):
    """As on the terminal, and the page says so; the answer before says what cut it."""
    context = running.engine.context
    long = "x = 1\n" * 300
    for number in (1, 2):
        answered(page, f"{number} {long}", 2000, 2 * number)
    lines = page.run("[...document.querySelectorAll('.message .line')].map(e => e.textContent)")
    assert all(f"cut at the context of {context} tokens" in line for line in lines), lines
    note = page.run("document.querySelector('.full').textContent")
    assert page.run("chat.first") == 2 and "the oldest 2 messages are no longer read" in note
    answered(page, "Hello", 5, 6)
    last = page.run("[...document.querySelectorAll('.message .line')].pop().textContent")
    assert "cut at the most tokens (Options)" in last
    page.run("show(stored()[0])")
    assert page.run("document.querySelectorAll('.full').length") == 1, "a reload keeps it"


@in_a_browser
def test_a_click_shows_the_tree_of_a_cycle(page):
    """Its accepted nodes are the text of the cycle, but for the root; a second click closes it."""
    answered(page, "Hello")
    press(page, "Drafts")
    click = "document.querySelector('.body .by-head, .body .by-lookup').click()"
    cycle = page.run("chat.messages[1].spans.find(each => each[0])[2]")
    page.run(click)
    told = page.run("document.querySelector('.tree').firstChild.textContent")
    accepted = page.run("[...document.querySelectorAll('.tree b')].map(e => e.textContent)")
    said = page.run("chat.messages[1].content")
    text = ""
    for _, count, number in page.run("chat.messages[1].spans"):
        text += said[:count] if number == cycle else ""
        said = said[count:]
    assert told.startswith("cycle ") and f", {len(accepted) - 2} accepted, " in told
    assert "".join(accepted[1:]) == json.dumps(text, ensure_ascii=False)[1:-1]
    page.run(click)
    assert page.run("document.querySelector('.tree')") is None
    assert "trees" not in page.run("localStorage.getItem(STORE)")


@in_a_browser
def test_the_tree_by_keyboard(page):
    """Tab reaches one token of an answer, arrow keys the others, and Enter shows the tree."""
    answered(page, "Hello")
    press(page, "Drafts")
    tokens = "[...document.querySelectorAll('.cycle')]"
    assert page.run(f"{tokens}.map(e => e.tabIndex).filter(i => i === 0).length") == 1
    page.run(f"{tokens}[0].focus()")
    for key, code in (("ArrowRight", 39), ("ArrowRight", 39), ("ArrowLeft", 37), ("Enter", 13)):
        for kind in ("keyDown", "keyUp"):
            press_key = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            page.call("Input.dispatchKeyEvent", **press_key)
    assert page.run(f"{tokens}.indexOf(document.activeElement)") == 1
    assert page.run("document.querySelector('.tree').cycle") == page.run(
        "chat.messages[1].spans.filter(each => each[2] >= 0)[1][2]"
    )


@in_a_browser
def test_markdown_while_it_streams(page):
    """The answer is drawn as it will stay; Drafts shows the shaded tokens meanwhile."""
    event = {
        "tokens": 1,
        "accepted": 1,
        "rejected": 0,
        "passes": 1,
        "spans": [["head", 9, 0]],
        "trees": [],
    }
    page.run("window.before = ask; window.go = null; true")
    page.run(
        "ask = async (said, more, signal, on) => { on('**bold** ', " + json.dumps(event) + ");"
        " await new Promise(end => { go = end; }); return ''; }"
    )
    ask(page, "Hello")
    page.wait("document.querySelector('.message.assistant .body strong')")
    press(page, "Drafts")
    assert (
        page.run("document.querySelector('.message.assistant .by-head').textContent") == "**bold** "
    )
    page.run("go()")
    page.wait("!running")
    assert page.run("chat.messages[1].content") == "**bold** "
    page.run("ask = before; true")


@in_a_browser
def test_an_answer_is_stopped(page, running):
    """The server evicts it; what came is kept. So it is with a reload in the middle."""
    for leave in ("$('stop').click()", "location.reload()"):
        ask(page, "def f(", 1500)
        page.wait("running && chat.messages[1].content.length > 5")
        page.run(leave)
        page.wait(
            "document.readyState === 'complete' && !running && $('model').textContent === 'demo'"
        )
        assert page.run("stored()[0].messages[1].content.length") > 5
        wait_for(lambda: not running.batcher.jobs)
        page.run("show(fresh())")


@in_a_browser
def test_a_race_ends_in_the_same_text(page):
    page.run("$('most').value = 60; $('mode').click(); $('start').requestSubmit()")
    page.wait("!running && laps.length === 2")
    assert page.run("$('verdict').textContent").startswith("identical texts: ")
    assert page.run("laps[0].meter.accepted") > 0 == page.run("laps[1].meter.accepted")
    page.run("replay()")
    page.wait("!$('replay').disabled")
    bodies = "[...document.querySelectorAll('.pane .body')].map(e => e.textContent)"
    one, other = page.run(bodies)
    assert one == other == page.run("laps[0].text")


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
    page.run(
        "document.querySelectorAll('#messages *').forEach(e => e.click && e.localName !== 'a' && e.click())"
    )
    assert page.run("fault") == 0
    tags = page.run("[...document.querySelectorAll('#messages *')].map(e => e.localName)")
    assert not {"script", "img", "svg", "b", "i"} & set(tags), tags
    links = page.run("[...document.querySelectorAll('#messages a')].map(e => e.protocol)")
    assert set(links) <= {"https:"}


@in_a_browser
def test_markdown_and_narrow_windows(page):
    text = "# T\n1. a\n   - b **c**\n2. d\n\n> q\n\n```py\nx = 1\n```\n*e* `f` a * b * c\n\n---\nend\n\n- - -"
    page.run(f"$('messages').replaceChildren(); markdown($('messages'), {json.dumps(text)})")
    shape = page.run(
        "[...document.querySelectorAll('#messages *')].map(e => e.localName).join(' ')"
    )
    for part in ("h2 ol li ul li strong li", "blockquote p", "pre code", "em code", "hr p"):
        assert part in shape, shape
    assert shape.count("hr") == 2
    for width in (320, 600, 1600):
        page.size(width, 700)
        assert page.run("document.documentElement.scrollWidth") <= width
        if width == 320:
            tops = "[...document.querySelectorAll('header > *')].map(e => e.offsetTop + e.offsetHeight / 2)"
            middles = page.run(tops)
            assert max(middles) - min(middles) < 4, "the header is one row"
    page.size(1000, 760)


@in_a_browser
def test_a_server_that_is_gone_and_comes_back(page):
    """It may have another model then: a page left open asks what there is."""
    page.run("window.before = window.fetch")
    page.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
    ask(page, "Hello")
    page.wait("!running && document.querySelector('.message .fault')")
    told = page.run("document.querySelector('.message .fault').textContent")
    assert "does not answer" in told, "beside the turn"
    assert page.run("chat.messages.length") == 1, "the turn stays for another try"
    page.run("window.fetch = before; props = { model: 'old', chat: !props.chat, rests: false }")
    press(page, "Retry")
    page.wait("!running && chat.messages.length === 2")
    assert page.run("document.querySelector('.fault')") is None
    assert page.run("[document.title, props.rests]") == ["demo", True]
