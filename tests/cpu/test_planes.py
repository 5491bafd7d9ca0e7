"""The layouts of weights for CUDA: planes of codes, words of scales, and products with them in plain operations.

The kernels that read them are tested in cases/kernels.py and test_kernels_triton.py.
"""

import sys

import pytest
import torch

import backends.attention
import backends.library
import backends.triton.layout
import reference
from backends.weight import join_zeros, split_zeros
from functions import attention_of
from helpers import quantized
from reference import TORCH, choose


def test_without_triton_the_cache_is_masked_and_said_so(monkeypatch, capsys):
    """The whole capacity, whose unused slots must be finite."""
    monkeypatch.setitem(sys.modules, "triton", None)
    backends.library._triton_is_installed.cache_clear()
    given = attention_of("tree", [37, 11], (6, 2), 16, torch.float32, 0)
    for _ in range(2):
        got = backends.attention.masked_attention(*given)
        torch.testing.assert_close(got, reference.attention(*given), atol=1e-5, rtol=1e-5)
    of_cuda = vars(choose(torch.device("cuda")))
    differ = {name for name, function in of_cuda.items() if function is not getattr(TORCH, name)}
    assert differ == {"attention"}
    backends.library._triton_is_installed.cache_clear()
    assert capsys.readouterr().err.count("pip install triton") == 1


# --------------------------------------------------------------------- int4 and int8 weights (CUDA)

SHAPES = [(1, 1), (3, 256), (5, 257), (64, 512), (70, 1000)]


@pytest.mark.parametrize("N,K", SHAPES)
def test_packed_weights_come_back(N, K):
    g = torch.Generator().manual_seed(0)
    for top, bottom, pack, unpack in (
        (7, -8, backends.triton.layout.pack_int4_planes, backends.triton.layout.unpack_int4_planes),
        (
            127,
            -127,
            backends.triton.layout.pack_int8_planes,
            backends.triton.layout.unpack_int8_planes,
        ),
    ):
        codes = torch.randint(bottom, top + 1, (N, K), generator=g, dtype=torch.int8)
        codes.view(-1)[0], codes.view(-1)[-1] = bottom, top
        packed = pack(codes)
        assert packed.dtype == torch.int16 and packed.is_contiguous()
        assert torch.equal(unpack(packed, N, K), codes) and unpack(packed, N, K).dtype == torch.int8
        planes = 2 if top == 127 else 4
        block = planes * backends.triton.layout.COLUMNS
        assert packed.numel() * planes < N * (K + block), "less than a block of padding"


def test_a_scale_and_a_zero_point_in_a_word():
    """Every fp16 and bf16 there is, with every zero point."""
    every = torch.arange(2**16).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        scale = every.view(dtype)[:, None]
        for value in range(-8, 9):
            zero = torch.full(scale.shape, value, dtype=torch.int8)
            groups, steps = split_zeros(torch.zeros_like(zero), join_zeros(scale, zero))
            want = scale.float()[..., None]
            torch.testing.assert_close(steps, want, atol=0, rtol=0, equal_nan=True)
            assert (groups == -value).all()
        assert (split_zeros(torch.zeros_like(zero), join_zeros(scale, None))[0] == 0).all()


@pytest.mark.parametrize("form", ["int4-128", "int4-32", "int4-64-zeros", "int8"])
def test_the_references_are_products_with_the_weights(form):
    N, K = 6, 384
    weights = quantized(form, N, K)
    if form == "int8":
        codes = backends.triton.layout.unpack_int8_planes(weights.packed, N, K)
        w = codes.double() * weights.scale.double()[:, None]
    else:
        codes = backends.triton.layout.unpack_int4_planes(weights.packed, N, K)
        scale = backends.triton.layout.unpack_scales(weights.scale, K)
        zero = (scale & 31) - 8 if scale.dtype == torch.int32 else torch.zeros_like(scale)
        scale = (scale - zero - 8).view(torch.float32) if scale.dtype == torch.int32 else scale
        groups = torch.arange(K) // weights.group
        w = (codes.double() - zero[:, groups]) * scale[:, groups].double()
    x = torch.randn(2, 5, K, generator=torch.Generator().manual_seed(0))
    got = weights.reference(x).double()
    torch.testing.assert_close(got, x.double() @ w.T, atol=1e-4, rtol=1e-5)
    assert weights.reference(x.bfloat16()).dtype == torch.bfloat16


def test_weights_of_another_layer_or_format_are_refused():
    int4, int8 = (quantized(form, 70, 512) for form in ("int4-128", "int8"))
    says = "x of 640 inputs needs int4 weights packed in 3 blocks of 256; these have 2"
    with pytest.raises(ValueError, match=says):
        int4.operator(torch.randn(1, 640))
    with pytest.raises(ValueError, match="w4a16 takes scales as pack_scale"):
        backends.planes.w4a16(torch.randn(1, 512), int4.packed, torch.ones(70, 4))
    with pytest.raises(ValueError, match=r"w8a16 takes scales as \[N\] float32"):
        backends.planes.w8a16(torch.randn(1, 512), int8.packed, torch.ones(70, 1))
