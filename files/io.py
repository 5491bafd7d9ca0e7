"""Files, read as text or JSON, and written completely or not at all; and notes to a person.

A file that cannot be read or written is reported as one ValueError on one line with its name.
This module imports no torch, so that a mistake on the command line is reported before torch is
imported.
Not here: files that libraries read (files/untrusted.py), the keys that a JSON file may have
(files/fields.py), tensors by name (files/checkpoint.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from options import PREFIX, ROOT, cache_folder, one_line, require

LFS_BEGIN = b"version https://git-lfs.github.com/spec/"
TEMPORARY = ".gpt-eagle-tmp"  # suffix of a file's name while it is written
# of a model on a hub, and of one of its GGUF files
HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(:(?P<kind>\w[\w.-]*))?", re.ASCII)
PREFIXES = ("hf:", "ollama:")  # of names
ADAPTER = "is an adapter (LoRA) and no model; merge it into its model, and name the result"


CHECKPOINTS = ROOT / "checkpoints"  # that come with this code


class LocalError(ValueError):
    """An error whose message names a file or an option, for a person at this machine."""

    def __init__(self, message: str, plain: str):
        """plain: the message for clients of a server, who have neither"""
        super().__init__(message)
        self.plain = plain


def has_colours() -> bool:
    """Return whether standard output shows colours. Source: no-color.org."""
    return is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")


def is_terminal(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


# ---------------------------------------------------------------------- text and JSON


def read_text(path: Path) -> str:
    """Read a file's text. Raises: ValueError if it cannot be read, is not UTF-8, or never ends."""
    try:
        mode = path.stat().st_mode
        is_character_device = stat.S_ISCHR(mode) and not os.path.samefile(path, "/dev/stdin")
        if stat.S_ISBLK(mode) or is_character_device:
            raise ValueError(f"{path} is a device; name a file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name another file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from None


def read_named(path: Path, flag: str) -> str:
    """Read a file's text, as `read_text`. flag: names the file in the message."""
    try:
        return read_text(path)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def parse_json(text: str, where: Any) -> Any:
    """Parse any JSON value.

    Raises: ValueError for a text that is not JSON, is nested too deeply or has too long a number.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {one_line(error, 200)}; correct it") from None


def read_json(path: Path) -> dict:
    """Read one JSON object. Raises: ValueError with the path when it is missing or broken."""
    check_directory(path.parent)
    if (path.parent / "adapter_config.json").is_file():  # a merged model may have kept it
        weights = [*path.parent.glob("model*"), *path.parent.glob("pytorch_model*")]
        require(weights, f"{path.parent} {ADAPTER}")
    if not path.is_file():
        remedy = "a Hugging Face model directory is expected"
        models = gguf_files(path.parent)
        if models:
            remedy = f"name one of its GGUF files: {', '.join(file.name for file in models)}"
        raise ValueError(f"{path.parent} has no {path.name}; {remedy}")
    text = read_text(path)
    if lfs_fault(path):
        raise ValueError(f"{path}: {lfs_fault(path)}")
    value = parse_json(text, path)
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} must hold a JSON object, not a {type(value).__name__}; correct it"
        )
    return value


def read_jsonl(path: Path, flag: str, check: Callable[[dict], str] = lambda row: "") -> list[dict]:
    """Read one JSON object a line, or a JSON array of objects.

    flag: names the file in the message
    check: returns the fault of an object; "" when it has none
    Raises: ValueError that names the file and the line.
    """
    return parse_jsonl(read_named(path, flag), f"{flag}: {path}", check)


def parse_jsonl(
    text: str, source: str, check: Callable[[dict], str] = lambda row: ""
) -> list[dict]:
    """Parse what `read_jsonl` reads. source: names the file in a message"""
    text = text.removeprefix("\ufeff")  # as editors on Windows write it
    lines = text.split("\n")
    if text.lstrip().startswith("["):
        lines = [text]
    objects: list[dict] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{source} line {number}"
            values = parse_json(line, where)
            if not isinstance(values, list):
                values = [values]
            for each in values:
                is_object = isinstance(each, dict)
                fault = check(each) if is_object else "it must be a JSON object; correct it"
                if fault:
                    raise ValueError(f"{where}: {fault}")
            objects += values
    if not objects:
        raise ValueError(f"{source} must hold one JSON object a line; correct it")
    return objects


# ---------------------------------------------------------------------- paths


def is_model_name(text: str) -> bool:
    """Return whether a checkpoint is named, as hf:OWNER/NAME or ollama:NAME, and is no path.

    OWNER/NAME alone is a name where there is no folder OWNER here.
    """
    if text.startswith(PREFIXES):
        return True
    is_path = text.lower().endswith(".gguf") or Path(text.partition("/")[0]).exists()
    return not is_path and HUB_NAME.fullmatch(text) is not None


def is_gguf(path: Path) -> bool:
    """Return whether a checkpoint is a GGUF file (files/gguf.py), and not a model directory.

    ollama's files have no suffix.
    """
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    if not path.is_file():  # a queue would be read empty
        return False
    try:
        with path.open("rb") as content:
            return content.read(4) == b"GGUF"
    except OSError:
        return False


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder, without the parts of models that read pictures."""
    files = sorted(folder.glob("*.[gG][gG][uU][fF]"))
    return [file for file in files if file.is_file() and not file.name.startswith("mmproj")]


def model_file(path: Path) -> Path:
    """Return the one GGUF file of a folder without other weights; else the path as it is."""
    files = gguf_files(path)
    others = (file for ending in ("safetensors", "bin", "pt") for file in path.glob(f"*.{ending}"))
    return files[0] if len(files) == 1 and not any(others) else path


def lfs_fault(file: Path) -> str:
    """Return the fault and remedy of a Git LFS pointer, which stands for a file; "" for others."""
    try:
        with file.open("rb") as content:
            if content.read(len(LFS_BEGIN)) != LFS_BEGIN:
                return ""
    except OSError:
        return ""
    return "it is a Git LFS pointer and not the file itself; run git lfs pull in its folder"


def check_directory(path: Path) -> None:
    """Check that a model directory exists. Raises: ValueError when it does not, or is a file."""
    if path.is_file():
        remedy = "name the Hugging Face directory that it comes from, unconverted, or a GGUF file"
        raise ValueError(f"{path} is a file; {remedy}")
    if not path.is_dir():
        raise ValueError(
            f"no such directory: {path}; a model of a hub is named hf:OWNER/NAME, one of ollama "
            "ollama:NAME"
        )


def check_output(path: Path, flag: str) -> None:
    """Check that a file can be written, before anything is computed for it.

    flag: names the file in the message
    Raises: ValueError for a name that is too long, a missing folder, or a directory.
    """
    try:
        if path.name:
            path.with_name(path.name + TEMPORARY).exists()  # the longest name that is written
    except OSError as error:
        raise ValueError(
            f"{flag}: cannot write {path}: {error.strerror}; name another file"
        ) from None
    if not path.parent.is_dir():
        raise ValueError(f"{flag}: cannot write {path}; there is no directory {path.parent}")
    if path.is_dir():
        raise ValueError(f"{flag}: {path} is a directory; name a file")
    is_queue = path.exists() and not path.is_file()  # it is written into, and not replaced
    if not os.access(path if is_queue else path.parent, os.W_OK):
        raise ValueError(f"{flag}: cannot write {path}: no permission; name another file")


def check_outputs(files: dict[str, str]) -> None:
    """Check that files can be written, each by `check_output`, and that no two are the same one.

    files: by their flags; an empty name is none, and - is standard output
    Raises: ValueError.
    """
    flags: dict[str, str] = {}
    for flag, name in files.items():
        if not name:
            continue
        path = Path(name)
        check_output(path, flag)
        if name == "-" or (path.exists() and not path.is_file()):  # a pipe, or /dev/null
            continue
        other = flags.setdefault(os.path.realpath(path), flag)
        if other != flag:
            raise ValueError(f"{other} and {flag} both write {path}; name another file for one")


def check_apart(path: Path, out: Path) -> None:
    """Check that a directory to write does not hold the checkpoint. Raises: ValueError."""
    if out.resolve() in (path.resolve(), *path.resolve().parents):
        raise ValueError(f"--out holds the checkpoint itself ({out}); name another directory")


def check_out(out: Path, overwrite: bool, need_bytes: int = 0) -> None:
    """Check the directory to write.

    Raises: ValueError when `out` may not be replaced, or the disk has too little space.
    """
    if out.exists() and not overwrite:
        raise ValueError(
            f"{out} exists; give --overwrite to replace it, or choose another directory"
        )
    if out.exists() and not (out / "config.json").is_file():
        raise ValueError(
            f"--overwrite replaces model directories, and {out} is none; choose another directory"
        )
    parent = next(folder for folder in out.resolve().parents if folder.is_dir())
    free_bytes = shutil.disk_usage(parent).free
    if need_bytes > free_bytes:
        raise ValueError(
            f"{out} needs {need_bytes / 1e9:.1f} GB, and {parent} has {free_bytes / 1e9:.1f} GB "
            "free; make room"
        )


# ---------------------------------------------------------------------- writing


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write under a temporary name, then rename: a kill or a full disk keeps the old file.

    The new file has the old one's mode. A link stays, and the file that it names is replaced. A
    device or a queue is written into.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    real = Path(os.path.realpath(path))
    temporary = real.with_name(real.name + TEMPORARY)
    try:
        temporary.unlink(missing_ok=True)
        if real.exists():
            # users that may not read the old file may not read the temporary one
            mode = stat.S_IMODE(real.stat().st_mode)
            temporary.touch(mode | stat.S_IWUSR)
        write(temporary)
        if real.exists():
            shutil.copymode(real, temporary)
        else:
            set_usual_mode(temporary)
        os.replace(temporary, real)
    finally:
        temporary.unlink(missing_ok=True)


def set_usual_mode(path: Path) -> None:
    """Give a new file the mode that the umask asks for: safetensors makes it its owner's alone."""
    umask = os.umask(0o077)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_text(where: str, text: str) -> None:
    """Write a complete file, as `replace_file`, or to standard output for `-`.

    Raises: ValueError where that fails.
    """
    if where == "-":
        print(text, flush=True)
        return
    try:
        replace_file(Path(where), lambda path: path.write_text(text + "\n", encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot write {where}: {error.strerror}; name another file") from None


def bundled_head(checkpoint: Path, kind: str = "eagle") -> Path:
    """Return the place of the draft head that belongs to a checkpoint: its name with -KIND.

    It is beside the checkpoint, or among the heads that come with this code.
    """
    if checkpoint.name in ("", ".."):
        checkpoint = checkpoint.resolve()
    has_suffix = is_gguf(checkpoint) and checkpoint.suffix.lower() == ".gguf"
    name = checkpoint.stem if has_suffix else checkpoint.name
    beside = checkpoint.with_name(f"{name}-{kind}")
    ours = CHECKPOINTS / beside.name
    return ours if ours.is_dir() and not beside.is_dir() else beside


# files/packaged.py fetches the default model: in a clone beside its head, else into the cache
FETCHED = cache_folder() / "checkpoints" if PREFIX else CHECKPOINTS
DEFAULT = str(FETCHED / "SmolLM2-135M-Instruct.Q4_1.gguf")


def show_progress(text: str, last: bool) -> None:
    """Write progress over the line before on a terminal; elsewhere write the last line only."""
    terminal = sys.stderr.isatty()
    if terminal or last:
        begin = "\r" if terminal else ""
        print(begin + text, end="\n" if last else "", file=sys.stderr, flush=True)


class StatusLine:
    """A line of standard error that says how far a work is: on a terminal it passes.

    In a file, a line that stays is written now and then.
    """

    EVERY_S = 0.2  # a short work shows none
    EVERY_IN_FILE_S = 10.0

    def __init__(self):
        self.shown = ""
        self.at = time.perf_counter()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: Any) -> None:
        """Remove the line."""
        self.show("")

    def show(self, text: str) -> None:
        """Write a text over the one before, not too often; an empty one removes it at once."""
        now = time.perf_counter()
        passes = is_terminal(sys.stderr)
        every = self.EVERY_S if passes else self.EVERY_IN_FILE_S
        if text == self.shown or (text and now - self.at < every):
            return
        if passes:
            width = shutil.get_terminal_size().columns
            print(f"\r\033[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)
        self.shown = text
        self.at = now
