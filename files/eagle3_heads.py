"""The config of a head of version 3, in all of its layouts: what files/heads.py asks for by name.

Not here: the names of tensors (heads.py), modules (eagle_variants.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from eagle_draft import EagleConfig
from files.config import HFArchitecture
from files.eagle_variants import Eagle3Variant
from files.eagle_variants import VariantHead as VariantHead
from files.fields import FLAG, OBJECT, TOKEN_ID, Rule, integer, key, naming, read_fields
from files.heads import BIASES, MASK, HeadFiles, HFHead, check_inputs, layer_config
from files.keys import WIDTH, HFConfig, HFSwiGLU
from options import load_part

# vLLM's and NeMo's names, see `_last_norm`
FEEDS_NORMED = ("Eagle3LlamaForCausalLM", "LlamaEagle3DraftModel")
LAYERS = Rule(
    "a list of whole numbers", lambda v: type(v) is list and all(type(i) is int for i in v)
)


@dataclass(frozen=True)
class HFNestedConfig:
    """The keys of a version-3 head's config.json with keys of their own."""

    # speculators: the keys that others have at the top
    transformer_layer_config: dict | None = key(OBJECT, None)
    eagle_config: dict | None = key(OBJECT, None)  # its keys are those of `HFEagle3Head`


@dataclass(frozen=True)
class HFEagle3Head(HFHead):
    """The further keys of a head of version 3. An empty list of layers counts as missing."""

    target_hidden_size: int | None = key(WIDTH, None)  # as hidden_size
    draft_vocab_size: int | None = key(integer(1, 2**24), None)  # the length of d2t, or all
    # False: the head takes the target's last features, and has no fc
    use_aux_hidden_state: bool = key(FLAG, True)
    norm_before_residual: bool = key(FLAG, False)
    norm_before_fc: bool = key(FLAG, False)
    fc_norm: bool = key(FLAG, False)
    norm_output: bool | None = key(FLAG, None)
    target_layer_ids: list | None = key(LAYERS, None)  # layers whose outputs fc takes
    # the same in `eagle_config`; at the top, layers whose inputs fc takes
    eagle_aux_hidden_state_layer_ids: list | None = key(LAYERS, None)
    mask_token_id: int | None = key(TOKEN_ID, None)  # P-EAGLE: the token of levels below the first
    pard_token: int | None = key(TOKEN_ID, None)  # the same in vLLM's words
    ptd_token_id: int | None = key(TOKEN_ID, None)


def read_eagle3(files: HeadFiles, layers: int) -> EagleConfig:
    """Read the config of a head of version 3. layers: of the target"""
    path = files.path
    raw = files.config
    tensors = {*files.readers, *files.quantized}
    with naming(path / "config.json"):
        nested = read_fields(raw, HFNestedConfig)
        layer = nested.transformer_layer_config
        flags = nested.eagle_config or {}
        hf = read_fields({**raw, **flags}, HFEagle3Head)
        hf_top = read_fields(raw, HFEagle3Head)
        hf_flags = read_fields(flags, HFEagle3Head)
    check_inputs(path, hf)
    model = layer_config(path, raw if layer is None else layer)
    biases = {kind: f"midlayer.{name}.bias" in tensors for kind, name in BIASES.items()}
    model = replace(model, **biases)
    if "midlayer.self_attn.q_norm.weight" in tensors:
        model = load_part("architecture", "Qwen3ForCausalLM").with_head_norms(model)
    vocab = _draft_vocab_size(files, hf, model.vocab_size)
    norms = {
        "norm_before_fc": hf.norm_before_fc or "input_norm.weight" in tensors,
        "fc_norm": hf.fc_norm or "fc_norm.0.weight" in tensors,
    }
    aux_layers = ()
    if hf.use_aux_hidden_state:
        aux_layers = _aux_layers(path, hf_top, hf_flags, layers)
    elif any(norms.values()):
        name = next(name for name in norms if norms[name])
        raise ValueError(
            f"{path}: {name} norms what fc takes, and use_aux_hidden_state is false; correct one"
        )
    embedding = "embed_tokens.weight" if "embed_tokens.weight" in tensors else ""
    lm_head = "lm_head.weight"
    if vocab == model.vocab_size and lm_head not in tensors:
        lm_head = embedding if model.tie_embeddings else ""
    eagle3 = Eagle3Variant(
        aux_layers=aux_layers,
        target_dim=hf.target_hidden_size or model.dim,
        draft_vocab=vocab,
        norm_before_residual=hf.norm_before_residual,
        last_norm=_last_norm(files, hf.norm_output, layer is not None or norms["fc_norm"]),
        embedding=embedding,
        lm_head=lm_head,
        mask_token=_mask_token(path, hf, model.vocab_size) if MASK in tensors else None,
        **norms,
    )
    return EagleConfig(model, "fc.bias" in tensors, hf.draft_sharpness, eagle3)


def _mask_token(path: Path, hf: HFEagle3Head, vocab_size: int) -> int:
    """Return the mask token of P-EAGLE. Raises: ValueError for a missing or impossible one."""
    ids = [hf.mask_token_id, hf.pard_token, hf.ptd_token_id]
    token = next((token for token in ids if token is not None), None)
    if token is None or token >= vocab_size:
        raise ValueError(
            f"{path}: {MASK} makes it a P-EAGLE head, which needs a mask_token_id below vocab_size "
            f"({vocab_size}); it is {token}: use its own config.json"
        )
    return token


def records_of_keys(raw: dict) -> list[tuple[dict, tuple[type, ...]]]:
    """Return the objects in a config.json with the records of the keys that each may have."""
    layer = raw.get("transformer_layer_config")
    flags = raw.get("eagle_config")
    top = (HFArchitecture, HFNestedConfig, HFEagle3Head)
    if not layer:
        top += (HFConfig, HFSwiGLU)
    return [
        (raw, top),
        (layer or {}, (HFArchitecture, HFConfig, HFSwiGLU)),
        (flags or {}, (HFEagle3Head,)),
    ]


def _d2t_size(files: HeadFiles, vocab_size: int) -> int:
    """Return the length of d2t; without it a head drafts the whole vocabulary."""
    if "d2t" in files.readers:
        return files.read("d2t").numel()
    return vocab_size


def _draft_vocab_size(files: HeadFiles, hf: HFEagle3Head, vocab_size: int) -> int:
    """Return the number of tokens that a head drafts. Raises: ValueError for too many."""
    size = hf.draft_vocab_size
    if not size:
        size = _d2t_size(files, vocab_size)
    if size > vocab_size:
        raise ValueError(
            f"{files.path}: draft_vocab_size, or the length of d2t, is {size}, "
            f"and vocab_size {vocab_size}; it must be at most that: correct config.json"
        )
    return size


def _last_norm(files: HeadFiles, output: bool | None, newer: bool) -> str:
    """Return the use of the last norm, by `norm_output`.

    True: the normed output is fed back, as in vLLM, NeMo and speculators; SpecForge norms it
    before the LM head only. False or absent: it is normed before the LM head only; SpecForge
    leaves out the norm where it is false.

    newer: the layout is speculators', or the head has fc_norm
    """
    if output is False and "norm.weight" not in files.readers:
        return "none"
    named = any(name in str(files.config.get("architectures")) for name in FEEDS_NORMED)
    if output and (newer or named or not files.midlayer):
        return "fed"
    return "logits"


def _aux_layers(path: Path, top: HFEagle3Head, flags: HFEagle3Head, layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose inputs a head takes.

    top, flags: the keys at the top and in `eagle_config`
    Raises: ValueError for layers that the target does not have, and for a list that does not
    ascend: vLLM puts the layers in ascending order, others take them as they are listed.
    """
    lists = [  # the ids, and their distance to the layer whose input is meant
        (top.eagle_aux_hidden_state_layer_ids, 0),
        (flags.eagle_aux_hidden_state_layer_ids, 1),
        (top.target_layer_ids, 1),
        (flags.target_layer_ids, 1),
    ]
    choices = {tuple(i + shift for i in ids) for ids, shift in lists if ids}
    if len(choices) > 1:
        twice = " and ".join(map(str, sorted(choices)))
        raise ValueError(
            f"{path}: the target's layers are named twice, as inputs {twice}; keep one list"
        )
    if choices:
        aux_layers = choices.pop()
        default = ""
    else:
        aux_layers = (2, layers // 2, layers - 3)
        default = " (the default, since none are named)"
    ascending = list(aux_layers) == sorted(set(aux_layers))
    if not ascending or not 0 <= aux_layers[0] <= aux_layers[-1] <= layers:
        listed = ", ".join(map(str, aux_layers))
        raise ValueError(
            f"{path}: the head takes the inputs of the target's layers {listed}{default}, which "
            f"must ascend from 0 to {layers} ({layers}: the last one's output); use its own "
            "target, or name others in eagle_aux_hidden_state_layer_ids"
        )
    return aux_layers
