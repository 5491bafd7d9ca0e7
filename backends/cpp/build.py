"""The build and the loading of the C++ operators of this folder.

`load_operators` compiles them for this processor at the first use (20 s), keeps the library in the
user's cache under a name made of everything that it depends on, and loads it. If that fails, it
prints the reason; PyTorch's operators and the references serve then. Code from the cache is
executed, so only the user may write to it. A library ends with its own SHA-256; a damaged one is
built again.

`GPT_EAGLE_MARCH` in the environment replaces `-march=native`, so that the builds of other
processors can be tested on this one: `x86-64-v3` has AVX2, `x86-64` neither that nor AVX-512. AMX
tiles are in every library; `choose_tiles` decides whether they are used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from options import cache_folder, load_part, log_note, part_or, private_folder

HERE = Path(__file__).parent
# files that are compiled together, the two groups side by side: about half of the work each. More
# groups would take longer, as PyTorch's headers take 5 s, as long as most of the files
UNITS = (
    ("matmul.cpp",),
    (
        "attention.cpp",
        "blocks.cpp",
        "compact.cpp",
        "delta.cpp",
        "layers.cpp",
        "ngram.cpp",
        "operators.cpp",
        "rotary.cpp",
        "sampling.cpp",
        "threads.cpp",
        "topk.cpp",
        "tree.cpp",
    ),
)
PAYS = 1.03  # a smaller gain of fetching is noise
WAITING = "waiting for another process, which builds the CPU operators (20 s)"


@contextmanager
def _no_lock(folder: Path, note: str = "") -> Iterator[bool]:
    yield False


# without the folder files/ two processes may build the same library, which does no harm


def compiler() -> list[str]:
    """Find the C++ compiler, and the arguments that CXX has behind it.

    Raises: RuntimeError when there is none.
    """
    requested = os.environ.get("CXX")
    for name in (requested,) if requested else ("g++", "clang++", "c++"):
        program, *arguments = shlex.split(name) or [""]
        path = shutil.which(program)
        if path:
            return [path, *arguments]
    if requested:
        raise RuntimeError(f"no C++ compiler: CXX is {requested}")
    raise RuntimeError("no C++ compiler; install g++ or set CXX")


def commands(march: str) -> tuple[list[str], list[str]]:
    """Return the command that compiles a file, and the arguments that link a library.

    Raises: RuntimeError where there is no compiler.
    """
    include = Path(torch.__file__).parent / "include"
    command = [
        *compiler(),
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
    parts = [torch.__version__, target, *sources.values(), str(UNITS), *command, *link]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder()
    library = folder / f"{march}-{key}.so"
    try:
        check_own(private_folder())
        if is_whole(library):
            return library
        with (
            part_or("folder", "lock", _no_lock)(folder, WAITING) as locked,
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
    log_note("building the CPU operators, once (20 s)", logging.INFO)
    if not _knows_tiles(command, made.parent):
        command = [*command, "-DNO_TILES"]
    commands, objects = [], []
    for number, names in enumerate(UNITS):
        unit = made.parent / f"unit{number}.cpp"
        unit.write_text("".join(f'#include "{name}"\n' for name in names))
        objects.append(str(unit.with_suffix(".o")))
        commands.append([*command, "-c", str(unit), "-o", objects[-1]])
    _run(*commands)
    _run([*compiler(), *objects, *link, "-o", str(made)])
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
    """Return whether the library exists, is the user's alone and ends with its own SHA-256.

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


def register(namespace: str, library: Path) -> None:
    """Load the library, and define its operators in `torch.ops.<namespace>` (operators.h)."""
    ctypes.CDLL(str(library)).add_operators(namespace.encode())


def kind_of_tiles() -> str:
    """Return the unit of matmuls on AMX tiles that is asked for.

    auto: hardware, where it is allowed and right; none, hardware, emulation: that one.
    Raises: ValueError for another name.
    """
    kinds = ("auto", "none", "hardware", "emulation")
    kind = os.environ.get("GPT_EAGLE_TILES") or kinds[0]
    if kind not in kinds:
        rule = f"GPT_EAGLE_TILES must be {' or '.join(kinds)}"
        raise ValueError(f"{rule}; it is {kind!r}: correct or unset it")
    return kind


def choose_tiles() -> None:
    """Choose the unit of matmuls on AMX tiles. Writes: the unit of the operators, a note.

    GPT_EAGLE_TILES names it; by default it is the hardware, where that is allowed and right.
    """
    kind = kind_of_tiles()
    operators = torch.ops.gpt_eagle
    if kind != "auto":
        if not operators.use_tiles(kind):
            note = "AMX tiles are missing or refused here, so other kernels run: unset it"
            log_note(f"GPT_EAGLE_TILES={kind}: {note}")
    elif operators.use_tiles("hardware"):
        fault = load_part("machine", "fault_of_tiles")()
        if fault:
            operators.use_tiles("none")
            note = f"{fault}, so other kernels run; GPT_EAGLE_TILES=none omits the check"
            log_note(f"AMX tiles: {note}")


def choose_fetching(kept: Path) -> None:
    """Let instructions fetch the weights of few rows where that pays, which is measured once.

    kept: the file of the measured gain; a missing or damaged one is written
    """
    try:
        gain = float(kept.read_text())
    except (OSError, ValueError):
        gain = load_part("machine", "gain_of_fetching")()
        # where it cannot be kept, the next start measures again
        with (
            suppress(OSError),
            tempfile.TemporaryDirectory(prefix="build.", dir=kept.parent) as folder,
        ):
            made = Path(folder) / kept.name
            made.write_text(f"{gain:.3f}\n")
            os.replace(made, kept)
    torch.ops.gpt_eagle.fetch_for_few(gain >= PAYS)


@functools.cache
def load_operators() -> str:
    """Make the operators available in `torch.ops.gpt_eagle`.

    Several threads may call this.
    Returns: the reason for a failure, which is also printed once, or the empty string.
    """
    with _one_at_a_time:
        return _load()


@functools.cache
def _load() -> str:
    try:
        library = build()
        register("gpt_eagle", library)
        _loaded.append(library.name)
        choose_tiles()
        choose_fetching(library.with_suffix(".fetching"))
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        note = "no C++ operators: PyTorch's run, which are slow on trees and in int8 and int4"
        log_note(f"{note} ({reason})")
        return reason
    return ""


def loaded() -> str:
    """Return the library's name, made of all that its code depends on; empty if none is loaded."""
    return "".join(_loaded)


_one_at_a_time = threading.Lock()
_loaded: list[str] = []  # the library's name, once it is loaded
