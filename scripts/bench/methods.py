"""Our ways to decode, as texts: which ones there are, and the options that they stand for.

A method is a drafter, or `auto` for that of a command without --draft, then after colons a tree, a
way to pick children, `residual`, or any option of generate.py. What generate.py would refuse is
refused here. Of a head, a draft model or a datastore, the methods are those of its kind.
Not here: other runtimes (contestants.py).
"""

from __future__ import annotations

import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

from files.checkpoint import WeightFiles
from files.fetch import fetched
from files.head_kinds import gguf_head_kind, head_kind, own_head
from files.io import is_gguf
from files.mtp import find_mtp
from files.texts import NO_TEMPLATE
from options import log_note, require
from run.methods import MTP, head_kinds, known_drafters
from run.options import GenerateConfig
from run.parsing import SWITCHES, by_names, read_settings
from scripts.bench.cases import SpeedOptions

CHAIN = "chain:tree_depth=3"  # of every trained drafter: the same levels
OF_MODEL = f"model:{CHAIN}"
OF_FILES = ("model", "eagle+ngram", "rest")  # beside the kinds of heads
DEFAULT_DRAFT = "auto"  # the method of a command without --draft


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
    named = [name for name in (config.head, *config.heads.split(",")) if name]
    for name in named:
        methods += methods_in(fetched(name, is_head=True), setting.temperature > 0)
    if named:
        return methods
    path = fetched(config.checkpoint)
    for kind in head_kinds():
        if find_mtp(path) if kind == MTP else own_head(path, kind):  # an MTP layer is in it
            methods += of_kind(kind)
    return methods


@cache  # the methods are listed for every setting, and notes are told once
def methods_in(path: Path, sampled: bool) -> tuple[str, ...]:
    """Return the methods of a head, a draft model or a datastore, or of those in a folder.

    Raises: ValueError for what is none of these, and for a folder that has none of them.
    """
    if not path.is_dir() or any(path.glob("*.json")):
        return methods_of_file(path, sampled)
    methods: list[str] = []
    for each in sorted(path.iterdir()):
        try:
            methods += methods_of_file(each, sampled)
        except (ValueError, OSError) as error:
            log_note(f"left out of --methods all: {error}")
    fault = f"--heads {path} has no head, draft model or datastore to measure"
    require(bool(methods), fault)
    return tuple(methods)


def of_kind(kind: str, option: str = "") -> list[str]:
    """Return the methods of a kind of head: its trees, and EAGLE's with lookups.

    option: a further piece of each, which names the head
    """
    trees = [CHAIN if tree == "chain" else tree for tree in known_drafters()[kind].trees]
    methods = [f"{kind}:{tree}" for tree in trees]
    if kind == "eagle":
        methods.append("eagle+ngram")
    return [f"{method}:{option}" if option else method for method in methods]


def methods_of_file(path: Path, sampled: bool) -> tuple[str, ...]:
    """Return the methods of a head, a draft model or a datastore.

    sampled: a model decodes by the papers' rule, too
    Raises: ValueError, OSError for what is none of these, and for a name that no method can hold.
    """
    if path.is_file() and not is_gguf(path):
        return (f"rest:datastore={path}",)
    if is_gguf(path):
        kind = gguf_head_kind(path) or "model"
    else:
        kind = head_kind(path)
        # no model is whole without an embedding, and no head brings one under this name
        if kind == "eagle" and "model.embed_tokens.weight" in WeightFiles(path).readers:
            kind = "model"
    fault = f"the head {path}: a method is divided by : and ,; give it another name"
    require(not set(":,") & set(str(path)), fault)
    if kind != "model":
        return tuple(of_kind(kind, f"head={path}"))
    rules = ("", ":residual") if sampled else ("",)
    return tuple(f"{OF_MODEL}{rule}:draft_checkpoint={path}" for rule in rules)


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
        "draft": "" if draft == DEFAULT_DRAFT else draft,
        "temperature": setting.temperature,
        "batch_size": setting.batch_size,
        "quant": setting.quant,
        "chat": NO_TEMPLATE if config.chat is None else config.chat,
        "compile": config.compile,
    }
    named = any(piece.startswith("head=") for piece in pieces)
    kind = draft.removesuffix("+ngram")
    if config.head and not named and kind in (DEFAULT_DRAFT, head_kind(Path(config.head))):
        values["head"] = config.head
    texts = [one if "=" in one else f"{one}=true" for one in config.options.split(",") if one]
    texts += [piece if "=" in piece else named_piece(method, piece) for piece in pieces]
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


def named_piece(method: str, piece: str) -> str:
    """Return a piece of a method as name=value, an option of GenerateConfig. Raises: ValueError."""
    for f in fields(GenerateConfig):
        if f.name in ("tree", "children", "accept") and piece in f.metadata["choices"]:
            return f"{f.name}={piece}"
        if f.type in SWITCHES and f.name == piece:
            return f"{piece}=true"
    raise ValueError(
        f"--methods: {method}: {piece} is no tree, no way to pick children and no option of "
        "generate.py; use for example eagle:dynamic:topk:tree_size=30"
    )
