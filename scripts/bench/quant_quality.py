"""What rounding the weights costs: held-out perplexity and KL divergence for every format, as it runs on each device.

    python scripts/bench/quant_quality.py --json quality.json                       # the demo, on its held-out text
    python scripts/bench/quant_quality.py --checkpoint DIR --text some.txt
    python scripts/bench/quant_quality.py --checkpoint DIR --text some.txt --also DIR-GPTQ,DIR-FP8     # quantized by others

How it works:
1. The text is cut into sequences that the model reads whole. The reference is the checkpoint's own dtype.
2. Each format is loaded as generate.py loads it. "int8 activations" is what a CPU runs (ops/quantized.py); "16-bit
   activations" is what CUDA computes, here with the dequantized weights in the model's dtype.
3. "plain" rounds int4 by the largest magnitude of a group, without the search of quantize.py.

KL: mean over positions of KL(reference || rounded), nats. Agreement: share of positions with the same best token.
Not here: the change of tau (papers.py, as `--methods eagle:dynamic:quant_draft=int4`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from checkpoint import Quantization, saved_quantization
from command_line import one_line_errors, option, parse
from files import write_text
from hf.config import read_config, read_raw
from hf.tokenizer import Tokenizer
from hf.weights import load_model
from model import ExpertLinear, Linear, LMHead, Transformer
from options import DEMO, GROUP_SIZES, ROOT
from quantize import FORMATS, QuantExperts, QuantLinear
from scripts.bench.measure import environment, shown_path

BATCH = 8  # sequences read together


@dataclass(frozen=True)
class QualityConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEMO, "Hugging Face directory of the target")
    also: str = option("", "quantized directories of the same model, separated by commas")
    text: str = option("", "text files, separated by commas; default: the demo's held-out text")
    seq_len: int = option(512, "tokens per sequence", least=2)
    sequences: int = option(64, "sequences per text", least=1)
    threads: int = option(0, "CPU threads; 0 leaves torch's default")
    json: str = option("", "write the results to this file")


class Row(NamedTuple):
    """One line of the table."""

    format: str  # "" is the reference
    group_size: int
    runs: str  # which product
    path: str = ""  # a directory in this format; "": the target's is rounded


def rows(also: list[str]) -> Iterator[Row]:
    """Every format in every way that it runs, and quantized directories."""
    yield Row("", 0, "reference")
    for format in FORMATS:
        for group in GROUP_SIZES if format == "int4" else (0,):
            kinds = (
                "int8 activations",
                "16-bit activations",
                *(["plain"] if format == "int4" else []),
            )
            yield from (Row(format, group, runs) for runs in kinds)
    for path in also:
        name = Path(path).resolve().name
        yield from (Row(name, 0, runs, path) for runs in ("int8 activations", "16-bit activations"))


# ------------------------------------------------------------------------------------------------- texts


def read_texts(config: QualityConfig) -> dict[str, list[str]]:
    """Documents by name. Raises: ValueError for a file that cannot be read."""
    if config.text:
        try:
            return {
                name: [Path(name).read_text(encoding="utf-8")] for name in config.text.split(",")
            }
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--text: cannot read {config.text} ({type(error).__name__})"
            ) from None
    if Path(config.checkpoint).resolve() != Path(DEMO).resolve():
        raise ValueError("--text is missing; only the demo has held-out text of its own")
    from scripts.train.train_demo import TrainConfig, read_python, read_sums

    return {
        "python": read_python()["held_out"],
        "sums": read_sums(ROOT / TrainConfig.sums)["held_out"],
    }


def batches(documents: list[str], tokenizer: Tokenizer, config: QualityConfig) -> list[Tensor]:
    """The documents one after the other, [<= BATCH, seq_len] int64 each. Raises: ValueError for too little text."""
    ids = [i for document in documents for i in tokenizer.encode(document, bos=True)]
    count = min(config.sequences, len(ids) // config.seq_len)
    if not count:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than one sequence of --seq_len {config.seq_len}"
        )
    whole = torch.tensor(ids[: count * config.seq_len]).view(count, config.seq_len)
    return list(whole.split(BATCH))


# ------------------------------------------------------------------------------------------------ models


def plain_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Symmetric rounding by the largest magnitude of the group."""
    groups = weight.float().unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7).bfloat16()
    return (groups / scale.float()).round().clamp(-8, 7).to(torch.int8).flatten(1), scale.squeeze(
        -1
    )


def round_plainly(layer: QuantLinear | QuantExperts, weight: Tensor, group_size: int) -> None:
    """Give an int4 layer the codes of `plain_int4`. weight: [N, K], or [E, N, K] of experts."""
    if isinstance(layer, QuantLinear):
        layer.packed, layer.scale = layer.product.pack(*plain_int4(weight, group_size))
    else:
        for e, one in enumerate(weight):
            layer.packed[e], layer.scale[e] = layer.product.pack(*plain_int4(one, group_size))


def as_float(layer: QuantLinear | QuantExperts, dtype: torch.dtype) -> nn.Module:
    """The layer as a float one with the same weights: what a kernel with 16-bit activations computes."""
    if isinstance(layer, QuantExperts):
        experts = ExpertLinear(len(layer.packed), layer.in_features, layer.out_features)
        experts.weight = nn.Parameter(layer.dequantize().to(dtype), requires_grad=False)
        return experts
    kind = LMHead if layer.fp32_out else Linear
    linear = kind(layer.in_features, layer.out_features, layer.bias is not None, dtype=dtype)
    linear.weight = nn.Parameter(layer.dequantize().to(dtype), requires_grad=False)
    linear.bias = layer.bias
    return linear


def build(path: Path, row: Row) -> tuple[Transformer, float]:
    """The model of a row, and its bits per weight of linear layers."""
    if not row.format:
        model = load_model(path)
        return model, 8.0 * model.embedding.weight.itemsize
    quant = None if row.path else Quantization(row.format, row.group_size or 128)
    model = load_model(Path(row.path or path), quant=quant)
    layers = {
        name: m for name, m in model.named_modules() if isinstance(m, (QuantLinear, QuantExperts))
    }
    sizes = [(layer.in_features * layer.out_features, layer) for layer in layers.values()]
    weights = sum(
        size * (len(layer.packed) if isinstance(layer, QuantExperts) else 1)
        for size, layer in sizes
    )
    bits = 8 * sum(layer.packed.nbytes + layer.scale.nbytes for layer in layers.values()) / weights
    original = load_model(path) if row.runs == "plain" else None
    for name, layer in layers.items():
        if original is not None:
            round_plainly(layer, original.get_submodule(name).weight, row.group_size)
        if row.runs != "int8 activations":
            parent, _, child = name.rpartition(".")
            setattr(
                model.get_submodule(parent), child, as_float(layer, model.embedding.weight.dtype)
            )
    return model, bits


@torch.inference_mode()
def compare(
    reference: Transformer, model: Transformer, texts: list[Tensor]
) -> tuple[float, float, float]:
    """Returns: perplexity of `model`, mean KL from `reference` (nats), share of equal best tokens."""
    loss = divergence = agreement = 0.0
    for ids in texts:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        p, q = (
            m.logits(m(ids, positions)).log_softmax(-1) for m in (reference, model)
        )  # [B, T, V]
        loss -= q[:, :-1].gather(2, ids[:, 1:, None]).sum().item()
        divergence += (p.exp() * (p - q)).sum().item()
        agreement += (p.argmax(-1) == q.argmax(-1)).sum().item()
    tokens = sum(ids.numel() for ids in texts)
    predicted = tokens - sum(len(ids) for ids in texts)
    return math.exp(loss / predicted), divergence / tokens, agreement / tokens


def check_models(path: Path, also: list[str]) -> None:
    """Raises: ValueError for models that cannot be compared here."""
    rule = "--checkpoint takes a model in 16 bits, --also quantized ones"
    size = read_config(path).vocab_size
    if saved_quantization(read_raw(path)) is not None:
        raise ValueError(f"{rule}; {path} is quantized")
    for each in map(Path, also):
        own = read_config(each).vocab_size
        if own != size:
            raise ValueError(
                f"--also {each} has {own} tokens and {path} has {size}; name a copy of it"
            )
        if saved_quantization(read_raw(each)) is None:
            raise ValueError(f"{rule}; {each} is not quantized")


def run(config: QualityConfig) -> None:
    """Measure and print everything."""
    if config.threads:
        torch.set_num_threads(config.threads)
    path, also = Path(config.checkpoint), [name for name in config.also.split(",") if name]
    check_models(path, also)
    tokenizer = Tokenizer.load(path)
    texts = {
        name: batches(documents, tokenizer, config)
        for name, documents in read_texts(config).items()
    }
    reference, _ = build(path, Row("", 0, "reference"))
    records = []
    for row in tqdm(list(rows(also)), unit="format"):
        model, bits = build(path, row)
        record = row._asdict() | {"path": shown_path(row.path), "bits_per_weight": bits}
        for name, text in texts.items():
            perplexity, divergence, agreement = compare(reference, model, text)
            record[name] = {"perplexity": perplexity, "kl": divergence, "agreement": agreement}
        records.append(record)
    sizes = {name: sum(ids.numel() for ids in text) for name, text in texts.items()}
    print(", ".join(f"{key} {value}" for key, value in environment("cpu").items()))
    print(
        f"{shown_path(config.checkpoint)}, {str(reference.embedding.weight.dtype)}, tokens: {sizes}\n"
    )
    print(
        "| format | runs as | bits | "
        + " | ".join(f"{name}: ppl | KL | agree" for name in texts)
        + " |"
    )
    print("|---" * (3 + 3 * len(texts)) + "|")
    for r in records:
        named = r["format"] + (f" g{r['group_size']}" if r["group_size"] else "") or "reference"
        cells = [
            f"{r[t]['perplexity']:.3f} | {r[t]['kl']:.4f} | {r[t]['agreement']:.3f}" for t in texts
        ]
        print(f"| {named} | {r['runs']} | {r['bits_per_weight']:.2f} | " + " | ".join(cells) + " |")
    if config.json:
        write_text(
            config.json,
            json.dumps({"environment": environment("cpu"), "tokens": sizes, "rows": records}),
        )


def main() -> None:
    config = parse(QualityConfig, "quant_quality.py", __doc__)
    with one_line_errors("quant_quality.py"):
        run(config)


if __name__ == "__main__":
    main()
