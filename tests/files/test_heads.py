"""Heads of version 3: every layout is read as the same function, and every flag works as in a plain
reference. The draft never changes the output. An impossible head is refused in one line.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from block_files import write_files
from draft_tree import DynamicTree, StaticTree
from drafters import RootOnly
from eagle_draft import Eagle3, EagleDrafter, load_head, read_official
from files.checkpoint import WeightFiles
from files.config import read_config
from files.heads import HeadFiles, draft_vocab, make_head, read_head
from files.rounding import quantize_directory
from files.weights import load_model
from helpers import GOLDEN, decode, engine_for, golden_target, record
from kv_cache import KVCache, causal_window
from quantize import Quantization
from run.generate import generate, load
from run.options import DEMO, GenerateConfig
from run.resolved import resolve_draft
from run.session import Session
from tiny_models import refused

TARGET, HEAD = GOLDEN / "models/target_llama31_gqa8", GOLDEN / "models/head_eagle3"
IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, Tensor]


def target():
    return golden_target("models/target_llama31_gqa8")


def official() -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of the recorded head: SafeAILab's layout."""
    return json.loads((HEAD / "config.json").read_text()), load_file(HEAD / "model.safetensors")


def renamed(tensors: Tensors, prefix: str, **others: str) -> Tensors:
    """With another prefix of the layer, and of what is named in `others`."""
    names = {"midlayer": prefix, **others}
    parts = {name: name.partition(".") for name in tensors}
    return {names.get(p[0], p[0]) + p[1] + p[2]: tensors[name] for name, p in parts.items()}


def run(head, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Two passes, of true features and of the outputs. Returns: the outputs and the scores of both."""
    embedding = head.embedding or target().embedding
    lm_head = head.lm_head or target().lm_head
    kv = KVCache.empty(head.config.model, 1, 32, torch.float32, "cpu")
    hidden, outs = head.project(features), []
    for begin in (0, tokens.shape[1]):
        window = causal_window(torch.tensor([begin]), tokens.shape[1])
        hidden = head(embedding(tokens), hidden, window.slots, kv, window)
        outs.append(hidden)
    out = torch.cat(outs, 1)
    return out, lm_head(head.output_norm(out))


def inputs(width: int = 64, aux_layers: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    features = torch.randn(1, 6, (1 + aux_layers) * width, generator=g)
    return features, torch.randint(0, 128, (1, 6), generator=g)


def notes(capsys, path: Path) -> list[str]:
    """The notes printed about files below a path."""
    said = capsys.readouterr().err.splitlines()
    return [line for line in said if line.startswith(f"note: {path}")]


# ------------------------------------------------------------------------------------------ layouts


def speculators(config: dict, **flags: Any) -> dict:
    left_out = ("architectures", "draft_vocab_size", "torch_dtype")
    inner = {k: v for k, v in config.items() if k not in left_out}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "model_type": "speculators", "draft_vocab_size": config["draft_vocab_size"],
        "transformer_layer_config": inner, **flags,
    }  # fmt: skip


def merged(config: dict, changes: dict) -> dict:
    """A config of speculators replaces the other; any other change is merged into it."""
    return changes if "transformer_layer_config" in changes else config | changes


def layouts() -> dict[str, tuple[dict, Tensors]]:
    config, tensors = official()
    embedding = {"embed_tokens.weight": target().embedding.weight.detach().clone()}
    shifted = {"use_aux_hidden_state": True, "norm_before_residual": False}
    nemo = renamed(
        tensors | embedding, "model.layers.0", fc="model.fc", norm="model.norm",
        embed_tokens="model.embed_tokens",
    )  # fmt: skip
    return {
        "SafeAILab": (config, tensors),
        "SpecForge": (
            config | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 4], **shifted}},
            tensors,
        ),
        "vLLM": (
            config | {"architectures": ["Eagle3LlamaForCausalLM"], "norm_output": False, IDS: []},
            renamed(tensors, "layers.0") | embedding,
        ),
        "speculators": (
            speculators(config, norm_output=False, norm_before_residual=False, **{IDS: [2, 4, 5]}),
            renamed(tensors, "layers.0"),
        ),
        "NeMo": (
            config | {"architectures": ["LlamaEagle3DraftModel"], "target_hidden_size": 64, "norm_output": False}, nemo,
        ),
        "DeepSpec": (  # names its layers by their outputs; d2t goes where the vocabulary is whole, see below
            config | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 4]}, renamed(tensors, "layers.0"),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", layouts())
def test_every_layout_is_the_same_function(name, tmp_path, capsys):
    config, tensors = layouts()[name]
    plain = load_head(HEAD, target())
    path = write_files(tmp_path / "head", config, tensors)
    if name == "SafeAILab":
        torch.save(tensors, path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    head = load_head(path, target())
    assert head.aux_layers == plain.aux_layers == (2, 4, 5)
    assert torch.equal(head.vocab.ids, plain.vocab.ids)
    assert head.embedding is None, "an embedding like the target's is the target's"
    assert all(map(torch.equal, run(head, *inputs()), run(plain, *inputs())))
    assert not notes(capsys, tmp_path)


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1_in_speculators_layout(tmp_path, bias):
    """The same head as in the official layout; one with further norms is refused."""
    official = GOLDEN / "models/head_eagle12_mha"
    config = json.loads((official / "config.json").read_text())
    tensors = load_file(official / "model.safetensors")
    if not bias:
        tensors.pop("fc.bias", None)
    theirs = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): value
        for name, value in tensors.items()
    }
    assert not set(theirs) & {name for name in tensors if name.startswith(("fc", "layers"))}
    model = golden_target()
    theirs["lm_head.weight"] = model.lm_head.weight.detach().clone()
    has_bias = "fc.bias" in tensors
    plain = load_head(
        write_files(tmp_path / "official", config | {"bias": has_bias}, tensors), model
    )
    said = {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "layernorms": False,
        "fusion_bias": has_bias, "transformer_layer_config": config,
    }  # fmt: skip
    path = write_files(tmp_path / "speculators", said, theirs)
    quantize_directory(path, tmp_path / "int8", Quantization("int8"))
    assert load_head(tmp_path / "int8", model).fc.format == "int8"
    head = load_head(path, model)
    own, other = dict(head.named_parameters()), dict(plain.named_parameters())
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert head.config == plain.config
    norms = theirs | {"embedding_layernorm.weight": torch.ones(64)}
    with pytest.raises(ValueError, match="1 unexpected weight.*embedding_layernorm"):
        load_head(write_files(tmp_path / "norms", said | {"layernorms": True}, norms), model)


def test_draft_tokens_in_any_order(tmp_path):
    """Columns are put in the order of the tokens, also of a head that was quantized in another."""
    config, tensors = official()
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(80) + tensors["d2t"])[order]
    mixed = {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": ids - torch.arange(80)}
    write_files(tmp_path / "mixed", config, tensors | mixed)
    quantize_directory(tmp_path / "mixed", tmp_path / "int8", Quantization("int8"))
    for path, quant in ((tmp_path / "mixed", None), (tmp_path / "int8", Quantization("int8"))):
        plain, head = load_head(HEAD, target(), quant), load_head(path, target())
        assert torch.equal(head.vocab.ids, plain.vocab.ids)
        assert head.vocab.ids.tolist() == sorted(ids.tolist())
        assert all(map(torch.equal, run(head, *inputs()), run(plain, *inputs())))


@pytest.mark.parametrize("saved", [False, True])
def test_int8_keeps_inputs_of_small_weights(tmp_path, saved):
    """Training divides the weights of fc by the scales of its inputs, an embedding's and a feature's.

    With a scale per output Qwen2.5-Coder's head lost its features: tau 1.34 for 1.54 unrounded.
    """
    path = random_head(tmp_path / "head")
    file = path / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["fc.weight"]  # [256, 3 256]
    weight[:, 256:] *= 0.01
    save_file(tensors, file)
    quant = Quantization("int8")
    if saved:
        path = tmp_path / "int8"
        quantize_directory(file.parent, path, quant)
        quant = None
    head = load_head(path, load_model(Path(DEMO)), quant)
    error = head.fc.dequantize() - weight
    assert error[:, 256:].norm() < 0.01 * weight[:, 256:].norm()


# -------------------------------------------------------------------------------------------- flags


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def reference(
    t: Tensors, features: Tensor, tokens: Tensor, normed_residual: bool, last: str
) -> tuple[Tensor, Tensor]:
    """`run` in the plainest way, without a cache, of tensors with the official names."""
    embedding = t.get("embed_tokens.weight", target().embedding.weight)
    if "fc.weight" in t:
        features = features[..., 64:]
        features = rms(features, t["input_norm.weight"]) if "input_norm.weight" in t else features
        parts = features.split(64, -1)
        if "fc_norm.0.weight" in t:
            parts = [rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        features = F.linear(torch.cat(list(parts), -1), t["fc.weight"], t.get("fc.bias"))
    p, given, rows, outs = "midlayer.", features, [], []
    freq = 10000.0 ** -(torch.arange(0, 16, 2) / 16)

    def heads(x: Tensor, kind: str, first: int) -> Tensor:
        y = F.linear(x, t[f"{p}self_attn.{kind}_proj.weight"]).view(x.shape[1], -1, 16)
        if f"{p}self_attn.{kind}_norm.weight" in t:
            y = rms(y, t[f"{p}self_attn.{kind}_norm.weight"])
        if kind == "v":
            return y.transpose(0, 1)
        angles = (torch.arange(len(y))[:, None] + first) * freq
        cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None] for f in (torch.cos, torch.sin))
        return (y * cos + torch.cat((-y[..., 8:], y[..., :8]), -1) * sin).transpose(0, 1)

    for begin in (0, tokens.shape[1]):
        normed = rms(given, t[p + "hidden_norm.weight"])
        embedded = rms(embedding[tokens], t[p + "input_layernorm.weight"])
        rows.append(torch.cat((embedded, normed), -1))
        x, h = normed if normed_residual else given, torch.cat(rows, 1)
        q, k, v = (heads(h, kind, 0) for kind in "qkv")
        k, v = (y.repeat_interleave(2, 0) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(0, 1).reshape(1, h.shape[1], -1)[:, begin:]
        x = x + F.linear(y, t[p + "self_attn.o_proj.weight"])
        h = rms(x, t[p + "post_attention_layernorm.weight"])
        gate, up = (F.linear(h, t[f"{p}mlp.{kind}_proj.weight"]) for kind in ("gate", "up"))
        given = x + F.linear(F.silu(gate) * up, t[p + "mlp.down_proj.weight"])
        given = rms(given, t["norm.weight"]) if last == "fed" else given
        outs.append(given)
    out = torch.cat(outs, 1)
    scored = rms(out, t["norm.weight"]) if last == "logits" else out
    return out, F.linear(scored, t.get("lm_head.weight", target().lm_head.weight))


def fresh(*shape: int) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=g)
    return x * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.3 * x


# without: the target's LM head and vocabulary
WHOLE = {"lm_head.weight": None, "d2t": None, "t2d": None}
QK = {f"midlayer.self_attn.{p}_norm.weight": fresh(16) for p in "qk"}
FLAGS: dict[str, tuple[dict, dict, dict]] = {  # config, tensors, the reference's options and the layer's prefix
    "norm_before_residual": ({"norm_before_residual": True}, {}, {"normed_residual": True}),
    "norm_before_fc": ({"eagle_config": {"norm_before_fc": True}}, {"input_norm.weight": fresh(192)}, {}),
    "fc_norm": ({"fc_norm": True}, {f"fc_norm.{i}.weight": fresh(64 + i)[:64] for i in range(3)}, {}),
    "fc bias": ({"bias": True}, {"fc.bias": fresh(64)}, {}),
    "no fc": ({"eagle_config": {"use_aux_hidden_state": False}}, {"fc.weight": None}, {}),
    "norm_output true": ({"norm_output": True}, {}, {}),
    "norm_output false, no norm": ({"norm_output": False}, {"norm.weight": None}, {"last": "none"}),
    "speculators' norm_output": (speculators(official()[0], norm_output=True), {}, {"last": "fed"}),
    "vLLM's norm_output": ({"norm_output": True, "architectures": ["Eagle3LlamaForCausalLM"]}, {}, {"last": "fed"}),
    "vLLM's prefix": ({"norm_output": True}, {}, {"last": "fed", "prefix": "layers.0"}),
    "NeMo's prefix": ({"norm_output": True}, {}, {"last": "fed", "prefix": "model.layers.0"}),
    "fc_norm fed": (
        {"norm_output": True}, {f"fc_norm.{i}.weight": fresh(64 + i)[:64] for i in range(3)}, {"last": "fed"},
    ),
    "whole vocabulary": ({"draft_vocab_size": 128}, WHOLE, {}),
    "own whole LM head": ({"draft_vocab_size": 128}, WHOLE | {"lm_head.weight": fresh(128, 64)}, {}),
    "own embedding": ({}, {"embed_tokens.weight": fresh(128, 64)}, {}),
    "norms of q and k": ({}, QK, {}),
    "five aux_layers": (
        {"target_layer_ids": [0, 1, 3, 5, 7], "draft_vocab_size": None},
        WHOLE | QK | {"fc.weight": fresh(64, 320), "lm_head.weight": fresh(128, 64)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_flags_do_what_the_reference_does(name, tmp_path, capsys):
    config, tensors = official()
    changes, weights, told = FLAGS[name]
    tensors = {n: t for n, t in (tensors | weights).items() if t is not None}
    prefix = told.get("prefix", "midlayer")
    written = write_files(tmp_path / "head", merged(config, changes), renamed(tensors, prefix))
    head = load_head(written, target())
    given = inputs(aux_layers=len(head.aux_layers))
    normed = told.get("normed_residual", False)
    want = reference(tensors, *given, normed, told.get("last", "logits"))
    torch.testing.assert_close(run(head, *given), want, atol=2e-4, rtol=1e-4)
    assert not notes(capsys, tmp_path)


def test_biases_are_those_of_the_weights(tmp_path, capsys):
    """The weights decide, not the config."""
    config, tensors = official()
    rows = {"self_attn.q": 64, "self_attn.k": 32, "self_attn.v": 32, "self_attn.o": 64}
    rows |= {"mlp.gate": 112, "mlp.up": 112, "mlp.down": 64}
    biases = {f"midlayer.{name}_proj.bias": fresh(n) for name, n in rows.items()}
    head = load_head(write_files(tmp_path / "all", config, tensors | biases), target())
    held = dict(head.named_parameters())
    for name, theirs in head.weight_names().items():
        if name.endswith("bias"):
            assert torch.equal(held[name], torch.cat([biases.pop(part) for part in theirs]))
    assert not biases
    said = {"attention_bias": True, "mlp_bias": True, "bias": True}
    head = load_head(write_files(tmp_path / "none", config | said, tensors), target())
    assert not any(name.endswith("bias") for name, _ in head.named_parameters())
    assert not notes(capsys, tmp_path)


def test_a_head_of_another_width(tmp_path):
    """fc brings the target's features to the head's own width; embedding and LM head are the head's."""
    config, tensors = official()
    cut = {n: t[..., :32] if t.dim() and t.shape[-1] == 64 else t for n, t in tensors.items()}
    for name, t in cut.items():
        if "self_attn" in name and t.shape[-1] == 128:
            cut[name] = t[:, :64]
        elif t.dim() == 2 and t.shape[0] == 64 and "q_proj" not in name:
            cut[name] = t[:32]
    cut["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"][:32]
    config |= {"hidden_size": 32, "head_dim": 16, "target_hidden_size": 64}
    cut = {n: t.clone() for n, t in cut.items()} | {"embed_tokens.weight": fresh(128, 32)}
    head = load_head(write_files(tmp_path / "head", config, cut), target())
    drafter = EagleDrafter(head, target(), DynamicTree(3, 4, 12))
    options = {"max_new_tokens": 20, "ignore_eos": True}
    engines = (engine_for(target(), each, **options) for each in (drafter, RootOnly()))
    drafted, plain = (decode(engine, [5, 17, 3]) for engine in engines)
    assert drafted.history == plain.history


# ---------------------------------------------------------------------------------- nothing changes


def random_head(path: Path) -> Path:
    """A head of version 3 for the demo that drafts 64 frequent tokens."""
    config = json.loads(Path(DEMO, "config.json").read_text())
    config |= {"num_hidden_layers": 1, "draft_vocab_size": 64}
    shapes = {
        "midlayer.self_attn.q_proj": (256, 512), "midlayer.self_attn.k_proj": (128, 512),
        "midlayer.self_attn.v_proj": (128, 512), "midlayer.self_attn.o_proj": (256, 256),
        "midlayer.mlp.gate_proj": (768, 256), "midlayer.mlp.up_proj": (768, 256),
        "midlayer.mlp.down_proj": (256, 768), "midlayer.hidden_norm": (256,),
        "midlayer.input_layernorm": (256,), "midlayer.post_attention_layernorm": (256,),
        "fc": (256, 3 * 256), "norm": (256,), "lm_head": (64, 256),
    }  # fmt: skip
    tensors = {f"{name}.weight": fresh(*shape) for name, shape in shapes.items()}
    tensors["d2t"] = 260 + torch.arange(64)  # the token i + d2t[i]
    return write_files(path, config, tensors)


def test_a_prompt_in_chunks_gives_the_head_the_same_rows(monkeypatch):
    """Features and aux_layers of a prefill in pieces, and the head's rows made from them."""
    prompt = [(7 * i + i * i) % 128 for i in range(50)]
    model, head = target(), load_head(HEAD, target())
    rows = []
    for chunk in (256, 16):
        monkeypatch.setattr("decode.PREFILL_CHUNK", chunk)
        calls = record(monkeypatch, EagleDrafter, "extend")
        drafter = EagleDrafter(head, model, StaticTree.chain(3))
        session = Session(engine_for(model, drafter, max_new_tokens=8, ignore_eos=True), [(0, 0)])
        steps = session.decode_turn([prompt])
        next(steps)
        while session.prefilling:
            next(steps)
        features = torch.cat([call.args[2].features for call in calls], 1)
        rows.append((features, calls[-1].result.hidden))
        assert len(calls) == -(-50 // chunk) and rows[-1][0].shape == (1, 50, 4 * 64)
    for whole, parts in zip(*rows):
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_a_second_turn_with_trees_of_several_sizes(tmp_path):
    """Cycles that draft nothing take in the same rows as the others."""
    engine = load(
        checkpoint=DEMO, eagle=str(random_head(tmp_path / "head")), device="cpu", max_new_tokens=24, tree="auto",
        tree_topk=4, tree_size=12, tree_depth=2,
    )  # fmt: skip
    vanilla = load(checkpoint=DEMO, draft="none", device="cpu", max_new_tokens=24)
    prompts = [["def read_lines(path):", "class Reader:"]]
    assert generate(engine, prompts).tokens == generate(vanilla, prompts).tokens


# ----------------------------------------------------------------------------------------- mistakes


def failure(capsys, head: Path) -> str:
    argv = ["--checkpoint", str(TARGET), "--eagle", str(head), "--tree", "chain"]
    return refused(capsys, *argv)


def test_a_model_is_no_head(capsys):
    """It is said before its sizes are compared, with the option that takes a model."""
    message = failure(capsys, TARGET)
    assert f"{TARGET} holds a model, and no head" in message
    assert f"use --draft model --draft_checkpoint {TARGET}, or" in message


@pytest.mark.parametrize("width, form", [(128, "int4"), (100, "none")])
def test_the_format_of_a_draft_on_a_gpu_is_by_the_sizes_of_its_layer(tmp_path, width, form):
    config = speculators(official()[0] | {"intermediate_size": width})
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = GenerateConfig(draft="eagle", head=str(tmp_path), device="cuda", dtype="bfloat16")
    assert resolve_draft(options, TARGET).quant_draft == form


NAMED = {  # version, config, what the note names
    "of version 3 in version 2": (
        2, {"norm_before_residual": True, "draft_vocab_size": 5, "fc_norm": True, "norm_output": False},
        "draft_vocab_size, fc_norm, norm_before_residual, norm_output",
    ),
    "unknown": (
        3, {"eagle_config": {"use_mtp_layernorm": True, "use_last_layernorm": True}, "use_sliding_window": True, "new": False},
        "new, use_mtp_layernorm, use_sliding_window",
    ),
    "unknown in version 2": (2, {"residual": "true,norm"}, "residual"),
    "none": (2, {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_keys_without_effect_are_named(name, tmp_path, capsys):
    version, changes, named = NAMED[name]
    source = HEAD if version == 3 else GOLDEN / "models/head_eagle12_mha"
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    head = write_files(tmp_path / "head", merged(config, changes), tensors)
    load_head(head, target() if version == 3 else golden_target())
    note = f"note: {head}: keys of config.json without effect here: {named}"
    assert notes(capsys, tmp_path) == [note] * bool(named)


@pytest.mark.parametrize(
    "head, of_target",
    [
        ("head_eagle3", "target_llama31_gqa8"),
        ("head_eagle12_mha", "target_llama_mha"),
        ("head_eagle12_mixtral", "target_mixtral"),
    ],
)
def test_the_flat_reader_reads_official_heads_as_the_other_does(head, of_target):
    config = read_config(GOLDEN / "models" / of_target)
    path = GOLDEN / "models" / head
    ours = read_official(WeightFiles(path), config)
    files = HeadFiles(path, WeightFiles(path))
    theirs = read_head(files, config)
    assert replace(ours.config, eagle3=None) == replace(theirs, eagle3=None)
    for each in fields(Eagle3) if theirs.eagle3 else ():
        assert getattr(ours.config.eagle3, each.name) == getattr(theirs.eagle3, each.name)
    assert ours.weight_names().items() <= make_head(theirs).weight_names().items()
    ids = draft_vocab(files, 128, [], theirs.eagle3.draft_vocab).ids if theirs.eagle3 else None
    assert (ours.vocab is None) == (ids is None)
    assert ids is None or torch.equal(ours.vocab.ids, ids)
    with pytest.raises(ValueError, match="use the head made for this target"):
        read_official(WeightFiles(path), replace(config, vocab_size=config.vocab_size + 1))
