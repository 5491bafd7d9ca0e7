"""The corpus of the bundled demo: the CPython standard library and worked sums.

1. Texts: the standard library without its tests, and GSM8K's training split. About 4 % of the
   Python files and 400 sums are held out, chosen by hash, so the split depends on no order.
2. Documents are `<s> text </s>`. Some top-level Python definitions start with `<s>` as well, so
   that a model also learns prompts that begin in the middle of a module.
Not here: the training of the demo itself (scripts/train/train_demo at commit f4d2069).
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

from cli.io import read_jsonl
from options import ROOT

BOS = 1
EOS = 2
SUMS = ROOT / "data" / "train" / "gsm8k_train_clean.jsonl"  # with `turns` and `answers`


def held_out(name: str, share: float) -> bool:
    """Return true for a document of the held-out part, by the hash of its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < share * 2**32


def read_python() -> dict[str, list[str]]:
    """Read the standard library without tests and tables: {"train": [...], "held_out": [...]}."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tests = {"test", "tests", "idle_test"}
    skip = tests | {"encodings", "pydoc_data", "site-packages", "__pycache__", "lib2to3"}
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if skip & set(name.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few files declare another encoding
            continue
        if text.strip():
            part = "held_out" if held_out(str(name), 0.04) else "train"
            parts[part].append(text)
    return parts


def read_sums() -> dict[str, list[str]]:
    """Read worked sums as `Question: ...\\nAnswer: ...`, split like `read_python`."""
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for row in read_jsonl(SUMS, "the sums"):
        question = row["turns"][0]
        part = "held_out" if held_out(question, 0.055) else "train"
        parts[part].append(f"Question: {question}\nAnswer: {row['answers'][0]}")
    return parts


def encode_documents(
    documents: list[str], encode: Callable[[str], list[int]], cut_share: float
) -> list[list[int]]:
    """Encode to `<s> text </s>`; a share of the top-level definitions gets a `<s>` of its own."""
    rng = random.Random(0)
    encoded = []
    for text in documents:
        pieces = re.split(r"(?m)(?=^(?:def |class |@|async def ))", text)
        chunks = [pieces[0]]
        for piece in pieces[1:]:
            if rng.random() < cut_share:
                chunks.append(piece)
            else:
                chunks[-1] += piece
        ids = [i for chunk in chunks if chunk for i in (BOS, *encode(chunk))]
        encoded.append([*ids, EOS])
    return encoded
