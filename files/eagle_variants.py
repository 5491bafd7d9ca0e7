"""Heads of EAGLE-3 in all layouts: further norms, own embeddings, P-EAGLE.

`read_eagle3` makes an `Eagle3Variant` of keys and tensors, and `VariantHead` the modules. The
official layout is that where all of `Eagle3Variant` is as by default.
Not here: names of tensors (files/heads.py), the drafter of P-EAGLE (drafts/parallel_eagle.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from eagle_draft import Eagle3, Eagle3Head, EagleConfig
from files.fields import FLAG, TOKEN_ID, integer, key, naming, read_fields
from files.head_kinds import AUX
from files.heads import MASK, HeadFiles, check_aux_layers, d2t_size
from files.keys import WIDTH
from model import ModelConfig
from options import require
from steps import Columns, Copy, Norm, Project, Rows, Step

# vLLM's and NeMo's names, see `_last_norm`
FEEDS_NORMED = ("Eagle3LlamaForCausalLM", "LlamaEagle3DraftModel")


@dataclass(frozen=True)
class HFEagle3:
    """The keys of config.json that are no fields of `Eagle3Variant`."""

    # False: the head takes the target's last features, and has no fc
    use_aux_hidden_state: bool = key(FLAG, True)
    norm_output: bool | None = key(FLAG, None)


@dataclass(frozen=True)
class Eagle3Variant(Eagle3):
    """The parts of a head in any layout of version 3. Its `aux_layers` may be none.

    Then it takes the target's features, and there is no fc.
    """

    target_dim: int = key(WIDTH, name="target_hidden_size")
    draft_vocab: int = key(integer(1, 2**24), name="draft_vocab_size")
    norm_before_fc: bool = key(FLAG, False)  # a norm over all that fc fuses
    fc_norm: bool = key(FLAG, False)  # a norm over each of them
    # the residual stream begins with the normed hidden state
    norm_before_residual: bool = key(FLAG, False)
    # "logits": the last norm is for the logits only; "fed": also for the hidden state that is fed
    # back; "none": there is no last norm
    last_norm: str = "logits"
    embedding: str = ""  # the tensor of its own embedding; "": the target's
    lm_head: str = "lm_head.weight"  # of its own LM head; "": the target's
    # P-EAGLE: the token of the levels below the first
    mask_token: int | None = key(TOKEN_ID, None, "mask_token_id")


RECORDS = (HFEagle3, Eagle3Variant)  # of keys


def read_eagle3(files: HeadFiles, model: ModelConfig, target: ModelConfig) -> Eagle3Variant:
    """Read the parts of a head. model: its layers. Raises: ValueError for a wrong key."""
    path = files.path
    names = files.held
    sizes = {"target_hidden_size": model.dim, "draft_vocab_size": d2t_size(files, model.vocab_size)}
    with naming(files.where):
        hf = read_fields(files.config, HFEagle3)
        own = read_fields(sizes | files.config, Eagle3Variant, aux_layers=())
    fault = f"{path}: draft_vocab_size, or the length of d2t, is {own.draft_vocab}, and vocab_size "
    fault += f"{model.vocab_size}; it must be at most that: correct config.json"
    require(own.draft_vocab <= model.vocab_size, fault)
    norms = {
        "norm_before_fc": own.norm_before_fc or "input_norm.weight" in names,
        "fc_norm": own.fc_norm or "fc_norm.0.weight" in names,
    }
    aux_layers = ()
    if hf.use_aux_hidden_state:
        by_default = (2, target.n_layers // 2, target.n_layers - 3)
        aux_layers = files.config.get(AUX, by_default)
        told = "" if AUX in files.config else " (the default, since none are named)"
        check_aux_layers(path, aux_layers, target.n_layers, told)
    elif any(norms.values()):
        name = next(name for name in norms if norms[name])
        raise ValueError(
            f"{path}: {name} norms what fc takes, and use_aux_hidden_state is false; correct one"
        )
    embedding = "embed_tokens.weight" if "embed_tokens.weight" in names else ""
    lm_head = "lm_head.weight"
    if own.draft_vocab == model.vocab_size and lm_head not in names:
        lm_head = embedding if model.tie_embeddings else ""
    mask = own.mask_token if MASK in names else None
    if MASK in names and (mask is None or mask >= model.vocab_size):
        raise ValueError(
            f"{path}: {MASK} makes it a P-EAGLE head, which needs a mask_token_id below vocab_size "
            f"({model.vocab_size}); it is {mask}: use its own config.json"
        )
    return replace(
        own,
        aux_layers=aux_layers,
        last_norm=_last_norm(files, hf.norm_output, norms["fc_norm"]),
        embedding=embedding,
        lm_head=lm_head,
        mask_token=mask,
        **norms,
    )


def _last_norm(files: HeadFiles, output: bool | None, fc_norm: bool) -> str:
    """Return the use of the last norm, by `norm_output`.

    True: the normed output is fed back, as in vLLM, NeMo, speculators and with fc_norm; SpecForge
    norms it before the LM head only. False or absent: it is normed before the LM head only;
    SpecForge leaves out the norm where it is false.
    """
    if output is False and "norm.weight" not in files.readers:
        return "none"
    named = any(name in str(files.config.get("architectures")) for name in FEEDS_NORMED)
    newer = fc_norm or "transformer_layer_config" in files.config
    return "fed" if output and (newer or named or not files.midlayer) else "logits"


@dataclass(frozen=True)
class PartNorm(Norm):
    """Norm one of several equal parts of every row of `h`, side by side. dim: of a part"""

    source: str = "h"
    part: int = 0
    parts: int = 1

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        parts = list(rows.h.chunk(self.parts, -1))
        parts[self.part] = getattr(layer, self.name)(parts[self.part])
        return rows.put("h", torch.cat(parts, -1))


class VariantHead(Eagle3Head):
    """A head in any layout of version 3."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        model = config.model
        eagle3 = config.eagle3
        if eagle3.last_norm != "logits":
            self.output_norm = nn.Identity()
        if eagle3.embedding:
            zeros = torch.zeros(model.vocab_size, model.dim)
            self.embedding = nn.Embedding.from_pretrained(zeros)
        if not eagle3.lm_head:
            self.lm_head = None
        if eagle3.mask_token is not None:
            width = len(eagle3.aux_layers) or 1
            self.mask_hidden = nn.Parameter(torch.zeros(width * eagle3.target_dim))

    def make_steps(self) -> None:
        """Make the lists of steps. Writes: inputs, first, last."""
        super().make_steps()
        eagle3 = self.config.eagle3
        dim = self.config.model.dim
        eps = self.config.model.norm_eps
        parts = len(eagle3.aux_layers)
        width = parts * eagle3.target_dim
        inputs: list[Step] = [Columns(eagle3.target_dim if parts else 0)]
        if eagle3.norm_before_fc:
            inputs.append(Norm("input_norm", width, eps, source="h"))
        if eagle3.fc_norm:
            each = [PartNorm(f"fc_norm_{i}", eagle3.target_dim, eps, part=i) for i in range(parts)]
            inputs += [replace(norm, parts=parts) for norm in each]
        if parts:
            inputs.append(Project("fc", width, dim, self.config.fc_bias))
        self.inputs = tuple(inputs)
        if eagle3.norm_before_residual:
            norm, _, *rest = self.first
            self.first = (norm, Copy("normed", "stream"), *rest)
        if eagle3.last_norm == "fed":
            self.last = (Norm("norm", dim, eps),)

    @property
    def official(self) -> dict[str, str]:
        """The official names of the modules beside the layers."""
        eagle3 = self.config.eagle3
        norms = {f"fc_norm_{i}": f"fc_norm.{i}" for i in range(len(eagle3.aux_layers))}
        tied = {"lm_head": eagle3.lm_head, "embedding": eagle3.embedding}
        further = {name: tensor.removesuffix(".weight") for name, tensor in tied.items()}
        return super().official | norms | further | {"input_norm": "input_norm", "norm": "norm"}

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        masks = {MASK: (MASK,)} if self.config.eagle3.mask_token is not None else {}
        return super().weight_names() | masks
