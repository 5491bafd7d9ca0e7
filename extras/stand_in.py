"""Stand-ins: a small model and its EAGLE head, rewritten as the same function in a larger shape.

    files = inflate_target(Path("checkpoints/demo"), LlamaShape.parse("llama2-7b"))
    target = load_model(files.path, source=files)  # a 7B's memory and time, the demo's tokens

The time of a step depends on a model's shape and not on its numbers. The number of accepted tokens
depends on the numbers. A stand-in has the time of its shape and the acceptance of the small model.
`Placement` describes the construction.
Trade-off: a tensor is computed when it is read, and is not stored. No disk is needed, and every
load computes again.
Not here: writing to disk; EAGLE-3; models with biases; mixtures of experts.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.io import read_json
from hf.checkpoint import TensorSource, WeightFiles, saved_quantization
from hf.config import open_source, read_config
from hf.heads import EagleConfig, version_of
from model import DTYPES, ModelConfig, Transformer
from options import GenerateConfig

# LM head weight of ids beyond the small vocabulary, at the constant channel
NEVER = -4096.0
# upper bounds of sizes in `LlamaShape.parse`; others: 2^20
MOST = {"n_layers": 2**10, "vocab_size": 2**24}

# a method of `Placement`
Writer = Callable[[Tensor, Tensor | None], None]
# the size of a tensor, and the method that writes it
Part = tuple[tuple[int, ...], Writer]


@dataclass(frozen=True)
class LlamaShape:
    """The dimensions of a LLaMA, in model.py's names."""

    name: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int

    @staticmethod
    def parse(text: str) -> LlamaShape:
        """Read `NAME` or `NAME,dim=1024,n_layers=9`. Raises: ValueError for any other text."""
        name, *changes = text.split(",")
        if name not in SHAPES:
            raise ValueError(f"{name} is not a known shape; use one of {', '.join(SHAPES)}")
        sizes = [f.name for f in fields(LlamaShape) if f.name != "name"]
        for change in changes:
            if not re.fullmatch(rf"({'|'.join(sizes)})=[1-9]\d*", change):
                raise ValueError(
                    f"shape {text}: {change!r} must be like n_layers=9; "
                    f"the sizes are {', '.join(sizes)}"
                )
        values = {}
        for change in changes:
            key, _, value = change.partition("=")
            values[key] = int(value)
        for key, value in values.items():
            if value > MOST.get(key, 2**20):
                raise ValueError(
                    f"shape {text}: no model has {key}={value}; choose a smaller shape"
                )
        return replace(SHAPES[name], name=text, **values)


def _shape(
    name: str, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, vocab: int
) -> LlamaShape:
    return LlamaShape(
        name, dim, layers, heads, kv_heads, head_dim=128, ffn_dim=ffn_dim, vocab_size=vocab
    )


# name, width, layers, heads, KV heads, width of the feed-forward, vocabulary
_SHAPES = (
    # 0.47 B in the layers + 0.03 B in the LM head
    _shape("tiny-0.5b", 1024, 24, 8, 4, 5376, 32000),
    # 0.99 B + 0.07 B; TinyLlama with heads of 128
    _shape("tiny-1b", 2048, 22, 16, 4, 5632, 32000),
    _shape("llama2-7b", 4096, 32, 32, 32, 11008, 32000),
    _shape("llama2-13b", 5120, 40, 40, 40, 13824, 32000),
    _shape("llama2-70b", 8192, 80, 64, 8, 28672, 32000),
    _shape("llama3-8b", 4096, 32, 32, 8, 14336, 128256),
    _shape("llama3-70b", 8192, 80, 64, 8, 28672, 128256),
)
SHAPES = {shape.name: shape for shape in _SHAPES}


def check_fit(small: ModelConfig, shape: LlamaShape, where: Path, spare_neurons: int = 0) -> None:
    """Check that `small`, read from `where`, can have this shape.

    spare_neurons: 1 for a head, which needs one more neuron
    Raises: ValueError with the first rule that it breaks.
    """
    if small.qkv_bias or small.o_bias or small.mlp_bias:
        raise ValueError(
            f"{where} has biases in its layers, and only layers without can be inflated; "
            "use another model"
        )
    if small.qk_norm or (small.rope_scaling or {}).get("rope_type") == "yarn":
        raise ValueError(
            f"{where} has norms of queries and keys, or YaRN, which depend on head_dim; "
            "use another model"
        )
    if small.n_experts:
        raise ValueError(
            f"{where} is a mixture of experts, and only dense models can be inflated; "
            "use another model"
        )
    if shape.n_heads % shape.n_kv_heads:
        raise ValueError(
            f"shape {shape.name}: n_kv_heads must divide n_heads; "
            f"{shape.n_kv_heads} does not divide {shape.n_heads}"
        )
    if shape.head_dim % small.head_dim:
        raise ValueError(
            f"shape {shape.name}: head_dim must be a multiple of {where}'s {small.head_dim}; "
            f"it is {shape.head_dim}"
        )
    group = small.n_heads // small.n_kv_heads
    large_group = shape.n_heads // shape.n_kv_heads
    kv_heads = small.n_kv_heads * math.ceil(group / large_group)
    neurons = small.ffn_dim + spare_neurons
    for name, least, reason in (
        ("dim", small.dim + 1, "the width and one channel"),
        ("n_layers", small.n_layers, "every layer"),
        ("n_kv_heads", kv_heads, f"its heads in groups of {large_group}"),
        ("ffn_dim", neurons, "every neuron" + " and one more" * spare_neurons),
        ("vocab_size", small.vocab_size, "every token"),
    ):
        if getattr(shape, name) < least:
            raise ValueError(
                f"shape {shape.name}: {name} must be at least {least}, for {reason} of {where}; "
                f"it is {getattr(shape, name)}: choose a larger shape"
            )


# -------------------------------------------------------------------------------------- placement


@dataclass(frozen=True)
class Placement:
    """The places of the small model's numbers in the large shape; one method per kind of tensor.

    A method gets `out`, full of random numbers (the filler), and `small`, the small model's tensor
    in fp64, or None in a layer that the small model does not have. It writes `out`. (d, e: width
    and head size of the small model; D, E: of the large one.)

    1. Where filler would make a required zero nonzero, its column is set to zero. All other filler
       stays: no product is timed on zero weights.
    2. The residual stream holds the small model in channels 0 .. d-1, a constant C in channel d,
       and zeros above. There RMSNorm's mean is smaller by d/D. A norm weight times sqrt(d/D), and
       eps' = (eps d - C^2) / D, undo that.
    3. RoPE turns the pairs (j, j + E/2). Pair j of the small head becomes pair j E/e, which turns
       as fast, and q is multiplied by sqrt(E/e). Values keep their order. KV heads are repeated
       where the large groups are smaller.
    4. Further heads, further neurons, and the further layers between the small model's compute on
       their actual inputs. Their values and gates are zero, so that they add exactly zero.
    5. Ids beyond the small vocabulary get logits of about -3000 (float16: -300). Their rows of the
       LM head read channel d. The final norm amplifies that channel; in a head, which has no final
       norm, a further neuron of the last layer does.

    Filler is smaller than the largest of the small model's numbers in its row. So plain symmetric
    int8 (scaled by row) and int4 (by 128 inputs) find the same codes; in o_proj, whose heads are E
    apart, those of groups of e.
    In bf16, where D/d and E/e are powers of four, scaling is exact, and C^2 vanishes in the fp32
    sum of a norm. The logits are then equal bit for bit, if the zeros of item 3 change no sum of
    attention. They change none where terms are added one after the other, as in ops/cpu. They
    change some in oneMKL with AVX512-BF16 or AMX, which PyTorch's attention uses on Intel
    processors; there the logits agree up to rounding.
    """

    small: ModelConfig
    shape: LlamaShape
    # True in the last layer of a head, where a further neuron amplifies channel d
    amplifies: bool = False

    @property
    def shrink(self) -> float:
        """The root mean square in the large shape, over that in the small one."""
        return math.sqrt(self.small.dim / self.shape.dim)

    @property
    def constant(self) -> float:
        """C, a power of two.

        Its square is at most a millionth of the term that eps adds to a norm's sum of squares.
        """
        return 2.0 ** (math.floor(math.log2(math.sqrt(self.small.norm_eps * self.small.dim))) - 10)

    @property
    def norm_eps(self) -> float:
        """eps' of all norms."""
        return (self.small.norm_eps * self.small.dim - self.constant**2) / self.shape.dim

    @property
    def copies(self) -> int:
        """Number of large KV heads that repeat a small one."""
        small = self.small
        shape = self.shape
        return math.ceil((small.n_heads // small.n_kv_heads) / (shape.n_heads // shape.n_kv_heads))

    def kv_heads(self) -> Tensor:
        """Return the small KV head that each of the first large ones repeats.

        Returns: [copies * Hkv] int64.
        """
        return torch.arange(self.small.n_kv_heads).repeat_interleave(self.copies)

    def q_heads(self) -> Tensor:
        """Return the large head of each small one, in the group of a copy of its own KV head.

        Returns: [H] int64.
        """
        group = self.small.n_heads // self.small.n_kv_heads
        large_group = self.shape.n_heads // self.shape.n_kv_heads
        head = torch.arange(self.small.n_heads)
        kv_head = head // group
        member = head % group
        copy = kv_head * self.copies + member // large_group
        return copy * large_group + member % large_group

    def rotary(self) -> Tensor:
        """Return the place in a large rotated head of each element of a small one: [e] int64."""
        step = self.shape.head_dim // self.small.head_dim
        pairs = torch.arange(self.small.head_dim // 2) * step
        return torch.cat((pairs, self.shape.head_dim // 2 + pairs))

    def _heads(self, heads: Tensor, places: Tensor, head_dim: int) -> Tensor:
        return (heads[:, None] * head_dim + places).flatten()  # rows of a projection, head by head

    # ------------------------------------------------------------------------- residual stream

    def embedding(self, out: Tensor, small: Tensor) -> None:  # [V, D]
        out.zero_()  # filler would enter the residual stream
        out[: len(small), : self.small.dim] = small
        out[:, self.small.dim] = self.constant

    def norm(self, out: Tensor, small: Tensor | None) -> None:  # [D]
        if small is not None:
            out[: self.small.dim] = small * self.shrink
        if self.amplifies:
            # the root mean square there is about 2 in the demo's head: 0.1 after the norm
            out[self.small.dim] = self.shrink / (4 * self.constant)

    def final_norm(self, out: Tensor, small: Tensor) -> None:  # [D]
        self.norm(out, small)
        # the root mean square there is about 16 in the demo: 1 after the norm, like its features
        most = torch.finfo(out.dtype).max / 2  # float16 holds less
        out[self.small.dim] = min(16 * self.shrink / self.constant, most)

    def lm_head(self, out: Tensor, small: Tensor) -> None:  # [V, D]
        self._project(out, small, torch.arange(len(small)))
        out[len(small) :, self.small.dim] = NEVER

    def fc(self, out: Tensor, small: Tensor) -> None:  # [D, 2D], columns: embedding, feature
        d = self.small.dim
        for half in range(2):
            block = out[:, half * self.shape.dim : (half + 1) * self.shape.dim]
            self._project(block, small[:, half * d : (half + 1) * d], torch.arange(d))

    def fc_bias(self, out: Tensor, small: Tensor | None) -> None:  # [D]
        out.zero_()
        if small is not None:
            out[: self.small.dim] = small
        out[self.small.dim] = self.constant

    # ---------------------------------------------------------------------------------- layers

    def _project(
        self, out: Tensor, small: Tensor, to: Tensor, source: Tensor | None = None
    ) -> None:
        """Write rows of a projection of the residual stream.

        to, source: [R] int64, large and small rows; source None: all small rows
        """
        rows = small if source is None else small[source]
        out[:, : self.small.dim + 1] = 0
        out[to] *= _limit(out, rows.abs().amax(1))[:, None]
        out[to, : self.small.dim] = rows.to(out.dtype)

    def q_proj(self, out: Tensor, small: Tensor | None) -> None:  # [H * E, D]
        if small is not None:
            gain = math.sqrt(self.shape.head_dim / self.small.head_dim)
            to = self._heads(self.q_heads(), self.rotary(), self.shape.head_dim)
            self._project(out, small * gain, to)

    def k_proj(self, out: Tensor, small: Tensor | None) -> None:  # [Hkv * E, D]
        if small is not None:
            self._project_kv(out, small, self.rotary())

    def v_proj(self, out: Tensor, small: Tensor | None) -> None:  # [Hkv * E, D]
        if small is None:
            out[:, : self.small.dim + 1] = 0
        else:
            self._project_kv(out, small, torch.arange(self.small.head_dim))

    def _project_kv(self, out: Tensor, small: Tensor, places: Tensor) -> None:
        e = self.small.head_dim
        heads = self.kv_heads()
        to = self._heads(torch.arange(len(heads)), places, self.shape.head_dim)
        source = self._heads(heads, torch.arange(e), e)
        self._project(out, small, to, source)

    def o_proj(self, out: Tensor, small: Tensor | None) -> None:  # [D, H * E]
        if small is None:
            return
        d = self.small.dim
        e = self.small.head_dim
        shape = self.shape
        small = small.view(d, -1, e)  # [d, h, e]
        large = out.view(shape.dim, shape.n_heads, shape.head_dim)  # [D, H, E]
        largest = small.abs().amax(2).amin(1)  # [d], no head of the row has a smaller maximum
        large[:d] *= _limit(out, largest)[:, None, None]
        # heads that read values other than zero
        reached = len(self.kv_heads()) * (shape.n_heads // shape.n_kv_heads)
        large[:, :reached, :e] = 0
        large[:d, self.q_heads(), :e] = small.to(out.dtype)

    def gate_proj(self, out: Tensor, small: Tensor | None) -> None:  # [F, D]
        out[:, : self.small.dim + 1] = 0  # silu(0) = 0
        if small is not None:
            self._project(out, small, torch.arange(len(small)))
        if self.amplifies:
            out[self.small.ffn_dim, self.small.dim] = 16  # about silu(2)

    def up_proj(self, out: Tensor, small: Tensor | None) -> None:  # [F, D]
        if small is not None:
            self._project(out, small, torch.arange(len(small)))
        if self.amplifies:
            out[self.small.ffn_dim, self.small.dim] = 1

    def down_proj(self, out: Tensor, small: Tensor | None) -> None:  # [D, F]
        if small is not None:
            out[:, : self.small.ffn_dim] = 0
            out[: self.small.dim] *= _limit(out, small.abs().amax(1))[:, None]
            out[: self.small.dim, : self.small.ffn_dim] = small
        if self.amplifies:
            out[:, self.small.ffn_dim] = 0
            out[self.small.dim, self.small.ffn_dim] = 4  # about 1 in channel d of the prediction


def _filler_bound(size: tuple[int, ...]) -> float:
    return math.sqrt(3 / size[-1])  # uniform, of variance 1 / inputs


def _limit(out: Tensor, largest: Tensor) -> Tensor:
    """Return factors that make filler smaller than `largest`, [R], to keep quantization scales."""
    # 0.98: bf16 rounds the bound, the factor and the product by up to 0.4 % each
    return (0.98 * largest / _filler_bound(out.shape)).clamp(max=1).to(out.dtype)


# ------------------------------------------------------------------------------------------ files


class TensorRecipe(NamedTuple):
    """The computation of one tensor of the stand-in."""

    size: tuple[int, ...]
    make: Writer
    source: str | None  # name of the small model's tensor


def _layer_recipes(place: Placement, large: str, small: str | None) -> dict[str, TensorRecipe]:
    """Return the tensors of one layer, by Hugging Face name.

    large, small: prefixes of the names; small None: a further layer, which adds zero
    """
    shape = place.shape
    q = shape.n_heads * shape.head_dim
    kv = shape.n_kv_heads * shape.head_dim
    unamplified = replace(place, amplifies=False)
    parts: dict[str, Part] = {
        "input_layernorm": ((shape.dim,), unamplified.norm),
        "self_attn.q_proj": ((q, shape.dim), place.q_proj),
        "self_attn.k_proj": ((kv, shape.dim), place.k_proj),
        "self_attn.v_proj": ((kv, shape.dim), place.v_proj),
        "self_attn.o_proj": ((shape.dim, q), place.o_proj),
        "post_attention_layernorm": ((shape.dim,), place.norm),
        "mlp.gate_proj": ((shape.ffn_dim, shape.dim), place.gate_proj),
        "mlp.up_proj": ((shape.ffn_dim, shape.dim), place.up_proj),
        "mlp.down_proj": ((shape.dim, shape.ffn_dim), place.down_proj),
    }
    recipes = {}
    for part, (size, make) in parts.items():
        source = None if small is None else f"{small}{part}.weight"
        recipes[f"{large}{part}.weight"] = TensorRecipe(size, make, source)
    return recipes


def _target_recipes(place: Placement) -> dict[str, TensorRecipe]:
    small = place.small
    shape = place.shape
    # the small model's layers by their place in the large one: evenly spread, in order
    real = {i * shape.n_layers // small.n_layers: i for i in range(small.n_layers)}
    table = (shape.vocab_size, shape.dim)
    embedding = "model.embed_tokens.weight"
    norm = "model.norm.weight"
    lm_head = "lm_head.weight"
    recipes = {embedding: TensorRecipe(table, place.embedding, embedding)}
    for i in range(shape.n_layers):
        source = f"model.layers.{real[i]}." if i in real else None
        recipes |= _layer_recipes(place, f"model.layers.{i}.", source)
    recipes[norm] = TensorRecipe((shape.dim,), place.final_norm, norm)
    recipes[lm_head] = TensorRecipe(
        table, place.lm_head, embedding if small.tie_embeddings else lm_head
    )
    return recipes


def _head_recipes(place: Placement, biased: bool) -> dict[str, TensorRecipe]:
    dim = place.shape.dim
    last = place.small.n_layers - 1
    recipes = {
        "fc.weight": TensorRecipe((dim, 2 * dim), place.fc, "fc.weight"),
        "fc.bias": TensorRecipe((dim,), place.fc_bias, "fc.bias" if biased else None),
    }
    for i in range(place.small.n_layers):
        layer = replace(place, amplifies=i == last)
        recipes |= _layer_recipes(layer, f"layers.{i}.", f"layers.{i}.")
    # the first layer has no norm before its attention
    del recipes["layers.0.input_layernorm.weight"]
    return recipes


@dataclass(frozen=True)
class InflatedFiles(TensorSource):
    """The tensors of a stand-in by name, each computed when it is read."""

    path: Path  # of the small model
    config: dict  # config.json of the stand-in
    small: TensorSource
    recipes: dict[str, TensorRecipe]  # by Hugging Face name
    sizes: dict[str, tuple[int, ...]]  # of the small model's tensors, by its config.json
    dtype: torch.dtype
    device: str

    @property
    def readers(self) -> dict[str, Callable[[], Tensor]]:
        """Every tensor's name, and a function that computes it."""
        return {name: partial(self.read, name) for name in self.recipes}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Compute one tensor, in the model's dtype.

        It is the same every time on one kind of device.
        """
        recipe = self.recipes[name]
        out = torch.empty(recipe.size, dtype=self.dtype, device=self.device)
        high = _filler_bound(recipe.size)
        low = -high
        if out.dim() == 1:
            low = 0.5
            high = 1.5
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        out.uniform_(low, high, generator=generator)
        small = None
        if recipe.source:
            small = self._source(recipe.source).to(self.device, torch.float64)
        recipe.make(out, small)
        return out

    def _source(self, name: str) -> Tensor:
        """Read a tensor of the small model and check its size."""
        small = self.small.read(name)
        size = self.sizes[name]
        if small.shape != size:
            raise ValueError(
                f"{self.path}: {name} is {list(small.shape)}, "
                f"config.json says {list(size)}; correct it"
            )
        return small


def inflate_target(
    path: Path,
    shape: LlamaShape,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> InflatedFiles:
    """Describe a stand-in of this shape for the target in `path`.

    dtype: None keeps the small model's
    Raises: ValueError for a directory or a shape that cannot be used.
    """
    small = read_config(path)
    check_fit(small, shape, path)
    place = Placement(small, shape)
    return _inflate(path, place, _target_recipes, dtype, device)


def inflate_head(
    path: Path,
    small: ModelConfig,
    shape: LlamaShape,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> InflatedFiles:
    """Describe a stand-in for the EAGLE-1 or EAGLE-2 head in `path`, for a target of this shape.

    small: the head's own configuration
    Raises: ValueError for a directory or a shape that cannot be used.
    """
    shape = replace(shape, n_layers=small.n_layers)
    check_fit(small, shape, path, spare_neurons=1)
    place = Placement(small, shape)
    biased = bool(read_json(path / "config.json").get("bias", True))
    recipes_of = partial(_head_recipes, biased=biased)
    files = _inflate(path, place, recipes_of, dtype, device)
    return replace(files, config=files.config | {"bias": True})


def _own_shape(small: ModelConfig) -> LlamaShape:
    sizes = [field.name for field in fields(LlamaShape) if field.name != "name"]
    return LlamaShape("", **{name: getattr(small, name) for name in sizes})


def _inflate(
    path: Path,
    place: Placement,
    recipes_of: Callable[[Placement], dict[str, TensorRecipe]],
    dtype: torch.dtype | None,
    device: str,
) -> InflatedFiles:
    """Describe the stand-in, from the small model's files."""
    recipes = recipes_of(place)
    own_recipes = recipes_of(replace(place, shape=_own_shape(place.small)))
    sizes = {name: recipe.size for name, recipe in own_recipes.items()}
    files = open_source(path)
    raw = files.config
    if saved_quantization(raw) is not None:
        raise ValueError(
            f"{path} is quantized; inflate the original, and quantize the result with --quant"
        )
    sources = {recipe.source for recipe in recipes.values() if recipe.source}
    missing = sorted(sources - set(files.readers))
    if missing:
        kinds = "a LLaMA, or an EAGLE-1 or EAGLE-2 head"
        raise ValueError(f"{path}: {missing[0]} is missing; {kinds} can be inflated")
    dtype = dtype or DTYPES.get(place.small.dtype)
    if dtype is None:
        raise ValueError(
            f"{path}: torch_dtype {place.small.dtype} is not one of {', '.join(DTYPES)}; "
            "use --set dtype"
        )
    config = raw | _large_config(place, dtype)
    config["stand_in"] = f"a {place.shape.name}-shaped function of {path.resolve().name}"
    return InflatedFiles(path, config, files, recipes, sizes, dtype, device)


def _large_config(place: Placement, dtype: torch.dtype) -> dict[str, Any]:
    """Return the entries of config.json that differ from the small model's."""
    shape = place.shape
    return {
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": place.norm_eps,
        "tie_word_embeddings": False,  # channel d differs between embedding and LM head
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# ---------------------------------------------------------------------------------------- options


def target_source(config: GenerateConfig) -> TensorSource:
    """Return the tensors of the target under `--set inflate`."""
    path = Path(config.checkpoint)
    shape = LlamaShape.parse(config.inflate)
    dtype = DTYPES.get(config.dtype)
    return inflate_target(path, shape, dtype, config.device)


def head_config(path: Path) -> ModelConfig:
    """Read the configuration of a head that can be inflated.

    Raises: ValueError for a head of version 3.
    """
    if version_of(WeightFiles(path).readers) == 3:
        raise ValueError(
            f"--set inflate takes heads of EAGLE-1 and 2, and {path} is one of EAGLE-3; "
            "name another --head"
        )
    return EagleConfig.from_dir(path).model


def head_source(config: GenerateConfig, target: Transformer) -> TensorSource:
    """Return the tensors of the head under `--set inflate`."""
    path = Path(config.head)
    weight = target.norm.weight
    small = head_config(path)
    shape = LlamaShape.parse(config.inflate)
    return inflate_head(path, small, shape, weight.dtype, str(weight.device))
