"""States of recurrent layers, of every architecture that has some: a node's state, drafts, and further turns.

Logits and texts against transformers: test_families.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from backends.library import set_plain
from drafters import RootOnly
from families import FAMILIES
from family_checks import (
    DRAFTERS,
    OPERATED,
    Oracle,
    assert_drafts_as_vanilla,
    loaded,
    random_parents,
)
from helpers import decode, engine_for, pairwise, slow
from kv_cache import KVCache, Window, causal_window
from models.recurrent import DeltaWeights, delta_rule
from models.states import TAPS, LayerState, StateShape
from reference import build_tree, choose
from run.session import Session
from tiny_models import IDS, refused

TARGETS = {  # family, case and form
    "Qwen3.5": ("Qwen3.5", "as it is", "float32"),
    "Qwen3.5 in bf16": ("Qwen3.5", "as it is", "bfloat16"),
    "Qwen3.5 with experts": ("Qwen3.5", "experts", "bfloat16"),
    "Qwen3-Next": ("Qwen3-Next", "as it is", "bfloat16"),
    "LFM2": ("LFM2", "as it is", "bfloat16"),
}
SHORT = {"max_new_tokens": 12, "ignore_eos": True}
PROMPT = IDS.tolist()


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("states"), *TARGETS[request.param])


# ---------------------------------------------------------------------------------- a node's state


@torch.no_grad()
@pytest.mark.parametrize("seed", range(2))
def test_a_node_has_the_bits_of_its_own_path(target, seed):
    """Behind a prefix; and after the tree, an accepted path goes on as if it had been read alone."""
    draw = random.Random(seed)
    size = 12
    parents = torch.tensor([random_parents(draw, size, 6)])
    tree = build_tree(IDS[None, :size], parents, torch.ones(1, size).bool(), 6)
    prefix = IDS[size:20]

    def run(cache, tokens, start, mask, depths):
        begin = torch.tensor([start])
        window = Window(begin[:, None] + torch.arange(tokens.shape[1]), begin, mask)
        return target(tokens, start + depths, cache, window)

    def same(got, want):  # matmuls of fp32 are the vendor's: a row may depend on the others
        bound = 1e-5 if want.dtype == torch.float32 else 0
        torch.testing.assert_close(got, want, atol=bound, rtol=bound)

    def in_order(tokens):
        return causal_window(torch.zeros(1), len(tokens)).mask, torch.arange(len(tokens))[None]

    cache, alone = (
        KVCache.empty(target.config, 1, 64, target.norm.weight.dtype, "cpu") for _ in range(2)
    )
    run(cache, prefix[None], 0, *in_order(prefix))
    together = run(cache, tree.tokens, len(prefix), tree.mask, tree.depths)
    path = tree.mask[0, draw.randrange(size)].nonzero()[:, 0]
    moves = torch.arange(7)
    moves[: len(path)] = path
    cache.compact(torch.tensor([len(prefix)]), moves[None])
    behind = run(cache, IDS[None, -3:], len(prefix) + len(path), *in_order(IDS[-3:]))

    run(alone, prefix[None], 0, *in_order(prefix))
    for depth, node in enumerate(path):  # one token at a time, as vanilla decoding reads
        token = tree.tokens[:, node : node + 1]
        out = run(alone, token, len(prefix) + depth, *in_order(token[0]))
        same(out[0, 0], together[0, node])
    for i, token in enumerate(IDS[-3:]):
        out = run(alone, token[None, None], len(prefix) + len(path) + i, *in_order([token]))
        same(out[0, 0], behind[0, i])


RULES = (delta_rule, choose(torch.device("cpu")).delta_rule)


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
        mask = build_tree(parents, parents, torch.ones_like(parents).bool(), 6).mask
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


# ----------------------------------------------------------------------------------------- decoding

WAYS = ["whole passes", "a cache in int8", "C++", "plain"]


@pytest.fixture
def way(request):
    """The options of an engine. In whole passes all layers are one call, where the dtype allows it."""
    set_plain(request.param == "plain")
    compiled = request.param in WAYS[:2]
    yield {"compile": compiled, "kv": "int8" if request.param == WAYS[1] else ""}
    set_plain(False)


@pairwise(fixtures=("target", "way"), target=list(TARGETS), way=WAYS, temperature=[1.0, 0.0])
def test_no_drafter_changes_a_token(target, way, temperature):
    in_cpp = OPERATED and way["compile"] and target.norm.weight.dtype == torch.bfloat16
    assert_drafts_as_vanilla(target, in_cpp, temperature, **way)


def answer(target, prompt: list[int], drafter=None) -> list[int]:
    """A prompt and its answer, of a session of its own."""
    return decode(engine_for(target, drafter or RootOnly(), **SHORT), prompt).history[0]


def read(session: Session, seq: int, prompt: list[int], **options) -> tuple[list[int], int]:
    """Decode a turn. Returns: the text, and the number of tokens that it took over."""
    session.admit(seq, prompt, (0, 0), **options)
    cached = len(session.history[seq])
    while session.busy(seq):
        session.step()
    return session.history[seq], cached


@pytest.mark.parametrize("length", [1, 256, 257, 300])
def test_a_prompt_of_several_chunks_and_one_at_its_edge(target, length):
    prompt = (PROMPT * 11)[:length]
    vanilla = answer(target, prompt)
    assert answer(target, prompt, DRAFTERS["tree"]([vanilla])) == vanilla


# ------------------------------------------------------------------------------------ further turns

TURNS = {  # of a text of 41 tokens, 29 of them its prompt -> the next prompt, and what stays of the text
    "goes on": (lambda text: [*text, 5, 6, 7], 39),
    "the same again": (lambda text: text[:29], 28),
    "another answer": (lambda text: [*text[:32], 90, 91], 28),
    "another prompt": (lambda text: [*text[:20], 90, 91], 0),
    "nothing in common": (lambda text: [90, *text], 0),
}


@pairwise(fixtures=("target",), target=list(TARGETS), turn=list(TURNS), drafted=[False, True])
def test_a_further_turn_equals_a_fresh_one(target, turn, drafted):
    """A text that goes on keeps its state, one that is cut behind its prompt the snapshot, another begins anew."""
    text = answer(target, PROMPT)
    follow, stays = TURNS[turn]
    prompt = follow(text)
    want = answer(target, prompt)
    drafter = Oracle([text], 12, 4) if drafted else RootOnly()
    session = Session(engine_for(target, drafter, **SHORT))
    read(session, 0, PROMPT)
    if drafted:
        drafter.texts = Oracle([want], 12, 4).texts
    assert read(session, 0, prompt) == (want, stays)
    assert read(session, 0, prompt)[0] == want  # by the snapshot that this turn took


@pytest.mark.parametrize("way", [WAYS[0], *slow(WAYS[2:])], indirect=True)
def test_sequences_wait_and_copy_states(target, way):
    """Cycles of others run over a state that waits; copies are of a sequence that has ended, and of one that goes on."""
    session = Session(engine_for(target, RootOnly(), batch_size=3, **SHORT, **way))
    text, _ = read(session, 0, PROMPT)
    assert text == answer(target, PROMPT)
    assert read(session, 1, PROMPT, source=0) == (text, 28)
    session.admit(2, [*text, 9], (0, 0), source=1)
    while not session.live[2]:
        session.step()
    other = [*text, 9, 11]
    assert read(session, 1, other, source=2)[0] == answer(target, other)
    while session.busy(2):
        session.step()
    assert session.history[2] == answer(target, [*text, 9])
    assert read(session, 0, [*text, 4, 5]) == (answer(target, [*text, 4, 5]), 39)


def test_a_recurrent_draft_model_is_refused(capsys, tmp_path):
    FAMILIES["Qwen3.5"].make().save_pretrained(tmp_path)
    capsys.readouterr()
    both = (f"--checkpoint={tmp_path}", f"--draft_checkpoint={tmp_path}")
    said = refused(capsys, *both, "--draft", "model")
    assert "has recurrent layers" in said and "use another draft model" in said
