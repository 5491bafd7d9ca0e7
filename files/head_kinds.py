"""Tell the kind of a trained head by its files, before its weights are read.

A GGUF file names its architecture. In a directory, every kind but EAGLE's has marks of its own:
keys of config.json, or names of files. One with the marks of several kinds is refused. The kinds
are values of `--draft` (run/options.py).
Not here: reading the heads (files/heads.py, files/token_heads.py).
"""

from __future__ import annotations

from pathlib import Path

from files.io import bundled_head, is_gguf, read_json
from options import load_part, require

# kind -> keys of config.json, beginnings of files' names or nothing
MARKS = {
    "medusa": (("medusa_num_heads", "medusa_num_layers"), "medusa_lm_head."),
    "hydra": (("hydra_num_heads", "hydra_num_layers", "hydra_head_arch"), "hydra_lm_head."),
    "block": (("dflash_config", "block_size"), ""),
}
MODEL_TYPES = {"gemma4_assistant": "assistant"}  # of config.json
ARCHITECTURES = {"eagle3": "eagle", "dflash": "block"}  # of GGUF files
MTP = "mtp"  # the kind of a head that is a layer of the checkpoint
FIRST_NORM = "blk.0.attn_norm.weight"  # of a model; llama.cpp's files of an MTP layer alone lack it
MOST_HEADER = 10**8  # bytes of a safetensors file's names, as in safetensors
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of an EAGLE head, or of a block drafter


def gguf_head_kind(path: Path) -> str:
    """Return the kind of the head in a GGUF file; "" where it holds a model."""
    header = load_part("reader", "gguf header")(path)
    architecture = str(header.metadata.get("general.architecture"))
    layers = header.metadata.get(f"{architecture}.nextn_predict_layers")
    if layers and FIRST_NORM not in header.tensors:
        return MTP
    return ARCHITECTURES.get(architecture, "")


def check_mtp(path: Path) -> None:
    """Check that a checkpoint may hold an MTP layer, by the names of its tensors alone.

    Names in .bin files are not read, which needs torch.
    Raises: ValueError where no name is one of such a layer's.
    """
    if is_gguf(path):
        names = " ".join(load_part("reader", "gguf header")(path).tensors).encode()
    else:
        names = _names_in(path)
    held = names is None or b"mtp" in names or b".nextn." in names
    fault = f"{path} holds no MTP layer (no tensor is named so)"
    require(held, f"{fault}; drop --draft mtp, or use a checkpoint with it")


def _names_in(path: Path) -> bytes | None:
    """Read the JSON text that names a directory's tensors; None: it has none."""
    index = path / "model.safetensors.index.json"
    whole = path / "model.safetensors"
    if whole.is_file():
        with whole.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return file.read(min(size, MOST_HEADER))
    return index.read_bytes() if index.is_file() else None


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
    kind = MODEL_TYPES.get(str(raw.get("model_type")))
    if kind:
        return kind
    mark_of = {}  # kind -> its marks
    for kind, (keys, beginning) in MARKS.items():
        marks = [f"the key {key}" for key in keys if key in raw]
        if beginning:
            marks += sorted(file.name for file in path.glob(f"{beginning}*"))
        if marks:
            mark_of[kind] = marks[-1]
    if mark_of.keys() & {"medusa", "hydra"}:
        theirs = [name for name in WEIGHTS if (path / name).is_file()]
        if theirs:
            mark_of["eagle"] = theirs[0]
    if len(mark_of) > 1:
        listed = ", ".join(f"{mark} ({kind})" for kind, mark in mark_of.items())
        raise ValueError(
            f"{path} holds heads of several kinds: {listed}; give each its own directory"
        )
    return next(iter(mark_of), "eagle")


def own_head(path: Path, kind: str = "") -> str:
    """Return the head that belongs to a checkpoint: the bundled one, or one beside it; "": none.

    kind: of the head; "": EAGLE's if it is bundled, else any
    """
    bundled = bundled_head(path, kind or "eagle")
    return str(bundled) if bundled.is_dir() else load_part("reader", "head beside")(path, kind)
