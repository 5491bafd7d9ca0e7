"""Gemma 4 against transformers: tiny random models as directories and GGUF files; drafting; refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from family_checks import (
    FORMS,
    assert_drafts_as_vanilla,
    assert_same_file,
    assert_same_greedy_text,
)
from files.config import read_config
from files.tokenizer import Tokenizer
from files.weights import load_model
from helpers import slow
from run.tp import check_parts
from tiny_models import (
    NAMES,
    assert_same_logits,
    gguf_tensors,
    metadata_of,
    refused,
    refused_keys,
    saved,
    write,
)

KINDS = ["sliding_attention", "full_attention"]
TEXTS = [
    "the cat sat on the mat, and the dog sat by the door", " two  spaces    and\n\n\nlines\t\t.",
    "def f(x):\n    return x  # \u00e9", "\u65e5\u672c \U0001f642", "a", "",
]  # fmt: skip
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "max_position_embeddings": 512, "sliding_window": 8,
    "layer_types": KINDS * 3, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0, "final_logit_softcapping": 3.0,
}  # fmt: skip
SMALL = {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 4}
EXPERTS = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
CASES = {
    "E2B": SMALL | {"use_double_wide_mlp": True},
    "E4B": SMALL | {"num_kv_shared_layers": 2},
    "31B": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "26B-A4B": EXPERTS | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "layers that share, in another order": SMALL | {"num_kv_shared_layers": 3},
    "untied, without a bound": {"tie_word_embeddings": False, "final_logit_softcapping": None},
}


def random_model(**options):
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**SIZES | options)
    return randomized(transformers.Gemma4ForCausalLM, config)


def randomized(kind, config):
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in [*model.float().named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar") or p is not None and "scale" in name and p.dim() == 1:
                p.uniform_(0.5, 1.5)
            elif not name.endswith(("inv_freq", "embed_scale", "token_ordering")):
                p.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    reference = random_model(**CASES[case])
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    assert_same_logits(model, reference)
    assert model.config.max_context == 512  # a window is a layer's, and no shorter context
    own = [i for i in range(6) if model.config.kv_source(i) == i]
    assert len(own) == 6 - CASES[case].get("num_kv_shared_layers", 0)


def test_the_keys_and_tensors_of_published_files(tmp_path):
    """They name the heads of the layers that see all, and hold keys and values that nothing reads."""
    reference = random_model(**CASES["E2B"])
    unread = {"model.layers.5.self_attn.k_proj.weight": torch.zeros(64, 64)}
    heads = {"per_layer_config": ..., "global_head_dim": 32, "num_global_key_value_heads": None}
    path = saved(reference, tmp_path, heads, lambda held: held | unread)
    assert_same_logits(load_model(path, torch.float32), reference)


def test_missing_keys_have_the_defaults_of_transformers(tmp_path):
    keys = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    ours, theirs = read_config(tmp_path), transformers.Gemma4TextConfig()
    assert (ours.dim, ours.n_layers, ours.n_heads, ours.vocab_size) == (2304, 30, 8, 262144)
    assert (ours.per_layer_dim, ours.per_layer_vocab, ours.softcap) == (256, 262144, 0)
    assert [ours.kv_shape(i) for i in (0, 5)] == [(4, 256), (4, 512)]
    assert ours.rope_scaling == {"rope_type": "proportional", "pairs": 64, "factor": 1.0}
    seen = [step.window for i in range(30) for step in ours.layer(i) if hasattr(step, "window")]
    assert seen == [512 * (kind == KINDS[0]) for kind in theirs.layer_types]


GGUF_NAMES = NAMES | {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale.weight", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip


def further_of(model) -> dict:
    c = model.config
    slides = [kind == KINDS[0] for kind in c.layer_types]
    wide = [1 + (c.use_double_wide_mlp and i >= 6 - c.num_kv_shared_layers) for i in range(6)]
    of_layers = [c.per_layer_config[i] for i in range(6)]
    further = {
        "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
        "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
        "attention.sliding_window_pattern": slides, "attention.shared_kv_layers": c.num_kv_shared_layers,
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input, "rope.freq_base_swa": 10000.0,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in of_layers],
    }  # fmt: skip
    if c.use_double_wide_mlp:
        further["feed_forward_length"] = [c.intermediate_size * factor for factor in wide]
    if c.final_logit_softcapping:
        further["final_logit_softcapping"] = c.final_logit_softcapping
    if c.enable_moe_block:
        further |= {
            "expert_count": c.num_experts, "expert_used_count": c.top_k_experts,
            "expert_feed_forward_length": c.moe_intermediate_size,
        }  # fmt: skip
    return further


def write_file(path, model, kinds="F32", further=None, without=(), metadata=None):
    model.config.allow_global_per_layer_attribute_access = True
    tensors = gguf_tensors(model, GGUF_NAMES)
    tensors["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    own = metadata_of(model, "gemma4", further_of(model) | (further or {}))
    return write(path, own | (metadata or {}), tensors, kinds, without)


@pytest.mark.parametrize("case", CASES)
def test_files(tmp_path, case):
    """llama.cpp (llama-cpp-python 0.3.36) has the same logits of the first four."""
    reference = random_model(**CASES[case])
    path = write_file(tmp_path / "m.gguf", reference)
    assert_same_file(path, reference, "rounds_scale")


def test_the_tokenizer_of_files(tmp_path):
    """BPE of the characters of a line; bytes stand for the rest. llama.cpp makes the same tokens of the texts."""
    special = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "<turn|>"]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, fuse_unk=True))
    theirs.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    lines = tokenizers.Regex(r"\n+")
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Split(lines, "isolated")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=special)
    theirs.train_from_iterator([text for text in TEXTS if text.isascii()] * 3, trainer)
    theirs = tokenizers.Tokenizer.from_str(theirs.to_str())
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3 if i < 3 else 6 if i < 259 else 1 for i in range(len(tokens))]
    keys = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.scores": [-1000.0] * len(tokens),
    }  # fmt: skip
    reference = random_model(vocab_size=len(tokens))
    path = write_file(tmp_path / "m.gguf", reference, metadata=keys)
    ours = Tokenizer.load(path)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, bos=False) == ids, text
        assert ours.decode(ids) == text
    assert ours.encode("a<turn|>", bos=True, special=True)[0::2][:2] == [2, tokens.index("<turn|>")]
    assert tokens.index("<turn|>") in read_config(path).eos_ids


@pytest.mark.parametrize("case", ["E2B", *slow(["31B", "26B-A4B"])])
def test_64_greedy_tokens_are_those_of_transformers(tmp_path, case):
    assert_same_greedy_text(tmp_path, random_model(**CASES[case]))


RUNS = [
    ("E2B", "bfloat16"), ("31B", "int8"), ("26B-A4B", "int4"), ("E2B", "blocks"),
    *slow([("E2B", "float32"), ("E4B", "bfloat16"), ("26B-A4B", "bfloat16"), ("31B", "blocks")]),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
@pytest.mark.parametrize("case, form", RUNS)
def test_no_drafter_changes_a_token(tmp_path, case, form, temperature):
    """Prompts and drafted paths cross the edges of the windows."""
    reference = random_model(**CASES[case])
    reference.save_pretrained(tmp_path)
    write_file(tmp_path / "m.gguf", reference, lambda name: "Q8_0" if in_q8(name) else "F32")
    assert_drafts_as_vanilla(FORMS[form](tmp_path), form != "float32", temperature)


def in_q8(name: str) -> bool:
    """Whether a tensor has rows of whole blocks: those of 16 numbers have none."""
    return "proj.weight" not in name or "blk." not in name


BAD_KEYS = [
    ("layer_types", ["sliding_attention"], "layer_types must name all 6 layers; it names 1"),
    ("layer_types", ["linear_attention"] * 6, "layer_types must be a list of"),
    ("layer_types", KINDS[::-1] * 3, "layer_types must end with full_attention"),
    ("num_kv_shared_layers", 5, "num_kv_shared_layers must leave layers of each kind"),
    ("num_kv_shared_layers", 6, "num_kv_shared_layers must leave layers of each kind"),
    ("per_layer_config", {"1": {"head_dim": 32}}, "one form of heads for all full_attention layers"),
    ("per_layer_config", {str(i): {"head_dim": 48} for i in range(6)}, "must leave sliding_attention layers"),
    ("num_attention_heads", 3, "the heads of keys must divide num_attention_heads (3)"),
    ("use_bidirectional_attention", "all", "use_bidirectional_attention must be vision"),
    ("enable_moe_block", True, "enable_moe_block needs the key 'num_experts'"),
    ("rope_parameters", {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}, "at most 1"),
    ("hidden_size_per_layer_input", 8, "has shape"),
    ("architectures", ["Gemma4AssistantForCausalLM"], "architecture Gemma4AssistantForCausalLM is not supported"),
]  # fmt: skip


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, key, value, says):
    model = random_model(**CASES["E2B"])
    assert says in refused_keys(capsys, tmp_path, model, **{key: value})


BAD_METADATA = [
    ({"attention.head_count_kv": [2, 2, 1, 2, 2, 2]}, (), "and one for all layers of a kind"),
    ({"attention.sliding_window_pattern": [True] * 6}, (), "layer_types must end with full_attention"),
    ({"attention.sliding_window_pattern": [True]}, (), "sliding_window_pattern must name all 6 layers; it names 1"),
    ({"attention.shared_kv_layers": 6, "feed_forward_length": 96}, (), "num_kv_shared_layers must leave layers"),
    ({}, ("gemma4.attention.key_length_swa",), "attention.key_length_swa is missing"),
    ({}, ("blk.4.layer_output_scale.weight",), "1 missing weight(s)"),
]  # fmt: skip


@pytest.mark.parametrize("further, without, says", BAD_METADATA)
def test_a_file_that_contradicts_itself_is_one_line(capsys, tmp_path, further, without, says):
    model = random_model(**CASES["E2B"])
    path = write_file(tmp_path / "m.gguf", model, further=further, without=without)
    assert says in refused(capsys, "--checkpoint", str(path))


def test_ranks_are_refused(tmp_path):
    random_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a model with heads of two widths runs on one rank"):
        check_parts(read_config(tmp_path), 2, tmp_path)
