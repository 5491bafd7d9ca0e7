"""The published layouts of draft heads, and the kind of a head by its files.

A row of `LAYOUTS` says how its files are told from others, and how their tensors are named in the
layout that is read (`official`): Medusa's, Hydra's, z-lab's of block drafters, SafeAILab's of
EAGLE. Kinds are values of `--draft` (run/options.py). Files with the marks of several kinds are
refused. No torch is imported.
Not here: reading the heads (files/heads.py, drafts/token_draft.py), the keys of their config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from files.io import bundled_head, is_gguf, read_json
from options import load_part


class Layout(NamedTuple):
    """The layouts of one family of heads, which are read in the same way."""

    title: str
    kind: str
    keys: tuple[str, ...] = ()  # of config.json, which no other kind has
    model_type: str = ""  # the value of that key of config.json
    files: str = ""  # beginning of the names of its weights
    architecture: str = ""  # of llama.cpp's files
    tensors: str = ""  # begins the name of one tensor at least; "": they are not read (a pattern)
    renames: tuple[tuple[str, str], ...] = ()  # patterns in tensors' names -> the official ones

    def official(self, name: str) -> str:
        """Return the official name of a tensor."""
        for theirs, ours in self.renames:
            name = re.sub(theirs, ours, name)
        return name


EAGLE3 = Layout(  # midlayer: SafeAILab's and SpecForge's; model.: NeMo's; layers.0: all others'
    "EAGLE-3 and P-EAGLE",
    "eagle",
    architecture="eagle3",
    tensors=r"midlayer\.|(.*\.)?layers\.0\.hidden_norm\.weight",
    renames=((r"^model\.", ""), (r"^layers\.0\.", "midlayer.")),
)
EAGLE1 = Layout("EAGLE-1 and 2", "eagle", tensors=r"fc\.weight")
EAGLE1_SPECULATORS = Layout(
    "EAGLE-1 of speculators",
    "eagle",
    tensors=r"fusion_fc\.weight",
    renames=((r"^fusion_fc\.", "fc."), (r"^transformer\.", "layers.0.")),
)
BLOCK = Layout(
    "DFlash, DFlash2, JetSpec, DSpark, DSpine and LiLiCorr",
    "block",
    keys=("dflash_config", "block_size"),
    architecture="dflash",
    tensors=r"hidden_norm\.weight",
    # codebooks are embeddings, as in z-lab's class; DSpine's injections are of a layer, or of all
    renames=(
        (r"(_codebook|^transfer_codes)$", r"\1.weight"),
        (r"^injection\.(\w+)\.(\d+)\.", r"layers.\2.injection.\1."),
    ),
)
LAYOUTS = (
    Layout("Medusa", "medusa", ("medusa_num_heads", "medusa_num_layers"), files="medusa_lm_head."),
    Layout(
        "Hydra",
        "hydra",
        ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch"),
        files="hydra_lm_head.",
    ),
    Layout("assistants of Gemma 4", "assistant", model_type="gemma4_assistant"),
    BLOCK,
    EAGLE3,
    EAGLE1,
    EAGLE1_SPECULATORS,
)
ARCHITECTURES = {layout.architecture: layout.kind for layout in LAYOUTS if layout.architecture}
AUX = "aux_hidden_state_layer_ids"  # a key: the layers of the target whose inputs fc takes
MTP = "mtp"  # the kind of a head that is a layer of the checkpoint
FIRST_NORM = "blk.0.attn_norm.weight"  # of a model; llama.cpp's files of an MTP layer alone lack it
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of an EAGLE head, or of a block drafter


def gguf_head_kind(path: Path) -> str:
    """Return the kind of the head in a GGUF file; "" where it holds a model."""
    header = load_part("reader", "gguf header")(path)
    architecture = str(header.metadata.get("general.architecture"))
    layers = header.metadata.get(f"{architecture}.nextn_predict_layers")
    if layers and FIRST_NORM not in header.tensors:
        return MTP
    return ARCHITECTURES.get(architecture, "")


def head_kind(path: Path) -> str:
    """Return the kind of the head in a directory or a GGUF file, a value of `--draft`.

    Raises: ValueError for a missing or broken config.json, for files of several kinds, and for a
    GGUF file that holds a model.
    """
    if is_gguf(path):
        kind = gguf_head_kind(path)
        if not kind:
            raise ValueError(
                f"{path} holds a model, and no head; use --draft model --draft_checkpoint {path}, "
                "or name a head"
            )
        return kind
    raw = read_json(path / "config.json")
    mark_of = {}  # kind -> its last mark
    for layout in LAYOUTS:
        if layout.model_type and layout.model_type == raw.get("model_type"):
            return layout.kind
        marks = [f"the key {key}" for key in layout.keys if key in raw]
        if layout.files:
            marks += sorted(file.name for file in path.glob(f"{layout.files}*"))
        if marks:
            mark_of[layout.kind] = marks[-1]
    if any("_lm_head." in mark for mark in mark_of.values()):  # else these are its weights
        theirs = [name for name in WEIGHTS if (path / name).is_file()]
        if theirs:
            mark_of["eagle"] = theirs[0]
    if len(mark_of) > 1:
        listed = ", ".join(f"{mark} ({kind})" for kind, mark in mark_of.items())
        raise ValueError(
            f"{path} holds heads of several kinds: {listed}; give each its own directory"
        )
    return next(iter(mark_of), "eagle")


def layout_of(path: Path, kind: str, names: Iterable[str]) -> Layout:
    """Return the layout of a head of a kind by its tensors. Raises: ValueError for an unknown one.

    names: as the files have them
    """
    names = [*names]
    for layout in LAYOUTS:
        held = layout.tensors and any(re.match(layout.tensors, name) for name in names)
        if held and layout.kind == kind:
            return layout
    if any(name.startswith("model.layers.") for name in names):
        raise ValueError(
            f"{path} holds a model, and no head (model.layers, no fc.weight); use --draft model "
            f"--draft_checkpoint {path}, or name the directory of a head"
        )
    known = ", ".join(layout.title for layout in LAYOUTS)
    more = " and others" if len(names) > 3 else ""
    raise ValueError(
        f"{path} is in no layout of the kind {kind} that is known: its tensors are "
        f"{', '.join(names[:3])}{more}; known are {known} (files/HEADS.md)"
    )


def own_head(path: Path, kind: str = "") -> str:
    """Return the head that belongs to a checkpoint: the bundled one, or one beside it; "": none.

    kind: of the head; "": EAGLE's if it is bundled, else any
    """
    bundled = bundled_head(path, kind or "eagle")
    return str(bundled) if bundled.is_dir() else load_part("reader", "head beside")(path, kind)
