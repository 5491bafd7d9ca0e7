"""Gemma 4: heads of two widths, values with a norm, caches that layers share, inputs of each layer.

1. Most layers see the last 512 or 1,024 tokens, and have heads of 256. The others see all tokens,
   and have heads of 512, RoPE on a quarter of them, and in some models keys that are values, too.
2. The last layers of E2B and E4B read keys and values of the last layer of their kind before them.
3. E2B and E4B have an embedding for every layer, which a gate of the residual stream lets in.
4. 26B-A4B has experts beside a dense feed-forward.

Source: transformers 5.24, models/gemma4. Not here: pictures, sound; the assistant models
(drafts/assistant_draft.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from files.fields import (
    FLAG,
    OBJECT,
    given,
    integer,
    key,
    only,
    positive,
    read_fields,
    translated,
)
from files.gguf_names import LAYER, GgufLayout
from files.keys import (
    EXPERTS,
    FULL,
    KINDS,
    SHARE,
    SLIDING,
    WIDTH,
    HFConfig,
    check_layer_types,
    common_fields,
    layers_of,
    rope_parameters,
)
from files.mixtral import counts
from files.renames import Readers, rename_ends, split_experts
from model import Rope
from models.gemma3 import Gemma3, ropes_of, with_rope
from models.steps import (
    AddShared,
    EachPartNorm,
    GatePerLayer,
    GeluGate,
    HeadNorm,
    KeysAsValues,
    LookUp,
    RotateQueries,
    Scale,
    ScoredRoute,
    WindowAttend,
)
from steps import Add, Copy, Merge, Norm, Project, Rotate, Step


@dataclass(frozen=True)
class Gemma4(Gemma3):
    """The settings of Gemma 4 beside Gemma 3's; head_dim and n_kv_heads are of the windows."""

    global_head_dim: int = 512  # global_head_dim: of the layers that see all
    global_kv_heads: int = 1  # num_global_key_value_heads
    expert_dim: int = 0  # moe_intermediate_size
    keys_as_values: bool = False  # attention_k_eq_v: in the layers that see all
    shared_layers: int = 0  # num_kv_shared_layers: the last ones, which read others' caches
    wide_ffn: bool = False  # use_double_wide_mlp: twice ffn_dim in these
    per_layer_dim: int = 0  # hidden_size_per_layer_input; 0: there are no inputs of each layer
    per_layer_vocab: int = 0  # vocab_size_per_layer_input
    softcap: float = 0.0  # final_logit_softcapping; 0: none

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return super().names | {
            "wqk": ("self_attn.q_proj", "self_attn.k_proj"),
            "wq": ("self_attn.q_proj",),
            "layer_scale": ("layer_scalar",),
            "per_layer_embedding": ("embed_tokens_per_layer",),
            "per_layer_model": ("per_layer_model_projection",),
            "per_layer_norm": ("per_layer_projection_norm",),
            "per_layer_gate": ("per_layer_input_gate",),
            "per_layer_out": ("per_layer_projection",),
            "post_per_layer_norm": ("post_per_layer_input_norm",),
            "router_norm": ("router.scale",),
            "router": ("router.proj",),
            "post_ffn_norm_1": ("post_feedforward_layernorm_1",),
            "ffn_norm_2": ("pre_feedforward_layernorm_2",),
            "post_ffn_norm_2": ("post_feedforward_layernorm_2",),
            "experts.expert_w13": ("experts.{}.gate_proj", "experts.{}.up_proj"),
            "experts.expert_w2": ("experts.{}.down_proj",),
        }

    @property
    def ropes(self) -> tuple[Rope, ...]:
        far = Rope(self.global_head_dim, self.rope_theta, self.rope_scaling)
        return (far, Rope(self.head_dim, self.local_theta, self.local_scaling))

    @property
    def logit_cap(self) -> float:
        return self.softcap

    @property
    def unused(self) -> tuple[str, ...]:
        """The beginnings of names of tensors that files hold and no layer reads."""
        parts = ("k_proj.", "v_proj.", "k_norm.")
        shared = range(self.n_layers - self.shared_layers, self.n_layers)
        return tuple(f"model.layers.{i}.self_attn.{part}" for i in shared for part in parts)

    def ignores(self, name: str) -> bool:
        return name.startswith(self.unused)

    def kv_shape(self, i: int) -> tuple[int, int]:
        if i in self.sliding_layers:
            return self.n_kv_heads, self.head_dim
        return self.global_kv_heads, self.global_head_dim

    def kv_source(self, i: int) -> int:
        own = self.n_layers - self.shared_layers
        if i < own:
            return i
        slides = i in self.sliding_layers
        return max(j for j in range(own) if (j in self.sliding_layers) == slides)

    def first(self) -> tuple[Step, ...]:
        """Return the steps that make the inputs of the layers, sqrt(2) times as large as Google's.

        Norms divide both by their size. Their eps stands for the factor that is left out.
        """
        if not self.per_layer_dim:
            return ()
        width = self.n_layers * self.per_layer_dim
        scale = self.rounded(math.sqrt(self.per_layer_dim))
        return (
            LookUp("per_layer_embedding", self.per_layer_vocab, width, scale, to="shared"),
            Project("per_layer_model", self.dim, width),
            EachPartNorm(
                "per_layer_norm",
                self.per_layer_dim,
                self.norm_eps * self.dim,
                source="h",
                parts=self.n_layers,
            ),
            AddShared(),
            Copy("h", "per_layer"),
        )

    def layer(self, i: int) -> tuple[Step, ...]:
        return (
            self.norm("attention_norm"),
            *self.attention_of(i),
            self.norm("post_attention_norm", "h"),
            Add(),
            self.norm("ffn_norm"),
            *self.feed_forward_of(i),
            *(self.experts() if self.n_experts else ()),
            self.norm("post_ffn_norm", "h"),
            Add(),
            *(self.per_layer() if self.per_layer_dim else ()),
            Scale("layer_scale"),
        )

    def norm(self, name: str, source: str = "stream") -> Norm:
        return Norm(name, self.dim, self.norm_eps, source=source)

    def attention_of(self, i: int) -> tuple[Step, ...]:
        """Return the steps of attention in layer i."""
        slides = i in self.sliding_layers
        is_shared = self.kv_source(i) != i
        kv_heads, head_dim = self.kv_shape(i)
        width = self.n_heads * head_dim
        keys = kv_heads * head_dim
        heads = (self.n_heads, 0 if is_shared else kv_heads, head_dim)
        rotate = RotateQueries if is_shared else Rotate
        if is_shared:
            project = (Project("wq", self.dim, width, self.qkv_bias),)
        elif self.keys_as_values and not slides:
            project = (
                Project("wqk", self.dim, width + keys, self.qkv_bias),
                KeysAsValues(self.n_heads, kv_heads, head_dim),
            )
        else:
            project = (Project("wqkv", self.dim, width + 2 * keys, self.qkv_bias),)
        return (
            *project,
            HeadNorm(*heads, self.norm_eps, values=not is_shared),
            rotate(*heads, rope=1 if slides else 0),
            WindowAttend(1.0, self.window if slides else 0, shared=is_shared),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
        )

    def feed_forward_of(self, i: int) -> tuple[Step, ...]:
        """Return the steps of GeGLU in layer i."""
        width = self.ffn_dim
        if self.wide_ffn and self.kv_source(i) != i:
            width = 2 * width
        return (
            Project("w13", self.dim, 2 * width),
            GeluGate(),
            Project("w2", width, self.dim, row_parallel=True),
        )

    def experts(self) -> tuple[Step, ...]:
        """Return the steps of the experts beside the dense feed-forward, and of their sum."""
        count = self.n_experts
        width = self.expert_dim
        route = ScoredRoute(
            self.dim,
            count,
            self.experts_per_token,
            source="normed",
            score_scale=self.dim**-0.5,
            expert_scale=True,
        )
        return (
            self.norm("post_ffn_norm_1", "h"),
            Copy("h", "shared"),
            Norm("router_norm", self.dim, self.norm_eps, to="normed"),
            self.norm("ffn_norm_2"),
            route,
            Project("expert_w13", self.dim, 2 * width, experts=count),
            GeluGate(),
            Project("expert_w2", width, self.dim, experts=count, row_parallel=True),
            Merge(),
            self.norm("post_ffn_norm_2", "h"),
            AddShared(),
        )

    def per_layer(self) -> tuple[Step, ...]:
        """Return the steps that add the layer's own input."""
        return (
            Project("per_layer_gate", self.dim, self.per_layer_dim, source="stream"),
            GatePerLayer(self.per_layer_dim),
            Project("per_layer_out", self.per_layer_dim, self.dim),
            Norm("post_per_layer_norm", self.dim, 2 * self.norm_eps, source="h"),
            Add(),
        )

    def last(self) -> tuple[Step, ...]:
        return (self.norm("norm"),)


# ------------------------------------------------------------------------------------- config.json

# what transformers takes where config.json leaves out a key
DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
COUNT = integer(1, 2**20)
# names that are not as in other models -> such as others have
BARE = {
    ".layer_scalar": ".layer_scalar.weight",
    ".router.scale": ".router.scale.weight",
    ".router.per_expert_scale": ".router.proj.expert_scale",
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class HFGemma4:
    """The further keys of config.json."""

    hidden_activation: str = key(only("gelu_pytorch_tanh"), "gelu_pytorch_tanh")
    window: int = key(integer(1, 2**31 - 1), 512, "sliding_window")
    rope_local_base_freq: float = key(positive(1e30), 10000.0)  # (ours) of a GGUF file
    layer_types: list | None = key(KINDS, None)
    global_head_dim: int = key(integer(2, 2**16), 512)
    num_global_key_value_heads: int | None = key(WIDTH, None)
    per_layer_config: dict | None = key(OBJECT, None)  # the same two, by layer
    keys_as_values: bool = key(FLAG, False, "attention_k_eq_v")
    shared_layers: int = key(integer(0, 2**20), 0, "num_kv_shared_layers")
    wide_ffn: bool = key(FLAG, False, "use_double_wide_mlp")
    per_layer_dim: int = key(integer(0, 2**20), 256, "hidden_size_per_layer_input")
    vocab_size_per_layer_input: int | None = key(integer(1, 2**24), None)  # vocab_size
    final_logit_softcapping: float | None = key(positive(1e6), None)
    use_bidirectional_attention: str | None = key(only("vision"), None)
    enable_moe_block: bool = key(FLAG, False)
    num_experts: int | None = key(EXPERTS, None)
    top_k_experts: int | None = key(EXPERTS, None)
    moe_intermediate_size: int | None = key(WIDTH, None)
    # (ours) false of a GGUF file, as in llama.cpp
    rounds_scale: bool = key(FLAG, True, "rounds_scale")


@dataclass(frozen=True)
class HFHeads:
    """The keys of a layer in per_layer_config."""

    head_dim: int | None = key(integer(2, 2**16), None)
    num_key_value_heads: int | None = key(WIDTH, None)


@dataclass(frozen=True)
class HFProportional:
    """The keys of RoPE that turns the first pairs of a head alone."""

    partial_rotary_factor: float = key(SHARE, 1.0)
    factor: float = key(positive(1e6), 1.0)
    rope_theta: float = key(positive(1e30), 1e6)


def read_config(raw: dict, architecture: str) -> Gemma4:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    without_inputs = raw.get("hidden_size_per_layer_input", 256) is None
    raw = given(raw, DEFAULTS)
    if without_inputs:
        raw["hidden_size_per_layer_input"] = 0
    hf = read_fields(raw, HFConfig)
    own = read_fields(raw, HFGemma4)
    kinds = kinds_of(own, hf.num_hidden_layers)
    heads = global_heads(hf, own, kinds)
    if heads.head_dim % 2 or hf.num_attention_heads % heads.num_key_value_heads:
        raise ValueError(
            f"of the layers that see all, head_dim must be even, and the heads of keys must divide "
            f"num_attention_heads ({hf.num_attention_heads}); they are {heads.head_dim} and "
            f"{heads.num_key_value_heads}"
        )
    far, local = ropes_of(hf, own)
    if not hf.rope_parameters:
        far = PROPORTIONAL | far
    theta, scaling = far_rope(hf, far, heads.head_dim)
    fields = common_fields(with_rope(hf, local))
    local_theta = fields["rope_theta"]
    local_scaling = fields["rope_scaling"]
    return Gemma4(
        **fields | {"rope_theta": theta, "rope_scaling": scaling},
        **experts_of(own),
        **translated(own),
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        query_scale=1.0,
        local_theta=local_theta,
        local_scaling=local_scaling,
        sliding_layers=layers_of(SLIDING, kinds, hf.num_hidden_layers),
        global_head_dim=heads.head_dim,
        global_kv_heads=heads.num_key_value_heads,
        per_layer_vocab=own.vocab_size_per_layer_input or hf.vocab_size,
        softcap=own.final_logit_softcapping or 0.0,
    )


def rename(readers: Readers, raw: dict) -> Readers:
    """Name the matrices of experts one by one, and what has no module as the weight of one."""
    return split_experts(rename_ends(readers, BARE), raw)


def kinds_of(own: HFGemma4, layers: int) -> list[str]:
    """Return the kind of every layer. Raises: ValueError for lists that contradict other keys."""
    kinds = own.layer_types
    if kinds is None:
        kinds = [FULL if i % 6 == 5 or i == layers - 1 else SLIDING for i in range(layers)]
    check_layer_types(kinds, layers)
    if kinds[-1] != FULL:
        raise ValueError(f"layer_types must end with {FULL}; it ends with {kinds[-1]}")
    of_their_own = set(kinds[: layers - own.shared_layers])
    if own.shared_layers >= layers or of_their_own != set(kinds):
        raise ValueError(
            f"num_kv_shared_layers must leave layers of each kind that it shares, of {layers}; "
            f"it is {own.shared_layers}"
        )
    return kinds


def global_heads(hf: HFConfig, own: HFGemma4, kinds: list[str]) -> HFHeads:
    """Return the heads of the layers that see all.

    transformers writes them by layer. Raises: ValueError where these layers differ.
    """
    kv_heads = None
    if own.keys_as_values:
        kv_heads = own.num_global_key_value_heads
    default = HFHeads(own.global_head_dim, kv_heads or hf.num_key_value_heads)
    if own.per_layer_config is None:
        return default
    of_kind = {}
    for i, kind in enumerate(kinds):
        named = read_fields(own.per_layer_config.get(str(i)) or {}, HFHeads)
        kv_heads = named.num_key_value_heads or hf.num_key_value_heads
        heads = HFHeads(named.head_dim or hf.head_dim, kv_heads)
        if of_kind.setdefault(kind, heads) != heads:
            raise ValueError(f"per_layer_config must have one form of heads for all {kind} layers")
    if of_kind.get(SLIDING) not in (None, HFHeads(hf.head_dim, hf.num_key_value_heads)):
        raise ValueError(f"per_layer_config must leave {SLIDING} layers as they are")
    return of_kind[FULL]


def far_rope(hf: HFConfig, far: dict, head_dim: int) -> tuple[float, dict | None]:
    """Return theta and scaling of the layers that see all. Raises: ValueError for a bad value."""
    if far.get("rope_type") != "proportional":
        return rope_parameters(with_rope(hf, far))
    keys = read_fields(far, HFProportional)
    pairs = int(keys.partial_rotary_factor * head_dim // 2)
    scaling = {"rope_type": "proportional", "pairs": pairs, "factor": float(keys.factor)}
    return float(keys.rope_theta), scaling


def experts_of(own: HFGemma4) -> dict[str, Any]:
    """Return the fields of experts; none for a dense model. Raises: ValueError for missing keys."""
    if not own.enable_moe_block:
        return {}
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    missing = [name for name in names if getattr(own, name) is None]
    if missing:
        raise ValueError(f"enable_moe_block needs the key {missing[0]!r}")
    return counts("num_experts", own.num_experts, own.top_k_experts) | {
        "expert_dim": own.moe_intermediate_size
    }


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key, or lists that contradict each other.
    """
    layers = metadata.size(name("block_count"))
    pattern = metadata.read(name("attention.sliding_window_pattern"), list)
    shared = metadata.read(name("attention.shared_kv_layers"), int, 0)
    kinds = [SLIDING if slides else FULL for slides in pattern]
    if len(kinds) != layers:
        raise ValueError(
            f"{metadata.path}: attention.sliding_window_pattern must name all {layers} layers; it "
            f"names {len(kinds)}"
        )
    kv_heads = by_kind(metadata, name("attention.head_count_kv"), kinds)
    own = ["own" if i < layers - shared else "shared" for i in range(layers)]
    widths = by_kind(metadata, name("feed_forward_length"), own)
    experts = {}
    if metadata.get(name("expert_count")):
        experts = {
            "enable_moe_block": True,
            "num_experts": metadata.size(name("expert_count")),
            "top_k_experts": metadata.size(name("expert_used_count")),
            "moe_intermediate_size": metadata.size(name("expert_feed_forward_length")),
        }
    return experts | {
        "head_dim": metadata.size(name("attention.key_length_swa")),
        "num_key_value_heads": kv_heads[kinds[0]] if SLIDING not in kinds else kv_heads[SLIDING],
        "per_layer_config": {
            str(i): {
                "head_dim": metadata.size(name("attention.key_length")),
                "num_key_value_heads": kv_heads[kind],
            }
            for i, kind in enumerate(kinds)
            if kind == FULL
        },
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths.get("shared") == 2 * widths.get("own", 0),
        "hidden_size_per_layer_input": metadata.read(
            name("embedding_length_per_layer_input"), int, 0
        ),
        "rope_theta": metadata.positive(name("rope.freq_base"), 1e6),
        "rope_local_base_freq": metadata.positive(name("rope.freq_base_swa"), 10000.0),
        "sliding_window": metadata.size(name("attention.sliding_window")),
        "final_logit_softcapping": metadata.get(name("final_logit_softcapping")) or None,
        "rounds_scale": False,
    }


def by_kind(metadata: Any, name: str, kinds: list[str]) -> dict[str, int]:
    """Return the number that layers of each kind have. kinds: of the layers

    Raises: ValueError for layers of one kind that differ.
    """
    numbers = metadata.get(name)
    if type(numbers) is not list:
        return dict.fromkeys(kinds, metadata.size(name))
    found = dict(zip(kinds, numbers))
    if numbers != [found[kind] for kind in kinds] or not all(map(COUNT.holds, numbers)):
        raise ValueError(
            f"{metadata.path}: the metadata {name} must be {COUNT.text} for every layer, and one "
            "for all layers of a kind; use another file"
        )
    return found


def rope_keys(divisors: Tensor) -> dict[str, Any]:
    """Return the keys of RoPE by `rope_freqs.weight`: pairs that turn, then pairs that do not.

    Raises: ValueError for other divisors.
    """
    pairs = int((divisors == 1).sum())
    if not pairs or (divisors[:pairs] != 1).any() or (divisors[pairs:] < 1e29).any():
        raise ValueError("rope_freqs.weight must be ones, and then 1e30")
    far = PROPORTIONAL | {"partial_rotary_factor": pairs / len(divisors)}
    return {"rope_parameters": {FULL: far, SLIDING: {}}}


GGUF = GgufLayout(
    layer=LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "layer_output_scale": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    mixture={
        "ffn_gate_inp": "router.proj",
        "ffn_gate": "experts.{}.gate_proj",
        "ffn_up": "experts.{}.up_proj",
        "ffn_down": "experts.{}.down_proj",
    },
    beside={
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    changed={
        "ffn_gate_inp.scale": ("router.scale.weight", lambda x: x),
        "ffn_down_exps.scale": ("router.proj.expert_scale", lambda x: x),
    },
    by_layer=True,
    keys=gguf_keys,
    rope_keys=rope_keys,
)
