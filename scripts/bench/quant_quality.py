"""Measure the loss of rounding the weights: perplexity and KL divergence for every format.

    python scripts/bench/quant_quality.py --json quality.json         # the demo, its held-out text
    python scripts/bench/quant_quality.py --checkpoint DIR --text some.txt
    python scripts/bench/quant_quality.py --checkpoint DIR --text some.txt --also DIR-GPTQ,DIR-FP8
    python scripts/bench/quant_quality.py --fidelity --parts    # the default model, every format
    python scripts/bench/quant_quality.py --questions           # right answers by format

1. The text is cut into sequences; each is one pass. The reference is the checkpoint's own dtype.
2. Each format is loaded as generate.py loads it. "int8 activations" is the computation of a CPU
   (ops/qmatmul.py); "16-bit activations" is that of CUDA, here with the dequantized weights in
   the model's dtype. `--also` adds directories that others quantized.
3. "plain" rounds int4 by the largest magnitude of a group, without the search of quantize.py.

KL: mean over positions of KL(reference || rounded), nats. Agreement: share of positions with the
same best token.
4. `--fidelity` and `--questions` measure what a user runs instead (fidelity.py).

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

from cli.io import check_outputs, write_text
from cli.parsing import one_line_errors, option, parse
from hf.checkpoint import Quantization, saved_quantization
from hf.config import read_config, read_raw
from hf.fetch import fetched
from hf.tokenizer import Tokenizer
from hf.weights import load_model
from model import ExpertLinear, Linear, LMHead, Transformer
from options import DEFAULT, DEMO, GROUP_SIZES
from quantize import FORMATS, QuantExperts, QuantLinear
from scripts.bench.measure import environment, shown_path

BATCH = 8  # sequences read together


@dataclass(frozen=True)
class QualityConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(
        "", "Hugging Face directory of the target, or a GGUF file for --fidelity and --questions"
    )
    fidelity: bool = option(
        False, "compare the logits of every format with those of the weights in fp32"
    )
    parts: bool = option(False, "--fidelity: also round one part of the fp32 model at a time")
    prompts: int = option(2, "--fidelity: prompts of each bundled text", least=1)
    questions: bool = option(False, "count the right answers to simple questions by format")
    also: str = option("", "quantized directories of the same model, separated by commas")
    text: str = option("", "text files, separated by commas; default: the demo's held-out text")
    seq_len: int = option(512, "tokens per sequence", least=2)
    sequences: int = option(64, "sequences per text", least=1)
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)
    json: str = option("", "write the results to this file")


class Row(NamedTuple):
    """One line of the table."""

    format: str  # "" is the reference
    group_size: int
    runs: str  # which product
    path: str = ""  # a directory in this format; "": the target's is rounded


def rows(also: list[str]) -> Iterator[Row]:
    """Yield every format with every product that runs it, and quantized directories."""
    products = ("int8 activations", "16-bit activations")
    yield Row("", 0, "reference")
    for format in FORMATS:
        groups = GROUP_SIZES if format == "int4" else (0,)
        kinds = (*products, "plain") if format == "int4" else products
        yield from (Row(format, group, runs) for group in groups for runs in kinds)
    for path in also:
        name = Path(path).resolve().name
        yield from (Row(name, 0, runs, path) for runs in products)


# -------------------------------------------------------------------------------------------- texts


def read_texts(config: QualityConfig) -> dict[str, list[str]]:
    """Read documents by name. Raises: ValueError for a file that cannot be read."""
    if config.text:
        names = config.text.split(",")
        try:
            return {name: [Path(name).read_text(encoding="utf-8")] for name in names}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--text: cannot read {config.text} ({type(error).__name__})"
            ) from None
    if Path(config.checkpoint or DEMO).resolve() != Path(DEMO).resolve():
        raise ValueError("--text is missing; only the demo has held-out text of its own")
    from scripts.train.demo_data import read_python, read_sums

    return {
        "python": read_python()["held_out"],
        "sums": read_sums()["held_out"],
    }


def batches(documents: list[str], tokenizer: Tokenizer, config: QualityConfig) -> list[Tensor]:
    """Return the documents one after the other, [<= BATCH, seq_len] int64 each.

    Raises: ValueError for too little text.
    """
    ids = [i for document in documents for i in tokenizer.encode(document, bos=True)]
    count = min(config.sequences, len(ids) // config.seq_len)
    if not count:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than one sequence of --seq_len {config.seq_len}"
        )
    sequences = torch.tensor(ids[: count * config.seq_len]).view(count, config.seq_len)
    return list(sequences.split(BATCH))


# ------------------------------------------------------------------------------------------- models


def plain_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round symmetrically by the largest magnitude of the group.

    weight: [N, K]. Returns: codes, [N, K] int8; scales, [N, K/G] bf16.
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7).bfloat16()
    codes = (groups / scale.float()).round().clamp(-8, 7).to(torch.int8)
    return codes.flatten(1), scale.squeeze(-1)


def round_plainly(layer: QuantLinear | QuantExperts, weight: Tensor, group_size: int) -> None:
    """Give an int4 layer the codes of `plain_int4`. weight: [N, K], or [E, N, K] of experts."""
    if isinstance(layer, QuantLinear):
        layer.packed, layer.scale = layer.product.pack(*plain_int4(weight, group_size))
    else:
        for e, one in enumerate(weight):
            layer.packed[e], layer.scale[e] = layer.product.pack(*plain_int4(one, group_size))


def as_float(layer: QuantLinear | QuantExperts, dtype: torch.dtype) -> nn.Module:
    """Return the layer as a float one with the same weights, as under 16-bit activations."""
    if isinstance(layer, QuantExperts):
        linear = ExpertLinear(len(layer.packed), layer.in_features, layer.out_features)
    else:
        kind = LMHead if layer.fp32_out else Linear
        linear = kind(layer.in_features, layer.out_features, layer.bias is not None, dtype=dtype)
        linear.bias = layer.bias
    linear.weight = nn.Parameter(layer.dequantize().to(dtype), requires_grad=False)
    return linear


def build(path: Path, row: Row) -> tuple[Transformer, float]:
    """Load the model of a row. Returns: the model; its bits per weight of linear layers."""
    if not row.format:
        model = load_model(path)
        return model, 8.0 * model.embedding.weight.itemsize
    quant = None if row.path else Quantization(row.format, row.group_size)
    model = load_model(Path(row.path or path), quant=quant)
    layers = {
        name: m for name, m in model.named_modules() if isinstance(m, (QuantLinear, QuantExperts))
    }
    weights = 0
    size = 0  # bytes
    for layer in layers.values():
        matrices = len(layer.packed) if isinstance(layer, QuantExperts) else 1
        weights += layer.in_features * layer.out_features * matrices
        size += layer.packed.nbytes + layer.scale.nbytes
    original = load_model(path) if row.runs == "plain" else None
    for name, layer in layers.items():
        if original is not None:
            round_plainly(layer, original.get_submodule(name).weight, row.group_size)
        if row.runs != "int8 activations":
            parent, _, child = name.rpartition(".")
            layer = as_float(layer, model.embedding.weight.dtype)
            setattr(model.get_submodule(parent), child, layer)
    return model, 8 * size / weights


@torch.inference_mode()
def compare(
    reference: Transformer, model: Transformer, texts: list[Tensor]
) -> tuple[float, float, float]:
    """Compare a model with the reference.

    Returns: perplexity of `model`, mean KL from `reference` (nats), share of equal best tokens.
    """
    loss = 0.0
    divergence = 0.0
    agreement = 0.0
    for ids in texts:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        p = reference.logits(reference(ids, positions)).log_softmax(-1)  # [B, T, V]
        q = model.logits(model(ids, positions)).log_softmax(-1)  # [B, T, V]
        loss -= q[:, :-1].gather(2, ids[:, 1:, None]).sum().item()
        divergence += (p.exp() * (p - q)).sum().item()
        agreement += (p.argmax(-1) == q.argmax(-1)).sum().item()
    tokens = sum(ids.numel() for ids in texts)
    predicted = tokens - sum(len(ids) for ids in texts)
    return math.exp(loss / predicted), divergence / tokens, agreement / tokens


def check_models(path: Path, also: list[str]) -> None:
    """Check that the models can be compared. Raises: ValueError."""
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


def table(records: list[dict], texts: list[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table: a row per format, three columns per text."""
    columns = " | ".join(f"{name}: ppl | KL | agree" for name in texts)
    yield f"| format | runs as | bits | {columns} |"
    yield "|---" * (3 + 3 * len(texts)) + "|"
    for record in records:
        named = record["format"] or "reference"
        if record["group_size"]:
            named += f" g{record['group_size']}"
        cells = [named, record["runs"], f"{record['bits_per_weight']:.2f}"]
        for name in texts:
            found = record[name]
            cells += [
                f"{found['perplexity']:.3f}",
                f"{found['kl']:.4f}",
                f"{found['agreement']:.3f}",
            ]
        yield f"| {' | '.join(cells)} |"


def run(config: QualityConfig) -> None:
    """Measure and print everything."""
    if config.threads:
        torch.set_num_threads(config.threads)
    path = Path(config.checkpoint or DEMO)
    also = [name for name in config.also.split(",") if name]
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
    machine = environment("cpu")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    dtype = reference.embedding.weight.dtype
    print(f"{shown_path(str(path))}, {dtype}, tokens: {sizes}\n")
    print("\n".join(table(records, list(texts))))
    if config.json:
        document = {"environment": machine, "tokens": sizes, "rows": records}
        write_text(config.json, json.dumps(document))


def run_user_paths(config: QualityConfig) -> None:
    """Measure and print what a user runs: `--fidelity` and `--questions`."""
    from scripts.bench import fidelity

    if config.threads:
        torch.set_num_threads(config.threads)
    path = fetched(config.checkpoint or DEFAULT)
    machine = environment("cpu")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    document = {"environment": machine, "checkpoint": shown_path(str(path))}
    if config.fidelity:
        document["fidelity"] = fidelity.fidelity(path, config.prompts, config.parts)
        print("\n".join(fidelity.fidelity_table(document["fidelity"])), flush=True)
    if config.questions:
        document["questions"] = fidelity.questions(path)
        print("\n".join(fidelity.questions_table(document["questions"])))
    if config.json:
        write_text(config.json, json.dumps(document))


def main() -> None:
    """Run the command line."""
    config = parse(QualityConfig, "quant_quality.py", __doc__)
    with one_line_errors("quant_quality.py"):
        check_outputs({"--json": config.json})
        (run_user_paths if config.fidelity or config.questions else run)(config)


if __name__ == "__main__":
    main()
