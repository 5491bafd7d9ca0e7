"""Stand-ins: a small model and its EAGLE head, rewritten as the same function in a larger shape.

    files = inflate_target(Path("checkpoints/demo"), ModelShape.parse("llama2-7b"))
    target = load_model(files.path, source=files)  # a 7B's memory and time, the demo's tokens

The time of a step depends on a model's shape and not on its numbers. The number of accepted tokens
depends on the numbers. A stand-in has the time of its shape and the acceptance of the small model.
places.py describes the construction, which follows from the architecture's list of steps.
Trade-off: a tensor is computed when it is read, and is not stored. No disk is needed, and every
load computes again.
Not here: writing to disk; EAGLE-3.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafts.places import (
    Cells,
    TensorRecipe,
    channels,
    filler_bound,
    leading_inputs,
    leading_outputs,
    matrix,
    recipes_of,
    vector,
    write_beside,
    write_bias,
)
from eagle_draft import EagleConfig
from files.checkpoint import TensorSource, WeightFiles, saved_quantization
from files.config import EMBEDDING, LM_HEAD, open_source, read_config
from files.eagle_variants import head_names
from files.heads import read_eagle2, version_of
from model import DTYPES, ModelConfig, Transformer, layer_names, rope_frequencies, weight_names
from run.options import GenerateConfig
from run.tp import split_inputs

# LM head weight of ids beyond the small vocabulary, at the constant channel
NEVER = -4096.0
# upper bounds of sizes in `ModelShape.parse`; others: 2^20
MOST = {"n_layers": 2**10, "vocab_size": 2**24}
NORM = "model.norm.weight"


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model, in model.py's names. Experts are as wide as the feed-forward."""

    name: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int

    @staticmethod
    def parse(text: str) -> ModelShape:
        """Read `NAME` or `NAME,dim=1024,n_layers=9`. Raises: ValueError for any other text."""
        name, *changes = text.split(",")
        if name not in SHAPES:
            raise ValueError(f"{name} is not a known shape; use one of {', '.join(SHAPES)}")
        sizes = [f.name for f in fields(ModelShape) if f.name != "name"]
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
) -> ModelShape:
    return ModelShape(
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


def check_fit(small: ModelConfig, shape: ModelShape, where: Path, spare_neurons: int = 0) -> None:
    """Check that `small`, read from `where`, can have this shape.

    spare_neurons: 1 for a head, which needs one more neuron
    Raises: ValueError with the first rule that it breaks.
    """
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
    _, *neurons = split_inputs(small)  # of experts, dense layers or both
    for name, least, reason in (
        ("dim", small.dim + 1, "the width and one channel"),
        ("n_layers", small.n_layers, "every layer"),
        ("n_kv_heads", kv_heads, f"its heads in groups of {large_group}"),
        ("ffn_dim", max(neurons) + spare_neurons, "every neuron" + " and one more" * spare_neurons),
        ("vocab_size", small.vocab_size, "every token"),
    ):
        if getattr(shape, name) < least:
            raise ValueError(
                f"shape {shape.name}: {name} must be at least {least}, for {reason} of {where}; "
                f"it is {getattr(shape, name)}: choose a larger shape"
            )


def check_ropes(small: ModelConfig, large: ModelConfig, where: Path) -> None:
    """Check that the wavelengths of small heads are among those of the large ones.

    Raises: ValueError where they depend on head_dim.
    """
    step = large.head_dim // small.head_dim
    for narrow, wide in zip(small.ropes, large.ropes):
        if not torch.equal(rope_frequencies(narrow), rope_frequencies(wide)[::step]):
            raise ValueError(
                f"{where} has a RoPE whose wavelengths depend on head_dim, as YaRN's do; "
                f"use head_dim={small.head_dim} or another model"
            )


# ------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class InflatedFiles(TensorSource):
    """The tensors of a stand-in by name, each computed when it is read."""

    path: Path  # of the small model
    config: dict  # config.json of the stand-in
    small: TensorSource
    recipes: dict[str, TensorRecipe]  # by Hugging Face name
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
        high = filler_bound(recipe.size)
        low = -high
        if out.dim() == 1:
            low = 0.5
            high = 1.5
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        out.uniform_(low, high, generator=generator)
        recipe.make(out, self._small_tensor(recipe))
        most = torch.finfo(self.dtype).max / 2  # float16 holds less than some cells
        for place, value in recipe.cells:
            out[place] = min(value, most)
        return out

    def _small_tensor(self, recipe: TensorRecipe) -> Tensor | None:
        """Read a tensor of the small model in fp64, and check its size."""
        if recipe.source is None:
            return None
        small = self.small.read(recipe.source)
        if small.shape != recipe.small_size:
            raise ValueError(
                f"{self.path}: {recipe.source} is {list(small.shape)}, "
                f"config.json says {list(recipe.small_size)}; correct it"
            )
        return small.to(self.device, torch.float64)


def inflate_target(
    path: Path,
    shape: ModelShape,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> InflatedFiles:
    """Describe a stand-in of this shape for the target in `path`.

    dtype: None keeps the small model's
    Raises: ValueError for a directory or a shape that cannot be used.
    """
    files = open_source(path)
    small = read_config(path, files.config)
    for i in range(small.n_layers):
        recipes_of([(step, step) for step in small.layer(i)])  # or an error about such models
    check_fit(small, shape, path)
    config = large_config(files, small, shape, dtype)
    large = read_config(path, config)
    check_ropes(small, large, path)
    vocab = (small.vocab_size, large.vocab_size)
    width = (small.dim, large.dim)
    gain = small.embedding_scale / large.embedding_scale
    stream = leading_inputs(*width, reached=large.dim)  # filler would enter the residual stream
    # the small model, with as many layers as the large one
    deep = read_config(path, files.config | layer_keys(files.config, shape.n_layers))
    recipes = layer_recipes(deep, large) | recipes_of([*zip(small.last(), large.last())])
    recipes["embedding.weight"] = [matrix(leading_outputs(*vocab, gain), stream)]
    recipes["lm_head.weight"] = [matrix(leading_outputs(*vocab), channels(*width))]
    sources = {
        "embedding.weight": (EMBEDDING,),
        "norm.weight": (NORM,),
        "lm_head.weight": (EMBEDDING if small.tie_embeddings else LM_HEAD,),
    }
    for i, place in enumerate(layer_places(small, deep)):
        prefixes = (f"layers.{place}.", f"model.layers.{i}.")
        sources |= layer_names(*prefixes, small.layer(i), small.names)
    d = small.dim
    c = constant(small)
    cells = {
        EMBEDDING: [((slice(None), d), c / large.embedding_scale)],
        # the root mean square there is about 16 in the demo: 1 after the norm, like its features
        NORM: [((d,), 16 * math.sqrt(d / large.dim) / c)],
        LM_HEAD: [((slice(small.vocab_size, None), d), NEVER)],
    }
    found = with_names(recipes, weight_names(large), sources, cells)
    return inflated_files(files, config, found, device)


def inflate_head(
    path: Path,
    shape: ModelShape,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    gain: float = 1.0,
) -> InflatedFiles:
    """Describe a stand-in for the EAGLE-1 or EAGLE-2 head in `path`, for a target of this shape.

    gain: of the target's stand-in, whose embedding is multiplied by it
    Raises: ValueError for a directory or a shape that cannot be used.
    """
    files = open_source(path)
    own = head_config(path)
    small = own.model
    shape = replace(shape, n_layers=small.n_layers)
    check_fit(small, shape, path, spare_neurons=1)
    config = large_config(files, small, shape, dtype) | {"bias": True}
    large = read_eagle2(path, config).model
    check_ropes(small, large, path)
    recipes = layer_recipes(small, large)
    stream = leading_outputs(small.dim, large.dim)
    inputs = channels(small.dim, large.dim)
    recipes["fc.weight"] = [
        TensorRecipe(
            (large.dim, 2 * large.dim),
            (small.dim, 2 * small.dim),
            partial(write_beside, outputs=stream, inputs=inputs, gains=(1 / gain, 1)),
        )
    ]
    recipes["fc.bias"] = [vector(write_bias, stream)]
    names = head_names(replace(own, fc_bias=True))
    d = small.dim
    c = constant(small)
    last = f"layers.{small.n_layers - 1}."
    (norm,) = names[f"{last}ffn_norm.weight"]
    gate, up = names[f"{last}w13.weight"]
    (down,) = names[f"{last}w2.weight"]
    neuron = small.ffn_dim  # the further one, which amplifies channel d
    cells = {
        "fc.bias": [((d,), c)],
        # the root mean square there is about 2 in the demo's head: 0.1 after the norm
        norm: [((d,), math.sqrt(d / large.dim) / (4 * c))],
        gate: [((neuron, d), 16.0)],  # about silu(2)
        up: [((neuron, d), 1.0)],
        # about 1 in channel d of the prediction
        down: [((slice(None), neuron), 0.0), ((d, neuron), 4.0)],
    }
    found = with_names(recipes, names, head_names(own), cells)
    return inflated_files(files, config, found, device)


def layer_recipes(small: ModelConfig, large: ModelConfig) -> dict[str, list[TensorRecipe]]:
    """Return the recipes of all layers, by our parameters."""
    recipes = {}
    for i in range(large.n_layers):
        steps = [*zip(small.layer(i), large.layer(i), strict=True)]
        recipes |= {f"layers.{i}.{ours}": parts for ours, parts in recipes_of(steps).items()}
    return recipes


def layer_places(small: ModelConfig, deep: ModelConfig) -> list[int]:
    """Return the place of each layer of the small model among those of a deeper one.

    They are evenly spread, in order, or further to the front where that is a layer of another kind.
    Raises: ValueError where there is none of their kind.
    """
    places: list[int] = []
    for i in reversed(range(small.n_layers)):
        place = i * deep.n_layers // small.n_layers
        if places:
            place = min(place, places[0] - 1)
        while place >= 0 and deep.layer(place) != small.layer(i):
            place -= 1
        if place < 0:
            raise ValueError(
                f"{deep.n_layers} layers have no place for layer {i} of {small.n_layers}; "
                "use another number of layers"
            )
        places.insert(0, place)
    return places


def with_names(
    recipes: dict[str, list[TensorRecipe]],
    names: dict[str, tuple[str, ...]],
    sources: dict[str, tuple[str, ...]],
    cells: dict[str, Cells],
) -> dict[str, TensorRecipe]:
    """Give recipes, by our parameters, the names of files.

    names, sources: our parameter -> its tensors in the stand-in, and in the small model
    cells: name in the stand-in -> what reads or writes the constant channel
    """
    found = {}
    for ours, tensors in names.items():
        origins = sources.get(ours, (None,) * len(tensors))
        for name, recipe, source in zip(tensors, recipes[ours], origins, strict=True):
            found[name] = replace(recipe, source=source, cells=cells.get(name, ()))
    return found


def inflated_files(
    files: TensorSource, config: dict, recipes: dict[str, TensorRecipe], device: str
) -> InflatedFiles:
    """Describe a stand-in. Raises: ValueError for files without a tensor that it needs."""
    needed = {recipe.source for recipe in recipes.values() if recipe.source}
    missing = sorted(needed - set(files.readers))
    if missing:
        kinds = "a model, or an EAGLE-1 or EAGLE-2 head"
        raise ValueError(f"{files.path}: {missing[0]} is missing; {kinds} can be inflated")
    dtype = getattr(torch, config["torch_dtype"])
    return InflatedFiles(files.path, config, files, recipes, dtype, device)


# ------------------------------------------------------------------------------------------ config


def constant(small: ModelConfig) -> float:
    """Return C, a power of two.

    Its square is at most a millionth of the term that eps adds to a norm's sum of squares.
    """
    return 2.0 ** (math.floor(math.log2(math.sqrt(small.norm_eps * small.dim))) - 10)


def large_config(
    files: TensorSource, small: ModelConfig, shape: ModelShape, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Return config.json of the stand-in. dtype: None keeps the small model's

    Raises: ValueError for an unknown dtype, codes in place of numbers, and a RoPE that does not
    fit the shape.
    """
    raw = files.config
    path = files.path
    if saved_quantization(raw) is not None:
        raise ValueError(
            f"{path} is quantized; inflate the original, and quantize the result with --quant"
        )
    dtype = dtype or DTYPES.get(small.dtype)
    if dtype is None:
        raise ValueError(
            f"{path}: torch_dtype {small.dtype} is not one of {', '.join(DTYPES)}; use --dtype"
        )
    sizes = {
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": (small.norm_eps * small.dim - constant(small) ** 2) / shape.dim,
        "tie_word_embeddings": False,  # channel d differs between embedding and LM head
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if "moe_intermediate_size" in raw:
        sizes["moe_intermediate_size"] = shape.ffn_dim
    return raw | sizes | layer_keys(raw, shape.n_layers)


def layer_keys(raw: dict, n_layers: int) -> dict[str, Any]:
    """Return the keys of config.json for another number of layers; lists of kinds are stretched."""
    keys: dict[str, Any] = {"num_hidden_layers": n_layers}
    kinds = raw.get("layer_types")
    if kinds:
        # of each place the last layer whose even place is not behind it
        keys["layer_types"] = [
            kinds[(len(kinds) * (i + 1) - 1) // n_layers] for i in range(n_layers)
        ]
    return keys


# ---------------------------------------------------------------------------------------- options


def target_source(config: GenerateConfig) -> TensorSource:
    """Return the tensors of the target under `--inflate`."""
    shape = ModelShape.parse(config.inflate)
    return inflate_target(Path(config.checkpoint), shape, DTYPES.get(config.dtype), config.device)


def head_config(path: Path) -> EagleConfig:
    """Read the configuration of a head that can be inflated.

    Raises: ValueError for a head of version 3.
    """
    if version_of(WeightFiles(path).readers) == 3:
        raise ValueError(
            f"--inflate takes heads of EAGLE-1 and 2, and {path} is one of EAGLE-3; "
            "name another --head"
        )
    return read_eagle2(path)


def head_source(config: GenerateConfig, target: Transformer) -> TensorSource:
    """Return the tensors of the head under `--inflate`."""
    shape = ModelShape.parse(config.inflate)
    weight = target.norm.weight
    gain = read_config(Path(config.checkpoint)).embedding_scale / target.embedding_scale
    return inflate_head(Path(config.head), shape, weight.dtype, str(weight.device), gain)
