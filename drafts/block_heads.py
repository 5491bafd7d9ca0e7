"""Read the config of a block drafter: the layouts of z-lab, JetSpec, DeepSpec and speculators.

All hold the layers of a Qwen3 model (`layers.N.`), `norm`, `fc` over the hidden states of several
layers of the target, and `hidden_norm` behind it.
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
Not here: files and the names of their tensors (files/heads.py), modules (drafts/block_draft.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from drafters import DraftVocab
from drafts.block_layers import SIZE, BlockModel
from drafts.correlator import HFCorrelator
from files.fields import FLAG, TOKEN_ID, Rule, integer, key, naming, only, positive, read_fields
from files.head_kinds import AUX
from files.heads import (
    HeadFiles,
    check_aux_layers,
    check_sizes,
    draft_vocab,
    layer_config,
    note_keys,
    order_rows,
)
from files.keys import FULL, KINDS, SLIDING
from model import ModelConfig
from options import require

NO = Rule("false", lambda v: v is False)
CAP = Rule("0 or a positive number", lambda v: type(v) in (int, float) and 0 <= v < 1e6)


@dataclass(frozen=True)
class HFBlockLayout:
    """The keys of config.json that say the layout, or have one value here."""

    layer_types: list | None = key(KINDS, None)
    speculators_model_type: str | None = key(only("dflash", "dspark", "dflash2"), None)
    projector_type: str | None = key(only("dspark", "dflash2", "lilicorr"), None)  # SpecForge's
    attention_mode: str = key(only("gqa", "mha"), "gqa")  # SpecForge's
    use_swa: bool = key(NO, False)  # vLLM's: a window without layer_types
    is_neox_style: bool = key(FLAG, True)  # vLLM's: RoPE turns halves of a head, not pairs


@dataclass(frozen=True)
class BlockConfig:
    """The config of a block drafter by its own files."""

    model: BlockModel  # of its layers
    aux_layers: tuple[int, ...]  # layers of the target whose inputs fc takes
    block_size: int = key(integer(2, 256))  # positions of a pass: the root, then mask tokens
    mask_token: int = key(TOKEN_ID, name="mask_token_id")
    causal: bool = key(FLAG, False)  # a position attends to those before it only
    # a position predicts the token after its own; the root's predicts one, too
    predicts_next: bool = key(FLAG, False, "sample_from_anchor")
    # of layers with a window: a position attends to the whole block
    sliding_whole: bool = key(FLAG, False, "sliding_window_non_causal")
    window_from_root: bool = False  # windows before the block are counted from the root
    sharpness: float = key(positive(1e6), 1.0, "draft_sharpness")  # c in log softmax(c z)
    # tokens that it drafts; 0: all
    draft_vocab: int = key(integer(1, 2**24), 0, "draft_vocab_size")
    score_factor: float = key(positive(1e6), 1.0, "output_multiplier")
    # scores go through cap * tanh(z / cap); 0: they do not
    score_cap: float = key(CAP, 0.0, "final_logit_softcapping")
    selector_rank: int = key(SIZE, 0)  # 0: no selector
    # tokens of a level that it chooses among
    selector_top: int = key(SIZE, 0, "selector_top_k")
    transfer_rank: int = key(SIZE, 0)  # numbers of a token's code, as in its layers
    correlator: HFCorrelator | None = None
    markov_rank: int = key(integer(0, 2**16), 0)  # 0: no bias
    # gated: the level's state gates the row of the token before
    markov_head_type: str = key(only("vanilla", "gated"), "vanilla")
    confidence: int = 0  # inputs of the confidence; 0: none
    confidence_bias: bool = False
    own_embedding: bool = False
    own_lm_head: bool = False

    @property
    def sliding_causal(self) -> bool:
        """The same as `causal` in the layers with a window, if any."""
        return not (self.sliding_whole and self.model.sliding_layers)

    @property
    def markov_gated(self) -> bool:
        """Return whether the level's state gates the row of the token before."""
        return self.markov_rank > 0 and self.markov_head_type == "gated"

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


RECORDS = (BlockConfig, BlockModel, HFBlockLayout, HFCorrelator)  # of keys


def read_block_head(files: HeadFiles, target: ModelConfig) -> BlockConfig:
    """Read the config of a block drafter and check it against its target.

    Raises: ValueError for a drafter of another target, an impossible config, or weights that do not
    fit it. Writes: notes on keys without effect, to stderr.
    """
    keys = dict(files.config)
    if keys.get("draft_vocab_size") == keys.get("vocab_size"):
        keys.pop("draft_vocab_size", None)
    with naming(files.where):
        hf = read_fields(keys, HFBlockLayout)
        if hf.speculators_model_type is None and hf.projector_type is None:
            # DeepSpec's files have no such key
            keys.setdefault("sample_from_anchor", "markov_rank" in keys)
        if "causal" in keys:  # of all layers
            keys["sliding_window_non_causal"] = not keys["causal"]
        require(AUX in keys, "the key 'target_layer_ids' is missing")
        model = _read_layers(files, hf)
        config = read_fields(
            keys,
            BlockConfig,
            model=model,
            aux_layers=tuple(keys[AUX]),
            window_from_root=hf.speculators_model_type is not None,
            correlator=_read_correlator(keys, hf, model),
            confidence=_inputs_of(files, "confidence_head.proj.weight"),
            confidence_bias="confidence_head.proj.bias" in files.held,
            own_embedding="embed_tokens.weight" in files.held,
            own_lm_head="lm_head.weight" in files.held or "draft_vocab_size" in keys,
        )
    _check_target(files, config, target)
    _check_weights(files, config)
    if not hf.is_neox_style:
        _split_pairs(files, model)
    note_keys(files.path, files.config, RECORDS, {})
    return config


def _read_layers(files: HeadFiles, hf: HFBlockLayout) -> BlockModel:
    """Read the settings of the layers. Raises: ValueError for kinds or sizes that do not fit."""
    keys = files.config
    # a window bounds no context
    model = layer_config(files, "layers.0.", use_sliding_window=False)
    kinds = hf.layer_types or [FULL] * model.n_layers
    if len(kinds) != model.n_layers:
        raise ValueError(f"layer_types must name {model.n_layers} layers; it names {len(kinds)}")
    window = keys.get("sliding_window") if keys.get("use_sliding_window") else None
    if SLIDING in kinds and not window:
        raise ValueError(
            f"layer_types has {SLIDING}, and there is no window: use_sliding_window must be true "
            "and sliding_window a number"
        )
    common = {part.name: getattr(model, part.name) for part in fields(ModelConfig)}
    common |= {
        "tie_embeddings": False,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in files.held,
        "window": window or 0,
        "sliding_layers": tuple(i for i, kind in enumerate(kinds) if kind == SLIDING),
    }
    model = read_fields(keys, BlockModel, **common)
    if model.conv_taps and model.dim % model.conv_group:
        raise ValueError(
            f"conv_group_size must divide hidden_size ({model.dim}); it is {model.conv_group}"
        )
    return model


def _split_pairs(files: HeadFiles, model: BlockModel) -> None:
    """Put the even elements of queries and keys before the odd ones: our RoPE turns halves.

    Writes: `files`.
    """
    pairs = torch.arange(model.head_dim).unflatten(0, (-1, 2)).T.flatten()  # [E]
    for i in range(model.n_layers):
        for name, heads in (("q", model.n_heads), ("k", model.n_kv_heads)):
            order = (model.head_dim * torch.arange(heads)[:, None] + pairs).flatten()
            for part in ("weight", "bias"):
                order_rows(files, f"layers.{i}.self_attn.{name}_proj.{part}", order)
            order_rows(files, f"layers.{i}.self_attn.{name}_norm.weight", pairs)


def _read_correlator(keys: dict, hf: HFBlockLayout, model: BlockModel) -> HFCorrelator | None:
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


def read_vocab(files: HeadFiles, config: BlockConfig) -> DraftVocab | None:
    """Return the tokens that a drafter drafts, as `draft_vocab`."""
    size = config.model.vocab_size
    tables = ["lm_head.weight", "markov_head.markov_w2.weight"]
    return draft_vocab(files, size, tables, config.draft_vocab or size)


def _inputs_of(files: HeadFiles, name: str) -> int:
    """Return the inputs of a weight; 0: it is missing."""
    return (files.shape(name) or (0,))[-1]


def _check_target(files: HeadFiles, config: BlockConfig, target: ModelConfig) -> None:
    """Check that a drafter fits its target. Raises: ValueError."""
    path = files.path
    check_sizes(path, config.model.dim, config.model.vocab_size, target)
    if config.mask_token >= target.vocab_size:
        raise ValueError(
            f"{path}: mask_token_id must be below the target's vocab_size ({target.vocab_size}); "
            f"it is {config.mask_token}; use the head made for this target"
        )
    # the official code takes the last layer's output behind the norm, other code before it
    check_aux_layers(path, config.aux_layers, target.n_layers - 1)


def _check_weights(files: HeadFiles, config: BlockConfig) -> None:
    """Check that config.json fits the weights. Raises: ValueError."""
    dim = config.model.dim
    inputs = _inputs_of(files, "fc.weight")
    aux = len(config.aux_layers)
    rank = _inputs_of(files, "markov_head.markov_w2.weight")
    drafted = config.draft_vocab or config.model.vocab_size
    chooses = config.selector_rank or config.transfer_rank
    own_tables = config.own_embedding or config.own_lm_head
    alone = not (own_tables or config.predicts_next or config.scores_pairs)
    faults = {
        f"fc takes {inputs} inputs, and target_layer_ids names {aux} layers of width {dim}; "
        "correct config.json": inputs != aux * dim,
        f"markov_rank is {config.markov_rank}, and the weights have rank {rank}; "
        "correct config.json": rank != config.markov_rank,
        f"selector_top_k must be 1 to the number of drafted tokens ({drafted}); "
        f"it is {config.selector_top}; correct config.json": (
            chooses and not 0 < config.selector_top <= drafted
        ),
        "LiLiCorr reads the target's embedding and LM head behind DFlash, and this head has "
        "tables, a bias or a selector of its own; use another head": (
            config.correlator and not alone
        ),
        f"confidence_head takes {config.confidence} inputs; it must be hidden_size ({dim}), or "
        f"with markov_rank {dim + rank}: download it again": (
            config.confidence not in (0, dim, dim + rank)
        ),
    }
    for fault, holds in faults.items():
        require(not holds, f"{files.path}: {fault}")


def name_in_files(official: str) -> str:
    """Return the name of a tensor in the directories that we write: codebooks are no embeddings."""
    return official.removesuffix(".weight") if official.endswith("_codebook.weight") else official
