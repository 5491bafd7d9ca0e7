"""Round to int4 with the second moments of a layer's inputs over a short text.

1. The text is bundled and does not change, since weights in a cache are made of it: arithmetic
   problems with their answers, code and prose. `calibration_text` cuts it into sequences.
2. `second_moments` runs one block after the other, and yields each linear layer's moments.
3. Every token counts the same: its inputs are divided by their root mean square. Otherwise a few
   tokens with outlying activations, as the first of a text, would be all that is preserved.

4. `encode_calibrated` rounds one input after the other, and the inputs that follow make up for its
   error: GPTQ (arXiv 2210.17323).

Trade-off: moments between inputs that are more than WIDTH apart are left out. They would take more
time than all the rest, in layers with many inputs.
Not here: rounding without moments (quantize.py); the cache of the result (files/rounding.py). The
experts of a mixture are rounded without moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from files.io import read_jsonl
from files.tokenizer import Tokenizer, has_tokenizer
from files.weights import load_model
from model import Transformer, weight_names
from options import ROOT, log_note
from quantize import AT_ONCE, Linear, round_int4, search_scale
from steps import run_steps

SEQUENCES = 32
LENGTH = 256  # tokens of a sequence
WIDTH = 2048  # inputs whose moments with each other are known
DAMPING = 0.01  # of the mean second moment, added to each; of GPTQ
SEQUENCES_AT_ONCE = 4  # that a block reads together
PROBLEMS = ROOT / "data/train/gsm8k_train_clean.jsonl"
CODE_AND_PROSE = ROOT / "data/train/calibration.txt"


class Moments(NamedTuple):
    """The second moments of the inputs that some weights share."""

    names: tuple[str, ...]  # of the weights
    parts: list[Tensor]  # [WIDTH, WIDTH] fp32 each, the last may be smaller


class Recorder(nn.Module):
    """A linear layer that adds up the second moments of its inputs."""

    def __init__(self, layer: Linear):
        super().__init__()
        self.layer = layer
        widths = [min(WIDTH, layer.in_features - i) for i in range(0, layer.in_features, WIDTH)]
        self.moments = [torch.zeros(width, width) for width in widths]

    def add(self, x: Tensor) -> None:
        """Add inputs, [..., K]. Writes: moments."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        rows = rows / rows.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
        for moment, part in zip(self.moments, rows.split(WIDTH, 1)):
            moment.addmm_(part.T, part)

    def forward(self, x: Tensor) -> Tensor:
        self.add(x)
        return self.layer(x)


def calibration_text(path: Path) -> Tensor:
    """Return bundled text in the tokens of a checkpoint, [SEQUENCES, LENGTH] int64.

    Raises: ValueError without a tokenizer.
    """
    tokenizer = Tokenizer.load(path)
    problems = []
    for row in read_jsonl(PROBLEMS, "calibration")[: 4 * SEQUENCES]:
        problems += [text for pair in zip(row["turns"], row["answers"]) for text in pair]
    sequences = []
    for text in ("\n".join(problems), CODE_AND_PROSE.read_text(encoding="utf-8")):
        ids = torch.tensor(tokenizer.encode(text, bos=True))
        rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
        wanted = min(len(rows), SEQUENCES // 2)
        sequences.append(rows[:: max(1, len(rows) // wanted)][:wanted])
    return torch.cat(sequences)


@torch.inference_mode()
def second_moments(model: Transformer, ids: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each linear layer's name and `Recorder.moments`, block by block; the LM head is last.

    ids: [B, T] int64. Writes: nothing that remains.
    """
    positions = torch.arange(ids.shape[1]).expand(SEQUENCES_AT_ONCE, -1)
    batches = [
        model.embed(part, positions[: len(part)], None) for part in ids.split(SEQUENCES_AT_ONCE)
    ]
    for number, layer in enumerate(model.layers):
        recorders = {}
        for name, module in list(layer.named_modules()):
            if isinstance(module, Linear) and not module.experts:
                recorders[name] = Recorder(module)
                layer.set_submodule(name, recorders[name])
        batches = [layer(rows) for rows in batches]
        for name, recorder in recorders.items():
            layer.set_submodule(name, recorder.layer)
            yield f"layers.{number}.{name}", recorder.moments
    head = Recorder(model.lm_head)
    for rows in batches:
        head.add(run_steps(model.last, model, rows).h)
    yield "lm_head", head.moments


def moments_of(path: Path) -> Iterator[Moments]:
    """Yield the moments for each weight of a checkpoint, under the names of its files.

    Nothing, and one line, for a checkpoint without a tokenizer.
    """
    if not has_tokenizer(path):
        log_note(
            f"{path} has no tokenizer, so that int4 is rounded without calibration, which "
            "is less exact; add tokenizer.json"
        )
        return
    ids = calibration_text(path)
    model = load_model(path)
    names = weight_names(model.config) | {"lm_head.weight": ("lm_head.weight",)}
    for layer, moments in second_moments(model, ids):
        yield Moments(names[f"{layer}.weight"], moments)


# ---------------------------------------------------------------------- rounding


def encode_calibrated(
    weight: Tensor, group_size: int, moments: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Round one input after the other, as `Int4.encode` returns it.

    weight: [N, K] float; moments: of its inputs, as `Moments.parts`
    """
    N, K = weight.shape
    codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = weight.new_empty(N, K // group_size, dtype=torch.bfloat16)
    columns = zip(weight.split(WIDTH, 1), codes.split(WIDTH, 1), moments)
    for number, (weight_part, codes_part, moment) in enumerate(columns):
        first = number * WIDTH // group_size
        scale_part = scale[:, first : first + weight_part.shape[1] // group_size]
        rows = AT_ONCE[weight.device.type] // 128
        moment = moment.to(weight.device)
        factor = _inverse_factor(moment)
        importance = moment.diagonal().clamp(min=1e-12)
        for part in zip(weight_part.split(rows), codes_part.split(rows), scale_part.split(rows)):
            _round_with_feedback(*part, factor, importance)
    return codes, scale


def _inverse_factor(moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of damped moments, [K, K] fp32."""
    damped = moment.double()
    mean = damped.diagonal().mean()
    # inputs that are always zero have no moments: any code serves them
    damped.diagonal().add_(DAMPING * mean + 1e-9)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _round_with_feedback(
    weight: Tensor, codes: Tensor, scale: Tensor, factor: Tensor, importance: Tensor
) -> None:
    """Round inputs in turn. An input's error, times its row of `factor`, goes to later inputs.

    weight: [N, K] float; factor: [K, K], from `_inverse_factor`; importance: [K] fp32
    Writes: codes, [N, K]; scale, [N, K/G].
    """
    left = weight.T.float().contiguous()  # [K, N]; an input's weights lie side by side
    rounded = torch.empty_like(left)
    group = weight.shape[1] // scale.shape[1]
    diagonal = factor.diagonal().tolist()
    for number, first in enumerate(range(0, len(left), group)):
        last = first + group
        groups = left[first:last].T.unsqueeze(1)  # [N, 1, G]
        step = search_scale(groups, importance[first:last]).flatten()
        scale[:, number] = step
        step = scale[:, number].float()
        errors = torch.empty_like(left[first:last])  # [G, N]
        for k in range(first, last):
            before = errors[: k - first]  # of the inputs of this group
            value = left[k].addmv_(before.T, factor[first:k, k], alpha=-1)
            round_int4(value, step, rounded[k])
            error = errors[k - first]
            torch.addcmul(value, rounded[k], step, value=-1, out=error).div_(diagonal[k])
        left[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    codes.copy_(rounded.T)
