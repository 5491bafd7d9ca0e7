"""Draft heads in every layout: read as the same function, as the flags say, refused in one line where they are damaged, exported.

tests/cases/heads.py has the heads. FLAGS are changes of the recorded head of EAGLE-3, EQUAL are files that say the same, DAMAGE what is
wrong in one of any kind, NO_PLACE what a layout cannot say.
Scores of block drafters are in test_block_heads.py, those of Medusa and Hydra in test_token_heads.py.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import test_gguf_heads
import test_token_heads
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import heads
from draft_tree import DynamicTree
from drafters import RootOnly
from drafts import block_draft, token_draft
from eagle_draft import Eagle3, EagleDrafter, load_head, read_official
from files.checkpoint import WeightFiles
from files.config import read_config
from files.gguf_header import read_header
from files.head_kinds import head_kind
from files.heads import HeadFiles, draft_vocab, make_head, read_head
from files.rounding import quantize_directory
from files.weights import load_model
from heads import BLOCKS, EAGLE1, EAGLE3, Head, Tensors, merged, write
from helpers import GOLDEN, decode, engine_for, golden_target
from kv_cache import KVCache, causal_window
from quantize import Quantization
from reference import TORCH, use_backend
from run.options import DEMO
from scripts import export_head
from scripts.train import losses
from scripts.train.train_block import BlockTrainConfig, write_files
from scripts.train.train_block import make_head as make_block_head
from tiny_models import Kind, refused

TARGET = GOLDEN / heads.TARGET
IDS = "eagle_aux_hidden_state_layer_ids"
INT8 = Quantization("int8")


def target():
    return golden_target(heads.TARGET)


def renamed(tensors: Tensors, prefix: str) -> Tensors:
    """With another prefix of the layer. model.layers.0: the other names get `model.` too, as NeMo has them."""
    names = {"midlayer": prefix}
    if prefix == "model.layers.0":
        names |= {name: f"model.{name}" for name in ("fc", "norm", "embed_tokens")}
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


def speculators(config: dict, **flags: Any) -> dict:
    left_out = ("architectures", "draft_vocab_size", "torch_dtype")
    inner = {k: v for k, v in config.items() if k not in left_out}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "model_type": "speculators", "draft_vocab_size": config["draft_vocab_size"],
        "transformer_layer_config": inner, **flags,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------- flags


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def reference(
    t: Tensors, features: Tensor, tokens: Tensor, normed_residual: bool, last: str
) -> tuple[Tensor, Tensor]:
    """`run` in the plainest way, without a cache, of tensors with the official names."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    embedding = t.get("embed_tokens.weight", target().embedding.weight)
    if "fc.weight" in t:
        features = features[..., 64:]
        features = rms(features, t["input_norm.weight"]) if "input_norm.weight" in t else features
        parts = features.split(64, -1)
        if "fc_norm.0.weight" in t:
            parts = [rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        features = linear(torch.cat(list(parts), -1), "fc")
    p, given, rows, outs = "midlayer.", features, [], []
    freq = 10000.0 ** -(torch.arange(0, 16, 2) / 16)

    def rotated(x: Tensor, kind: str) -> Tensor:
        y = linear(x, f"{p}self_attn.{kind}_proj").view(x.shape[1], -1, 16)
        if f"{p}self_attn.{kind}_norm.weight" in t:
            y = rms(y, t[f"{p}self_attn.{kind}_norm.weight"])
        if kind == "v":
            return y.transpose(0, 1)
        angles = torch.arange(len(y))[:, None] * freq
        cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None] for f in (torch.cos, torch.sin))
        return (y * cos + torch.cat((-y[..., 8:], y[..., :8]), -1) * sin).transpose(0, 1)

    for begin in (0, tokens.shape[1]):
        normed = rms(given, t[p + "hidden_norm.weight"])
        embedded = rms(embedding[tokens], t[p + "input_layernorm.weight"])
        rows.append(torch.cat((embedded, normed), -1))
        x, h = normed if normed_residual else given, torch.cat(rows, 1)
        q, k, v = (rotated(h, kind) for kind in "qkv")
        k, v = (y.repeat_interleave(2, 0) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(0, 1).reshape(1, h.shape[1], -1)[:, begin:]
        x = x + linear(y, p + "self_attn.o_proj")
        h = rms(x, t[p + "post_attention_layernorm.weight"])
        gate, up = (linear(h, f"{p}mlp.{kind}_proj") for kind in ("gate", "up"))
        given = x + linear(F.silu(gate) * up, p + "mlp.down_proj")
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
FC_NORM = {f"fc_norm.{i}.weight": fresh(64 + i)[:64] for i in range(3)}
ROWS_OF = {"self_attn.q": 64, "self_attn.k": 32, "self_attn.v": 32, "self_attn.o": 64, "mlp.gate": 112, "mlp.up": 112, "mlp.down": 64}  # fmt: skip
BIASES = {f"midlayer.{name}_proj.bias": fresh(n) for name, n in ROWS_OF.items()}
SAME = {
    "embed_tokens.weight": target().embedding.weight.detach().clone()
}  # the head has none of its own then
SHIFTED = {"use_aux_hidden_state": True, "norm_before_residual": False}
FLAGS: dict[str, tuple[dict, dict, dict]] = {  # config, tensors, the reference's options and the layer's prefix
    "SafeAILab": ({}, {}, {}),
    "SpecForge": ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: [1, 3, 4], **SHIFTED}}, {}, {}),
    "vLLM": ({"architectures": ["Eagle3LlamaForCausalLM"], "norm_output": False, IDS: []}, SAME, {"prefix": "layers.0"}),
    "speculators": (speculators(EAGLE3.keys, norm_output=False, norm_before_residual=False, **{IDS: [2, 4, 5]}), {}, {"prefix": "layers.0"}),
    "NeMo": ({"architectures": ["LlamaEagle3DraftModel"], "target_hidden_size": 64, "norm_output": False}, SAME, {"prefix": "model.layers.0"}),
    "DeepSpec": (  # names its layers by their outputs
        {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 4]}, {}, {"prefix": "layers.0"},
    ),
    "norm_before_residual": ({"norm_before_residual": True}, {}, {"normed_residual": True}),
    "norm_before_fc": ({"eagle_config": {"norm_before_fc": True}}, {"input_norm.weight": fresh(192)}, {}),
    "fc_norm": ({"fc_norm": True}, FC_NORM, {}),
    "fc bias": ({"bias": True}, {"fc.bias": fresh(64)}, {}),
    "biases": ({}, BIASES, {}),  # the weights decide, not the config
    "no biases": ({"attention_bias": True, "mlp_bias": True, "bias": True}, {}, {}),
    "no fc": ({"eagle_config": {"use_aux_hidden_state": False}}, {"fc.weight": None}, {}),
    "norm_output true": ({"norm_output": True}, {}, {}),
    "norm_output false, no norm": ({"norm_output": False}, {"norm.weight": None}, {"last": "none"}),
    "speculators' norm_output": (speculators(EAGLE3.keys, norm_output=True), {}, {"last": "fed"}),
    "vLLM's norm_output": ({"norm_output": True, "architectures": ["Eagle3LlamaForCausalLM"]}, {}, {"last": "fed"}),
    "vLLM's prefix": ({"norm_output": True}, {}, {"last": "fed", "prefix": "layers.0"}),
    "NeMo's prefix": ({"norm_output": True}, {}, {"last": "fed", "prefix": "model.layers.0"}),
    "fc_norm fed": ({"norm_output": True}, FC_NORM, {"last": "fed"}),
    "whole vocabulary": ({"draft_vocab_size": 128}, WHOLE, {}),
    "own whole LM head": ({"draft_vocab_size": 128}, WHOLE | {"lm_head.weight": fresh(128, 64)}, {}),
    "own embedding": ({}, {"embed_tokens.weight": fresh(128, 64)}, {}),
    "norms of q and k": ({}, QK, {}),
    "five aux_layers": (
        {"target_layer_ids": [0, 1, 3, 5, 7], "draft_vocab_size": None},
        WHOLE | QK | {"fc.weight": fresh(64, 320), "lm_head.weight": fresh(128, 64)}, {"aux_layers": (1, 2, 4, 6, 8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_heads_of_eagle_3_are_what_the_reference_computes(name, tmp_path, capsys):
    changes, weights, told = FLAGS[name]
    config = changes if "transformer_layer_config" in changes else EAGLE3.keys | changes
    tensors = merged(EAGLE3.tensors, weights)
    held = renamed(tensors, told.get("prefix", "midlayer"))
    path = write(tmp_path / "head", Head(config, held))
    if name == "SafeAILab":
        torch.save(held, path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    head = load_head(path, target())
    assert head.aux_layers == told.get("aux_layers", () if name == "no fc" else (2, 4, 5))
    assert (head.embedding is None) == (name != "own embedding")
    given = inputs(aux_layers=len(head.aux_layers))
    normed = told.get("normed_residual", False)
    want = reference(tensors, *given, normed, told.get("last", "logits"))
    torch.testing.assert_close(run(head, *given), want, atol=2e-4, rtol=1e-4)
    assert not notes(capsys, tmp_path)


def test_a_head_of_another_width(tmp_path):
    """fc brings the target's features to the head's own width; embedding and LM head are the head's."""
    tensors = EAGLE3.tensors
    cut = {n: t[..., :32] if t.dim() and t.shape[-1] == 64 else t for n, t in tensors.items()}
    for name, t in cut.items():
        if "self_attn" in name and t.shape[-1] == 128:
            cut[name] = t[:, :64]
        elif t.dim() == 2 and t.shape[0] == 64 and "q_proj" not in name:
            cut[name] = t[:32]
    cut["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"][:32]
    keys = {"hidden_size": 32, "head_dim": 16, "target_hidden_size": 64}
    cut = {n: t.clone() for n, t in cut.items()} | {"embed_tokens.weight": fresh(128, 32)}
    head = load_head(write(tmp_path / "head", EAGLE3, keys, **cut), target())
    drafter = EagleDrafter(head, target(), DynamicTree(3, 4, 12))
    options = {"max_new_tokens": 20, "ignore_eos": True}
    engines = (engine_for(target(), each, **options) for each in (drafter, RootOnly()))
    drafted, plain = (decode(engine, [5, 17, 3]) for engine in engines)
    assert drafted.history == plain.history


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
    head = write(tmp_path / "head", EAGLE3 if version == 3 else EAGLE1, changes)
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


# ------------------------------------------------------------------------------------- damaged files

TARGET_OF = {"eagle1": heads.LLAMA, "medusa": heads.LLAMA, "hydra": heads.LLAMA, "gguf eagle3": ""}
D2T = EAGLE3.tensors["d2t"]


DAMAGE = {  # case -> keys, tensors, what is said
    "eagle1": [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "mixes versions: an EAGLE-3 config"),
        ({}, {"fc.weight": None}, "is in no layout of the kind eagle that is known: its tensors are"),
    ],
    "eagle3": [
        ({IDS: [2, 4, 9]}, {}, "takes the inputs of the target's layers 2, 4, 9, which must ascend from 0 to 8"),
        ({IDS: [2, 4, 5], "target_layer_ids": [2, 4, 5]}, {}, "the target's layers are named twice, as inputs"),
        ({IDS: [2, 4]}, {}, "fc.weight has shape [64, 192], but its config asks for [64, 128]"),
        ({"fc_norm": True, "use_aux_hidden_state": False}, {}, "fc_norm norms what fc takes, and use_aux_hidden_state is"),
        ({}, {"model.norm.weight": fresh(64)}, "mixes versions: it has tensors of two layouts"),
        ({}, {"d2t": torch.cat((D2T[:1], D2T[:1] - 1, D2T[2:]))}, "d2t reaches the token 1 twice"),
        ({"hidden_size": 32, "target_hidden_size": 64}, {}, "needs its own embed_tokens, fc and lm_head"),
        ({"eagle_config": {"vocab_size": 9}}, {}, "vocab_size is 128, and 9 in another place; keep one"),
        ({}, {"mask_hidden": fresh(192)}, "needs a mask_token_id below vocab_size (128); it is None"),
    ],
    "peagle": [
        ({}, {"mask_hidden": torch.zeros(1, 1, 64)}, "mask_hidden"),
    ],
    "DeepSpec": [
        ({"target_layer_ids": [0, 1, 3, 4]}, {}, "fc takes 320 inputs, and target_layer_ids names 4 layers of width 64"),
        ({"mask_token_id": 128}, {}, "mask_token_id must be below the target's vocab_size (128); it is 128"),
        ({"markov_head_type": "rnn"}, {}, "markov_head_type must be vanilla or gated; it is 'rnn'"),
        ({}, {"confidence_head.proj.weight": torch.zeros(1, 60)}, "confidence_head takes 60 inputs"),
        ({}, {"hidden_norm.weight": None}, "is in no layout of the kind block that is known"),
    ],
    "dflash": [
        ({"speculators_model_type": "xpress"}, {}, "speculators_model_type must be dflash or dspark or dflash2; it is 'xpress'"),
        ({"transformer_layer_config": {"sliding_window": None}}, {}, "layer_types has sliding_attention, and there is no window"),
        ({"transformer_layer_config": {"layer_types": ["linear_attention"] * 2}}, {}, "layer_types must be a list of sliding_attention and full_attention"),
    ],
    "dflash2": [
        ({"conv_group_size": 7}, {}, "conv_group_size must divide hidden_size (64); it is 7"),
        ({"projector_type": "domino"}, {}, "projector_type must be dspark or dflash2 or lilicorr; it is 'domino'"),
        ({"use_swa": True}, {}, "use_swa must be false"),
    ],
    "dspine": [
        ({"dspine_config": None}, {}, "unexpected weight"),
    ],
    "lilicorr": [
        ({"dflash_config": {"lilicorr_num_heads": 3}}, {}, "must divide lilicorr_hidden_size (32); it is 3"),
        ({"dflash_config": {"lilicorr_candidate_topk": 129}}, {}, "at most vocab_size (128); it is 129"),
        ({"dflash_config": {"block_size": 8}}, {}, "block_size is 6, and 8 in another place; keep one"),
        ({}, {"lm_head.weight": torch.zeros(128, 64)}, "this head has tables, a bias or a selector of its own"),
    ],
    "gguf eagle3": [
        ({"logit_scale": 2.0}, {}, "eagle3.logit_scale is 2.0, which is not supported"),
        ({}, {"d2t": (Kind.I64, np.full(512, 10))}, "d2t reaches the token 10 twice"),
        ({}, {"blk.0.sinks.weight": (Kind.F32, np.zeros(8, np.float32))}, "1 unexpected weight(s)"),
    ],
    "gguf dflash": [
        ({"attention.sliding_window_pattern": [True]}, {}, "layer_types must name 2 layers; it names 1"),
    ],
    "gguf dflash2": [
        ({"selector_top_k": None}, {}, "selector_top_k must be 1 to"),
    ],
    "gguf dspark": [({}, {"layer_fusion": torch.zeros(2, 5)}, "1 unexpected weight(s)")],
    "medusa": [
        ({}, {"0.0.linear.weight": torch.zeros(32, 32)}, "hidden_size is 32, the target's is 64; use the head made"),
        ({"block_size": 6}, {}, "heads of several kinds: medusa_lm_head.pt (medusa), the key block_size (block); give each"),
    ],
    "hydra": [
        ({"hydra_num_heads": 6}, {}, "config.json says hydra_num_heads 6, and the weights hold 4 heads"),
        ({"hydra_head_arch": "cross-attn"}, {}, "hydra_head_arch must be mlp or prefix-mlp; it is 'cross-attn'"),
    ],
}  # fmt: skip
ROWS = [(case, *row) for case, rows in DAMAGE.items() for row in rows]


@pytest.fixture(scope="module")
def head_of(tmp_path_factory):
    """A function of a case of DAMAGE: the head, undamaged."""

    @functools.cache
    def of(case: str) -> Head:
        if case in ("medusa", "hydra"):
            return test_token_heads.made(case)[1]
        if case != "gguf eagle3":
            return {"eagle1": EAGLE1, "eagle3": EAGLE3, **BLOCKS}[case]
        path = tmp_path_factory.mktemp("gguf")
        source = write(path / "plain", test_gguf_heads.head())
        test_gguf_heads.export(source, path / "h.gguf", "--type", "f16")
        metadata = read_header(path / "h.gguf").metadata
        keys = {
            k.removeprefix("eagle3."): v for k, v in metadata.items() if k.startswith("eagle3.")
        }
        reader = gguf.GGUFReader(path / "h.gguf")
        tensors = {t.name: (t.tensor_type, t.data.copy()) for t in reader.tensors}
        return Head(keys, tensors, file="eagle3.gguf")

    return of


def load(path: Path, case: str, *quant: Quantization) -> Any:
    """Load a head of any kind."""
    name = TARGET_OF.get(case, heads.TARGET)
    model = golden_target(name) if name else load_model(Path(DEMO))
    loaders = {"eagle": load_head, "block": block_draft.load_head}
    return loaders.get(head_kind(path), token_draft.load_heads)(path, model, *quant)


@pytest.mark.parametrize("case, keys, tensors, message", ROWS)
def test_damaged_files_are_refused_in_one_line(head_of, case, keys, tensors, message, tmp_path):
    path = write(tmp_path / "head", head_of(case), keys, **tensors)
    with pytest.raises(ValueError) as found:
        load(path, case)
    said = str(found.value)
    assert message in said and path.name in said and "\n" not in said


def of_eagle_1(bias: bool) -> tuple[Head, Head]:
    """EAGLE-1's head in speculators' layout, and in the official one."""
    held = merged(EAGLE1.tensors, {} if bias else {"fc.bias": None})
    theirs = {
        n.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): v
        for n, v in held.items()
    }
    theirs["lm_head.weight"] = golden_target().lm_head.weight.detach().clone()
    keys = {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "layernorms": False,
        "fusion_bias": bias, "transformer_layer_config": EAGLE1.keys,
    }  # fmt: skip
    return Head(keys, theirs), Head(EAGLE1.keys | {"bias": bias}, held)


def in_another_order() -> Head:
    """EAGLE-3's, whose columns are put in the order of the tokens."""
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(80) + D2T)[order]
    rows = EAGLE3.tensors["lm_head.weight"][order]
    mixed = {"lm_head.weight": rows, "d2t": ids - torch.arange(80)}
    return EAGLE3._replace(tensors=EAGLE3.tensors | mixed)


def with_books(head: Head) -> Head:
    """DFlash2's codebooks under the names of z-lab's class."""
    return head._replace(
        tensors={f"{n}.weight" if n.endswith("codebook") else n: v for n, v in head.tensors.items()}
    )


EPS = 2.0**-20  # which fp32 holds


def of_block(kind: str, head: Head) -> tuple[Head, Head]:
    """A GGUF file of a block drafter, and the directory that says the same."""
    theirs = heads.beside_gguf(kind)
    keys = head.keys | {"attention.layer_norm_rms_epsilon": EPS}
    return head._replace(keys=keys), theirs._replace(keys=theirs.keys | {"rms_norm_eps": EPS})


def alike(case: str, keys: dict) -> tuple:
    """A case whose keys change nothing, and the case."""
    return case, lambda head: (head._replace(keys=merged(head.keys, keys)), head)


# llama.cpp's count of layers is at most the tensors'; the config of Vicuna's heads counts the target's layers
MANY, OF_GGUF = {"num_hidden_layers": 6000}, {"block_count": 9}
OLDER = {"target_layers": None, "extract_layers": [1, 4, 6]}
EQUAL = {  # case, a function of its head that returns two heads that say the same
    **{case: alike(case, OF_GGUF if "gguf" in case else MANY) for case in DAMAGE if case not in ("medusa", "hydra")},
    **{f"{case}'s layers": alike(case, {"transformer_layer_config": MANY}) for case in ("dflash", "dflash2", "peagle")},
    **{case: alike(case, {}) for case in ("medusa", "hydra")},
    "older key of layers": alike("gguf eagle3", OLDER),
    "EAGLE-1 of speculators": ("eagle1", lambda head: of_eagle_1(True)),
    "EAGLE-1 of speculators without a bias": ("eagle1", lambda head: of_eagle_1(False)),
    **{f"{kind} and its directory": (f"gguf {kind}", functools.partial(of_block, kind)) for kind in heads.GGUF_OWN},
    "tokens in any order": ("eagle3", lambda head: (in_another_order(), head)),
    "codebooks of z-lab": ("z-lab", lambda head: (with_books(head), head)),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_files_that_say_the_same(head_of, name, tmp_path, capsys):
    """Quantized copies, as quantize.py writes them, have the codes of loading: convolutions and tables of tokens stay."""
    case, make = EQUAL[name]
    ours, theirs = (write(tmp_path / str(n), h) for n, h in enumerate(make(head_of(case))))
    assert_equal(load(ours, case), load(theirs, case))
    if ours.is_dir():
        quantize_directory(ours, tmp_path / "int8", INT8)
        assert_equal(load(tmp_path / "int8", case), load(theirs, case, INT8))
    assert "without effect" not in capsys.readouterr().err


def assert_equal(ours, theirs) -> None:
    assert ours.config == theirs.config
    for values in ("named_parameters", "named_buffers"):
        held = dict(getattr(theirs, values)())
        for name, value in getattr(ours, values)():
            assert torch.equal(value, held.pop(name)), name
        assert not held
    vocab = getattr(theirs, "vocab", None)
    assert vocab is None or torch.equal(ours.vocab.ids, vocab.ids)


def test_a_model_is_no_head(capsys):
    """It is said before its sizes are compared, with the option that takes a model."""
    said = refused(capsys, "--checkpoint", str(TARGET), "--eagle", str(TARGET), "--tree", "chain")
    assert f"{TARGET} holds a model, and no head" in said
    assert f"use --draft model --draft_checkpoint {TARGET}, or" in said


# ------------------------------------------------------------------------------------------ exports


def export(head, out, layout, model=TARGET, **options):
    """Write a head. Returns: config.json and the tensors."""
    paths = {"head": str(head), "checkpoint": str(model), "out": str(out)}
    config = export_head.ExportConfig(**paths, layout=layout, **options)
    config.check()
    export_head.run(config)
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


def block_head(path, **options):
    """Write a random DFlash head of the target. Returns: its directory."""
    torch.manual_seed(0)
    config = BlockTrainConfig(layers=1, block_size=4, **options)
    head = make_block_head(config, target(), [SimpleNamespace(ids=[1, 2, 3])])
    for parameter in head.parameters():
        parameter.data.normal_()
    path.mkdir()
    write_files(head, path, "bfloat16", {})
    return path


def eagle_head(path):
    halves = {k: x.bfloat16() for k, x in EAGLE3.tensors.items() if x.is_floating_point()}
    return write(path, EAGLE3, {"draft_sharpness": 1.5}, **halves)


EXPORTED = {  # a function that writes a head, one that loads it, its kind in speculators' layout
    "eagle3": (eagle_head, load_head),
    "dflash": (block_head, block_draft.load_head),
    "dflash2": (functools.partial(block_head, selector_rank=8), block_draft.load_head),
}


@pytest.mark.parametrize("layout", export_head.LAYOUTS[1:])
@pytest.mark.parametrize("kind", EXPORTED)
def test_what_is_written_is_read_back_as_the_same_head(layout, kind, tmp_path, capsys):
    """Its config, too: the export itself compares it. The command that serves it is said."""
    make, read_back = EXPORTED[kind]
    source = make(tmp_path / "source")
    keys, written = export(source, tmp_path / "out", layout)
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    served = {"model": str(tmp_path / "out"), "num_speculative_tokens": 3}
    if layout == "vllm":
        assert command[:4] == ["vllm", "serve", str(TARGET), "--speculative-config"]
        assert json.loads(command[4]) == served
    else:
        assert ("--speculative-num-steps" in command) == (kind == "eagle3")
        assert {str(TARGET), served["model"]} < set(command)
    before, after = (read_back(path, target()) for path in (source, tmp_path / "out"))
    own, other = dict(before.named_parameters()), dict(after.named_parameters())
    if kind == "eagle3" and layout == "vllm":  # the target's, rounded
        assert other.pop("embedding.weight").equal(target().embedding.weight.bfloat16().float())
    assert own.keys() == other.keys() and len(own) > 8
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert (before.vocab is None) or after.vocab.ids.equal(before.vocab.ids)
    assert after.config.sharpness == before.config.sharpness
    assert keys.get("speculators_model_type", kind) == kind
    assert ("speculators_model_type" in keys) == (layout == "vllm")
    assert {x.dtype for x in written.values()} <= {torch.bfloat16, torch.int64, torch.bool}
    if kind != "eagle3":
        assert kind == "dflash" or written["layers.0.mlp_conv.base_kernel"].dim() == 3
    elif layout == "sglang":
        assert keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
        assert written.keys() == EAGLE3.tensors.keys()
    else:
        assert keys["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        names = {name.replace("midlayer", "layers.0") for name in EAGLE3.tensors}
        assert written.keys() == names | {"embed_tokens.weight"}


def changed(keys: dict, **tensors) -> Callable[[Path], Path]:
    return lambda path: write(path, EAGLE3, keys, **tensors)


FOUR = {IDS: [1, 2, 4, 6]}
NO_PLACE = [  # a function that writes a head, the layout, what is said
    (functools.partial(block_head, causal=True), "vllm", "whose causal is True; it would be read as False"),
    (changed({"norm_before_residual": True}), "sglang", "whose norm_before_residual is True"),
    (block_head, "llama.cpp", "no place for a head that is a block drafter"),
    (changed(FOUR, **{"fc.weight": torch.zeros(64, 256)}), "llama.cpp", "takes 4 layers' hidden states, not 3"),
    (changed({}, **{"fc.bias": torch.zeros(64)}), "llama.cpp", "the layout llama.cpp has no place for a head with the weights fc.bias"),
    (changed({}, **{"norm.weight": torch.full((64,), 1e6)}), "llama.cpp", "norm.weight has numbers beyond 16 bits"),
    (changed({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}), "llama.cpp", "whose rope_scaling is {'rope_type': 'yarn'"),
    (changed({"norm_before_fc": True}), "llama.cpp", "the weights input_norm.weight are missing"),
]  # fmt: skip


@pytest.mark.parametrize("make, layout, says", NO_PLACE)
def test_what_a_layout_has_no_place_for_is_refused(make, layout, says, tmp_path):
    """Nothing is written. Other mistakes are in test_gguf_heads.py."""
    head = make(tmp_path / "head")
    with pytest.raises(ValueError, match=says):
        export(head, tmp_path / ("out.gguf" if layout == "llama.cpp" else "out"), layout)
    assert [*tmp_path.iterdir()] == [head]


@pytest.mark.parametrize("kind", EXPORTED)
def test_speculators_loads_what_is_written(kind, tmp_path):
    """Every weight, and of EAGLE-3 the scores of three steps of its training, where it feeds the text's own tokens."""
    speculators = pytest.importorskip("speculators", exc_type=ImportError)
    make, read_back = EXPORTED[kind]
    export(make(tmp_path / "source"), tmp_path / "out", "vllm")
    ours = read_back(tmp_path / "out", target())
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path / "out").float()
    held = dict(theirs.state_dict())
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(held[name], value.to(held[name].dtype)), name
    if kind != "eagle3":
        return
    use_backend(ours, TORCH)
    T = 128  # of a block of its attention
    tokens = torch.randint(0, 128, (1, T), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(T)[None]
    features = target()(tokens, positions, aux_layers=ours.aux_layers)
    scores = []
    theirs.lm_head.register_forward_hook(lambda layer, inputs, z: scores.append(z))
    later = F.pad(tokens[:, 1:], (0, 3))
    with torch.no_grad():
        aux = features[..., target().config.dim :]
        theirs(aux, later[:, :T], torch.zeros_like(tokens), ttt_steps=3)
        past = losses.Past.empty(ours)
        hidden = ours.project(features)
        for s in range(3):
            embedded = ours.embedding(later[:, s : s + T])
            hidden = losses.unrolled_step(ours, embedded, hidden, s, past)
            mine = ours.lm_head(ours.output_norm(hidden))[:, : T - 1 - s]
            far = (mine - scores[s][:, : T - 1 - s]).abs().max()
            assert far < 1e-4 < 0.1 < mine.std(), s
