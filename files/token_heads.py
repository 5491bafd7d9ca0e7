"""Read the files of Medusa's and Hydra's heads: one head per drafted level.

1. `read_medusa` and `read_hydra` make a `TokenHeads` of config.json and of the tensors' names, and
   check that the heads fit the target. The weights decide the number of heads and what LM heads
   they have.
2. `medusa_names` and `hydra_names` map each of our parameters to the tensors it is made of.

Layouts: `medusa_lm_head.pt` or .safetensors (`i.j.linear.weight`, head i's LM head `i.L.weight`);
`hydra_lm_head.pt` (`hydra_mlp.i.j.linear.weight` and `.res_connection.`, `hydra_lm_head.i.`). In
`prefix-mlp` heads of Hydra each layer has a dropout before it, which takes a number of its own.
Heads without LM heads score with the target's: Medusa's where config.json says version 2, Hydra's
where it says `hydra_lm_head` is `target` (ours).
Sources: the official code of Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109).
Not here: modules (drafts/medusa_draft.py, drafts/hydra_draft.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from draft_tree import MAX_NODES
from files.checkpoint import TensorSource
from files.fields import TEXT, Rule, integer, key, naming, only, positive, read_fields
from files.heads import NEUTRAL
from model import ModelConfig, layer_names
from options import log_note

COUNT = integer(1, MAX_NODES - 1)
TRUE = Rule("true: heads that are not grounded are Medusa's", lambda v: v is True)
ZERO = Rule("0: other layers' features are not supported", lambda v: type(v) is int and v == 0)
OFFICIAL_ONLY = {"base_model_name_or_path", "model_type", "architectures"}  # without effect
# tensors that may stay unused: the target's embedding, which is a module of the official heads
UNUSED = ("input_embed_fn.", "prefix_embeding_layer.embed_tokens.")


@dataclass(frozen=True)
class HFMedusa:
    """The keys of config.json of Medusa's heads."""

    medusa_num_heads: int = key(COUNT)
    medusa_num_layers: int = key(COUNT, 1)
    version: str | None = key(TEXT, None)  # "2": heads without LM heads
    draft_sharpness: float = key(positive(1e6), 1.0)  # ours, as of EAGLE heads


@dataclass(frozen=True)
class HFHydra:
    """The keys of config.json of Hydra's heads."""

    hydra_num_heads: int = key(COUNT)
    grounded_heads: bool = key(TRUE)  # officially false where it is missing
    hydra_num_layers: int = key(COUNT, 1)
    hydra_head_arch: str = key(only("mlp", "prefix-mlp"), "mlp")
    hidden_state_offset: int = key(ZERO, 0)
    hydra_lm_head: str = key(only("own", "target"), "own")  # ours
    dropout_rate: float | None = key(positive(1.0), None)  # of training
    draft_sharpness: float = key(positive(1e6), 1.0)  # ours


@dataclass(frozen=True)
class TokenHeads:
    """The shape of Medusa's or Hydra's heads."""

    heads: int  # D, drafted levels
    layers: int  # of a head
    dim: int  # F, the target's
    vocab_size: int  # V, the target's
    own_lm_heads: bool  # False: the target's
    sharpness: float = 1.0  # c in log softmax(c z), see drafters.py
    prefix: ModelConfig | None = None  # Hydra++: a layer of attention before the heads


def read_medusa(files: TensorSource, target: ModelConfig) -> TokenHeads:
    """Read the shape of Medusa's heads and check it against the target.

    Raises: ValueError for a wrong key, heads of another target, or missing LM heads.
    """
    with naming(files.path / "config.json"):
        hf = read_fields(files.config, HFMedusa)
    layers = hf.medusa_num_layers
    heads = _count(files, "", hf.medusa_num_heads, "medusa_num_heads")
    own = [f"{i}.{layers}.weight" for i in range(heads)]
    shared = hf.version == "2" and not any(name in files.readers for name in own)
    if not shared:
        remedy = 'download them again (heads that use the target\'s say version "2")'
        _check_lm_heads(files, own, target, remedy)
    _check_width(files, "0.0.linear.weight", 1, target)
    _note_keys(files, HFMedusa)
    return TokenHeads(heads, layers, target.dim, target.vocab_size, not shared, hf.draft_sharpness)


def read_hydra(files: TensorSource, target: ModelConfig) -> TokenHeads:
    """Read the shape of Hydra's heads and check it against the target.

    Raises: ValueError for a wrong key, heads of another target, or missing LM heads.
    """
    with naming(files.path / "config.json"):
        hf = read_fields(files.config, HFHydra)
    heads = _count(files, "hydra_mlp.", hf.hydra_num_heads, "hydra_num_heads")
    prefix = None
    if hf.hydra_head_arch == "prefix-mlp":
        if target.n_experts:
            raise ValueError(
                f"{files.path}: a prefix layer has the target's shape, and the target is a mixture "
                "of experts; use heads of hydra_head_arch mlp"
            )
        prefix = replace(target, n_layers=1)
    own = hf.hydra_lm_head == "own"
    shape = TokenHeads(
        heads,
        hf.hydra_num_layers,
        target.dim,
        target.vocab_size,
        own,
        hf.draft_sharpness,
        prefix,
    )
    if own:
        names = [_hydra_lm_head(shape, i) + "weight" for i in range(heads)]
        _check_lm_heads(files, names, target, "download them again")
    _check_width(files, _hydra_layer(shape, 0, 0) + "linear.weight", 2, target)
    _note_keys(files, HFHydra)
    return shape


def _count(files: TensorSource, prefix: str, said: int, key_name: str) -> int:
    """Return the number of heads in the weights.

    The official config of Medusa's Vicuna heads says 2, and the weights are 5.
    Raises: ValueError for fewer than config.json says.
    """
    numbers = {
        name.removeprefix(prefix).split(".")[0] for name in files.readers if name.startswith(prefix)
    }
    held = 0
    while str(held) in numbers:
        held += 1
    if held < said:
        raise ValueError(
            f"{files.path}: config.json says {key_name} {said}, and the weights hold {held} heads; "
            "download them again"
        )
    if held > said:
        log_note(
            f"{files.path}: config.json says {key_name} {said}; the weights hold {held} "
            "heads, and all of them draft"
        )
    return held


def _check_lm_heads(
    files: TensorSource, names: list[str], target: ModelConfig, remedy: str
) -> None:
    missing = [name for name in names if name not in files.readers]
    if missing:
        raise ValueError(f"{files.path}: the LM heads {', '.join(missing)} are missing; {remedy}")
    size = files.read(names[0]).shape[0]
    if size != target.vocab_size:
        raise ValueError(
            f"{files.path}: the heads score {size} tokens, the target's vocab_size is "
            f"{target.vocab_size}; use the heads made for this target"
        )


def _check_width(files: TensorSource, name: str, inputs: int, target: ModelConfig) -> None:
    """Check the width of the features. inputs: features and embeddings that the layer takes"""
    if name in files.readers:  # else its absence is reported with those of others
        outputs = files.read(name).shape[0]
        if outputs != target.dim:
            raise ValueError(
                f"{files.path}: the heads take features of width {outputs}, the target's "
                f"hidden_size is {target.dim}; use the heads made for this target"
            )


def _note_keys(files: TensorSource, kind: type) -> None:
    """Print the keys of config.json without effect here."""
    known = NEUTRAL | OFFICIAL_ONLY | {f.name for f in fields(kind)}
    unknown = sorted(files.config.keys() - known)
    if unknown:
        log_note(f"{files.path}: keys of config.json without effect here: {', '.join(unknown)}")


# ---------------------------------------------------------------------------------------- names


def medusa_names(shape: TokenHeads) -> dict[str, tuple[str, ...]]:
    """Return our parameter's name -> the official tensors. The heads' first layers are joined."""
    names = {}
    every = range(shape.heads)
    for kind in ("weight", "bias"):
        names[f"first.{kind}"] = tuple(f"{i}.0.linear.{kind}" for i in every)
        for j in range(1, shape.layers):
            names |= {f"deeper.{j - 1}.{i}.{kind}": (f"{i}.{j}.linear.{kind}",) for i in every}
    if shape.own_lm_heads:
        names |= {f"lm_heads.{i}.weight": (f"{i}.{shape.layers}.weight",) for i in every}
    return names


def hydra_names(shape: TokenHeads) -> dict[str, tuple[str, ...]]:
    """Return our parameter's name -> the official tensors.

    A head's first layer has two products of the same inputs, which are joined.
    """
    names = {}
    for i in range(shape.heads):
        for kind in ("weight", "bias"):
            first = _hydra_layer(shape, i, 0)
            names[f"mlps.{i}.0.{kind}"] = (f"{first}linear.{kind}", f"{first}res_connection.{kind}")
            for j in range(1, shape.layers):
                names[f"mlps.{i}.{j}.{kind}"] = (f"{_hydra_layer(shape, i, j)}linear.{kind}",)
            if shape.own_lm_heads:
                names[f"lm_heads.{i}.{kind}"] = (_hydra_lm_head(shape, i) + kind,)
    if shape.prefix:
        layer = shape.prefix
        theirs = "prefix_embeding_layer.layers.0."
        names |= layer_names("prefix.0.", theirs, layer.layer(0), layer.names)
        names["norm.weight"] = ("prefix_embeding_layer.norm.weight",)
    return names


def _hydra_layer(shape: TokenHeads, head: int, layer: int) -> str:
    place = 2 * layer + 1 if shape.prefix else layer
    return f"hydra_mlp.{head}.{place}."


def _hydra_lm_head(shape: TokenHeads, head: int) -> str:
    return f"hydra_lm_head.{head}.1." if shape.prefix else f"hydra_lm_head.{head}."


def is_unused(name: str) -> bool:
    """Return whether a tensor may stay unused: the target's embedding, a table of RoPE."""
    return name.startswith(UNUSED) or name.endswith("rotary_emb.inv_freq")
