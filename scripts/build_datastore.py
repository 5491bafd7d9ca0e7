"""Build a datastore of texts, from which --draft rest drafts.

    python scripts/build_datastore.py texts --checkpoint DIR --out texts.store
    python generate.py --checkpoint DIR --draft rest --datastore texts.store

1. Every file of the folder and of those below it that is a text in UTF-8 is tokenized; others are
   counted and left out. -1 stands behind each text.
2. All places are sorted by the tokens up to there, the latest first: a suffix array.
3. The file is written under a temporary name and renamed, by one process at a time.

A token takes 8 bytes in the file, and some 48 bytes of memory while it is built: 10 million tokens
half a gigabyte. The model must be the one that decodes, or one with the same tokenizer.
Source: REST (arXiv 2311.08252). Not here: the file and the search (drafts/rest_draft.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.io import check_output, replace_file, show_progress
from files.lock import folder_lock
from options import log_note, require
from run.options import DEFAULT
from run.parsing import one_line_errors, option, parse


@dataclass
class BuildConfig:
    """Options."""

    folder: str = option("", "folder of text files", positional=True)
    out: str = option("", "file to write")
    checkpoint: str = option(DEFAULT, "the target, for its tokenizer")


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(BuildConfig, "build_datastore.py", __doc__) if __name__ == "__main__" else None

import numpy as np
from safetensors import SafetensorError

from drafts.rest_draft import Datastore, vocabulary_of
from files.config import read_config
from files.fetch import fetched
from files.tokenizer import load_tokenizer

BYTES = 48  # of memory per token, while the suffix array is made


def read_texts(folder: Path) -> Iterator[str]:
    """Read the texts of a folder, file by file. Raises: ValueError where there are none."""
    count = skipped = 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            text = file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            text = "\0"
        if "\0" in text or not text.strip():
            skipped += 1
            continue
        count += 1
        yield text
    require(count, f"{folder} has no text in UTF-8 ({skipped} other files); name another folder")
    if skipped:
        log_note(f"{skipped} files are empty or no text in UTF-8")


def tokens_of(folder: Path, tokenizer, memory: int) -> np.ndarray:
    """Tokenize the texts of a folder, [n] int32, -1 behind each.

    memory: bytes that may be used
    Raises: ValueError for a folder without text, and for one with more than memory holds.
    """
    parts = []
    count = 0
    for number, text in enumerate(read_texts(folder), 1):
        parts.append(np.array([*tokenizer.encode(text, bos=False), -1], np.int32))
        count += len(parts[-1])
        show_progress(f"{number} texts, {count:,} tokens", last=False)
        fault = f"{folder} has more than the {memory // BYTES:,} tokens that memory can sort"
        require(count * BYTES <= memory, f"{fault}; name a smaller folder")
    show_progress(f"{len(parts)} texts, {count:,} tokens", last=True)
    return np.concatenate(parts)


def available_memory() -> int:
    """Return the bytes of memory that are free or hold caches; where unknown, half of all."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def build(config: BuildConfig) -> int:
    """Build a datastore. Returns: its tokens. Raises: ValueError. Writes: `config.out`."""
    require(config.folder, "name a folder of text files")
    require(config.out, "--out is missing; name the file to write")
    folder = Path(config.folder)
    require(folder.is_dir(), f"{folder} is no directory; name a folder of text files")
    out = Path(config.out)
    check_output(out, "--out")
    checkpoint = fetched(config.checkpoint)
    tokenizer = load_tokenizer(checkpoint, True, True)
    size = read_config(checkpoint).vocab_size
    tokens = tokens_of(folder, tokenizer, available_memory())
    vocabulary = vocabulary_of(tokenizer, size)
    try:
        with folder_lock(out.parent):
            replace_file(out, lambda path: Datastore.write(path, tokens, vocabulary))
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--out: cannot write {out} ({error}); free some space or name another file"
        ) from None
    return len(tokens)


def main() -> None:
    """Run the command line."""
    config = COMMAND or parse(BuildConfig, "build_datastore.py", __doc__)
    with one_line_errors("build_datastore.py"):
        count = build(config)
    print(f"wrote {config.out}: {count:,} tokens")


if __name__ == "__main__":
    main()
