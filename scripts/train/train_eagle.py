"""Train an EAGLE draft head for any target, by the paper's recipe.

    python scripts/train/train_eagle.py --checkpoint DIR --data chats.jsonl --chat vicuna --out HEAD
    python scripts/train/train_eagle.py --version 3 --out HEAD ...          # EAGLE-3

Our flags are in benchmarks/TRAINING.md. The head learns the target's distribution by soft
cross-entropy, and in versions 1 and 2 the next feature by SmoothL1, over one step of a chain or
several (losses.py). Data are in data.py, the loop is in training.py.
Sources: EAGLE (arXiv 2401.15077), section 4; EAGLE-3; HASS (`--unroll`).
Differences from the official code: clipping is by norm, noise does not depend on the length, `fc`
is trained over inputs of equal scale, and examples are laid end to end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.head_kinds import head_kind
from files.io import check_directory
from options import require
from run.parsing import option, parse
from scripts.train.train_options import TrainOptions


@dataclass
class TrainConfig(TrainOptions):
    """Options of training an EAGLE head."""

    version: int = option(1, "of the head: 1, which is 2 as well, or 3", (1, 3))
    draft_vocab: int = option(
        0, "tokens that it drafts, the most frequent; 0: all, or 32000 for version 3", least=0
    )
    token_weight: float = option(
        0.1, "of version 1's soft cross-entropy; that of SmoothL1 between features is 1"
    )
    unroll: int = option(
        0, "steps of a chain that the loss has; 0: 1 for version 1, 7 for version 3", least=0
    )
    ffn_dim: int = option(0, "of the head's layer; 0: the target's", least=0)
    init: str = option(
        "random",
        "random, feature (fc starts as the identity on the feature), or a head's directory",
    )

    def check(self) -> None:
        """Check the options. Raises: ValueError also for one of another version, or no head."""
        super().check()
        if self.is_trained:
            check_directory(Path(self.init))
            kind = head_kind(Path(self.init))
            fault = f"--init: {self.init} holds a head of the kind {kind}; name an EAGLE head"
            require(kind == "eagle", fault)
        is_usual = self.version == 1 or self.token_weight == TrainConfig.token_weight
        require(is_usual, "--token_weight belongs to heads of version 1; leave it out")

    @property
    def is_trained(self) -> bool:
        """Return whether the head at the start is an existing one."""
        return self.init not in ("random", "feature")

    @property
    def loss_steps(self) -> int:
        """Steps of a chain that the loss has."""
        return self.unroll or losses.STEPS[self.version]

    @property
    def losses(self) -> dict[str, float]:
        """The names of the losses in the curve, and their weights."""
        kinds = {"entropy": 1.0}
        if self.version == 1:
            kinds = {"entropy": self.token_weight, "regression": 1.0}
        weights = {}
        for kind, weight in kinds.items():
            for s in range(self.loss_steps):
                weights[f"{kind} {s}"] = weight * losses.DECAY**s
        return weights


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(TrainConfig, "train_eagle.py", __doc__) if __name__ == "__main__" else None

import torch
from torch import Tensor

from drafters import DraftVocab
from eagle_draft import EagleConfig, EagleHead, load_head
from files.config import read_raw
from files.eagle_variants import Eagle3Variant, VariantHead
from files.heads import DRAFT_INPUTS, head_files
from files.weights import export_weights
from model import DTYPES, ModelConfig, Transformer
from reference import TORCH, use_backend
from run.heads import rows_of
from scripts.train import losses, training
from scripts.train.acceptance import chains
from scripts.train.data import Example, default_aux_layers

NOISE = 0.1  # features of version 1 get U(-NOISE, NOISE)


def losses_of(
    config: TrainConfig, head: EagleHead, target: Transformer
) -> Callable[[training.Inputs, int], tuple[Tensor, ...]]:
    """Return a function of the inputs and the step's number -> `config.losses`."""
    rows = copy(target.lm_head)
    use_backend(rows, TORCH)  # gradients of a head without one pass through it
    if head.vocab:
        rows = rows_of(rows, head.vocab.ids)
    options = losses.LossOptions(
        head.embedding or target.embedding, head.lm_head or rows, rows, config.loss_steps
    )
    compute = torch.compile(losses.unrolled_losses)
    generator = torch.Generator(config.device)

    def of_step(inputs: training.Inputs, step: int) -> tuple[Tensor, ...]:
        features = inputs.features
        noise = 0.0
        if config.version == 1:
            generator.manual_seed(config.seed * 1_000_003 + step)  # the same in a resumed run
            uniform = torch.rand(features.shape, generator=generator, device=config.device)
            noise = ((uniform * 2 - 1) * NOISE).to(features.dtype)
        return compute(head, target, inputs, options, noise)

    return of_step


# ------------------------------------------------------------------------------- heads


def make_head(config: TrainConfig, target: Transformer, examples: list[Example]) -> EagleHead:
    """Make a head shaped like a layer of the target, or load one to go on with.

    examples: their marked tokens choose the draft vocabulary
    Raises: ValueError for an existing head that this version's training cannot go on with.
    """
    if config.is_trained:
        return existing_head(config, target)
    size = target.config.vocab_size
    model = training.plain_layers(target, 1, config.ffn_dim)
    none = torch.empty(0, dtype=torch.long)
    ids = torch.cat([none, *(example.ids[example.mask] for example in examples)])
    kept = config.draft_vocab or (size if config.version == 1 else 32000)
    vocab = frequent_tokens(ids, size, kept)
    if vocab:
        share = torch.isin(ids, vocab.ids).float().mean().item()
        vocab = vocab._replace(ids=vocab.ids.to(config.device))
        print(
            f"the head drafts {vocab.drafted} of {size} tokens, "
            f"{100 * share:.2f} % of those trained on"
        )
    from_target = config.init == "feature"
    if config.version == 3:
        return new_head(model, target, vocab, from_target).to(target.norm.weight.device)
    head = EagleHead(EagleConfig(model))
    head.vocab = vocab
    if from_target:
        start_at_feature(head, target)
        torch.nn.init.zeros_(head.fc.bias)
    return head.to(target.norm.weight.device)


@torch.no_grad()
def start_at_feature(head: EagleHead, target: Transformer) -> None:
    """Let `fc` be near the identity on the last feature. Writes: its weight."""
    dim = target.config.dim
    head.fc.weight.normal_(std=0.02)
    head.fc.weight[:, -dim:] += torch.eye(dim)


def frequent_tokens(ids: Tensor, size: int, kept: int) -> DraftVocab | None:
    """Return the `kept` most frequent of the training tokens, of equally frequent ones the lowest.

    ids: [M] int64, every token that is trained on
    Returns: None for all `size` of them.
    """
    if kept >= size:
        return None
    order = ids.bincount(minlength=size).sort(descending=True, stable=True).indices
    return DraftVocab(size, order[:kept].sort().values)


def new_head(
    model: ModelConfig, target: Transformer, vocab: DraftVocab | None, from_target: bool
) -> VariantHead:
    """Make a head of version 3 with layers of the shape `model`.

    from_target: start with `fc` near the identity on the last aux hidden states, and with the
        target's last norm and LM head
    """
    aux_layers = default_aux_layers(target.config.n_layers)
    kept = vocab.drafted if vocab else model.vocab_size
    eagle3 = Eagle3Variant(aux_layers, target.config.dim, kept, lm_head="lm_head.weight")
    head = VariantHead(EagleConfig(model, fc_bias=False, eagle3=eagle3))
    head.vocab = vocab
    if from_target:
        start_at_feature(head, target)
        weight = target.lm_head.dequantize()
        with torch.no_grad():
            head.output_norm.weight.copy_(target.norm.weight)
            head.lm_head.weight.copy_(weight[vocab.ids.to(weight.device)] if vocab else weight)
    return head


def existing_head(config: TrainConfig, target: Transformer) -> EagleHead:
    """Load the head in `config.init`.

    Raises: ValueError for one of the other version, or without an official layout.
    """
    path = Path(config.init)
    head = load_head(path, target, source=head_files(path, "none")).float()
    use_backend(head, TORCH)  # which has gradients
    eagle3 = head.config.eagle3
    version = 3 if eagle3 else 1
    require(
        version == config.version,
        f"--init: {config.init} is a head of version {version}; train it with --version {version}",
    )
    require(
        not config.draft_vocab,
        f"--draft_vocab: {config.init} has a draft vocabulary already; leave it out",
    )
    require(
        not eagle3 or eagle3.last_norm != "fed",
        f"--init: {config.init} feeds back its normed output, which the official layout cannot say",
    )
    head.requires_grad_(True)
    if eagle3:
        # an LM head that was tied to an embedding is trained by itself; an embedding is not trained
        names = {"lm_head": "lm_head.weight" if eagle3.lm_head else ""}
        if head.embedding is None:  # it is the target's
            names["embedding"] = ""
        else:
            head.embedding.requires_grad_(False)
        head.config = replace(head.config, eagle3=replace(eagle3, **names))
    return head


# ------------------------------------------------------------------------------- files


def vocab_layout(head: EagleHead) -> dict[str, Tensor]:
    """Return the tensors that name the draft vocabulary in the official layout of version 3."""
    if head.vocab is None:
        return {}
    ids = head.vocab.ids.cpu()
    reached = torch.zeros(head.vocab.size, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": reached}


def keys_of(head: VariantHead) -> dict:
    """Return the further keys of version 3 in the official config.json."""
    eagle3 = head.config.eagle3
    keys = {"draft_vocab_size": eagle3.draft_vocab}
    if eagle3.aux_layers:
        keys["eagle_aux_hidden_state_layer_ids"] = list(eagle3.aux_layers)
    optional = {  # key: value, default
        "use_aux_hidden_state": (bool(eagle3.aux_layers), True),
        "norm_output": (eagle3.last_norm == "logits", True),
        "norm_before_residual": (eagle3.norm_before_residual, False),
        "fc_norm": (eagle3.fc_norm, False),
        "norm_before_fc": (eagle3.norm_before_fc, False),
        "target_hidden_size": (eagle3.target_dim, head.config.model.dim),
    }
    return keys | {key: value for key, (value, default) in optional.items() if value != default}


def save_head(head: EagleHead, config: TrainConfig, info: dict) -> None:
    """Write the official layout: config.json and model.safetensors."""
    c = head.config.model
    plain = losses.plain_copy(head)
    tensors = export_weights(plain, head.weight_names(), c, DTYPES[config.dtype])
    keys = training.shape_keys(c) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": read_raw(Path(config.checkpoint)).get("bos_token_id"),
        "eos_token_id": next(iter(c.eos_ids), None),
        "torch_dtype": config.dtype,
        "bias": head.config.fc_bias,
        "draft_sharpness": head.config.sharpness,
    }
    keys |= keys_of(head) if head.config.eagle3 else {"draft_inputs": DRAFT_INPUTS}
    if c.qkv_bias:
        keys["qkv_bias"] = True
    training.write_checkpoint(Path(config.out), tensors | vocab_layout(head), keys, info)


EAGLE = training.Recipe(
    "train_eagle.py", TrainConfig, make_head, losses.scale_inputs, losses_of, chains, save_head
)


def main() -> None:
    training.run(EAGLE, COMMAND or parse(TrainConfig, EAGLE.program, __doc__))


if __name__ == "__main__":
    main()
