"""The build and the loading of the C++ operators of this folder.

`load_operators` compiles them for this processor at the first use (20 s), keeps the library in the
user's cache under a name made of everything that it depends on, and loads it. If that fails, it
prints the reason; PyTorch's operators and the references serve then. Code from the cache is
executed, so only the user may write to it. A library ends with its own SHA-256; a damaged one is
built again.

`GPT_EAGLE_MARCH` in the environment replaces `-march=native`, so that the builds of other
processors can be tested on this one: `x86-64-v3` has AVX2, `x86-64` neither that nor AVX-512. AMX
tiles are in every library; tiles.py decides whether they are used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cli.io import folder_lock
from ops.cpu import tiles

HERE = Path(__file__).parent
UNITS = ("operators.cpp", "products.cpp")  # compiled side by side
WAITING = "note: waiting for another process, which builds the CPU operators (20 s)"


def _rows_of(x: Tensor, n: int, fp32_out: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if fp32_out else x.dtype)


def _topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.shape[:-1]
    values = scores.new_empty(*rows, k)
    index = scores.new_empty(*rows, k, dtype=torch.int64)
    return values, index, scores.new_empty(*rows, 1)


def _rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    return tuple(qkv.new_empty(*qkv.shape[:2], count, qkv.shape[3]) for count in (heads, kv_heads))


def _angles(freq: Tensor, positions: Tensor, factor: float) -> tuple[Tensor, ...]:
    return tuple(freq.new_empty(*positions.shape, 1, 2 * len(freq)) for _ in range(2))


def _next_level(
    logits,
    sharpness,
    ids,
    noise,
    level,
    temperature,
    index,
    values,
    seen,
    places,
    k,
    count,
    at,
    by_value,
):
    B = len(logits)
    R = logits.shape[1] if index is None else index.shape[1]
    slots = at[2]
    candidates = [
        logits.new_empty(B, R * k, dtype=torch.long),  # tokens
        logits.new_empty(B, R * k),  # values
        logits.new_empty(B, R * k, dtype=torch.long),  # parents
    ]
    front = [
        logits.new_empty(B, count, dtype=torch.long),  # index
        logits.new_empty(B, count, dtype=torch.long),  # tokens
        logits.new_empty(B, count, dtype=torch.long),  # parent
        logits.new_empty(B, count),  # values
        logits.new_empty(B, count, slots, dtype=torch.bool),  # seen
    ]
    return *candidates, *front


def _rerank(tokens, values, parents, ran, nodes, count, text, pos):
    B = len(pos)
    N = count + 1
    return (
        pos.new_empty(B, N),  # tokens
        pos.new_empty(B, N),  # parents
        pos.new_empty(B, N),  # depths
        pos.new_empty(B, N, N, dtype=torch.bool),  # mask
        pos.new_empty(B, N, dtype=torch.bool),  # valid
        pos.new_empty(B, N, dtype=torch.float32),  # values
        pos.new_empty(B, N),  # places
    )


def _place_rows(pos, done, depths, rows, slot, depth):
    slots = pos.new_empty(len(pos), rows)
    return slots, torch.empty_like(pos), torch.empty_like(slots)


def _lookup(text, pos, kept, tokens, branches, least, longest):
    chains = text.new_empty(len(text), branches, tokens)
    return chains, text.new_empty(len(text), branches)


def _add_chains(tokens, values, parents, chains, found):
    added = chains[0].numel()
    return tuple(x.new_empty(len(x), x.shape[1] + added) for x in (tokens, values, parents))


def _causal(first, rows, back):
    slots = first.new_empty(len(first), rows)
    mask = first.new_empty(len(first), rows, rows, dtype=torch.bool)
    return slots, torch.empty_like(first), mask


# schema -> a function that returns empty results of the right shapes, for torch.compile; None: the
# operator is never compiled
OPERATORS: dict[str, Callable | None] = {
    "matmul(Tensor x, Tensor weight, Tensor? table, Tensor? bias, int n, bool fp32_out, "
    "Tensor? expert=None) -> Tensor": (
        lambda x, weight, table, bias, n, fp32_out, expert=None: _rows_of(x, n, fp32_out)
    ),
    "attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask) -> Tensor": (
        lambda q, k, v, start, mask: q.new_empty(*q.shape[:2], q.shape[2] * q.shape[3])
    ),
    "topk(Tensor scores, int k) -> (Tensor, Tensor, Tensor)": _topk,
    "rotary(Tensor qkv, Tensor cos, Tensor sin, int heads, int kv_heads) "
    "-> (Tensor, Tensor)": _rotary,
    "move_rows(Tensor(a!)[] buffers, Tensor start, Tensor path) -> ()": (
        lambda buffers, start, path: None
    ),
    "angles(Tensor freq, Tensor positions, float factor) -> (Tensor, Tensor)": _angles,
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor": (
        lambda x, weight, eps: x.new_empty(x.shape)
    ),
    "swiglu(Tensor both) -> Tensor": (
        lambda both: both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    ),
    "gumbel(Tensor seed, Tensor prompt, Tensor sample, Tensor? greedy, Tensor first, int rows, "
    "int vocab, int domain) -> Tensor": (
        lambda seed, prompt, sample, greedy, first, rows, vocab, domain: first.new_empty(
            len(first), rows, vocab, dtype=torch.float32
        )
    ),
    "cut(Tensor scores, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? margin) "
    "-> Tensor": (lambda scores, temperature, top_k, top_p, margin: scores.new_empty(scores.shape)),
    "best(Tensor scores, Tensor? noise, Tensor? row) -> Tensor": (
        lambda scores, noise, row: scores.new_empty(*scores.shape[:-1], dtype=torch.int64)
    ),
    "prepare_layers(Tensor?[] weights, int heads, int[] inner, int chosen, bool norm, float eps) "
    "-> Tensor": None,
    "model(Tensor tokens, Tensor positions, Tensor prepared, Tensor embedding, "
    "Tensor? embedding_table, Tensor freq, Tensor norm, float factor, Tensor(a!)[] k, "
    "Tensor(b!)[] v, Tensor slots, Tensor start, Tensor mask, int[] aux_layers) -> Tensor": None,
    "head_step(Tensor tokens, Tensor out, Tensor parent, Tensor positions, Tensor prepared, "
    "Tensor?[] parts, float factor, bool normed_residual, Tensor(a!)[] k, Tensor(b!)[] v, "
    "Tensor slots, Tensor start, Tensor mask) -> Tensor": None,
    "head_extend(Tensor tokens, Tensor features, Tensor count, Tensor length, Tensor hidden, "
    "Tensor prepared, Tensor?[] parts, float factor, bool normed_residual, int inputs, "
    "Tensor(a!)[] k, Tensor(b!)[] v) -> (Tensor, Tensor)": None,
    "next_level(Tensor logits, float sharpness, Tensor? ids, Tensor? noise, int level, "
    "Tensor? temperature, Tensor? index, Tensor? values, Tensor? seen, Tensor? places, int k, "
    "int count, int[] at, bool by_value) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": _next_level,
    "rerank(Tensor[] tokens, Tensor[] values, Tensor[] parents, Tensor[] ran, Tensor? nodes, "
    "int count, Tensor text, Tensor pos) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": _rerank,
    "accept(Tensor tokens, Tensor parents, Tensor depths, Tensor mask, Tensor valid, "
    "Tensor choice, int depth) -> (Tensor, Tensor, Tensor, Tensor)": None,
    "advance(Tensor(a!) tokens, Tensor pos, Tensor draws, Tensor done, Tensor limit, Tensor roots, "
    "Tensor path, Tensor length, Tensor emitted, Tensor ends, Tensor features) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": None,
    "place_rows(Tensor pos, Tensor? done, Tensor? depths, int rows, int slot, int depth) "
    "-> (Tensor, Tensor, Tensor)": _place_rows,
    "keep_rows(Tensor(a!) kept, Tensor(b!) waiting, Tensor(c!) passed, Tensor features, "
    "Tensor count) -> ()": (lambda *operands: None),
    "look_up(Tensor text, Tensor pos, Tensor? kept, Tensor(a!) tokens, Tensor(b!) values, "
    "Tensor(c!) parents, Tensor(d!) lengths, Tensor(e!) root, Tensor(f!) outcomes, "
    "Tensor(g!) expected, int least, int longest, int[] sizes) -> ()": (lambda *operands: None),
    "lookup(Tensor text, Tensor pos, Tensor? kept, int tokens, int branches, int least, "
    "int longest) -> (Tensor, Tensor)": _lookup,
    "add_chains(Tensor tokens, Tensor values, Tensor parents, Tensor chains, Tensor found) "
    "-> (Tensor, Tensor, Tensor)": _add_chains,
    "causal(Tensor first, int rows, int back) -> (Tensor, Tensor, Tensor)": _causal,
    "with_times(Tensor facts, int[] times) -> Tensor": None,
    "weight_bytes(int layout, int n, int k, int group) -> int": None,
    "widen_blocks(Tensor content, int type, Tensor(a!) out) -> ()": None,
    "pack_blocks(Tensor content, int type, Tensor? order, Tensor(a!) out) -> bool": None,
    "read_rows(Tensor weight, Tensor? table, Tensor rows, Tensor(a!) out) -> ()": None,
    "own_threads(int count) -> ()": None,
    "use_tiles(str name) -> bool": None,
    "tiles() -> (str, int, int)": None,
}


# -------------------------------------------------------------------------------------- the library


def compiler() -> str:
    """Find the C++ compiler. Raises: RuntimeError when there is none."""
    requested = os.environ.get("CXX")
    for name in (requested,) if requested else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            return path
    if requested:
        raise RuntimeError(f"no C++ compiler: CXX is {requested}")
    raise RuntimeError("no C++ compiler; install g++ or set CXX")


def commands(march: str) -> tuple[list[str], list[str]]:
    """Return the command that compiles a file, and the arguments that link a library.

    Raises: RuntimeError where there is no compiler.
    """
    include = Path(torch.__file__).parent / "include"
    command = [
        compiler(),
        f"-march={march}",
        "-std=c++20",
        "-O3",
        # a product is fused with a sum only where the source does it, or results would depend on
        # the compiler
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-fPIC",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
    ]
    return command, ["-shared", f"-L{include.parent / 'lib'}", "-ltorch_cpu", "-lc10"]


def build(march: str = "") -> Path:
    """Compile the operators into the cache, unless they are there.

    march: the processor to build for, by default `GPT_EAGLE_MARCH` or this one

    Raises: RuntimeError with the compiler's first error line.
    """
    march = march or os.environ.get("GPT_EAGLE_MARCH") or "native"
    command, link = commands(march)
    sources = {
        file.name: file.read_text()
        for file in sorted(HERE.iterdir())
        if file.suffix in (".cpp", ".h")
    }
    target = processor() if march == "native" else ""
    parts = [torch.__version__, target, *sources.values(), *command, *link]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-eagle"
    library = folder / f"{march}-{key}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(folder)
        if is_whole(library):
            return library
        with (
            folder_lock(folder, WAITING) as locked,
            tempfile.TemporaryDirectory(prefix="build.", dir=folder) as temporary,
        ):
            if locked:
                _remove_leftovers(folder, Path(temporary))
            if not is_whole(library):  # another process may have made it meanwhile
                made = Path(temporary) / library.name
                _compile_and_link(sources, command, link, made)
                os.replace(made, library)
    except OSError as error:
        reason = f"{error.strerror}; XDG_CACHE_HOME names another place"
        raise RuntimeError(f"cannot write {folder}: {reason}") from None
    return library


def _remove_leftovers(folder: Path, own: Path) -> None:
    """Remove the temporary folders of builds that were killed, and keep this build's own."""
    for leftover in folder.glob("build.*"):
        if leftover != own:
            shutil.rmtree(leftover, ignore_errors=True)


def _compile_and_link(
    sources: dict[str, str], command: list[str], link: list[str], made: Path
) -> None:
    """Compile the sources in the folder of `made`, and link them.

    Writes: `made`, which ends with its SHA-256.
    Raises: RuntimeError with the compiler's first error line.
    """
    # the sources that the key is made of, even if the files are edited meanwhile
    for name, text in sources.items():
        (made.parent / name).write_text(text)
    print("note: building the CPU operators, once (20 s)", file=sys.stderr)
    if not _knows_tiles(command, made.parent):
        command = [*command, "-DNO_TILES"]
    units = [made.parent / name for name in UNITS]
    objects = [str(unit.with_suffix(".o")) for unit in units]
    _run(*([*command, "-c", str(unit), "-o", out] for unit, out in zip(units, objects)))
    _run([command[0], *objects, *link, "-o", str(made)])
    made.write_bytes(made.read_bytes() + hashlib.sha256(made.read_bytes()).digest())
    made.chmod(0o700)  # independent of the umask


def _knows_tiles(command: list[str], folder: Path) -> bool:
    """Return whether the compiler's assembler knows AMX: binutils before 2.36 do not."""
    probe = folder / "probe.s"
    probe.write_text("tilerelease\n")
    try:
        _run([*command, "-c", str(probe), "-o", str(probe.with_suffix(".o"))])
    except RuntimeError:
        return False
    return True


def check_own(folder: Path) -> None:
    """Check that the folder is the user's own, and that nobody else may write to it.

    Raises: RuntimeError otherwise.
    """
    fault = _not_own(folder)
    if not fault and not stat.S_ISDIR(folder.lstat().st_mode):
        fault = "it is a link"
    if fault:
        raise RuntimeError(f"code would run from {folder}, and {fault}; remove it")


def _not_own(path: Path) -> str:
    """Return the reason why a file or folder is not the user's alone, or the empty string."""
    status = path.lstat()
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to another user ({status.st_uid})"
    # a link has no mode of its own
    if status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def is_whole(library: Path) -> bool:
    """Check that the library exists, is the user's alone and ends with its own SHA-256.

    The loader crashes on a truncated library. One of another user was put there while others could
    write to the folder.
    """
    if not library.is_file() or library.is_symlink() or _not_own(library):
        return False
    content = library.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(*commands: list[str]) -> None:
    """Run compiler commands side by side. Raises: RuntimeError with the first error line."""
    try:
        running = [
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands
        ]
    except OSError as error:
        raise RuntimeError(f"{commands[0][0]} does not start: {error.strerror}") from None
    ended = [(process.communicate()[1], process.returncode) for process in running]
    for messages, status in ended:
        if status:
            errors = [line for line in messages.splitlines() if "error" in line]
            reason = errors[0] if errors else "it gave no reason"
            raise RuntimeError(f"{commands[0][0]} failed: {reason.strip()[:200]}")


def processor() -> str:
    """Describe the processor that `-march=native` stands for here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return line
    return platform.machine()


def register(namespace: str, library: Path) -> torch.library.Library:
    """Define the operators in `torch.ops.<namespace>` with their shapes, and load their code."""
    code = ctypes.CDLL(str(library))
    definition = torch.library.Library(namespace, "FRAGMENT")
    for schema, fake in OPERATORS.items():
        definition.define(schema)
        if fake is not None:
            name = schema.partition("(")[0]
            torch.library.register_fake(f"{namespace}::{name}", fake, lib=definition)
    code.add_operators(namespace.encode())
    return definition


@functools.cache
def load_operators() -> str:
    """Make the operators of `OPERATORS` available in `torch.ops.gpt_eagle`.

    Several threads may call this.
    Returns: the reason for a failure, which is also printed once, or the empty string.
    """
    with _one_at_a_time:
        return _load()


@functools.cache
def _load() -> str:
    try:
        library = build()
        _libraries[library.name] = register("gpt_eagle", library)
        tiles.choose()
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        note = "no C++ operators: PyTorch's run, which are slow on trees and in int8 and int4"
        print(f"note: {note} ({reason})", file=sys.stderr)
        return reason
    return ""


def loaded() -> str:
    """Return the library's name, made of all that its code depends on; empty if none is loaded."""
    return next(iter(_libraries), "")


_one_at_a_time = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}  # by name; a definition ends with its object
