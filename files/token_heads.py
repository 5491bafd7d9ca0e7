"""Read the files of Medusa's and Hydra's heads: one head per drafted level.

1. `read_token_heads` makes a `TokenHeads` of config.json and of the tensors' names, and checks that
   the heads fit the target. The weights decide the number of heads and what LM heads they have.
2. `TokenHeads.names` maps each of our parameters to the tensors it is made of.

Layouts: `medusa_lm_head.pt` or .safetensors (`i.j.linear.weight`, head i's LM head `i.L.weight`);
`hydra_lm_head.pt` (`hydra_mlp.i.j.linear.weight` and `.res_connection.`, `hydra_lm_head.i.`). In
`prefix-mlp` heads of Hydra each layer has a dropout before it, which takes a number of its own.
Heads without LM heads score with the target's: Medusa's where config.json says version 2, Hydra's
where it says `hydra_lm_head` is `target` (ours).
Sources: the official code of Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109).
Not here: modules (drafts/token_draft.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from draft_tree import MAX_NODES
from files.checkpoint import TensorSource
from files.fields import TEXT, Rule, integer, key, naming, only, positive, read_fields
from files.heads import check_sizes, note_keys
from model import ModelConfig, layer_names
from options import log_note, require

COUNT = integer(1, MAX_NODES - 1)
TRUE = Rule("true: heads that are not grounded are Medusa's", lambda v: v is True)
ZERO = Rule("0: other layers' features are not supported", lambda v: type(v) is int and v == 0)
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
    """The shape of Medusa's or Hydra's heads, and the names of their tensors."""

    kind: str  # medusa or hydra
    heads: int  # D, drafted levels
    layers: int  # of a head
    model: ModelConfig  # a layer of the target's shape: its width F and vocabulary V are theirs
    own_lm_heads: bool  # False: the target's
    sharpness: float = 1.0  # c in log softmax(c z), see drafters.py
    prefix: bool = False  # Hydra++: that layer, of attention, is before the heads

    def layer_name(self, head: int, layer: int) -> str:
        """Return the beginning of the official names of a head's layer."""
        if self.kind == "medusa":
            return f"{head}.{layer}."
        place = 2 * layer + 1 if self.prefix else layer
        return f"hydra_mlp.{head}.{place}."

    def lm_head_name(self, head: int) -> str:
        """Return the beginning of the official names of a head's LM head."""
        if self.kind == "medusa":
            return f"{head}.{self.layers}."
        return f"hydra_lm_head.{head}.1." if self.prefix else f"hydra_lm_head.{head}."

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return our parameter's name -> the official tensors.

        Joined are the first layers of all of Medusa's heads, and the two products of the first
        layer of one of Hydra's, which have the same inputs.
        """
        names = {}
        is_medusa = self.kind == "medusa"
        for part in ("weight", "bias"):
            firsts = [f"{self.layer_name(i, 0)}linear.{part}" for i in range(self.heads)]
            if is_medusa:
                names[f"first.{part}"] = tuple(firsts)
            for i, first in enumerate(firsts):
                if not is_medusa:
                    residual = f"{self.layer_name(i, 0)}res_connection.{part}"
                    names[f"first.{i}.{part}"] = (first, residual)
                for j in range(1, self.layers):
                    names[f"deeper.{i}.{j - 1}.{part}"] = (f"{self.layer_name(i, j)}linear.{part}",)
                if self.own_lm_heads and (part == "weight" or not is_medusa):
                    names[f"lm_heads.{i}.{part}"] = (self.lm_head_name(i) + part,)
        if self.prefix:
            theirs = "prefix_embeding_layer."
            steps = self.model.layer(0)
            names |= layer_names("prefix.0.", f"{theirs}layers.0.", steps, self.model.names)
            names["norm.weight"] = (f"{theirs}norm.weight",)
        return names


def read_token_heads(files: TensorSource, kind: str, target: ModelConfig) -> TokenHeads:
    """Read the shape of heads of the kind medusa or hydra, and check it against the target.

    Raises: ValueError for a wrong key, heads of another target, or missing LM heads.
    """
    record = HFMedusa if kind == "medusa" else HFHydra
    with naming(files.path / "config.json"):
        hf = read_fields(files.config, record)
    heads = _count(files, kind, getattr(hf, f"{kind}_num_heads"))
    shape = TokenHeads(
        kind,
        heads,
        getattr(hf, f"{kind}_num_layers"),
        replace(target, n_layers=1),
        own_lm_heads=True,
        sharpness=hf.draft_sharpness,
        prefix=kind == "hydra" and hf.hydra_head_arch != "mlp",
    )
    fault = (
        f"{files.path}: a prefix layer has the target's shape, and the target is a mixture of "
        "experts; use heads of hydra_head_arch mlp"
    )
    require(not (shape.prefix and target.n_experts), fault)
    lm_heads = [shape.lm_head_name(i) + "weight" for i in range(heads)]
    missing = [name for name in lm_heads if name not in files.readers]
    if kind == "medusa":
        shares = hf.version == "2" and len(missing) == heads
    else:
        shares = hf.hydra_lm_head == "target"
    fault = (
        f"{files.path}: the LM heads {', '.join(missing)} are missing; download them again, or "
        'say in config.json that heads use the target\'s (medusa: "version": "2")'
    )
    require(shares or not missing, fault)
    vocab_size = target.vocab_size if shares else files.read(lm_heads[0]).shape[0]
    first = shape.layer_name(0, 0) + "linear.weight"
    if first in files.readers:  # else its absence is reported with those of others
        check_sizes(files.path, files.read(first).shape[0], vocab_size, target)
    note_keys(files.path, files.config, (record,), {})
    return replace(shape, own_lm_heads=not shares)


def _count(files: TensorSource, kind: str, said: int) -> int:
    """Return the number of heads in the weights.

    The official config of Medusa's Vicuna heads says 2, and the weights are 5.
    Raises: ValueError for fewer than config.json says.
    """
    prefix = "hydra_mlp." if kind == "hydra" else ""
    numbers = {
        name.removeprefix(prefix).split(".")[0] for name in files.readers if name.startswith(prefix)
    }
    held = 0
    while str(held) in numbers:
        held += 1
    says = f"{files.path}: config.json says {kind}_num_heads {said}"
    require(held >= said, f"{says}, and the weights hold {held} heads; download them again")
    if held > said:
        log_note(f"{says}; the weights hold {held} heads, and all of them draft")
    return held


def is_unused(name: str) -> bool:
    """Return whether a tensor may stay unused: the target's embedding, a table of RoPE."""
    return name.startswith(UNUSED) or name.endswith("rotary_emb.inv_freq")
