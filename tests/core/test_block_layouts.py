"""Block drafters as the package speculators writes them: its own scores on the same weights, files, and vanilla's tokens.

golden/block_heads/speculators.safetensors has the scores of the official code (golden/README.md) on the directories that
`write_head` makes.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from test_block_draft import trained_dir

from backends.fusions import NEXT_READER, AddNorm, MergedModel
from backends.library import has_cpu_operators
from backends.weight import Embedding
from block_files import (
    LEVELS,
    MASK,
    SHAPE,
    TARGET,
    drafter_of,
    drafts,
    random_weights,
    recorded,
    recorded_levels,
    shapes_of_layers,
    small,
    write_files,
)
from draft_tree import DynamicTree, StaticTree
from drafters import DraftInputs
from drafts.block_draft import SparkDrafter, load_head
from drafts.parallel_eagle import ParallelEagleDrafter
from eagle_draft import load_head as load_eagle
from files.rounding import quantize_directory
from helpers import GOLDEN, PROMPTS, compiled_as_on_cuda, decode, engine_for, golden_target, slow
from quantize import BLOCKS, Quantization
from run.generate import generate, load
from tiny_models import Kind, write

LAYER = SHAPE | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 128, "max_window_layers": 28, "pad_token_id": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
WINDOW = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
COMMON = {
    "aux_hidden_state_layer_ids": [1, 2, 4, 5, 7], "block_size": 6, "dtype": "float32", "mask_token_id": 127,
    "sample_from_anchor": False, "sliding_window_non_causal": False, "speculators_version": "0.9.0",
    "target_hidden_size": None, "tie_word_embeddings": False, "draft_vocab_size": 128,
}  # fmt: skip
FURTHER = {  # kind -> its layers' keys, its own keys
    "dflash": (WINDOW, {"draft_vocab_size": 40}),
    "dflash2": (WINDOW, {
        "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6,
        "sliding_window_non_causal": True,
    }),
    "dspark": (FULL, {
        "markov_rank": 32, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "draft_vocab_size": 40,
    }),
}  # fmt: skip
DRAFTED = (torch.arange(40) * 7 + 3) % 128  # not in order
SOME_TOKENS = {
    "d2t": DRAFTED - torch.arange(40),
    "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, DRAFTED, True),
}


def config_of(kind: str) -> dict:
    """The content of config.json."""
    layer, own = FURTHER[kind]
    greedy = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
    }
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": None}
    method = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }
    return COMMON | own | {
        "architectures": [{"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind] + "DraftModel"],
        "speculators_config": method, "speculators_model_type": kind, "transformer_layer_config": LAYER | layer,
    }  # fmt: skip


def convolutions() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of DFlash2's convolutions."""
    names = [f"layers.{i}.{part}_conv" for i in range(2) for part in ("attention", "mlp")]
    kernels = {f"{name}.base_kernel": (2, 3, 64) for name in names}
    return kernels | {f"{name}.kernel_projection.weight": (48, 64) for name in names}


def selector() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of DFlash2's selector."""
    books = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]
    return dict.fromkeys(books, (128, 8)) | {"candidate_selector.hidden_projection.weight": (8, 64)}


def weights(kind: str) -> dict[str, torch.Tensor]:
    """Random weights, the same everywhere."""
    shapes = shapes_of_layers()
    if kind == "dflash2":
        return random_weights(shapes | convolutions() | selector())
    shapes["lm_head.weight"] = (40, 64)
    if kind == "dspark":
        shapes |= {
            "markov_head.markov_w1.weight": (128, 32), "markov_head.markov_w2.weight": (40, 32),
            "confidence_head.proj.weight": (1, 96), "confidence_head.proj.bias": (1,),
        }  # fmt: skip
    return random_weights(shapes) | SOME_TOKENS


def gate_of_dspark() -> dict[str, torch.Tensor]:
    draw = numpy.random.RandomState(6).standard_normal
    weight, bias = (torch.from_numpy(draw(shape)).float() for shape in ((32, 96), (32,)))
    return {"markov_head.gate_proj.weight": weight * 0.3, "markov_head.gate_proj.bias": bias}


def write_head(path: Path, kind: str, changes: dict | None = None, **tensors) -> Path:
    """Write a head. changes: to config.json; tensors: to the weights, by name, None: left out"""
    return write_files(path, config_of(kind) | (changes or {}), weights(kind) | tensors)


def trace() -> dict[str, torch.Tensor]:
    return recorded("speculators")


# ------------------------------------------------------------------------------------------ scores


def test_dflash_with_a_window_and_some_tokens(tmp_path):
    """Its first layer sees four tokens before the root; it drafts 40 tokens, which are not in order in the file."""
    drafter = drafter_of(write_head(tmp_path / "head", "dflash"))
    order = DRAFTED.argsort()
    assert drafter.vocab.ids.tolist() == DRAFTED[order].tolist()
    for number, (state, inputs) in enumerate(drafts(drafter)):
        ours = drafter.level_scores(state, inputs)[0]
        assert (ours - trace()["dflash.logits"][number][:, order]).abs().max() < 1e-4
        chain = drafter.propose(state, inputs).tokens[0, 1:]
        assert chain.tolist() == DRAFTED[trace()["dflash.logits"][number].argmax(-1)].tolist()


@pytest.mark.parametrize("kind, name", [
    ("dspark", "dspark"),  # its root is the bonus token: a position predicts its own token
    ("dspark", "gated"),  # a level's state gates the row of the token before; the confidence reads it as it is
    ("dflash2", "dflash2"),  # the best six tokens behind the token before; others are not drafted
    ("dspine", "dspine"),  # the same, once the last layer knows the token before
])  # fmt: skip
def test_levels_behind_a_token_are_the_official_ones(kind, name, tmp_path):
    """The greedy chain, the scores of every level behind it, and the confidence, over some tokens or all."""
    gated = {"changes": {"markov_head_type": "gated"}} | gate_of_dspark() if name == "gated" else {}
    drafter = drafter_of(WRITERS[kind](tmp_path / "head", **gated))
    official = trace()
    for at, z, sure in recorded_levels(drafter, name, official):
        drafted = DRAFTED.argsort()
        if f"{name}.candidates" in official:
            best = official[f"{name}.candidates"][at]
            others = torch.ones(128, dtype=torch.bool).index_fill(0, best, False)
            assert z[others].max() < -1e29
            z, drafted = z[best], slice(None)
        assert (z - official[f"{name}.logits"][at][drafted]).abs().max() < 1e-4
        if f"{name}.confidence" in official:
            assert (sure - official[f"{name}.confidence"][at].sigmoid().log()).abs().max() < 1e-5
    for number, (state, inputs) in enumerate(drafts(drafter) if kind == "dspine" else ()):
        unary = drafter.root_output(state, inputs)[0].scores[0]
        assert (unary - official["dspine.unary"][number]).abs().max() < 1e-4


def test_a_selector_over_some_tokens(tmp_path):
    """As GGUF files may have it: the tables have rows for all tokens, the LM head for those that are drafted."""
    rows = golden_target(TARGET).lm_head.weight.detach()[DRAFTED].clone()
    tensors = {"lm_head.weight": rows, "d2t": DRAFTED - torch.arange(40)}
    some = drafter_of(write_head(tmp_path / "a", "dflash2", {"draft_vocab_size": 40}, **tensors))
    whole = drafter_of(write_head(tmp_path / "b", "dflash2", {"selector_top_k": 128}))

    def scores(drafter: SparkDrafter, state, inputs: DraftInputs) -> torch.Tensor:
        out, _ = drafter.root_output(state, inputs)
        before = drafter.head.token_rows(torch.tensor([[5, 40]]))
        return drafter.logits(out._replace(before=before), 1)[0]

    for (state, inputs), (other, _) in zip(drafts(some), drafts(whole)):
        z = scores(some, state, inputs)
        every = scores(whole, other, inputs)[:, some.vocab.ids]
        chosen = z > -1e29
        assert (chosen.sum(1) == 6).all()
        assert (z - every)[chosen].abs().max() < 1e-4


ZLAB = {  # DFlash2's keys beside the layers', as z-lab has them
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "block_size": 6, "conv_group_size": 8, "conv_kernel_size": 3, "mask_token_id": 127, "selector_rank": 8,
        "selector_top_k": 6, "target_layer_ids": [0, 1, 3, 4, 6],
    },
}  # fmt: skip


def write_zlab(path: Path, changes: dict | None = None, **tensors) -> Path:
    """Write DFlash2's weights with z-lab's keys. tensors: as for `write_head`"""
    return write_files(path, LAYER | WINDOW | ZLAB | (changes or {}), weights("dflash2") | tensors)


@pytest.mark.parametrize("kind, changes", [("mixed", {}), ("free", {"is_causal": False})])
def test_windows_as_z_lab_counts_them(kind, changes, tmp_path):
    """From each position, and to both sides where the block is not causal."""
    drafter = drafter_of(write_zlab(tmp_path / "head", changes))
    for number, (state, inputs) in enumerate(drafts(drafter)):
        ours = drafter.level_scores(state, inputs)[0]
        assert (ours - trace()[f"zlab.{kind}"][number]).abs().max() < 1e-4
    assert (trace()["zlab.mixed"] - trace()["zlab.free"]).abs().max() > 0.1


def test_factor_cap_and_scale(tmp_path):
    """Scores are multiplied, then capped; embeddings of the block are scaled."""
    plain = drafter_of(write_zlab(tmp_path / "plain"))
    factor = drafter_of(
        write_zlab(tmp_path / "a", {"output_multiplier": 0.5, "final_logit_softcapping": 3.0})
    )
    scale = drafter_of(write_zlab(tmp_path / "b", {"input_embedding_scale": 8.0}))
    for (state, inputs), (other, _) in zip(drafts(plain), drafts(factor)):
        want = 3 * torch.tanh(plain.level_scores(state, inputs) * 0.5 / 3)
        assert (factor.level_scores(other, inputs) - want).abs().max() < 1e-5
    tokens = torch.tensor([[5, 127]])
    ours, theirs = (drafter.head.embed(tokens, tokens, None).stream for drafter in (scale, plain))
    assert torch.equal(ours, theirs * 8)


# ------------------------------------------------------------------------------------------- DSpine

DSPINE = {  # keys beside the layers', as SpecForge's converter and `save_pretrained` write them
    "architectures": ["DSpineDraftModel"], "block_size": 6,
    "dflash_config": {"block_size": 6, "mask_token_id": 127, "target_layer_ids": [0, 1, 3, 4, 6]},
    "dspine_config": {
        "alignment_warmup_steps": 146, "alignment_weight": 0.5, "candidate_mass_threshold": 1e-4, "ce_weight": 0.1,
        "message_size": 32, "replacement_end_ratio": 1 / 3, "replacement_hold_ratio": 1 / 6, "replacement_layers": 3,
        "replacement_probability": 0.5, "top_k": 6, "transfer_rank": 32,
    },
}  # fmt: skip


INJECTION = {  # the shapes of its weights
    "injection.message.weight": (32, 32), "injection.bias": (32,), "injection.receiver_gate.weight": (32, 32),
    "injection.predecessor_gate.weight": (32, 32), "transfer_codes": (128, 32),
    **{f"injection.readouts.{i}.weight": (32, 64) for i in range(2)},
    **{f"injection.writes.{i}.weight": (64, 32) for i in range(2)},
}  # fmt: skip


def write_dspine(path: Path, changes: dict | None = None, **tensors) -> Path:
    """Write a DSpine head. Arguments as for `write_head`."""
    held = random_weights(shapes_of_layers() | INJECTION)
    held["transfer_codes"] /= held["transfer_codes"].norm(dim=-1, keepdim=True)
    held |= {"transfer_ready": torch.tensor(True)} | tensors
    return write_files(path, LAYER | FULL | DSPINE | (changes or {}), held)


def test_dspine_over_a_packed_lm_head_and_in_a_tree(tmp_path):
    """Rows that are not read one by one give the same scores; so does a level of several nodes."""
    drafter = drafter_of(write_dspine(tmp_path / "head"))
    state, inputs = next(drafts(drafter))
    out, _ = drafter.root_output(state, inputs)
    frontier = SimpleNamespace(tokens=torch.tensor([[5, 17, 40]]))
    out = drafter.forward_nodes(state, frontier, out, None, None)
    together = drafter.logits(out, 2)
    exact = drafter.lm_head.weight.detach()
    drafter.lm_head = SimpleNamespace(packed=True)
    drafter.head.score = lambda hidden, lm_head: hidden @ exact.T
    assert (drafter.logits(out, 2) - together).abs().max() < 1e-4
    for node, token in enumerate([5, 17, 40]):
        alone = SimpleNamespace(tokens=torch.tensor([[token]]))
        each = drafter.forward_nodes(state, alone, out, None, None)
        assert (drafter.logits(each, 2)[0, 0] - together[0, node]).abs().max() < 1e-4


# ----------------------------------------------------------------------------------------- LiLiCorr

LILICORR = {  # keys beside the layers', as Model-Optimizer's exporter writes them
    "architectures": ["LiLiCorrDraftModel"], "block_size": 6, "num_target_layers": 8, "rope_theta": 10000.0,
    "dflash_config": {
        "mask_token_id": 127, "target_layer_ids": [0, 1, 3, 4, 6], "causal": False, "projector_type": "lilicorr",
        "lilicorr_enabled": True, "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 32, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 4, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 8, "lilicorr_vector_eps": 1e-4,
        "lilicorr_logit_scale": 8.0,
    },
}  # fmt: skip


def correlator_shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a correlator."""
    shapes = {
        "slot_embedding": (1, 1, 5, 1, 32), "rank_embedding": (1, 1, 1, 4, 32), "relative_slot_bias": (4, 11),
        "same_slot_bias": (4,), "output_norm.weight": (32,), "anchor_norm.weight": (32,),
    }  # fmt: skip
    linear = {
        "token_proj": (32, 64), "pass_hidden_proj": (32, 64), "context_proj": (32, 64), "factor_input_proj": (32, 96),
        "feature_mlp.0": (5,), "feature_mlp.1": (32, 5), "feature_mlp.3": (32, 32),
        "in_head": (8, 32), "out_head": (8, 32), "anchor_out_head": (8, 32),
    }  # fmt: skip
    for layer in ("layers.0.", "layers.1."):
        linear |= {f"{layer}attn.out_proj": (32, 32), f"{layer}mlp.0": (64, 32), f"{layer}mlp.2": (32, 64)}  # fmt: skip
        shapes |= {f"{layer}attn.in_proj_weight": (96, 32), f"{layer}attn.in_proj_bias": (96,)}
        shapes |= {f"{layer}{name}_norm.weight": (32,) for name in ("attn", "mlp")}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"lilicorr.{name}": shape for name, shape in shapes.items()}


def write_lilicorr(path: Path, changes: dict | None = None, **tensors) -> Path:
    """Write a LiLiCorr head. changes: to dflash_config; tensors: as for `write_head`"""
    flags = LILICORR["dflash_config"] | (changes or {})
    held = random_weights(shapes_of_layers() | correlator_shapes())
    return write_files(path, LAYER | FULL | LILICORR | {"dflash_config": flags}, held | tensors)


def test_lilicorr_scores_the_lattice(tmp_path):
    """The pairs of the official module on the same candidates, and its greedy path."""
    drafter = drafter_of(write_lilicorr(tmp_path / "head"))
    official = recorded("lilicorr")
    for number, (state, inputs) in enumerate(drafts(drafter)):
        out, _ = drafter.root_output(state, inputs)
        assert torch.equal(out.ids[0], official["candidates"][number])
        assert (out.pairs[0, 0] - official["start"][number]).abs().max() < 1e-4
        assert (out.pairs[0, 1:] - official["pairs"][number]).abs().max() < 1e-4
        path = drafter.propose(state, inputs).tokens[0, 1:]
        assert path.tolist() == official["tokens"][number].tolist()
    alone, _ = drafter.root_output(state._replace(hidden=torch.zeros(1, 1, 64)), inputs)
    assert (alone.pairs[0, 1:] - official["pairs.alone"]).abs().max() < 1e-4
    assert (alone.pairs - out.pairs).abs().max() > 0.1


def test_the_nodes_of_a_level_have_their_own_scores(tmp_path):
    """Of a tree with fewer levels, too. Behind a token outside of the lattice all of its tokens have one score."""
    drafter = drafter_of(write_lilicorr(tmp_path / "head"), StaticTree.chain(2))
    state, inputs = next(drafts(drafter))
    out, _ = drafter.root_output(state, inputs)
    outside = min({*range(9)} - {*out.ids[0, 0].tolist()})
    tokens = torch.tensor([[int(out.ids[0, 0, 3]), outside]])
    out = drafter.forward_nodes(state, SimpleNamespace(tokens=tokens), out, None, None)
    z = drafter.logits(out, 1)[0]
    assert torch.equal(z[:, out.ids[0, 1]], torch.stack((out.pairs[0, 1, 3], torch.zeros(4))))
    assert (z > -1e29).sum() == 8


# ------------------------------------------------------------------------------------------ P-EAGLE

PEAGLE = {
    "architectures": ["PEagleDraftModel"], "draft_vocab_size": 40, "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [1, 4, 6], "embed_requires_grad": True, "fc_norm": False, "mask_token_id": 127,
    "norm_before_fc": False, "norm_before_residual": False, "norm_output": False, "speculators_model_type": "peagle",
    "speculators_version": "0.9.0", "target_hidden_size": None, "tie_word_embeddings": False,
    "transformer_layer_config": LAYER | FULL,
}  # fmt: skip


def write_peagle(path: Path, changes: dict | None = None, **tensors) -> Path:
    """Write a P-EAGLE head. Arguments as for `write_head`."""
    shapes = shapes_of_layers()
    del shapes["hidden_norm.weight"]
    for name in ("q", "k", "v"):  # of the first layer, which takes embeddings beside features
        outputs, _ = shapes[f"layers.0.self_attn.{name}_proj.weight"]
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = (outputs, 128)
    shapes |= {
        "embed_tokens.weight": (128, 64), "fc.weight": (64, 192), "mask_hidden": (1, 1, 192),
        "layers.0.hidden_norm.weight": (64,), "lm_head.weight": (40, 64),
    }  # fmt: skip
    return write_files(
        path, PEAGLE | (changes or {}), random_weights(shapes) | SOME_TOKENS | tensors
    )


@pytest.mark.parametrize("depth", [1, LEVELS])
def test_peagle_drafts_all_levels_in_one_pass(depth, tmp_path):
    """Its masks see the confirmed tokens and the masks before them."""
    target = golden_target(TARGET)
    head = load_eagle(write_peagle(tmp_path / "head"), target)
    drafter = ParallelEagleDrafter(head, target, StaticTree.chain(depth))
    order = DRAFTED.argsort()
    for number, (state, inputs) in enumerate(drafts(drafter)):
        out, _ = drafter.root_output(state, inputs)
        for level in range(depth):
            ours = drafter.logits(out, level)[0, 0]
            assert (ours - trace()["peagle.logits"][number, level, order]).abs().max() < 1e-4
        chain = drafter.propose(state, inputs).tokens[0, 1:]
        best = trace()["peagle.logits"][number, :depth].argmax(-1)
        assert chain.tolist() == DRAFTED[best].tolist()


# --------------------------------------------------------------------------------------------- GGUF

GGUF_NAMES = {  # ours -> llama.cpp's
    "norm": "output_norm", "hidden_norm": "enc.output_norm", "lm_head": "output", "markov_head.": "",
    "confidence_head.proj": "conf_proj", "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight", "attention_conv": "attn_conv",
    "mlp_conv": "ffn_conv", ".kernel_projection": "_proj", ".base_kernel": "_base", "layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GGUF_KEYS = {
    "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 128,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0, "block_size": 6,
    "target_layers": [1, 2, 4, 5, 7],
}  # fmt: skip
GGUF_WINDOW = {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False]}
GGUF_FURTHER = {
    "dflash": {"attention.causal": False, **GGUF_WINDOW},
    "dflash2": {
        "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6,
        "attention.causal": False, "logit_scale": 0.5, "final_logit_softcapping": 3.0, **GGUF_WINDOW,
    },
    "dspark": {"sample_from_anchor": False},
}  # fmt: skip


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        if ours not in ("norm", "hidden_norm") or name == f"{ours}.weight":
            name = name.replace(ours, theirs)
    return name


def write_gguf(
    path: Path, kind: str, changes: dict | None = None, packed: bool = False, **tensors
) -> Path:
    """Write a file as llama.cpp's converter does, with the package's own writer. packed: matrices in Q8_0"""
    keys = GGUF_KEYS | GGUF_FURTHER[kind] | (changes or {})
    metadata = {"general.architecture": "dflash", "tokenizer.ggml.mask_token_id": MASK}
    metadata |= {f"dflash.{name}": value for name, value in keys.items() if value is not None}
    held = {gguf_name(name): tensor for name, tensor in weights(kind).items() if name != "t2d"}
    if "d2t" in held:
        held["d2t"] = DRAFTED
    arrays = {name: tensor.numpy() for name, tensor in (held | tensors).items()}
    if "d2t" in arrays:
        arrays["d2t"] = (Kind.I64, arrays["d2t"])

    def kind_of(name: str) -> str:
        return "Q8_0" if packed and name.endswith("weight") else "F32"

    return write(path, metadata, arrays, kind_of)


def directory_of(path: Path, kind: str) -> Path:
    """Write the directory that a GGUF file says the same as."""
    if kind == "dflash2":
        return write_zlab(
            path, {"is_causal": False, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
        )
    own = {
        name: FURTHER[kind][1][name]
        for name in ("draft_vocab_size", "markov_rank")
        if name in FURTHER[kind][1]
    }
    flags = {
        "block_size": 6,
        "mask_token_id": 127,
        "target_layer_ids": [0, 1, 3, 4, 6],
        "sample_from_anchor": False,
    }
    keys = LAYER | FURTHER[kind][0] | own | {"dflash_config": flags, "is_causal": False}
    return write_files(path, keys, weights(kind))


@pytest.mark.parametrize("kind", GGUF_FURTHER)
def test_a_gguf_file_is_a_directory(kind, tmp_path, capsys):
    target = golden_target(TARGET)
    ours = load_head(write_gguf(tmp_path / "head.gguf", kind), target)
    theirs = load_head(directory_of(tmp_path / "head", kind), target)
    assert capsys.readouterr().err == ""
    assert ours.config.model.norm_eps == pytest.approx(1e-6)
    model = replace(ours.config.model, norm_eps=1e-6)
    assert model.max_context == 128, "a window is no bound"
    assert ours.config.sliding_causal == theirs.config.sliding_causal
    whole = theirs.config.sliding_whole  # which says nothing where no layer has a window
    assert replace(ours.config, model=model, sliding_whole=whole) == theirs.config
    assert (ours.vocab is None) == (theirs.vocab is None)
    if ours.vocab:
        assert torch.equal(ours.vocab.ids, theirs.vocab.ids)
    values = dict(theirs.named_parameters())
    for name, value in ours.named_parameters():
        assert torch.equal(value, values.pop(name)), name
    assert not values


@pytest.mark.parametrize("kind", GGUF_FURTHER)
def test_a_gguf_file_drafts_in_its_own_bits(kind, tmp_path):
    """Also tables of tokens, whose rows are read from their blocks."""
    tables = {}
    if kind == "dflash2":
        tables = {
            f"selector_{name}.weight": small(128, 32) for name in ("predecessor", "successor")
        }
        tables["selector_hidden.weight"] = small(32, 64)
    changes = {"selector_rank": 32} if tables else {}
    path = write_gguf(tmp_path / "head.gguf", kind, changes, packed=True, **tables)
    settings = SETTINGS | {"compile": True, "temperature": 1.0}
    engine = load(head=str(path), tree="dynamic", **settings)
    head = engine.drafter.head
    if has_cpu_operators():
        assert head.fc.format == BLOCKS
        rows = {
            "dflash2": "candidate_selector.predecessor_codebook",
            "dspark": "markov_head.markov_w1",
        }.get(kind)
        assert rows is None or isinstance(head.get_submodule(rows), Embedding)
    plain = load(draft="none", **settings)
    assert generate(engine, PROMPTS[:1]).tokens == generate(plain, PROMPTS[:1]).tokens


# ------------------------------------------------------------------------------------------- loops

SETTINGS = {
    "checkpoint": str(GOLDEN / TARGET),
    "device": "cpu",
    "max_new_tokens": 24,
    "ignore_eos": True,
    "seed": 7,
}
WRITERS = {kind: functools.partial(write_head, kind=kind) for kind in FURTHER} | {
    f"gguf {kind}": functools.partial(write_gguf, kind=kind) for kind in GGUF_FURTHER
} | {"z-lab": write_zlab, "dspine": write_dspine, "lilicorr": write_lilicorr, "peagle": write_peagle}  # fmt: skip


def write_trained(path: Path, kind: str) -> Path:
    """Write a drafter that predicts: a trained one of the older kinds, with small weights of what the newer ones add."""
    if kind == "peagle":
        path.mkdir()
        source = GOLDEN / "models/head_eagle3"
        config = json.loads((source / "config.json").read_text()) | {"mask_token_id": 127}
        held = load_file(source / "model.safetensors") | {"mask_hidden": small(1, 1, 192)}
    else:
        trained_dir(path, "jetspec" if kind == "dspine" else "dflash")
        config = json.loads((path / "config.json").read_text())
        config |= WINDOW | {"sliding_window": 12, "is_causal": kind == "dspine"}
        held = load_file(path / "model.safetensors")
    further = {}
    if kind in ("dflash2", "lilicorr"):
        config |= {name: FURTHER["dflash2"][1][name] for name in ("conv_kernel_size", "conv_group_size")}  # fmt: skip
        further = convolutions()
    if kind == "dflash2":
        config |= {"selector_rank": 8, "selector_top_k": 6}
        further |= selector()
    if kind == "dspine":
        config["dspine_config"] = DSPINE["dspine_config"]
        further = INJECTION
        held["transfer_ready"] = torch.tensor(True)
    held |= {name: small(*shape) for name, shape in further.items()}
    for name in further:
        if name.endswith("base_kernel"):
            held[name] += torch.tensor([1.0, 0.0, 0.0])[None, :, None]  # of the identity
    if kind == "lilicorr":
        config |= {"dflash_config": config.get("dflash_config", {}) | LILICORR["dflash_config"]}
        held |= first_of_each_level()
    return write_files(path, config, held)


def first_of_each_level() -> dict[str, torch.Tensor]:
    """A correlator that prefers the best token of each level."""
    held = {name: small(*shape) for name, shape in correlator_shapes().items()}
    one = torch.tensor([1.0] + [0.0] * 7)
    ranks = torch.tensor([1.0, -1, -1, -1])[:, None]
    held["lilicorr.rank_embedding"] = ranks.repeat(1, 1, 1, 1, 32)
    held["lilicorr.output_norm.weight"] = torch.ones(32)
    held["lilicorr.factor_input_proj.weight"] = torch.eye(32, 96)
    held["lilicorr.in_head.weight"] = one[:, None].repeat(1, 32)
    for name in ("out_head", "anchor_out_head"):
        held[f"lilicorr.{name}.bias"] = one.clone()
    return held


CHAIN = ("chain", 0.0, {"dtype": "float32"})
DYNAMIC = ("dynamic", 1.0, {"dtype": "bfloat16", "compile": True})


@pytest.mark.parametrize("kind, tree, temperature, options", [
    ("window", *CHAIN), ("dflash2", *DYNAMIC), ("dspine", *CHAIN), ("lilicorr", *DYNAMIC), ("peagle", *DYNAMIC),
    *slow([("window", *DYNAMIC), ("dflash2", *CHAIN), ("dspine", *DYNAMIC), ("lilicorr", *CHAIN), ("peagle", *CHAIN)]),
])  # fmt: skip
def test_accepted_drafts_are_vanillas_tokens(kind, temperature, options, tree, tmp_path):
    """Where paths of several tokens are accepted."""
    head = str(write_trained(tmp_path / "head", kind))
    settings = SETTINGS | {"max_new_tokens": 50, "temperature": temperature, "batch_size": 2}
    engine = load(head=head, tree=tree, **settings, **options)
    assert engine.option("draft") == ("eagle" if kind == "peagle" else "block")
    found = generate(engine, PROMPTS)
    assert found.tokens == generate(load(draft="none", **settings, **options), PROMPTS).tokens
    assert found.stats["tau"] > 1.15


@pytest.mark.parametrize("kind", [*FURTHER, "z-lab", "dspine"])
def test_merged_steps_compute_the_same(kind, tmp_path):
    """As CUDA merges them; a convolution takes rows that a norm has finished."""
    drafter = drafter_of(WRITERS[kind](tmp_path / "head"))
    head = drafter.head
    for state, inputs in drafts(drafter):
        want = drafter.run_block(state, inputs)
        head.program = MergedModel(head)
        steps = head.program.segments[0].steps
        readers = {step.reader for step in steps if isinstance(step, AddNorm)}
        assert readers <= ({""} if head.config.model.conv_taps else {"w13", NEXT_READER})
        assert (drafter.run_block(state, inputs) - want).abs().max() < 1e-5
        head.program = None


@pytest.mark.slow  # 15 s of tracing each
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "dspine", "lilicorr", "peagle"])
def test_compiled_as_on_cuda(traced, kind, tmp_path):
    """Sampled, two sequences: the tokens of the eager steps."""
    torch._dynamo.reset()
    target = golden_target(TARGET)
    tree = DynamicTree(depth=3, topk=3, size=8)
    path = WRITERS[kind](tmp_path / "head")
    drafter = (
        ParallelEagleDrafter(load_eagle(path, target), target, tree)
        if kind == "peagle"
        else drafter_of(path, tree)
    )
    options = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 1.0, "batch_size": 2}
    engine = engine_for(target, drafter, **options)
    plain = decode(engine, *PROMPTS)
    assert decode(compiled_as_on_cuda(engine), *PROMPTS).history == plain.history
    assert not torch._dynamo.utils.counters["graph_break"]


# ------------------------------------------------------------------------------------------- files


# not in speculators' layout, without the key of the root
ALONE = (
    LAYER
    | FULL
    | {"speculators_model_type": None, "transformer_layer_config": None, "sample_from_anchor": None}
)


@pytest.mark.parametrize("kind, changes, levels", [
    ("dspark", {}, 5),
    ("dspark", {"sample_from_anchor": None}, 5),  # older files, which drafted one token less than there are positions
    ("dspark", {"sample_from_anchor": True}, 6),
    ("dspark", ALONE, 6),  # DeepSpec's
    ("dspark", ALONE | {"dflash_config": {"projector_type": "dspark"}}, 5),  # SpecForge's
    ("gguf dspark", {"sample_from_anchor": None}, 6),  # as those of DeepSpec's heads
])  # fmt: skip
def test_what_dsparks_root_predicts(kind, changes, levels, tmp_path):
    path = WRITERS[kind](tmp_path / f"head{'.gguf' * kind.startswith('gguf')}", changes=changes)
    config = load_head(path, golden_target(TARGET)).config
    assert config.levels == levels and config.predicts_next == (levels == 6)


def test_codebooks_under_the_names_of_z_labs_class(tmp_path):
    target = golden_target(TARGET)
    books = {name: tensor for name, tensor in weights("dflash2").items() if "codebook" in name}
    other = {f"{name}.weight": tensor for name, tensor in books.items()} | dict.fromkeys(books)
    found = [
        load_head(write_zlab(tmp_path / name, **tensors), target).candidate_selector
        for name, tensors in (("a", {}), ("b", other))
    ]
    assert torch.equal(*(selector.predecessor_codebook.weight for selector in found))
    quantize_directory(tmp_path / "b", tmp_path / "int8", Quantization("int8"))
    rounded = load_head(tmp_path / "int8", target).candidate_selector
    assert torch.equal(rounded.predecessor_codebook.weight, found[0].predecessor_codebook.weight)
