"""Our ways to decode, as texts: which ones there are, and the options that they stand for.

A method is a drafter, then after colons a tree, a way to pick children, `residual`, or any option
of generate.py. What generate.py would refuse is refused here. Of a head, a draft model or a
datastore, the methods are those of its kind.
Not here: other runtimes (contestants.py).
"""

from __future__ import annotations

import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

from files.chat import NO_TEMPLATE
from files.checkpoint import WeightFiles
from files.fetch import fetched
from files.head_kinds import gguf_head_kind, head_kind, own_head
from files.io import is_gguf
from files.mtp import find_mtp
from options import log_note
from run.methods import MTP, head_kinds, known_drafters
from run.options import GenerateConfig
from run.parsing import SWITCHES, by_names, read_settings
from scripts.bench.cases import SpeedOptions

CHAIN = "chain:tree_depth=3"  # of every trained drafter: the same levels
OF_MODEL = f"model:{CHAIN}"
OF_FILES = ("model", "eagle+ngram", "rest")  # beside the kinds of heads


class Setting(NamedTuple):
    """Options that all compared methods share."""

    quant: str
    temperature: float
    batch_size: int


def methods_of(config: SpeedOptions, setting: Setting) -> list[str]:
    """Return the methods of a setting; `all` are those whose files are at hand.

    A file or directory in a folder of `--heads` that no method can use is named and left out.
    Raises: ValueError for another one, and where all of them are left out.
    """
    if config.methods != "all":
        return config.methods.split(",")
    of_files = (*head_kinds(), *OF_FILES)
    methods = [name for name in known_drafters() if name not in of_files]
    if not (config.heads or config.head):
        for kind in head_kinds():
            if has_head(config.checkpoint, kind):
                methods += of_kind(kind)
    named = ",".join(filter(None, (config.head, config.heads)))
    for path in map(fetched_head, filter(None, named.split(","))):
        methods += methods_in(path, setting)
    return methods


def fetched_head(name: str) -> Path:
    """Return the files of a head by its name or path."""
    return fetched(name, is_head=True)


def methods_in(path: Path, setting: Setting) -> list[str]:
    """Return the methods of a head, a draft model or a datastore, or of those in a folder.

    Raises: ValueError for what is none of these, and for a folder that has none of them.
    """
    if not path.is_dir() or any(path.glob("*.json")):
        return methods_of_file(path, setting)
    methods = []
    for each in sorted(path.iterdir()):
        try:
            methods += methods_of_file(each, setting)
        except (ValueError, OSError) as error:
            note_once(f"left out of --methods all: {error}")
    if not methods:
        raise ValueError(f"--heads {path} has no head, draft model or datastore to measure")
    return methods


def of_kind(kind: str, option: str = "") -> list[str]:
    """Return the methods of a kind of head: its trees, and EAGLE's with lookups.

    option: a further piece of each, which names the head
    """
    trees = [CHAIN if tree == "chain" else tree for tree in known_drafters()[kind].trees]
    methods = [f"{kind}:{tree}" for tree in trees]
    if kind == "eagle":
        methods.append("eagle+ngram")
    return [f"{method}:{option}" if option else method for method in methods]


def has_head(checkpoint: str, kind: str) -> bool:
    """Return whether a head of a kind is beside a checkpoint, or an MTP layer in it.

    Raises: ValueError for a checkpoint that cannot be read.
    """
    path = fetched(checkpoint)
    if kind == MTP:
        return find_mtp(path) is not None
    return bool(own_head(path, kind))


@cache
def note_once(text: str) -> None:
    """Log a note, the first time only: the methods are listed for every setting."""
    log_note(text)


def methods_of_file(path: Path, setting: Setting) -> list[str]:
    """Return the methods of a head, a draft model or a datastore: a model also by the papers' rule.

    Raises: ValueError, OSError for what is none of these.
    """
    if path.is_file() and not is_gguf(path):
        return [f"rest:datastore={path}"]
    if is_gguf(path):
        kind = gguf_head_kind(path) or "model"
    else:
        kind = head_kind(path)
        # no model is whole without an embedding, and no head brings one under this name
        if kind == "eagle" and "model.embed_tokens.weight" in WeightFiles(path).readers:
            kind = "model"
    if kind == "model":
        rules = ("", ":residual") if setting.temperature else ("",)
        return [f"{OF_MODEL}{rule}:draft_checkpoint={path}" for rule in rules]
    return of_kind(kind, head_option(path))


def head_option(path: Path) -> str:
    """Return the piece of a method that names a head.

    Raises: ValueError for a name that a method cannot hold.
    """
    if set(":,") & set(str(path)):
        raise ValueError(f"the head {path}: a method is divided by : and ,; give it another name")
    return f"head={path}"


def method_config(method: str, setting: Setting, config: SpeedOptions) -> GenerateConfig:
    """Return the options of a method.

    Raises: ValueError for an option that is not there, and a combination that cannot work.
    """
    draft, *pieces = method.split(":")
    values = {
        "checkpoint": config.checkpoint,
        "device": config.device,
        "dtype": config.dtype,
        "max_new_tokens": config.max_new_tokens,
        "draft": draft,
        "temperature": setting.temperature,
        "batch_size": setting.batch_size,
        "quant": setting.quant,
        "chat": NO_TEMPLATE if config.chat is None else config.chat,
        "compile": config.compile,
    }
    named = any(piece.startswith("head=") for piece in pieces)
    kind = draft.removesuffix("+ngram")
    if config.head and not named and kind == head_kind(Path(config.head)):
        values["head"] = config.head
    texts = [_setting(one) for one in config.options.split(",") if one]
    texts += [_piece(method, piece) for piece in pieces]
    values |= read_settings(GenerateConfig, texts)
    chosen = GenerateConfig(**by_names(GenerateConfig, values))
    chosen.check()
    return chosen


def command(method: str, setting: Setting, config: SpeedOptions) -> str:
    """Return the command line of generate.py that decodes by a method as the measurement did."""
    chosen = method_config(method, setting, config)
    words = ["python", "generate.py"]
    for f in fields(GenerateConfig):
        value = getattr(chosen, f.name)
        if f.name == "tree" and chosen.tree_depth:
            value = f"{value}:{chosen.tree_depth}"
        if value == f.default or not f.metadata["flag"]:  # a part of --tree
            continue
        words.append(f"--{f.name}")
        if f.type not in SWITCHES and value != "":  # a bare --chat is the model's own template
            words.append(str(value))
    return shlex.join([*words, "--prompt_file", config.tasks.split(",")[0]])


def _setting(text: str) -> str:
    """Return name=value for it, or for the name of an option that is true or false."""
    return text if "=" in text else f"{text}=true"


def _piece(method: str, piece: str) -> str:
    """Return a piece of a method as name=value, an option of GenerateConfig."""
    if "=" in piece:
        return piece
    for f in fields(GenerateConfig):
        if f.name in ("tree", "children", "accept") and piece in f.metadata["choices"]:
            return f"{f.name}={piece}"
        if f.type in SWITCHES and f.name == piece:
            return _setting(piece)
    raise ValueError(
        f"--methods: {method}: {piece} is no tree, no way to pick children and no option of "
        "generate.py; use for example eagle:dynamic:topk:tree_size=30"
    )
