"""The kernels that passes of a model call on CUDA, without a GPU: the tensors are fake, and hold no data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")

from backends.weight import Part, Weight
from kv_cache import KVCache, Window  # noqa: E402
from model import ModelConfig, Transformer  # noqa: E402
from models.qwen3_5 import Qwen35  # noqa: E402
from quantize import Linear
from reference import choose, use_backend  # noqa: E402

SIZES = ModelConfig(64, 1, 4, 2, 16, 96, vocab_size=50)
BIASED = ModelConfig(64, 1, 4, 2, 16, 96, vocab_size=50, qkv_bias=True, o_bias=True, mlp_bias=True)
GATED = Qwen35(64, 1, 4, 2, 16, 96, vocab_size=50, qk_norm=True, rotary_dim=16)
CUDA = {"device": "cuda"}


class Kernels(TorchDispatchMode):
    """Lists our operators and PyTorch's matmuls that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "gpt_eagle" or "mm" in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Angles(nn.Module):
    """In place of `RotaryEmbeddings`: fake tensors cannot be indexed here."""

    def forward(self, positions):
        return (tuple(torch.empty(*positions.shape, 1, 16, **CUDA) for _ in range(2)),)


def fake_model(config: ModelConfig, form: str, dtype: torch.dtype) -> Transformer:
    """A model on a GPU, its linear layers in a format."""
    with torch.device("meta"):
        model = Transformer(config)
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            fake = torch.empty(value.shape, dtype=dtype, **CUDA)
            setattr(module, name, nn.Parameter(fake, requires_grad=False))
        if isinstance(module, Linear) and form == "int8":
            outputs, inputs = module.out_features, module.in_features
            codes = torch.empty(-(-inputs // 128), outputs, 64, dtype=torch.int16, **CUDA)
            scale = torch.empty(outputs, **CUDA)
            module.pack(Weight(codes, (Part("INT8_PLANES", outputs),), inputs, scale=scale))
    model.ropes = Angles()
    use_backend(model, choose(torch.device("cuda"), dtype))
    return model


MERGED = "add_unscaled rotary_product tree_attention add_product gated_product add_product norm"
APART = "norm {0} rotary_cache tree_attention {0} norm {0} {0}"


@pytest.mark.parametrize(
    "config, form, dtype, rows, merged, kernels",
    [
        (SIZES, "none", torch.bfloat16, 1, True, MERGED + " linear_halves"),
        (SIZES, "int8", torch.bfloat16, 1, True, MERGED + " w8a16"),
        (SIZES, "int8", torch.float32, 70, True, MERGED + " w8a16"),
        # x w could overflow, so norms are divided at once
        (SIZES, "none", torch.float16, 1, True,
         "norm rotary_product tree_attention add_product norm gated_product add_product norm linear_halves"),
        (SIZES, "none", torch.bfloat16, 70, True,
         "norm mm rotary_cache tree_attention mm add_norm mm mm add_norm mm"),
        (SIZES, "none", torch.bfloat16, 1, False, APART.format("linear_halves") + " norm linear_halves"),
        (SIZES, "int8", torch.float16, 1, False, APART.format("w8a16") + " norm w8a16"),
        (SIZES, "none", torch.float32, 1, False, APART.format("mm") + " norm mm"),
        # a split stands between the first matmul and the rotation, which hence divides no norm
        (GATED, "none", torch.bfloat16, 1, True,
         "norm linear_halves norm norm rotary_cache tree_attention add_product gated_product add_product norm "
         "linear_halves"),
        # a bias is added in the matmul's launch; the LM head has none
        (BIASED, "none", torch.bfloat16, 1, False, APART.format("add_product") + " norm linear_halves"),
        (BIASED, "int8", torch.bfloat16, 1, False, APART.format("add_product") + " norm w8a16"),
    ],
)  # fmt: skip
def test_kernels_of_a_pass(config, form, dtype, rows, merged, kernels):
    """The first norm to the logits, in a model of one layer."""
    with FakeTensorMode(), torch.no_grad():
        model = fake_model(config, form, dtype)
        model.fuse(True)
        assert not model.program.in_cpp
        if not merged:
            model.program = None
        kv = [torch.empty(1, 2, 128, 16, dtype=dtype, **CUDA) for _ in range(2)]
        cache = KVCache(kv[:1], kv[1:], None, (0,))
        slots = torch.zeros(1, rows, dtype=torch.long, **CUDA)
        mask = torch.ones(1, rows, rows, dtype=torch.bool, **CUDA)
        window = Window(slots, torch.zeros(1, dtype=torch.long, **CUDA), mask)
        with Kernels() as ran:
            scores = model.logits(model(slots, slots, cache, window))
    assert scores.shape == (1, rows, 50) and scores.dtype == torch.float32
    assert " ".join(ran.names).removeprefix("path_table ") == kernels
