"""The Jinja program of a chat template.

jinja2's immutable sandbox renders it, with the options, globals and filters of transformers. The
sandbox keeps a template from Python's internals; as in other runtimes, nothing bounds its time and
memory, as whoever makes a template makes the weights, too.
Source: the module utils.chat_template_utils of transformers, for `{% generation %}` as well.
Not here: where it is read, and what it renders (files/chat.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from options import one_line


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
