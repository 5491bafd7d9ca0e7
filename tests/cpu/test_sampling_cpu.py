"""The C++ operators that choose tokens, norm rows and turn positions, against plain operations.

Choosing must not depend on who asks: a row has the same bits alone, among others, by any number of threads.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import helpers
import sampling
from backends.library import has_cpu_operators
from drafts.shaping import ShapedRule, Shaping
from helpers import shaped_cut
from reference import TORCH, choose
from run.options import Sampling
from sampling import SamplingTensors

pytestmark = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")


def key(prompts: list[int], samples: list[int]) -> SamplingTensors:
    seeds = torch.tensor([123456789, 987654321])
    return SamplingTensors(seeds, torch.tensor(prompts), torch.tensor(samples))


OURS = choose(torch.device("cpu"))
gumbel = partial(sampling.gumbel, backend=OURS)
process = partial(helpers.process, backend=OURS)


def both(function, *inputs) -> tuple:
    """By the operators, and in plain operations."""
    return tuple(function(*inputs, backend=backend) for backend in (OURS, TORCH))


def test_a_soft_cap():
    scores = torch.randn(2, 3, 49157, generator=torch.manual_seed(0)) * 40
    scores[0, 0, :6] = torch.tensor([0.0, -0.0, 1e-5, float("inf"), -float("inf"), float("nan")])
    ours, plain = (backend.soft_cap(scores, 30.0) for backend in (OURS, TORCH))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0, equal_nan=True)
    assert ours[0, 0, 3] == 30 and ours[0, 0, 4] == -30


# -------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("domain", [0, 1, 2])
@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 49152 + 3])
def test_noise(vocab, domain):
    """Also of the last draw that there is."""
    keys, first = key([0, 2**31], [5, 1]), torch.tensor([7, 2**30 - 3])
    ours, theirs = both(sampling.gumbel, keys, first, 3, vocab, domain)
    assert ours.shape == (2, 3, vocab) and ours.isfinite().all()
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-6)


def test_the_tail_of_the_noise():
    """The likeliest winners of 5 million are as exact as the others."""
    first = torch.tensor([100])  # of its 100 draws one is 19.2
    ours, theirs = both(sampling.gumbel, key([3], [0]), first, 100, 50000, 0)
    assert theirs.max() > 15 and torch.equal(ours.argmax(-1), theirs.argmax(-1))
    torch.testing.assert_close(ours.amax(-1), theirs.amax(-1), atol=0, rtol=1e-6)


def test_keys_may_be_shared_by_rows():
    seed, first, prompt = torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([7])
    strided = torch.tensor([0, 9, 5])[::2]
    for prompts, samples in ((prompt.expand(2), strided), (prompt, torch.tensor([5]))):
        ours, theirs = both(sampling.gumbel, SamplingTensors(seed, prompts, samples), first, 2, 40)
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-6)


def test_noise_of_a_row_does_not_depend_on_the_others():
    keys, first = key([4, 9], [0, 1]), torch.tensor([3, 5])
    whole = gumbel(keys, first, 2, 1000)
    alone = gumbel(key([9], [1]), torch.tensor([6]), 1, 1000)
    assert torch.equal(whole[1, 1], alone[0, 0])
    assert torch.equal(gumbel(keys, first, 2, 700), whole[..., :700])  # token by token


# --------------------------------------------------------------------------------------------- cuts

RULES = [  # top_k, top_p; the first cuts nothing away
    (0, 1.0), (0, 0.5), (0, 0.9), (0, 0.999), (1, 1.0), (5, 1.0), (40, 0.8), (10**6, 0.95),
    (3000, 1.0), (2500, 0.99), (0, 1e-9),
]  # fmt: skip


@pytest.mark.parametrize(("top_k", "top_p"), RULES)
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0, 60.0])
def test_cuts(top_k, top_p, spread):
    """The same tokens stay, but for those whose mass lies within rounding of the cut."""
    generator = torch.Generator().manual_seed(int(10 * spread) + top_k)
    noise = torch.randn(2, 3, 4099, generator=generator)
    logits = (noise * spread).round(decimals=2)  # with equal ones
    logits[0, 1, ::3] = float("-inf")
    rule = Sampling(0.7, top_k, top_p)
    ours, theirs = both(helpers.process, logits, rule)
    assert (ours.isfinite().sum(-1) >= 1).all()
    assert within_rounding(logits / 0.7, ours, theirs, top_k, top_p)


def within_rounding(z, ours, theirs, top_k, top_p) -> bool:
    """Return whether the two keep equal values, and differ only in tokens before which there is a mass of top_p."""
    stays, stayed = ours.isfinite(), theirs.isfinite()
    ranked, index = z.double().sort(dim=-1, descending=True, stable=True)
    if top_k:
        ranked[..., top_k:] = float("-inf")
    p = ranked.softmax(-1)
    before = (p.cumsum(-1) - p).gather(-1, index.argsort(-1))
    same = torch.equal(ours[stays & stayed], theirs[stays & stayed])
    return same and bool(((before - top_p).abs()[stays != stayed] < 1e-4).all())


@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_the_rarer_cuts(spread):
    """The same tokens stay, but for one at each end of a row; a row is the same alone."""
    noise = torch.randn(2, 4, 4099, generator=torch.Generator().manual_seed(5))
    logits = (noise * spread).round(decimals=2)  # with equal ones
    logits[0, 1, ::3] = float("-inf")
    likely = 0.9 * float(logits[0].softmax(-1).topk(2).values[:, 1].max())
    for own in (
        Sampling(1.0, typical_p=0.4),
        Sampling(0.7, 0, 0.99, 0.001, typical_p=0.97),
        Sampling(0.8, top_n_sigma=1.5),
        Sampling(1.0, xtc_probability=1.0, xtc_threshold=likely),
        Sampling(0.9, 900, 0.95, 0.01, 2.0, 0.9, 0.5, likely),
    ):
        draws = torch.arange(8).view(2, 4)
        ours, theirs = both(partial(shaped_cut, seed=3), logits, [own, Sampling(1.0)], draws)
        differs = (ours.isfinite() != theirs.isfinite()).sum(-1)
        assert differs.max() <= 2 and torch.equal(ours[1], logits[1]), own
        assert (ours.isfinite().sum(-1)[0] < logits.isfinite().sum(-1)[0]).any(), own
        for node in range(4):
            alone = (logits[:1, node : node + 1], [own], draws[:1, node : node + 1])
            row = shaped_cut(*alone, OURS, seed=3)
            assert torch.equal(row[0, 0], ours[0, node])


def test_xtc_acts_as_often_as_asked():
    """By noise of its own, of the seed and the draw alone."""
    own = Sampling(1.0, xtc_probability=0.3)
    each = [own] * 2
    rule = ShapedRule(*SamplingTensors.from_params(each, seed=9)[:8], Shaping(1).rows(each))
    acts = rule.xtc_at(torch.arange(4000).expand(2, -1)).isfinite()
    assert torch.equal(acts[0], acts[1]) and abs(float(acts[0].float().mean()) - 0.3) < 0.03


def test_min_p_alone_and_behind_the_others():
    """To the bit: it compares scores, and adds nothing up."""
    noise = torch.randn(2, 3, 4099, generator=torch.Generator().manual_seed(1))
    logits = 4 * noise.round(decimals=2)
    for rule in (Sampling(0.7, min_p=0.01), Sampling(1.0, 40, min_p=0.2), Sampling(1.0, min_p=1.0)):
        ours = process(logits, rule)
        assert torch.equal(ours, helpers.process(logits, rule))
        assert (ours.isfinite().sum(-1) < 99).all() and ours.isfinite().any(-1).all()


@pytest.mark.parametrize("top_k, top_p, count", [(7, 1.0, 7), (0, 0.25, 25)])
def test_a_cut_of_equal_tokens_goes_by_their_number(top_k, top_p, count):
    kept = process(torch.zeros(1, 1, 100), Sampling(1.0, top_k, top_p)).isfinite()
    assert kept[0, 0].nonzero().flatten().tolist() == list(range(count))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (40, 0.8), (5, 1.0)])
def test_a_wrong_cut_is_seen(top_k, top_p):
    """One token too many in a row, or one too few."""
    logits = torch.randn(1, 1, 4099, generator=torch.Generator().manual_seed(0)) * 4
    right = process(logits, Sampling(0.7, top_k, top_p))
    order = (logits / 0.7).argsort(descending=True)[0, 0]
    count = int(right.isfinite().sum())
    few, many = right.clone(), right.clone()
    few[0, 0, order[count - 1]] = float("-inf")
    many[0, 0, order[count]] = logits[0, 0, order[count]] / 0.7
    assert within_rounding(logits / 0.7, right, right, top_k, top_p)
    assert not within_rounding(logits / 0.7, few, right, top_k, top_p)
    assert top_p == 1 or not within_rounding(logits / 0.7, many, right, top_k, top_p)


# ----------------------------------------------------------------------------------------- the best


@pytest.mark.parametrize("vocab", [1, 15, 1023, 1024, 1025, 5000])
def test_best(vocab):
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(2, 5, vocab, generator=generator).round(decimals=1)  # with equal ones
    assert torch.equal(OURS.best(scores, None, None), TORCH.best(scores, None, None))
    noise = torch.randn(2, 3, vocab, generator=generator)
    row = torch.randint(0, 3, (2, 5), generator=generator)
    assert torch.equal(OURS.best(scores, noise, row), TORCH.best(scores, noise, row))


def test_best_of_scores_that_are_cut_away():
    scores = torch.full((1, 3, 2000), float("-inf"))
    scores[0, 0, 1999], scores[0, 1, 1500], scores[0, 1, 3] = -5.0, 2.0, 2.0
    assert OURS.best(scores, None, None).tolist() == [[1999, 3, 0]]


def test_rows_of_noise_that_are_not_there_are_refused():
    with pytest.raises(RuntimeError, match="no row 3 of noise"):
        OURS.best(torch.zeros(1, 1, 8), torch.zeros(1, 3, 8), torch.tensor([[3]]))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_matter(threads):
    scores = torch.randn(1, 40, 5000, generator=torch.Generator().manual_seed(1))

    def found() -> tuple:
        noise = gumbel(key([1], [2]), torch.tensor([0]), 9, 5000)
        return OURS.best(scores, None, None), process(scores, Sampling(1.0, 0, 0.9)), noise

    wanted, before = found(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, wanted, found()))
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------- norm and angles


@pytest.mark.parametrize("width", [8, 576, 1000, 4096])
def test_norm(width):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, 5, width, generator=generator).bfloat16()
    weight = torch.randn(width, generator=generator).bfloat16()
    ours, theirs = OURS.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5)
    assert (ours == theirs).float().mean() > 0.99  # sums in another order
    torch.testing.assert_close(ours, theirs, atol=0, rtol=2**-7)
    assert torch.equal(OURS.rms_norm(x[1:2, 3:4], weight, 1e-5)[0, 0], ours[1, 3])


def test_a_norm_of_7b_width_is_the_same_in_any_number_of_rows():
    """A tree verifies the same bits as a single token: torch's own mean splits its sums by the rows."""
    x = torch.randn(60, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = torch.cat([OURS.rms_norm(row, weight, 1e-5) for row in x.split(1)])
    assert torch.equal(OURS.rms_norm(x, weight, 1e-5), rows)


def test_norm_keeps_its_gradient():
    weight = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    TORCH.rms_norm(torch.randn(2, 16).bfloat16(), weight, 1e-5).sum().backward()
    assert weight.grad is not None


def test_angles():
    freq = 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    positions = torch.tensor([[0, 1, 17], [4095, 131071, 8191]])
    for ours, theirs in zip(
        OURS.rope_angles(freq, positions, 1.3), TORCH.rope_angles(freq, positions, 1.3)
    ):
        assert ours.shape == (2, 3, 1, 64)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    scaled = OURS.rope_angles(freq, positions, 1.3)
    for ours, plain_ones in zip(scaled, OURS.rope_angles(freq, positions)):
        assert torch.equal(ours, plain_ones * 1.3)
