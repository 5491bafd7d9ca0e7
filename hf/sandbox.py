"""Jinja templates from checkpoints, rendered as `transformers` renders them, within limits.

A checkpoint's chat template is a program by somebody else.

1. jinja2's immutable sandbox keeps it from Python's internals. Here an unsafe attribute is an error at once.
2. Operations that run in C (repeating, joining, padding text; literal lists; slices) are charged to a budget of
   characters before they run. So each of them is short, and no value is large.
3. A trace function reads the thread's clock at every line of Python, also inside jinja2. This ends loops.

Trade-off: all in one process and thread, with no worker to start or signal to catch. The trace makes rendering some
times slower, which leaves it at milliseconds. Slices of large texts are charged only after they are made.
Source: the module utils.chat_template_utils of transformers, for the options, the globals and `{% generation %}`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from datetime import datetime
from functools import wraps
from math import prod
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 10**6  # published templates have at most 3e4
MAX_BUILT_CHARS = 10**8  # what the operations of one rendering may build in all, estimated from above
MAX_NUMBER = 10**6  # a width, a count, a precision
MAX_INT_BITS = 1024
MAX_CPU_S = 5.0  # a conversation of 600 messages takes LLaMA-3.1's 0.3 s
# filters and methods whose result can be as large as the product of their arguments
GROWING = frozenset((
    "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "lstrip", "pprint", "replace",
    "rjust", "round", "rstrip", "slice", "strip", "to_bytes", "tojson", "translate", "trim", "zfill",
))  # fmt: skip
FORMATS = frozenset(("format", "format_map", "%"))  # a number in the pattern is a width
# these read or copy a list, not what it holds; templates ask for `messages | length` at every message
SHALLOW = frozenset((
    "count", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse", "select",
    "selectattr",
))  # fmt: skip
SIZED = (str, bytes, range, list, tuple, set, frozenset, dict, KeysView, ValuesView, ItemsView)
REMOVED_FILTERS = ("sum", "urlize", "wordwrap")  # nothing uses them, and their time is quadratic


class OutOfTime(BaseException):
    """Ends a rendering. Not an Exception, so that no filter of jinja2 catches it."""


class Template:
    """A compiled template. Its errors are ValueErrors of one line, which begin with a verb."""

    def __init__(self, source: str):
        """Compile. Raises: ValueError for a syntax error, and as `render`."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read")
        self._environment = Sandbox()
        self._template = self._run(lambda: self._environment.from_string(source))

    def render(self, **variables: Any) -> str:
        """Render. Raises: ValueError when the template raises, takes too long or reaches for what is not its own."""
        self._environment.built = 0
        return self._run(lambda: self._template.render(**variables))

    @staticmethod
    def _run(function: Callable[[], Any]) -> Any:
        end = time.thread_time() + MAX_CPU_S

        def watch(frame, event, argument):
            if event == "line" and time.thread_time() > end:  # raised where a generator is closed, it would be lost
                raise OutOfTime
            return watch

        before = sys.gettrace()
        try:
            sys.settrace(watch)
            return function()
        except OutOfTime:
            reason = f"takes more than {MAX_CPU_S:g} s"
        except SecurityError as error:
            reason = f"is refused: {_one_line(error)}"
        except jinja2.TemplateSyntaxError as error:
            reason = f"is not valid Jinja (line {error.lineno}): {_one_line(error.message)}"
        except Exception as error:  # a template can raise any
            own = isinstance(error, TemplateError)
            reason = f"raises: {_one_line(error)}" if own else f"fails ({type(error).__name__}: {_one_line(error)})"
        finally:
            sys.settrace(before)
        raise ValueError(reason)


def _one_line(error: Any) -> str:
    text = "".join(char if char.isprintable() else " " for char in str(error)[:400])
    return " ".join(text.split()) or type(error).__name__


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 with a budget for what templates build. One template each: `built` is of one rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))  # these are not computed while compiling either

    def __init__(self):
        self.built = 0  # characters, or elements of lists
        extensions = [Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self.charged)
        filters = self.filters | {"tojson": _to_json}
        self.filters = {k: self._charging(k, f) for k, f in filters.items() if k not in REMOVED_FILTERS}
        self.filters |= {"charged": self.charged, "charged_slice": self.charged_slice}
        own = {"raise_exception": _raise, "strftime_now": self._strftime_now, "dict": _Dict(), "namespace": _Namespace}
        self.globals |= own

    def charge(self, amount: int) -> None:
        """Add to what was built. Raises: SecurityError when it is too much."""
        self.built += amount
        if self.built > MAX_BUILT_CHARS:
            raise SecurityError(f"it builds more than {MAX_BUILT_CHARS:g} characters")

    def charged(self, value: Any) -> Any:
        """The value, once its size is charged."""
        self.charge(size(value))
        return value

    def charged_slice(self, value: Any) -> Any:
        """A slice, once its length is charged."""
        self.charge(len(value))
        return value

    def charge_call(self, name: str, values: tuple) -> None:
        """Charge a call with its arguments' sizes: their product where it is GROWING, else their sum."""
        if name in GROWING or name in FORMATS:
            self.charge(prod(weight(v, name in FORMATS) for v in values))
        elif name in SHALLOW:
            self.charge(sum(len(v) for v in values if isinstance(v, SIZED)))
        else:
            self.charge(sum(map(size, values)))

    def concat(self, parts: Any) -> str:
        """Join the parts of an output, of a macro or of a block."""
        parts = list(parts)
        self.charge(sum(map(len, parts)))
        return "".join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            _check_numbers(operator, left, right)
        elif operator == "+":
            self.charge(size(left) + size(right))
        else:
            self.charge_call("%" if operator == "%" else "center", (left, *_elements(right)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(function, "__wrapped__", function)  # str.format comes wrapped
        owner, args = getattr(inner, "__self__", None), _lists(args)
        named = [value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")]  # jinja2's own
        self.charge_call(getattr(inner, "__name__", ""), (owner, *args, *named))
        return super().call(context, function, *args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"it reaches for the attribute {attribute} of a {type(obj).__name__}")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _ChargeLiterals(self).visit(super()._parse(source, name, filename))

    def _charging(self, name: str, function: Callable) -> Callable:
        @wraps(function)  # keeps jinja2's mark of what it passes
        def charging(*args, **kwargs):
            args = _lists(args)
            self.charge_call(name, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return charging

    def _strftime_now(self, format: str) -> str:
        self.charge_call("%", (format,))
        return datetime.now().strftime(format)


class _ChargeLiterals(NodeTransformer):
    """Pass literal lists, slices and the operands of `~` through the filter `charged`."""

    def __init__(self, environment: Sandbox):
        self._environment = environment

    def _charged(self, node: nodes.Expr, how: str = "charged") -> nodes.Expr:
        where = {"lineno": node.lineno, "environment": self._environment}
        return nodes.Filter(node, how, [], [], None, None, **where)

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        return self._charged(self.generic_visit(node))

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        node = self.generic_visit(node)
        return self._charged(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        node = self.generic_visit(node)
        return self._charged(node, "charged_slice") if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        node = self.generic_visit(node)
        node.nodes = [self._charged(n) for n in node.nodes]
        return node


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks answers for training; here it only bounds a scope."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore; its text does not show its values."""

    def __init__(*args: Any, **kwargs: Any):  # noqa: N805  (`namespace(self=1)` must work)
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it sets the name {name} of a namespace")


def _check_numbers(operator: str, left: float, right: float) -> None:
    if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        if bits > MAX_INT_BITS:
            raise SecurityError(f"it computes a number of more than {MAX_INT_BITS} bits")


def size(value: Any) -> int:
    """Characters of a text, of all texts in a list or mapping and its elements; 1 for what has no size.

    Stops counting beyond the budget, so that a list that holds itself many times takes no long time.
    """
    total, todo = 0, [value]
    while todo and total <= MAX_BUILT_CHARS:
        value = todo.pop()
        total += len(value) if isinstance(value, (str, bytes, range)) else 1
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, SIZED) and not isinstance(value, (str, bytes, range)):
            todo += value
    return total


def weight(value: Any, pattern: bool) -> int:
    """What an argument multiplies a result by: at most a number's value, a text's length.

    pattern: whether texts are patterns, in which numbers are widths
    Raises: SecurityError for a large number.
    """
    numbers = [value] if isinstance(value, int) else []
    if pattern and isinstance(value, (str, bytes)):
        text = value if isinstance(value, str) else value.decode("latin-1")
        numbers = [int(digits[-9:]) if len(digits) < 10 else MAX_NUMBER + 1 for digits in re.findall(r"\d+", text)]
    if any(abs(n) > MAX_NUMBER for n in numbers):
        raise SecurityError(f"it uses a width or count above {MAX_NUMBER:g}")
    return max(1, size(value) + sum(map(abs, numbers)))


def _elements(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _lists(args: tuple) -> tuple:
    """Arguments with what is computed while it is read turned into lists, whose sizes can be read."""
    return tuple(list(a) if isinstance(a, Iterator) else a for a in args)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    # jinja2's own escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
