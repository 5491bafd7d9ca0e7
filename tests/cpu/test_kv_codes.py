"""Keys and values in 8 bits: their rows, attention over them in every build, and the passes in C++."""

from __future__ import annotations

import pytest
import torch
from test_kernels_cpu import ALL, attention_inputs, operators
from test_layers_cpu import CONFIG, empty_cache, model

import backends.attention
import reference
from kv_cache import causal_window
from reference import decode_rows as decode
from reference import encode_rows as encode
from reference import row_width


@pytest.mark.parametrize("elements", [2, 16, 80, 128])
def test_a_row_is_its_codes_and_a_scale_per_group(elements):
    """Every number is at most half a step away, and the scales add 2 bytes for each 32."""
    x = torch.randn(3, 5, elements, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0
    x[1, 1] *= 1000
    rows = encode(x, torch.int8)
    assert rows.shape == (3, 5, row_width(elements, torch.int8)) and rows.dtype == torch.int8
    assert row_width(elements, torch.int8) == elements + 2 * ((elements + 31) // 32)
    back = decode(rows, elements)
    for group, rounded in zip(x.split(32, -1), back.split(32, -1)):
        step = group.abs().amax(-1, keepdim=True) / 127
        # a scale that is rounded down by 2^-9 moves the largest code by half a step
        assert ((group - rounded).abs() <= 1.01 * step).all()
        assert ((group - rounded).abs() <= 0.51 * step).float().mean() > 0.9
    assert torch.equal(encode(x[2:, 3:4], torch.int8), rows[2:, 3:4]), "a row is its own"
    assert torch.equal(encode(x, torch.bfloat16), x.bfloat16())


def test_what_is_no_number_stays_so():
    x = torch.ones(1, 64)
    x[0, 40] = float("nan")
    back = decode(encode(x, torch.int8), 64)
    assert back[0, :32].isfinite().all() and back[0, 32:].isnan().all()


@pytest.mark.parametrize("width", [16, 48, 80, 128])
@pytest.mark.parametrize("march", ALL)
def test_attention_is_that_over_the_same_cache_in_fp32(march, width):
    q, k, v, start, mask = attention_inputs(torch.float32, width=width)
    codes = [encode(x, torch.int8) for x in (k, v)]
    attend = operators(march).attention
    got = attend(q, *codes, start, mask)
    wide = [decode(rows, width) for rows in codes]
    assert torch.equal(got, attend(q, *wide, start, mask))
    for other in (reference.attention, backends.attention.attention):
        torch.testing.assert_close(other(q, *codes, start, mask), got, atol=1e-5, rtol=1e-5)


def test_cpp_writes_the_rows_that_pytorch_writes():
    """Keys and values of the first layer, whose inputs have the same bits."""
    target = model(CONFIG)
    window = causal_window(torch.tensor([0]), 60)
    tokens = (torch.arange(60) * 7 % 50)[None]
    caches = []
    for in_cpp in (False, True):
        target.fuse(in_cpp)
        caches.append(empty_cache(CONFIG, 1, torch.int8))
        target(tokens, window.slots, caches[-1], window)
    theirs, ours = caches
    assert theirs.k[0].any()
    for name in ("k", "v"):
        same = (getattr(ours, name)[0] == getattr(theirs, name)[0]).float().mean()
        assert same > 0.999, "a norm's sum runs in another order"


def test_rows_of_another_width_are_refused():
    q, k, v, start, mask = attention_inputs(torch.float32, width=32)
    with pytest.raises(RuntimeError, match="rows of 32 do not hold heads of 32"):
        torch.ops.gpt_eagle.attention(q, k.to(torch.int8), v.to(torch.int8), start, mask)
