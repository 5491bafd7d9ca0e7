"""Stand-ins: the same function in another shape, in fp64, bf16 and int4; the same tokens."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_tp import write_tiny
from torch import Tensor

from drafts.places import recipes_of
from drafts.stand_in import SHAPES, InflatedFiles, ModelShape, inflate_head, inflate_target
from eagle_draft import EagleHead, load_head
from files.config import read_config
from files.eagle_variants import PartNorm
from files.weights import load_model
from helpers import GOLDEN, OPERATORS, slow
from kv_cache import KVCache, causal_window
from model import ModelConfig, Transformer, weight_names
from quantize import Linear
from run.generate import generate, load, main
from run.options import DEMO

TARGET, HEAD = Path(DEMO), Path(DEMO + "-eagle")
GOLDEN_PAIR = (GOLDEN / "models/target_llama_mha", GOLDEN / "models/head_eagle12_mha")
EXACT = "tiny-0.5b,n_layers=10,ffn_dim=1792,vocab_size=4224"  # width * 4, heads * 4: powers of four
SMALL = "tiny-0.5b,dim=512,n_layers=3,ffn_dim=1664,vocab_size=4224"
PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def pairs(short_demo) -> dict[str, tuple[Path, Path]]:
    """Targets and their heads."""
    short = (short_demo, short_demo.with_name("demo-eagle"))
    return {"demo": short, "golden": GOLDEN_PAIR}


def make_head(shape: ModelShape, dtype: torch.dtype, path: Path = HEAD, **options) -> InflatedFiles:
    return inflate_head(path, shape, dtype, **options)


class Pair(NamedTuple):
    """A target and its head."""

    target: Transformer
    head: EagleHead


def small_pair(dtype: torch.dtype, pair: tuple[Path, Path]) -> Pair:
    """The small model and its head."""
    target = load_model(pair[0], dtype)
    return Pair(target, load_head(pair[1], target))


def large_pair(shape: ModelShape, dtype: torch.dtype, pair: tuple[Path, Path]) -> Pair:
    """Their stand-ins."""
    target = load_model(pair[0], dtype, source=inflate_target(pair[0], shape, dtype))
    return Pair(target, load_head(pair[1], target, source=make_head(shape, dtype, pair[1])))


def outputs(models: Pair, ids: Tensor, cached: bool = False) -> list[Tensor]:
    """Logits of the target, of the head on its features, and of the head on its own prediction: 3 x [1, T, V].

    cached: each pass goes through a cache, as in decoding
    """
    (target, head), dtype = models, models.target.embedding.weight.dtype

    def run(model: Transformer | EagleHead, config: ModelConfig, *inputs: Tensor) -> Tensor:
        rows = inputs[0].shape[1]
        window = causal_window(torch.zeros(1, dtype=torch.long), rows)
        cache = (KVCache.empty(config, 1, rows, dtype, "cpu"), window) if cached else ()
        return model(*inputs, window.slots, *cache)

    with torch.no_grad():
        features = run(target, target.config, ids)
        embedded = target.embedding(ids[:, 1:])
        first = run(head, head.config.model, embedded, features[:, :-1])
        second = run(head, head.config.model, embedded, first)
        return [target.logits(x) for x in (features, first, second)]


def both(
    shape: ModelShape,
    dtype: torch.dtype,
    pair: tuple[Path, Path],
    length: int = 48,
    cached: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """The outputs of the small model and of its stand-in on `length` tokens, side by side."""
    small = small_pair(dtype, pair)
    ids = some_ids(small.target.config.vocab_size, length)
    large = large_pair(shape, dtype, pair)
    return list(zip(outputs(small, ids, cached), outputs(large, ids, cached)))


def some_ids(vocab: int, length: int = 48) -> Tensor:
    return torch.randint(
        0, vocab, (1, length), generator=torch.Generator().manual_seed(1)
    )  # [1, T]


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference on the small vocabulary, in units of the largest logit."""
    return float((a - b[..., : a.shape[-1]]).abs().max() / a.abs().max())


# -------------------------------------------------------------------------------- the same function


@pytest.mark.parametrize("sizes, pair", [
    ("dim=512,n_layers=3,n_heads=8,n_kv_heads=4,head_dim=128", "demo"),
    ("dim=257,n_layers=2,n_heads=20,n_kv_heads=4,head_dim=32,vocab_size=4096", "demo"),  # the least width
    *slow([
        ("dim=512,n_layers=2,n_heads=8,n_kv_heads=8,head_dim=64", "demo"),  # multi-head: KV heads twice
        ("dim=300,n_layers=5,n_heads=9,n_kv_heads=9,head_dim=96", "demo"),  # nothing divides anything
        ("dim=640,n_layers=3,n_heads=24,n_kv_heads=8,head_dim=32", "demo"),  # groups of 2 in groups of 3
        ("dim=512,n_layers=9,n_heads=24,n_kv_heads=8,head_dim=64,vocab_size=1000", "golden"),
    ]),
])  # fmt: skip
def test_fp64_outputs_are_the_small_models(monkeypatch, pairs, sizes, pair):
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # norms and RoPE compute in fp32 otherwise
    shape = ModelShape.parse(f"tiny-0.5b,ffn_dim=1600,vocab_size=4200,{sizes}")
    for small, large in both(shape, torch.float64, pairs[pair]):
        assert small.dtype == torch.float64
        assert relative(small, large) < 1e-12
        padding = large[..., small.shape[-1] :]
        assert padding.numel() == 0 or padding.max() < -400


TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
    "sliding_window": 5,
}  # fmt: skip
WIDE = "tiny-0.5b,dim=128,n_heads=8,n_kv_heads=4,head_dim=64,ffn_dim=80,vocab_size=120"
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 20, "rounds_scale": False,
    "tie_word_embeddings": True,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
ARCHITECTURES = {  # keys of config.json, layers of the stand-in
    "llama with biases": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True}, 7),
    "qwen2": ({"architectures": ["Qwen2ForCausalLM"]}, 4),
    "qwen3": ({"architectures": ["Qwen3ForCausalLM"]}, 4),
    "mixtral": ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2}, 5),
    "qwen3 moe": (QWEN_MOE, 7),
    "gemma3": (GEMMA | {"layer_types": [SLIDING, FULL, SLIDING]}, 5),
    "gemma3, every second layer": (GEMMA | {"sliding_window_pattern": 2}, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_keeps_its_function(monkeypatch, tmp_path, name):
    """Nothing in the stand-ins names an architecture: the list of steps says where weights go."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    keys, layers = ARCHITECTURES[name]
    path = Path(write_tiny(tmp_path / "tiny", TINY | keys))
    shape = ModelShape.parse(f"{WIDE},n_layers={layers}")
    files = inflate_target(path, shape, torch.float64)
    ids = some_ids(97)
    logits = []
    for source in (None, files):
        target = load_model(path, torch.float64, source=source)
        with torch.no_grad():
            logits.append(target.logits(target(ids, torch.arange(ids.shape[1])[None])))
    small, large = logits
    assert target.config.n_layers == layers and target.config.dim == 128
    assert small.std() > 0.1  # else the bounds would hold for anything
    # 1e-9, as the eps of norms of heads and of results makes up for a constant that they do not have
    assert relative(small, large) < 1e-9
    assert large[..., 97:].max() < -400


def test_a_step_whose_weights_have_no_places_is_refused():
    step = PartNorm("fc_norm_0", 32, 1e-5, part=0, parts=3)
    with pytest.raises(ValueError, match="a step PartNorm have no stand-ins; use another model"):
        recipes_of([(step, step)])


def test_a_head_reads_embeddings_that_the_target_scales_otherwise():
    small, shape = read_config(TARGET), ModelShape.parse(EXACT)
    plain = make_head(shape, torch.float64).read("fc.weight")
    halved = make_head(shape, torch.float64, gain=0.5).read("fc.weight")
    embedding, feature = slice(0, small.dim), slice(shape.dim, shape.dim + small.dim)
    assert torch.equal(halved[: small.dim, embedding], 2 * plain[: small.dim, embedding])
    assert torch.equal(halved[:, feature], plain[:, feature]) and plain[:, feature].any()


DENSE = "tiny-0.5b,n_layers=3,ffn_dim=1664,vocab_size=4224"
BF16 = {  # sizes, models, tokens, whether the bits are equal
    "width x4, heads x4": (f"{DENSE},dim=1024", "demo", 200, True),
    "width x16, heads x4": (f"{DENSE},dim=4096,n_layers=2", "demo", 48, True),
    "width x2.5": (f"{DENSE},dim=640", "demo", 48, False),
    "heads x2": (f"{DENSE},head_dim=64", "demo", 48, False),
}


@OPERATORS
@pytest.mark.parametrize(
    "name",
    ["width x2.5", "width x4, heads x4", *slow(["width x16, heads x4", "heads x2"])],
)
def test_bf16_bit_for_bit_at_powers_of_four(pairs, name):
    """matmul_bf16.h and attention.cpp add a sum's terms in order, so that zeros between them change no bit."""
    sizes, pair, length, equal = BF16[name]
    shape = ModelShape.parse(sizes)
    for small, large in both(shape, torch.bfloat16, pairs[pair], length, cached=True):
        assert torch.equal(small, large[..., : small.shape[-1]]) == equal
        assert relative(small, large) < 0.05


def codes(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Plain symmetric rounding. Returns codes [N, K] and scales [N, K / group]."""
    most = 2 ** (bits - 1) - 1
    groups = weight.double().unflatten(1, (-1, group))  # [N, K / group, group]
    scale = (groups.abs().amax(-1) / most).clamp_min(1e-12)
    return (groups / scale[..., None]).round().flatten(1), scale


def test_int4_outputs_are_the_int4_small_models(monkeypatch, pairs):
    """The whole model through plain int4, padding included."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    shape = ModelShape.parse(f"{DENSE},dim=512")
    path, _ = pairs["demo"]
    found = []
    for files, head_files in (
        (None, None),
        (inflate_target(path, shape, torch.float64), make_head(shape, torch.float64)),
    ):
        target = load_model(path, torch.float64, source=files)
        head = load_head(HEAD, target, source=head_files)
        for name, module in [*target.named_modules(), *head.named_modules()]:
            if isinstance(module, Linear):
                group = 32 if name.endswith("wo") and files is None else 128
                rounded, scale = codes(module.weight, 4, group)
                module.weight.data = (rounded.unflatten(1, (-1, group)) * scale[..., None]).flatten(
                    1
                )
        found.append(outputs(Pair(target, head), some_ids(4096)))
    for small, large in zip(*found):
        assert relative(small, large) < 1e-12 and large[..., 4096:].max() < -400


# --------------------------------------------------------------------------------------- the filler


def zero_share(weight: Tensor) -> float:
    return float((weight == 0).float().mean())


def test_filler_is_dense():
    shape, small = ModelShape.parse(EXACT), read_config(TARGET)
    files = inflate_target(TARGET, shape)
    live = (small.dim + 1) / shape.dim  # of a projection's columns
    real = {i * shape.n_layers // small.n_layers for i in range(small.n_layers)}
    inert = next(i for i in range(shape.n_layers) if i not in real)
    for part, most in (("v_proj", live), ("q_proj", 0), ("k_proj", 0), ("o_proj", 0)):
        assert zero_share(files.read(f"model.layers.{inert}.self_attn.{part}.weight")) < most + 0.01
        assert zero_share(files.read(f"model.layers.0.self_attn.{part}.weight")) < live + 0.01
    for part, most in (("gate_proj", live), ("up_proj", 0), ("down_proj", 0)):
        assert zero_share(files.read(f"model.layers.{inert}.mlp.{part}.weight")) < most + 0.01
    reached = small.ffn_dim / shape.ffn_dim
    assert zero_share(files.read("model.layers.0.mlp.down_proj.weight")) < reached + 0.01


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("options", [
    {"temperature": 1.0, "seed": 3, "tree": "dynamic"},
    *slow([{"tree": "dynamic"}, {"tree": "chain", "tree_depth": 4}]),
])  # fmt: skip
def test_decoding_gives_the_same_tokens(options):
    options |= {"checkpoint": DEMO, "dtype": "float32", "device": "cpu"}
    options |= {"max_new_tokens": 12, "ignore_eos": True}
    prompts = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90]]
    large = load(inflate=EXACT, **options)
    assert large.target.config.dim > read_config(TARGET).dim and large.option("draft") == "eagle"
    a, b = generate(load(**options), prompts), generate(large, prompts)
    assert a.tokens == b.tokens and a.text == b.text and a.stats["tau"] > 1.3
    assert a.stats["accept_lengths"] == b.stats["accept_lengths"]
    assert b.stats["stand_in"] == f"a {EXACT}-shaped function of demo"
    assert "stand_in" not in a.stats


def test_everything_printed_names_the_stand_in(pairs, capsys, tmp_path):
    argv = f"--checkpoint {pairs['demo'][0]} --max_new_tokens 8 --device cpu --tree dynamic".split()
    argv += ["--inflate", f"{SMALL}", "--prompt", PROMPT]
    main([*argv, "--json", str(tmp_path / "out.json"), "--compare"])
    _, err = capsys.readouterr()
    for line in err.splitlines()[-2:]:
        assert line.startswith(f"stand-in, a {SMALL}-shaped function of demo: ")
    assert json.loads((tmp_path / "out.json").read_text())["stats"]["stand_in"].startswith(
        "a tiny-0.5b"
    )


# ------------------------------------------------------------------------------- shapes and mistakes


MISTAKES = [
    ("tiny-0.5b,dim=256", "dim must be at least 257"),
    ("tiny-0.5b,n_layers=7", "n_layers must be at least 8"),
    ("tiny-0.5b,n_heads=4,n_kv_heads=4", "n_kv_heads must be at least 8"),
    ("tiny-0.5b,n_heads=9,n_kv_heads=4", "n_kv_heads must divide n_heads; 4 does not divide 9"),
    ("tiny-0.5b,head_dim=48", "head_dim must be a multiple of"),
    ("tiny-0.5b,ffn_dim=1536", "ffn_dim must be at least 1537, for every neuron and one more"),
    ("tiny-0.5b,vocab_size=4095", "vocab_size must be at least 4096"),
    ("tiny-0.5b,dim=-5", "'dim=-5' must be like n_layers=9"),
    ("tiny-0.5b,n_layers", "must be like n_layers=9"),
    ("tiny-0.5b,n_layers=9999", "no model has n_layers=9999; choose a smaller shape"),
    ("gpt-5", "gpt-5 is not a known shape; use one of"),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES)
def test_a_shape_that_cannot_be_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        shape = ModelShape.parse(text)
        inflate_target(TARGET, shape)
        make_head(shape, torch.bfloat16)


@pytest.mark.parametrize(("change", "says"), [
    ({"intermediate_size": 88}, r"gate_proj.weight is \[.*\], config.json says \[.*\]; correct it"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
     "has a RoPE whose wavelengths depend on head_dim, as YaRN's do; use head_dim=16 or another"),
])  # fmt: skip
def test_a_model_that_cannot_be_inflated_is_refused(tmp_path, change, says):
    copy = shutil.copytree(GOLDEN_PAIR[0], tmp_path / "copy")
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | change))
    shape = ModelShape.parse("tiny-0.5b")
    with pytest.raises(ValueError, match=says):
        inflate_target(copy, shape).read("model.layers.0.mlp.gate_proj.weight")
    with pytest.raises(ValueError, match="fc.bias is missing; a model, or an EAGLE-1 or"):
        make_head(shape, torch.bfloat16, TARGET)


@pytest.mark.parametrize(("name", "billions"), [
    ("tiny-0.5b", 0.54), ("tiny-1b", 1.12), ("llama2-7b", 6.74), ("llama2-13b", 13.02), ("llama2-70b", 68.98),
    ("llama3-8b", 8.03), ("llama3-70b", 70.55),
])  # fmt: skip
def test_named_shapes_have_their_tensors(name, billions):
    files = inflate_target(TARGET, SHAPES[name])
    config = read_config(TARGET, files.config)
    assert set(files.recipes) == {each for parts in weight_names(config).values() for each in parts}
    parameters = sum(math.prod(recipe.size) for recipe in files.recipes.values())
    assert parameters / 1e9 == pytest.approx(billions, abs=0.006)
    for dtype in (torch.float32, torch.float16):  # the constant's amplifier is finite
        assert replace(files, dtype=dtype).read("model.norm.weight").isfinite().all()
