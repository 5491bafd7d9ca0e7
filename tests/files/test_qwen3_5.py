"""Qwen3.5 against transformers, and trees over states: what a node's state is, and what it may not depend on."""

from __future__ import annotations

import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_models
from backends.library import set_plain
from drafters import Drafter, RootOnly
from drafts.ngram_draft import Ngram, NgramDrafter
from files.config import read_config
from files.weights import load_model
from helpers import decode, engine_for, in_turn, pairwise, slow
from kv_cache import KVCache, Window, causal_window
from models.recurrent import DeltaWeights, delta_rule, parents_of
from models.states import TAPS, LayerState, StateShape
from quantize import BLOCKS, Quantization
from reference import build_tree, choose
from run import stats
from run.session import Session
from run.tp import check_parts
from tiny_models import (
    GREEDY,
    IDS,
    NAMES,
    assert_names_of_package,
    assert_same_directory,
    assert_same_logits,
    by_passes,
    expert_keys,
    gguf_tensors,
    metadata_of,
    of_experts,
    refused,
    refused_keys,
    write,
)

SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 4, "head_dim": 32, "max_position_embeddings": 512, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
KINDS = ["linear_attention", "full_attention"]
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
CASES = {
    "as it is": {},
    "as many key heads": {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "one key head": {"linear_num_key_heads": 1, "linear_key_head_dim": 32},
    "every second layer": {"layer_types": KINDS * 2},
    "attention first": {"layer_types": KINDS[::-1] * 2},
    "tied": {"tie_word_embeddings": True},
    "half of a head is turned": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
    },
    "all of a head is turned": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0}
    },
    "experts": EXPERTS,
    "one expert of many": EXPERTS | {"num_experts_per_tok": 1, "tie_word_embeddings": True},
}


def random_model(**options):
    """A Qwen3.5 of transformers with random weights; norms count from one, but those of states."""
    torch.manual_seed(0)
    kind = "Qwen3_5Moe" if "num_experts" in options else "Qwen3_5"
    config = getattr(transformers, f"{kind}TextConfig")(**SIZES | options)
    of_kind = getattr(transformers, f"{kind}ForCausalLM")
    model = of_kind._from_config(config, attn_implementation="eager")
    randomize(model)
    return model.eval()


def randomize(model) -> None:
    with torch.no_grad():
        for name, p in model.float().named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-2.0, 2.0)
            else:
                from_one = "norm" in name and "linear_attn" not in name
                center = 1.0 if "linear_attn.norm" in name else 0.0
                p.normal_(center, 0.4 if from_one or p.dim() == 1 else 0.1)


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    model = assert_same_directory(tmp_path, random_model(**CASES[case]))
    assert model.config.tie_embeddings == CASES[case].get("tie_word_embeddings", False)


@torch.no_grad()
def test_64_greedy_tokens_are_those_of_transformers(tmp_path):
    reference = random_model()
    reference.save_pretrained(tmp_path)
    engine = engine_for(
        load_model(tmp_path, torch.float32), RootOnly(), max_new_tokens=64, ignore_eos=True
    )
    ours = decode(engine, IDS.tolist()).history[0]
    theirs = reference.generate(IDS[None], max_new_tokens=64, **GREEDY)
    assert ours == theirs[0].tolist()


def test_the_text_part_of_a_model_with_pictures_and_an_mtp_layer(tmp_path, capsys):
    random_model().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": raw}))
    held = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): value for name, value in held.items()
    }
    more = {"mtp.fc.weight": torch.zeros(64, 128), "model.visual.merger.weight": torch.zeros(4)}
    save_file(renamed | more, tmp_path / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    model = load_model(tmp_path, torch.float32)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "1 weight(s) of other parts are not used: model.visual.merger.weight" in said
    assert by_passes(model, IDS, 7).std() > 0.3


def test_experts_in_one_tensor_a_layer(tmp_path):
    """As in the published files; transformers writes them one by one, or so."""
    reference = random_model(**EXPERTS)
    reference.save_pretrained(tmp_path)
    held = {
        name: value.contiguous()
        for name, value in reference.state_dict().items()
        if name != "lm_head.weight" or not reference.config.tie_word_embeddings
    }
    stacks = [name for name in held if name.endswith("experts.gate_up_proj")]
    assert len(stacks) == 4 and held[stacks[0]].shape == (6, 64, 64)
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path, torch.float32)
    want = reference(IDS[None]).logits[0]
    torch.testing.assert_close(by_passes(model, IDS, 5), want, atol=1e-4, rtol=1e-4)


def test_numbers_of_the_decay_keep_the_bits_of_the_file(tmp_path):
    """Published files have them in fp32, beside weights in bfloat16."""
    random_model().save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    decay = load_model(tmp_path, torch.bfloat16).layers[0].decay
    assert torch.equal(decay.A_log, held["model.layers.0.linear_attn.A_log"])
    assert torch.equal(decay.dt_bias, held["model.layers.0.linear_attn.dt_bias"])


@pytest.mark.parametrize("quant, kv", [("int8", "int8"), ("int4", "")])
@pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["dense", "experts"])
def test_quantized_models_decode_trees_as_vanilla(tmp_path, quant, kv, shape):
    """kv: of the layers with attention; states stay in fp32"""
    random_model(**shape).save_pretrained(tmp_path)
    form = Quantization(quant, 32 if quant == "int4" else 0)
    target = load_model(tmp_path, torch.bfloat16, quant=form)
    options = OPTIONS | {"compile": True, "kv": kv}
    engine = engine_for(target, RootOnly(), **options)
    assert target.program is not None
    vanilla = decode(engine, *PROMPTS).history[:2]
    drafted = decode(engine_for(target, Oracle(vanilla, 16, 5), **options), *PROMPTS)
    assert drafted.history[:2] == vanilla
    assert max(drafted.stats.accept_lengths) > 1


# --------------------------------------------------------------------------------------- GGUF files

GGUF_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip


def tiled(x: torch.Tensor, keys: int, width: int, dim: int = 0) -> torch.Tensor:
    """Heads of values, of `width` numbers each, in the converter's order: the first of every head of keys first."""
    parts = x.unflatten(dim, (keys, -1, width)).transpose(dim, dim + 1)
    return parts.flatten(dim, dim + 2)


def file_of(model, further: dict | None = None) -> tuple[dict, dict]:
    """The metadata and the converter's tensors: value heads in its order, norms with one added, -exp(A_log).

    The names are those of the package gguf.
    """
    c = model.config
    keys, width = c.linear_num_key_heads, c.linear_value_head_dim
    both = 2 * keys * c.linear_key_head_dim
    changes = {
        "in_proj_qkv.weight": lambda v: torch.cat((v[:both], tiled(v[both:], keys, width))),
        "conv1d.weight": lambda v: torch.cat((v[:both, 0], tiled(v[both:, 0], keys, width))),
        "in_proj_z.weight": lambda v: tiled(v, keys, width),
        "in_proj_b.weight": lambda v: tiled(v, keys, 1),
        "in_proj_a.weight": lambda v: tiled(v, keys, 1),
        "out_proj.weight": lambda v: tiled(v, keys, width, 1),
        "A_log": lambda v: tiled(-v.exp(), keys, 1),
        "dt_bias": lambda v: tiled(v, keys, 1),
        "norm.weight": lambda v: v,
    }

    def convert(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        _, of_state, own = name.partition(".linear_attn.")
        if of_state:
            return {name: changes[own](value)}
        return of_experts(name, value + 1 if "norm" in name else value)

    own = {
        "rope.dimension_count": int(c.head_dim * c.rope_parameters["partial_rotary_factor"]),
        "rope.dimension_sections": [2, 1, 1, 0], "ssm.conv_kernel": 4,
        "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim, "ssm.state_size": c.linear_key_head_dim,
        "ssm.time_step_rank": c.linear_num_value_heads, "ssm.group_count": c.linear_num_key_heads,
        "full_attention_interval": 4,
    }  # fmt: skip
    architecture = "qwen35"
    if hasattr(c, "num_experts"):
        architecture = "qwen35moe"
        own |= expert_keys(c)
        c.intermediate_size = c.moe_intermediate_size
    metadata = metadata_of(model, architecture, own | (further or {}))
    if hasattr(c, "num_experts"):  # as in published files
        del metadata["qwen35moe.feed_forward_length"]
    tensors = gguf_tensors(model, GGUF_NAMES, convert)
    assert_names_of_package(tensors, architecture)
    return metadata, tensors


@pytest.mark.parametrize(
    "case", ["as it is", "as many key heads", "tied", "half of a head is turned", "experts"]
)
def test_files(tmp_path, case):
    """llama.cpp (llama-cpp-python 0.3.36) reads a file that is written so, too; its cache is in fp16."""
    reference = random_model(**CASES[case])
    path = write(tmp_path / "m.gguf", *file_of(reference))
    assert_same_logits(load_model(path, torch.float32), reference)


@pytest.mark.parametrize("kind, shape", [("Q8_0", {}), ("Q4_0", {}), ("Q8_0", EXPERTS)])
def test_a_file_in_blocks_decodes_trees_as_vanilla(tmp_path, kind, shape):

    def kind_of(name: str) -> str:
        return "F32" if "conv1d" in name else kind

    path = write(tmp_path / "m.gguf", *file_of(random_model(**shape)), kind_of)
    target = load_model(path, quant=Quantization(BLOCKS, saved=True))
    assert shape or all(layer.w2.packed for layer in target.layers)
    vanilla = decode(engine_for(target, RootOnly(), compile=True, **OPTIONS), *PROMPTS).history[:2]
    assert target.program is not None
    drafted = decode(engine_for(target, Oracle(vanilla, 16, 5), compile=True, **OPTIONS), *PROMPTS)
    assert drafted.history[:2] == vanilla


def test_files_that_are_not_read_are_one_line(capsys, tmp_path):
    for key, value, says in (
        ("nextn_predict_layers", 4, "nextn_predict_layers must be from 0 to below block_count"),
        ("ssm.time_step_rank", 3, "ssm.time_step_rank must divide ssm.inner_size"),
        ("ssm.conv_kernel", 3, "linear_conv_kernel_dim must be"),
    ):
        path = write(tmp_path / "m.gguf", *file_of(random_model(), {key: value}))
        assert says in refused(capsys, "--checkpoint", str(path)), key


# ---------------------------------------------------------------------------------------- the state


TARGETS = ["float32", "bfloat16", "bfloat16 experts"]


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    dtype, _, experts = request.param.partition(" ")
    path = tmp_path_factory.mktemp("qwen3_5")
    random_model(**EXPERTS if experts else {}).save_pretrained(path)
    return load_model(path, getattr(torch, dtype))


def random_parents(draw: random.Random, size: int, depth: int) -> list[int]:
    """The parents of a tree's nodes, of any form; none is deeper than `depth`."""
    parents, depths = [0], [0]
    for _ in range(1, size):
        inner = [i for i, d in enumerate(depths) if d < depth]
        parents.append(draw.choice(inner))
        depths.append(depths[parents[-1]] + 1)
    return parents


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_a_node_has_the_bits_of_its_own_path(target, seed):
    """Behind a prefix; and after the tree, an accepted path goes on as if it had been read alone."""
    draw = random.Random(seed)
    size = 12
    parents = torch.tensor([random_parents(draw, size, 6)])
    tree = build_tree(IDS[None, :size], parents, torch.ones(1, size).bool(), 6)
    prefix = IDS[size:20]
    cache = KVCache.empty(target.config, 1, 64, target.norm.weight.dtype, "cpu")

    def run(cache, tokens, start, mask, depths):
        begin = torch.tensor([start])
        window = Window(begin[:, None] + torch.arange(tokens.shape[1]), begin, mask)
        return target(tokens, start + depths, cache, window)

    def same(got, want):  # matmuls of fp32 are the vendor's: a row may depend on the others
        bound = 1e-5 if want.dtype == torch.float32 else 0
        torch.testing.assert_close(got, want, atol=bound, rtol=bound)

    def in_order(tokens):
        return causal_window(torch.zeros(1), len(tokens)).mask, torch.arange(len(tokens))[None]

    run(cache, prefix[None], 0, *in_order(prefix))
    together = run(cache, tree.tokens, len(prefix), tree.mask, tree.depths)
    leaf = draw.randrange(size)
    path = tree.mask[0, leaf].nonzero()[:, 0]
    moves = torch.arange(7)
    moves[: len(path)] = path
    cache.compact(torch.tensor([len(prefix)]), moves[None])
    behind = run(cache, IDS[None, -3:], len(prefix) + len(path), *in_order(IDS[-3:]))

    alone = KVCache.empty(target.config, 1, 64, target.norm.weight.dtype, "cpu")
    run(alone, prefix[None], 0, *in_order(prefix))
    for depth, node in enumerate(path):  # one token at a time, as vanilla decoding reads
        token = tree.tokens[:, node : node + 1]
        out = run(alone, token, len(prefix) + depth, *in_order(token[0]))
        same(out[0, 0], together[0, node])
    for i, token in enumerate(IDS[-3:]):
        out = run(alone, token[None, None], len(prefix) + len(path) + i, *in_order([token]))
        same(out[0, 0], behind[0, i])


def test_parents_are_the_last_ancestors():
    draw = random.Random(5)
    parents = torch.tensor([random_parents(draw, 20, 5) for _ in range(3)])
    tree = build_tree(torch.zeros_like(parents), parents, torch.ones_like(parents).bool(), 5)
    assert torch.equal(parents_of(tree.mask)[:, 1:], parents[:, 1:])
    assert (parents_of(tree.mask)[:, 0] == -1).all()


# ----------------------------------------------------------------------------------------- decoding


class Oracle(Drafter):
    """Trees of another random form in every cycle; most of their tokens are those that vanilla decodes."""

    width = 9

    def __init__(self, texts: list[list[int]], size: int, depth: int):
        """texts: of the sequences, with their prompts"""
        self.size = size
        self.depth = depth
        longest = max(map(len, texts)) + depth + 1
        self.texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        self.draw = random.Random(3)

    def propose(self, state, inputs):
        pos = inputs.text.pos
        parents = torch.tensor([random_parents(self.draw, self.size, self.depth) for _ in pos])
        valid = torch.ones_like(parents).bool()
        tree = build_tree(torch.zeros_like(parents), parents, valid, self.depth)
        place = (pos[:, None] + tree.depths).clamp(max=self.texts.shape[1] - 1)
        right = self.texts.gather(1, place)
        wrong = [[self.draw.random() < 0.3 for _ in range(self.size)] for _ in pos]
        tokens = torch.where(torch.tensor(wrong), (right + 1) % 96, right)
        tokens[:, 0] = inputs.text.root
        return tree._replace(tokens=tokens)


class Chain(Oracle):
    width = 1

    def propose(self, state, inputs):
        tree = super().propose(state, inputs)
        parents = torch.arange(self.size).sub(1).clamp(min=0).expand_as(tree.parents)
        depths = torch.arange(self.size) + inputs.text.pos[:, None]
        right = self.texts.gather(1, depths.clamp(max=self.texts.shape[1] - 1))
        tokens = torch.where(torch.rand(right.shape) < 0.2, (right + 1) % 96, right)
        tokens[:, 0] = inputs.text.root
        return build_tree(tokens, parents, tree.valid, self.depth)


DRAFTERS = {
    "tree": lambda texts: Oracle(texts, 16, 5),
    "large tree": lambda texts: Oracle(texts, 60, 8),
    "small tree": lambda texts: Oracle(texts, 3, 5),  # more levels than nodes
    "chain": lambda texts: Chain(texts, 6, 5),
    "lookup": lambda texts: NgramDrafter(Ngram(tokens=5, branches=3)),
}
OPTIONS = {"batch_size": 2, "max_new_tokens": 40, "ignore_eos": True, "seed": 7}
PROMPTS = [IDS[:5].tolist() * 3, IDS.tolist()]


COMPILES = ["whole passes", "C++", "plain"]


@pytest.fixture
def compiles(request):
    """Whether a pass over all layers is one call, where the dtype allows it."""
    set_plain(request.param == "plain")
    yield request.param == "whole passes"
    set_plain(False)


@pairwise(
    fixtures=("target", "compiles"),
    target=TARGETS,
    compiles=COMPILES,
    name=list(DRAFTERS),
    temperature=[1.0, 0.0],
)
def test_no_drafter_changes_a_token(target, compiles, name, temperature):
    options = OPTIONS | {"temperature": temperature, "compile": compiles}
    vanilla = decode(engine_for(target, RootOnly(), **options), *PROMPTS).history[:2]
    drafted = decode(engine_for(target, DRAFTERS[name](vanilla), **options), *PROMPTS)
    assert drafted.history[:2] == vanilla
    assert any(line["draft_tokens"] for line in drafted.trace)
    if name != "lookup":  # which may miss in a text of a random model
        assert sum(drafted.stats.accept_lengths) / len(drafted.stats.accept_lengths) > 0.5


def test_other_sequences_change_nothing(target):
    prompts = [IDS[:n].tolist() for n in (3, 29, 12)]
    options = {"max_new_tokens": 20, "ignore_eos": True}
    together = decode(engine_for(target, RootOnly(), batch_size=3, **options), *prompts)
    for row, prompt in enumerate(prompts):
        alone = decode(engine_for(target, RootOnly(), **options), prompt)
        assert together.history[row] == alone.history[0]


def test_a_prompt_of_several_chunks_and_one_at_its_edge(target):
    for length in (1, 256, 257, 300):
        prompt = (IDS.tolist() * 11)[:length]
        options = {"max_new_tokens": 12, "ignore_eos": True}
        vanilla = decode(engine_for(target, RootOnly(), **options), prompt).history[0]
        drafter = DRAFTERS["tree"]([vanilla])
        assert decode(engine_for(target, drafter, **options), prompt).history[0] == vanilla


@torch.no_grad()
def test_the_pass_in_cpp_has_the_rows_of_its_operators(target):
    bf16 = target.norm.weight.dtype == torch.bfloat16
    for width in (1, 6, 29):
        target.fuse(False)
        want = by_passes(target, IDS, width)
        target.fuse(True)
        assert (target.program is not None) == bf16
        assert torch.equal(by_passes(target, IDS, width), want)
    target.fuse(False)


@pytest.mark.parametrize("sizes", [(4, 16, 32), (3, 8, 5), (2, 128, 128)])
def test_cpp_computes_the_recurrence_of_pytorch(sizes):
    """Four passes over two sequences, of which one is done in the third; sums run in other orders."""
    H, Dk, Dv = sizes
    shape = StateShape(H, Dk, Dv, 2 * Dk + H * Dv + 2 * H)  # one head of keys
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    weights = DeltaWeights(
        normal(shape.channels - 2 * H, TAPS) / 2, normal(2, H), 1 + normal(Dv) / 4, 1e-6
    )
    states = [LayerState.empty(shape, 2, 12, "cpu") for _ in range(2)]
    for state in states:
        state.state.fill_(7)  # of texts before, which a sequence that begins forgets
    draw = random.Random(1)
    start = torch.tensor([0, 0])
    for number in range(4):
        parents = torch.tensor([random_parents(draw, 12, 6) for _ in range(2)])
        tree = build_tree(parents, parents, torch.ones_like(parents).bool(), 6)
        mask = tree.mask
        kept = None
        if number == 0:  # a prompt of which all but one token are sure to stay
            mask = causal_window(start, 12).mask
            kept = torch.tensor([11, 5])
        seen = start if number != 2 else torch.tensor([0, int(start[1])])
        window = (start[:, None] + torch.arange(12), seen, mask, kept)
        x = normal(2, 12, shape.channels + H * Dv)
        found = [rule(x, state, window, weights) for rule, state in zip(RULES, states)]
        torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)
        plain, fast = states  # the inputs of rows that cannot be accepted may differ
        torch.testing.assert_close(plain.state, fast.state, atol=2e-5, rtol=2e-5)
        assert torch.equal(plain.length, fast.length)
        accepted = torch.tensor([1, 7]) if number == 0 else torch.tensor([1 + number, 4])
        moves = torch.stack([torch.arange(5), torch.tensor([0, 3, 2, 7, 5])])
        if number:
            for state in states:
                state.compact(start, moves)
        start = start + (kept if number == 0 else 0) + accepted
        if number == 2:
            start[0] -= accepted[0]  # it is done
    with pytest.raises(RuntimeError, match="does not go on at token 90"):
        begin = torch.tensor([90, 90])
        RULES[1](x, states[1], (begin[:, None] + torch.arange(12), begin, mask, None), weights)


RULES = (delta_rule, choose(torch.device("cpu")).delta_rule)


# ---------------------------------------------------------------------------------- further turns


def answer(target, drafter, seq_prompt: list[int]) -> list[int]:
    options = {"max_new_tokens": 12, "ignore_eos": True}
    return decode(engine_for(target, drafter, **options), seq_prompt).history[0]


def read(session: Session, seq: int, prompt: list[int], **options) -> tuple[list[int], int]:
    """Decode a turn. Returns: the text, and the number of tokens that it took over."""
    session.admit(seq, prompt, (0, 0), **options)
    cached = len(session.history[seq])
    while session.busy(seq):
        session.step()
    return session.history[seq], cached


TURNS = {  # of a text of 41 tokens, 29 of them its prompt -> the next prompt, and what stays of the text
    "goes on": (lambda text: [*text, 5, 6, 7], 39),
    "the same again": (lambda text: text[:29], 28),
    "another answer": (lambda text: [*text[:32], 90, 91], 28),
    "another prompt": (lambda text: [*text[:20], 90, 91], 0),
    "nothing in common": (lambda text: [90, *text], 0),
}


@pairwise(fixtures=("target",), target=TARGETS, turn=list(TURNS), drafted=[False, True])
def test_a_further_turn_equals_a_fresh_one(target, turn, drafted):
    """A text that goes on keeps its state, one that is cut behind its prompt the snapshot, another begins anew."""
    text = answer(target, RootOnly(), IDS.tolist())
    follow, stays = TURNS[turn]
    prompt = follow(text)
    want = answer(target, RootOnly(), prompt)
    drafter = Oracle([want], 12, 4) if drafted else RootOnly()
    options = {"max_new_tokens": 12, "ignore_eos": True}
    session = Session(engine_for(target, drafter, **options))
    if drafted:
        drafter.texts = Oracle([text], 12, 4).texts
    read(session, 0, IDS.tolist())
    if drafted:
        drafter.texts = Oracle([want], 12, 4).texts
    assert read(session, 0, prompt) == (want, stays)
    assert read(session, 0, prompt)[0] == want  # by the snapshot that this turn took


def test_an_answer_that_was_cut_goes_on_from_its_prompt(target):
    text = answer(target, RootOnly(), IDS.tolist())
    session = Session(engine_for(target, RootOnly(), max_new_tokens=12, ignore_eos=True))
    read(session, 0, IDS.tolist())
    session.truncate(0, 5)
    prompt = [*text[:-5], 8, 9]
    assert read(session, 0, prompt) == (answer(target, RootOnly(), prompt), 28)


def test_a_prompt_that_was_left_half_read(target):
    """Its state is behind the last token of a chunk, which the next prompt would have to run again."""
    long = (IDS.tolist() * 20)[:500]
    session = Session(engine_for(target, RootOnly(), max_new_tokens=12, ignore_eos=True))
    for prompt, stays in (([*long[:300], 7, 8], 0), ([*long[:100], 7, 8], 0)):
        session.admit(0, long, (0, 0))
        session.step()  # a chunk
        session.release(0)
        assert read(session, 0, prompt) == (answer(target, RootOnly(), prompt), stays)
        session.admit(0, [3], (0, 0))
        session.release(0)


@pytest.mark.parametrize("compiles", ["whole passes", *slow(COMPILES[1:])], indirect=True)
def test_a_sequence_that_waits_keeps_its_state(target, compiles):
    """Cycles of others run over it meanwhile."""
    options = {"batch_size": 2, "max_new_tokens": 12, "ignore_eos": True, "compile": compiles}
    text = answer(target, RootOnly(), IDS.tolist())
    session = Session(engine_for(target, RootOnly(), **options))
    read(session, 0, IDS.tolist())
    read(session, 1, IDS[:9].tolist())
    prompt = [*text, 4, 5]
    assert read(session, 0, prompt) == (answer(target, RootOnly(), prompt), 39)


@pytest.mark.parametrize("compiles", ["whole passes", *slow(COMPILES[1:])], indirect=True)
def test_sequences_copy_states(target, compiles):
    """From one that has ended, and from one that goes on."""
    options = {"batch_size": 3, "max_new_tokens": 12, "ignore_eos": True, "compile": compiles}
    session = Session(engine_for(target, RootOnly(), **options))
    text, _ = read(session, 0, IDS.tolist())
    assert text == answer(target, RootOnly(), IDS.tolist())
    again, taken = read(session, 1, IDS.tolist(), source=0)
    assert (again, taken) == (text, 28)
    session.admit(2, [*text, 9], (0, 0), source=1)
    while not session.live[2]:
        session.step()
    other = [*text, 9, 11]
    assert read(session, 0, other, source=2)[0] == answer(target, RootOnly(), other)
    while session.busy(2):
        session.step()
    assert session.history[2] == answer(target, RootOnly(), [*text, 9])


def test_sampled_turns_continue_their_noise(target):
    options = OPTIONS | {"batch_size": 1, "temperature": 1.0, "max_new_tokens": 15}
    prompt = IDS.tolist()
    wanted = in_turn(Session(engine_for(target, RootOnly(), **options), [(0, 0)]), prompt)
    first = list(wanted.history[0])
    second = [*first, 5, 6]
    in_turn(wanted, second)
    drafter = Oracle([first], 16, 5)
    session = in_turn(Session(engine_for(target, drafter, **options), [(0, 0)]), prompt)
    assert session.history[0] == first
    drafter.texts = Oracle([wanted.history[0]], 16, 5).texts
    assert in_turn(session, second).history[0] == wanted.history[0]


# ----------------------------------------------------------------------------------------- bad input

BAD_KEYS = [
    ("hidden_act", "gelu", "hidden_act must be silu"),
    ("layer_types", ["linear_attention"] * 4, "layer_types must name full_attention at least once"),
    ("layer_types", ["full_attention"], "layer_types must name all 4 layers; it names 1"),
    ("full_attention_interval", 2, "full_attention_interval (2) and layer_types must name the same layers"),
    ("layer_types", ["mamba"] * 4, "layer_types must be a list of"),
    ("linear_conv_kernel_dim", 3, "linear_conv_kernel_dim must be a whole number from 4 to 4"),
    ("linear_num_key_heads", 3, "linear_num_key_heads (3) must divide linear_num_value_heads (4)"),
    ("attn_output_gate", False, "attn_output_gate must be true"),
    ("rope_parameters", {"partial_rotary_factor": 2}, "partial_rotary_factor must be a number above 0"),
    ("rope_parameters", {"partial_rotary_factor": 0.1}, "leave an even number"),
    ("linear_value_head_dim", 48, "its config asks for [456, 64] in all"),
]  # fmt: skip


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, key, value, says):
    assert says in refused_keys(capsys, tmp_path, random_model(), **{key: value})


def test_a_recurrent_draft_model_is_refused(capsys, tmp_path):
    random_model().save_pretrained(tmp_path)
    capsys.readouterr()
    options = [
        "--checkpoint",
        str(tmp_path),
        "--draft",
        "model",
        "--draft_checkpoint",
        str(tmp_path),
    ]
    said = refused(capsys, *options, "--prompt_ids", "3,4")
    assert "has recurrent layers" in said and "use another draft model" in said


def test_ranks_are_refused(tmp_path):
    random_model().save_pretrained(tmp_path)
    config = read_config(tmp_path)
    with pytest.raises(ValueError, match="a model with recurrent layers runs on one rank"):
        check_parts(config, 2, tmp_path)


def test_states_count_as_memory(tmp_path, monkeypatch):
    random_model().save_pretrained(tmp_path)
    engine = engine_for(load_model(tmp_path, torch.float32), RootOnly(), batch_size=3)
    cache = Session(engine).buffers.cache
    states = [state for pair in cache.states.recurrent() for state in pair]
    numbers = sum(buffer.nbytes for state in states for buffer in state[:2])
    slots = sum(buffer.nbytes for buffer in (*cache.k, *cache.v))
    assert numbers > 0
    plans = []
    monkeypatch.setattr(stats, "check_memory", lambda plan, *rest: plans.append(plan))
    stats.sequence_memory(engine)
    assert 3 * plans[0]["the caches"] == numbers + slots


def test_a_config_that_names_its_layers_by_their_interval(tmp_path):
    random_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    assert read_config(tmp_path).recurrent_layers == (0, 1, 2)
    del raw["layer_types"]
    file.write_text(json.dumps(raw | {"full_attention_interval": 2}))
    assert read_config(tmp_path).recurrent_layers == (0, 2)
