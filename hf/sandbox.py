"""Jinja templates from checkpoints, rendered as `transformers` renders them, within limits.

A checkpoint's chat template is a program by somebody else.

1. jinja2's immutable sandbox keeps it from Python's internals. Here an unsafe attribute is an error at once.
2. A trace function reads the thread's clock at every line of Python, also inside jinja2, and now and then the memory of
   the process. This ends loops and growth by steps.
3. What one call in C could multiply is checked before it (`check_call`), and what is made, with all that it holds,
   after it (`bounded`). So no single step is long.

Every limit grows with the conversation: only templates meet them. Trade-off: all in one process and thread, with no
worker to start or signal to catch; the trace makes rendering some times slower, which leaves it at milliseconds.
Source: the module utils.chat_template_utils of transformers, for the options, the globals and `{% generation %}`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from datetime import datetime
from functools import wraps
from math import prod
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from files import one_line
from stats import resident_bytes

MAX_SOURCE_CHARS = 10**6  # published templates have at most 3e4
# and for a conversation of n characters:
MAX_CPU_S = 5.0  # + n * 1e-6; 600 messages take LLaMA-3.1's 0.3 s
MAX_BYTES = 10**9  # + 100 n, by which the memory grows
MAX_CHARS = 10**7  # + 100 n, of one value
LOOK_S = 0.002  # between two looks at the memory
NOTHING: Mapping[int, int] = {}
LISTS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
PADDING = (
    "batch",
    "center",
    "ljust",
    "rjust",
    "round",
    "slice",
    "tojson",
    "to_bytes",
    "zfill",
)  # to a number
MULTIPLYING = ("expandtabs", "indent", "translate")
SEARCHING = (
    "lstrip",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "rstrip",
    "strip",
    "trim",
)  # in quadratic time
UNSUPPORTED = ("urlize", "wordwrap")  # slow regular expressions; no published template has them
# %, or a name in (), flags and width.precision; a name with ( in it counts as a width that is no number
PRINTF = re.compile(r"%(?:%|(?:\([^()]*\))?[-#0 +_^]*(\([^()]*\(|[*\d]*\.?[*\d]*))")


class OutOfLimits(BaseException):
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
        """Render. Raises: ValueError when the template raises, takes too much or reaches for what is not its own."""
        given = size(variables)
        self._environment.most = MAX_CHARS + 100 * given
        self._environment.sizes = sizes = {}
        for value in variables.values():
            for part in (
                [value, *value] if isinstance(value, list) else [value]
            ):  # a conversation and its messages
                sizes[id(part)] = size(part)
        return self._run(lambda: self._template.render(**variables), given)

    @staticmethod
    def _run(function: Callable[[], Any], given: int = 0) -> Any:
        look, before = time.thread_time(), sys.gettrace()
        end, most = look + MAX_CPU_S + given * 1e-6, resident_bytes() + MAX_BYTES + 100 * given

        def watch(frame, event, argument):
            nonlocal look
            if (
                event == "line" and (now := time.thread_time()) > look
            ):  # raised where a generator closes, it'd be lost
                if now > end:
                    raise OutOfLimits(f"takes more than {MAX_CPU_S:g} s")
                if resident_bytes() > most:
                    raise OutOfLimits(f"takes more than {MAX_BYTES / 1e9:g} GB of memory")
                look = now + LOOK_S
            return None if frame.f_code is size.__code__ else watch  # it has its own limit

        try:
            sys.settrace(watch)
            return function()
        except OutOfLimits as error:
            reason = str(error)
        except SecurityError as error:
            reason = f"is refused: {one_line(error, 400)}"
        except jinja2.TemplateSyntaxError as error:
            reason = f"is not valid Jinja (line {error.lineno}): {one_line(error.message, 400)}"
        except Exception as error:  # a template can raise any
            own = isinstance(error, TemplateError)
            reason = (
                f"raises: {one_line(error, 400)}"
                if own
                else f"fails ({type(error).__name__}: {one_line(error, 400)})"
            )
        finally:
            sys.settrace(before)
        raise ValueError(reason)


def size(value: Any, most: int = 10**9, known: Mapping[int, int] = NOTHING) -> int:
    """Characters of a text, or of all texts in a list or mapping and 10 for each element; stops beyond `most`.

    known: by id(), the sizes of values that live as long as the mapping and do not change.
    """
    total, todo = 0, [value]
    while todo and total <= most:
        value = todo.pop()
        if id(value) in known:
            total += known[id(value)]
        elif isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, (dict, *LISTS)):
            total += 10 * len(value)
            todo += value
            todo += value.values() if isinstance(value, dict) else ()
    return total


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 with a limit for what one step makes. One template each: `most` is of one rendering."""

    intercepted_binops = frozenset(
        ("+", "*", "**", "%")
    )  # these are not computed while compiling either

    def __init__(self):
        self.most = MAX_CHARS
        self.sizes: dict[int, int] = {}  # of the conversation, which every call would count again
        self.code_generator_class = BoundedCode
        extensions = [Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        filters = self.filters | {"sum": _sum, "tojson": self._to_json}
        self.filters = {name: self._checked(name, function) for name, function in filters.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": self._strftime_now}
        self.globals |= {
            "dict": lambda *args, **named: dict(*args, **named),
            "namespace": _Namespace,
        }

    def check(self, amount: int) -> None:
        """Raises: SecurityError for too many characters."""
        if amount > self.most:
            raise SecurityError(f"it builds more than {MAX_CHARS:g} characters at once")

    def bounded(self, value: Any) -> Any:
        """The value, once its size is checked; a bit of a number counts as 100, which keeps arithmetic short."""
        self.check(
            100 * value.bit_length()
            if isinstance(value, int)
            else size(value, self.most, self.sizes)
        )
        return value

    def check_call(self, name: str, subject: Any, args: tuple) -> None:
        """Check what a filter, or a method of `subject`, would make."""
        if name in PADDING:
            self.check(10 * max((abs(v) for v in args if isinstance(v, int)), default=0))
        elif name in MULTIPLYING:
            self.check(size(subject) * prod(map(_weight, args)))
        elif name in SEARCHING:
            self.check(size(subject) * prod(map(_weight, args)) // 2000)  # comparisons are fast
        elif name == "replace" and len(args) > 1:
            text, old, new = (
                v if isinstance(v, (str, bytes)) else str(v) for v in (subject, *args[:2])
            )
            self.check(len(text) + text.count(old) * len(new))

    def check_pattern(self, specs: list[str], no_number: str, values: Any) -> None:
        """Check the format specs of a pattern. no_number: the characters that only widths from values have"""
        if any(char in spec for spec in specs for char in no_number):
            raise SecurityError("a width in a format is not a number")
        self.check(
            10 * sum(int(n) for spec in specs for n in re.findall(r"\d+", spec))
            + len(specs) * size(values)
        )

    def parts(self, values: Any, separator: Any) -> list:
        """What is joined, once its size is checked."""
        values = list(values)
        self.check(size(values) + len(values) * len(separator))
        return values

    def concat(self, parts: Any) -> str:
        """Join the parts of an output, of a macro or of a block."""
        return "".join(self.parts(parts, ""))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        ints = [abs(v) for v in (left, right) if isinstance(v, int)]
        if operator == "%" and isinstance(left, (str, bytes)):
            self.check_pattern(
                PRINTF.findall(left if isinstance(left, str) else left.decode("latin-1")),
                "*(",
                right,
            )
        elif operator == "+":
            self.bounded((left, right))
        elif operator == "*" and len(ints) == 1:
            self.check(ints[0] * max(size(left), size(right)))
        elif len(ints) == 2:  # an exponent multiplies the bits
            self.check(100 * left.bit_length() * (abs(right) if operator == "**" else 2))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(function, "__wrapped__", function)  # str.format comes wrapped
        name, owner = getattr(inner, "__name__", ""), getattr(inner, "__self__", None)
        self.bounded((args, kwargs))  # what a macro gets as varargs and kwargs
        if name == "join" and isinstance(owner, (str, bytes)) and args:
            args = (self.parts(args[0], owner), *args[1:])
        elif name in ("format", "format_map") and isinstance(owner, str):
            specs = [spec for _, _, spec, _ in Formatter().parse(owner) if spec is not None]
            self.check_pattern(specs, "{", (args, kwargs))
        else:
            self.check_call(name, owner, (*args, *kwargs.values()))
        return self.bounded(super().call(context, function, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"it reaches for the attribute {attribute} of a {type(obj).__name__}")

    def _checked(self, name: str, function: Callable) -> Callable:
        first = hasattr(
            function, "jinja_pass_arg"
        )  # then an environment or context comes before the subject

        @wraps(function)  # keeps jinja2's mark of what it passes
        def checked(*args, **kwargs):
            before, (subject, *rest) = args[:first], args[first:]
            if name in UNSUPPORTED:
                raise SecurityError(f"the filter {name} is not supported")
            if name == "join":
                subject = self.parts(subject, str(rest[0] if rest else kwargs.get("d", "")))
            elif name == "format":
                self.check_pattern(PRINTF.findall(str(subject)), "*(", (rest, kwargs))
            else:
                self.check_call(name, subject, (*rest, *kwargs.values()))
            return self.bounded(function(*before, subject, *rest, **kwargs))

        return checked

    def _strftime_now(self, format: str) -> str:
        self.check_pattern(PRINTF.findall(format), "*(", ())
        return datetime.now().strftime(format)

    def _to_json(
        self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
    ) -> str:
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self.concat(encoder.iterencode(value))  # jinja2's own escapes HTML


class BoundedCode(CodeGenerator):
    """Checks what literals and `~` make: a short program can nest lists whose text is longer than memory."""


def _bounding(visit: Callable) -> Callable:
    def bounding(self, node, frame):
        made = getattr(node, "ctx", "load") == "load"  # not the names that are set
        self.write("environment.bounded(" if made else "")
        visit(self, node, frame)
        self.write(")" if made else "")

    return bounding


for _visit in ("visit_Concat", "visit_Dict", "visit_List", "visit_Tuple"):
    setattr(BoundedCode, _visit, _bounding(getattr(CodeGenerator, _visit)))


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks answers for training; here it only bounds a scope."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # its values, and those of namespaces in it, have no limit together


def _weight(value: Any) -> int:
    """What an argument can multiply a text by: a number's value, a text's length, the longest in a list or mapping."""
    if isinstance(value, (dict, *LISTS)):
        return max(map(_weight, value.values() if isinstance(value, dict) else value), default=1)
    return max(1, abs(value) if isinstance(value, int) else size(value))


def _raise(message: str) -> None:
    raise TemplateError(message)


@pass_environment
def _sum(environment: Sandbox, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    for value in (
        iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    ):
        start = start + value  # line by line: jinja2's own can take quadratic time in C
    return start
