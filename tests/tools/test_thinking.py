"""Thinking, taken out of a text in parts, and through a server whose template opens it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
from test_chat import template_of  # noqa: E402
from test_serve import Running  # noqa: E402
from test_terminal_chat import Terminal  # noqa: E402
from test_tokenizer import build_json  # noqa: E402
from test_tool_calls import ASKED, OPENS, TOOLS  # noqa: E402

from browser import Browser, chromium  # noqa: E402
from files.thinking import (  # noqa: E402
    TAGS,
    Thinking,
    closed,
    hidden_tags,
    opened_by,
    without_messages,
    without_opening,
)
from files.tokenizer import Tokenizer  # noqa: E402
from run.generate import generate, load  # noqa: E402
from run.options import DEMO, ROOT  # noqa: E402

THINK = TAGS[0]
MISTRAL = TAGS[3]
ANALYSIS, NEXT, (FINAL, PREAMBLE) = TAGS[-1]  # of harmony
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
CASES = [  # the tags that the prompt opens, a text, the thinking in it, the rest
    (THINK, "Two and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (THINK, "\n So \n it is. </think>Four. ", "So \n it is.", "Four. "),
    (THINK, "<think>\nTwice.</think>Four", "Twice.", "Four"),  # the model opens it once more
    (THINK, "never closed </thin \n", "never closed </thin", ""), (THINK, "\n\n</think>\n\nFour", "", "Four"),
    (THINK, "a < b </think> c <think> d </think> e", "a < b", "c <think> d </think> e"), (THINK, "", "", ""),
    (THINK, "of the [/THINK] others\n</think>\n", "of the [/THINK] others", ""),
    (None, "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (None, " \n[THINK]Two.[/THINK]Four.", "Two.", "Four."), (None, "<think>", "", ""),
    (None, "<thinking>Two</think></thinking> Four", "Two</think>", "Four"),
    (None, "Four. <think>no</think>", "", "Four. <think>no</think>"), (None, " \n <thin", "", " \n <thin"),
    (None, " plain \n", "", " plain \n"), (None, "</think> a", "", "</think> a"), (None, "", "", ""),
    (MISTRAL, "Two.[/THINK] <think>", "Two.", "<think>"), (None, f"{ANALYSIS}Two.{NEXT}{FINAL}Four.", "Two.", "Four."),
    (None, "<|channel>thought\n<channel|>Four.", "", "Four."), (None, f"{FINAL}Four.", "", "Four."), (None, f"{ANALYSIS}Two.<|end|>", "Two.<|end|>", ""), (None, FINAL[:9], "", FINAL[:9]),
    (None, f"{ANALYSIS}Two. {NEXT}{ANALYSIS}Two again.{NEXT}{CALL}", "Two.\n\nTwo again.", CALL), (None, CALL, "", CALL),
    (None, f"{PREAMBLE}I look.{NEXT}{ANALYSIS}So.{NEXT} to=functions.now<|message|>{{}}", "So.", "I look. to=functions.now<|message|>{}"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_thinking_is_taken_out(number):
    """Whole, and in parts of any size."""
    tags, text, thought, rest = CASES[number]
    for size in (1, 2, 3, 7, len(text) or 1):
        thinking = Thinking(tags)
        parts = [text[begin : begin + size] for begin in range(0, len(text), size)] or [""]
        pushed = [thinking.push(part, i == len(parts) - 1) for i, part in enumerate(parts)]
        assert tuple(map("".join, zip(*pushed))) == (thought, rest), size
        assert thinking.read + len(thinking.held) == len(text)


def test_text_comes_as_soon_as_it_is_certain():
    thinking = Thinking()
    parts = ("<", "think>\n", "One ", "two", "\n</thi", "nk>\n", "Four", " </think>")
    told = [thinking.push(part, False) for part in parts]
    assert told[2:4] == [("One", ""), (" two", "")]
    assert told[4:] == [("", ""), ("", ""), ("", "Four"), ("", " </think>")]
    assert Thinking().push("Hello", False) == ("", "Hello")


def test_a_prompt_that_opens_it():
    for tags in TAGS:
        prompt = f"[assistant]\n{tags.begin}\n"
        assert opened_by(prompt) == tags and without_opening(prompt) == "[assistant]\n"
        # of Qwen3 with enable_thinking = false
        assert closed(prompt) == f"[assistant]\n{tags.begin}\n\n{tags.end}\n\n"
        assert without_opening(closed(prompt)) == "[assistant]\n"
        for other in (closed(prompt), "[assistant]\n", f"{tags.begin} now"):
            assert opened_by(other) is None and closed(other) == other
        for other in ("[assistant]\n", f"{tags.begin} now"):
            assert without_opening(other) == other


def test_tags_that_are_control_tokens_have_a_text(tmp_path):
    """As Magistral's: the decoder would drop them, and the thinking would be the answer."""
    tokenizer = Tokenizer.load(build_json(tmp_path, ["<s>", "[THINK]", "[/THINK]"]))
    ids = tokenizer.encode("[THINK]Two.[/THINK]Four.", bos=False, special=True)
    assert tokenizer.stream().push(ids) == "Two.Four."
    shown = hidden_tags(tokenizer)
    assert shown == {tokenizer.id_of("[THINK]"), tokenizer.id_of("[/THINK]")}
    assert Thinking().push(tokenizer.stream(shown=shown).push(ids), True) == ("Two.", "Four.")
    # Phi-3's answers end with this one
    assert not hidden_tags(Tokenizer.load(build_json(tmp_path, ["<s>", "<|end|>"])))


def test_the_messages_of_harmony(tmp_path):
    """What gpt-oss writes: thinking and answer are messages, whose headers are control tokens and words."""
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer = Tokenizer.load(build_json(tmp_path, ["<s>", *names]))
    shown = hidden_tags(tokenizer)
    assert shown == {tokenizer.id_of(name) for name in names[:-1]}
    answer = f"{ANALYSIS}Two.{NEXT}{FINAL}Four."
    ids = tokenizer.encode(f"{answer}<|return|>", bos=False, special=True)
    assert tokenizer.stream(shown=shown).push(ids) == answer
    for text in (answer, f"{FINAL}Four."):
        assert without_messages(text) == "Four."
    assert (
        without_messages(f"{ANALYSIS}Two.") == "" and without_messages("<think>Two") == "<think>Two"
    )
    assert closed("<|start|>assistant") == "<|start|>assistant<|channel|>final<|message|>"


# ----------------------------------------------------------------------------------- of the server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Make a server of the demo: its template, and the text that it answers."""
    made = []

    def serve(template: str, answer: str) -> Running:
        root = tmp_path_factory.mktemp("thinking")
        for name in ("demo", "demo-eagle"):
            (root / name).mkdir()
            for file in (Path(DEMO).parent / name).iterdir():
                (root / name / file.name).symlink_to(file)
        (root / "demo" / "chat_template.jinja").write_text(template)
        options = ["--checkpoint", str(root / "demo"), "--chat"]
        if answer:
            (root / "answer.lark").write_text(f"start: {json.dumps(answer)}")
            options += ["--grammar", str(root / "answer.lark")]
        made.append(Running(*options))
        return made[-1]

    yield serve
    for running in made:
        running.close()


def ask(running, messages=ASKED, **options):
    options = {"seed": 3, "max_tokens": 1000, **options}
    return running.client.chat.completions.create(model="demo", messages=messages, **options)


@pytest.mark.parametrize("opens", [True, False])
def test_thinking_is_a_field_of_its_own(served, opens):
    """Opened by the template or by the model; whole, and in events with the official client."""
    thought = " ".join(f"Step {n}: {n} and {n} is {n + n}." for n in range(30))
    text = f"{'' if opens else '<think>'}\n{thought}\n</think>\n\nFour: 4."
    running = served(OPENS if opens else template_of("qwen2.5"), text)
    message = ask(running, n=2).choices[1].message
    assert (message.content, message.reasoning_content) == ("Four: 4.", thought)
    without = ask(running, extra_body={"include_reasoning": False})
    assert without.choices[0].message.content == "Four: 4."
    assert not hasattr(without.choices[0].message, "reasoning_content")
    events = list(ask(running, stream=True, stream_options={"include_usage": True}))
    deltas = [event.choices[0].delta for event in events[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "Four: 4."
    thoughts = [getattr(delta, "reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == thought and len([each for each in thoughts if each]) > 1
    drafted = [event.choices[0].drafted for event in events[1:-1]]
    assert sum(each["tokens"] for each in drafted) == events[-1].usage.completion_tokens
    for delta, each in zip(deltas[1:], drafted):
        assert sum(count for _, count in each["spans"]) == len(delta.content or "")


@pytest.mark.skipif(chromium() is None, reason="there is no chromium; apt-get install chromium")
def test_the_page_folds_the_thinking(served, tmp_path):
    running = served(OPENS, "Two and two.\n</think>\n\nFour: 4.")
    page = Browser(tmp_path)
    try:
        page.open(f"http://127.0.0.1:{running.port}/")
        page.wait("document.title === 'demo' && $('most').value")
        page.run("$('text').value = '2+2?'; $('ask').requestSubmit()")
        page.wait("!running && chat.messages.length === 2")
        body = "document.querySelector('.message.assistant .body').textContent"
        thought = "document.querySelector('.message.assistant .thought div').textContent"
        for _ in range(2):
            assert page.run(body) == "Four: 4." and page.run(thought) == "Two and two."
            assert page.run("document.querySelector('.thought').open") is False
            page.open(page.run("location.href"))  # a reload keeps it
            page.wait("document.querySelector('nav .open')")
            page.run("document.querySelector('nav .open').click()")
        spans = page.run("chat.messages[1].spans")
        assert sum(count for _, count, _ in spans) == len("Four: 4.")
        page.run("$('most').value = 60; $('mode').click(); $('start').requestSubmit()")
        page.wait("!running && laps.length === 2")
        assert page.run("laps[0].text") == page.run("laps[1].text") == "Two and two.Four: 4."
        assert not page.errors
    finally:
        page.close()


@pytest.mark.parametrize("plain, interactive", [(False, True), (True, False)])
def test_a_terminal_dims_the_thinking(served, plain, interactive):
    """Without colours the text is there as it is."""
    text = "Two and two.\n</think>\n\nFour: 4."
    root = Path(served(OPENS, text).engine.config.checkpoint).parent
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(root / "demo")]
    command += ["--chat", "--grammar", str(root / "answer.lark"), "--draft", "none"]
    command += ["--interactive"] if interactive else ["--prompt", "2+2?"]
    talk = Terminal(command, **({"NO_COLOR": "1"} if plain else {}))
    if interactive:
        talk.read_to("> ?$")
        talk.type("2+2?\r")
    talk.read_to("tokens/s")
    screen = talk.bytes.decode().replace("\r\n", "\n")
    if interactive:
        talk.type("/bye\r")
    assert talk.close() == 0
    dimmed = "\x1b[2mTwo and two.\x1b[0m\n\nFour: 4.\n"
    seen = re.sub("\x1b\\[0m\x1b\\[2m", "", screen)  # the pieces of a thinking are one
    assert (f"{text}\n" if plain else dimmed) in seen


def test_a_schema_of_the_command_line(served, tmp_path):
    """Its prompt closes the thinking, too."""
    root = Path(served(OPENS, "").engine.config.checkpoint)
    (tmp_path / "a.json").write_text('{"enum": ["no"]}')
    options = {"checkpoint": str(root), "grammar": str(tmp_path / "a.json"), "device": "cpu"}
    engine = load(**options)
    assert engine.template.thinks is None
    assert engine.template.render(["a"], []).endswith("<think>\n\n</think>\n\n")
    assert generate(engine, ["a"]).text == ['"no"']


def test_an_answer_by_a_schema_has_no_thinking(served):
    """The prompt closes it: the grammar begins with the answer's first token."""
    running = served(OPENS, "")
    schema = {"type": "object", "properties": {"a": {"enum": ["no"]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = ask(running, response_format=asked)
    assert json.loads(answer.choices[0].message.content) == {"a": "no"}
    engine = running.engine
    text = closed(engine.template.render_messages(ASKED))
    assert text.endswith("<think>\n\n</think>\n\n")
    ids = engine.tokenizer.encode(text, bos=False, special=True)
    assert answer.usage.prompt_tokens == len(ids)
    call = ask(running, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0]
    assert call.function.name in ("weather", "now")
