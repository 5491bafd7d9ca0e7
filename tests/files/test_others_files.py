"""Model directories that transformers loads, as other programs write them: the logits are transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from files import registry
from files.config import read_config
from files.tokenizer import Tokenizer
from files.weights import load_model
from gguf_models import hf_model
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


EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"
Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A change of a directory that transformers wrote."""

    model: dict = {}  # options of the model
    config: dict | None = None  # keys of config.json
    tensors: Callable[[Tensors], Tensors] | None = None
    note: str = ""  # what is said on standard error, besides nothing
    refused: str = ""  # what the one line says; "": the logits are those of transformers
    edit: Callable[[Path], Any] = lambda path: None  # of the directory


def generation_config(path: Path) -> None:
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 5]}))


def index(path: Path, old: bool) -> None:
    """Of the files that the whole one was made of, which are gone or lie there still."""
    held = load_file(path / "model.safetensors")
    part = "model-00001-of-00001.safetensors"
    weight_map = json.dumps({"weight_map": dict.fromkeys(held, part)})
    (path / "model.safetensors.index.json").write_text(weight_map)
    if old:
        others = {name: value + 1 for name, value in held.items()}
        save_file(others, path / part, {"format": "pt"})


def head_alone(held: Tensors) -> Tensors:
    return {LM_HEAD if name == EMBEDDING else name: value for name, value in held.items()}


def both(held: Tensors, same: bool) -> Tensors:
    embedding = held[EMBEDDING]
    return held | {LM_HEAD: embedding.clone() if same else embedding.flip(0)}


def further(held: Tensors) -> Tensors:
    """Zero biases, and parts beside the model."""
    sizes = {"q": 64, "k": 32, "v": 32}
    name = "model.layers.{}.self_attn.{}_proj.bias".format
    zeros = {name(i, part): torch.zeros(n) for part, n in sizes.items() for i in range(2)}
    return held | zeros | {"vision_tower.x.weight": torch.ones(2), "score.weight": torch.ones(2, 64)}  # fmt: skip


def without(end: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name: value for name, value in held.items() if not name.endswith(end)}


TIED, BIASES = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
MLX = {"group_size": 32, "bits": 4, "model.embed_tokens": False}
NOT_MLX = "quantized by MLX are not supported here; use the original"
CASES = {
    "tied, the LM head alone": Case(TIED, None, head_alone),
    "tied, both": Case(TIED, None, partial(both, same=True)),
    "tied, and another LM head": Case(  # both are used, as in transformers 5
        TIED, None, partial(both, same=False), "tie_word_embeddings is true, and lm_head.weight is not the embedding: both are used",
    ),
    "another name of the activation": Case(config={"hidden_act": "swish"}),
    "further tensors": Case(tensors=further, note="2 weight(s) of other parts are not used: score.weight, vision_tower.x.weight"),
    # those of a LLaMA made of a Qwen: of q, k and v alone. transformers starts the others at zero
    **{f"without {end}": Case(BIASES, None, without(end), "missing bias(es) are zero: model.layers.")
       for end in (".o_proj.bias", ".k_proj.bias", "mlp.down_proj.bias", "1.self_attn.q_proj.bias")},
    "without any bias": Case(config={"attention_bias": True}, refused="8 missing weight.s.: model.layers.0.self_attn.k_proj.bias"),
    "a bias too many": Case(tensors=lambda held: held | {BIAS: torch.ones(64)}, refused=f"1 unexpected weight.s.: {BIAS}; does config.json fit"),
    "MLX": Case(config={"quantization": MLX}, refused=NOT_MLX),
    "MLX, older": Case(config={"quantization_config": MLX}, refused=NOT_MLX),
    "no MLX": Case(config={"quantization": {}}),
    "no end of sequence": Case(config={"eos_token_id": -1, "bos_token_id": -1}, edit=generation_config),
    "an index beside one whole file": Case(edit=partial(index, old=False)),
    "an index and its old files": Case(edit=partial(index, old=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_directories_of_others(tmp_path, capsys, name):
    case = CASES[name]
    model = hf_model(**case.model)
    path = saved(model, tmp_path, case.config or {}, tensors=case.tensors)
    case.edit(path)
    if case.refused:
        with pytest.raises(ValueError, match=case.refused):
            load_model(path)
        return
    reference = model if case.tensors is head_alone else None  # which transformers does not read
    capsys.readouterr()
    assert_as_in_transformers(path, reference)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [note.startswith(f"note: {path}: ") for note in notes] == [True] * bool(case.note)
    assert all(case.note in note for note in notes)
    assert read_config(path).eos_ids == ((5,) if name == "no end of sequence" else (2,))


def test_the_layers_saved_alone(tmp_path):
    """A base model has no prefix in its names, and its own class in config.json."""
    model = hf_model(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert_as_in_transformers(tmp_path, model)


@pytest.mark.parametrize("family, value", [*zip(FAMILIES, cycle([..., None]))])
def test_no_architectures(tmp_path, family, value):
    model = hf_model(family, **MIXTURES.get(family, {}))
    path = saved(model, tmp_path, {"architectures": value})
    assert registry.row_of(None, model.config.model_type).name == f"{family}ForCausalLM"
    assert_as_in_transformers(path, model)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "m.gguf", "tokenizer.json"]
)
def test_pointers_of_git_lfs_are_named(tmp_path, name):
    """Of a clone without the files themselves."""
    path = saved(hf_model(), tmp_path)
    if name == "pytorch_model.bin":
        (path / "model.safetensors").unlink()
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    read = Tokenizer.load if "tokenizer" in name else load_model
    says = (
        f"{name}.*it is a Git LFS pointer and not the file itself; run git lfs pull in its folder"
    )
    with pytest.raises(ValueError, match=says):
        read(path / name if name.endswith(".gguf") else path)


@pytest.mark.parametrize("beside", ["adapter_model.safetensors", "config.json"])
def test_an_adapter_is_named(tmp_path, beside):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / beside).write_text("{}")
    with pytest.raises(ValueError, match="is an adapter .LoRA. and no model; merge it"):
        load_model(tmp_path)
