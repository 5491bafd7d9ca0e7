"""Numbers that are NaN or infinite end in one error, which names the layer that transformers finds, too."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from helpers import decode, fresh
from run.library import generate
from run.load import load
from run.options import Sampling
from server.batcher import Batcher, Job, Refusal

PROMPT, OTHERS = [5, 6, 7], [[9, 8], [30, 31, 32, 33]]
NAMED = {-1: "the embedding", 0: "layer 0 (of 0 to 2)", 2: "layer 2 (of 0 to 2)"}


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def loaded(made, path, **more):
    made.save_pretrained(path)
    usual = {"device": "cpu", "max_new_tokens": 12, "draft": "none"}
    return load(**usual | {"checkpoint": str(path), **more})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "name", ["embed_tokens", "layers.0.self_attn.v_proj", "layers.2.mlp.down_proj"]
)
def test_a_weight(tmp_path, name, compile, value):
    made = model()
    made.model.get_submodule(name).weight[PROMPT[-1], 3] = value
    # behind the embedding and each layer; the last is behind the final norm, which a NaN passes
    states = made.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    found = next(i - 1 for i, x in enumerate(states) if not x.isfinite().all())
    with pytest.raises(ValueError) as error:
        generate(loaded(made, tmp_path, compile=compile), [PROMPT])
    said = str(error.value)
    assert f"not finite (NaN or infinite), first behind {NAMED[found]}: its " in said
    assert said.endswith("weight is not finite; download the checkpoint again, or use another file")


def test_float16_that_overflows(tmp_path):
    made = model()
    made.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    made.model.layers[1].mlp.up_proj.weight.mul_(1e4)
    assert len(generate(loaded(made, tmp_path), [PROMPT]).tokens[0]) == 12
    said = "layer 1 .of 0 to 2.: float16 ends at 65504; use --dtype bfloat16 or float32$"
    with pytest.raises(ValueError, match=said):
        generate(loaded(made, tmp_path, dtype="float16"), [PROMPT])


@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.input_layernorm", "lm_head"])
def test_weights_that_hide_it(tmp_path, name):
    """A matmul of 8 bits reads no NaN, and an argmax passes one over: these are read at the start."""
    made = model()
    made.get_submodule(name).weight[4] = math.nan
    with pytest.raises(ValueError, match="(not finite|NaN or infinite); download") as error:
        loaded(made, tmp_path, quant="int8")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def breaks_at(tmp_path_factory):
    """A model that meets its broken embedding after some tokens of one prompt. Returns: it, healthy tokens."""
    made = model()
    healthy = generate(loaded(made, tmp_path_factory.mktemp("m")), [PROMPT, *OTHERS]).tokens
    others = {token for ids in (*healthy[1:], *OTHERS) for token in ids}
    token = next(t for t in healthy[0][1:-1] if t not in others | set(healthy[0][:1]))
    made.model.embed_tokens.weight[token] = math.nan
    return made, healthy


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("compile", [False, True])
def test_while_decoding(breaks_at, tmp_path, draft, compile):
    made, healthy = breaks_at
    engine = loaded(made, tmp_path, draft=draft, compile=compile, batch_size=3)
    with pytest.raises(ValueError, match="first behind the embedding: its weight is not finite"):
        decode(engine, PROMPT, *OTHERS)
    # the next sequences in its place are not touched
    assert generate(engine, [*OTHERS, OTHERS[0]]).tokens == [*healthy[1:], healthy[1]]


def test_one_answer_of_a_server(breaks_at, tmp_path):
    engine = loaded(breaks_at[0], tmp_path, batch_size=3)
    # text is not asked for: ids alone show that the others are not touched
    silent = type("Silent", (), {"push": lambda self, ids: "", "flush": lambda self: ""})
    batcher = Batcher(fresh(engine), 8)
    told = [[], [], [], []]
    for prompt, pieces in zip((PROMPT, *OTHERS, PROMPT), told):
        served = {"choice": 0, "likeliest": None, "tell": pieces.append}
        batcher.submit([Job(prompt, Sampling(), 0, 12, decoder=silent(), **served)])
    while batcher.new or batcher.jobs:
        assert batcher._schedule()
        batcher._step()
    for pieces in (told[0], told[-1]):
        assert isinstance(pieces[-1], Refusal) and pieces[-1].status == 500
        assert "not finite" in str(pieces[-1])
    assert [pieces[-1].tokens for pieces in told[1:-1]] == [12, 12]
    assert not batcher.failed
