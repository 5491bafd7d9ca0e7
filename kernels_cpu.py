"""Builds and loads the CPU operators (*_cpu.cpp), and knows their weight layouts.

How it works:
1. `load_operators` compiles the files for this processor at the first use (20 s on 4 cores), keeps the library in
   the user's cache under a name made of everything that it depends on, and loads it. Where that fails, it says why; the
   caller then uses PyTorch's own operators.
2. `pack_int4` and `pack_int8` bring codes and scales into the layout that `w4a8` and `w8a8` stream through;
   `unpack_*` are their inverses. `linear_bf16` takes bf16 weights as they are.
3. `w4a8_reference`, `w8a8_reference` and `linear_bf16_reference` compute the same thing in plain tensor operations.

`w4a8` and `w8a8` round activations to int8, with a scale per row and block of k, for any number of rows. In no product
does a row's result depend on its company. With `expert` [P] int64, x is [P, K], weights are stacked, and row i meets
those of expert[i] alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

STRIP = 32  # outputs whose weights are interleaved; as in the source
BLOCK8 = 128  # values of k per activation scale of w8a8; w4a8 takes the group
UNITS = ("kernels_cpu.cpp", "linear_cpu.cpp", "attention_cpu.cpp", "fused_cpu.cpp", "layers_cpu.cpp")
SOURCES = [Path(__file__).parent / name for name in (*UNITS, "kernels_cpu.h")]
SCHEMAS = (
    "w4a8(Tensor x, Tensor packed, int n, int group, bool wide, Tensor? expert=None) -> Tensor",
    "w8a8(Tensor x, Tensor packed, Tensor scale, bool wide, Tensor? expert=None) -> Tensor",
    "linear_bf16(Tensor x, Tensor weight, Tensor? bias, bool wide, Tensor? expert=None) -> Tensor",
    "attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask) -> Tensor",
    "topk(Tensor scores, int k) -> (Tensor, Tensor, Tensor)",
    "rotary(Tensor qkv, Tensor cos, Tensor sin, int heads, int kv_heads) -> (Tensor, Tensor)",
    "move_rows(Tensor(a!)[] buffers, Tensor start, Tensor path) -> ()",
    "stamp(Tensor x, Tensor[] after) -> (Tensor, Tensor)",
    "keep_layers(Tensor?[] weights, int heads, int inner, int chosen, float eps) -> Tensor",
    "layers(Tensor x, Tensor kept, Tensor(a!)[] k, Tensor(b!)[] v, Tensor cos, Tensor sin, Tensor slots, Tensor start, "
    "Tensor mask) -> Tensor",
    "dot_peak(int rounds) -> float",
    "pair_peak(int rounds) -> float",
)


# -------------------------------------------------------------------------------------------- the library


def compiler() -> str:
    """The C++ compiler. Raises: RuntimeError when there is none."""
    asked = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, (asked,) if asked else ("g++", "clang++", "c++"))), None)
    if found is None:
        raise RuntimeError("no C++ compiler" + (f": CXX is {asked}" if asked else "; install g++ or set CXX"))
    return found


def build(namespace: str, flags: tuple[str, ...] = ("-march=native",)) -> Path:
    """Compile the operators into the cache, unless they are there. namespace: of the operators in torch.ops.

    Raises: RuntimeError with the compiler's first error line.
    """
    include = Path(torch.__file__).parent / "include"
    # a product must not be fused with a sum unless the source says so: results would depend on the compiler
    command = [
        compiler(), "-std=c++20", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-fvisibility=hidden", *flags,
        f"-DLIBRARY={namespace}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
    ]  # fmt: skip
    link = ["-shared", f"-L{include.parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    key = "\n".join([torch.__version__, processor(), *(source.read_text() for source in SOURCES), *command, *link])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-eagle"
    library = folder / f"{namespace}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    print("note: building the CPU operators for this processor, once (20 s on 4 cores)", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / library.name
            objects = [str(made.with_name(unit).with_suffix(".o")) for unit in UNITS]
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # a unit takes 5 to 15 s
                units = [[*command, "-c", str(unit), "-o", to] for unit, to in zip(SOURCES, objects)]
                list(pool.map(_run, units))
            _run([*command, *objects, *link, "-o", str(made)])
            os.replace(made, library)
    except OSError as error:
        raise RuntimeError(f"cannot write {folder}: {error.strerror}") from None
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it gave no reason"]
        raise RuntimeError(f"{command[0]} failed: {lines[0].strip()[:200]}")


def processor() -> str:
    """What `-march=native` stands for here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def register(namespace: str, library: Path) -> torch.library.Library:
    """Define the operators with their shapes, and load their code."""
    definition = torch.library.Library(namespace, "FRAGMENT")
    for schema in SCHEMAS:
        definition.define(schema)

    def shape_of(x: Tensor, n: int, wide: bool) -> Tensor:
        return x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if wide else x.dtype)

    def w4a8(x, packed, n, group, wide, expert=None):
        return shape_of(x, n, wide)

    def w8a8(x, packed, scale, wide, expert=None):
        return shape_of(x, scale.shape[-1], wide)

    def linear_bf16(x, weight, bias, wide, expert=None):
        return shape_of(x, weight.shape[-2], wide)

    def attention(q, k, v, start, mask):
        return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])

    def topk(scores, k):
        row = scores.shape[:-1]
        return scores.new_empty(*row, k), scores.new_empty(*row, k, dtype=torch.int64), scores.new_empty(*row, 1)

    def rotary(qkv, cos, sin, heads, kv_heads):
        return tuple(qkv.new_empty(*qkv.shape[:2], count, qkv.shape[3]) for count in (heads, kv_heads))

    def stamp(x, after):
        return torch.empty_like(x), x.new_empty((), dtype=torch.int64)

    def move_rows(buffers, start, path):
        return None

    def layers(x, *operands):
        return torch.empty_like(x)

    torch.library.register_fake(f"{namespace}::w4a8", w4a8, lib=definition)
    torch.library.register_fake(f"{namespace}::w8a8", w8a8, lib=definition)
    torch.library.register_fake(f"{namespace}::linear_bf16", linear_bf16, lib=definition)
    torch.library.register_fake(f"{namespace}::attention", attention, lib=definition)
    torch.library.register_fake(f"{namespace}::topk", topk, lib=definition)
    torch.library.register_fake(f"{namespace}::rotary", rotary, lib=definition)
    torch.library.register_fake(f"{namespace}::stamp", stamp, lib=definition)
    torch.library.register_fake(f"{namespace}::move_rows", move_rows, lib=definition)
    torch.library.register_fake(f"{namespace}::layers", layers, lib=definition)
    torch.ops.load_library(str(library))
    return definition


@functools.cache
def load_operators() -> str:
    """Make the operators of `SCHEMAS` available in `torch.ops.gpt_eagle`.

    Returns: why they are not, which is also said once, or the empty string.
    """
    try:
        _libraries.append(register("gpt_eagle", build("gpt_eagle")))
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        print(f"note: PyTorch's own operators serve, which are slow on trees ({reason})", file=sys.stderr)
        return reason
    return ""


_libraries: list[torch.library.Library] = []  # a definition ends with its object


# ---------------------------------------------------------------------------------------------- layouts


def _whole_strips(t: Tensor) -> Tensor:
    return F.pad(t, (0, 0, 0, -t.shape[0] % STRIP))


def pack_int4(codes: Tensor, scale: Tensor) -> Tensor:
    """Lay out int4 weights for `w4a8`.

    codes: [N, K] int8 in -8 .. 7; scale: [N, K/G] bf16
    Returns: [ceil(N/32), K/G, 64 + 16 G] uint8; per strip and group 32 scales, then for every 4 values of k a byte per
    output i < 16 and k: output i in the low nibble, output i + 16 in the high one, both with 8 added.
    """
    blocks = scale.shape[1]
    steps = codes.shape[1] // blocks // 4
    # [strip, half, output, block, step, 4]
    nibbles = _whole_strips(codes + 8).to(torch.uint8).view(-1, 2, STRIP // 2, blocks, steps, 4)
    both = (nibbles[:, 0] | nibbles[:, 1] << 4).permute(0, 2, 3, 1, 4)  # [strip, block, step, 16, 4]
    scales = _whole_strips(scale).view(-1, STRIP, blocks).transpose(1, 2).contiguous()  # [strip, block, 32]
    return torch.cat((scales.view(torch.uint8), both.reshape(*scales.shape[:2], -1)), 2).contiguous()


def unpack_int4(packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_int4`. Returns: codes [N, K] int8; scale [N, K/G] bf16."""
    strips, blocks, _ = packed.shape
    scales, both = packed.split((2 * STRIP, packed.shape[2] - 2 * STRIP), 2)
    scale = scales.contiguous().view(torch.bfloat16).transpose(1, 2).reshape(-1, blocks)  # [N, blocks]
    both = both.reshape(strips, blocks, -1, STRIP // 2, 4)  # [strip, block, step, 16, 4]
    halves = torch.stack((both & 15, both >> 4), 1)  # [strip, half, block, step, 16, 4]
    codes = halves.permute(0, 1, 4, 2, 3, 5).reshape(strips * STRIP, -1).to(torch.int8) - 8
    return codes[:n].contiguous(), scale[:n].contiguous()


def pack_int8(codes: Tensor) -> Tensor:
    """Lay out int8 weights for `w8a8`. codes: [N, K] int8. Returns: [ceil(N/32), K/4, 32, 4] uint8, 128 added."""
    shifted = (_whole_strips(codes).to(torch.int16) + 128).to(torch.uint8)
    return shifted.view(-1, STRIP, codes.shape[1] // 4, 4).transpose(1, 2).contiguous()


def unpack_int8(packed: Tensor, n: int) -> Tensor:
    """The inverse of `pack_int8`. Returns: codes [N, K] int8."""
    shifted = packed.transpose(1, 2).reshape(packed.shape[0] * STRIP, -1)
    return (shifted.to(torch.int16) - 128).to(torch.int8)[:n].contiguous()


# -------------------------------------------------------------------------------------------- references


def round_activations(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round rows to int8 block by block. x: [..., K]. Returns: codes [..., blocks, block] and scales [..., blocks, 1],
    both fp32; the last block is padded with zeros."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    most = blocks.abs().amax(-1, keepdim=True)
    # divided as in the source: for a plain number, 127 / most is 127 * (1 / most), which rounds twice
    to_code = torch.where(most > 1e-30, torch.tensor(127.0) / most, 0)
    return (blocks * to_code).round(), most / 127


def w4a8_reference(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """`w4a8` in plain operations. x: [M, K]; codes, scale: as for `pack_int4`. Returns: [M, N] fp32."""
    activations, scales = round_activations(x, codes.shape[1] // scale.shape[1])
    weights = codes.float().unflatten(1, (scale.shape[1], -1))
    sums = torch.einsum("mbk,nbk->mbn", activations, weights)  # integers, exact
    return (sums * scales * scale.float().T).sum(1)


def w8a8_reference(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """`w8a8` in plain operations. x: [M, K]; codes: [N, K]; scale: [N] fp32. Returns: [M, N] fp32."""
    activations, scales = round_activations(x, BLOCK8)
    weights = F.pad(codes.float(), (0, -codes.shape[1] % BLOCK8)).unflatten(1, (-1, BLOCK8))
    sums = torch.einsum("mbk,nbk->mbn", activations, weights)
    return (sums * scales).sum(1) * scale


def linear_bf16_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`linear_bf16` in plain operations, bit for bit: of two values of k, the second is added first.

    x: [M, K] bf16; weight: [N, K] bf16. Returns: [M, N] fp32.
    """
    x, weight = (F.pad(t.float(), (0, t.shape[1] % 2)) for t in (x, weight))  # [M, K], [N, K], K even
    y = x.new_zeros(len(x), len(weight))
    for k in range(0, x.shape[1], 2):
        y = y + x[:, k + 1, None] * weight[:, k + 1]  # a product of two bf16 is exact in fp32
        y = y + x[:, k, None] * weight[:, k]
    return y
