"""Read the header of a GGUF file: its metadata and the list of its tensors.

`read_header` maps the file into memory. Every count and length is checked against the size of the
file first, so a broken file ends in one line of error, and soon. A file in several parts, as
llama-gguf-split writes them, is named by its first part, which has the metadata.

Source: the GGUF specification (ggml/docs/gguf.md).
Trade-off: the package `gguf` has a reader too. It takes 2 s for 49,152 tokens, and does not end
where a count is absurd.
Not here: the tensors' data (files/gguf.py); big-endian files.
"""

from __future__ import annotations

import math
import mmap
import re
import reprlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from files.io import lfs_fault
from options import require

MAX_COUNT = 2**24  # entries of a list, tensors, keys, positions; a broken count is above it
MAX_SIZE = 2**20  # of a width or a number of layers
PART = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)  # the end of a file's name
FORMATS = {  # type of a scalar -> its code for `struct`
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING = 8
ARRAY = 9
IN_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
}


class Info(NamedTuple):
    """The type, shape and place of a tensor."""

    type_id: int
    shape: tuple[int, ...]  # rows first
    offset: int  # from the start of the file (bytes)
    file: mmap.mmap  # all of the part that holds it


class Metadata(dict):
    """Keys and values of a header."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def read(self, key: str, wanted: type, default: Any = ...) -> Any:
        """Return a value of the wanted type; `default` where the key is missing.

        Raises: ValueError for a missing key without a default, or another type.
        """
        value = self.get(key, default)
        if value is ...:
            raise ValueError(f"{self.path}: the metadata {key} is missing; convert the model again")
        if value is default or type(value) is wanted:
            return value
        if wanted is float and type(value) is int:
            return value
        raise ValueError(
            f"{self.path}: the metadata {key} must be {IN_WORDS[wanted]}, not {reprlib.repr(value)}"
        )

    def with_one(self, keys: Iterable[str], may_differ: bool) -> Metadata:
        """Return the metadata with one value, the first but 0, in the place of lists by layer.

        Raises: ValueError where the values differ, unless they may.
        """
        found = Metadata(self.path)
        found.update(self)
        for key in keys:
            values = self.get(key)
            if type(values) is list and any(values):
                fault = f"{self.path}: the metadata {key} differs between layers, which is not"
                same = values == values[:1] * len(values)
                require(may_differ or same, f"{fault} supported; use another file")
                found[key] = next(filter(None, values))
        return found

    def size(self, key: str, default: Any = ..., most: int = MAX_SIZE) -> Any:
        """Return a width or a count. Raises: ValueError for one that no model has."""
        value = self.read(key, int, default)
        if value is not default and not 1 <= value <= most:
            raise ValueError(f"{self.path}: the metadata {key} must be 1 to {most}; it is {value}")
        return value

    def positive(self, key: str, default: float) -> float:
        """Return a finite number above 0. Raises: ValueError for another one."""
        value = self.read(key, float, default)
        if not 0 < value < math.inf:
            raise ValueError(
                f"{self.path}: the metadata {key} must be a finite number above 0; it is {value}"
            )
        return value


class Header(NamedTuple):
    """The parts of a file before its data."""

    metadata: Metadata
    tensors: dict[str, Info]  # those of all parts


def read_header(path: Path) -> Header:
    """Read a file's metadata and the list of its tensors, with those of its other parts.

    Raises: ValueError for a file that is not whole, or that lacks a part.
    """
    first = _read_part(path)
    tensors = dict(first.tensors)
    for part in _other_parts(path, first.metadata):
        for name, info in _read_part(part).tensors.items():
            if name in tensors:
                raise ValueError(f"{part} has {name}, as another part has; download it again")
            tensors[name] = info
    return Header(first.metadata, tensors)


def _read_part(path: Path) -> Header:
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check the path") from None
    return _read_once(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)  # loading reads the weights, the tokenizer and the chat template
def _read_once(path: Path, changed: int, size: int) -> Header:
    try:
        with path.open("rb") as file:
            if not file.seek(0, 2):
                raise ValueError("it is empty")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return _read_header(path, _Cursor(mapping))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check its permissions") from None
    except (ValueError, struct.error) as error:
        reason = "it ends within its header" if isinstance(error, struct.error) else error
        raise ValueError(
            f"{path} is no GGUF file, or corrupt ({reason}); download it again"
        ) from None


def _read_header(path: Path, cursor: _Cursor) -> Header:
    magic, version = cursor.take("4sI")
    if magic != b"GGUF":
        raise ValueError(lfs_fault(path) or "it does not begin with GGUF")
    if version not in (2, 3):
        shown = version if version < 2**16 else "of a big-endian file"
        raise ValueError(f"version {shown} is not 2 or 3")
    tensor_count, key_count = cursor.take("QQ")
    metadata = Metadata(path)
    for _ in range(cursor.fits(key_count, 13)):  # a key, a type and a byte are the least
        key = cursor.string()
        value = cursor.value(*cursor.take("I"))
        metadata[_new(key, metadata)] = value
    places: dict[str, tuple] = {}  # of tensors; offsets count from the start of the data
    for _ in range(cursor.fits(tensor_count, 32)):
        name = _new(cursor.string(), places)
        (dims,) = cursor.take("I")
        if not 1 <= dims <= 4:
            raise ValueError(f"{name} has {dims} dimensions")
        shape = cursor.take(f"{dims}Q")
        type_id, offset = cursor.take("IQ")
        places[name] = (type_id, shape[::-1], offset)
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1 or align & align - 1:
        raise ValueError(f"general.alignment must be a power of two; it is {reprlib.repr(align)}")
    start = -(-cursor.at // align) * align  # of the data: rounded up
    tensors = {
        name: Info(type_id, shape, start + offset, cursor.file)
        for name, (type_id, shape, offset) in places.items()
    }
    return Header(metadata, tensors)


def _new(name: str, seen: dict) -> str:
    if name in seen:
        raise ValueError(f"it has {name} twice")
    return name


class _Cursor:
    """Reads a header from front to back."""

    def __init__(self, file: mmap.mmap):
        self.file = file
        self.at = 0

    def take(self, form: str) -> tuple:
        """Read values, as `struct` formats them. Raises: struct.error at the end of the file."""
        values = struct.unpack_from("<" + form, self.file, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def fits(self, count: int, size: int) -> int:
        """Return a count of entries of at least `size` bytes.

        Raises: ValueError when the file cannot hold them.
        """
        if count > MAX_COUNT or count * size > len(self.file) - self.at:
            raise ValueError(f"a count of {count} at byte {self.at} is more than the file holds")
        return count

    def string(self) -> str:
        length = self.fits_bytes(*self.take("Q"))
        self.at += length
        return _text(self.file[self.at - length : self.at])

    def strings(self, count: int) -> list[str]:
        """Read many strings: vocabularies and merges have 100,000."""
        texts = []
        file = self.file
        at = self.at
        size = len(file)
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = read_length(file, at)
            begin = at + 8
            at = begin + length
            if at > size:
                self.at = begin
                self.fits_bytes(length)
            texts.append(_text(file[begin:at]))
        self.at = at
        return texts

    def fits_bytes(self, length: int) -> int:
        """Return a length. Raises: ValueError when the file is shorter."""
        if length > len(self.file) - self.at:
            raise ValueError(
                f"a text of {length} bytes at byte {self.at} is more than the file holds"
            )
        return length

    def value(self, type_id: int) -> Any:
        """Read a scalar, a string, or a list of either. Raises: ValueError for another type."""
        if type_id == STRING:
            return self.string()
        if type_id in FORMATS:
            return self.take(FORMATS[type_id])[0]
        if type_id != ARRAY:
            raise ValueError(f"a value has the type {type_id} at byte {self.at}")
        type_id, count = self.take("IQ")
        if type_id == STRING:
            return self.strings(self.fits(count, 8))
        if type_id not in FORMATS:
            raise ValueError(f"a list has the type {type_id} at byte {self.at}")
        form = FORMATS[type_id]
        count = self.fits(count, struct.calcsize(form))
        return list(self.take(f"{count}{form}"))


def _text(data: bytes) -> str:
    """Return a text; bytes that are not UTF-8, as in a name of another code page, are escaped."""
    return str(data, "utf-8", "backslashreplace")


def _other_parts(path: Path, metadata: Metadata) -> list[Path]:
    """Return the later parts of a file in several parts, which lie beside the first.

    Raises: ValueError for a later part in the place of the first, and where a part is missing.
    """
    count = metadata.read("split.count", int, 0)
    if count < 2:
        return []
    stem = PART.sub("", path.name)

    def name_of(number: int) -> str:
        return f"{stem}-{number:05d}-of-{count:05d}.gguf"

    number = metadata.read("split.no", int, 0) + 1
    if number > 1:
        raise ValueError(f"{path} is part {number} of {count}; name the first one, {name_of(1)}")
    parts = []
    for number in range(2, count + 1):
        part = path.with_name(name_of(number))
        if not part.is_file():
            fault = f"is part 1 of {count}, and {part.name} is not beside it"
            raise ValueError(f"{path} {fault}; download every part")
        parts.append(part)
    return parts


def chat_template_text(path: Path, name: str = "") -> str | None:
    """Return the chat template of a file, in Jinja; None where it has none.

    name: of a further one; "": the one that has no name
    """
    key = f"tokenizer.chat_template{'.' * bool(name)}{name}"
    return read_header(path).metadata.read(key, str, None)
