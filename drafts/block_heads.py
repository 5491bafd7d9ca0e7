"""Read the files of a block drafter: the layouts of z-lab, JetSpec, DeepSpec and speculators.

All hold the layers of a Qwen3 model (`layers.N.`), `norm`, `fc` over the hidden states of several
layers of the target, and `hidden_norm` behind it. `read_keys` puts their keys side by side.
- DFlash (arXiv 2602.06036): a position attends to its whole block, and predicts its own token.
- JetSpec (arXiv 2606.18394): the same with the key `causal_head`: attention is causal.
- DSpark (arXiv 2607.05147): a Markov bias (`markov_head`) and a confidence (`confidence_head`). In
  DeepSpec's files, or with `sample_from_anchor`, a position predicts the token after its own.
- DFlash2: convolutions in the layers, and a selector among each position's best tokens
  (`candidate_selector`).
- DSpine: codes of tokens that a position hands to the next (`injection`, `transfer_codes`).
- LiLiCorr: a correlator of the best tokens (`lilicorr`), with DFlash2's convolutions or without.
Sources: the official code of JetSpec and DeepSpec; z-lab/dflash, dflash/model.py @10129599; the
package speculators 0.9.0, models/dflash, dspark and dflash2; sgl-project/SpecForge @a6b6b02,
`DSparkDraftModel`, and @64ab5ca, `DSpineDraftModel`; LiLiCorr's: drafts/correlator.py.
Not here: modules (drafts/block_draft.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from drafters import DraftVocab
from drafts.block_layers import BlockModel
from drafts.correlator import Correlator, HFCorrelator
from files.checkpoint import TensorSource
from files.config import HFArchitecture
from files.fields import (
    FLAG,
    OBJECT,
    TOKEN_ID,
    Rule,
    integer,
    key,
    naming,
    only,
    positive,
    read_fields,
)
from files.heads import (
    BIASES,
    NEUTRAL,
    OFF,
    HFHead,
    check_sizes,
    drafted_ids,
    layer_config,
    layers_of,
    note_keys,
    order_rows,
)
from files.keys import FULL, KINDS, SLIDING, HFConfig, HFSwiGLU
from model import ModelConfig, layer_names

TAPS = Rule(
    "a list of layers, whole numbers from -1 (the embedding) on",
    lambda v: type(v) is list and bool(v) and all(map(integer(-1, 2**20).holds, v)),
)
NO = Rule("false", lambda v: v is False)
YES = Rule("true", lambda v: v is True)
SIZE = integer(1, 2**20)
# keys of training, and of what the tensors say
TRAINING = {
    "alignment_warmup_steps",
    "alignment_weight",
    "candidate_mass_threshold",
    "ce_weight",
    "confidence_head_alpha",
    "confidence_head_with_markov",
    "embed_requires_grad",
    "enable_confidence_head",
    "max_anchors",
    "num_anchors",
    "replacement_end_ratio",
    "replacement_hold_ratio",
    "replacement_layers",
    "replacement_probability",
    "target_hidden_size",
    "use_sliding_window",
}


@dataclass(frozen=True, kw_only=True)
class HFBlockHead(HFHead):
    """The further keys of a block drafter's config.json."""

    block_size: int = key(integer(2, 256))
    mask_token_id: int = key(TOKEN_ID)
    target_layer_ids: list = key(TAPS)  # layers of the target whose outputs fc takes
    layer_types: list | None = key(KINDS, None)
    causal_head: bool | None = key(FLAG, None)
    causal: bool | None = key(FLAG, None)  # the same in vLLM's words
    is_causal: bool | None = key(FLAG, None)  # the same in newer files of DFlash
    sliding_window_non_causal: bool = key(FLAG, False)  # of layers with a window, in speculators
    sample_from_anchor: bool | None = key(FLAG, None)  # the root's position predicts, too
    draft_vocab_size: int | None = key(integer(1, 2**24), None)
    markov_rank: int | None = key(integer(0, 2**16), None)
    markov_head_type: str = key(only("vanilla", "gated"), "vanilla")
    projector_type: str | None = key(only("dspark", "dflash2", "lilicorr"), None)  # SpecForge's
    attention_mode: str = key(only("gqa", "mha"), "gqa")  # SpecForge's
    use_swa: bool = key(NO, False)  # vLLM's: a window without layer_types
    is_neox_style: bool = key(YES, True)  # vLLM's: RoPE turns halves of a head, not pairs
    conv_kernel_size: int = key(integer(1, 256), 0)
    conv_group_size: int = key(SIZE, 1)
    selector_rank: int = key(SIZE, 0)
    selector_top_k: int = key(SIZE, 0)
    transfer_rank: int = key(SIZE, 0)
    message_size: int = key(SIZE, 512)
    input_embedding_scale: float = key(positive(1e6), 1.0)
    output_multiplier: float = key(positive(1e6), 1.0)
    final_logit_softcapping: float | None = key(
        Rule("0 or a positive number", lambda v: type(v) in (int, float) and 0 <= v < 1e6), None
    )


@dataclass(frozen=True)
class HFNestedBlockHead:
    """The keys with keys of their own, and those of speculators with other names."""

    dflash_config: dict | None = key(OBJECT, None)
    dspine_config: dict | None = key(OBJECT, None)
    transformer_layer_config: dict | None = key(OBJECT, None)  # speculators': of the layers
    speculators_model_type: str | None = key(only("dflash", "dspark", "dflash2"), None)
    # speculators': layers whose inputs fc takes
    aux_hidden_state_layer_ids: list | None = key(TAPS, None)


@dataclass(frozen=True)
class BlockConfig:
    """The config of a block drafter by its own files."""

    model: ModelConfig  # of its layers
    aux_layers: tuple[int, ...]  # layers of the target whose inputs fc takes
    block_size: int  # positions of a pass: the root, then mask tokens
    mask_token: int
    causal: bool  # a position attends to those before it only
    predicts_next: bool  # a position predicts the token after its own; the root's predicts one, too
    sliding_causal: bool = True  # the same as `causal` in the layers with a window, if any
    window_from_root: bool = False  # their window before the block is counted from the root
    sharpness: float = 1.0  # c in log softmax(c z), see drafters.py
    draft_vocab: int = 0  # tokens that it drafts; 0: all
    score_factor: float = 1.0
    score_cap: float = 0.0  # scores go through cap * tanh(z / cap); 0: they do not
    selector_rank: int = 0  # 0: no selector
    selector_top: int = 0  # tokens of a level that it chooses among
    transfer_rank: int = 0  # numbers of a token's code, as in its layers
    correlator: HFCorrelator | None = None
    markov_rank: int = 0  # 0: no bias
    markov_gated: bool = False  # the level's state gates the row of the token before
    confidence: int = 0  # inputs of the confidence; 0: none
    confidence_bias: bool = False
    own_embedding: bool = False
    own_lm_head: bool = False

    @property
    def levels(self) -> int:
        """Tokens that a pass predicts."""
        return self.block_size if self.predicts_next else self.block_size - 1

    @property
    def looks_back(self) -> bool:
        """Return whether no position sees those behind it, so that a block may be cut."""
        return self.causal and self.sliding_causal

    @property
    def scores_pairs(self) -> bool:
        """Return whether a level's scores depend on the token before."""
        return any((self.markov_rank, self.confidence, self.selector_rank, self.transfer_rank))


def read_keys(raw: dict) -> dict:
    """Return all keys of config.json side by side. Raises: ValueError for a key with two values."""
    nested = read_fields(raw, HFNestedBlockHead)
    flags = nested.dflash_config or {}
    for name in sorted(flags.keys() & raw.keys()):
        if flags[name] != raw[name]:
            raise ValueError(f"{name} is {raw[name]}, and {flags[name]} in dflash_config; keep one")
    own = {name: value for name, value in (raw | flags).items() if value is not None}
    keys = (nested.transformer_layer_config or {}) | own
    if nested.dspine_config:
        keys |= {"transfer_rank": 1024} | nested.dspine_config
        keys["selector_top_k"] = keys.pop("top_k", 16)
    if nested.aux_hidden_state_layer_ids:
        keys["target_layer_ids"] = [layer - 1 for layer in nested.aux_hidden_state_layer_ids]
    rope = keys.get("rope_parameters") or {}
    if SLIDING in rope:  # drafters have one RoPE; speculators takes this one
        keys["rope_parameters"] = rope[SLIDING]
    return keys


def read_block_head(files: TensorSource, target: ModelConfig) -> BlockConfig:
    """Read the config of a block drafter and check it against its target.

    Raises: ValueError for a drafter of another target, an impossible config, or weights that do not
    fit it. Writes: notes on keys without effect, to stderr.
    """
    path = files.path
    _rename(files)
    tensors = {*files.readers, *files.quantized}
    with naming(path / "config.json"):
        keys = read_keys(files.config)
        hf = read_fields(keys, HFBlockHead)
        model = _read_layers(files, keys, hf, tensors)
        correlator = _read_correlator(keys, hf, model)
    _share_injections(files, model.n_layers)
    by_speculators = "speculators_model_type" in keys
    predicts_next = hf.sample_from_anchor
    if predicts_next is None:  # DeepSpec's files have no such key
        predicts_next = hf.markov_rank is not None and not (hf.projector_type or by_speculators)
    stated = [flag for flag in (hf.causal_head, hf.causal, hf.is_causal) if flag is not None]
    if hf.transfer_rank:  # as DSpine is trained
        stated = [True]
    sliding_causal = any(stated) if stated else not hf.sliding_window_non_causal
    vocab = hf.draft_vocab_size or model.vocab_size
    config = BlockConfig(
        model,
        aux_layers=tuple(layer + 1 for layer in hf.target_layer_ids),
        block_size=hf.block_size,
        mask_token=hf.mask_token_id,
        causal=any(stated),
        predicts_next=predicts_next,
        sliding_causal=sliding_causal or not model.sliding_layers,
        window_from_root=by_speculators,
        sharpness=hf.draft_sharpness,
        draft_vocab=0 if vocab == model.vocab_size else vocab,
        score_factor=hf.output_multiplier,
        score_cap=hf.final_logit_softcapping or 0.0,
        selector_rank=hf.selector_rank,
        selector_top=hf.selector_top_k,
        transfer_rank=hf.transfer_rank,
        correlator=correlator,
        markov_rank=hf.markov_rank or 0,
        markov_gated=bool(hf.markov_rank) and hf.markov_head_type == "gated",
        confidence=_inputs_of(files, "confidence_head.proj.weight"),
        confidence_bias="confidence_head.proj.bias" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors or vocab != model.vocab_size,
    )
    _check_target(path, config, target)
    _check_weights(files, config)
    _print_notes(path, keys)
    return config


def _rename(files: TensorSource) -> None:
    """Give the parts of DFlash2 one name and one shape. Writes: the readers of `files`."""
    for tensors in (files.readers, files.quantized):
        for name in [*tensors]:
            if name.endswith("_codebook.weight"):  # z-lab's class has them in embeddings
                tensors[name.removesuffix(".weight")] = tensors.pop(name)
            if name.endswith("_conv.base_kernel"):  # [2, taps, F]
                tensors[name] = partial(_flat, tensors[name])


def _share_injections(files: TensorSource, layers: int) -> None:
    """Name the tensors of `injection` by the layers that they are for. Writes: `files`.

    Those that all layers share are read for each of them: they are small.
    """
    for name in [name for name in files.readers if name.startswith("injection.")]:
        read = files.readers.pop(name)
        part, number, rest = (*name.split(".", 3)[1:], "", "")[:3]
        if number.isdigit():
            files.readers[f"layers.{number}.injection.{part}.{rest}"] = read
            continue
        for layer in range(layers):
            files.readers[f"layers.{layer}.{name}"] = read


def _flat(read: Callable[[], Tensor]) -> Tensor:
    return read().flatten(0, -2)


def in_files(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of `block_names` in the shape that files have: `_rename` undone."""
    if name.endswith("_conv.base_kernel"):  # before and behind a sublayer
        return tensor.unflatten(0, (2, -1))
    return tensor


def _read_layers(files: TensorSource, keys: dict, hf: HFBlockHead, tensors: set[str]) -> BlockModel:
    """Read the settings of the layers. Raises: ValueError for kinds or sizes that do not fit."""
    # a window bounds no context
    model = layer_config(files.path, keys | {"use_sliding_window": False})
    model = replace(model, n_layers=layers_of(files))
    kinds = hf.layer_types or [FULL] * model.n_layers
    if len(kinds) != model.n_layers:
        raise ValueError(f"layer_types must name {model.n_layers} layers; it names {len(kinds)}")
    window = keys.get("sliding_window") if keys.get("use_sliding_window") else None
    if SLIDING in kinds and not window:
        raise ValueError(
            f"layer_types has {SLIDING}, and there is no window: use_sliding_window must be true "
            "and sliding_window a number"
        )
    if hf.conv_kernel_size and model.dim % hf.conv_group_size:
        raise ValueError(
            f"conv_group_size must divide hidden_size ({model.dim}); it is {hf.conv_group_size}"
        )
    drafted = hf.draft_vocab_size or model.vocab_size
    if (hf.selector_rank or hf.transfer_rank) and not 0 < hf.selector_top_k <= drafted:
        raise ValueError(
            f"selector_top_k must be 1 to the number of drafted tokens ({drafted}); "
            f"it is {hf.selector_top_k}"
        )
    common = {part.name: getattr(model, part.name) for part in fields(ModelConfig)}
    common |= {kind: f"layers.0.{name}.bias" in tensors for kind, name in BIASES.items()}
    common |= {
        "tie_embeddings": False,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
    }
    return BlockModel(
        **common,
        window=window or 0,
        sliding_layers=tuple(i for i, kind in enumerate(kinds) if kind == SLIDING),
        conv_taps=hf.conv_kernel_size,
        conv_group=hf.conv_group_size,
        input_scale=hf.input_embedding_scale,
        transfer_rank=hf.transfer_rank,
        message_size=hf.message_size,
    )


def _read_correlator(keys: dict, hf: HFBlockHead, model: BlockModel) -> HFCorrelator | None:
    """Read the settings of LiLiCorr's correlator, if there is one. Raises: ValueError."""
    named = any(name.startswith("lilicorr_") for name in keys)
    if not named and hf.projector_type != "lilicorr":
        return None
    found = read_fields(keys, HFCorrelator)
    width = found.lilicorr_hidden_size or model.dim
    heads = found.lilicorr_num_heads
    if width % heads:
        raise ValueError(
            f"lilicorr_num_heads must divide lilicorr_hidden_size ({width}); it is {heads}"
        )
    top = found.lilicorr_candidate_topk
    if top > model.vocab_size:
        raise ValueError(
            f"lilicorr_candidate_topk must be at most vocab_size ({model.vocab_size}); it is {top}"
        )
    return found


def read_vocab(files: TensorSource, config: BlockConfig, device: torch.device) -> DraftVocab | None:
    """Return the tokens that a drafter drafts; None: all of the target's.

    Raises: ValueError for a `d2t` that leaves the vocabulary or repeats a token.
    Writes: `files`, whose rows of tokens then have the tokens' order.
    """
    if not config.draft_vocab:
        return None
    ids, order = drafted_ids(files, config.draft_vocab, config.model.vocab_size)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        order_rows(files, name, order)
    return DraftVocab(config.model.vocab_size, ids.to(device))


def is_unused(name: str) -> bool:
    """Return whether a tensor may stay unused: those of training, and of the vocabulary."""
    endings = ("rotary_emb.inv_freq", "d2t", "t2d", "transfer_ready")
    return name.endswith((*endings, "verifier_norm.weight", "verifier_lm_head.weight"))


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
    check_sizes(path, config.model.dim, config.model.vocab_size, target)
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
    own_tables = config.own_embedding or config.own_lm_head
    if config.correlator and (own_tables or config.predicts_next or config.scores_pairs):
        raise ValueError(
            f"{path}: LiLiCorr reads the target's embedding and LM head behind DFlash, and this "
            "head has tables, a bias or a selector of its own; use another head"
        )
    if config.confidence not in (0, dim, dim + rank):
        raise ValueError(
            f"{path}: confidence_head takes {config.confidence} inputs; it must be hidden_size "
            f"({dim}), or with markov_rank {dim + rank}: download it again"
        )


def _print_notes(path: Path, keys: dict) -> None:
    """Print the keys of config.json that have no effect here."""
    records = (HFArchitecture, HFConfig, HFSwiGLU, HFBlockHead, HFNestedBlockHead, HFCorrelator)
    known = NEUTRAL | TRAINING | OFF.keys()
    known |= {declared.name for record in records for declared in fields(record)}
    note_keys(path, keys.keys() - known)


def block_names(config: BlockConfig) -> dict[str, tuple[str, ...]]:
    """Return our parameter's name -> the official tensors."""
    names = {f"{norm}.weight": (f"{norm}.weight",) for norm in ("norm", "fc", "hidden_norm")}
    for i in range(config.model.n_layers):
        layer = f"layers.{i}."
        names |= layer_names(layer, layer, config.model.layer(i), config.model.names)
    if config.markov_rank:
        names |= {f"markov_{w}.weight": (f"markov_head.markov_{w}.weight",) for w in ("w1", "w2")}
    if config.markov_gated:
        names |= {
            f"markov_gate.{part}": (f"markov_head.gate_proj.{part}",) for part in ("weight", "bias")
        }
    if config.confidence:
        names["confidence_weight"] = ("confidence_head.proj.weight",)
    if config.confidence_bias:
        names["confidence_bias"] = ("confidence_head.proj.bias",)
    if config.transfer_rank:
        names["codes.weight"] = ("transfer_codes",)
        last = f"layers.{config.model.n_layers - 1}."
        names |= layer_names("", last, config.model.injected(), config.model.names)
    if config.correlator:
        with torch.device("meta"):
            correlator = Correlator(config.correlator, config.model, config.levels)
        parts = [name for name, _ in correlator.named_parameters()]
        names |= {f"correlator.{name}": (f"lilicorr.{name}",) for name in parts}
    if config.selector_rank:
        names |= {
            "selector_before.weight": ("candidate_selector.predecessor_codebook",),
            "selector_after.weight": ("candidate_selector.successor_codebook",),
            "selector_hidden.weight": ("candidate_selector.hidden_projection.weight",),
        }
    if config.own_embedding:
        names["embedding.weight"] = ("embed_tokens.weight",)
    if config.own_lm_head:
        names["lm_head.weight"] = ("lm_head.weight",)
    return names
