"""Render Jinja templates from checkpoints as `transformers` renders them, within limits.

A checkpoint's chat template is a program by somebody else.

1. jinja2's immutable sandbox keeps it from Python's internals. An unsafe attribute is an error.
2. A trace function reads the thread's clock at every line of Python, also inside jinja2, and now
   and then the memory of the process. This ends loops and growth by steps.
3. `check_call` checks a call in C that could multiply its arguments before the call. `bounded`
   checks each new value, with all that it holds, afterwards. So no single step is long.

Every limit grows with the conversation: only templates meet them. Trade-off: all in one process and
thread, with no worker to start or signal to catch; the trace makes rendering some times slower,
which leaves it at milliseconds.
Source: the module utils.chat_template_utils of transformers, for the options, the globals and
`{% generation %}`.
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
# methods and filters, by the way in which they use an argument; PADDING: to a number
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
)
MULTIPLYING = ("expandtabs", "indent", "translate")
# in quadratic time
SEARCHING = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
UNSUPPORTED = ("urlize", "wordwrap")  # slow regular expressions; no published template has them
# %, or a name in (), flags and width.precision; a name with ( in it counts as a width that is no
# number
PRINTF = re.compile(r"%(?:%|(?:\([^()]*\))?[-#0 +_^]*(\([^()]*\(|[*\d]*\.?[*\d]*))")


class OutOfLimits(BaseException):
    """Ends a rendering. It is not an Exception, so that no filter of jinja2 catches it."""


class Template:
    """A compiled template. Its errors are ValueErrors of one line, which begin with a verb."""

    def __init__(self, source: str):
        """Compile. Raises: ValueError for a syntax error, and as `render`."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read")
        self._environment = Sandbox()
        self._template = self._run(lambda: self._environment.from_string(source))

    def render(self, **variables: Any) -> str:
        """Render.

        Raises: ValueError when the template raises, takes too much or uses an unsafe attribute.
        """
        given = size(variables)
        sizes: dict[int, int] = {}
        for value in variables.values():
            sizes[id(value)] = size(value)
            if isinstance(value, list):  # a conversation and its messages
                for part in value:
                    sizes[id(part)] = size(part)
        self._environment.most = MAX_CHARS + 100 * given
        self._environment.sizes = sizes
        return self._run(lambda: self._template.render(**variables), given)

    @staticmethod
    def _run(function: Callable[[], Any], given: int = 0) -> Any:
        look = time.thread_time()
        before = sys.gettrace()
        end = look + MAX_CPU_S + given * 1e-6
        most = resident_bytes() + MAX_BYTES + 100 * given

        def watch(frame, event, argument):
            nonlocal look
            if event == "line":  # an exception would be lost at the event of a closing generator
                now = time.thread_time()
                if now > look:
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
        except TemplateError as error:
            reason = f"raises: {one_line(error, 400)}"
        except Exception as error:  # a template can raise any
            reason = f"fails ({type(error).__name__}: {one_line(error, 400)})"
        finally:
            sys.settrace(before)
        raise ValueError(reason)


def size(value: Any, most: int = 10**9, known: Mapping[int, int] = NOTHING) -> int:
    """Count the characters of a text, or of all texts in a list or mapping, up to about `most`.

    Each element of a list or mapping counts as 10 characters besides.

    known: by id(), the sizes of values that live as long as the mapping and do not change
    """
    total = 0
    todo = [value]
    while todo and total <= most:
        value = todo.pop()
        if id(value) in known:
            total += known[id(value)]
        elif isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, (dict, *LISTS)):
            total += 10 * len(value)
            todo += value
            if isinstance(value, dict):
                todo += value.values()
    return total


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 with a limit for the result of one step.

    One template each: `most` is of one rendering.
    """

    # these are not computed while compiling either
    intercepted_binops = frozenset(("+", "*", "**", "%"))

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
        """Check a number of characters. Raises: SecurityError for too many."""
        if amount > self.most:
            raise SecurityError(f"it builds more than {MAX_CHARS:g} characters at once")

    def bounded(self, value: Any) -> Any:
        """Check the size of a value and return it.

        A bit of a number counts as 100 characters, which keeps arithmetic short.
        """
        if isinstance(value, int):
            self.check(100 * value.bit_length())
        else:
            self.check(size(value, self.most, self.sizes))
        return value

    def check_call(self, name: str, subject: Any, args: tuple) -> None:
        """Check the size of the result of a filter, or of a method of `subject`."""
        if name in PADDING:
            self.check(10 * max((abs(v) for v in args if isinstance(v, int)), default=0))
        elif name in MULTIPLYING:
            self.check(size(subject) * prod(map(_weight, args)))
        elif name in SEARCHING:
            self.check(size(subject) * prod(map(_weight, args)) // 2000)  # comparisons are fast
        elif name == "replace" and len(args) > 1:
            text = _as_text(subject)
            old = _as_text(args[0])
            new = _as_text(args[1])
            self.check(len(text) + text.count(old) * len(new))

    def check_pattern(self, specs: list[str], no_number: str, values: Any) -> None:
        """Check the format specs of a pattern.

        no_number: the characters that only widths from values have
        """
        if any(char in spec for spec in specs for char in no_number):
            raise SecurityError("a width in a format is not a number")
        widths = sum(int(number) for spec in specs for number in re.findall(r"\d+", spec))
        self.check(10 * widths + len(specs) * size(values))

    def parts(self, values: Any, separator: Any) -> list:
        """Return the values that are joined, once their size is checked."""
        values = list(values)
        self.check(size(values) + len(values) * len(separator))
        return values

    def concat(self, parts: Any) -> str:
        """Join the parts of an output, of a macro or of a block."""
        return "".join(self.parts(parts, ""))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator, as the base class does, once its size is checked."""
        ints = [abs(v) for v in (left, right) if isinstance(v, int)]
        if operator == "%" and isinstance(left, (str, bytes)):
            pattern = left if isinstance(left, str) else left.decode("latin-1")
            self.check_pattern(PRINTF.findall(pattern), "*(", right)
        elif operator == "+":
            self.bounded((left, right))
        elif operator == "*" and len(ints) == 1:
            self.check(ints[0] * max(size(left), size(right)))
        elif len(ints) == 2:  # an exponent multiplies the bits
            factor = abs(right) if operator == "**" else 2
            self.check(100 * left.bit_length() * factor)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, as the base class does, and check its arguments and its result."""
        inner = getattr(function, "__wrapped__", function)  # str.format comes wrapped
        name = getattr(inner, "__name__", "")
        owner = getattr(inner, "__self__", None)
        self.bounded((args, kwargs))  # a macro's varargs and kwargs
        if name == "join" and isinstance(owner, (str, bytes)) and args:
            args = (self.parts(args[0], owner), *args[1:])
        elif name in ("format", "format_map") and isinstance(owner, str):
            specs = [spec for _, _, spec, _ in Formatter().parse(owner) if spec is not None]
            self.check_pattern(specs, "{", (args, kwargs))
        else:
            self.check_call(name, owner, (*args, *kwargs.values()))
        return self.bounded(super().call(context, function, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse an unsafe attribute."""
        raise SecurityError(f"it reaches for the attribute {attribute} of a {type(obj).__name__}")

    def _checked(self, name: str, function: Callable) -> Callable:
        """Return a filter that checks its arguments and its result."""
        # an environment or context may come before the subject
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # keeps jinja2's mark of the passed argument
        def checked(*args, **kwargs):
            before = args[:first]
            subject, *rest = args[first:]
            if name in UNSUPPORTED:
                raise SecurityError(f"the filter {name} is not supported")
            if name == "join":
                separator = rest[0] if rest else kwargs.get("d", "")
                subject = self.parts(subject, str(separator))
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
    """Generated code that checks the results of literals and of `~`.

    A short program can nest lists with a text that is longer than memory.
    """


def _bounding(visit: Callable) -> Callable:
    """Return a visitor that puts `bounded` around the generated expression."""

    def bounding(self, node, frame):
        is_value = getattr(node, "ctx", "load") == "load"  # not the names that are set
        if is_value:
            self.write("environment.bounded(")
        visit(self, node, frame)
        if is_value:
            self.write(")")

    return bounding


for _visit in ("visit_Concat", "visit_Dict", "visit_List", "visit_Tuple"):
    setattr(BoundedCode, _visit, _bounding(getattr(CodeGenerator, _visit)))


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


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # its values, and those of namespaces in it, have no limit together


def _as_text(value: Any) -> str | bytes:
    if isinstance(value, (str, bytes)):
        return value
    return str(value)


def _weight(value: Any) -> int:
    """Return the largest factor by which an argument can multiply a text.

    That is a number's value, a text's length, or the longest in a list or mapping.
    """
    if isinstance(value, dict):
        return max(map(_weight, value.values()), default=1)
    if isinstance(value, LISTS):
        return max(map(_weight, value), default=1)
    if isinstance(value, int):
        return max(1, abs(value))
    return max(1, size(value))


def _raise(message: str) -> None:
    raise TemplateError(message)


@pass_environment
def _sum(environment: Sandbox, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    values = iterable
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), iterable)
    for value in values:
        start = start + value  # line by line: jinja2's own can take quadratic time in C
    return start
