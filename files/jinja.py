"""A checkpoint's own chat template, a Jinja program.

jinja2's immutable sandbox renders it, with the options, globals and filters of transformers. The
sandbox keeps a template from Python's internals; as in other runtimes, nothing bounds its time and
memory, as whoever makes a template makes the weights, too.
Source: the module utils.chat_template_utils of transformers, for `{% generation %}` as well.
Not here: where it is read, and the templates of fixed strings (files/chat.py).
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

from files.chat import PROBE, ChatTemplate, refusal
from files.io import LocalError
from files.thinking import Tags, closed, opened_by, without_messages
from files.tokenizer import Tokenizer
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


@dataclass(frozen=True)
class JinjaTemplate(ChatTemplate):
    """A checkpoint's own template."""

    path: Path  # the checkpoint, for messages
    program: Template
    # for conversations with tools, where the checkpoint has another one for them
    program_of_tools: Template | None
    special: dict[str, str]  # bos_token and the like -> their texts
    system: str | None = None  # None: as the template has it
    closes: bool = False  # the thinking that it opens: an answer that begins with a schema has none

    bos = False

    @property
    def title(self) -> str:
        """The template's name in messages."""
        return "the model's chat template"

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
        """Render, as the base class. Raises: ValueError when the template fails."""
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
        """Render, as the base class.

        Raises: ValueError when the template fails; it says whether --system is the cause.
        """
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
                fault = f"chat template takes no system message ({error})"
                raise LocalError(
                    f"{self.path}: its {fault}; drop --system",
                    f"the model's {fault}; leave it out",
                ) from None
            raise refusal(self.path, error) from None

    def with_system(self, text: str) -> JinjaTemplate:
        """Return the template with another system message, as the base class."""
        return replace(self, system=text)

    def _renders_without_system(self, messages: list[dict], tools: list[dict] | None) -> bool:
        try:
            replace(self, system=None).render_messages(messages, tools)
        except ValueError:
            return False
        return True

    def turn_ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the control or added token after an answer in a rendered probe, if there is one.

        Raises: ValueError when the template fails, or leaves out the system message.
        """
        question, answer, another = PROBE
        turns = [question, another]
        answers = [answer]
        text = self.render(turns, answers)
        # compared with another message, not with none: this one may be the template's own default
        other = replace(self, system=f"{question} {self.system}")
        if (self.system or "").strip() and text == other.render(turns, answers):
            raise ValueError(
                f"{self.path}: its chat template leaves out the system message; drop --system"
            )
        if tokenizer.id_of(END_OF_ANSWER) is not None:
            return ()  # an answer is several messages, and the token ends each of them
        return tokenizer.ids_at_start(text.partition(answer)[2].lstrip())


def make_template(
    path: Path, text: str, of_tools: str | None, special: dict[str, str], system: str | None
) -> JinjaTemplate:
    """Make the template of a checkpoint by its programs. Raises: ValueError for one that fails."""
    try:
        program_of_tools = None if of_tools is None else Template(of_tools)
        return JinjaTemplate(path, Template(text), program_of_tools, special, system)
    except ValueError as error:
        raise refusal(path, error) from None
