"""Train an EAGLE-1/2 draft head for any target, in the paper's way.

    python scripts/train_eagle.py --checkpoint DIR --data sharegpt.jsonl --chat vicuna --out heads/mine
    python scripts/train_eagle.py --out checkpoints/demo-eagle --lr 3e-3 ...   # all flags in benchmarks/README.md

How it works:
1. Data are dialogues (`turns` and `answers`, as scripts/answer.py writes them, or ShareGPT's `conversations`), texts
   (`text`), or `demo`, the corpus of scripts/train_demo.py. The loss counts answers of dialogues and all of a text.
2. The frozen target gives the features of each batch as it is needed; nothing is dumped to disk.
3. Row t of the head sees f_t (plus uniform noise) and x_{t+1}, and learns f_{t+1} by SmoothL1 and the target's own
   distribution after it by soft cross-entropy.
4. Every so often the head drafts chains on sequences that the target has written itself, from every position at
   once: 0..4-alpha and tau. The curve is drawn, the head written, and the state saved for `--resume`.
5. At the end the sharpness c of log softmax(c * scores) is fitted by maximum likelihood on the same sequences.

Source: EAGLE (arXiv 2401.15077), section 4 (training), figure 8 (`--inputs`), table 6 (`--target_answers`).
Differences from the official code: clipping is by norm, noise does not depend on the length, and examples are laid end
to end and split at `seq_len`, so that nothing is padding (a row may see the end of the example before its own).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import _path  # finds the project
import train_demo
from decode import Engine, Session, common_prefix, with_cycles
from drafters import RootOnly
from eagle_draft import EagleHead, load_head
from generate import generate
from hf.chat import CHAT_TEMPLATES, ChatTemplate, chat_template, template_text
from hf.heads import DRAFT_INPUTS, EagleConfig, head_names
from hf.tokenizer import Tokenizer
from hf.weights import export_weights, load_model
from model import DTYPES, KVCache, Transformer, Window
from options import (
    DEMO,
    GenerateConfig,
    one_line_errors,
    option,
    parse,
    pick_device,
    read_jsonl,
    replace_file,
    write_text,
)

INPUTS = (DRAFT_INPUTS, "feature&unshifted", "token", "feature")  # EAGLE-1 figure 8; the first is EAGLE
OWN_TOKENS = 128  # tokens that the target writes itself per evaluation prompt
ALPHAS = 5  # chain steps that are evaluated


@dataclass
class TrainConfig:
    checkpoint: str = option(DEMO, "the target")
    out: str = option("checkpoints/head", "directory to write, official layout; holds the resume state while training")
    data: str = option("demo", "comma-separated JSONL files, or demo")
    chat: str = option("", "chat template of dialogue data; empty: the checkpoint's own")
    target_answers: bool = option(False, "let the target write the answers of dialogue data first (table 6)")
    answer_tokens: int = option(512, "longest answer that the target writes", least=1)
    inputs: str = option(INPUTS[0], "what a row sees (figure 8)", INPUTS)
    resume: bool = option(False, "go on from the last saved step")
    steps: int = option(20000, "training steps", least=1)
    batch_size: int = option(4, "sequences per step", least=1)
    seq_len: int = option(2048, "tokens per sequence; examples are laid end to end and split", least=1)
    optimizer: str = option("adamw", "adamw as in the paper, or muon for the matrices", ("adamw", "muon"))
    lr: float = option(3e-5, "peak learning rate of AdamW")
    muon_lr: float = option(4e-3, "peak learning rate of Muon")
    warmup: int = option(2000, "steps")
    weight_decay: float = option(0.01, "AdamW")
    clip: float = option(0.5, "gradient norm")
    noise: float = option(0.1, "features get U(-noise, noise)")
    feature_weight: float = option(1.0, "of SmoothL1 between features")
    token_weight: float = option(0.1, "of the soft cross-entropy")
    ffn_dim: int = option(0, "of the head's layer; 0: the target's")
    kv_heads: int = option(0, "of the head's layer; 0: the target's")
    init: str = option("random", "random, feature (fc starts as the identity on the feature), or a head's directory")
    dtype: str = option("bfloat16", "autocast of training and weights of the file", tuple(DTYPES))
    eval_every: int = option(500, "steps", least=1)
    eval_prompts: int = option(64, "held-out prompts for alpha and tau", least=1)
    seed: int = option(0, "of initialisation, order and noise")
    threads: int = option(0, "CPU threads; 0 leaves torch's default")
    device: str = option("", "cpu or cuda; default: cuda if there is one")


# ------------------------------------------------------------------------------------------------ data


class Dialogue(NamedTuple):
    """Turns and their answers; a text is a single answer without a turn."""

    turns: list[str]
    answers: list[str]
    ended: bool = True  # whether the last answer is complete, so that the end of sequence follows it
    answer_ids: list[int] | None = None  # the only answer as the target wrote it, its end included

    @staticmethod
    def of(turns: list[str], answers: list[str], ended: bool = True, answer_ids: list[int] | None = None) -> Dialogue:
        """Without white space around answers, which some templates drop and others keep. Texts stay as they are."""
        return Dialogue(turns, [answer.strip() for answer in answers] if turns else answers, ended, answer_ids)

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
                turns, answers = ([], [row["text"]]) if "text" in row else (row["turns"], row["answers"])
                pairs = min(len(turns), len(answers)) if turns else 1
                ids = row.get("answer_ids") if len(turns) == 1 else None
                dialogues.append(Dialogue.of(turns[:pairs], answers[:pairs], row.get("ended", True), ids))
        except (KeyError, TypeError):
            form = "`turns` and `answers`, `conversations`, or `text`"
            raise ValueError(f"--data: {file} row {number} must have {form}") from None
    kept = [d for d in dialogues if d.answers and all(d.turns) and all(d.answers)]
    print(f"{file}: {len(kept)} dialogues or texts, {len(dialogues) - len(kept)} left out for want of an answer")
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

    def encode(t: int, answer: str = "") -> list[int]:  # up to turn t and, with an answer, to its end
        text = template.render(turns[: t + 1], answers[:t])
        return tokenizer.encode(text + template.reply + answer if answer else text, bos=template.bos, special=True)

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
        raise ValueError(f"--data: dialogues need a chat template; name one of {', '.join(CHAT_TEMPLATES)} with --chat")
    kept = [d for d in dialogues if not d.held_out]
    held = [d for d in dialogues if d.held_out][: config.eval_prompts]
    if config.target_answers:
        kept = target_answers([d for d in kept if d.turns], engine, config)
    examples = [to_example(d, tokenizer, template) for d in tqdm(kept, desc="tokenize", unit="dialogue")]
    prompts = []
    for d in held:
        if d.turns:
            prompts.append(template.encode(tokenizer, d.turns[:1], []))
        else:
            ids = tokenizer.encode(d.answers[0])
            prompts.append(ids[: len(ids) // 2 or 1])
    return examples, prompts


def _demo_data(config: TrainConfig, engine: Engine) -> tuple[list[Example], list[list[int]]]:
    sums = _path.ROOT / train_demo.TrainConfig.sums
    python, worked = train_demo.read_python(), train_demo.read_sums(sums)
    encode = lambda text: engine.tokenizer.encode(text, bos=False)  # noqa: E731
    documents = [ids for part in (python, worked) for ids in train_demo.encode_documents(part["train"], encode, 0.25)]
    examples = [Example(ids, [True] * len(ids)) for ids in documents]
    windows = [ids for ids in train_demo.encode_documents(python["held_out"], encode, 0.0) if len(ids) > 400]
    half = config.eval_prompts // 2
    prompts = [[train_demo.BOS, *windows[i % len(windows)][150 * (1 + i // len(windows)) :][:96]] for i in range(half)]
    questions = [text.split("\nAnswer:")[0] + "\nAnswer:" for text in worked["held_out"]]
    return examples, prompts + [engine.tokenizer.encode(q) for q in questions[:half]]


def target_answers(dialogues: list[Dialogue], engine: Engine, config: TrainConfig) -> list[Dialogue]:
    """Let the target answer every turn itself, greedily; kept beside the head, so that a resumed run finds them."""
    file = Path(config.out) / "target_answers.jsonl"
    done = (
        [Dialogue.of(r["turns"], r["answers"], r["ended"]) for r in read_jsonl(file, "--out")] if file.is_file() else []
    )
    size = engine.config.batch_size
    with open(file, "a", encoding="utf-8") as log:
        for first in tqdm(range(len(done), len(dialogues), size), desc="target answers", unit="batch"):
            group = [d.turns for d in dialogues[first : first + size]]
            fits = [len(engine.template.encode(engine.tokenizer, turns[:1], [])) < engine.context for turns in group]
            result = generate(
                engine, [turns for turns, ok in zip(group, fits) if ok], max_new_tokens=config.answer_tokens
            )
            answered: list[list[tuple[str, str]]] = [[] for _ in group]
            rows = [row for row, ok in enumerate(fits) if ok]
            for (p, _, _), text, reason in zip(result.index, result.text, result.finish_reason):
                answered[rows[p]].append((text, reason))
            for turns, pairs in zip(group, answered):
                # an answer that was cut ends the dialogue: what would follow it is not the target's
                cut = next((i + 1 for i, (_, reason) in enumerate(pairs) if reason != "stop"), len(pairs))
                ended = bool(pairs) and pairs[cut - 1][1] == "stop"
                done.append(Dialogue.of(turns[:cut], [text for text, _ in pairs[:cut]], ended))
                log.write(json.dumps(done[-1]._asdict()) + "\n")
            log.flush()
    return [d for d in done if d.answers and all(d.answers)]


def batches(examples: list[Example], config: TrainConfig, skip: int):
    """Endless shuffled batches: ids and mask, [B, T] each. Short examples are laid end to end, so nothing is padding.

    skip: batches to pass over, to resume
    """
    size = config.batch_size * config.seq_len
    epoch = 0
    while True:
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(config.seed * 1000 + epoch))
        ids = torch.tensor([i for e in order for i in examples[e].ids])
        mask = torch.tensor([m for e in order for m in examples[e].mask])
        if len(ids) < size:
            raise ValueError(
                f"the data hold {len(ids)} tokens, one batch needs {size}; lower --batch_size or --seq_len"
            )
        for first in range(0, len(ids) - size + 1, size):
            if skip > 0:
                skip -= 1
                continue
            yield tuple(x[first : first + size].view(config.batch_size, config.seq_len) for x in (ids, mask))
        epoch += 1


# ------------------------------------------------------------------------------------------------ loss


def row_inputs(kind: str, embedded: Tensor, features: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """What a row sees. embedded: of x_{t+1}; before: of x_t; all [B, T, F]. Source: EAGLE-1 figure 8."""
    if kind == "feature&unshifted":
        return before, features
    if kind == "token":
        return embedded, torch.zeros_like(features)
    if kind == "feature":
        return torch.zeros_like(embedded), features
    return embedded, features


def eagle_loss(
    head: EagleHead, target: Transformer, batch: tuple[Tensor, Tensor, Tensor], noise: Tensor | float, kind: str
) -> tuple[Tensor, Tensor]:
    """SmoothL1 of the features and soft cross-entropy of the tokens, means over the marked rows.

    batch: tokens [B, T], mask [B, T], target features [B, T, F]; the mask belongs to a row's input feature
    noise: [B, T-1, F], added to the input features
    Source: EAGLE-1 section 4; the mask's alignment is the official code's.
    """
    tokens, mask, features = batch
    rows = mask[:, :-1].float()  # the last token has no next feature
    embedded, before = target.embedding(tokens[:, 1:]), target.embedding(tokens[:, :-1])
    positions = torch.arange(rows.shape[1], device=tokens.device).expand_as(rows)
    out = head(*row_inputs(kind, embedded, features[:, :-1] + noise, before), positions)  # [B, T-1, F]
    truth = features[:, 1:]
    regression = F.smooth_l1_loss(out.float(), truth.float(), reduction="none").mean(-1)  # [B, T-1]
    p = target.logits(truth).softmax(-1)
    entropy = -(p * target.logits(out).log_softmax(-1)).sum(-1)  # [B, T-1]
    count = rows.sum() + 1e-5
    return (regression * rows).sum() / count, (entropy * rows).sum() / count


# ------------------------------------------------------------------------------------------ evaluation


def own_sequences(engine: Engine, prompts: list[list[int]], length: int) -> list[tuple[int, list[int]]]:
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


class Chains:
    """Chain drafts from every position of a sequence at once."""

    def __init__(self, head: EagleHead, target: Transformer, tokens: Tensor, kind: str):
        """tokens: [1, T], written by the target."""
        self.head, self.target, self.tokens, self.kind = head, target, tokens, kind
        T = tokens.shape[1]
        steps = torch.arange(T, device=tokens.device)
        self.features = target(tokens, steps[None])
        dtype = head.fc.weight.dtype  # the target's may be another
        self.cache = KVCache.empty(head.config.model, 1, T * (ALPHAS + 1), dtype, str(tokens.device))

    def step(self, s: int, features: Tensor, drafted: Tensor, before: Tensor) -> Tensor:
        """Run drafting step `s` for all T-2 starts. features: [1, R, F]; drafted, before: [1, R] tokens."""
        R = drafted.shape[1]
        rows = torch.arange(R, device=drafted.device)
        causal = rows[None] <= rows[:, None]
        own = torch.eye(R, dtype=torch.bool, device=drafted.device)
        mask = torch.cat((causal, own.repeat(1, s)), 1)[None]  # true rows up to here, own predicted rows
        window = Window(rows[None] + s * R, torch.zeros_like(rows[:1]), mask)
        inputs = row_inputs(self.kind, self.target.embedding(drafted), features, self.target.embedding(before))
        inputs = (x.to(self.head.fc.weight.dtype) for x in inputs)
        return self.head(*inputs, rows[None] + s, self.cache, window).to(features.dtype)

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """Returns: ok [R, ALPHAS], whether step s of start r drafts the target's token; logits of every step."""
        x = self.tokens
        R = x.shape[1] - 1 - ALPHAS  # starts whose whole chain has a truth
        features, drafted, before, ok, logits = self.features[:, :R], x[:, 1 : R + 1], x[:, :R], [], []
        for s in range(ALPHAS):
            features = self.step(s, features, drafted, before)
            z = self.target.logits(features)  # [1, R, V]
            before, drafted = drafted, z.argmax(-1)
            ok.append(drafted[0] == x[0, 2 + s : 2 + s + R])
            logits.append(z[0])
        return torch.stack(ok, 1), logits


@torch.no_grad()
def evaluate(head: EagleHead, target: Transformer, sequences: list[tuple[int, list[int]]], kind: str) -> dict:
    """alpha: n-alpha for n = 0..4; tau: mean accepted tokens + 1 of a chain of five, over all start positions."""
    tried, hits, lengths = torch.zeros(ALPHAS), torch.zeros(ALPHAS), []
    for begin, ids in sequences:
        tokens = torch.tensor([ids], device=target.embedding.weight.device)
        ok, _ = Chains(head, target, tokens, kind).run()
        run = ok[max(begin - 2, 0) :].long().cumprod(1).cpu()  # from the first start whose tokens are the target's
        tried += torch.cat((torch.ones(len(run), 1), run[:, :-1]), 1).sum(0)
        hits += run.sum(0)
        lengths.append(run.sum(1).float())
    return {"alpha": (hits / tried.clamp(min=1)).tolist(), "tau": torch.cat(lengths).mean().item() + 1}


@torch.no_grad()
def fit_sharpness(head: EagleHead, target: Transformer, sequences: list[tuple[int, list[int]]], kind: str) -> float:
    """The c that makes softmax(c * scores) the likeliest to hold the target's choice, at T = 0 and T = 1 alike."""
    grid = torch.arange(1.0, 4.01, 0.125)
    loss, generator = torch.zeros(len(grid)), torch.Generator().manual_seed(0)
    for begin, ids in sequences:
        tokens = torch.tensor([ids], device=target.embedding.weight.device)
        chains = Chains(head, target, tokens, kind)
        ok, logits = chains.run()
        R, first = ok.shape[0], max(begin - 2, 0)
        truth = target.logits(chains.features)[0, 1 : R + 1].cpu()  # distribution of the token that step 0 drafts
        noise = -torch.log(-torch.log(torch.rand(truth.shape, generator=generator).clamp(1e-9, 1 - 1e-7)))
        for extra in (0.0, noise):
            scores, choice = (logits[0].cpu() + extra)[first:], (truth + extra).argmax(-1)[first:]
            for i, c in enumerate(grid):
                loss[i] += F.cross_entropy(c * scores, choice, reduction="sum")
    return grid[loss.argmin()].item()


# -------------------------------------------------------------------------------------------- training


def make_head(config: TrainConfig, target: Transformer) -> EagleHead:
    """A new head shaped like a layer of the target, or an existing one to go on with."""
    if config.init not in ("random", "feature"):
        head = load_head(Path(config.init), target).float()
        return head.requires_grad_(True)
    c = target.config
    ffn, kv = config.ffn_dim or c.ffn_dim, config.kv_heads or c.n_kv_heads
    model = replace(c, n_layers=1, ffn_dim=ffn, n_kv_heads=kv, qkv_bias=False, o_bias=False, mlp_bias=False)
    # a head is dense whatever its target is, and the official loader knows no RoPE scaling in it
    head = EagleHead(EagleConfig(replace(model, n_experts=0, experts_per_token=0, qk_norm=False, rope_scaling=None)))
    if config.init == "feature":
        with torch.no_grad():
            head.fc.weight.normal_(std=0.02)
            head.fc.weight[:, c.dim :] += torch.eye(c.dim)
            head.fc.bias.zero_()
    return head.to(target.embedding.weight.device)


def save_head(head: EagleHead, config: TrainConfig, info: dict) -> None:
    """Write the official layout: config.json and model.safetensors."""
    out, c = Path(config.out), head.config.model
    tensors = export_weights(head, head_names(head.config), c, DTYPES[config.dtype])
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": c.n_layers,
        "hidden_size": c.dim, "intermediate_size": c.ffn_dim, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "rope_scaling": None,
        "max_position_embeddings": c.max_context, "bos_token_id": c.bos_id, "eos_token_id": next(iter(c.eos_ids), None),
        "tie_word_embeddings": False, "torch_dtype": config.dtype, "bias": head.config.fc_bias,
        "qkv_bias": c.qkv_bias,
        "draft_sharpness": head.config.sharpness, "draft_inputs": config.inputs,
    }  # fmt: skip
    replace_file(out / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"}))
    write_text(str(out / "config.json"), json.dumps(raw, indent=2))
    write_text(str(out / "training.json"), json.dumps(info, indent=1))
    replace_file(out / "curve.png", lambda p: plot_curve(info["curve"], p))


def plot_curve(curve: list[dict], path: Path) -> None:
    """Draw the losses, and alpha and tau, against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    steps = [row["step"] for row in curve]
    left.plot(steps, [row["regression"] for row in curve], label="SmoothL1 of features")
    left.plot(steps, [row["entropy"] for row in curve], label="cross-entropy (nats)")
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


def make_engine(config: TrainConfig, target: Transformer) -> Engine:
    """The target alone, to write sequences."""
    path = Path(config.checkpoint)
    tokenizer = Tokenizer.load(path)
    has_template = config.chat or template_text(path) is not None
    template = chat_template(path, tokenizer, config.chat) if has_template else None
    ends = (*target.config.eos_ids, *(template.stop_ids(tokenizer) if template else ()))
    options = GenerateConfig(checkpoint=config.checkpoint, draft="none", batch_size=16, device=config.device)
    context = min(2048, target.config.max_context)
    return with_cycles(Engine(options, target, RootOnly(), context, ends, tokenizer=tokenizer, template=template))


def prepare(config: TrainConfig, target: Transformer) -> tuple[list[Example], list[tuple[int, list[int]]]]:
    """Read the data, and let the target continue the prompts that are held out. Writes: the directory `config.out`.

    Returns: training examples; sequences, as from `own_sequences`
    Raises: ValueError when there is nothing to evaluate with.
    """
    engine = make_engine(config, target)
    Path(config.out).mkdir(parents=True, exist_ok=True)  # it keeps the answers that the target writes
    examples, prompts = load_data(config, engine)
    prompts = [p for p in prompts if len(p) + OWN_TOKENS < engine.context]
    if not prompts:
        raise ValueError("--data: nothing is held out to evaluate with (5 % by hash, prompts that fit); give more data")
    fitting = replace(engine, context=max(map(len, prompts)) + OWN_TOKENS)
    sequences = [s for s in own_sequences(fitting, prompts, OWN_TOKENS) if len(s[1]) >= s[0] + ALPHAS + 2]
    if not sequences:
        raise ValueError(f"--data: the target ends every held-out prompt within {ALPHAS + 1} tokens; is --chat right?")
    return examples, sequences


def train(config: TrainConfig) -> None:
    """Run the recipe. Writes: `config.out`."""
    state_file = train_demo.resume_file(Path(config.out), config.resume)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    target = load_model(Path(config.checkpoint), torch.float32 if config.device == "cpu" else None, config.device)
    examples, sequences = prepare(config, target)
    head = make_head(config, target)
    optimizers = train_demo.make_optimizers(head, config, lambda name: True)
    schedule = train_demo.Schedule(optimizers, config.steps, config.warmup)
    info = {"config": asdict(config), "parameters": sum(p.numel() for p in head.parameters()), "curve": []}
    first, began = 0, time.time()
    if config.resume:
        first, info["curve"] = train_demo.load_state(state_file, head, optimizers, config.device)
    autocast = torch.autocast(torch.device(config.device).type, DTYPES[config.dtype])
    look, loss_of = torch.compile(lambda tokens, steps: target(tokens, steps)), torch.compile(eagle_loss)
    steps = torch.arange(config.seq_len, device=config.device).expand(config.batch_size, -1)
    generator = torch.Generator(config.device)
    feed, recent = batches(examples, config, first), []
    for step in tqdm(range(first, config.steps), initial=first, total=config.steps, unit="step", mininterval=5):
        schedule.set(step)
        tokens, mask = (x.to(config.device) for x in next(feed))
        with autocast:
            with torch.no_grad():
                features = look(tokens, steps)
            generator.manual_seed(config.seed * 1_000_003 + step)  # a resumed run sees the same noise
            uniform = torch.rand(features[:, 1:].shape, generator=generator, device=config.device)
            noise = ((uniform * 2 - 1) * config.noise).to(features.dtype)
            regression, entropy = loss_of(head, target, (tokens, mask, features), noise, config.inputs)
        (config.feature_weight * regression + config.token_weight * entropy).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append((regression.item(), entropy.item()))
        done = step + 1
        if done % config.eval_every == 0 or done == config.steps:
            each = torch.tensor(recent).mean(0).tolist()
            recent = []
            row = {"step": done, "regression": each[0], "entropy": each[1], "seconds": time.time() - began}
            row |= evaluate(head, target, sequences, config.inputs)
            info["curve"].append(row)
            alphas = " ".join(f"{a:.3f}" for a in row["alpha"])
            tqdm.write(f"step {done}: SmoothL1 {each[0]:.4f}, CE {each[1]:.3f}; alpha {alphas}; tau {row['tau']:.3f}")
            train_demo.save_state(state_file, head, optimizers, done, info["curve"])
            if done == config.steps:
                sharpness = fit_sharpness(head, target, sequences, config.inputs)
                head.config = replace(head.config, sharpness=sharpness)
                tqdm.write(f"sharpness {sharpness}")
            save_head(head, config, info)
    state_file.unlink(missing_ok=True)
    print(f"wrote {config.out}")


def main() -> None:
    config = parse(TrainConfig, "train_eagle.py", __doc__)
    with one_line_errors("train_eagle.py"):
        train(replace(config, device=pick_device(config.device)))


if __name__ == "__main__":
    main()
