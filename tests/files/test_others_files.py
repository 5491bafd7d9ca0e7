"""Model directories that transformers loads, as other programs write them: the logits are transformers' own."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_gguf import hf_model

from files import registry
from files.config import read_config
from files.fields import text_part
from files.tokenizer import Tokenizer
from files.weights import load_model
from tiny_models import saved

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral"]
MIXTURES = {"Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
MIXTURES["Mixtral"] = {"num_local_experts": 4}
TOKENS = torch.arange(3, 19)[None]


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


@pytest.mark.parametrize("family, value", [*zip(FAMILIES, cycle([..., None]))])
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
    assert read_config(path).eos_ids == (5,)
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


@pytest.mark.parametrize(
    "missing", [".o_proj.bias", ".k_proj.bias", "mlp.down_proj.bias", "1.self_attn.q_proj.bias"]
)
def test_biases_of_some_layers(tmp_path, capsys, missing):
    """Those of a LLaMA made of a Qwen: of q, k and v alone. transformers starts the others at zero."""

    def without(tensors):
        return {name: value for name, value in tensors.items() if not name.endswith(missing)}

    model = hf_model(attention_bias=True, mlp_bias=True)
    path = saved(model, tmp_path, tensors=without)
    assert_as_in_transformers(path)
    assert "missing bias(es) are zero: model.layers." in capsys.readouterr().err


def test_a_model_without_any_bias_that_its_config_names(tmp_path):
    path = saved(hf_model(), tmp_path, {"attention_bias": True})
    with pytest.raises(
        ValueError, match="8 missing weight.s.: model.layers.0.self_attn.k_proj.bias"
    ):
        load_model(path)


@pytest.mark.parametrize("old", [False, True])
def test_an_index_beside_one_whole_file(tmp_path, old):
    """Of the files it was made of, which are gone or lie there still: the whole file is the model."""
    path = saved(hf_model(), tmp_path)
    names = dict.fromkeys(load_file(path / "model.safetensors"), "model-00001-of-00001.safetensors")  # fmt: skip
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    if old:
        others = {name: value + 1 for name, value in load_file(path / "model.safetensors").items()}
        save_file(others, path / "model-00001-of-00001.safetensors", {"format": "pt"})
    assert_as_in_transformers(path)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_weights_quantized_by_mlx_are_named(tmp_path, key):
    of_mlx = {"group_size": 32, "bits": 4, "model.embed_tokens": False}
    path = saved(hf_model(), tmp_path, {key: of_mlx})
    with pytest.raises(
        ValueError, match="quantized by MLX are not supported here; use the original"
    ):
        load_model(path)
    saved(hf_model(), tmp_path, {key: {}} if key == "quantization" else {key: ...})
    assert_as_in_transformers(path, hf_model())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "pytorch_model.bin", "m.gguf"]
)
def test_pointers_of_git_lfs_are_named(tmp_path, name):
    """Of a clone without the files themselves."""
    path = saved(hf_model(), tmp_path)
    if name == "pytorch_model.bin":
        (path / "model.safetensors").unlink()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (path / name).write_text(pointer)
    where = path / name if name.endswith(".gguf") else path
    said = (
        f"{name}.*it is a Git LFS pointer and not the file itself; run git lfs pull in its folder"
    )
    with pytest.raises(ValueError, match=said):
        load_model(where)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_pointers_of_tokenizers(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=f"{name}: it is a Git LFS pointer"):
        Tokenizer.load(tmp_path)


def test_a_bias_that_is_not_zero_is_refused(tmp_path):
    name = "model.layers.1.self_attn.q_proj.bias"
    path = saved(hf_model(), tmp_path, tensors=lambda held: held | {name: torch.ones(64)})
    with pytest.raises(ValueError, match=f"1 unexpected weight.s.: {name}; does config.json fit"):
        load_model(path)


def test_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="is an adapter .LoRA. and no model; merge it"):
        load_model(tmp_path)


def test_a_key_beside_the_text_part_holds_for_it(tmp_path):
    """Qwen3.5's files say only there that the LM head is tied."""
    raw = {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}
    assert text_part(raw)["tie_word_embeddings"]
