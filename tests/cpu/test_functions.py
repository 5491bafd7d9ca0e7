"""The C++ operators against their definitions: every row of cases/functions.py, for every processor.

1. A result is the definition's, at all sizes and edges.
2. A sequence of a batch, threads and strides of the operands change no bit of it.
Further properties of single functions stand behind them.
"""

from __future__ import annotations

import random
import types
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_builds import OTHERS, built
from torch import Tensor

import backends.attention
import backends.cpp.functions
import reference
from backends.chosen import NAMES
from backends.epilogues import rotary_cache_plainly
from backends.library import has_cpu_operators
from draft_tree import DecodedTokens
from drafters import DrafterUpdate
from drafts.kept_texts import PastTexts
from drafts.ngram_draft import Ngram, NgramDrafter
from drafts.ngram_estimates import RATES, Rates
from functions import (
    BATCH,
    DTYPES,
    HEADS,
    KINDS,
    NGRAMS,
    ROWS,
    STARTS,
    Row,
    assert_same,
    attention_of,
    keys,
    leaves,
    mapped,
    run,
    whole,
)
from helpers import with_head_norms
from kv_cache import Window
from models.operators import sliding
from reference import TORCH, choose, decode_rows, encode_rows, visible_slots
from run.options import Sampling
from runtime import replace_fields
from sampling import SamplingTensors
from windows import SIZES, expected, random_step

pytestmark = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")
CPP, OURS = torch.ops.gpt_eagle, choose(torch.device("cpu"))
INF = float("inf")
# functions that have no row: whole passes, those of weights, and the ones of a drafter or a model's file
ELSEWHERE = {
    "model_program", "head_program", "matmul", "experts_matmul",  # test_layers_cpu, test_weights
    "ngram_draft",  # below
    "delta_rule",  # test_states.py
}  # fmt: skip
EVERY = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
LARGE = [row for row in ROWS if row.large]


def test_every_function_in_cpp_has_a_row():
    own = {name for name in NAMES if name in vars(backends.cpp.functions)}
    assert own - ELSEWHERE == {row.name for row in ROWS} and own > ELSEWHERE


@cache
def functions(march: str) -> Any:
    """Return the functions of this processor, or of another build: the module over that build's operators."""
    if march == "native":
        return OURS
    source = Path(backends.cpp.functions.__file__).read_text(encoding="utf-8")
    module = types.ModuleType(f"functions_{march}")
    exec(source.replace("torch.ops.gpt_eagle", f"torch.ops.{built(march)}"), vars(module))
    return module


def large(row: Row) -> tuple:
    random.seed(0), torch.manual_seed(0)
    return row.large()


# ------------------------------------------------------------------------------- the properties


@pytest.mark.parametrize("march", ["native", *OTHERS])
@EVERY
def test_a_function_is_its_definition(row, march):
    random.seed(0), torch.manual_seed(0)
    definition = row.definition or getattr(TORCH, row.name)
    function = getattr(functions(march), row.name)
    count = 0
    for number, operands in enumerate(row.cases()):
        sizes = [tuple(x.shape) for x in leaves(operands)]
        got, written = run(row, function, operands)
        want, expected = run(row, definition, operands)
        try:
            (row.agrees or (lambda _, a, b: assert_same(a, b, row.near)))(operands, got, want)
            assert_same(written, expected)
        except AssertionError as error:
            raise AssertionError(f"case {number} of {row.name}, operands {sizes}") from error
        count += 1
    assert count


@pytest.mark.parametrize("row", LARGE, ids=[row.name for row in LARGE])
class TestBits:
    """Of a row's `large` operands."""

    def test_of_a_sequence_alone(self, row):
        operands = large(row)
        together = run(row, getattr(OURS, row.name), operands)
        for b in range(BATCH):

            def alone(x: Tensor, b: int = b) -> Tensor:
                return x[b : b + 1] if x.shape[:1] == (BATCH,) else x

            assert_same(
                run(row, getattr(OURS, row.name), mapped(operands, alone)), mapped(together, alone)
            )

    def test_of_any_number_of_threads(self, row):
        operands = large(row)
        want = run(row, getattr(OURS, row.name), operands)
        try:
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                assert_same(run(row, getattr(OURS, row.name), operands), want)
        finally:
            torch.set_num_threads(1)

    def test_of_operands_by_strides(self, row):
        """Every second number of a buffer whose others are different."""

        def strided(x: Tensor) -> Tensor:
            return torch.stack((x, ~x if x.dtype == torch.bool else x + 1), -1)[..., 0]

        operands = large(row)
        want = run(row, getattr(OURS, row.name), operands)
        given = [x if i in row.whole else mapped(x, strided) for i, x in enumerate(operands)]
        got = getattr(OURS, row.name)(*given)
        assert_same(got, want[0])


# ------------------------------------------------------------------------------------- attention


def operands(step: Any, window: Window) -> tuple:
    return step.q, step.k, step.v, window.start, window.mask, window.first


@pytest.mark.parametrize("kind", KINDS)
def test_definitions_of_attention(kind):
    """The softmax over the last tokens of a row's path, in fp64, is what all ways compute."""
    for (heads, E), starts, size in zip([*HEADS, *HEADS[:2]], STARTS * 2, [10**6, *SIZES]):
        step = random_step(kind, starts, heads, E)
        window = sliding(step.window, size)
        visible = visible_slots(*operands(step, window)[3:], step.k.shape[2])
        for b, paths in enumerate(step.paths):
            assert [row.nonzero().flatten().tolist() for row in visible[b]] == [
                path[-size:] for path in paths
            ]
        step = step._replace(k=step.k.nan_to_num(), v=step.v.nan_to_num())
        for scale in (0.0, 0.1):
            want = expected(step, size, scale or E**-0.5).float()
            for attend in (
                reference.attention,
                OURS.attention,
                CPP.tree_attention,
                backends.attention.masked_attention,
            ):
                got = attend(*operands(step, window), scale)
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads,E", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_attention_has_the_bits_that_its_token_gets_alone(kind, heads, E):
    """A path is moved next to the prefix and decoded token by token; slots that no row sees are not read."""
    for starts, size, dtype in zip([*STARTS, [300]], (5, 1000, 16, 5), (*DTYPES, *DTYPES[::-1])):
        step = random_step(kind, starts, heads, E)
        step = step._replace(q=step.q.to(dtype), k=step.k.to(dtype), v=step.v.to(dtype))
        y = OURS.attention(*operands(step, sliding(step.window, size)))
        for b, paths in enumerate(step.paths):
            for t in {0, len(paths) // 2, len(paths) - 1}:
                single = OURS.attention(*step.alone(b, t, size))
                assert torch.equal(single[0, 0], y[b, t]), (starts, size, b, t)


def test_a_sink_below_all_scores_counts_for_nothing():
    given = attention_of("tree", [37, 11], (6, 2), 64, torch.float32, 0)
    none = torch.full((6,), -INF)
    assert torch.equal(OURS.attention(*given, sinks=none), OURS.attention(*given))
    seen = visible_slots(*given[3:], given[1].shape[2])[:, None]
    q, k, v = (x.double() for x in given[:3])
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    sinks = torch.linspace(-2, 9, 6)
    shares = (q.transpose(1, 2) @ k.transpose(2, 3) / 8).exp() * seen
    total = shares.sum(-1, keepdim=True) + sinks.double().exp()[:, None, None]
    want = (shares / total @ v).transpose(1, 2).flatten(2).float()
    for attend in (
        reference.attention,
        backends.attention.attention,
        backends.attention.masked_attention,
    ):
        torch.testing.assert_close(attend(*given, sinks=sinks), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("elements", [2, 16, 80, 128])
def test_a_row_in_8_bits_is_its_codes_and_a_scale_per_group(elements):
    """Every number is at most half a step away, and the scales add 2 bytes for each 32; what is no number stays so."""
    x = torch.randn(3, 5, elements, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1, 1] = 0, x[1, 1] * 1000
    rows = encode_rows(x, torch.int8)
    assert rows.shape == (3, 5, elements + 2 * -(-elements // 32)) and rows.dtype == torch.int8
    for group, rounded in zip(x.split(32, -1), decode_rows(rows, elements).split(32, -1)):
        step = group.abs().amax(-1, keepdim=True) / 127
        # a scale that is rounded down by 2^-9 moves the largest code by half a step
        assert ((group - rounded).abs() <= 1.01 * step).all()
        assert ((group - rounded).abs() <= 0.51 * step).float().mean() > 0.9
    assert torch.equal(encode_rows(x[2:, 3:4], torch.int8), rows[2:, 3:4]), "a row is its own"
    x = torch.ones(1, 64)
    x[0, 40] = float("nan")
    back = decode_rows(encode_rows(x, torch.int8), 64)
    assert back[0, :32].isfinite().all() and back[0, 32:].isnan().all()


def test_windows():
    """One that is wider than the context hides nothing; a step with windows is one graph."""
    window = random_step("chunk", [7, 0], (1, 1), 16).window
    wide = sliding(window, 77)
    assert torch.equal(wide.mask, window.mask) and not wide.first.any()
    assert sliding(window, 76).first.tolist() == [[0] * 69 + [1], [0] * 70]
    traced = torch.compile(sliding, fullgraph=True, dynamic=False, backend="aot_eager")
    for kind in ("tree", "level"):
        window = random_step(kind, [37, 11], (1, 1), 16).window
        assert_same(traced(window, 5)[:4], sliding(window, 5)[:4])


# ------------------------------------------------------------------------------------- sampling


def test_noise_is_a_tokens_own():
    """It depends on the key, the draw and the token, not on how many are asked for."""
    two, first = keys([4, 9], [0, 1]), torch.tensor([3, 5])
    together = OURS.gumbel(*two, first, 2, 1000, 0)
    alone = OURS.gumbel(*mapped(two, lambda x: x[1:]), torch.tensor([6]), 1, 1000, 0)
    assert torch.equal(together[1, 1], alone[0, 0])
    assert torch.equal(OURS.gumbel(*two, first, 2, 700, 0), together[..., :700])


@pytest.mark.parametrize("backend", [OURS, TORCH], ids=["cpp", "torch"])
def test_top_p_ends_where_its_mass_is_reached(backend):
    """Of four equal tokens, whose sums are exact, the first two have the half."""
    rule = SamplingTensors.from_params([Sampling(1.0, 0, 0.5)])
    kept = backend.cut(torch.zeros(1, 1, 4), rule.temperature, rule.top_k, rule.top_p, rule.margin)
    assert kept.isfinite().tolist() == [[[True, True, False, False]]]


# ------------------------------------------------------------------------------------ gradients, tracing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_rotations_norm_each_head_first(dtype):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 9, 16, 80, generator=generator).to(dtype)
    rope = TORCH.rope_angles(torch.rand(40), torch.arange(18).view(2, 9))
    norms = (*((1 + torch.randn(2, 80, generator=generator) / 4).to(dtype)), 0.1)
    normed, slots = with_head_norms(qkv, 4, norms), torch.arange(18).view(2, 9) % 9 + 3
    got, want = (torch.zeros(2, 2, 4, 16, 80, dtype=dtype) for _ in range(2))
    q = rotary_cache_plainly(qkv, rope, *got, slots, norms)
    assert torch.equal(q, TORCH.rotary_cache(normed, rope, *want, slots)) and torch.equal(got, want)


CHOSEN = torch.stack([torch.randperm(30)[:7].sort().values for _ in range(2)])
GROWN = (torch.randn(2, 3, 40), 1.5, None, -torch.rand(2, 3), torch.rand(2, 3, 9) < 0.4)
BUFFERS = [torch.randn(2, 2, 20, 16) for _ in range(4)]
TRACED = [  # an operator in Python or Triton, and operands
    *(("tree_attention", attention_of(kind, [5, 0], (6, 2), 16, dtype, 0)[:5])
      for kind in ("tree", "token", "level") for dtype in DTYPES),
    ("path_table", attention_of("tree", [5, 0], (6, 2), 16, torch.float32, 0)[4:5]),
    ("topk_logsumexp", (torch.randn(50), 5)), ("topk_logsumexp", (torch.randn(2, 3, 50), 5)),
    *(("grow_level", (*GROWN, places, 4, count, 2)) for places in (None, torch.tensor([[0, 3, 4, 5, 11]])) for count in (0, 5)),
    ("grow_level", (*GROWN[:2], torch.randperm(90)[:40], *GROWN[3:], None, 4, 5, 2)),
    ("best_nodes", (torch.randn(2, 30), 7)), ("link_nodes", (CHOSEN, torch.full((2, 30), -1), 5)),
    ("compact", (BUFFERS, torch.tensor([b.data_ptr() for b in BUFFERS]), torch.tensor([3, 14]), torch.tensor([[0, 2, 4], [0, 1, 3]]))),
]  # fmt: skip


@pytest.mark.parametrize("name, given", TRACED)
def test_shapes_under_tracing_are_those_of_results(name, given):
    choose(torch.device("cuda"))  # registers those in Triton, where it is installed
    torch.library.opcheck(
        getattr(CPP, name).default, given, test_utils=("test_schema", "test_faketensor")
    )


# ----------------------------------------------------------------------------------------- lookups


@pytest.mark.parametrize(
    "rates", [RATES, Rates(0.7, 1.0, 0.8, 0.2, 3, 0.4)], ids=["usual", "other"]
)
@pytest.mark.parametrize("stored", [False, True])
def test_what_became_of_lookups(monkeypatch, stored, rates):
    """Pass by pass, by random outcomes, with a store and without one."""
    monkeypatch.setattr("drafts.ngram_estimates.RATES", rates)
    monkeypatch.setattr("drafts.ngram_draft.RATES", rates)
    torch.manual_seed(int(stored))
    for vocab, size in ((1, 3), (1, 60), (2, 12), (4, 40), (2, 40)):
        for ngram in (NGRAMS[2], Ngram(3, 4, 2), Ngram(10, 4, 6)):
            check_passes(vocab, whole(vocab, 2, size), ngram, stored)


def check_passes(vocab: int, tokens: Tensor, ngram: Ngram, stored: bool) -> None:
    """Both states start equal and stay so; some sequences decide nothing in a pass."""
    batch, size = tokens.shape
    drafters = []
    for _ in range(2):
        kept = PastTexts(capacity=30) if stored else None
        drafters.append(NgramDrafter(replace(ngram, kept=kept), sizes=(2, 4, 99)))
    drafters[0].use(OURS)
    states = [drafter.init(batch, size) for drafter in drafters]
    outcomes = 5 * torch.rand(states[0].outcomes.shape).sort(-1).values
    states = [replace_fields(state, outcomes=outcomes.clone()) for state in states]
    pos = torch.zeros(batch, dtype=torch.long)
    for _ in range(4):
        count = torch.minimum(whole(4 if size < 60 else 14, batch), size - 1 - pos)
        pos = pos + count
        confirmed = DrafterUpdate(None, None, count, text=DecodedTokens(tokens, pos))
        mine = drafters[0].extend(states[0], confirmed)
        assert mine is states[0], "it is written in place"
        states[1] = drafters[1].extend(states[1], confirmed)
        for name, own, plain in zip(mine._fields, mine, states[1]):
            if stored and name in ("tokens", "parents"):  # of candidates; others differ by padding
                own, plain = (x[mine.values > -INF] for x in (own, plain))
            assert torch.allclose(own, plain), name
        if stored:
            text = whole(vocab, 9).tolist()
            for drafter in drafters:
                drafter.kept.add(text)
