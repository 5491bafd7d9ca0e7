"""The thinking of an answer: the text between two tags, before the answer proper.

1. A chat template may open it at the end of the prompt (`opened_by`), or the model at the start of
   its answer. Tags elsewhere in a text are text.
2. `Thinking` takes it out of a text that comes in parts: first the thinking, then the rest, whose
   calls and JSON mean something. White space around the tags belongs to neither.
3. In harmony, the format of gpt-oss, an answer is several messages. A header tells thinking from
   text; that of a call stays in the rest. Source: https://github.com/openai/harmony.

An answer that never closes its thinking is thinking to its end, as in llama.cpp and vLLM.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from files.io import has_colours
from files.tokenizer import Tokenizer

ASKS = "<|start|>assistant"  # of harmony: the end of a prompt, and before each further message
FINAL = "<|channel|>final<|message|>"  # of harmony: before the answer proper
PREAMBLE = "<|channel|>commentary<|message|>"  # of harmony: before a text that calls follow


class Tags(NamedTuple):
    """The texts around a thinking."""

    begin: str
    end: str
    headers: tuple[str, ...] = ()  # of the other messages, where an answer is several


TAGS = (
    Tags("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ, GLM-4.5, SmolLM3
    Tags("<thinking>", "</thinking>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("[THINK]", "[/THINK]"),  # Magistral
    Tags("<|channel>thought", "<channel|>"),  # Gemma 4
    Tags("<|channel|>analysis<|message|>", f"<|end|>{ASKS}", (FINAL, PREAMBLE)),  # gpt-oss
)


def opened_by(prompt: str) -> Tags | None:
    """Return the tags of the thinking that a rendered prompt opens at its end."""
    end = prompt.rstrip()
    return next((tags for tags in TAGS if end.endswith(tags.begin)), None)


def without_opening(prompt: str) -> str:
    """Return a rendered prompt up to the thinking at its end, which it opens or leaves empty."""
    for tags in TAGS:
        before, begun, rest = prompt.rpartition(tags.begin)
        if begun and not rest.replace(tags.end, "").strip():
            return before
    return prompt


def closed(prompt: str) -> str:
    """Return a rendered prompt with the thinking closed that it opens: for answers without any."""
    if prompt.endswith(ASKS):
        return prompt + FINAL
    tags = opened_by(prompt)
    return f"{prompt.rstrip()}\n\n{tags.end}\n\n" if tags else prompt


def behind_thinking(text: str) -> str:
    """Return the text behind the last thinking in it."""
    for tags in TAGS:
        text = text.rpartition(tags.end)[2]
    return text


def without_messages(answer: str) -> str:
    """Return an earlier answer as templates of harmony take it: the text of its last message.

    Other templates take the thinking out themselves.
    """
    return Thinking().push(answer, True)[1] if answer.startswith("<|channel|>") else answer


@cache
def hidden_tags(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the control tokens in tags, which have no text in an answer unless it is asked for."""
    hidden: set[int] = set()
    for tags in TAGS:
        # other models have some of harmony's alone: the answers of Phi-3 end with <|end|>
        if _controls(tokenizer, tags.begin):
            for tag in (tags.begin, tags.end, *tags.headers):
                hidden |= _controls(tokenizer, tag)
    return frozenset(hidden)


def _controls(tokenizer: Tokenizer, tag: str) -> set[int]:
    """Return the control tokens in a tag."""
    ids = tokenizer.encode(tag, bos=False, special=True)
    named = {id for id in ids if tokenizer.name(id) and tokenizer.name(id) in tag.encode()}
    return {id for id in named if not tokenizer.piece(id)}


class Thinking:
    """Takes the thinking out of the text of one answer."""

    def __init__(self, tags: Tags | None = None):
        """tags: of the thinking that the prompt opens"""
        self.tags = tags
        self.held = ""  # text that may belong to a tag, or to the white space around one
        self.read = 0  # characters that are not held, those of the tags among them
        self.gap = ""  # before the next thinking
        self.stage = self._before
        self.untagged = self._opened if tags else self._behind  # the stage where no tag comes next

    @property
    def inside(self) -> bool:
        """Return whether the text so far ends within the thinking."""
        return self.stage in (self._opened, self._inside)

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """Add text. last: nothing follows. Returns: thinking; the text behind it."""
        count = len(self.held) + len(text)
        self.held += text
        thought = rest = ""
        stage = None
        while stage != self.stage:
            stage = self.stage
            more, behind = stage(last)
            thought += more
            rest += behind
        self.read += count - len(self.held)
        return thought, rest

    def _before(self, last: bool) -> tuple[str, str]:
        """Drop the opening tag, where the model writes it, or the header of another message."""
        begun = self.held.lstrip()
        known = (self.tags,) if self.tags else TAGS
        for tags in known:
            for tag in (tags.begin, *tags.headers):
                if begun.startswith(tag):
                    opens = tag == tags.begin
                    self.tags = tags
                    self.held = begun.removeprefix(tag)
                    self.stage = self._opened if opens else self._closed
                    return self.gap if opens else "", ""
        if last or not any(
            tag.startswith(begun) for tags in known for tag in (tags.begin, *tags.headers)
        ):
            self.stage = self.untagged
        return "", ""

    def _opened(self, last: bool) -> tuple[str, str]:
        """Drop the white space behind the opening tag."""
        self.held = self.held.lstrip()
        if self.held:
            self.stage = self._inside
        return "", ""

    def _inside(self, last: bool) -> tuple[str, str]:
        """Pass the thinking on, up to the closing tag or the beginning of one."""
        thought, closes = self._up_to_end(last)
        passed = thought.rstrip()
        if closes:
            self.stage = self._closed
            if self.tags.headers:
                self.gap = "\n\n"
                self.stage = self._before
                self.untagged = self._behind
        elif not last:
            self.held = thought[len(passed) :] + self.held
        return passed, ""

    def _up_to_end(self, last: bool) -> tuple[str, bool]:
        """Take the text before the closing tag, or before the beginning of one.

        Returns: the text; whether the tag is there, which is dropped
        """
        end = self.tags.end
        text, closes, rest = self.held.partition(end)
        certain = len(text)
        if not closes and not last:
            begun = [n for n in range(1, len(end)) if text.endswith(end[:n])]
            certain -= max(begun, default=0)
        self.held = text[certain:] + rest
        return text[:certain], closes != ""

    def _closed(self, last: bool) -> tuple[str, str]:
        """Drop the white space behind the closing tag."""
        self.held = self.held.lstrip()
        if self.held:
            self.stage = self._behind
        return "", ""

    def _behind(self, last: bool) -> tuple[str, str]:
        """Pass the rest on, of several messages up to the next one."""
        if self.tags and self.tags.headers:
            rest, closes = self._up_to_end(last)
            if closes:
                self.stage = self._before
                self.untagged = self._behind
            return "", rest
        rest = self.held
        self.held = ""
        return "", rest


class OnTerminal:
    """Shows an answer on a terminal: its thinking dimmed, without the tags."""

    DIM = "\033[2m"
    PLAIN = "\033[0m"

    def __init__(self, template: Any):
        """template: the conversation's; None for a text that goes on, which has no thinking"""
        self.thinking = Thinking(template.thinks) if template and has_colours() else None
        self.thought = False  # thinking is shown, and no answer yet

    def push(self, text: str, last: bool) -> tuple[str, str, int]:
        """Add text. last: nothing follows.

        Returns: what is shown first, the text of the answer behind it; the characters before that.
        """
        if self.thinking is None:
            return "", text, 0
        before = self.thinking.read
        thought, answer = self.thinking.push(text, last)
        shown = f"{self.DIM}{thought}{self.PLAIN}" if thought else ""
        self.thought = self.thought or bool(thought)
        if answer and self.thought:
            self.thought = False
            shown += "\n\n"
        return shown, answer, self.thinking.read - before - len(answer)
