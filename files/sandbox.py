"""Render Jinja templates of checkpoints in jinja2's sandbox, as `transformers` renders them.

The sandbox keeps a template from Python's internals. Three bounds keep it from taking too much;
they grow with the conversation:

1. Time: a trace function reads the thread's clock at every line of the template and every call
   behind it, so that loops and recursions end, in any thread.
2. Memory, on Linux, while the template runs. So big texts fail.
3. The size of numbers, as one power can take hours.

Trade-off: one call in C is not interrupted, so that a hostile template can still waste time in a
comparison or search of texts of many megabytes.
Source: the module utils.chat_template_utils of transformers, for the options, the globals and
`{% generation %}`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import do_round
from jinja2.sandbox import ImmutableSandboxedEnvironment

from files.untrusted import limited_memory
from options import one_line

MAX_SOURCE_CHARS = 10**6  # published templates have at most 3e4
MAX_BITS = 10**5  # of a number
MAX_DIGITS = 300  # that the filter round keeps; a float has no more
# and for a conversation of n characters:
MAX_CPU_S = 5.0  # + n * 1e-6; 600 messages take LLaMA-3.1's 0.3 s
MAX_BYTES = 3 * 10**8  # + 100 n, by which the memory grows
MAX_CHARS = 10**7  # + 100 n, of the text


class OutOfTime(BaseException):
    """Ends a rendering; no filter of jinja2 catches it, as it is not an Exception."""


class Template:
    """A compiled template. Its errors are ValueErrors of one line, which begin with a verb."""

    def __init__(self, source: str):
        """Compile. Raises: ValueError for a syntax error, and as `render`."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read")
        self._template = _bounded(lambda: Sandbox().from_string(source))

    def render(self, **variables: Any) -> str:
        """Render.

        Raises: ValueError when the template raises, takes too much or uses an unsafe attribute.
        """
        given = len(repr(variables))
        text = _bounded(partial(self._template.render, **variables), given)
        if len(text) > MAX_CHARS + 100 * given:
            raise ValueError(f"renders {len(text)} characters; {MAX_CHARS:g} are too many")
        return text


def _bounded(function: Callable[[], Any], given: int = 0) -> Any:
    """Call a function within the bounds of a conversation of `given` characters."""
    before = sys.gettrace()
    end = time.thread_time() + MAX_CPU_S + given * 1e-6

    def watch(frame, event, argument):
        late = time.thread_time() > end
        # not at a call: an exception would be lost at that of a closing generator
        if late and event == "line":
            raise OutOfTime
        if late or frame.f_code.co_filename == "<template>":
            return watch  # be called for this frame's lines, too
        return None

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
    except TemplateSyntaxError as error:
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
        self.filters |= {"tojson": _to_json, "round": _round}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator, as the base class does, and limit the size of numbers."""
        if isinstance(left, int) and isinstance(right, int):
            factor = abs(right) if operator == "**" else 1
            if left.bit_length() * factor + right.bit_length() > MAX_BITS:
                raise SecurityError(f"it computes a number of more than {MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse an unsafe attribute, where jinja2 alone would print nothing."""
        raise SecurityError(f"it reaches for the attribute {attribute} of a {type(obj).__name__}")


class Generation(Extension):
    """The block `{% generation %}`, which marks answers for training; here it bounds a scope."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _round(value, precision=0, method="common"):
    return do_round(value, min(precision, MAX_DIGITS), method)  # it computes 10**precision


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own escapes HTML
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
