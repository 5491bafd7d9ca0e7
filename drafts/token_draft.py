"""Medusa's and Hydra's heads: one head per level of a tree, over the target's last feature.

1. Medusa: head i predicts the token i + 2 places behind the feature, whatever lies between. It is
   residual blocks x + SiLU(W x + b). All levels follow at once (`LevelDrafter`), so nothing runs
   while the tree grows.
2. Hydra: head i sees the feature and the embeddings of the i + 1 tokens behind it, side by side.
   Its first block maps them to the width of a feature by R x + SiLU(W x). The output of a node is
   the input of its children's head, so its width gives the level; a node only concatenates.
3. Hydra++ adds a layer of causal attention over the text's features (prefix attention). The heads
   then take its last output in place of the feature, and `extend` fills its cache.
4. Modules have the official names, those of `medusa_lm_head` and `hydra_lm_head` files. The weights
   decide the number of heads and what LM heads they have: heads without any score with the
   target's, Medusa's where config.json says version 2, Hydra's where it says `hydra_lm_head` is
   `target` (ours).

Sources: the papers and the official code of Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109).
Not here: typical acceptance, which changes the output; Hydra's heads with attention among drafted
tokens (the official `cross-attn` and `eagle-attn`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_tree import MAX_NODES, DynamicTree, Frontier, StaticTree
from drafters import DrafterUpdate, DraftInputs, DraftState, TreeDrafter
from drafts.level_draft import LevelDrafter, last_of, tree_of
from eagle_draft import fill
from files.checkpoint import TensorSource, WeightFiles, with_codes
from files.fields import TEXT, Rule, integer, key, naming, only, positive, read_fields
from files.head_kinds import head_kind
from files.heads import check_sizes, note_keys
from kv_cache import Window, causal_window
from model import Layer, ModelConfig, Transformer, layer_names, run_layers, windows_of
from options import log_note, require
from quantize import Linear, Quantization
from reference import TORCH, Backend
from run.heads import draft_lm_head
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig
from runtime import replace_fields
from steps import Rows, add_modules, run_steps

COUNT = integer(1, MAX_NODES - 1)
TRUE = Rule("true: heads that are not grounded are Medusa's", lambda v: v is True)
ZERO = Rule("0: other layers' features are not supported", lambda v: type(v) is int and v == 0)
# tensors that may stay unused: the target's embedding, which is a module of the official heads
UNUSED = ("input_embed_fn.", "prefix_embeding_layer.embed_tokens.")
PREFIX = "prefix_embeding_layer.layers.0."


# ---------------------------------------------------------------------------------- the files


@dataclass(frozen=True)
class MedusaConfig:
    """The config of Medusa's heads."""

    model: ModelConfig  # a layer of the target's shape: its width F and vocabulary V are theirs
    heads: int = key(COUNT, name="medusa_num_heads")  # D, drafted levels
    layers: int = key(COUNT, 1, "medusa_num_layers")  # of a head
    version: str | None = key(TEXT, None)  # "2": heads without LM heads
    sharpness: float = key(positive(1e6), 1.0, "draft_sharpness")  # ours, as of EAGLE heads
    own_lm_heads: bool = True  # False: the target's
    prefix = False
    first = "0.0.linear.weight"  # the official name of the first weight

    def lm_head_name(self, head: int) -> str:
        """Return the official name of the weight of a head's LM head."""
        return f"{head}.{self.layers}.weight"


@dataclass(frozen=True)
class HydraConfig:
    """The config of Hydra's heads."""

    model: ModelConfig  # as Medusa's
    heads: int = key(COUNT, name="hydra_num_heads")
    grounded_heads: bool = key(TRUE)  # officially false where it is missing
    layers: int = key(COUNT, 1, "hydra_num_layers")
    hydra_head_arch: str = key(only("mlp", "prefix-mlp"), "mlp")
    hidden_state_offset: int = key(ZERO, 0)
    hydra_lm_head: str = key(only("own", "target"), "own")  # ours
    dropout_rate: float | None = key(positive(1.0), None)  # of training
    sharpness: float = key(positive(1e6), 1.0, "draft_sharpness")  # ours
    own_lm_heads: bool = True  # False: the target's

    @property
    def prefix(self) -> bool:
        """Return whether a layer of attention is before the heads: Hydra++."""
        return self.hydra_head_arch == "prefix-mlp"

    @property
    def first(self) -> str:
        """The official name of the first weight."""
        return f"hydra_mlp.0.{int(self.prefix)}.linear.weight"

    def lm_head_name(self, head: int) -> str:
        """Return the official name of the weight of a head's LM head."""
        return f"hydra_lm_head.{head}.{'1.' * self.prefix}weight"


def read_token_heads(
    files: TensorSource, kind: str, target: ModelConfig
) -> MedusaConfig | HydraConfig:
    """Read the config of heads of the kind medusa or hydra, and check it against the target.

    Raises: ValueError for a wrong key, heads of another target, or missing LM heads.
    """
    record = MedusaConfig if kind == "medusa" else HydraConfig
    with naming(files.path / "config.json"):
        config = read_fields(files.config, record, model=replace(target, n_layers=1))
    config = replace(config, heads=_count(files, kind, config.heads))
    fault = (
        f"{files.path}: a prefix layer has the target's shape, and the target is a mixture of "
        "experts; use heads of hydra_head_arch mlp"
    )
    require(not (config.prefix and target.n_experts), fault)
    lm_heads = list(map(config.lm_head_name, range(config.heads)))
    missing = [name for name in lm_heads if name not in files.held]
    if kind == "medusa":  # some of version 2 have LM heads all the same
        shares = config.version == "2" and len(missing) == len(lm_heads)
    else:
        shares = config.hydra_lm_head == "target"
    fault = (
        f"{files.path}: the LM heads {', '.join(missing)} are missing; download them again, or "
        'say in config.json that heads use the target\'s (medusa: "version": "2")'
    )
    require(shares or not missing, fault)
    vocab_size = target.vocab_size if shares else files.shape(lm_heads[0])[0]
    if config.first in files.held:  # else its absence is reported with those of others
        check_sizes(files.path, files.shape(config.first)[0], vocab_size, target)
    note_keys(files.path, files.config, (record,), {})
    return replace(config, own_lm_heads=not shares)


def _count(files: TensorSource, kind: str, said: int) -> int:
    """Return the number of heads in the weights.

    The official config of Medusa's Vicuna heads says 2, and the weights are 5.
    Raises: ValueError for fewer than config.json says.
    """
    prefix = "hydra_mlp." if kind == "hydra" else ""
    numbers = {
        name.removeprefix(prefix).split(".")[0] for name in files.held if name.startswith(prefix)
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


# ---------------------------------------------------------------------------------- the modules


class Block(nn.Module):
    """A residual block, which may make its inputs narrower: [..., inputs] -> [..., F]."""

    def __init__(self, inputs: int, dim: int):
        super().__init__()
        self.linear = Linear(inputs, dim)
        self.res_connection = nn.Identity() if inputs == dim else Linear(inputs, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Medusa's heads. With LM heads of their own they return scores: [..., F] -> [..., V]."""

    vocab = None  # all tokens are drafted

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        dim = config.model.dim
        self.heads = nn.ModuleList()  # names of files begin with the number of a head
        for _ in range(config.heads):
            blocks = [Block(dim, dim) for _ in range(config.layers)]
            if config.own_lm_heads:
                blocks.append(Linear(dim, config.model.vocab_size, False, fp32_out=True))
            self.heads.append(nn.Sequential(*blocks))

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        """Return our parameter's name -> the official tensors."""
        return {name: (name.removeprefix("heads."),) for name, _ in self.named_parameters()}


class HydraHeads(nn.Module):
    """Hydra's heads, and the prefix layer of Hydra++, whose heads have a dropout before a block."""

    vocab = None  # all tokens are drafted
    backend: Backend = TORCH  # as the target's

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.config = config
        dim = config.model.dim
        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        for level in range(config.heads):
            widths = [(level + 2) * dim] + [dim] * (config.layers - 1)
            self.hydra_mlp.append(self.dropped(*(Block(width, dim) for width in widths)))
            if config.own_lm_heads:
                lm_head = Linear(dim, config.model.vocab_size, fp32_out=True)
                self.hydra_lm_head.append(self.dropped(lm_head) if config.prefix else lm_head)
        if config.prefix:
            self.prefix_embeding_layer = nn.Module()
            self.prefix_embeding_layer.layers = nn.ModuleList([Layer(config.model.layer(0))])
            add_modules(self.prefix_embeding_layer, config.model.last())

    def dropped(self, *parts: nn.Module) -> nn.Sequential:
        """Join modules, each behind the place of its dropout, if there are such."""
        places = ([nn.Identity()] if self.config.prefix else []) + [None]
        return nn.Sequential(*(place or part for part in parts for place in places))

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        """Return our parameter's name -> the official tensors."""
        names = {name: (name,) for name, _ in self.named_parameters()}
        if self.config.prefix:
            model = self.config.model
            names |= layer_names(PREFIX, PREFIX, model.layer(0), model.names)
        return names

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of a level's LM head: [..., (i + 2) F] -> [..., F], level i."""
        return self.hydra_mlp[self.level(x)](x)

    def level(self, x: Tensor) -> int:
        """Return the level of a node's children by the width of its output."""
        return x.shape[-1] // self.config.model.dim - 2

    def attend(self, features: Tensor, positions: Tensor, cache: Any, window: Any) -> Tensor:
        """Run the prefix layer. Writes: the cache at `window.slots`.

        features: [B, T, F]; positions: [B, T] int64
        Returns: [B, T, F].
        """
        windows = windows_of((), window, self.backend)
        rows = Rows(features, ropes=self.ropes(positions), windows=windows)
        prefix = self.prefix_embeding_layer
        rows, _ = run_layers(prefix.layers, rows, cache)
        return run_steps(self.config.model.last(), prefix, rows).h


Heads = MedusaHeads | HydraHeads


# ---------------------------------------------------------------------------------- the drafters


class TokenDrafter(TreeDrafter):
    """Drafts static or dynamic trees with `Heads`."""

    def __init__(
        self,
        heads: Heads,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        lm_head: nn.Module | None = None,
        **options: Any,
    ):
        """Attach heads to a target.

        lm_head: of heads without their own; default: the target's
        options: children and sharpness, as for `TreeDrafter`
        """
        super().__init__(target, tree, **{"sharpness": heads.config.sharpness} | options)
        self.heads = heads
        self.levels = heads.config.heads
        self.layers = heads.prefix_embeding_layer.layers if heads.config.prefix else None
        self.target = target
        self.embedding = target.embedding
        self.lm_head = lm_head or target.lm_head

    def init(self, batch: int, slots: int) -> DraftState:
        """Make an empty state, with the cache of a prefix layer if there is one."""
        layer = self.heads.config.model if self.heads.config.prefix else None
        return DraftState.empty(batch, self.target.norm.weight, layer, slots)

    def extend(self, state: DraftState, update: DrafterUpdate) -> DraftState:
        """Keep the last feature, or a prefix layer's output. Writes: the layer's slots."""
        rows = update.features
        if self.heads.config.prefix:
            window = causal_window(state.length, rows.shape[1], backend=self.backend)
            rows = self.heads.attend(rows, window.slots, state.cache, window)
        hidden = last_of(rows, update.count, state.hidden)
        return replace_fields(state, length=state.length + update.count, hidden=hidden)


class MedusaDrafter(TokenDrafter, LevelDrafter):
    """Drafts with `MedusaHeads`."""

    def level_scores(self, state: DraftState, inputs: DraftInputs) -> Tensor:
        levels = [head(state.hidden) for _, head in zip(range(self.tree.depth), self.heads.heads)]
        x = torch.cat(levels, 1)  # [B, D, F], or of LM heads [B, D, V]
        return x if self.heads.config.own_lm_heads else self.lm_head(x)


class HydraDrafter(TokenDrafter):
    """Drafts with `HydraHeads`."""

    def root_output(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(inputs.text.root[:, None])
        rows = torch.cat((state.hidden, embedded.to(state.hidden.dtype)), -1)  # [B, 1, 2F]
        return rows, state.length

    def forward_nodes(
        self, state: Any, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        index = frontier.parent[:, :, None].expand(-1, -1, out.shape[2])
        embedded = self.embedding(frontier.tokens)
        return torch.cat((out.gather(1, index), embedded.to(out.dtype)), -1)  # [B, R, F more]

    def logits(self, out: Tensor, level: int) -> Tensor:
        x = self.heads(out)  # [B, R, F]
        if not self.heads.config.own_lm_heads:
            return self.lm_head(x)
        return self.heads.hydra_lm_head[self.heads.level(out)](x)


def load_heads(path: Path, target: Transformer, quant: Quantization | None = None) -> Heads:
    """Load heads of either kind for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    Raises: ValueError for heads of another target, or broken files.
    """
    files = with_codes(WeightFiles(path))
    config = read_token_heads(files, head_kind(path), target.config)
    with torch.device("meta"):
        heads = (MedusaHeads if isinstance(config, MedusaConfig) else HydraHeads)(config)
    quant = files.quant or quant
    fill(heads, target, files, heads.weight_names(), quant, is_unused)
    return heads


def drafter_of(
    heads: Heads, target: Transformer, tree: DynamicTree | StaticTree, *more: Any, **options: Any
) -> TokenDrafter:
    """Make the drafter of heads. Operands are those of `TokenDrafter`."""
    kind = MedusaDrafter if isinstance(heads, MedusaHeads) else HydraDrafter
    return kind(heads, target, tree, *more, **options)


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft medusa` or hydra. Raises: ValueError for heads or a tree that do not fit."""
    path = Path(config.head)
    quant = Quantization.of(config.quant_draft, config.group_size)
    heads = load_heads(path, target, quant)
    tree = tree_of(config, heads.config.heads, path)
    lm_head = None if heads.config.own_lm_heads else draft_lm_head(target, quant)
    return method_of(drafter_of(heads, target, tree, lm_head, children=config.child_rule))
