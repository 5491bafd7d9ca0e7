"""Train an EAGLE draft head for any target, by the paper's recipe.

    python scripts/train/train_eagle.py --checkpoint DIR --data chats.jsonl --chat vicuna --out HEAD
    python scripts/train/train_eagle.py --version 3 --out HEAD ...          # EAGLE-3

Our flags are in benchmarks/TRAINING.md.

1. Data: dialogues (`turns` and `answers`, as generate_answers.py writes them, or ShareGPT's
   `conversations`), or texts (`text`). The loss counts the answers of dialogues and all of a text.
2. The frozen target computes the features of each batch. With `--features` they go to a file, for
   later epochs and runs, which take the same batches in another order.
3. The head learns the target's distribution by soft cross-entropy, and in versions 1 and 2 the next
   feature by SmoothL1, over one step of a chain or several (losses.py).
4. Every `--eval_every` steps the head drafts chains on sequences of the target (acceptance.py), and
   is written if its tau is the highest so far; `--patience` of them in a row without one end the
   training. The state for `--resume` is saved four times as often. At the
   end the sharpness c of log softmax(c * scores) is fitted by maximum likelihood on the same
   sequences.
Sources: EAGLE (arXiv 2401.15077), section 4; EAGLE-3; HASS (`--unroll`).
Differences from the official code: clipping is by norm, noise does not depend on the length, `fc`
is trained over inputs of equal scale, and examples are laid end to end and split at `seq_len`:
nothing is padding, and a position may see the end of the example before its own.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.head_kinds import head_kind
from files.io import check_directory, read_jsonl, replace_file
from options import require
from run.options import GenerateConfig, pick_device
from run.parsing import one_line_errors, option, parse
from scripts.train.train_options import TrainOptions, resume_file


@dataclass
class TrainConfig(TrainOptions):
    """Options of training an EAGLE head."""

    version: int = option(1, "of the head: 1, which is 2 as well, or 3", (1, 3))
    draft_vocab: int = option(
        0, "tokens that it drafts, the most frequent; 0: all, or 32000 for version 3", least=0
    )
    noise: float = option(0.1, "features get U(-noise, noise)")
    feature_weight: float = option(1.0, "of SmoothL1 between features")
    token_weight: float = option(0.1, "of the soft cross-entropy")
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
        if self.version == 1:
            return
        for name in OF_VERSION_1:
            if getattr(self, name) != getattr(TrainConfig, name):
                raise ValueError(f"--{name} belongs to heads of version 1; leave it out")

    @property
    def is_trained(self) -> bool:
        """Return whether the head at the start is an existing one."""
        return self.init not in ("random", "feature")

    @property
    def recipe_steps(self) -> int:
        """Steps of a chain that the loss has."""
        return self.unroll or head_training.STEPS[self.version]

    @property
    def losses(self) -> dict[str, float]:
        """The names of the losses in the curve, and their weights."""
        kinds = {"entropy": 1.0}
        if self.version == 1:
            kinds = {"entropy": self.token_weight, "regression": self.feature_weight}
        weights = {}
        for kind, weight in kinds.items():
            for s in range(self.recipe_steps):
                weights[f"{kind} {s}"] = weight * head_training.DECAY**s
        return weights


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(TrainConfig, "train_eagle.py", __doc__) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn
from tqdm import tqdm

from backends.library import lib
from decode import build_cycles
from drafters import RootOnly
from eagle_draft import EagleConfig, EagleHead, load_head
from files.chat import CHAT_TEMPLATES, ChatTemplate, chat_template, template_text
from files.config import read_raw
from files.heads import DRAFT_INPUTS, head_files
from files.tokenizer import Tokenizer
from files.weights import export_weights, load_model
from model import DTYPES, ModelConfig, Transformer
from reference import TORCH, use_backend
from run.engine import Engine
from run.heads import rows_of
from run.scheduler import Request, Scheduler
from run.session import common_prefix
from scripts.train import losses as head_training
from scripts.train import training
from scripts.train.acceptance import ALPHAS, DraftedChains, chains, evaluate, fit_sharpness
from scripts.train.feature_cache import Features
from scripts.train.workers import Workers

SAVES = 4  # of the state, for each evaluation
OWN_TOKENS = 128  # tokens that the target writes itself per evaluation prompt
# options that other versions do not have
OF_VERSION_1 = ("noise", "feature_weight", "token_weight")


# ------------------------------------------------------------------------------- data


def held_out(name: str, share: float) -> bool:
    """Return whether a document is of the held-out part, by the hash of its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < share * 2**32


class Dialogue(NamedTuple):
    """Turns and their answers; a text is a single answer without a turn."""

    turns: list[str]
    answers: list[str]
    ended: bool = True  # the last answer is complete, and the end of sequence follows it
    answer_ids: list[int] | None = None  # the only answer as the target wrote it, its end included

    @staticmethod
    def of(
        turns: list[str],
        answers: list[str],
        ended: bool = True,
        answer_ids: list[int] | None = None,
    ) -> Dialogue:
        """Make a dialogue without white space around its answers; texts stay as they are.

        Some templates drop such white space, and others keep it.
        """
        if turns:
            answers = [answer.strip() for answer in answers]
        return Dialogue(turns, answers, ended, answer_ids)

    @property
    def name(self) -> str:
        """The text by which it is held out, or not."""
        return self.turns[0] if self.turns else self.answers[0][:200]

    @property
    def held_out(self) -> bool:
        return held_out(self.name, 0.05)


class Example(NamedTuple):
    """One sequence; `mask` marks the tokens to train on (those of answers, or all)."""

    ids: Tensor  # [T] int64
    mask: Tensor  # [T] bool

    @staticmethod
    def of(ids: list[int], mask: list[bool]) -> Example:
        return Example(torch.tensor(ids), torch.tensor(mask))


def read_dialogues(file: Path) -> list[Dialogue]:
    """Read the dialogues of a JSONL file, but for those without an answer.

    Raises: ValueError for another form.
    """
    dialogues = []
    for number, row in enumerate(read_jsonl(file, "--data"), 1):
        try:
            dialogues.append(_dialogue(row))
        except (KeyError, TypeError):
            form = "`turns` and `answers`, `conversations`, or `text`"
            raise ValueError(f"--data: {file} row {number} must have {form}") from None
    kept = [d for d in dialogues if d.answers and all(d.turns) and all(d.answers)]
    left_out = len(dialogues) - len(kept)
    print(f"{file}: {len(kept)} dialogues or texts, {left_out} left out for want of an answer")
    return kept


def _dialogue(row: dict) -> Dialogue:
    if "conversations" in row:
        return _sharegpt(row["conversations"])
    if "text" in row:
        turns = []
        answers = [row["text"]]
    else:
        turns = row["turns"]
        answers = row["answers"]
    pairs = min(len(turns), len(answers)) if turns else 1
    ids = row.get("answer_ids") if len(turns) == 1 else None
    return Dialogue.of(turns[:pairs], answers[:pairs], row.get("ended", True), ids)


def _sharegpt(messages: list[dict]) -> Dialogue:
    """Pair human and model, from the first human message to where the alternation breaks."""
    pairs = [(m["from"] in ("human", "user"), m["value"]) for m in messages]
    start = next((i for i, (is_human, _) in enumerate(pairs) if is_human), len(pairs))
    turns = []
    answers = []
    for (is_human, turn), (is_turn, answer) in zip(pairs[start::2], pairs[start + 1 :: 2]):
        if not is_human or is_turn:
            break
        turns.append(turn)
        answers.append(answer)
    return Dialogue.of(turns, answers)


def marked_tokens(
    dialogue: Dialogue, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[list[int], list[bool]]:
    """Tokenize a dialogue and mark its answers; a text is marked whole.

    Returns: the fields of an `Example`.
    Raises: ValueError when the answer's ids are another tokenizer's.
    """
    turns, answers, ended, written = dialogue
    if written:  # the target does not always choose the tokens that its tokenizer would
        if tokenizer.decode(written).strip() != answers[0]:
            wrong = f"--data: answer_ids are not the tokens of the answer {answers[0][:40]!r}"
            raise ValueError(f"{wrong}; was it another --checkpoint that wrote them?")
        prompt = template.encode(tokenizer, turns, [])
        return prompt + written, [False] * len(prompt) + [True] * len(written)
    end = list(tokenizer.eos_ids[:1]) if ended else []
    if not turns:
        ids = tokenizer.encode(answers[0]) + end
        return ids, [True] * len(ids)

    turns = list(map(tokenizer.as_text, turns))  # as in a chat

    # up to turn t and, with an answer, to its end
    def encode(t: int, answer: str = "") -> list[int]:
        text = template.render(turns[: t + 1], answers[:t])
        if answer:
            text += template.reply + answer
        return tokenizer.encode(text, bos=template.bos, special=True)

    ids = encode(len(turns) - 1, answers[-1]) + end
    mask = [False] * len(ids)
    for t, answer in enumerate(answers):
        # the common prefix finds the answer's span even where a token straddles its border
        begin = common_prefix(encode(t), ids)
        stop = common_prefix(encode(t, answer), ids) + 1
        mask[begin:stop] = [True] * len(mask[begin:stop])
    return ids, mask


def load_data(config: TrainOptions, engine: Engine) -> tuple[list[Example], list[list[int]]]:
    """Read the data. Returns: training examples, and held-out prompts for the evaluation."""
    tokenizer = engine.tokenizer
    template = engine.template
    dialogues = [d for file in config.data.split(",") for d in read_dialogues(Path(file))]
    if any(d.turns for d in dialogues) and template is None:
        raise ValueError(
            "--data: dialogues need a chat template; name one of "
            f"{', '.join(CHAT_TEMPLATES)} with --chat"
        )
    kept = [d for d in dialogues if not d.held_out]
    by_name = {d.name: d for d in dialogues if d.held_out}  # a prompt may have several answers
    # in an order without regard to the file's, whose parts may be of one kind
    order = sorted(by_name, key=lambda name: hashlib.sha256(name.encode()).digest())
    held = [by_name[name] for name in order[: config.eval_prompts]]
    if kept and not held:  # of a few dialogues, the hash may choose none
        held = [kept.pop()]
    tokenize = Workers(lambda dialogue: marked_tokens(dialogue, tokenizer, template))
    bar = tqdm(tokenize.map(kept), "tokenize", len(kept), unit="dialogue", disable=None)
    examples = [Example.of(*marked) for marked in bar]
    prompts = []
    for d in held:
        if d.turns:
            prompts.append(template.encode(tokenizer, d.turns[:1], []))
        else:
            ids = tokenizer.encode(d.answers[0])
            prompts.append(ids[: len(ids) // 2 or 1])
    return examples, prompts


def laid_out(examples: list[Example], seed: int) -> tuple[Tensor, Tensor]:
    """Lay all examples end to end, in a random order, so that nothing is padding.

    Returns: ids and mask, [M] each.
    """
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([examples[e].ids for e in order.tolist()])
    mask = torch.cat([examples[e].mask for e in order.tolist()])
    return ids, mask


def batches(examples: list[Example], config: TrainOptions, skip: int):
    """Yield shuffled batches without end.

    With `--features` every epoch has the same batches, in another order, whatever the seed.
    skip: batches to pass over, to resume
    Yields: ids and mask, [B, T] each, and the batch's number within its epoch.
    Raises: ValueError for less data than one batch.
    """
    size = config.batch_size * config.seq_len
    epoch = 0
    while True:
        seed = config.seed * 1000 + epoch
        ids, mask = laid_out(examples, 0 if config.features else seed)
        if len(ids) < size:
            raise ValueError(
                f"the data hold {len(ids)} tokens, one batch needs {size}; "
                "lower --batch_size or --seq_len"
            )
        numbers = torch.arange(len(ids) // size)[: config.epoch_batches or None]
        if config.features:
            numbers = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
        for number in numbers.tolist():
            if skip > 0:
                skip -= 1
                continue
            part = slice(number * size, (number + 1) * size)
            shape = (config.batch_size, config.seq_len)
            yield ids[part].view(shape), mask[part].view(shape), number
        epoch += 1


# ------------------------------------------------------------------------------- loss


def losses_of(
    config: TrainConfig, head: EagleHead, target: Transformer
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of (tokens, mask, features, best) and the step's number -> `config.losses`.

    best: the target's best tokens, as in `unrolled_losses`
    """
    rows = copy(target.lm_head)
    use_backend(rows, TORCH)  # gradients of a head without one pass through it
    if head.vocab:
        rows = rows_of(rows, head.vocab.ids)
    recipe = head_training.LossOptions(
        head.embedding or target.embedding, head.lm_head or rows, rows, config.recipe_steps
    )
    compute = torch.compile(head_training.unrolled_losses)
    generator = torch.Generator(config.device)

    def losses(batch: tuple[Tensor, ...], step: int) -> tuple[Tensor, ...]:
        features = batch[2]
        noise = 0.0
        if config.version == 1:
            generator.manual_seed(config.seed * 1_000_003 + step)  # the same in a resumed run
            uniform = torch.rand(features.shape, generator=generator, device=config.device)
            noise = ((uniform * 2 - 1) * config.noise).to(features.dtype)
        return compute(head, target, batch, recipe, noise)

    return losses


# ------------------------------------------------------------------------------- training


def make_head(config: TrainConfig, target: Transformer, examples: list[Example]) -> EagleHead:
    """Make a head shaped like a layer of the target, or load one to go on with.

    examples: their marked tokens choose the draft vocabulary
    Raises: ValueError for an existing head that this version's training cannot go on with.
    """
    if config.is_trained:
        return existing_head(config, target)
    c = target.config
    # LLaMA's layer in the target's sizes, as heads of published layouts have it
    shared = {each.name: getattr(c, each.name) for each in fields(ModelConfig)}
    model = replace(
        ModelConfig(**shared),
        n_layers=1,
        ffn_dim=config.ffn_dim or c.ffn_dim,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        n_experts=0,  # a head is dense, also for a mixture of experts
        experts_per_token=0,
        rope_scaling=None,  # the official loader knows none in a head
    )
    none = torch.empty(0, dtype=torch.long)
    ids = torch.cat([none, *(example.ids[example.mask] for example in examples)])
    kept = config.draft_vocab or (c.vocab_size if config.version == 1 else 32000)
    vocab = head_training.frequent_tokens(ids, c.vocab_size, kept)
    if vocab:
        share = torch.isin(ids, vocab.ids).float().mean().item()
        vocab = vocab._replace(ids=vocab.ids.to(config.device))
        print(
            f"the head drafts {vocab.drafted} of {c.vocab_size} tokens, "
            f"{100 * share:.2f} % of those trained on"
        )
    if config.version == 3:
        head = head_training.new_head(model, target, vocab, config.init == "feature")
        return head.to(target.norm.weight.device)
    head = EagleHead(EagleConfig(model))
    head.vocab = vocab
    if config.init == "feature":
        with torch.no_grad():
            head.fc.weight.normal_(std=0.02)
            head.fc.weight[:, c.dim :] += torch.eye(c.dim)
            head.fc.bias.zero_()
    return head.to(target.norm.weight.device)


def existing_head(config: TrainConfig, target: Transformer) -> EagleHead:
    """Load the head in `config.init`.

    Raises: ValueError for one of the other version, or without an official layout.
    """
    path = Path(config.init)
    head = load_head(path, target, source=head_files(path, "none")).float()
    use_backend(head, TORCH)  # which has gradients
    eagle3 = head.config.eagle3
    version = 3 if eagle3 else 1
    if version != config.version:
        raise ValueError(
            f"--init: {config.init} is a head of version {version}; "
            f"train it with --version {version}"
        )
    if config.draft_vocab:
        raise ValueError(
            f"--draft_vocab: {config.init} has a draft vocabulary already; leave it out"
        )
    if eagle3 and eagle3.last_norm == "fed":
        raise ValueError(
            f"--init: {config.init} feeds back its normed output, "
            "which the official layout cannot say"
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


def save_head(head: EagleHead, config: TrainConfig, info: dict) -> None:
    """Write the official layout: config.json and model.safetensors."""
    out = Path(config.out)
    c = head.config.model
    tensors = export_weights(
        head_training.plain_copy(head), head.weight_names(), c, DTYPES[config.dtype]
    )
    tensors |= head_training.vocab_layout(head)
    keys = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    keys |= training.shape_keys(c) | {
        "bos_token_id": read_raw(Path(config.checkpoint)).get("bos_token_id"),
        "eos_token_id": next(iter(c.eos_ids), None),
        "torch_dtype": config.dtype,
        "bias": head.config.fc_bias,
        "draft_sharpness": head.config.sharpness,
    }
    if head.config.eagle3:
        keys |= head_training.keys_of(head)
    else:
        keys["draft_inputs"] = DRAFT_INPUTS
    if c.qkv_bias:
        keys["qkv_bias"] = True
    training.write_checkpoint(out, tensors, keys, info)


class TrainingParts(NamedTuple):
    """The parts of training that depend on the kind of head."""

    # of (config, target, examples)
    make_head: Callable[[Any, Transformer, list[Example]], nn.Module]
    # of (config, target, head, examples, features), before training. Writes: the head
    prepare: Callable[..., None]
    losses_of: Callable[..., Callable]  # see `losses_of`
    draft: Callable[..., DraftedChains]  # see acceptance.py
    save_head: Callable[[nn.Module, Any, dict], None]  # of (head, config, info)


def own_sequences(
    engine: Engine, prompts: list[list[int]], length: int
) -> list[tuple[int, list[int]]]:
    """Let the target continue the prompts greedily. Returns: (prompt length, all tokens) each."""
    requests = [
        Request.of(engine, ids, limit=length, noise_id=(number, 0))
        for number, ids in enumerate(prompts)
    ]
    with closing(Scheduler(engine)) as scheduler:
        for _ in scheduler.run(requests):
            pass
    return [(len(each.prompt), each.prompt + each.tokens) for each in requests]


def make_engine(config: TrainOptions, target: Transformer) -> Engine:
    """Make an engine of the target alone, to write sequences."""
    path = Path(config.checkpoint)
    tokenizer = Tokenizer.load(path)
    has_template = config.chat or template_text(path) is not None
    template = chat_template(path, tokenizer, config.chat) if has_template else None
    ends = tuple(target.config.eos_ids)
    if template:
        ends += tuple(template.stop_ids(tokenizer))
    options = GenerateConfig(
        checkpoint=config.checkpoint,
        draft="none",
        batch_size=16,
        device=config.device,
        compile=False,  # the target is also read layer by layer
    )
    context = min(2048, target.config.max_context)
    return build_cycles(
        Engine(
            target,
            (RootOnly(),),
            context,
            ends,
            config=options,
            tokenizer=tokenizer,
            template=template,
        )
    )


def prepare(
    config: TrainOptions, target: Transformer
) -> tuple[list[Example], list[tuple[int, list[int]]]]:
    """Read the data, and let the target continue the held-out prompts. Writes: `config.out`.

    Returns: training examples; sequences, as from `own_sequences`
    Raises: ValueError when there is nothing to evaluate with.
    """
    engine = make_engine(config, target)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    examples, prompts = load_data(config, engine)
    prompts = [p for p in prompts if len(p) + OWN_TOKENS < engine.context]
    if not prompts:
        raise ValueError(
            "--data: nothing is held out to evaluate with (5 % by hash, prompts that fit); "
            "give more data"
        )
    fitting = replace(engine, context=max(map(len, prompts)) + OWN_TOKENS)
    sequences = own_sequences(fitting, prompts, OWN_TOKENS)
    sequences = [(begin, ids) for begin, ids in sequences if len(ids) >= begin + ALPHAS + 2]
    if not sequences:
        raise ValueError(
            f"--data: the target ends every held-out prompt within {ALPHAS + 1} tokens; "
            "is --chat right?"
        )
    return examples, sequences


def scale_first_layer(
    config: TrainConfig,
    target: Transformer,
    head: EagleHead,
    examples: list[Example],
    features: Features,
) -> None:
    """Scale the inputs of the head's first layer by the first batch. Writes: head.fc."""
    tokens, _, number = next(batches(examples, config, 0))
    tokens = tokens.to(config.device)
    embedded = target.embedding(tokens).float()
    head_training.scale_inputs(head, embedded, features.of(tokens, number).float())


def progress(row: dict, config: TrainOptions) -> str:
    """Return the line that is printed for a row of the curve. The row of a start has no losses."""
    losses = ", ".join(f"{name} {row[name]:.3f}" for name in config.losses if name in row)
    alphas = " ".join(f"{alpha:.3f}" for alpha in row["alpha"])
    return f"step {row['step']}: {losses or 'as it was'}; alpha {alphas}; tau {row['tau']:.3f}"


class Ready(NamedTuple):
    """The state of a training before its first step."""

    target: Transformer
    examples: list[Example]
    sequences: list[tuple[int, list[int]]]  # of the target, as from `own_sequences`
    head: nn.Module
    features: Features
    losses: Callable[..., tuple[Tensor, ...]]  # as from `losses_of`
    method: TrainingParts


def eagle_method() -> TrainingParts:
    """Return the parts of training an EAGLE head."""
    return TrainingParts(make_head, scale_first_layer, losses_of, chains, save_head)


def load_target(config: TrainOptions) -> Transformer:
    """Load the target: on a CPU in fp32."""
    dtype = torch.float32 if config.device.startswith("cpu") else None
    return load_model(Path(config.checkpoint), dtype, config.device)


def ready(config: TrainOptions, method: TrainingParts | None = None) -> Ready:
    """Load the target and the data, and make the head. Writes: `config.out`.

    method: default: of an EAGLE head
    Raises: ValueError for wrong options or data.
    """
    config.check()
    method = method or eagle_method()
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    target = load_target(config)
    examples, sequences = prepare(config, target)
    head = method.make_head(config, target, examples)
    aux_layers = getattr(head, "aux_layers", ())
    features = Features(config, target, aux_layers, laid_out(examples, 0)[0])
    method.prepare(config, target, head, examples, features)
    losses = method.losses_of(config, head, target)
    return Ready(target, examples, sequences, head, features, losses, method)


def is_narrow(config: TrainOptions) -> bool:
    """Return whether products are in `dtype`; otherwise they are in fp32."""
    return config.dtype != "float32" and training.multiplies_bf16(config.device)


# a mixture's features are computed under autocast, too, which knows torch's own operators only
for _device in ("cpu", "cuda"):
    torch.library.register_autocast("gpt_eagle::experts_linear", _device, torch.bfloat16, lib=lib)


def autocast(config: TrainOptions) -> torch.autocast:
    """Return the context of training."""
    kind = torch.device(config.device).type
    return torch.autocast(kind, DTYPES[config.dtype], is_narrow(config))


def fill_features(config: TrainOptions, made: Ready, over: Callable[[], bool]) -> int:
    """Compute the features that the file lacks, from the first batch on. Writes: the file.

    over: called after every batch computed; true ends the work
    Returns: the number of batches with features.
    """
    features = made.features
    ids, _ = laid_out(made.examples, 0)
    for number in tqdm(range(len(features.kept)), desc="features", unit="batch", disable=None):
        if not features.has(number):
            size = features.steps.numel()
            tokens = ids[number * size :][:size].view_as(features.steps)
            with autocast(config):
                features.of(tokens.to(config.device), number)
            if over():
                return number + 1
    return len(features.kept)


class Steps:
    """The optimizers of a head, and a step of training."""

    def __init__(self, config: TrainOptions, made: Ready):
        self.config = config
        self.made = made
        self.optimizers = training.make_optimizers(
            made.head, config, lambda name: not name.startswith("lm_head")
        )
        self.schedule = training.Schedule(self.optimizers, config.steps, config.warmup)
        self.weights = torch.tensor(list(config.losses.values()), device=config.device)

    def run(self, step: int, position: float, batch: tuple[Tensor, Tensor, int]) -> Tensor:
        """Do step number `step` on a batch of `batches`. Writes: the head, the optimizers.

        position: in the schedule of the learning rates, in steps
        Returns: the losses, unweighted.
        """
        tokens, mask, number = batch
        tokens = tokens.to(self.config.device)
        mask = mask.to(self.config.device)
        self.schedule.set(position)
        with autocast(self.config):
            features = self.made.features.of(tokens, number)
            if not is_narrow(self.config):
                features = features.float()  # a file may have kept them in bf16
            best = self.made.features.best(features, number)
            losses = torch.stack(self.made.losses((tokens, mask, features, best), step))
        head = self.made.head
        training.update(head, self.optimizers, (losses * self.weights).sum(), self.config.clip)
        return losses.detach()


class TimedSchedule:
    """The position in a schedule that goes by the time left, not by the steps done.

    The first step of a process does not advance it: that step compiles.
    """

    def __init__(self, steps: int, position: float, left_s: Callable[[], float]):
        """steps: of the schedule; position: to begin with; left_s: of the training"""
        self.steps = steps
        self.begin = position
        self.left_s = left_s
        self.begin_s: float | None = None  # left after the first step

    def position(self, ending_s: float) -> float:
        """Return the position after a step. ending_s: time that the end of training takes"""
        left_s = self.left_s() - ending_s
        if self.begin_s is None:
            self.begin_s = left_s
        if left_s <= 0:
            return self.steps
        return self.begin + (self.steps - self.begin) * (1 - left_s / self.begin_s)

    def past(self, position: float, ending_s: float) -> float:
        """Return the position after an evaluation, whose time asks for no further one.

        One step more is done also where no time is left, so that training ends with an evaluation.
        """
        return min(max(position, self.position(ending_s)), self.steps - 1)


def best_row(curve: list[dict]) -> dict:
    """Return the row with the highest tau, of equal ones the last."""
    return max(reversed(curve), key=lambda row: row["tau"])


def gave_up(curve: list[dict], patience: int) -> bool:
    """Return whether the last `patience` evaluations had no higher tau than those before."""
    since = len(curve) - 1 - curve.index(best_row(curve))
    stops = 0 < patience <= since
    if stops:
        tqdm.write(f"{since} evaluations in a row had no higher tau: training ends")
    return stops


class BestHead:
    """The weights with the highest tau of an evaluation, in a file that outlives a kill."""

    def __init__(self, config: TrainOptions):
        self.file = Path(config.out, "best.pt")
        self.config = config

    def add(self, head: nn.Module, info: dict, row: dict) -> bool:
        """Add a row to the curve, and keep the weights if it is the best. Writes: the file, info.

        Returns: whether it is.
        """
        tqdm.write(progress(row, self.config))
        info["curve"].append(row)
        info["best"] = best_row(info["curve"])
        is_last = info["best"] is row
        if is_last:
            saved = {"row": row, "weights": head.state_dict()}
            replace_file(self.file, lambda path: torch.save(saved, path))
        return is_last

    def begin(self, made: Ready, info: dict) -> None:
        """Add an existing head, before its first step here, as step 0. Writes: the file, info."""
        if self.config.resume or not self.config.is_trained:
            return
        row = {"step": 0, "seconds": 0.0}
        row |= evaluate(made.head, made.target, made.sequences, made.method.draft)
        self.add(made.head, info, row)

    def restore(self, head: nn.Module, info: dict) -> None:
        """Take the weights back unless they are those of the last row. Writes: the head, info.

        Their row is the file's: a kill may have come between this file and the state's.
        """
        saved = torch.load(self.file, map_location=self.config.device, weights_only=True)
        info["best"] = saved["row"]
        step = info["best"]["step"]
        if step != info["curve"][-1]["step"]:
            head.load_state_dict(saved["weights"])
            tqdm.write(f"the head is that of step {step}, whose tau is the highest")


def finish(made: Ready, best: BestHead, info: dict) -> None:
    """Take the best weights, and fit their sharpness. Writes: the head, info."""
    head = made.head
    info["config"]["steps"] = info["curve"][-1]["step"]
    best.restore(head, info)
    sharpness = fit_sharpness(head, made.target, made.sequences, made.method.draft)
    head.config = replace(head.config, sharpness=sharpness)
    tqdm.write(f"sharpness {sharpness}")


def count_parameters(module: nn.Module) -> int:
    """Count the numbers of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def crosses(before: float, after: float, unit: float) -> bool:
    """Return whether a multiple of the unit is passed, or reached."""
    return after // unit > before // unit


def train(
    config: TrainOptions, made: Ready | None = None, left_s: Callable[[], float] | None = None
) -> None:
    """Run the recipe. Writes: `config.out`.

    made: as from `ready`; left_s: called after every step, the seconds left: training ends when
    they are over, whatever `config.steps`, which is then the unit of the schedule
    """
    made = made or ready(config)
    state_file = resume_file(Path(config.out), config.resume)
    head = made.head
    steps = Steps(config, made)
    info = {"config": asdict(config), "parameters": count_parameters(head), "curve": []}
    place = training.TrainingProgress(0, 0.0, [])
    if config.resume:
        place = training.load_state(state_file, head, steps.optimizers, config.device)
    done, position, info["curve"] = place
    best = BestHead(config)
    best.begin(made, info)
    clock = TimedSchedule(config.steps, position, left_s) if left_s else None
    ending_s = 0.0  # of the last evaluation, and as much for the sharpness
    feed = batches(made.examples, config, done)
    recent = []
    began = time.time()
    bar = tqdm(initial=done, total=config.steps, unit="step", mininterval=5, disable=None)
    while position < config.steps:
        recent.append(steps.run(done, position, next(feed)))
        done += 1
        before = position
        position = clock.position(ending_s) if clock else done
        bar.total = round(done * config.steps / position) if position else None
        bar.update()
        ended = position >= config.steps
        evaluates = ended or crosses(before, position, config.eval_every)
        if evaluates:
            means = dict(zip(config.losses, torch.stack(recent).mean(0).tolist()))
            recent = []
            row = {"step": done, **means, "seconds": time.time() - began}
            row |= evaluate(head, made.target, made.sequences, made.method.draft)
            ending_s = 2 * (time.time() - began - row["seconds"])
            improved = best.add(head, info, row)
            ended = ended or gave_up(info["curve"], config.patience)
        if ended:
            position = config.steps
            finish(made, best, info)
        elif crosses(before, position, config.eval_every / SAVES):
            place = training.TrainingProgress(done, position, info["curve"])
            training.save_state(state_file, head, steps.optimizers, place)
        if evaluates:
            if ended or improved:
                made.method.save_head(head, config, info)
            position = position if ended or not clock else clock.past(position, ending_s)
    bar.close()
    for file in (state_file, best.file):
        file.unlink(missing_ok=True)
    print(f"wrote {config.out}")


def left_of(minutes: float) -> Callable[[], float]:
    """Return a function that tells the time left, in seconds, from its first call on."""
    end_s = None

    def left_s() -> float:
        nonlocal end_s
        now = time.perf_counter()
        if end_s is None:
            end_s = now + 60 * minutes
        return end_s - now

    return left_s


def run(config: TrainOptions, program: str, method: TrainingParts | None = None) -> None:
    """Run the command line of a training program. method: default: an EAGLE head's"""
    with one_line_errors(program):
        config = replace(config, device=pick_device(config.device))
        made = ready(config, method)
        if config.minutes and config.features:
            fill_features(config, made, lambda: False)
        train(config, made, left_of(config.minutes) if config.minutes else None)


def main() -> None:
    run(COMMAND or parse(TrainConfig, "train_eagle.py", __doc__), "train_eagle.py")


if __name__ == "__main__":
    main()
