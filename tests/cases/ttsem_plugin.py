"""pytest plugin for ttsem_cases.py: additions to ttsem that our kernels need.

1. PTX in inline assembly, executed instruction by instruction. Only what our kernels use: 32-bit integers, pairs of bf16
   or fp16, and launch control and fetching ahead, which do nothing here. Values of 16 bits lie in both halves of a word, since Triton
   packs any two of them into one; both halves must come out the same.
2. Buffers in which blocks of threads wait for each other (`ORDERED`): ttsem runs the blocks one after the other and
   cannot see that order, so it is not asked about races in them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np
import torch
from ttsem import ops

ORDERED = {  # by kernel: buffers that its last block, by a counter, reads
    "attention_kernel": ("parts_ptr", "stats_ptr"),
    "add_product_kernel": ("parts_ptr",),
    "rotary_product_kernel": ("parts_ptr",),
}
HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Any function of three bits; bit i of the table is its value where a, b, c are the bits of i."""
    result = np.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            x, y, z = (
                word if i >> place & 1 else ~word for place, word in ((2, a), (1, b), (0, c))
            )
            result = result | (x & y & z)
    return result


def fma(kind: str) -> Callable[..., np.ndarray]:
    """a * b + c for both halves of a word, rounded once."""

    def run(*words: np.ndarray) -> np.ndarray:
        shape = np.broadcast_shapes(*(word.shape for word in words))
        pairs = [
            np.array(np.broadcast_to(word, shape), order="C").reshape(-1).view(np.int16)
            for word in words
        ]
        a, b, c = (torch.from_numpy(pair).view(HALVES[kind]).double() for pair in pairs)
        return (
            (a * b + c).to(HALVES[kind]).view(torch.int16).numpy().view(np.uint32).reshape(shape)
        )  # fp64 is exact

    return run


INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": fma("bf16x2"),
    "fma.rn.f16x2": fma("f16x2"),
}


def execute(text: str, *operands: np.ndarray) -> list[np.ndarray]:
    """Run a fragment. operands: $1, $2 and so on. Returns: [$0]."""
    narrow = bool(operands) and operands[0].dtype.itemsize == 2
    words = (
        [x.astype(np.int64).astype(np.uint32) & 0xFFFF for x in operands] if narrow else operands
    )
    words = [x * np.uint32(0x10001) if narrow else np.asarray(x).view(np.uint32) for x in words]
    registers = {f"${i + 1}": word for i, word in enumerate(words)} | {
        "$0": np.zeros((), np.uint32)
    }
    for line in filter(None, (line.strip() for line in text.split("//")[0].split(";"))):
        name, _, rest = line.partition(" ")
        if name == ".reg":
            continue
        if name not in INSTRUCTIONS:
            raise NotImplementedError(
                f"{name} is not among the instructions of ttsem_plugin.py; add it"
            )
        target, *sources = re.split(r",\s*", rest)
        values = [
            registers[s] if s in registers else np.asarray(int(s, 0), np.uint32) for s in sources
        ]
        registers[target] = INSTRUCTIONS[name](*values)
    result = registers["$0"]
    if narrow:
        assert (result >> 16 == result & 0xFFFF).all(), text
        return [(result & 0xFFFF).astype(np.uint16).view(np.int16)]
    return [result.view(np.int32)]


class Fragments(dict):
    """The fragments that ttsem knows; `execute` runs all others."""

    def get(self, text: str, default: object = None) -> object:
        known = super().get(text)
        return known or (lambda *operands: execute(text, *operands), None)


ops.PTX_FRAGMENTS = Fragments(ops.PTX_FRAGMENTS)


def ordered_spans(record, names, exchanged) -> list[tuple[int, int]]:
    """The addresses, begin and end, in which no races are looked for."""
    names = [name for name in ORDERED.get(record.fn_name, ()) if name in record.bases]
    return [(record.bases[name], record.bases[name] + record.pre[name].nbytes) for name in names]


runner = sys.modules["__main__"]  # ttsem.sanitize, run as a program
runner.lookback_buffers = lambda function, source: frozenset(ORDERED.get(function.__name__, ()))
runner._protocol_spans = ordered_spans
