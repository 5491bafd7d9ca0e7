"""The one loop that trains heads, over recipes.

1. `Recipe` gives the parts that depend on the kind of head: how it is made, the scale of its first
   layer's inputs, its losses, how it drafts on sequences of the target, and its files.
2. `Training` holds a run: the frozen target computes the features of each batch (data.py),
   the head learns from them by the recipe's losses. Muon (Keller Jordan et al. 2024, as
   `torch.optim.Muon`) takes the layers' matrices, AdamW the rest.
3. Every `--eval_every` steps the head drafts chains on sequences of the target (acceptance.py), and
   is written if its tau is the highest so far; `--patience` of them in a row without one end the
   training. The state for `--resume` is saved four times as often, the best weights with it.
4. At the end the sharpness c of log softmax(c * scores) is fitted on the same sequences.
Not here: the data (data.py), losses (losses.py), recipes (train_eagle.py, train_block.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from backends import experts
from decode import build_cycles
from drafters import RootOnly
from files.io import replace_file, write_text
from files.texts import read_text_files
from files.weights import load_model
from model import DTYPES, ModelConfig, Transformer
from run.engine import Engine
from run.library import generate
from run.options import GenerateConfig, pick_device
from run.parsing import one_line_errors
from scripts.train import data
from scripts.train.acceptance import ALPHAS, Draft, Sequences, evaluate, fit_sharpness
from scripts.train.data import Batch, Dialogue, Example
from scripts.train.train_options import TrainOptions, resume_file

DECAY = 0.01  # of weights that are matrices
CLIP = 0.5  # of the gradient's norm
SAVES = 4  # of the state, for each evaluation
OWN_TOKENS = 128  # tokens that the target writes itself per evaluation prompt


class Inputs(NamedTuple):
    """The inputs of the losses of a step."""

    tokens: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, the tokens that count
    features: Tensor  # [B, T, (1 + aux_layers) F], the target's
    best: Tensor | None  # [B, T] int64, the target's best tokens, where a loss asks for them


class Recipe(NamedTuple):
    """The parts of training that depend on the kind of head."""

    program: str  # its command
    options: type[TrainOptions]
    # of (config, target, examples)
    make_head: Callable[[Any, Transformer, list[Example]], nn.Module]
    # of (head, embedded tokens, features) of a batch, before training. Writes: the head
    scale_inputs: Callable[[nn.Module, Tensor, Tensor], None]
    # of (config, head, target) -> of (inputs, the step's number) -> the losses `config.losses`
    losses_of: Callable[[Any, nn.Module, Transformer], Callable[..., tuple[Tensor, ...]]]
    draft: Draft
    save_head: Callable[[nn.Module, Any, dict], None]  # of (head, config, info)


# ------------------------------------------------------------------------------- optimizers


def multiplies_bf16(device: str) -> bool:
    """Return whether a device multiplies in bf16: a GPU, or a processor with such products."""
    own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return own or not device.startswith("cpu")


class Fp32Muon(torch.optim.Muon):
    """Muon with products in fp32: those of bf16 take 14 times as long where there are none."""

    @torch.no_grad()
    def step(self) -> None:
        """Step down the gradients, with Nesterov momentum. Writes: the parameters."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(momentum, group["momentum"])
                wide = x if len(x) <= x.shape[1] else x.T
                wide = wide / wide.norm().clamp(min=group["eps"])
                a, b, c = group["ns_coefficients"]
                for _ in range(group["ns_steps"]):
                    gram = wide @ wide.T
                    wide = torch.addmm(
                        wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a
                    )
                x = wide if len(x) <= x.shape[1] else wide.T
                rate = 0.2 * math.sqrt(max(x.shape)) * group["lr"]  # match_rms_adamw
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(x, alpha=-rate)


def make_optimizers(model: nn.Module, config: TrainOptions) -> list[torch.optim.Optimizer]:
    """Make AdamW for everything, or with `--optimizer muon` Muon for matrices, AdamW for the rest.

    LM heads and stacks of matrices are AdamW's. Source of Muon: Keller Jordan et al. 2024, with the
    update size of AdamW.
    """
    muon = config.optimizer == "muon"
    matrices = []
    tables = []
    for name, p in model.named_parameters():
        is_matrix = muon and p.dim() == 2 and not name.startswith("lm_head")
        if is_matrix:
            matrices.append(p)
        elif p.dim() > 1:
            tables.append(p)
    groups = [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    if tables:
        groups.append({"params": tables})
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=DECAY, fused=True
    )
    made = [adamw]
    if muon:
        kind = torch.optim.Muon if multiplies_bf16(config.device) else Fp32Muon
        rule = "match_rms_adamw"
        made.append(kind(matrices, lr=config.muon_lr, weight_decay=DECAY, adjust_lr_fn=rule))
    for group in [group for optimizer in made for group in optimizer.param_groups]:
        group["initial_lr"] = group["lr"]  # the peak of the schedule
    return made


def lr_share(position: float, steps: int, warmup: int) -> float:
    """Return the share of a peak rate: linear warm-up, then cosine down to 4 %."""
    if position < warmup:
        return (position + 1) / warmup
    done = (position - warmup) / max(1, steps - warmup)
    return 0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * done))


# ------------------------------------------------------------------------------- sequences


def make_engine(config: TrainOptions, target: Transformer) -> Engine:
    """Make an engine of the target alone, to write sequences."""
    options = GenerateConfig(
        checkpoint=config.checkpoint,
        draft="none",
        chat=config.chat or None,
        batch_size=16,
        device=config.device,
        compile=False,  # the target is also read layer by layer
    )
    tokenizer, template = read_text_files(Path(config.checkpoint), options)
    ends = tuple(target.config.eos_ids)
    if template:
        ends += tuple(template.stop_ids(tokenizer))
    context = min(2048, target.config.max_context)
    parts = {"config": options, "tokenizer": tokenizer, "template": template}
    return Engine(target, (RootOnly(),), context, ends, **parts)


def prepare(
    config: TrainOptions, target: Transformer, kept: list[Dialogue], held: list[Dialogue]
) -> tuple[list[Example], Sequences]:
    """Tokenize the dialogues, and let the target continue the prompts of those held out.

    Returns: training examples, and sequences to evaluate with
    Raises: ValueError when there is nothing to evaluate with.
    """
    engine = make_engine(config, target)
    examples, prompts = data.load_data(kept, held, engine.tokenizer, engine.template)
    prompts = [p for p in prompts if len(p) + OWN_TOKENS < engine.context]
    if not prompts:
        raise ValueError(
            "--data: nothing is held out to evaluate with (5 % by hash, prompts that fit); "
            "give more data"
        )
    fitting = build_cycles(replace(engine, context=max(map(len, prompts)) + OWN_TOKENS))
    answers = generate(fitting, prompts, max_new_tokens=OWN_TOKENS).tokens
    sequences = [(len(p), p + new) for p, new in zip(prompts, answers) if len(new) >= ALPHAS + 2]
    if not sequences:
        raise ValueError(
            f"--data: the target ends every held-out prompt within {ALPHAS + 1} tokens; "
            "is --chat right?"
        )
    return examples, sequences


def load_target(config: TrainOptions) -> Transformer:
    """Load the target: on a CPU in fp32."""
    dtype = torch.float32 if config.device.startswith("cpu") else None
    return load_model(Path(config.checkpoint), dtype, config.device)


# ------------------------------------------------------------------------------- training

# a mixture's features are computed under autocast, too, which knows torch's own operators only
for _device in ("cpu", "cuda"):
    torch.library.register_autocast(
        "gpt_eagle::experts_linear", _device, torch.bfloat16, lib=experts.lib
    )


class Training:
    """A run of training: its head, its data, and the state that it resumes from."""

    def __init__(
        self,
        config: TrainOptions,
        recipe: Recipe,
        target: Transformer,
        examples: list[Example],
        sequences: Sequences,
    ):
        """Make the head and its optimizers. Raises: ValueError for wrong options or data."""
        self.config = config
        # whether matmuls of a step are in `dtype`; otherwise they are in fp32
        self.is_narrow = config.dtype != "float32" and multiplies_bf16(config.device)
        kind = torch.device(config.device).type
        self.autocast = partial(torch.autocast, kind, DTYPES[config.dtype], self.is_narrow)
        self.recipe = recipe
        self.target = target
        self.examples = examples
        self.sequences = sequences
        self.head = recipe.make_head(config, target, examples)
        aux_layers = getattr(self.head, "aux_layers", ())
        self.features = data.Features(config, target, aux_layers, data.laid_out(examples, 0)[0])
        first = next(data.batches(examples, config))
        embedded = target.embedding(first.tokens.to(config.device)).float()
        recipe.scale_inputs(self.head, embedded, self.features.of(first)[0].float())
        self.losses = recipe.losses_of(config, self.head, target)
        self.optimizers = make_optimizers(self.head, config)
        self.state_file = Path(config.out, "resume.pt")
        self.weights = torch.tensor(list(config.losses.values()), device=config.device)
        self.done = 0  # steps
        self.seconds = 0.0  # of them, evaluations included
        self.curve: list[dict] = []
        # the weights with the highest tau, of equal ones the last
        self.best: dict[str, Tensor] = {}

    @property
    def position(self) -> float:
        """The position in the schedule, in steps: those done, or the share of --minutes spent."""
        config = self.config
        if not config.minutes:
            return self.done
        return min(self.seconds / (60 * config.minutes), 1) * config.steps

    @property
    def best_row(self) -> dict:
        """The row of the curve with the highest tau, of equal ones the last."""
        return max(reversed(self.curve), key=lambda row: row["tau"])

    def inputs(self, batch: Batch) -> Inputs:
        """Return the inputs of the losses of a batch. Writes: the file of features."""
        device = self.config.device
        with self.autocast():
            features, best = self.features.of(batch)
            if not self.is_narrow:
                features = features.float()  # a file may have kept them in bf16
        return Inputs(batch.tokens.to(device), batch.mask.to(device), features, best)

    def step(self, batch: Batch) -> Tensor:
        """Do a step. Writes: the head, the optimizers, `done`. Returns: the losses, unweighted."""
        config = self.config
        share = lr_share(self.position, config.steps, config.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
        inputs = self.inputs(batch)
        with self.autocast():
            losses = torch.stack(self.losses(inputs, self.done))
        (losses * self.weights).sum().backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return losses.detach()

    # --------------------------------------------------------------------------- evaluation

    def evaluate(self, row: dict) -> bool:
        """Evaluate the head, and add the row to the curve. Writes: curve, best, the head's files.

        Returns: whether patience is at its end.
        """
        row |= evaluate(self.head, self.target, self.sequences, self.recipe.draft)
        self.curve.append(row)
        losses = ", ".join(f"{name} {row[name]:.3f}" for name in self.config.losses if name in row)
        alphas = " ".join(f"{alpha:.3f}" for alpha in row["alpha"])
        tau = f"alpha {alphas}; tau {row['tau']:.3f}"
        tqdm.write(f"step {row['step']}: {losses or 'as it was'}; {tau}")
        if self.best_row is row:
            self.best = {name: value.clone() for name, value in self.head.state_dict().items()}
            if row["step"]:
                self.save_head()
        since = len(self.curve) - 1 - self.curve.index(self.best_row)
        gives_up = 0 < self.config.patience <= since
        if gives_up:
            tqdm.write(f"{since} evaluations in a row had no higher tau: training ends")
        return gives_up

    def save_head(self) -> None:
        """Write the head's files."""
        config = asdict(self.config) | {"steps": self.curve[-1]["step"]}
        parameters = sum(parameter.numel() for parameter in self.head.parameters())
        info = {"config": config, "parameters": parameters, "curve": self.curve}
        self.recipe.save_head(self.head, self.config, info | {"best": self.best_row})

    def finish(self) -> None:
        """Take the best weights, fit their sharpness, and write the head's files."""
        self.head.load_state_dict(self.best)
        tqdm.write(f"the head is that of step {self.best_row['step']}, whose tau is the highest")
        sharpness = fit_sharpness(self.head, self.target, self.sequences, self.recipe.draft)
        self.head.config = replace(self.head.config, sharpness=sharpness)
        tqdm.write(f"sharpness {sharpness}")
        self.save_head()
        self.state_file.unlink(missing_ok=True)

    # --------------------------------------------------------------------------- resume

    def save(self) -> None:
        """Save the state that a stopped run resumes from."""
        state = {
            "weights": self.head.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "best": self.best,
            "step": self.done,
            "seconds": self.seconds,
            "curve": json.dumps(self.curve),
        }
        replace_file(self.state_file, lambda path: torch.save(state, path))

    def load(self) -> None:
        """Load a state of `save`. Raises: ValueError when there is none."""
        file = resume_file(Path(self.config.out), True)
        state = torch.load(file, map_location=self.config.device, weights_only=True)
        self.head.load_state_dict(state["weights"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.best = state["best"]
        self.done = state["step"]
        self.seconds = state["seconds"]
        self.curve = json.loads(state["curve"])


def crosses(before: float, after: float, unit: float) -> bool:
    """Return whether a multiple of the unit is passed, or reached."""
    return after // unit > before // unit


def train(made: Training) -> None:
    """Train to the end. Writes: `config.out`."""
    config = made.config
    if config.resume:
        made.load()
    elif config.is_trained:
        made.evaluate({"step": 0, "seconds": 0.0})  # an existing head, before its first step
    feed = data.batches(made.examples, config, made.done)
    recent = []
    clock_s = None  # at the end of the step before; the first one of a process compiles
    bar = tqdm(initial=made.done, total=config.steps, unit="step", mininterval=5, disable=None)
    ended = made.position >= config.steps
    while not ended:
        before = made.position
        recent.append(made.step(next(feed)))
        now_s = time.perf_counter()
        made.seconds += 0.0 if clock_s is None else now_s - clock_s
        clock_s = now_s
        bar.total = round(made.done * config.steps / made.position) if made.position else None
        bar.update()
        ended = made.position >= config.steps
        if ended or crosses(before, made.position, config.eval_every):
            means = dict(zip(config.losses, torch.stack(recent).mean(0).tolist()))
            recent = []
            gives_up = made.evaluate({"step": made.done, **means, "seconds": made.seconds})
            ended = ended or gives_up
        if not ended and crosses(before, made.position, config.eval_every / SAVES):
            made.save()
    made.finish()
    bar.close()
    print(f"wrote {config.out}")


def ready(config: TrainOptions, recipe: Recipe) -> Training:
    """Read the data, load the target, and make the head. Writes: `config.out`.

    Raises: ValueError for wrong options or data.
    """
    config.check()
    kept, held = data.read_data(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    target = load_target(config)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    return Training(config, recipe, target, *prepare(config, target, kept, held))


def run(recipe: Recipe, config: TrainOptions) -> None:
    """Run the command of a recipe."""
    with one_line_errors(recipe.program):
        train(ready(replace(config, device=pick_device(config.device)), recipe))


# ------------------------------------------------------------------------------- files


def plain_layers(target: Transformer, n_layers: int, ffn_dim: int) -> ModelConfig:
    """Return the config of a head's layers: LLaMA's in the target's sizes, as published heads have.

    They are dense, also for a mixture of experts. ffn_dim: 0: the target's
    """
    c = target.config
    shared = {each.name: getattr(c, each.name) for each in fields(ModelConfig)}
    return replace(
        ModelConfig(**shared),
        n_layers=n_layers,
        ffn_dim=ffn_dim or c.ffn_dim,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        n_experts=0,
        experts_per_token=0,
        rope_scaling=None,  # the official loader knows none in a head
    )


def shape_keys(c: ModelConfig) -> dict:
    """Return the keys of config.json that name the shape of a model."""
    return {
        "hidden_act": "silu",
        "hidden_size": c.dim,
        "intermediate_size": c.ffn_dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": c.max_context,
        "tie_word_embeddings": False,
    }


def write_checkpoint(out: Path, tensors: dict[str, Tensor], config: dict, info: dict) -> None:
    """Write model.safetensors, config.json and training.json."""
    replace_file(
        out / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"})
    )
    write_text(str(out / "config.json"), json.dumps(config, indent=2))
    write_text(str(out / "training.json"), json.dumps(info, indent=1))
