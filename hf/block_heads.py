"""Read the files of a block drafter: DFlash's layout, JetSpec's and DeepSpec's.

All hold the layers of a Qwen3 model (`layers.N.`), `norm`, `fc` over the hidden states of several
layers of the target, and `hidden_norm` behind it. DeepSpec's may also hold a Markov bias
(`markov_head.markov_w1`, `markov_w2`), a confidence (`confidence_head.proj`), and copies of the
target's embedding and LM head. Their keys are in `dflash_config` or at the top of config.json.
- DFlash (arXiv 2602.06036): a position attends to its whole block, and predicts its own token.
- JetSpec (arXiv 2606.18394): the same with the key `causal_head`: attention is causal.
- DeepSpec, with the key `markov_rank` (0: none): a position predicts the token after its own.
Sources: the official code of the three. Not here: modules (extras/block_draft.py); DFlash2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from base.fields import FLAG, NAMES, OBJECT, TOKEN_ID, Rule, integer, key, naming, only, read_fields
from base.io import log_note
from hf.checkpoint import TensorSource
from hf.config import HFArchitecture
from hf.heads import BIASES, NEUTRAL, OFF, HFHead, layer_config
from hf.weights import check_layers, layer_names
from model import ModelConfig
from models.keys import HFConfig, HFSwiGLU

TAPS = Rule(
    "a list of layers, whole numbers from -1 (the embedding) on",
    lambda v: type(v) is list and bool(v) and all(map(integer(-1, 2**20).holds, v)),
)
# keys of DeepSpec's training
TRAINING = {"num_anchors", "enable_confidence_head", "confidence_head_with_markov", "layer_types"}


@dataclass(frozen=True, kw_only=True)
class HFBlockHead(HFHead):
    """The further keys of a block drafter's config.json."""

    block_size: int = key(integer(2, 256))
    mask_token_id: int = key(TOKEN_ID)
    target_layer_ids: list = key(TAPS)  # layers of the target whose outputs fc takes
    causal_head: bool | None = key(FLAG, None)
    causal: bool | None = key(FLAG, None)  # the same in vLLM's words
    is_causal: bool | None = key(FLAG, None)  # the same in newer files of DFlash
    markov_rank: int | None = key(integer(0, 2**16), None)
    markov_head_type: str = key(only("vanilla"), "vanilla")


@dataclass(frozen=True)
class HFNestedBlockHead:
    """The keys with keys of their own, and those that decide whether a file can be read."""

    dflash_config: dict | None = key(OBJECT, None)
    layer_types: list | None = key(NAMES, None)


@dataclass(frozen=True)
class BlockConfig:
    """The config of a block drafter by its own files."""

    model: ModelConfig  # of its layers
    aux_layers: tuple[int, ...]  # layers of the target whose inputs fc takes
    block_size: int  # positions of a pass: the root, then mask tokens
    mask_token: int
    causal: bool  # a position attends to those before it only
    predicts_next: bool  # a position predicts the token after its own; the root's predicts one, too
    sharpness: float = 1.0  # c in log softmax(c z), see drafters.py
    markov_rank: int = 0  # 0: no bias
    confidence: int = 0  # inputs of the confidence; 0: none
    confidence_bias: bool = False
    own_embedding: bool = False
    own_lm_head: bool = False

    @property
    def levels(self) -> int:
        """Tokens that a pass predicts."""
        return self.block_size if self.predicts_next else self.block_size - 1


def read_block_head(files: TensorSource, target: ModelConfig) -> BlockConfig:
    """Read the config of a block drafter and check it against its target.

    Raises: ValueError for a drafter of another target, an impossible config, or weights that do not
    fit it. Writes: notes on keys without effect, to stderr.
    """
    path = files.path
    raw = files.config
    tensors = {*files.readers, *files.quantized}
    with naming(path / "config.json"):
        nested = read_fields(raw, HFNestedBlockHead)
        flags = nested.dflash_config or {}
        for name in sorted(flags.keys() & raw.keys()):
            if flags[name] != raw[name]:
                raise ValueError(
                    f"{name} is {raw[name]}, and {flags[name]} in dflash_config; keep one"
                )
        hf = read_fields(raw | flags, HFBlockHead)
        if set(nested.layer_types or ()) - {"full_attention"}:
            raise ValueError("layer_types must all be full_attention")
    model = replace(layer_config(path, raw), tie_embeddings=False)
    biases = {kind: f"layers.0.{name}.bias" in tensors for kind, name in BIASES.items()}
    model = replace(model, qk_norm="layers.0.self_attn.q_norm.weight" in tensors, **biases)
    config = BlockConfig(
        model,
        aux_layers=tuple(layer + 1 for layer in hf.target_layer_ids),
        block_size=hf.block_size,
        mask_token=hf.mask_token_id,
        causal=bool(hf.causal_head or hf.causal or hf.is_causal),
        predicts_next=hf.markov_rank is not None,
        sharpness=hf.draft_sharpness,
        markov_rank=hf.markov_rank or 0,
        confidence=_inputs_of(files, "confidence_head.proj.weight"),
        confidence_bias="confidence_head.proj.bias" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
    )
    _check_target(path, config, target)
    _check_weights(files, config)
    _print_notes(path, raw, flags)
    return config


def _inputs_of(files: TensorSource, name: str) -> int:
    """Return the inputs of a weight, whose columns may be codes of 4 bits; 0: it is missing."""
    if name in files.quantized:  # in the blocks of a GGUF file
        return files.quantized[name]().inputs
    if name not in files.readers:
        return 0
    stored = files.read(name)
    return stored.shape[-1] * (2 if stored.dtype == torch.uint8 else 1)


def _check_target(path: Path, config: BlockConfig, target: ModelConfig) -> None:
    """Check that a drafter fits its target. Raises: ValueError."""
    model = config.model
    pairs = (
        ("hidden_size", model.dim, target.dim),
        ("vocab_size", model.vocab_size, target.vocab_size),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ValueError(
                f"{path}: {name} is {ours}, the target's is {theirs}; "
                "use the head made for this target"
            )
    if config.mask_token >= target.vocab_size:
        raise ValueError(
            f"{path}: mask_token_id must be below the target's vocab_size ({target.vocab_size}); "
            f"it is {config.mask_token}; use the head made for this target"
        )
    taps = [layer - 1 for layer in config.aux_layers]
    if taps != sorted(set(taps)) or taps[-1] > target.n_layers - 2:
        # the official code takes the last layer's output behind the norm, other code before it
        raise ValueError(
            f"{path}: target_layer_ids must ascend, up to the target's last layer but one "
            f"({target.n_layers - 2}); they are {', '.join(map(str, taps))}; use its own target"
        )


def _check_weights(files: TensorSource, config: BlockConfig) -> None:
    """Check that config.json fits the weights. Raises: ValueError."""
    path = files.path
    if "hidden_norm.weight" not in files.readers:
        raise ValueError(
            f"{path}: config.json is a block drafter's, and the weights are not: they have no "
            "hidden_norm.weight; give every head its own directory"
        )
    check_layers(config.model, files)
    dim = config.model.dim
    inputs = _inputs_of(files, "fc.weight")
    taps = len(config.aux_layers)
    if inputs != taps * dim:
        raise ValueError(
            f"{path}: fc takes {inputs} inputs, and target_layer_ids names {taps} layers of width "
            f"{dim}; correct config.json"
        )
    rank = _inputs_of(files, "markov_head.markov_w2.weight")
    if rank != config.markov_rank:
        raise ValueError(
            f"{path}: markov_rank is {config.markov_rank}, and the weights have rank {rank}; "
            "correct config.json"
        )
    if config.confidence not in (0, dim, dim + rank):
        raise ValueError(
            f"{path}: confidence_head takes {config.confidence} inputs; it must be hidden_size "
            f"({dim}), or with markov_rank {dim + rank}: download it again"
        )


def _print_notes(path: Path, raw: dict, flags: dict) -> None:
    """Print the keys of config.json that have no effect here."""
    records = (HFArchitecture, HFConfig, HFSwiGLU, HFBlockHead, HFNestedBlockHead)
    known = NEUTRAL | TRAINING | OFF.keys()
    known |= {declared.name for record in records for declared in fields(record)}
    unknown = sorted((raw.keys() | flags.keys()) - known)
    if unknown:
        listed = ", ".join(unknown)
        log_note(f"{path}: keys of config.json without effect here: {listed}")


def block_names(config: BlockConfig) -> dict[str, tuple[str, ...]]:
    """Return our parameter's name -> the official tensors."""
    names = {f"{norm}.weight": (f"{norm}.weight",) for norm in ("norm", "fc", "hidden_norm")}
    for i in range(config.model.n_layers):
        layer = f"layers.{i}."
        names |= layer_names(layer, layer, config.model.layer(i), config.model.names)
    if config.markov_rank:
        names |= {f"markov_{w}.weight": (f"markov_head.markov_{w}.weight",) for w in ("w1", "w2")}
    if config.confidence:
        names["confidence_weight"] = ("confidence_head.proj.weight",)
    if config.confidence_bias:
        names["confidence_bias"] = ("confidence_head.proj.bias",)
    if config.own_embedding:
        names["embedding.weight"] = ("embed_tokens.weight",)
    if config.own_lm_head:
        names["lm_head.weight"] = ("lm_head.weight",)
    return names
