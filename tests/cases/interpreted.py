"""Triton's interpreter with less work; the cases interpreter_*.py import this file.

Each call of a device function replaces the functions of the language again, which the launch of the kernel has done:
a fourth of all time.
"""

from triton.runtime.interpreter import InterpretedFunction


def call(function, *args, **named):
    """In the place of a device function's `__call__`."""
    return function.rewrite()(*args, **named)


InterpretedFunction.__call__ = call
