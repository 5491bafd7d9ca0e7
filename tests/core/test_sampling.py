"""The noise against Random123 and plain Python, the choice and the residual rule against the distribution p.

Distributions are tested by chi-square at ALPHA = 1e-4: the odds that one test of a right sampler fails. Everything
is seeded, so a test that has passed once passes always. Biased samplers must fail the same test by far (CAUGHT).
"""

import itertools
import math
import random
import statistics
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import reference
from draft_tree import DynamicTree, StaticTree
from drafters import DraftInputs, TreeDrafter
from drafts import residual
from drafts.noise import ACCEPT, DRAFT, uniforms
from drafts.residual import ResidualCycle, residual_accept
from helpers import (
    chi_square,
    parents_of,
    process,
    shaped_cut,
    slow,
    text_with,
    with_children,
)
from reference import TORCH, accept, best, build_tree, cumsum_in_blocks
from run.options import Sampling
from runtime import replace_fields
from sampling import CHOICE, SamplingMode, SamplingTensors, gumbel

ALPHA = 1e-4
CAUGHT = 1e-9

# ---------------------------------------------------------------------------------------- generator

# Random123 1.14, tests/kat_vectors, lines `philox4x32 10`: counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def philox_reference(counter, key):
    """Philox4x32-10 on Python integers, written from the paper's Figure 3."""
    (r0, l0, r1, l1), (k0, k1) = counter, key
    for step in range(10):
        if step:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        (h0, w0), (h1, w1) = divmod(0xD2511F53 * r0, 2**32), divmod(0xCD9E8D57 * r1, 2**32)
        r0, l0, r1, l1 = h1 ^ l0 ^ k0, w1, h0 ^ l1 ^ k1, w0
    return [r0, l0, r1, l1]


def philox(counter, key):
    words = [torch.tensor([w]) for w in (*counter, *key)]
    return [int(w) for w in reference.philox4x32(tuple(words[:4]), tuple(words[4:]))]


def test_philox_has_the_known_answers():
    """And those of the plain one on random counters."""
    for case in KNOWN_ANSWERS:
        counter, key, expected = ([int(w, 16) for w in text.split()] for text in case)
        assert philox(counter, key) == philox_reference(counter, key) == expected
    rng = random.Random(0)
    for _ in range(200):
        counter, key = ([rng.getrandbits(32) for _ in range(n)] for n in (4, 2))
        assert philox(counter, key) == philox_reference(counter, key)


def noise_key(seed=0, prompts=(0,), samples=None):
    return SamplingTensors(
        torch.tensor([seed & reference.MASK32, seed >> 32]),
        torch.tensor(prompts),
        torch.tensor(samples if samples is not None else [0] * len(prompts)),
    )


@pytest.mark.parametrize("domain", [CHOICE, DRAFT, ACCEPT])
@pytest.mark.parametrize("seed", [0, 2**40 + 9, 2**64 - 1])
def test_layout(seed, domain):
    """The counter of a number: token block, draw and domain, sample, prompt. Its key: the seed's two words.

    So no number is read twice, and a row depends neither on the others nor on the size of the vocabulary.
    """
    prompts, samples = [7, 0, 500], [5, 1, 0]
    draws = torch.tensor([[11, 12], [2**30 - 2, 2**30 - 1], [0, 1]])
    noise = noise_key(seed, prompts, samples)
    u = uniforms(noise, draws, 10, domain)
    for row, i, token in itertools.product(range(3), range(2), range(10)):
        counter = [token // 4, int(draws[row, i]) + (domain << 30), samples[row], prompts[row]]
        word = philox_reference(counter, [seed & reference.MASK32, seed >> 32])[token % 4]
        assert u[row, i, token].item() == pytest.approx((word + 0.5) * 2**-32, rel=2**-23)
    if domain == CHOICE:
        exact = -torch.log(-torch.log1p(-u.double()))
        ours = gumbel(noise, draws[:, 0], 2, 10).double()
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_extreme_words(monkeypatch):
    """Of the plain operations; C++ is compared with them elsewhere."""
    words = [0, 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 129, 2**32 - 128, 2**32 - 1]

    def extreme(counter, key):
        return tuple(torch.tensor(words[i::4]).expand(1, 1, 2) for i in range(4))

    monkeypatch.setattr(reference, "philox4x32", extreme)
    first = torch.zeros(1, dtype=torch.long)
    u = uniforms(noise_key(), first[:, None], 8)[0, 0]
    noise = gumbel(noise_key(), first, 1, 8)[0, 0]
    assert ((u > 0) & (u < 1)).all() and noise.isfinite().all()
    for word, ours in zip(words[:3], noise):  # the likely winners come from small u, and are exact
        exact = -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))
        assert ours.item() == pytest.approx(exact, rel=1e-6)
    assert noise[0] > 22.8  # a tail cut at 24 bits would end at 17.3


def test_noise_is_gumbel():
    """Its own distribution function makes it uniform; another scale shows."""
    noise = gumbel(noise_key(3), torch.tensor([0]), 50, 1000).flatten().double()
    for scale, least, most in ((1.0, ALPHA, 1), (1.1, 0, CAUGHT)):
        cells = (torch.exp(-torch.exp(-scale * noise)) * 100).long()
        counts = torch.bincount(cells, minlength=100)
        assert least <= chi_square(counts, torch.ones(100)) <= most


def test_chi_square():
    # 10.828 is the 99.9 % quantile at 1 degree of freedom, 18.467 at 4 (any table)
    for cells, statistic in ((2, 10.828), (5, 18.467)):
        p, n = torch.full((cells,), 1 / cells), 10**6
        shift = math.sqrt(statistic * n / cells / 2)
        counts = n * p.double() + shift * torch.tensor([1.0, -1.0] + [0.0] * (cells - 2))
        assert chi_square(counts, p) == pytest.approx(1e-3, rel=1e-3)
    assert chi_square(torch.tensor([5, 5, 1]), torch.tensor([0.5, 0.5, 0.0])) == 0


# -------------------------------------------------------------------------------- temperature, cuts

RULES = [
    Sampling(1.0), Sampling(0.6), Sampling(1.7), Sampling(1.0, top_k=1), Sampling(0.8, top_k=4),
    Sampling(1.0, top_p=0.7), Sampling(1.3, top_p=0.9), Sampling(0.7, top_k=5, top_p=0.8),
    Sampling(1.0, top_k=100, top_p=1.0), Sampling(1.0, min_p=0.2),
    Sampling(0.7, top_k=6, top_p=0.9, min_p=0.3),
]  # fmt: skip
SHAPED = [
    Sampling(1.0, top_n_sigma=0.5), Sampling(0.7, top_n_sigma=1.5), Sampling(1.0, typical_p=0.2), Sampling(1.3, typical_p=0.9),
    Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.1), Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.25),
    Sampling(0.7, 8, 0.95, 0.02, 2.0, 0.95, 1.0, 0.08),
]  # fmt: skip


def typical(p: dict[int, float], most: float) -> set[int]:
    """The tokens whose surprise is nearest to the expected one, up to a mass. Source: arXiv 2202.00666."""
    expected = -sum(x * math.log(x) for x in p.values())
    kept, mass = set(), 0.0
    for token in sorted(p, key=lambda token: abs(-math.log(p[token]) - expected)):
        kept.add(token)
        mass += p[token]
        if mass > most:
            break
    return kept


def distribution(logits, rule):
    """Probabilities of one row of logits under `rule`, token by token, on Python numbers.

    Each cut acts on what the ones before it leave, in the order of llama.cpp; the temperature comes before all.
    """
    z = (logits / rule.temperature).tolist()
    ranked = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if rule.top_n_sigma > 0:
        least = max(z) - rule.top_n_sigma * statistics.pstdev(z)
        ranked = [i for i in ranked if z[i] >= least]
    ranked = ranked[: rule.top_k or len(z)]
    weight = {i: math.exp(z[i] - max(z)) for i in ranked}
    if rule.typical_p < 1:
        stay = typical({i: w / sum(weight.values()) for i, w in weight.items()}, rule.typical_p)
        weight = {i: w for i, w in weight.items() if i in stay}
    best, total = max(weight.values()), sum(weight.values())
    kept, mass = {}, 0.0
    for token, w in weight.items():
        if mass >= rule.top_p or w / best < rule.min_p:
            break
        kept[token] = w
        mass += w / total
    if rule.xtc_probability:
        likely = [i for i, w in kept.items() if w / sum(kept.values()) >= rule.xtc_threshold]
        kept = {i: w for i, w in kept.items() if i not in likely[:-1]}
    p = torch.zeros(len(z), dtype=torch.double)
    for token, w in kept.items():
        p[token] = w / sum(kept.values())
    return p


@pytest.mark.parametrize("rule", RULES + SHAPED, ids=str)
def test_cuts_are_those_of_plain_numbers(rule):
    """With C++ operators and without. Commit 23b88aa4 compares the further cuts with llama-cpp-python 0.3.36."""
    logits = 2 * torch.randn(120, 12, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([distribution(row, rule) for row in logits])
    for backend in (reference.choose(torch.device("cpu")), TORCH):
        cut = shaped_cut(logits[None], [rule], torch.arange(120)[None], backend)[0]
        if not rule.is_shaped:
            assert torch.equal(process(logits, rule, backend), cut)
        assert torch.equal(cut.isfinite(), expected > 0)
        assert torch.allclose(cut.softmax(-1).double(), expected, atol=1e-6)


QUARTERS = [math.log(p) for p in (0.4, 0.3, 0.21, 0.09)]


@pytest.mark.parametrize("logits, rule, want", [
    ([1.0, 2.0, 1.0, 1.0], {"top_k": 2}, [0, 1]),  # of equals the lower ids
    ([0.0] * 8, {"top_k": 3}, [0, 1, 2]),
    ([0.0] * 4, {"top_p": 0.5}, [0, 1]),
    ([0.0] * 4, {"top_p": 0.51}, [0, 1, 2]),
    ([0.0, 1.0], {"top_p": 1e-300}, [1]),  # fp32 would hold it as 0
    ([-5.0, 3.0, 30.0], {"top_p": 1e-9}, [2]),
    ([0.0] * 3, {"top_p": 1e-9}, [0]),
    ([0.0, 9.0, 0.0, 9.0], {"top_p": 0.4}, [1]),
    ([0.0] * 64, {"top_k": 4, "top_p": 0.75}, [0, 1, 2]),  # top-p counts what top-k left
    *((QUARTERS, {"min_p": p}, [*range(n)]) for p, n in ((0.2, 4), (0.5, 3), (0.7, 2), (0.8, 1), (1.0, 1))),
    ([1.0, 1.0, 0.9], {"min_p": 1.0}, [0, 1]),  # and all that tie with it
    (QUARTERS, {"top_p": 0.65, "min_p": 0.2}, [0, 1]),  # top-p counts what min-p drops
], ids=str)  # fmt: skip
def test_edges_of_cuts(logits, rule, want):
    p = process(torch.tensor(logits), Sampling(1.0, **rule))
    assert p.isfinite().nonzero().flatten().tolist() == want


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 32000])
def test_sums_in_blocks(vocab):
    """As top-p adds up on a GPU, where the compiler fails at a scan of the vocabulary."""
    p = torch.rand(2, 3, vocab, generator=torch.Generator().manual_seed(0)).softmax(-1)
    want = p.double().cumsum(-1)
    torch.testing.assert_close(cumsum_in_blocks(p).double(), want, atol=1e-6, rtol=1e-6)


# --------------------------------------------------------------------------------------- the choice

LOGITS = torch.tensor([1.2, -0.3, 0.4, 0.4, 2.0, -2.5, 0.0, 1.1])


def choose(logits, rule, noise):
    """Each row's choice by its own row of noise. logits, noise: [B, N, V]."""
    return best(process(logits, rule), noise, torch.arange(noise.shape[1]).expand(noise.shape[:2]))


def counts_of_choices(rule, bias=lambda noise: noise, draws=20000):
    """How often each token is chosen, over the draws of one conversation."""
    noise = bias(gumbel(noise_key(2**33 + 1, [4], [1]), torch.tensor([0]), draws, 8))
    return torch.bincount(choose(LOGITS.expand(1, draws, 8), rule, noise).flatten(), minlength=8)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_choices_follow_p(rule):
    assert chi_square(counts_of_choices(rule), distribution(LOGITS, rule)) > ALPHA


def from_wrong_uniforms(noise):
    u = -torch.expm1(-torch.exp(-noise))
    return -torch.log(-torch.log1p(-(u**1.2)))


BIASES = {
    "scaled": lambda noise: 1.1 * noise,
    "wrong uniforms": from_wrong_uniforms,
    "cut tail": lambda noise: noise.clamp(max=4),
    "wrong sign": lambda noise: -noise,
}


@pytest.mark.parametrize("bias", BIASES)
def test_biased_choices_are_caught(bias):
    counts = counts_of_choices(Sampling(1.0), BIASES[bias])
    assert chi_square(counts, distribution(LOGITS, Sampling(1.0))) < CAUGHT


def test_choices_along_prompts_and_samples():
    """Independent over prompts and samples too, not only over draws."""
    n, rule = 20000, Sampling(1.0)
    for key in (noise_key(0, range(n)), noise_key(0, [0] * n, range(n))):
        noise = gumbel(key, torch.full((n,), 3), 2, 8)  # draws 3 and 4: [n, 2, 8]
        pair = choose(LOGITS.expand(n, 2, 8), rule, noise)
        p = distribution(LOGITS, rule)
        joint = torch.bincount(pair[:, 0] * 8 + pair[:, 1], minlength=64)
        assert chi_square(joint, torch.outer(p, p)) > ALPHA


# -------------------------------------------------------------------------------- the residual rule

V = 6


class World(NamedTuple):
    """A language whose next token depends on the last one and on how many there are."""

    target: torch.Tensor  # [4, V, V] logits of the target by depth and last token
    draft: torch.Tensor  # the same of a draft that is wrong about it

    @staticmethod
    def make():
        torch.manual_seed(0)
        target = 1.3 * torch.randn(4, V, V)
        return World(target, target + torch.randn(4, V, V))


STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
CHAIN = StaticTree.chain(3)


class Emission(NamedTuple):
    """The first two tokens of each row, and their counts' odds under p."""

    first: float
    joint: float


def odds_of(world, rule, emitted, length, noise):
    """Compare emitted tokens, [B, D+1], with p. Where there is only one, `noise` [B, V] draws the second."""
    p0, p1 = (process(world.target[d], rule).softmax(-1) for d in (0, 1))
    p0 = p0[0]  # the root is token 0
    drawn = (p1[emitted[:, 0]].log() + noise).argmax(-1)
    second = torch.where(length == 0, drawn, emitted[:, 1])
    joint = torch.bincount(emitted[:, 0] * V + second, minlength=V * V)
    return Emission(chi_square(joint.view(V, V).sum(1), p0), chi_square(joint, p0[:, None] * p1))


def walk_of(tokens, parents, p, uniform, q=None, valid=None):
    """Walk one small tree. Returns: the node it ended at, what is left of p (rounded)."""
    tokens = torch.tensor([tokens])
    valid = torch.ones_like(tokens).bool() if valid is None else torch.tensor([valid])
    tree = build_tree(tokens, torch.tensor([parents]), valid, 2)
    if q is not None:
        tree = tree._replace(extra=torch.tensor([q]), ran_index=torch.arange(4)[None])
    walk = residual_accept(tree, torch.tensor([p]), torch.tensor([uniform]), 2, 3)
    return walk.node.item(), [round(x, 4) for x in walk.p[0].tolist()]


def test_residual_walks():
    p = [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.6, 0.4, 0.0], [0.2, 0.2, 0.6]]
    tokens, parents = [0, 0, 1, 2], [0, 0, 0, 1]
    # certain children (q = 1): 0.5, then 0.3 / 0.5 are the odds
    assert walk_of(tokens, parents, p, [0.49, 0.09, 0.9, 0.9]) == (3, [0.2, 0.2, 0.6])
    assert walk_of(tokens, parents, p, [0.49, 0.11, 0.9, 0.9]) == (1, [0.1111, 0.8889, 0.0])
    assert walk_of(tokens, parents, p, [0.51, 0.59, 0.9, 0.9]) == (2, [0.6, 0.4, 0.0])
    # both rejected: the walk is over, although the tree is deeper
    assert walk_of(tokens, parents, p, [0.51, 0.61, 0.9, 0.9]) == (0, [0.0, 0.0, 1.0])
    # an invalid child is not tried and takes no uniform
    valid = [True, False, True, True]
    assert walk_of(tokens, parents, p, [0.29, 0.9, 0.9, 0.9], valid=valid) == (2, [0.6, 0.4, 0.0])
    walk = walk_of(tokens, parents, p, [0.31, 0.0, 0.0, 0.0], valid=valid)
    assert walk == (0, [0.7143, 0.0, 0.2857])
    # sampled children: 0.5 / 0.8, then the residual (0, 0.15, 0.15) against the rest of q, (0, 0.75, 0.25)
    q = [[0.8, 0.15, 0.05], [0.0, 0.0, 1.0], [0.0] * 3, [0.0] * 3]
    assert walk_of(tokens, parents, p, [0.62, 0.11, 0.9, 0.9], q) == (1, [0.1111, 0.8889, 0.0])
    assert walk_of(tokens, parents, p, [0.63, 0.66, 0.9, 0.9], q) == (2, [0.6, 0.4, 0.0])
    assert walk_of(tokens, parents, p, [0.63, 0.67, 0.0, 0.0], q) == (0, [0.0, 0.0, 1.0])


def test_a_perfect_draft_is_always_accepted():
    torch.manual_seed(1)
    p = torch.randn(5000, 4, V).softmax(-1)
    drafted = torch.multinomial(p[:, :3].reshape(-1, V), 1).view(-1, 3)
    tokens = torch.nn.functional.pad(drafted, (1, 0))
    parents = torch.tensor([parents_of(CHAIN)]).expand(5000, -1)
    tree = build_tree(tokens, parents, torch.ones_like(tokens).bool(), 3)
    tree = tree._replace(extra=p, ran_index=torch.arange(4).expand(5000, -1))
    walk = residual_accept(tree, p, torch.full((5000, 4), 1 - 2.0**-24), 3, 1)
    assert (walk.node == 3).all() and torch.equal(walk.p, p[:, 3])


# ------------------------------------------------------------------- each rule on the drafter's trees

DRAWS = 65536  # of one prefix
GROWN_TREES = {
    "one": StaticTree.chain(1), "chain": CHAIN, "static": STATIC, "dynamic": DynamicTree(3, 3, 9),
}  # fmt: skip


class WorldDrafter(TreeDrafter):
    """Drafts with the world's draft; an output is its token."""

    def __init__(self, tree, world):
        config, norm = SimpleNamespace(vocab_size=V), SimpleNamespace(weight=world.target)
        super().__init__(SimpleNamespace(config=config, norm=norm), tree)
        self.world = world

    def root_output(self, state, inputs):
        return inputs.text.tokens[:, 1:2, None], inputs.text.pos + 1

    def forward_nodes(self, state, frontier, out, positions, window):
        return frontier.tokens[:, :, None]

    def logits(self, out, level):
        return self.world.draft[level, out[:, :, 0]]


def draw(children, shape, rule, favour=0.0, draws=DRAWS):
    """Decode one cycle of every draw by the rule that belongs to these children, and compare with p.

    children: certain are the draft's top-k under the residual rule
    favour: added to the target's logits of each node's first child (a defect)
    """
    world = World.make()
    drafter = WorldDrafter(GROWN_TREES[shape], world)
    drafter = with_children(drafter, "topk" if children == "certain" else children)
    key, first = noise_key(14, range(draws)), torch.zeros(draws, dtype=torch.long)
    noise = gumbel(key, first, drafter.depth + 1, V)
    rules = SamplingTensors.from_params([rule] * draws)
    rules = replace_fields(rules, seed=key.seed, prompt=key.prompt, sample=key.sample)
    tree = drafter.propose(None, DraftInputs(noise, text_with(first), rules, first))
    drafted = torch.zeros(draws, drafter.size * V)
    first_child = torch.ones_like(tree.valid)  # of its parent
    first_child[:, 2:] = tree.parents[:, 2:] != tree.parents[:, 1:-1]
    favours = favour * first_child * (tree.depths > 0)
    drafted.scatter_add_(1, tree.parents * V + tree.tokens, favours)
    logits = world.target[tree.depths, tree.tokens] + drafted.view(draws, -1, V)
    if children in ("topk", "noise"):
        tokens = best(process(logits, rule), noise, tree.depths)
        accepted = accept(tree, tokens, drafter.depth)
        return odds_of(world, rule, accepted.emitted, accepted.length, noise[:, 1])
    mode = SamplingMode.TRUNCATED if rule.top_k or rule.top_p < 1 else SamplingMode.NOISY
    target = SimpleNamespace(logits=lambda features: logits)
    cycle = SimpleNamespace(drafter=drafter, mode=mode, backend=TORCH, target=target)
    state = SimpleNamespace(sampling=rules, draws=first)
    accepted, _ = ResidualCycle.accept_path(cycle, state, tree, noise, None)
    return odds_of(world, rule, accepted.emitted, accepted.length, noise[:, 1])


CHILDREN = ("topk", "noise", "sampled")
# sampled children of a dynamic tree would be lossy, and are refused
LARGER = [(c, "static") for c in CHILDREN] + [(c, "dynamic") for c in CHILDREN[:2]]


@pytest.mark.parametrize("children, shape", [(c, "chain") for c in CHILDREN] + slow(LARGER))
def test_every_rule_draws_from_p_and_a_favour_is_caught(children, shape):
    """Exact match, the shared noise, the residual rule; a published engine drew a token of 60.00 % at 63.04 %."""
    rule = Sampling(0.6) if shape == "static" else Sampling(1.0)
    odds = draw(children, shape, rule)
    assert min(odds) > ALPHA, odds
    favour = rule.temperature * math.log(0.6304 / 0.3696 / 1.5)
    assert draw(children, shape, rule, favour).joint < CAUGHT


ROWS = 40000
RESIDUAL = {
    "static": ("sampled", "static"), "chain": ("sampled", "chain"), "one": ("sampled", "one"),
    "certain": ("certain", "static"),
}  # fmt: skip
RESIDUAL_RULES = [
    Sampling(1.0), Sampling(0.6), Sampling(1.0, top_p=0.8), Sampling(0.8, top_k=4, top_p=0.9),
]  # fmt: skip


# every shape by two rules, and every rule with two shapes: the rule only makes p and q
@pytest.mark.parametrize(
    "kind, rule",
    [(kind, RESIDUAL_RULES[(i + j) % 4]) for i, kind in enumerate(RESIDUAL) for j in (0, 1)],
    ids=str,
)
def test_residual_rule_follows_p(kind, rule):
    odds = draw(*RESIDUAL[kind], rule, draws=ROWS)
    assert min(odds) > ALPHA, odds


def generous(tree, p, uniform, *bounds):
    """Accept when u q <= 1.1 p."""
    return residual_accept(tree, p, uniform / 1.1, *bounds)


def of_another_q(tree, p, *more):
    """Take the children as drawn at another temperature."""
    q = tree.extra**1.3
    q = q / q.sum(-1, keepdim=True).clamp(min=1e-9)
    return residual_accept(replace_fields(tree, extra=q), p, *more)


def without_temperature(tree, p, *more):
    """Draw the token behind a leaf at temperature 1 in place of 0.6, as EAGLE v1 does."""
    walk = residual_accept(tree, p, *more)
    leaf = ~(tree.parents[:, 1:] == walk.node[:, None]).any(1)
    rest = walk.p**0.6
    return walk._replace(p=torch.where(leaf[:, None], rest / rest.sum(-1, keepdim=True), walk.p))


@pytest.mark.parametrize("kind, defect", [
    ("static", generous), ("certain", generous), ("static", of_another_q), ("chain", of_another_q),
    ("one", of_another_q), ("one", without_temperature),
])  # fmt: skip
def test_a_wrong_residual_rule_is_caught(kind, defect, monkeypatch):
    monkeypatch.setattr(residual, "residual_accept", defect)
    rule = Sampling(0.6 if defect is without_temperature else 1.0)
    assert draw(*RESIDUAL[kind], rule, draws=ROWS).joint < CAUGHT


@pytest.mark.parametrize("kind", RESIDUAL)
def test_a_skipped_residual_is_caught(kind, monkeypatch):
    monkeypatch.setattr(residual, "_residual", lambda p, q, token: p)
    assert max(draw(*RESIDUAL[kind], Sampling(1.0), draws=ROWS)) < CAUGHT
