"""Train an EAGLE draft head for any target, in the paper's way.

    python scripts/train/train_eagle.py --checkpoint DIR --data sharegpt.jsonl --chat vicuna --out heads/mine
    python scripts/train/train_eagle.py --version 3 --out heads/mine-3 ...   # EAGLE-3; flags of ours: benchmarks/README.md

How it works:
1. Data are dialogues (`turns` and `answers`, as scripts/train/generate_answers.py writes them, or ShareGPT's `conversations`), texts
   (`text`), or `demo`, the corpus of scripts/train/train_demo.py. The loss counts answers of dialogues and all of a text.
2. The frozen target gives the features of each batch as it is needed. With `--features` they go to a file, which later
   epochs read, of the same batches in another order, and later runs.
3. The head learns the target's own distribution by soft cross-entropy, and in versions 1 and 2 the next feature by
   SmoothL1, over one step of a chain or several (losses.py).
4. Every so often the head drafts chains on sequences that the target has written itself, from every position at
   once: 0..4-alpha and tau. The curve is drawn, the head written, and the state saved for `--resume`.
5. At the end the sharpness c of log softmax(c * scores) is fitted by maximum likelihood on the same sequences.

Sources: EAGLE (arXiv 2401.15077), section 4 (training), figure 8 (`--inputs`); EAGLE-3; HASS (`--unroll`).
Differences from the official code: clipping is by norm, noise does not depend on the length, `fc` is trained over
inputs of equal scale, and examples are laid end to end and split at `seq_len`, so that nothing is padding (a row may
see the end of the example before its own).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import Engine, with_cycles
from drafters import RootOnly
from eagle_draft import EagleHead, load_head
from files import read_jsonl, replace_file, write_text
from hf.chat import CHAT_TEMPLATES, ChatTemplate, chat_template, template_text
from hf.heads import EagleConfig, head_names, rows_of
from hf.tokenizer import Tokenizer
from hf.weights import export_weights, load_model
from model import DTYPES, Transformer
from options import DEMO, ROOT, GenerateConfig, pick_device
from scripts.train import losses as head_training
from scripts.train import train_demo
from scripts.train.acceptance import ALPHAS, INPUTS, evaluate, fit_sharpness
from scripts.train.feature_cache import Features
from session import Session, common_prefix

OWN_TOKENS = 128  # tokens that the target writes itself per evaluation prompt
LABELS = {"entropy": "cross-entropy, step {} (nats)", "regression": "SmoothL1 of features, step {}"}
OF_VERSION_1 = (
    "inputs",
    "noise",
    "feature_weight",
    "token_weight",
)  # options that others do not have


@dataclass
class TrainConfig:
    checkpoint: str = option(DEMO, "the target")
    version: int = option(1, "of the head: 1, which is 2 as well, or 3", (1, 3))
    out: str = option(
        "checkpoints/head",
        "directory to write, official layout; holds the resume state while training",
    )
    data: str = option("demo", "comma-separated JSONL files, or demo")
    chat: str = option("", "chat template of dialogue data; empty: the checkpoint's own")
    inputs: str = option(INPUTS[0], "what a row sees (figure 8)", INPUTS)
    resume: bool = option(False, "go on from the last saved step")
    steps: int = option(20000, "training steps", least=1)
    batch_size: int = option(4, "sequences per step", least=1)
    seq_len: int = option(
        2048, "tokens per sequence; examples are laid end to end and split", least=1
    )
    optimizer: str = option(
        "adamw", "adamw as in the paper, or muon for the matrices", ("adamw", "muon")
    )
    lr: float = option(3e-5, "peak learning rate of AdamW")
    muon_lr: float = option(4e-3, "peak learning rate of Muon")
    warmup: int = option(2000, "steps")
    weight_decay: float = option(0.01, "AdamW")
    clip: float = option(0.5, "gradient norm")
    noise: float = option(0.1, "features get U(-noise, noise)")
    feature_weight: float = option(1.0, "of SmoothL1 between features")
    token_weight: float = option(0.1, "of the soft cross-entropy")
    unroll: int = option(
        0, "steps of a chain that the loss has; 0: 1 for version 1, 7 for version 3", least=0
    )
    draft_vocab: int = option(
        0, "tokens that it drafts, the most frequent; 0: all, or 32000 for version 3", least=0
    )
    features: str = option(
        "", "file that keeps the target's features, also for later runs on the same data"
    )
    ffn_dim: int = option(0, "of the head's layer; 0: the target's")
    kv_heads: int = option(0, "of the head's layer; 0: the target's")
    init: str = option(
        "random",
        "random, feature (fc starts as the identity on the feature), or a head's directory",
    )
    dtype: str = option("bfloat16", "autocast of training and weights of the file", tuple(DTYPES))
    eval_every: int = option(500, "steps", least=1)
    eval_prompts: int = option(64, "held-out prompts for alpha and tau", least=1)
    seed: int = option(0, "of initialisation, order and noise")
    threads: int = option(0, "CPU threads; 0 leaves torch's default")
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    def check(self) -> None:
        """Raises: ValueError for an option of another version."""
        for name in OF_VERSION_1 if self.version != 1 else ():
            if getattr(self, name) != getattr(TrainConfig, name):
                raise ValueError(f"--{name} belongs to heads of version 1; leave it out")

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
        decay = [head_training.DECAY**s for s in range(self.recipe_steps)]
        return {
            f"{kind} {s}": weight * d for kind, weight in kinds.items() for s, d in enumerate(decay)
        }


# ------------------------------------------------------------------------------------------------ data


class Dialogue(NamedTuple):
    """Turns and their answers; a text is a single answer without a turn."""

    turns: list[str]
    answers: list[str]
    ended: bool = (
        True  # whether the last answer is complete, so that the end of sequence follows it
    )
    answer_ids: list[int] | None = None  # the only answer as the target wrote it, its end included

    @staticmethod
    def of(
        turns: list[str],
        answers: list[str],
        ended: bool = True,
        answer_ids: list[int] | None = None,
    ) -> Dialogue:
        """Without white space around answers, which some templates drop and others keep. Texts stay as they are."""
        return Dialogue(
            turns, [answer.strip() for answer in answers] if turns else answers, ended, answer_ids
        )

    @property
    def held_out(self) -> bool:
        return train_demo.held_out(self.turns[0] if self.turns else self.answers[0][:200], 0.05)


class Example(NamedTuple):
    """One sequence; `mask` marks the tokens whose features are trained on (answers, or everything)."""

    ids: list[int]
    mask: list[bool]


def read_dialogues(file: Path) -> list[Dialogue]:
    """Dialogues of a JSONL file; those without an answer are left out. Raises: ValueError for another form."""
    dialogues = []
    for number, row in enumerate(read_jsonl(file, "--data"), 1):
        try:
            if "conversations" in row:  # ShareGPT
                dialogues.append(_sharegpt(row["conversations"]))
            else:
                turns, answers = (
                    ([], [row["text"]]) if "text" in row else (row["turns"], row["answers"])
                )
                pairs = min(len(turns), len(answers)) if turns else 1
                ids = row.get("answer_ids") if len(turns) == 1 else None
                dialogues.append(
                    Dialogue.of(turns[:pairs], answers[:pairs], row.get("ended", True), ids)
                )
        except (KeyError, TypeError):
            form = "`turns` and `answers`, `conversations`, or `text`"
            raise ValueError(f"--data: {file} row {number} must have {form}") from None
    kept = [d for d in dialogues if d.answers and all(d.turns) and all(d.answers)]
    print(
        f"{file}: {len(kept)} dialogues or texts, {len(dialogues) - len(kept)} left out for want of an answer"
    )
    return kept


def _sharegpt(messages: list[dict]) -> Dialogue:
    """Human and model in turn, from the first human message to where the alternation breaks."""
    said = [(m["from"] in ("human", "user"), m["value"]) for m in messages]
    start = next((i for i, (human, _) in enumerate(said) if human), len(said))
    turns, answers = [], []
    for (human, turn), (also_human, answer) in zip(said[start::2], said[start + 1 :: 2]):
        if not human or also_human:
            break
        turns.append(turn)
        answers.append(answer)
    return Dialogue.of(turns, answers)


def to_example(dialogue: Dialogue, tokenizer: Tokenizer, template: ChatTemplate | None) -> Example:
    """Tokenize a dialogue and mark its answers; a text is marked whole.

    Raises: ValueError when the answer's ids are another tokenizer's.
    """
    turns, answers, ended, written = dialogue
    if written:  # the target does not always choose the tokens that its tokenizer would
        if tokenizer.decode(written).strip() != answers[0]:
            wrong = f"--data: answer_ids are not the tokens of the answer {answers[0][:40]!r}"
            raise ValueError(f"{wrong}; was it another --checkpoint that wrote them?")
        prompt = template.encode(tokenizer, turns, [])
        return Example(prompt + written, [False] * len(prompt) + [True] * len(written))
    end = list(tokenizer.eos_ids[:1]) if ended else []
    if not turns:
        ids = tokenizer.encode(answers[0]) + end
        return Example(ids, [True] * len(ids))

    def encode(
        t: int, answer: str = ""
    ) -> list[int]:  # up to turn t and, with an answer, to its end
        text = template.render(turns[: t + 1], answers[:t])
        return tokenizer.encode(
            text + template.reply + answer if answer else text, bos=template.bos, special=True
        )

    ids = encode(len(turns) - 1, answers[-1]) + end
    mask = [False] * len(ids)
    for t, answer in enumerate(answers):
        # the common prefix finds the answer's span even where a token straddles its border
        begin, stop = common_prefix(encode(t), ids), common_prefix(encode(t, answer), ids) + 1
        mask[begin:stop] = [True] * len(mask[begin:stop])
    return Example(ids, mask)


def load_data(config: TrainConfig, engine: Engine) -> tuple[list[Example], list[list[int]]]:
    """Returns: training examples, and held-out prompts for the evaluation."""
    if config.data == "demo":
        return _demo_data(config, engine)
    tokenizer, template = engine.tokenizer, engine.template
    dialogues = [d for file in config.data.split(",") for d in read_dialogues(Path(file))]
    if any(d.turns for d in dialogues) and template is None:
        raise ValueError(
            f"--data: dialogues need a chat template; name one of {', '.join(CHAT_TEMPLATES)} with --chat"
        )
    kept = [d for d in dialogues if not d.held_out]
    held = [d for d in dialogues if d.held_out][: config.eval_prompts]
    examples = [
        to_example(d, tokenizer, template) for d in tqdm(kept, desc="tokenize", unit="dialogue")
    ]
    prompts = []
    for d in held:
        if d.turns:
            prompts.append(template.encode(tokenizer, d.turns[:1], []))
        else:
            ids = tokenizer.encode(d.answers[0])
            prompts.append(ids[: len(ids) // 2 or 1])
    return examples, prompts


def _demo_data(config: TrainConfig, engine: Engine) -> tuple[list[Example], list[list[int]]]:
    sums = ROOT / train_demo.TrainConfig.sums
    python, worked = train_demo.read_python(), train_demo.read_sums(sums)
    encode = lambda text: engine.tokenizer.encode(text, bos=False)  # noqa: E731
    documents = [
        ids
        for part in (python, worked)
        for ids in train_demo.encode_documents(part["train"], encode, 0.25)
    ]
    examples = [Example(ids, [True] * len(ids)) for ids in documents]
    windows = [
        ids
        for ids in train_demo.encode_documents(python["held_out"], encode, 0.0)
        if len(ids) > 400
    ]
    half = config.eval_prompts // 2
    prompts = [
        [train_demo.BOS, *windows[i % len(windows)][150 * (1 + i // len(windows)) :][:96]]
        for i in range(half)
    ]
    questions = [text.split("\nAnswer:")[0] + "\nAnswer:" for text in worked["held_out"]]
    return examples, prompts + [engine.tokenizer.encode(q) for q in questions[:half]]


def laid_out(examples: list[Example], seed: int) -> tuple[Tensor, Tensor]:
    """All examples end to end, in a random order, so that nothing is padding. Returns: ids and mask, [M] each."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([i for e in order for i in examples[e].ids])
    return ids, torch.tensor([m for e in order for m in examples[e].mask])


def batches(examples: list[Example], config: TrainConfig, skip: int):
    """Endless shuffled batches: ids and mask, [B, T] each, and the batch's number within its epoch.

    With `--features` every epoch has the same batches, in another order, whatever the seed.
    skip: batches to pass over, to resume
    Raises: ValueError for less data than one batch.
    """
    size = config.batch_size * config.seq_len
    epoch = 0
    while True:
        seed = config.seed * 1000 + epoch
        ids, mask = laid_out(examples, 0 if config.features else seed)
        if len(ids) < size:
            raise ValueError(
                f"the data hold {len(ids)} tokens, one batch needs {size}; lower --batch_size or --seq_len"
            )
        numbers = torch.arange(len(ids) // size)
        if config.features:
            numbers = numbers[
                torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
            ]
        for number in numbers.tolist():
            if skip > 0:
                skip -= 1
                continue
            part = slice(number * size, (number + 1) * size)
            yield *(x[part].view(config.batch_size, config.seq_len) for x in (ids, mask)), number
        epoch += 1


# ------------------------------------------------------------------------------------------------ loss


def losses_of(
    config: TrainConfig, head: EagleHead, target: Transformer
) -> Callable[..., tuple[Tensor, ...]]:
    """What a step minimises: (tokens, mask, features), the step's number -> `config.losses`."""
    lm_head = head.lm_head or (
        rows_of(target.lm_head, head.vocab.ids) if head.vocab else target.lm_head
    )
    recipe = head_training.Recipe(
        head.embedding or target.embedding, lm_head, config.recipe_steps, config.inputs
    )
    compiled, generator = (
        torch.compile(head_training.unrolled_losses),
        torch.Generator(config.device),
    )

    def losses(batch: tuple[Tensor, Tensor, Tensor], step: int) -> tuple[Tensor, ...]:
        features = batch[2]
        generator.manual_seed(config.seed * 1_000_003 + step)  # a resumed run sees the same noise
        uniform = (
            torch.rand(features.shape, generator=generator, device=config.device)
            if config.version == 1
            else None
        )
        noise = 0.0 if uniform is None else ((uniform * 2 - 1) * config.noise).to(features.dtype)
        return compiled(head, target, batch, recipe, noise)

    return losses


# -------------------------------------------------------------------------------------------- training


def make_head(config: TrainConfig, target: Transformer, examples: list[Example]) -> EagleHead:
    """A new head shaped like a layer of the target, or an existing one to go on with.

    examples: whose marked tokens choose the draft vocabulary
    Raises: ValueError for an existing head that this version's training cannot go on with.
    """
    if config.init not in ("random", "feature"):
        return existing_head(config, target)
    c = target.config
    ffn, kv = config.ffn_dim or c.ffn_dim, config.kv_heads or c.n_kv_heads
    model = replace(
        c, n_layers=1, ffn_dim=ffn, n_kv_heads=kv, qkv_bias=False, o_bias=False, mlp_bias=False
    )
    # a head is dense whatever its target is, and the official loader knows no RoPE scaling in it
    model = replace(model, n_experts=0, experts_per_token=0, rope_scaling=None, qk_norm=False)
    ids = torch.tensor(
        [i for e in examples for i, marked in zip(e.ids, e.mask) if marked], dtype=torch.long
    )
    kept = config.draft_vocab or (c.vocab_size if config.version == 1 else 32000)
    vocab = head_training.frequent_tokens(ids, c.vocab_size, kept)
    if vocab:
        share = torch.isin(ids, vocab.ids).float().mean().item()
        vocab = vocab._replace(ids=vocab.ids.to(config.device))
        print(
            f"the head drafts {vocab.kept} of {c.vocab_size} tokens, {100 * share:.2f} % of those trained on"
        )
    if config.version == 3:
        head = head_training.new_head(model, target, vocab, config.init == "feature")
        return head.to(target.embedding.weight.device)
    head = EagleHead(EagleConfig(model))
    head.vocab = vocab
    if config.init == "feature":
        with torch.no_grad():
            head.fc.weight.normal_(std=0.02)
            head.fc.weight[:, c.dim :] += torch.eye(c.dim)
            head.fc.bias.zero_()
    return head.to(target.embedding.weight.device)


def existing_head(config: TrainConfig, target: Transformer) -> EagleHead:
    """The head in `config.init`. Raises: ValueError for one of the other version, or that has no official layout."""
    head = load_head(Path(config.init), target).float()
    eagle3 = head.config.eagle3
    version = 3 if eagle3 else 1
    if version != config.version:
        raise ValueError(
            f"--init: {config.init} is a head of version {version}; train it with --version {version}"
        )
    if config.draft_vocab:
        raise ValueError(
            f"--draft_vocab: {config.init} has a draft vocabulary already; leave it out"
        )
    if eagle3 and eagle3.last_norm == "fed":
        raise ValueError(
            f"--init: {config.init} feeds back its normed output, which the official layout cannot say"
        )
    head.requires_grad_(True)
    if (
        eagle3
    ):  # an LM head that was tied to an embedding is trained by itself; an embedding is not trained
        names = {"lm_head": "lm_head.weight" if eagle3.lm_head else ""}
        if head.embedding is None:  # it is the target's
            names["embedding"] = ""
        else:
            head.embedding.requires_grad_(False)
        head.config = replace(head.config, eagle3=replace(eagle3, **names))
    return head


def save_head(head: EagleHead, config: TrainConfig, info: dict) -> None:
    """Write the official layout: config.json and model.safetensors."""
    out, c = Path(config.out), head.config.model
    tensors = export_weights(
        head_training.plain_copy(head), head_names(head.config), c, DTYPES[config.dtype]
    )
    tensors |= head_training.vocab_layout(head)
    further = head_training.keys_of(head) if head.config.eagle3 else {"draft_inputs": config.inputs}
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": c.n_layers,
        "hidden_size": c.dim, "intermediate_size": c.ffn_dim, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "rope_scaling": None,
        "max_position_embeddings": c.max_context, "bos_token_id": c.bos_id, "eos_token_id": next(iter(c.eos_ids), None),
        "tie_word_embeddings": False, "torch_dtype": config.dtype, "bias": head.config.fc_bias,
        "draft_sharpness": head.config.sharpness, **further, **({"qkv_bias": True} if c.qkv_bias else {}),
    }  # fmt: skip
    replace_file(
        out / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"})
    )
    write_text(str(out / "config.json"), json.dumps(raw, indent=2))
    write_text(str(out / "training.json"), json.dumps(info, indent=1))
    replace_file(out / "curve.png", lambda p: plot_curve(info["curve"], config.losses, p))


def plot_curve(curve: list[dict], losses: dict[str, float], path: Path) -> None:
    """Draw the losses, and alpha and tau, against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    steps = [row["step"] for row in curve]
    for name in losses:
        kind, step = name.split()
        left.plot(steps, [row[name] for row in curve], label=LABELS[kind].format(step))
    left.set(xlabel="step", title="training loss", yscale="log")
    for n in range(ALPHAS):
        right.plot(steps, [row["alpha"][n] for row in curve], label=f"{n}-alpha", lw=1)
    twin = right.twinx()
    twin.plot(steps, [row["tau"] for row in curve], "k", lw=2, label="tau (chain of 5, right)")
    right.set(xlabel="step", title="held-out acceptance", ylim=(0, 1))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    left.legend()
    right.legend(loc="lower left", fontsize=8)
    twin.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def own_sequences(
    engine: Engine, prompts: list[list[int]], length: int
) -> list[tuple[int, list[int]]]:
    """Let the target continue the prompts greedily. Returns: (prompt length, all tokens) each."""
    size, sequences = engine.config.batch_size, []
    for first in range(0, len(prompts), size):
        group = prompts[first : first + size]
        short = replace(engine, config=replace(engine.config, max_new_tokens=length))
        session = Session(short, [(first + i, 0) for i in range(len(group))])
        for _ in session.run(group):
            pass
        sequences += [(len(p), session.history[i]) for i, p in enumerate(group)]
    return sequences


def make_engine(config: TrainConfig, target: Transformer) -> Engine:
    """The target alone, to write sequences."""
    path = Path(config.checkpoint)
    tokenizer = Tokenizer.load(path)
    has_template = config.chat or template_text(path) is not None
    template = chat_template(path, tokenizer, config.chat) if has_template else None
    ends = (*target.config.eos_ids, *(template.stop_ids(tokenizer) if template else ()))
    options = GenerateConfig(
        checkpoint=config.checkpoint, draft="none", batch_size=16, device=config.device
    )
    context = min(2048, target.config.max_context)
    return with_cycles(
        Engine(options, target, RootOnly(), context, ends, tokenizer=tokenizer, template=template)
    )


def prepare(
    config: TrainConfig, target: Transformer
) -> tuple[list[Example], list[tuple[int, list[int]]]]:
    """Read the data, and let the target continue the prompts that are held out. Writes: the directory `config.out`.

    Returns: training examples; sequences, as from `own_sequences`
    Raises: ValueError when there is nothing to evaluate with.
    """
    engine = make_engine(config, target)
    Path(config.out).mkdir(
        parents=True, exist_ok=True
    )  # it keeps the answers that the target writes
    examples, prompts = load_data(config, engine)
    prompts = [p for p in prompts if len(p) + OWN_TOKENS < engine.context]
    if not prompts:
        raise ValueError(
            "--data: nothing is held out to evaluate with (5 % by hash, prompts that fit); give more data"
        )
    fitting = replace(engine, context=max(map(len, prompts)) + OWN_TOKENS)
    sequences = [
        s for s in own_sequences(fitting, prompts, OWN_TOKENS) if len(s[1]) >= s[0] + ALPHAS + 2
    ]
    if not sequences:
        raise ValueError(
            f"--data: the target ends every held-out prompt within {ALPHAS + 1} tokens; is --chat right?"
        )
    return examples, sequences


def train(config: TrainConfig) -> None:
    """Run the recipe. Writes: `config.out`."""
    config.check()
    state_file = train_demo.resume_file(Path(config.out), config.resume)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    target = load_model(
        Path(config.checkpoint), torch.float32 if config.device == "cpu" else None, config.device
    )
    examples, sequences = prepare(config, target)
    head = make_head(config, target, examples)
    features = Features(config, target, head.aux_layers, laid_out(examples, 0)[0])
    tokens, _, number = next(batches(examples, config, 0))
    tokens = tokens.to(config.device)
    head_training.scale_inputs(
        head, target.embedding(tokens).float(), features.of(tokens, number).float()
    )
    optimizers = train_demo.make_optimizers(
        head, config, lambda name: not name.startswith("lm_head")
    )
    schedule = train_demo.Schedule(optimizers, config.steps, config.warmup)
    info = {
        "config": asdict(config),
        "parameters": sum(p.numel() for p in head.parameters()),
        "curve": [],
    }
    first, began = 0, time.time()
    if config.resume:
        first, info["curve"] = train_demo.load_state(state_file, head, optimizers, config.device)
    autocast = torch.autocast(
        torch.device(config.device).type, DTYPES[config.dtype], config.dtype != "float32"
    )
    losses = losses_of(config, head, target)
    weights = torch.tensor(list(config.losses.values()), device=config.device)
    feed, recent, cpu, mark = batches(examples, config, first), [], 0.0, time.process_time()
    for step in tqdm(
        range(first, config.steps), initial=first, total=config.steps, unit="step", mininterval=5
    ):
        schedule.set(step)
        *batch, number = next(feed)
        tokens, mask = (x.to(config.device) for x in batch)
        with autocast:
            found = torch.stack(losses((tokens, mask, features.of(tokens, number)), step))
        (found * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(found.detach())
        done = step + 1
        if done % config.eval_every == 0 or done == config.steps:
            cpu += time.process_time() - mark
            each = dict(zip(config.losses, torch.stack(recent).mean(0).tolist()))
            recent = []
            row = {"step": done, **each, "seconds": time.time() - began, "cpu_s": cpu}
            row |= evaluate(head, target, sequences, config.inputs)
            info["curve"].append(row)
            told = ", ".join(f"{name} {value:.3f}" for name, value in each.items())
            alphas = " ".join(f"{a:.3f}" for a in row["alpha"])
            tqdm.write(f"step {done}: {told}; alpha {alphas}; tau {row['tau']:.3f}")
            train_demo.save_state(state_file, head, optimizers, done, info["curve"])
            if done == config.steps:
                sharpness = fit_sharpness(head, target, sequences, config.inputs)
                head.config = replace(head.config, sharpness=sharpness)
                tqdm.write(f"sharpness {sharpness}")
            save_head(head, config, info)
            mark = time.process_time()
    state_file.unlink(missing_ok=True)
    print(f"wrote {config.out}")


def main() -> None:
    config = parse(TrainConfig, "train_eagle.py", __doc__)
    with one_line_errors("train_eagle.py"):
        train(replace(config, device=pick_device(config.device)))


if __name__ == "__main__":
    main()
