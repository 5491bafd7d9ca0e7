"""Render chat templates, which are Jinja programs.

1. `Template` is a program in jinja2's immutable sandbox, with the options, globals and filters of
   transformers. The sandbox keeps it from Python's internals; as in other runtimes, nothing bounds
   its time and memory, as whoever makes a template makes the weights, too.
2. `ChatTemplate` puts conversations into one. `stop_ids` renders a probe, so that a template that
   fails is refused before decoding.

Source: the module utils.chat_template_utils of transformers, for `{% generation %}` as well.
Not here: where they are read, and the fixed ones (files/chat.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from files.chat import FIXED, PROBE, lacking, refusal
from files.io import LocalError
from files.texts import NO_TEMPLATE
from files.thinking import OnTerminal, Tags, closed, hidden_tags, opened_by, without_messages
from files.tokenizer import StreamDecoder, Tokenizer
from options import one_line

END_OF_ANSWER = "<|return|>"  # of harmony, whose answers are several messages: gpt-oss


class Template:
    """A compiled template. Its errors are ValueErrors of one line, which begin with a verb."""

    def __init__(self, source: str):
        """Compile. Raises: ValueError for a syntax error."""
        self._template = _in_one_line(lambda: environment().from_string(source))

    def render(self, **variables: Any) -> str:
        """Render. Raises: ValueError when the template raises or uses an unsafe attribute."""
        return _in_one_line(lambda: self._template.render(**variables))


class Generation(Extension):
    """The block `{% generation %}`, which marks answers for training; here it bounds a scope."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox that templates are written for."""
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own escapes HTML
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _in_one_line(work: Callable[[], Any]) -> Any:
    """Do some work of a template. Raises: ValueError of one line, whatever the template raises."""
    try:
        return work()
    except SecurityError as error:
        reason = f"is refused: {one_line(error, 400)}"
    except TemplateSyntaxError as error:
        reason = f"is not valid Jinja (line {error.lineno}): {one_line(error.message, 400)}"
    except TemplateError as error:
        reason = f"raises: {one_line(error, 400)}"
    except Exception as error:  # a template can raise any
        reason = f"fails ({type(error).__name__}: {one_line(error, 400)})"
    raise ValueError(reason)


# -------------------------------------------------------------------------------- conversations


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations."""

    path: Path  # the checkpoint, for messages
    name: str  # of `FIXED`; "": the checkpoint's own
    program: Template
    # for conversations with tools, where the checkpoint has another one for them
    program_of_tools: Template | None
    special: dict[str, str]  # bos_token and the like -> their texts
    system: str | None = None  # None: as the program has it
    closes: bool = False  # the thinking that it opens: an answer that begins with a schema has none

    @property
    def bos(self) -> bool:
        """Return whether a text begins with BOS where the program has written none."""
        return self.name != ""

    @property
    def title(self) -> str:
        """The template's name in messages."""
        return f"the chat template {self.name}" if self.name else "the model's chat template"

    @property
    def of_file(self) -> str:
        """The same for a person at this machine."""
        return self.title if self.name else f"{self.path}: its chat template"

    @cached_property
    def reply(self) -> str:
        """The text between the prompt for an answer and that answer, once it is an earlier one.

        A rendered probe shows it.
        """
        question, answer, another = PROBE
        prompt = self.render([question], [])
        conversation = self.render([question, another], [answer])
        before = conversation.partition(answer)[0]
        if not before.startswith(prompt):
            return ""
        return before.removeprefix(prompt)

    @cached_property
    def thinks(self) -> Tags | None:
        """The tags of the thinking that a prompt opens, by a rendered probe."""
        return opened_by(self.render([PROBE[0]], []))

    def render(self, turns: list[str], answers: list[str]) -> str:
        """Return the text of the prompt for the next answer. answers: one fewer than turns

        Raises: as `render_messages`.
        """
        messages = [{"role": "user", "content": turn} for turn in turns]
        for number, answer in enumerate(answers):
            said = without_messages(answer)
            messages.insert(2 * number + 1, {"role": "assistant", "content": said})
        return self.render_messages(messages)

    def render_messages(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        variables: dict | None = None,
    ) -> str:
        """Return the text of the prompt for the next answer.

        messages, tools: as `transformers` takes them, without a system message at the beginning
        variables: further ones of the template, as enable_thinking
        Raises: ValueError when the template fails; it says whether --system is the cause.
        """
        if self.name and variables:
            raise ValueError(f"{self.title} knows no {', '.join(variables)}; leave that out")
        said = messages
        if self.system is not None:
            said = [{"role": "system", "content": self.system}, *messages]
        program = self.program
        if tools and self.program_of_tools:
            program = self.program_of_tools
        try:
            text = program.render(
                messages=said,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self.special | (variables or {}),
            )
            return closed(text) if self.closes else text
        except ValueError as error:
            if self.system is not None and self._renders_without_system(messages, tools):
                fault = f"takes no system message ({error})"
                raise LocalError(
                    f"{self.of_file} {fault}; drop --system", f"{self.title} {fault}; leave it out"
                ) from None
            raise refusal(self.of_file, error) from None

    def _renders_without_system(self, messages: list[dict], tools: list[dict] | None) -> bool:
        try:
            replace(self, system=None).render_messages(messages, tools)
        except ValueError:
            return False
        return True

    def encode_messages(self, tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
        """Return the token ids of the prompt for the answer to messages.

        messages: {"role": "system", "user" or "assistant", "content": text}, a system's first alone
        Raises: ValueError for other ones.
        """
        for message in messages:
            texts = [message.get("role"), message.get("content")]
            if not all(isinstance(text, str) for text in texts):
                form = '{"role": "user", "content": "text"}'
                raise ValueError(f"a message is {form}; one is {str(message)[:100]}")
        template = self
        messages = words_as_text(tokenizer, messages)
        if messages[0]["role"] == "system":
            template = replace(self, system=messages[0]["content"])
            messages = messages[1:]
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("messages end with one of the user, which is answered")
        text = template.render_messages(messages)
        return tokenizer.encode(text, bos=self.bos, special=True)

    def encode(self, tokenizer: Tokenizer, turns: list[str], answers: list[str]) -> list[int]:
        """Return the token ids of the prompt for the next answer. Turns name no control tokens."""
        turns = list(map(tokenizer.as_text, turns))
        return tokenizer.encode(self.render(turns, answers), bos=self.bos, special=True)

    def stream(self, tokenizer: Tokenizer) -> StreamDecoder:
        """Return what makes the text of an answer, which shows the tags of its thinking."""
        return tokenizer.stream(shown=hidden_tags(tokenizer))

    def on_terminal(self) -> OnTerminal:
        """Return what shows an answer on a terminal."""
        return OnTerminal(self)

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids that end an answer: EOS, and the token behind it in a rendered probe.

        Raises: ValueError when the template cannot work with this tokenizer, fails, or leaves out
        the system message.
        """
        token = lacking(self.name, tokenizer) if self.name else ""
        if token:
            others = [name for name in FIXED if not lacking(name, tokenizer)]
            raise ValueError(
                f"{self.title} needs the control token {token}, which this tokenizer lacks; leave "
                "--chat out for the model's own template, or use --chat "
                f"{' or '.join((*others, NO_TEMPLATE))}"
            )
        question, answer, another = PROBE
        probe = ([question, another], [answer])
        text = self.render(*probe)
        # compared with another message, not with none: this one may be the template's own default
        other = replace(self, system=f"{question} {self.system}")
        if (self.system or "").strip() and text == other.render(*probe):
            raise ValueError(f"{self.of_file} leaves out the system message; drop --system")
        ends: tuple[int, ...] = ()
        if tokenizer.id_of(END_OF_ANSWER) is None:  # else it ends each message of an answer
            ends = tokenizer.ids_at_start(text.partition(answer)[2].lstrip())
        return tuple(dict.fromkeys((*tokenizer.eos_ids, *ends)))


def words_as_text(tokenizer: Tokenizer, messages: list[dict]) -> list[dict]:
    """Return messages in which the names of control tokens are text, but for the model's answers.

    messages: with a text as the content
    """
    return [
        message
        if message["role"] == "assistant"
        else message | {"content": tokenizer.as_text(message["content"])}
        for message in messages
    ]
