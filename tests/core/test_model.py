"""The model: keys of config.json, directories of older files, and where weights lie.

Logits against transformers, of every architecture: test_families.py.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import backends.cpp.pages
import files.weights
from families import PLAIN, YARN
from files.config import config_from, read_config
from files.weights import load_model
from helpers import GOLDEN
from model import RotaryEmbeddings, rope_frequencies
from model import read_config as read_plainly
from quantize import Quantization
from run.load import load
from run.options import DEMO
from tiny_models import random_model


@pytest.fixture(scope="module")
def gqa(tmp_path_factory) -> Path:
    """The directory of a random LLaMA."""
    path = tmp_path_factory.mktemp("plain")
    random_model("Llama", PLAIN).save_pretrained(path)
    return path


# ------------------------------------------------------------------------------------------- config

OLD = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "torch_dtype": "float16", "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def configured(family="Llama", **changes):
    return config_from(OLD | changes, f"{family}ForCausalLM")


YARNS = {  # changes of a plain block
    "plain": {},
    "from max_position_embeddings": {"original_max_position_embeddings": None},
    "exact bounds": {"truncate": False, "beta_fast": 20, "beta_slow": 2},
    "given": {"attention_factor": 0.8},
    "mscale": {"mscale": 0.7, "mscale_all_dim": 1.3},
    "half of mscale": {"mscale": 0.7},
    "less than one": {"factor": 0.5},
    "one bound": {"original_max_position_embeddings": 4},
    "one place": {"truncate": False, "beta_fast": 2.0, "beta_slow": 2.0},
}


@pytest.mark.parametrize("change", YARNS)
def test_yarn_is_that_of_transformers(change):
    """Frequencies and factor, of heads of 128 over 4096 positions."""
    block = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    block |= {"original_max_position_embeddings": 4096} | YARNS[change]
    block = {name: value for name, value in block.items() if value is not None}
    sizes = OLD | {"head_dim": 128, "max_position_embeddings": 8192}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=dict(block))
    want, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = config_from(sizes | {"rope_parameters": block}, "LlamaForCausalLM")
    (rope,) = ours.ropes
    torch.testing.assert_close(rope_frequencies(rope), want, rtol=1e-6, atol=0)
    assert RotaryEmbeddings([rope]).factors == [pytest.approx(factor, rel=1e-12)]


SAID_512 = YARN | {"original_max_position_embeddings": 512}


@pytest.mark.parametrize("family, changes, longest", [
    # people write the original or the extended length
    ("Qwen3", {"max_position_embeddings": 512, "rope_scaling": SAID_512}, 2048),
    ("Qwen3", {"max_position_embeddings": 4096, "rope_scaling": SAID_512}, 4096),
    ("Mistral", {"sliding_window": 128}, 128),
    ("Mistral", {"sliding_window": 4096}, 512),
    ("Mistral", {"sliding_window": None}, 512),
    ("Qwen2", {"sliding_window": 128, "use_sliding_window": False}, 512),
    ("Qwen2", {"sliding_window": 128, "use_sliding_window": True}, 128),
])  # fmt: skip
def test_yarn_extends_the_context_and_sliding_windows_bound_it(family, changes, longest):
    assert configured(family, **changes).max_context == longest


def test_ids_that_end_a_sequence(gqa, tmp_path):
    raw = json.loads((gqa / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": [7, 0]}))
    assert read_config(tmp_path).eos_ids == (7, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    assert read_config(tmp_path).eos_ids == (7, 0, 9)


# ------------------------------------------------------------------------------------------ loading


def test_older_files_in_parts_load_the_same(gqa, tmp_path):
    """Parts of pytorch_model.bin. Single files are in test_quantize.py, parts of safetensors in test_moe.py."""
    (tmp_path / "config.json").symlink_to(gqa / "config.json")
    weights = load_file(gqa / "model.safetensors")
    names, index = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    listed = tmp_path / "pytorch_model.bin.index.json"
    listed.write_text(json.dumps({"weight_map": index}))
    ours, theirs = (dict(load_model(path).named_parameters()) for path in (tmp_path, gqa))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("quant", [None, "int4"])
def test_weights_that_lie_behind_each_other_are_what_they_were(quant, monkeypatch):
    """Those of a large model do, in huge pages, where there are such."""

    def loaded() -> list[torch.Tensor]:
        model = load_model(Path(DEMO), quant=Quantization(quant) if quant else None)
        tensors = (*model.parameters(), *model.layers.buffers(), *model.lm_head.buffers())
        return [t for t in tensors if t.numel()]

    def full(*args, **kwargs):
        raise OSError("no memory")

    small = loaded()
    monkeypatch.setattr(files.weights, "LARGE", 0)
    large = loaded()
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in large)
    assert all(0 <= b[0] - a[1] < 64 for a, b in itertools.pairwise(places))
    monkeypatch.setattr(backends.cpp.pages.mmap, "mmap", full)
    for a, b, c in zip(small, large, loaded(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_loaded_weights_need_no_gradients():
    """Or operators would refuse them, since nothing turns gradients off while decoding."""
    engine = load(checkpoint=DEMO, draft="eagle", tree="dynamic", device="cpu")
    for part in (engine.target, engine.drafter.head, engine.drafter.lm_head):
        assert torch.is_grad_enabled()
        assert not [name for name, x in part.named_parameters() if x.requires_grad]


# ------------------------------------------------------------------------------ the flat readers

PLAIN_MODELS = ["target_llama_mha", "target_llama31_gqa8", "target_mixtral"]


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_the_flat_reader_reads_what_the_strict_one_does(name):
    path = GOLDEN / "models" / name
    assert read_plainly(json.loads((path / "config.json").read_text())) == read_config(path)
