"""Model directories that transformers loads, as other programs write them: the logits are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_gguf import hf_model

from hf.config import read_config
from hf.weights import load_model
from models import registry

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral"]
MIXTURES = {"Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
MIXTURES["Mixtral"] = {"num_local_experts": 4}
TOKENS = torch.arange(3, 19)[None]


def saved(model, path: Path, config=None, tensors=None) -> Path:
    """Save a model; config: changes of its keys, ... removes one; tensors: a function of its tensors."""
    model.save_pretrained(path)
    file = path / "config.json"
    raw = json.loads(file.read_text()) | (config or {})
    file.write_text(json.dumps({name: v for name, v in raw.items() if v is not ...}))
    if tensors:
        held = load_file(path / "model.safetensors")
        changed = {name: v.contiguous() for name, v in tensors(held).items()}
        save_file(changed, path / "model.safetensors", {"format": "pt"})
    return path


def assert_as_in_transformers(path: Path, reference=None):
    """Compare with the model that transformers loads from the same files."""
    if reference is None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(path).float().eval()
    ours = load_model(path, torch.float32)
    with torch.no_grad():
        expected = reference(TOKENS).logits
        features = ours(TOKENS, torch.arange(TOKENS.shape[1])[None])
        torch.testing.assert_close(ours.logits(features), expected, atol=1e-4, rtol=1e-4)


def test_a_tied_model_with_the_lm_head_alone(tmp_path, capsys):
    def head_alone(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        return tensors

    model = hf_model(tie_word_embeddings=True)
    path = saved(model, tmp_path, tensors=head_alone)
    capsys.readouterr()
    assert_as_in_transformers(path, model)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_with_both(tmp_path, capsys, same):
    """Two matrices that differ are both used, as in transformers 5, and a note says it."""

    def both(tensors):
        embedding = tensors["model.embed_tokens.weight"]
        return tensors | {"lm_head.weight": embedding.clone() if same else embedding.flip(0)}

    path = saved(hf_model(tie_word_embeddings=True), tmp_path, tensors=both)
    assert_as_in_transformers(path)
    differ = "tie_word_embeddings is true, and lm_head.weight is not the embedding: both are used"
    said = capsys.readouterr().err
    assert (f"note: {path}: {differ}\n" in said) == (not same)


def test_the_layers_saved_alone(tmp_path):
    """A base model has no prefix in its names, and its own class in config.json."""
    model = hf_model(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert_as_in_transformers(tmp_path, model)


@pytest.mark.parametrize("value", [..., None])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_architectures(tmp_path, family, value):
    model = hf_model(family, **MIXTURES.get(family, {}))
    path = saved(model, tmp_path, {"architectures": value})
    assert registry.row_of(None, model.config.model_type).name == f"{family}ForCausalLM"
    assert_as_in_transformers(path, model)


def test_another_name_of_the_activation(tmp_path):
    path = saved(hf_model(), tmp_path, {"hidden_act": "swish"})
    assert_as_in_transformers(path)


def test_no_end_of_sequence(tmp_path):
    path = saved(hf_model(), tmp_path, {"eos_token_id": -1, "bos_token_id": -1})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 5]}))
    assert (read_config(path).eos_ids, read_config(path).bos_id) == ((5,), None)
    assert_as_in_transformers(path)


def test_further_tensors(tmp_path, capsys):
    """Zero biases and parts beside the model change nothing; a note names the parts."""

    def more(tensors):
        for part, outputs in (("q", 64), ("k", 32), ("v", 32)):
            for layer in range(2):
                name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
                tensors[name] = torch.zeros(outputs)
        others = {"vision_tower.x.weight": torch.ones(2), "score.weight": torch.ones(2, 64)}
        return tensors | others

    path = saved(hf_model(), tmp_path, tensors=more)
    assert_as_in_transformers(path)
    said = capsys.readouterr().err
    unused = "2 weight(s) of other parts are not used: score.weight, vision_tower.x.weight"
    assert f"note: {path}: {unused}\n" in said


def test_a_bias_that_is_not_zero_is_refused(tmp_path):
    name = "model.layers.1.self_attn.q_proj.bias"
    path = saved(hf_model(), tmp_path, tensors=lambda held: held | {name: torch.ones(64)})
    with pytest.raises(ValueError, match=f"1 unexpected weight.s.: {name}; does config.json fit"):
        load_model(path)
