"""MTP layers: the layer of a checkpoint that predicts the token after the next one drafts.

It is a head of EAGLE-1 but for its norms (`Mtp` in model.py), and drafts as one does: it reads the
target's features behind its final norm, then its own outputs, so that one layer drafts all levels.
It is in the checkpoint itself, or alone in a GGUF file of llama.cpp.

Sources: `MiMoMTPLayers` of MiMo-7B's own code; vLLM's `Qwen3_5MultiTokenPredictor` (@01d9980) and
llama.cpp's graph `qwen35::graph_mtp`. vLLM's MiMo zeroes the embedding at position 0; its own code
does not, and no more does this. Not here: further layers of a checkpoint that has several, and
layers with an embedding or an LM head of their own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_draft import EagleConfig, EagleDrafter, EagleHead, fill
from files.checkpoint import TensorSource
from files.config import EMBEDDING, LM_HEAD, open_source
from files.heads import check_sizes
from files.mtp import Mtp, need_mtp
from model import Transformer, layer_names
from options import log_note
from quantize import Quantization
from run.heads import draft_lm_head
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig
from steps import Beside, Project, Step

# tensors that may repeat the model's -> those of the model
SHARED = {
    "embed_tokens.weight": EMBEDDING,
    "lm_head.weight": LM_HEAD,
    "shared_head.head.weight": LM_HEAD,
}
MOST_LAYERS = 64  # that a checkpoint is searched for


class MtpHead(EagleHead):
    """The MTP layer of a model, as a head: the lists of steps around one layer."""

    def make_steps(self) -> None:
        """Make the lists. Writes: inputs, first, last."""
        model = self.config.model
        self.last = model.last()
        norm = self.last[0]
        left, right = ("normed", "h") if model.mtp.feature_first else ("h", "normed")
        self.first = (
            replace(norm, name="hidden_norm", source="features", to="normed"),
            replace(norm, name="embedding_norm", source="embedded"),
            Beside(left, right),
            Project("fc", 2 * model.dim, model.dim, to="stream"),
        )

    def first_layer(self, steps: list[Step]) -> list[Step]:
        """Return the steps of the layer as the model has them."""
        return steps


def mtp_names(mtp: Mtp) -> dict[str, tuple[str, ...]]:
    """Return our parameter's name -> the tensor of the checkpoint."""
    names = {f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in mtp.names.items()}
    steps = mtp.model.layer(0)
    return names | layer_names("layers.0.", mtp.layer.format(mtp.first), steps, mtp.model.names)


def check_shared(files: TensorSource, mtp: Mtp) -> None:
    """Check that an embedding or LM head beside the layer repeats the model's.

    Raises: ValueError for another one.
    """
    for ending, of_model in SHARED.items():
        own = mtp.prefix + ending
        repeated = of_model if of_model in files.readers else EMBEDDING  # they may be tied
        if own in files.readers and not torch.equal(files.read(own), files.read(repeated)):
            raise ValueError(
                f"{files.path}: the MTP layer's {own} differs from the model's {repeated}, and "
                "only shared ones are read; use another --draft, as ngram"
            )


def load_head(path: Path, target: Transformer, quant: Quantization | None = None) -> MtpHead:
    """Load the MTP layer of a checkpoint for its model, in the target's dtype and on its device.

    path: of the target, or of a GGUF file with the layer alone
    quant: quantize while loading, unless the files are quantized already
    Raises: ValueError where there is none, or one that cannot draft for this target.
    """
    files = open_source(path)
    mtp = need_mtp(path, files)
    check_sizes(path, mtp.model.dim, mtp.model.vocab_size, target.config)
    check_shared(files, mtp)
    if quant is not None and quant.is_blocks:
        files.keep_blocks()
    with torch.device("meta"):
        head = MtpHead(EagleConfig(mtp.model, fc_bias=False))
    further = tuple(mtp.layer.format(mtp.first + number) for number in range(1, MOST_LAYERS))
    if any(name.startswith(further) for name in (*files.readers, *files.quantized)):
        log_note(f"{path} holds several MTP layers; the first one drafts all levels")

    def is_unused(name: str) -> bool:
        is_shared = name.removeprefix(mtp.prefix) in SHARED
        return is_shared or name.startswith(further) or not name.startswith(mtp.prefix)

    quant = files.quant or quant
    fill(head, target, files, mtp_names(mtp), quant, is_unused)
    return head


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft mtp`. Raises: ValueError for a layer or a tree that does not fit."""
    quant = Quantization.of(config.quant_draft, config.group_size)
    head = load_head(Path(config.head), target, quant)
    lm_head = draft_lm_head(target, quant)
    drafted = (config.draft_tree, lm_head)
    return method_of(EagleDrafter(head, target, *drafted, children=config.child_rule))
