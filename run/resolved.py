"""Fill in what the options leave open: the draft, its format, its tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from draft_tree import DynamicTree
from drafters import Drafter, TreeDrafter
from files.checkpoint import saved_quantization
from files.config import open_source, read_raw
from files.head_kinds import MTP, head_kind, own_head
from files.io import bundled_head, is_gguf
from files.machine import has_cpu_operators
from files.weights import keeps_blocks
from quantize import BLOCKS
from run.methods import head_kinds
from run.options import GenerateConfig, check_needs


def tree_options(drafter: Drafter) -> dict[str, Any]:
    """Return the options of a drafter that grows trees, by name; {} for another."""
    if not isinstance(drafter, TreeDrafter):
        return {}
    tree = drafter.tree
    if isinstance(tree, DynamicTree):
        options = {"tree": "dynamic", "tree_topk": tree.topk, "tree_size": tree.size}
    else:
        options = {"tree": "chain" if tree.width == 1 else "static", "tree_paths": tree.paths}
    if drafter.vocab.ids is not None:
        options["draft_vocab"] = drafter.vocab.drafted
    if drafter.graft:
        options.update(drafter.graft.resolved_options())
    options["tree_depth"] = tree.depth
    options["children"] = drafter.children
    options["sharpness"] = drafter.sharpness
    return options


def resolve_draft(
    config: GenerateConfig, path: Path, dtype: str = "", without_head: str = "none"
) -> GenerateConfig:
    """Fill in the draft (a head next to the target is the default), its format, and `dtype`.

    config: `dtype` as the user gave it, `quant` as the target was loaded
    dtype: of the target as it was loaded; default: as `config` has it
    without_head: the draft where none is asked for, and there is no head
    """
    head = _head_of(config, path)
    draft = config.draft
    if not draft:
        draft = head_kind(Path(head)) if head else without_head
        if not head:
            check_needs(replace(config, draft=draft))
    if draft == MTP and not head:
        head = str(path)  # which holds it
    config = replace(config, draft=draft, head=head)
    draft_path = Path(head or config.draft_checkpoint)
    resolved = replace(config, dtype=dtype or config.dtype, quant_draft="none")
    if not (head or config.draft_checkpoint):
        return resolved
    asked = replace(resolved, quant_draft=config.quant_draft)
    in_blocks = keeps_blocks(config, draft_path) and open_source(draft_path).block_types != ""
    if head and config.device.startswith("cuda"):
        in_blocks = False  # a head is rounded as one of a directory
    form = _draft_format(asked, draft_path, in_blocks)
    return replace(resolved, quant_draft=BLOCKS if form == "none" and in_blocks else form)


def _head_of(config: GenerateConfig, path: Path) -> str:
    """Return the files of the head that drafts: as given, or the checkpoint's own; "": none.

    Raises: ValueError for a kind of draft whose head is missing, or of another kind.
    """
    kind = config.draft.removesuffix("+ngram") or "eagle"
    if kind not in head_kinds():
        return ""
    head = config.head or own_head(path, config.draft and kind)
    if not config.draft or (kind == MTP and not head):
        return head
    if not head:
        raise ValueError(
            f"--draft {config.draft} needs a head; name its directory with --head "
            f"(there is no {bundled_head(path, kind)})"
        )
    own_kind = head_kind(Path(head))
    if own_kind != kind:
        raise ValueError(
            f"--draft {config.draft} needs a head of its own kind, and {head} holds one of the "
            f"kind {own_kind}; name another --head, or drop --draft"
        )
    return head


def _draft_format(config: GenerateConfig, path: Path, in_blocks: bool) -> str:
    """Return the draft's number format: of its files, or of `quant_draft`, or the target's.

    in_blocks: its file is a GGUF file whose blocks can stay
    """
    raw = read_raw(path)
    saved = saved_quantization(raw, path)
    asked = config.quant_draft
    if saved is not None:
        if asked not in ("", saved.format) and not config.draft.startswith("eagle"):
            raise ValueError(f"{path} is quantized already ({saved.format}); drop quant_draft")
        return asked or saved.format
    if asked:
        return asked
    if config.head and in_blocks:
        return "none"
    if config.quant not in ("none", BLOCKS):
        return config.quant
    # a draft model in a GGUF file keeps the file's bits; on CUDA none was measured in int4
    small = config.head or not (is_gguf(path) or config.device.startswith("cuda"))
    return _small_format(config, raw) if small else "none"


def _small_format(config: GenerateConfig, raw: dict) -> str:
    """Return the format of a head or draft model whose target is not quantized.

    The draft's format changes no output, and reading the draft is most of its time.
    """
    if "float32" in str(config.dtype or raw.get("torch_dtype") or raw.get("dtype")):
        return "none"
    if not config.device.startswith("cuda"):
        if has_cpu_operators():
            return "int8"
        return "none"  # int8 is slow in Python
    layer = raw.get("transformer_layer_config")  # speculators' layout of a head
    if not isinstance(layer, dict):
        layer = raw
    sizes = [layer.get(name) for name in ("hidden_size", "intermediate_size")]
    if all(isinstance(size, int) and size % 32 == 0 for size in sizes):
        return "int4"
    return "none"
