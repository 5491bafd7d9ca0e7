"""What of the GPU scripts needs no GPU: their messages, and the table made of what was measured."""

import pytest

import gpu_check
import kernel_bench


def timed(form, layer, M, time_us, share):
    return {"format": form, "layer": layer, "M": M, "time_us": time_us, "share": share}


def test_the_table_shows_what_was_measured_and_what_failed(monkeypatch):
    monkeypatch.setattr(kernel_bench, "LAYERS", {"wo": (256, 512), "w2": (128, 1024)})
    rows = [timed("int4", layer, M, us, share) for layer, M, us, share in
            [("wo", 1, 10.0, 0.8), ("w2", 1, 30.0, 0.4), ("wo", 32, 15.0, 0.5), ("w2", 32, 35.0, 0.3)]]  # fmt: skip
    rows[0] |= {"correct": True, "same_bits": False}
    rows += [timed("int8", "wo", 1, 20.0, 0.9), {"format": "int8", "layer": "w2", "error": "OutOfMemoryError: no"}]
    table = kernel_bench.summary(rows)
    assert "| wo | 1 | failed | failed | 20.0 us, 90% | 10.0 us, 80% |" in table
    assert "int4, all layers: 1 rows 50%, 1.00 x; 32 rows 36%, 1.25 x" in table
    assert "int8, all layers: not measured" in table
    assert "wrong, or rows depend on others: int4 wo\n" in table
    assert table.endswith("failed: int8 w2 : OutOfMemoryError: no")


@pytest.mark.parametrize("options,message", [
    ({"only": "tests,speed"}, "--only: there is no part speed; use tests, kernels, demo"),
    ({"out": "nowhere/gpu.jsonl"}, "--out: cannot write nowhere/gpu.jsonl; there is no directory nowhere"),
])  # fmt: skip
def test_mistakes(options, message):
    with pytest.raises(ValueError) as error:
        gpu_check.check(gpu_check.CheckConfig(**options))
    assert str(error.value) == message


def test_layers_of_every_format_report_their_bytes(monkeypatch):
    """On the CPU, which has no such operators: only what is made, not what it does."""
    for name in ("rand", "randn", "randint"):
        original = getattr(kernel_bench.torch, name)
        monkeypatch.setattr(
            kernel_bench.torch, name, lambda *a, original=original, **k: original(*a, **k | {"device": "cpu"})
        )
    N, K = 64, 512
    expected = {"bf16": 2 * N * K, "int8": N * K + 4 * N, "int4": N * K // 2 + N * K // 128 * 2,
                "tinygemm": N * K // 2 + N * K // 128 * 4}  # fmt: skip
    got = {form: kernel_bench.make_layer(form, N, K, 128).weight_bytes for form in kernel_bench.FORMATS}
    assert got == expected
