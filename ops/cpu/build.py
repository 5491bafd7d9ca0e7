"""Builds and loads the C++ operators of this folder.

`load_operators` compiles them for this processor at the first use (20 s), keeps the library in the user's cache under
a name made of everything that it depends on, and loads it. Where that fails, it says why; PyTorch's operators and the
references serve then. What the cache holds is run, so only the user may write to it, and a library ends with its own
SHA-256: one that is damaged is built again.

`GPT_EAGLE_MARCH` in the environment replaces `-march=native` (`x86-64-v3` has AVX2, `x86-64` neither that nor AVX-512),
so that the builds of other processors can be tested on this one.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

HERE = Path(__file__).parent
UNITS = ("operators.cpp", "products.cpp")  # compiled side by side


def _rows_of(x: Tensor, n: int, fp32_out: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if fp32_out else x.dtype)


def _topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    row = scores.shape[:-1]
    return (
        scores.new_empty(*row, k),
        scores.new_empty(*row, k, dtype=torch.int64),
        scores.new_empty(*row, 1),
    )


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
    B, R, _ = logits.shape
    candidates, front = logits.new_empty(B, R * k), logits.new_empty(B, count)
    whole = [
        x.new_empty(x.shape, dtype=torch.long)
        for x in (candidates, candidates, front, front, front)
    ]
    seen = logits.new_empty(B, count, at[2], dtype=torch.bool)
    return whole[0], candidates, whole[1], *whole[2:], front, seen


def _rerank(tokens, values, parents, ran, nodes, count, text, pos):
    B, N, P = len(pos), count + 1, sum(level.shape[1] for level in tokens)
    token, above, depth, place = (pos.new_empty(B, N) for _ in range(4))
    mask, valid = (pos.new_empty(*shape, dtype=torch.bool) for shape in ((B, N, N), (B, N)))
    return (
        token,
        above,
        depth,
        mask,
        valid,
        pos.new_empty(B, N, dtype=torch.float32),
        place,
        pos.new_empty(B, P + 1),
    )


# schema -> what its results look like, for the compiler; None: it is never compiled
OPERATORS: dict[str, Callable | None] = {
    "w4a8(Tensor x, Tensor packed, int n, bool fp32_out, Tensor? expert=None) -> Tensor":
        lambda x, packed, n, fp32_out, expert=None: _rows_of(x, n, fp32_out),
    "w8a8(Tensor x, Tensor packed, Tensor scale, bool fp32_out, Tensor? expert=None) -> Tensor":
        lambda x, packed, scale, fp32_out, expert=None: _rows_of(x, scale.shape[-1], fp32_out),
    "linear_bf16(Tensor x, Tensor weight, Tensor? bias, bool fp32_out, Tensor? expert=None) -> Tensor":
        lambda x, weight, bias, fp32_out, expert=None: _rows_of(x, weight.shape[-2], fp32_out),
    "attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask) -> Tensor":
        lambda q, k, v, start, mask: q.new_empty(*q.shape[:2], q.shape[2] * q.shape[3]),
    "topk(Tensor scores, int k) -> (Tensor, Tensor, Tensor)": _topk,
    "rotary(Tensor qkv, Tensor cos, Tensor sin, int heads, int kv_heads) -> (Tensor, Tensor)": _rotary,
    "move_rows(Tensor(a!)[] buffers, Tensor start, Tensor path) -> ()": lambda buffers, start, path: None,
    "angles(Tensor freq, Tensor positions, float factor) -> (Tensor, Tensor)": _angles,
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor": lambda x, weight, eps: x.new_empty(x.shape),
    "gumbel(Tensor seed, Tensor prompt, Tensor sample, Tensor first, int rows, int vocab, int domain) -> Tensor":
        lambda seed, prompt, sample, first, rows, vocab, domain: first.new_empty(
            len(first), rows, vocab, dtype=torch.float32
        ),
    "cut(Tensor scores, float temperature, int top_k, float top_p) -> Tensor":
        lambda scores, temperature, top_k, top_p: scores.new_empty(scores.shape),
    "best(Tensor scores, Tensor? noise, Tensor? row) -> Tensor":
        lambda scores, noise, row: scores.new_empty(*scores.shape[:-1], dtype=torch.int64),
    "prepare_layers(Tensor?[] weights, int heads, int[] inner, int chosen, bool norm, float eps) -> Tensor": None,
    "model(Tensor tokens, Tensor positions, Tensor prepared, Tensor embedding, Tensor freq, Tensor norm, float factor, "
    "Tensor(a!)[] k, Tensor(b!)[] v, Tensor slots, Tensor start, Tensor mask, int[] aux_layers) -> Tensor": None,
    "head_step(Tensor tokens, Tensor out, Tensor parent, Tensor positions, Tensor prepared, Tensor?[] parts, "
    "float factor, bool normed_residual, Tensor(a!)[] k, Tensor(b!)[] v, Tensor slots, Tensor start, Tensor mask) "
    "-> Tensor": None,
    "head_extend(Tensor tokens, Tensor features, Tensor count, Tensor length, Tensor hidden, Tensor prepared, "
    "Tensor?[] parts, float factor, bool normed_residual, int inputs, Tensor(a!)[] k, Tensor(b!)[] v) "
    "-> (Tensor, Tensor)": None,
    "next_level(Tensor logits, float sharpness, Tensor? ids, Tensor? noise, int level, float temperature, "
    "Tensor? index, Tensor? values, Tensor? seen, Tensor? places, int k, int count, int[] at, bool by_value) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": _next_level,
    "rerank(Tensor[] tokens, Tensor[] values, Tensor[] parents, Tensor[] ran, Tensor? nodes, int count, Tensor text, "
    "Tensor pos) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": _rerank,
    "accept(Tensor tokens, Tensor parents, Tensor depths, Tensor mask, Tensor valid, Tensor choice, int depth) "
    "-> (Tensor, Tensor, Tensor, Tensor)": None,
    "advance(Tensor(a!) tokens, Tensor pos, Tensor draws, Tensor done, Tensor limit, Tensor roots, Tensor path, "
    "Tensor length, Tensor emitted, Tensor ends, Tensor features, int preset) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": None,
    "place_rows(Tensor pos, Tensor? done, Tensor? depths, int rows, int slot, int depth) -> (Tensor, Tensor, Tensor)":
        lambda pos, done, depths, rows, slot, depth: (
            pos.new_empty(len(pos), rows), torch.empty_like(pos), pos.new_empty(len(pos), rows)
        ),
    "keep_rows(Tensor(a!) kept, Tensor features, Tensor count, Tensor waiting, Tensor passed) -> (Tensor, Tensor)":
        lambda kept, features, count, waiting, passed: (torch.empty_like(waiting), torch.empty_like(passed)),
    "has_match(Tensor text, Tensor pos, int least, int longest) -> Tensor":
        lambda text, pos, least, longest: torch.empty_like(pos),
    "lookup(Tensor text, Tensor pos, int tokens, int branches, int least, int longest) -> (Tensor, Tensor)":
        lambda text, pos, tokens, branches, least, longest: (
            text.new_empty(len(text), branches, tokens), text.new_empty(len(text), branches, dtype=torch.bool)
        ),
    "add_chains(Tensor tokens, Tensor values, Tensor parents, Tensor chains, Tensor found) -> (Tensor, Tensor, Tensor)":
        lambda tokens, values, parents, chains, found: tuple(
            x.new_empty(len(x), x.shape[1] + chains[0].numel()) for x in (tokens, values, parents)
        ),
    "causal(Tensor first, int rows, int back) -> (Tensor, Tensor, Tensor)":
        lambda first, rows, back: (
            first.new_empty(len(first), rows), torch.empty_like(first),
            first.new_empty(len(first), rows, rows, dtype=torch.bool),
        ),
    "with_times(Tensor facts, int[] times) -> Tensor": None,
    "widen_blocks(Tensor content, str kind, Tensor(a!) out) -> ()": None,
    "own_threads(int count) -> ()": None,
}  # fmt: skip


# -------------------------------------------------------------------------------------------- the library


def compiler() -> str:
    """The C++ compiler. Raises: RuntimeError when there is none."""
    asked = os.environ.get("CXX")
    found = next(
        filter(None, map(shutil.which, (asked,) if asked else ("g++", "clang++", "c++"))), None
    )
    if found is None:
        raise RuntimeError(
            "no C++ compiler" + (f": CXX is {asked}" if asked else "; install g++ or set CXX")
        )
    return found


def commands(march: str) -> tuple[list[str], list[str]]:
    """Returns: how to compile a file, and how to link a library. Raises: RuntimeError where there is no compiler."""
    include = Path(torch.__file__).parent / "include"
    # a product must not be fused with a sum unless the source says so: results would depend on the compiler
    command = [
        compiler(), f"-march={march}", "-std=c++20", "-O3", "-ffp-contract=off", "-fno-trapping-math",
        "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
    ]  # fmt: skip
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
    key = "\n".join(
        [
            torch.__version__,
            processor() if march == "native" else "",
            *sources.values(),
            *command,
            *link,
        ]
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-eagle"
    library = folder / f"{march}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(folder)
        if is_whole(library):
            return library
        with (
            alone(folder) as locked,
            tempfile.TemporaryDirectory(prefix="build.", dir=folder) as temporary,
        ):
            for leftover in folder.glob("build.*") if locked else ():  # of builds that were killed
                if leftover != Path(temporary):
                    shutil.rmtree(leftover, ignore_errors=True)
            if not is_whole(library):  # made by another process meanwhile
                made = Path(temporary) / library.name
                for name, text in sources.items():  # what was read, whatever is edited meanwhile
                    (made.parent / name).write_text(text)
                print("note: building the CPU operators, once (20 s)", file=sys.stderr)
                units = [made.parent / name for name in UNITS]
                _run(
                    *(
                        [*command, "-c", str(unit), "-o", str(unit.with_suffix(".o"))]
                        for unit in units
                    )
                )
                _run(
                    [
                        command[0],
                        *(str(unit.with_suffix(".o")) for unit in units),
                        *link,
                        "-o",
                        str(made),
                    ]
                )
                made.write_bytes(made.read_bytes() + hashlib.sha256(made.read_bytes()).digest())
                made.chmod(0o700)  # whatever the umask says
                os.replace(made, library)
    except OSError as error:
        raise RuntimeError(f"cannot write {folder}: {error.strerror}") from None
    return library


def check_own(folder: Path) -> None:
    """Raises: RuntimeError when the folder is not the user's own, or others may write to it."""
    fault = _not_own(folder) or ("" if stat.S_ISDIR(folder.lstat().st_mode) else "it is a link")
    if fault:
        raise RuntimeError(f"code would run from {folder}, and {fault}; remove it")


def _not_own(path: Path) -> str:
    """Why a file or folder is not the user's alone, or nothing."""
    facts = path.lstat()
    if not hasattr(os, "geteuid"):
        return ""
    if facts.st_uid != os.geteuid():
        return f"it belongs to another user ({facts.st_uid})"
    shared = facts.st_mode & 0o022 and not stat.S_ISLNK(
        facts.st_mode
    )  # a link has no mode of its own
    return f"others may write to it (mode {stat.S_IMODE(facts.st_mode):o})" if shared else ""


def is_whole(library: Path) -> bool:
    """Whether there is a library of the user's alone that ends with the SHA-256 of what comes before.

    A loader crashes on a cut one. Another user's was put there while others could write to the folder.
    """
    if not library.is_file() or library.is_symlink() or _not_own(library):
        return False
    content = library.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


@contextmanager
def alone(folder: Path, note: str = "") -> Iterator[bool]:
    """Wait until no other process is here. Where a file system has no locks, two may make the same file: no harm.

    note: printed when there is another one to wait for
    Yields: whether this process is alone, False without locks.
    """
    held, locked = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError, AttributeError):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if note:
                    print(note, file=sys.stderr, flush=True)
                fcntl.flock(held, fcntl.LOCK_EX)
            locked = True
        yield locked
    finally:
        os.close(held)


def _run(*commands: list[str]) -> None:
    """Run the compiler, several at a time. Raises: RuntimeError with its first error line."""
    try:
        running = [
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands
        ]
    except OSError as error:
        raise RuntimeError(f"{commands[0][0]} does not start: {error.strerror}") from None
    ended = [(process.communicate()[1], process.returncode) for process in running]
    for messages, status in ended:
        if status:
            errors = [line for line in messages.splitlines() if "error" in line] or [
                "it gave no reason"
            ]
            raise RuntimeError(f"{commands[0][0]} failed: {errors[0].strip()[:200]}")


def processor() -> str:
    """What `-march=native` stands for here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
        )
    except OSError:
        return platform.processor() or platform.machine()


def register(namespace: str, library: Path) -> torch.library.Library:
    """Define the operators in `torch.ops.<namespace>` with their shapes, and load their code."""
    code, definition = ctypes.CDLL(str(library)), torch.library.Library(namespace, "FRAGMENT")
    for schema, shape in OPERATORS.items():
        definition.define(schema)
        if shape is not None:
            torch.library.register_fake(
                f"{namespace}::{schema.partition('(')[0]}", shape, lib=definition
            )
    code.add_operators(namespace.encode())
    return definition


@functools.cache
def load_operators() -> str:
    """Make the operators of `OPERATORS` available in `torch.ops.gpt_eagle`. Safe to call from several threads.

    Returns: why they are not, which is also said once, or the empty string.
    """
    with _one_at_a_time:
        return _load()


@functools.cache
def _load() -> str:
    try:
        _libraries.append(register("gpt_eagle", build()))
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        note = "PyTorch's own operators serve, which are slow on trees and in int8 and int4"
        print(f"note: {note} ({reason})", file=sys.stderr)
        return reason
    return ""


_one_at_a_time = threading.Lock()
_libraries: list[torch.library.Library] = []  # a definition ends with its object
