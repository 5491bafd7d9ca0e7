"""Heads in every published layout as data: the keys of their configs and their tensors, random and the same everywhere.

golden/block_heads has the scores that the official code (golden/README.md) computes of the block drafters among them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_tree import DecodedTokens, StaticTree
from drafters import DrafterUpdate, DraftInputs, TreeDrafter
from drafts.block_draft import BlockDrafter, SparkDrafter, kind_of, load_head
from helpers import GOLDEN, InTurn, golden_target
from run.engine import Engine
from run.library import generate
from run.load import load
from tiny_models import Kind
from tiny_models import write as write_gguf

TARGET = "models/target_llama31_gqa8"  # 8 layers, width 64, vocabulary 128
LLAMA = "models/target_llama_mha"  # 3 layers, width 64, vocabulary 97
TAPS = [0, 1, 3, 4, 6]  # layers of the target
MASK = 127
LEVELS = 5
STARTS = (7, 9, 13)  # roots of the recorded drafts
Tensors = dict[str, Tensor]


class Head(NamedTuple):
    """The files of a head."""

    keys: dict  # of config.json; of a GGUF file of its metadata, without the architecture before their names
    tensors: Tensors
    target: str = TARGET
    file: str = "model.safetensors"


def merged(held: dict, changes: dict) -> dict:
    """Objects are merged, and None takes a key away."""
    found = held | changes
    for name, value in changes.items():
        if isinstance(value, dict) and name in held:
            found[name] = merged(held[name], value)
    return {name: value for name, value in found.items() if value is not None}


def write(
    path: Path, head: Head, changes: dict | None = None, packed: bool = False, **tensors
) -> Path:
    """Write a head. changes: to its keys; tensors: to its tensors, or a type of GGUF and bytes; None: left out; packed: in a GGUF file in Q8_0"""
    keys, held = merged(head.keys, changes or {}), merged(head.tensors, tensors)
    if head.file.endswith(".gguf"):
        return write_llama_cpp(path, head.file.removesuffix(".gguf"), keys, held, packed)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    if head.file.endswith(".pt"):
        torch.save(held, path / head.file)
    else:
        save_file(held, path / head.file)
    return path


def write_llama_cpp(path: Path, kind: str, keys: dict, tensors: Tensors, packed: bool) -> Path:
    """Write a file as llama.cpp's converter does, with the package's own writer."""
    metadata = {"general.architecture": kind} | {f"{kind}.{name}": v for name, v in keys.items()}
    if kind == "dflash":
        metadata["tokenizer.ggml.mask_token_id"] = MASK
    arrays = {n: t.numpy() if isinstance(t, Tensor) else t for n, t in tensors.items()}
    if "d2t" in arrays and not isinstance(arrays["d2t"], tuple):
        arrays["d2t"] = (Kind.I64, arrays["d2t"])

    def kind_of(name: str) -> str:
        return "Q8_0" if packed and name.endswith("weight") else "F32"

    return write_gguf(path, metadata, arrays, kind_of)


def read(path: Path, target: str = TARGET) -> Head:
    """The head of a directory."""
    keys = json.loads((path / "config.json").read_text())
    return Head(keys, load_file(path / "model.safetensors"), target)


EAGLE1_PATH, EAGLE3_PATH = (
    GOLDEN / "models" / name for name in ("head_eagle12_mha", "head_eagle3")
)
EAGLE1, EAGLE3 = read(EAGLE1_PATH, LLAMA), read(EAGLE3_PATH)

# ------------------------------------------------------------------------------------ whole engines


FORMS = {  # of the target
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "compiled": {"dtype": "bfloat16", "compile": True},
    "step by step": {"compile": False},
    "own bits": {"compile": True},  # and of a draft in a GGUF file
    "int8": {"dtype": "bfloat16", "quant": "int8", "kv": "int8"},
    "int4": {"dtype": "bfloat16", "quant": "int4", "group_size": 32},
}


def assert_vanillas_tokens(
    files: dict, prompts: list, form: str, temperature: float, tau: float, **options
) -> Engine:
    """Compare the tokens of a drafter with those without one, and what is accepted with `tau`.

    files: options of the checkpoint and the drafter; options: further ones
    Returns: the drafter's engine.
    """
    common = {"max_new_tokens": 40, "seed": 7, "ignore_eos": True, "device": "cpu"} | options
    common |= FORMS[form] | {"temperature": temperature, "batch_size": len(prompts)}
    plain = load(checkpoint=files["checkpoint"], draft="none", **common)
    engine = load(**files, **common)
    run = replace(engine, policy=InTurn()) if len(engine.presets) > 1 else engine  # no clock counts
    found = generate(run, prompts)
    assert found.tokens == generate(plain, prompts).tokens
    assert found.stats["tau"] > tau
    return engine


# ---------------------------------------------------------------------------------- random weights


def shapes_of_layers() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that every block head has."""
    found = {"norm.weight": (64,), "hidden_norm.weight": (64,), "fc.weight": (64, 320)}
    for i in range(2):
        names = {
            "input_layernorm": (64,), "post_attention_layernorm": (64,),
            "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,),
            "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
        }  # fmt: skip
        found |= {f"layers.{i}.{name}.weight": shape for name, shape in names.items()}
    return found


def random_weights(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    draw = numpy.random.RandomState(5).standard_normal
    found = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.from_numpy(draw(shape)).float()
        if name.endswith("norm.weight"):
            found[name] = 1 + 0.2 * noise
        elif any(table in name for table in ("embed_tokens", "markov_w1", "codebook", "mask_hid")):
            found[name] = noise
        else:
            found[name] = noise * shape[-1] ** -0.5 * 1.5
    return found


# ---------------------------------------------------------------------------------- block drafters

SHAPE = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
LAYER = SHAPE | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 128, "max_window_layers": 28, "pad_token_id": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
DRAFTED = (torch.arange(40) * 7 + 3) % 128  # not in order
SOME_TOKENS = {
    "d2t": DRAFTED - torch.arange(40),
    "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, DRAFTED, True),
}
CONVOLUTIONS = {f"layers.{i}.{part}_conv.{name}": shape for i in range(2) for part in ("attention", "mlp")
                for name, shape in (("base_kernel", (2, 3, 64)), ("kernel_projection.weight", (48, 64)))}  # fmt: skip
SELECTOR = {
    f"candidate_selector.{name}_codebook": (128, 8) for name in ("predecessor", "successor")
}
SELECTOR |= {"candidate_selector.hidden_projection.weight": (8, 64)}
MARKOV = {"markov_head.markov_w1.weight": (128, 32), "markov_head.markov_w2.weight": (40, 32),
          "confidence_head.proj.weight": (1, 96), "confidence_head.proj.bias": (1,)}  # fmt: skip
INJECTION = {
    "injection.message.weight": (32, 32), "injection.bias": (32,), "injection.receiver_gate.weight": (32, 32),
    "injection.predecessor_gate.weight": (32, 32), "transfer_codes": (128, 32),
    **{f"injection.readouts.{i}.weight": (32, 64) for i in range(2)},
    **{f"injection.writes.{i}.weight": (64, 32) for i in range(2)},
}  # fmt: skip

# DeepSpec's: DFlash, JetSpec, DSpark
DEEPSPEC = SHAPE | {"rope_theta": 10000.0, "layer_types": ["full_attention"] * 2}
FLAGS = {"mask_token_id": MASK, "target_layer_ids": TAPS}
SPARK = FLAGS | {
    "block_size": 5, "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
SPARK_TABLES = {
    "embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64),
    "markov_head.markov_w1.weight": (128, 8), "markov_head.markov_w2.weight": (128, 8),
    "confidence_head.proj.weight": (1, 72), "confidence_head.proj.bias": (1,),
}  # fmt: skip

# those of the package speculators
COMMON = {
    "aux_hidden_state_layer_ids": [1, 2, 4, 5, 7], "block_size": 6, "dtype": "float32", "mask_token_id": 127,
    "sample_from_anchor": False, "sliding_window_non_causal": False, "speculators_version": "0.9.0",
    "target_hidden_size": None, "tie_word_embeddings": False, "draft_vocab_size": 128,
}  # fmt: skip
OWN = {  # kind -> its layers' keys, its own keys
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


def of_speculators(kind: str, shapes: dict, more: Tensors) -> Head:
    layer, own = OWN[kind]
    greedy = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
    }
    method = {
        "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [greedy],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
    }  # fmt: skip
    name = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind]
    keys = COMMON | own | {
        "architectures": [f"{name}DraftModel"], "speculators_config": method, "speculators_model_type": kind,
        "transformer_layer_config": LAYER | layer,
    }  # fmt: skip
    return Head(keys, random_weights(shapes_of_layers() | shapes) | more)


ZLAB = {  # DFlash2's keys beside the layers', as z-lab has them
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "block_size": 6, "conv_group_size": 8, "conv_kernel_size": 3, "mask_token_id": 127, "selector_rank": 8,
        "selector_top_k": 6, "target_layer_ids": TAPS,
    },
}  # fmt: skip
DSPINE = {  # keys beside the layers', as SpecForge's converter and `save_pretrained` write them
    "architectures": ["DSpineDraftModel"], "block_size": 6,
    "dflash_config": {"block_size": 6, "mask_token_id": 127, "target_layer_ids": TAPS},
    "dspine_config": {
        "alignment_warmup_steps": 146, "alignment_weight": 0.5, "candidate_mass_threshold": 1e-4, "ce_weight": 0.1,
        "message_size": 32, "replacement_end_ratio": 1 / 3, "replacement_hold_ratio": 1 / 6, "replacement_layers": 3,
        "replacement_probability": 0.5, "top_k": 6, "transfer_rank": 32,
    },
}  # fmt: skip
LILICORR = {  # keys beside the layers', as Model-Optimizer's exporter writes them
    "architectures": ["LiLiCorrDraftModel"], "block_size": 6, "num_target_layers": 8, "rope_theta": 10000.0,
    "dflash_config": {
        "mask_token_id": 127, "target_layer_ids": TAPS, "causal": False, "projector_type": "lilicorr",
        "lilicorr_enabled": True, "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 32, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 4, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 8, "lilicorr_vector_eps": 1e-4,
        "lilicorr_logit_scale": 8.0,
    },
}  # fmt: skip
PEAGLE = {
    "architectures": ["PEagleDraftModel"], "draft_vocab_size": 40, "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [1, 4, 6], "embed_requires_grad": True, "fc_norm": False, "mask_token_id": 127,
    "norm_before_fc": False, "norm_before_residual": False, "norm_output": False, "speculators_model_type": "peagle",
    "speculators_version": "0.9.0", "target_hidden_size": None, "tie_word_embeddings": False,
    "transformer_layer_config": LAYER | FULL,
}  # fmt: skip


def correlator_shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of LiLiCorr's correlator."""
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


def dspine_tensors() -> Tensors:
    held = random_weights(shapes_of_layers() | INJECTION)
    held["transfer_codes"] /= held["transfer_codes"].norm(dim=-1, keepdim=True)
    return held | {"transfer_ready": torch.tensor(True)}


def peagle_tensors() -> Tensors:
    shapes = shapes_of_layers()
    del shapes["hidden_norm.weight"]
    for name in ("q", "k", "v"):  # of the first layer, which takes embeddings beside features
        outputs, _ = shapes[f"layers.0.self_attn.{name}_proj.weight"]
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = (outputs, 128)
    shapes |= {
        "embed_tokens.weight": (128, 64), "fc.weight": (64, 192), "mask_hidden": (1, 1, 192),
        "layers.0.hidden_norm.weight": (64,), "lm_head.weight": (40, 64),
    }  # fmt: skip
    return random_weights(shapes) | SOME_TOKENS


LM_HEAD = {"lm_head.weight": (40, 64)}
BLOCKS = {  # the block drafters, and P-EAGLE
    "DeepSpec dflash": Head(DEEPSPEC | {"block_size": 6, "dflash_config": FLAGS}, random_weights(shapes_of_layers())),
    "jetspec": Head(DEEPSPEC | {"block_size": 6, "dflash_config": FLAGS | {"causal_head": True}}, random_weights(shapes_of_layers())),
    "DeepSpec": Head(DEEPSPEC | SPARK, random_weights(shapes_of_layers() | SPARK_TABLES)),
    "dflash": of_speculators("dflash", LM_HEAD, SOME_TOKENS),
    "dflash2": of_speculators("dflash2", CONVOLUTIONS | SELECTOR, {}),
    "dspark": of_speculators("dspark", LM_HEAD | MARKOV, SOME_TOKENS),
    "z-lab": Head(LAYER | WINDOW | ZLAB, random_weights(shapes_of_layers() | CONVOLUTIONS | SELECTOR)),
    "dspine": Head(LAYER | FULL | DSPINE, dspine_tensors()),
    "lilicorr": Head(LAYER | FULL | LILICORR, random_weights(shapes_of_layers() | correlator_shapes())),
    "peagle": Head(PEAGLE, peagle_tensors()),
}  # fmt: skip

# --------------------------------------------------------------------------------------------- GGUF

GGUF_NAMES = {  # ours -> llama.cpp's
    "markov_head.": "", "confidence_head.proj": "conf_proj", "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight", "attention_conv": "attn_conv",
    "mlp_conv": "ffn_conv", ".kernel_projection": "_proj", ".base_kernel": "_base", "layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "lm_head": "output",
}  # fmt: skip
GGUF_TOP = {"norm.weight": "output_norm.weight", "hidden_norm.weight": "enc.output_norm.weight"}
GGUF_KEYS = {
    "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 128,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0, "block_size": 6,
    "target_layers": [1, 2, 4, 5, 7],
}  # fmt: skip
GGUF_WINDOW = {"attention.causal": False, "attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False]}  # fmt: skip
GGUF_OWN = {
    "dflash": GGUF_WINDOW,
    "dflash2": {
        "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6, "logit_scale": 0.5,
        "final_logit_softcapping": 3.0, **GGUF_WINDOW,
    },
    "dspark": {"sample_from_anchor": False},
}  # fmt: skip


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return GGUF_TOP.get(name, name)


def of_llama_cpp(kind: str) -> Head:
    tensors = {gguf_name(name): value for name, value in BLOCKS[kind].tensors.items()}
    tensors.pop("t2d", None)
    if "d2t" in tensors:
        tensors["d2t"] = DRAFTED
    return Head(GGUF_KEYS | GGUF_OWN[kind], tensors, file="dflash.gguf")


BLOCKS |= {f"gguf {kind}": of_llama_cpp(kind) for kind in GGUF_OWN}


def beside_gguf(kind: str) -> Head:
    """The directory that a GGUF file of a block drafter says the same as."""
    if kind == "dflash2":
        zlab = BLOCKS["z-lab"]
        further = {"is_causal": False, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
        return zlab._replace(keys=zlab.keys | further)
    layer, own = OWN[kind]
    own = {name: own[name] for name in ("draft_vocab_size", "markov_rank") if name in own}
    flags = FLAGS | {"block_size": 6, "sample_from_anchor": False}
    keys = LAYER | layer | own | {"dflash_config": flags}
    keys |= {"is_causal": False} if layer is WINDOW else {}
    return Head(keys, BLOCKS[kind].tensors)


# ------------------------------------------------------------------------------------------- drafts


@functools.cache
def recorded(file: str = "trace") -> dict[str, Tensor]:
    """The official code's scores, and the text, `ids`."""
    folder = GOLDEN / "block_heads"
    ids = load_file(folder / "trace.safetensors")["ids"]
    return load_file(folder / f"{file}.safetensors") | {"ids": ids}


def drafter_of(path: Path, tree=None) -> BlockDrafter:
    target = golden_target(TARGET)
    head = load_head(path, target)
    return kind_of(head.config)(head, target, tree or StaticTree.chain(LEVELS))


def drafts(drafter: TreeDrafter) -> Iterator[tuple[Any, DraftInputs]]:
    """The states and roots of the recorded drafts, one after the other, on one cache."""
    ids = recorded()["ids"]
    taps = numpy.random.RandomState(7).standard_normal((1, 18, len(TAPS) * 64))
    taps = torch.from_numpy(taps).float()[..., : 64 * len(drafter.aux_layers)]
    state = drafter.init(1, 64)
    read = 0
    for start in STARTS:
        features = torch.cat((torch.zeros(1, start - read, 64), taps[:, read:start]), -1)
        count = torch.tensor([start - read])
        state = drafter.extend(state, DrafterUpdate(ids[None, read : start + 1], features, count))
        read = start
        yield state, DraftInputs(None, DecodedTokens(ids[None], torch.tensor([start])))


def recorded_levels(
    drafter: SparkDrafter, kind: str, trace: dict[str, Tensor]
) -> Iterator[tuple[tuple[int, int], Tensor, Tensor | int]]:
    """The draft and level, scores and confidence of every level of the recorded chains, which the drafter must propose."""
    for number, (state, inputs) in enumerate(drafts(drafter)):
        chain = trace[f"{kind}.tokens"][number]
        assert drafter.propose(state, inputs).tokens[0, 1:].tolist() == chain.tolist()
        before = torch.cat((inputs.text.root, chain[:-1]))
        out, _ = drafter.root_output(state, inputs)
        for level in range(LEVELS):
            frontier = SimpleNamespace(tokens=before[None, level : level + 1])
            out = drafter.forward_nodes(state, frontier, out, None, None)
            sure = 0
            if drafter.head.config.confidence:
                sure = drafter.head.confidence(out.hidden[:, level, None], out.before)
            yield (number, level), drafter.logits(out, level)[0, 0], sure
