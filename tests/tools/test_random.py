"""--random: weights of any shape in memory, vanilla's text with every draft, and the rates of a table."""

import json

import pytest

from drafts.random_model import PERIOD, right_ranks
from run.generate import main
from run.library import generate
from run.load import load

TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 4128, "torch_dtype": "float32", "hidden_act": "silu",
    "max_position_embeddings": 256, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
FAMILIES = {
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
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


def test_drafts_are_accepted_where_the_table_says(tmp_path):
    """Position by position in a chain; a tree of 60 nodes has the tokens a pass of EAGLE-2's paper."""
    random = shape_file(tmp_path, {"max_position_embeddings": 2048})
    given = OPTIONS | {"random": random, "max_new_tokens": 120, "tree": "chain", "tree_depth": 5}
    lengths = generate(load(**given), PROMPTS[:1]).stats["accept_lengths"]
    accepted = (right_ranks(5) == 0).cumprod(1).sum(1)  # [PERIOD]
    position = len(PROMPTS[0])
    for length in lengths[:-1]:  # the last one is cut
        assert length == accepted[position % PERIOD]
        position += length + 1
    size = {"tree": "dynamic", "tree_depth": 6, "tree_topk": 10, "tree_size": 60}
    stats = generate(load(**given | size | {"max_new_tokens": 800}), PROMPTS[:1]).stats
    assert stats["tau"] == pytest.approx(4.65, abs=0.25)


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
