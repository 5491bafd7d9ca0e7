"""The thinking of an answer: the text between two tags, before the answer proper.

1. A chat template may open it at the end of the prompt (`opened_by`), or the model at the start of
   its answer. Tags elsewhere in a text are text.
2. `Thinking` takes it out of a text that comes in parts: first the thinking, then the rest, whose
   calls and JSON mean something. White space around the tags belongs to neither.

An answer that never closes its thinking is thinking to its end, as in llama.cpp and vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

from hf.tokenizer import Tokenizer


class Tags(NamedTuple):
    """The texts around a thinking."""

    begin: str
    end: str


TAGS = (
    Tags("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ, GLM-4.5, SmolLM3
    Tags("<thinking>", "</thinking>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("[THINK]", "[/THINK]"),  # Magistral
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
    tags = opened_by(prompt)
    return f"{prompt.rstrip()}\n\n{tags.end}\n\n" if tags else prompt


def behind_thinking(text: str) -> str:
    """Return the text behind the last thinking in it."""
    for tags in TAGS:
        text = text.rpartition(tags.end)[2]
    return text


def hidden_tags(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of tags that are control tokens, which have no text unless it is asked for."""
    ids = [tokenizer.id_of(tag) for tags in TAGS for tag in tags]
    return frozenset(id for id in ids if id is not None and not tokenizer.piece(id))


class Thinking:
    """Takes the thinking out of the text of one answer."""

    def __init__(self, tags: Tags | None = None):
        """tags: of the thinking that the prompt opens"""
        self.tags = tags
        self.held = ""  # text that may belong to a tag, or to the white space around one
        self.read = 0  # characters that are not held, those of the tags among them
        self.stage = self._before

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
        """Drop the opening tag, where the model writes it."""
        begun = self.held.lstrip()
        known = (self.tags,) if self.tags else TAGS
        for tags in known:
            if begun.startswith(tags.begin):
                self.tags = tags
                self.held = begun.removeprefix(tags.begin)
                self.stage = self._opened
                return "", ""
        if last or not any(tags.begin.startswith(begun) for tags in known):
            self.stage = self._opened if self.tags else self._behind
        return "", ""

    def _opened(self, last: bool) -> tuple[str, str]:
        """Drop the white space behind the opening tag."""
        self.held = self.held.lstrip()
        if self.held:
            self.stage = self._inside
        return "", ""

    def _inside(self, last: bool) -> tuple[str, str]:
        """Pass the thinking on, up to the closing tag or the beginning of one."""
        end = self.tags.end
        thought, closes, rest = self.held.partition(end)
        if closes:
            self.held = rest
            self.stage = self._closed
            return thought.rstrip(), ""
        begun = [n for n in range(1, len(end)) if thought.endswith(end[:n])]
        certain = len(thought) if last else len(thought) - max(begun, default=0)
        passed = thought[:certain].rstrip()
        self.held = "" if last else thought[len(passed) :]
        return passed, ""

    def _closed(self, last: bool) -> tuple[str, str]:
        """Drop the white space behind the closing tag."""
        self.held = self.held.lstrip()
        if self.held:
            self.stage = self._behind
        return "", ""

    def _behind(self, last: bool) -> tuple[str, str]:
        """Pass the rest on."""
        rest = self.held
        self.held = ""
        return "", rest
