"""--random: weights of any shape in memory, and vanilla's text with every draft."""

import json

import pytest

from run.generate import main
from run.library import generate
from run.load import load

TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 4128, "torch_dtype": "float32", "hidden_act": "silu",
    "max_position_embeddings": 256, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
FAMILIES = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 20, "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
OPTIONS = {"device": "cpu", "max_new_tokens": 40, "ignore_eos": True}
PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 4]]


def shape_file(folder, keys):
    """Write a config.json without weights. Returns: its path, as --random takes it."""
    path = folder / "config.json"
    path.write_text(json.dumps(TINY | keys))
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_counts_upwards_with_every_draft(tmp_path, family):
    random = shape_file(tmp_path, FAMILIES[family])
    counted = [[prompt[-1] + n for n in range(1, 41)] for prompt in PROMPTS]
    chain = {"tree": "chain", "quant": "int8", "batch_size": 2}
    texts = []  # that are sampled, by vanilla and with drafts
    for more in ({"draft": "none"}, {"tree": "dynamic"}, chain):
        engine = load(random=random, **OPTIONS, **more)
        result = generate(engine, PROMPTS)
        assert result.tokens == counted, more
        assert result.stats["random"] == random
        assert (result.stats["tau"] > 2) == ("tree" in more)
        sampled = generate(engine, PROMPTS, temperature=1.1, seed=3)
        texts.append(sampled.tokens)
        assert (sampled.stats["tau"] > 1.1) == ("tree" in more)
    assert texts[0] == texts[1] != counted  # the third is rounded


def test_everything_printed_says_that_the_text_means_nothing(capsys, tmp_path):
    random = shape_file(tmp_path, {})
    line = f"--random {random} --prompt def --max_new_tokens 8 --device cpu --compare"
    main(line.split())
    note, *lines = capsys.readouterr().err.splitlines()
    assert note.startswith("note: the weights are random") and "the text means nothing" in note
    marked = f"random weights in the shape {random}, whose text means nothing: "
    results = [line for line in lines if line.startswith(marked)]
    assert len(results) > 1 and results[-1] == lines[-1]
    assert "100 % of sequences identical" in results[0]


@pytest.mark.parametrize("keys, says", [
    ({"vocab_size": 97}, "has 97 tokens, and .*demo has 4096; use a larger shape, or another --checkpoint"),
    ({"architectures": ["FooForCausalLM"]}, "architecture FooForCausalLM is not supported"),
])  # fmt: skip
def test_a_shape_that_cannot_be_is_refused(tmp_path, keys, says):
    with pytest.raises(ValueError, match=says):
        load(random=shape_file(tmp_path, keys), **OPTIONS)
