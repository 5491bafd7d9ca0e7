"""Render Jinja templates from checkpoints as `transformers` renders them, within limits.

1. jinja2's immutable sandbox keeps a template from Python's internals. An unsafe attribute is an
   error, where jinja2 alone would print nothing.
2. A trace function reads the thread's clock at every line of Python, also inside jinja2: loops end.
3. The memory that the process takes meanwhile is limited (on Linux): big texts fail. So is the
   size of numbers.

Every limit grows with the conversation. Trade-off: one call in C is not interrupted, so that a
hostile template can still waste time in a comparison or search of texts of many megabytes.
Source: the module utils.chat_template_utils of transformers, for the options, the globals and
`{% generation %}`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from files import limited_memory, one_line

MAX_SOURCE_CHARS = 10**6  # published templates have at most 3e4
MAX_BITS = 10**5  # of a number
# and for a conversation of n characters:
MAX_CPU_S = 5.0  # + n * 1e-6; 600 messages take LLaMA-3.1's 0.3 s
MAX_BYTES = 3 * 10**8  # + 100 n, by which the memory grows
MAX_CHARS = 10**7  # + 100 n, of the text


class OutOfTime(BaseException):
    """Ends a rendering. It is not an Exception, so that no filter of jinja2 catches it."""


class Template:
    """A compiled template. Its errors are ValueErrors of one line, which begin with a verb."""

    def __init__(self, source: str):
        """Compile. Raises: ValueError for a syntax error, and as `render`."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read")
        self._template = _run(lambda: Sandbox().from_string(source))

    def render(self, **variables: Any) -> str:
        """Render.

        Raises: ValueError when the template raises, takes too much or uses an unsafe attribute.
        """
        given = len(repr(variables))
        text = _run(lambda: self._template.render(**variables), given)
        if len(text) > MAX_CHARS + 100 * given:
            raise ValueError(f"renders {len(text)} characters; {MAX_CHARS:g} are too many")
        return text


def _run(function: Callable[[], Any], given: int = 0) -> Any:
    """Call a function within the limits of a conversation of `given` characters."""
    before = sys.gettrace()
    end = time.thread_time() + MAX_CPU_S + given * 1e-6

    def watch(frame, event, argument):
        # not at other events: an exception would be lost at that of a closing generator
        if event == "line" and time.thread_time() > end:
            raise OutOfTime
        return watch

    try:
        with limited_memory(MAX_BYTES + 100 * given):
            sys.settrace(watch)
            try:
                return function()
            finally:
                sys.settrace(before)
    except OutOfTime:
        reason = f"takes more than {MAX_CPU_S:g} s"
    except MemoryError:
        reason = f"takes more than {MAX_BYTES / 1e9:g} GB of memory"
    except SecurityError as error:
        reason = f"is refused: {one_line(error, 400)}"
    except jinja2.TemplateSyntaxError as error:
        reason = f"is not valid Jinja (line {error.lineno}): {one_line(error.message, 400)}"
    except TemplateError as error:
        reason = f"raises: {one_line(error, 400)}"
    except Exception as error:  # a template can raise any
        reason = f"fails ({type(error).__name__}: {one_line(error, 400)})"
    raise ValueError(reason)


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 with the globals and filters of transformers."""

    intercepted_binops = frozenset(("*", "**"))  # these are not computed while compiling either

    def __init__(self):
        extensions = [Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _to_json  # jinja2's own escapes HTML
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator, as the base class does, and limit the size of numbers."""
        if isinstance(left, int) and isinstance(right, int):
            factor = abs(right) if operator == "**" else 1
            if left.bit_length() * factor + right.bit_length() > MAX_BITS:
                raise SecurityError(f"it computes a number of more than {MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse an unsafe attribute."""
        raise SecurityError(f"it reaches for the attribute {attribute} of a {type(obj).__name__}")


class Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`.

    It marks answers for training; here it only bounds a scope.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
