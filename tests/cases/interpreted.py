"""Triton's interpreter with less work; the cases interpreter_*.py import this file.

Each call of a device function replaces the functions of the language again, a fourth of all time. Once is enough:
those that the kernels name are replaced by every launch, and those behind tl.sum and the like stay replaced.
"""

from triton.runtime.interpreter import InterpretedFunction, _patch_lang

seen = set()


def call(function, *args, **named):
    """In the place of a device function's `__call__`."""
    if function not in seen:
        seen.add(function)
        _patch_lang(function.fn)
    return function.rewrite()(*args, **named)


InterpretedFunction.__call__ = call
