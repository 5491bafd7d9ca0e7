"""Name the layer whose numbers are not finite (NaN or infinite), and the likely cause.

Cycles report where the features behind an accepted path are not finite, and prompts where those of
their last token are. `reason` then runs the sequence once more, one layer after the other.
`check_small_weights` looks at the weights that are cheap to read when a model is loaded: a product
of 8 bits hides a NaN in a norm.
Not here: large weights, which are not read twice; drafters, whose numbers decide no token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kv_cache import KVCache, causal_window
from model import Transformer, run_eagerly, run_layers

DOWNLOAD = "download the checkpoint again, or use another file"


def is_finite(features: Tensor) -> bool:
    """Return whether all numbers are finite. A sum shows it in one operation."""
    return bool(features.sum(dtype=torch.float32).isfinite())


def check_small_weights(target: Transformer, path: Any) -> None:
    """Check norms, biases and the LM head of a model. path: the checkpoint

    Raises: ValueError for a number that is not finite.
    """
    for name, weight in target.named_parameters():
        if weight.dim() == 1 and weight.is_floating_point() and not is_finite(weight):
            raise ValueError(
                f"{path}: the weight {name} has numbers that are not finite; {DOWNLOAD}"
            )
    ones = torch.ones_like(target.norm.weight)[None, None]
    if not is_finite(target.logits(ones)):
        raise ValueError(f"{path}: the LM head has weights that are not finite; {DOWNLOAD}")


@torch.inference_mode()
def reason(target: Transformer, tokens: list[int]) -> str:
    """Run a sequence layer by layer. Returns: the error about the first that is not finite."""
    parts: dict[Any, str] = {target.embed: "the embedding"}
    last = len(target.layers) - 1
    parts |= {block: f"layer {i} (of 0 to {last})" for i, block in enumerate(target.layers)}
    broken: list[Any] = []

    def run(part: Any, *inputs: Any) -> Any:
        rows = run_eagerly(part, *inputs)
        if not broken and not is_finite(rows.stream):
            broken.append(part)
        return rows

    weight = target.norm.weight
    ids = torch.tensor([tokens], device=weight.device)
    window = causal_window(torch.zeros_like(ids[:, 0]), len(tokens))
    cache = KVCache.empty(target.config, 1, len(tokens), weight.dtype, str(weight.device))
    rows = run(target.embed, ids, window.slots, window)
    run_layers(target.layers, rows, cache, run)
    where = parts[broken[0]] if broken else "the final norm"
    part = broken[0] if broken else target.norm
    return (
        f"the model's numbers are not finite (NaN or infinite), first behind {where}: "
        f"{_cause(target, part)}"
    )


def _cause(target: Transformer, part: Any) -> str:
    """Return the likely cause, and a remedy."""
    module = target.embedding if not isinstance(part, nn.Module) else part
    held = [*module.named_parameters(), *module.named_buffers()]
    for name, values in held:
        if values.is_floating_point() and not is_finite(values):
            return f"its {name} is not finite; {DOWNLOAD}"
    if target.norm.weight.dtype == torch.float16:
        return "float16 ends at 65504; use --dtype bfloat16 or float32"
    return f"its weights are likely damaged; {DOWNLOAD}"
