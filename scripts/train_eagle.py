"""Train an EAGLE-1/2 draft head for any target, in the paper's way.

    python scripts/train_eagle.py --checkpoint DIR --data sharegpt.jsonl --chat vicuna --out heads/mine
    python scripts/train_eagle.py --out checkpoints/demo-eagle --lr 3e-3 ...   # the bundled head; all flags in README

How it works:
1. Data are dialogues (`turns` and `answers`, or ShareGPT's `conversations`), texts (`text`), or `demo`, the corpus of
   scripts/train_demo.py. The loss counts the answers of dialogues and every token of texts.
2. The frozen target gives the features of each batch as it is needed; nothing is dumped to disk.
3. Row t of the head sees f_t (plus uniform noise) and x_{t+1}, and learns f_{t+1} by SmoothL1 and the target's own
   distribution after it by soft cross-entropy.
4. Every so often the head drafts chains on sequences that the target has written itself, from every position at
   once: 0..4-alpha and tau. The curve is drawn, the head written, and the state saved for `--resume`.
5. At the end the sharpness c of log softmax(c * scores) is fitted by maximum likelihood on the same sequences.

Source: EAGLE (arXiv 2401.15077), section 4 (training), figure 8 (`--inputs`), table 6 (`--target_answers`).
Differences from the official code: clipping is by norm, noise does not depend on the length, padding is masked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_demo  # noqa: E402
from config import DEMO, GenerateConfig  # noqa: E402
from decode import Engine, Session, with_steps  # noqa: E402
from drafters import RootOnly  # noqa: E402
from eagle_draft import EagleConfig, EagleHead, head_names  # noqa: E402
from generate import generate  # noqa: E402
from model import DTYPES, KVCache, Transformer, Window, export_weights, load_model  # noqa: E402
from tokenizer import CHAT_TEMPLATES, Tokenizer, chat_template  # noqa: E402

INPUTS = ("feature&shifted", "feature&unshifted", "token", "feature")  # EAGLE-1 figure 8; the first is EAGLE
OWN_TOKENS = 128  # tokens that the target writes itself per evaluation prompt
ALPHAS = 5  # chain steps that are evaluated


@dataclass
class TrainConfig:
    checkpoint: str = DEMO  # the target
    out: str = "checkpoints/head"  # directory to write, official layout; holds the resume state while training
    data: str = "demo"  # comma-separated JSONL files, or demo
    chat: str = ""  # chat template of dialogue data; empty: the checkpoint's own
    target_answers: bool = False  # let the target write the answers of dialogue data first (table 6)
    inputs: str = INPUTS[0]  # what a row sees (figure 8)
    resume: bool = False  # go on from the last saved step
    steps: int = 20000
    batch_size: int = 4  # sequences per step
    seq_len: int = 2048  # tokens per sequence; longer ones are cut
    lr: float = 3e-5  # peak
    warmup: int = 2000  # steps
    weight_decay: float = 0.01
    clip: float = 0.5  # gradient norm
    noise: float = 0.1  # features get U(-noise, noise)
    feature_weight: float = 1.0  # of SmoothL1 between features
    token_weight: float = 0.1  # of the soft cross-entropy
    ffn_dim: int = 0  # of the head's layer; 0: the target's
    kv_heads: int = 0  # of the head's layer; 0: the target's
    init: str = "random"  # or "feature": fc starts as the identity on the feature
    dtype: str = "bfloat16"  # autocast of training and weights of the file
    eval_every: int = 500  # steps
    eval_prompts: int = 64  # held-out prompts for alpha and tau
    seed: int = 0
    threads: int = 0  # CPU threads; 0 leaves torch's default
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------------------------------------ data


@dataclass
class Example:
    """One sequence; `mask` marks the tokens whose features are trained on (answers, or everything)."""

    ids: list[int]
    mask: list[bool]


def read_dialogues(file: Path) -> list[tuple[list[str], list[str]]]:
    """(turns, answers) of every line. Raises: ValueError for a line of another form."""
    if not file.is_file():
        raise ValueError(f"--data: no such file: {file}; give JSONL files or `demo`")
    dialogues = []
    for number, line in enumerate(filter(str.strip, file.read_text(encoding="utf-8").splitlines()), 1):
        try:
            row = json.loads(line)
            if "conversations" in row:  # ShareGPT
                said = [(m["from"] in ("human", "user"), m["value"]) for m in row["conversations"]]
                said = said[next(i for i, (human, _) in enumerate(said) if human) :]
                turns, answers = [v for human, v in said if human], [v for human, v in said if not human]
            else:
                turns, answers = ([], [row["text"]]) if "text" in row else (row["turns"], row["answers"])
        except (json.JSONDecodeError, KeyError, TypeError, StopIteration):
            raise ValueError(
                f"--data: {file} line {number} must have `turns` and `answers`, `conversations`, or `text`"
            ) from None
        pairs = min(len(turns), len(answers)) if turns else 1
        dialogues.append((turns[:pairs], answers[:pairs]))
    return [d for d in dialogues if d[1]]


def to_example(turns: list[str], answers: list[str], tokenizer: Tokenizer, template) -> Example:
    """Tokenize a dialogue and mark its answers; a text (no turns) is marked whole."""
    end = list(tokenizer.eos_ids[:1])
    if not turns:
        ids = tokenizer.encode(answers[0]) + end
        return Example(ids, [True] * len(ids))
    render = lambda t: template.render(turns[: t + 1], answers[:t])  # noqa: E731
    encode = lambda text: tokenizer.encode(text, special=True)  # noqa: E731
    last = len(turns) - 1
    ids = encode(render(last) + template.reply + answers[last].strip()) + end
    mask = [False] * len(ids)
    for t, answer in enumerate(answers):
        # the common prefix finds the answer's span even where a token straddles its border
        begin = _common(encode(render(t)), ids)
        stop = _common(encode(render(t) + template.reply + answer.strip()), ids) + 1
        mask[begin:stop] = [True] * len(mask[begin:stop])
    return Example(ids, mask)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def load_data(config: TrainConfig, engine: Engine) -> tuple[list[Example], list[list[int]]]:
    """Returns: training examples, and held-out prompts for the evaluation."""
    if config.data == "demo":
        return _demo_data(config, engine)
    template = chat_template(Path(config.checkpoint), config.chat or None) if config.chat or _is_chat(config) else None
    dialogues = [d for file in config.data.split(",") for d in read_dialogues(Path(file))]
    if any(turns for turns, _ in dialogues) and template is None:
        raise ValueError(f"--data: dialogues need a chat template; name one of {', '.join(CHAT_TEMPLATES)} with --chat")
    held = [d for d in dialogues if train_demo.held_out("".join(d[0]) or d[1][0][:200], 0.05)]
    kept = [d for d in dialogues if d not in held]
    if config.target_answers:
        kept = target_answers([t for t, _ in kept if t], replace(engine, template=template))
    examples = [to_example(*d, engine.tokenizer, template) for d in tqdm(kept, desc="tokenize", unit="dialogue")]
    prompts = []
    for turns, answers in held[: config.eval_prompts]:
        ids = to_example(turns[:1], answers[:1], engine.tokenizer, template).ids
        text = template.render(turns[:1], []) if turns else ""
        prompts.append(engine.tokenizer.encode(text, special=True) if turns else ids[: len(ids) // 2 or 1])
    return examples, prompts


def _is_chat(config: TrainConfig) -> bool:
    try:
        chat_template(Path(config.checkpoint))
    except ValueError:
        return False
    return True


def _demo_data(config: TrainConfig, engine: Engine) -> tuple[list[Example], list[list[int]]]:
    sums = Path(DEMO).parent.parent / train_demo.TrainConfig.sums
    python, worked = train_demo.read_python(), train_demo.read_sums(sums)
    encode = lambda text: engine.tokenizer.encode(text, bos=False)  # noqa: E731
    documents = [ids for part in (python, worked) for ids in train_demo.encode_documents(part["train"], encode, 0.25)]
    examples = [Example(ids, [True] * len(ids)) for ids in documents]
    windows = [ids for ids in train_demo.encode_documents(python["held_out"], encode, 0.0) if len(ids) > 400]
    half = config.eval_prompts // 2
    prompts = [[train_demo.BOS, *windows[i % len(windows)][150 * (1 + i // len(windows)) :][:96]] for i in range(half)]
    questions = [text.split("\nAnswer:")[0] + "\nAnswer:" for text in worked["held_out"]]
    return examples, prompts + [engine.tokenizer.encode(q) for q in questions[:half]]


def target_answers(turns: list[list[str]], engine: Engine) -> list[tuple[list[str], list[str]]]:
    """Let the target answer every turn itself, greedily. Returns: dialogues."""
    dialogues = []
    for group in tqdm(turns, desc="target answers", unit="dialogue"):
        dialogues.append((group, generate(engine, [group]).text))
    return dialogues


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
        self.features, _ = target(tokens, steps[None])
        self.cache = KVCache.empty(head.config.model, 1, T * (ALPHAS + 1), self.features.dtype, str(tokens.device))

    def step(self, s: int, features: Tensor, drafted: Tensor, before: Tensor) -> Tensor:
        """Run drafting step `s` for all T-2 starts. features: [1, R, F]; drafted, before: [1, R] tokens."""
        R = drafted.shape[1]
        rows = torch.arange(R, device=drafted.device)
        causal = rows[None] <= rows[:, None]
        own = torch.eye(R, dtype=torch.bool, device=drafted.device)
        mask = torch.cat((causal, own.repeat(1, s)), 1)[None]  # true rows up to here, own predicted rows
        window = Window(rows[None] + s * R, torch.zeros_like(rows[:1]), mask)
        inputs = row_inputs(self.kind, self.target.embedding(drafted), features, self.target.embedding(before))
        return self.head(*inputs, rows[None] + s, self.cache, window)

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
        if len(ids) < begin + ALPHAS + 2:
            continue
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
        if len(ids) < begin + ALPHAS + 2:
            continue
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
    """A new head shaped like a layer of the target."""
    c = target.config
    ffn, kv = config.ffn_dim or c.ffn_dim, config.kv_heads or c.n_kv_heads
    model = replace(c, n_layers=1, ffn_dim=ffn, n_kv_heads=kv, qkv_bias=False, o_bias=False, mlp_bias=False)
    # the official loader knows no RoPE scaling in a head
    head = EagleHead(EagleConfig(replace(model, rope_scaling=None)))
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
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
        "hidden_size": c.dim, "intermediate_size": c.ffn_dim, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "rope_scaling": None,
        "max_position_embeddings": c.max_context, "bos_token_id": c.bos_id, "eos_token_id": c.eos_ids[0],
        "tie_word_embeddings": False, "torch_dtype": config.dtype, "bias": True,
        "draft_sharpness": head.config.sharpness, "draft_inputs": config.inputs,
    }  # fmt: skip
    train_demo.replace_file(out / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"}))
    train_demo.replace_file(out / "config.json", lambda p: p.write_text(json.dumps(raw, indent=2) + "\n"))
    train_demo.replace_file(out / "training.json", lambda p: p.write_text(json.dumps(info, indent=1) + "\n"))
    train_demo.replace_file(out / "curve.png", lambda p: plot_curve(info["curve"], p))


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


def train(config: TrainConfig) -> None:
    """Run the recipe. Writes: `config.out`."""
    out, path = Path(config.out), Path(config.checkpoint)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    target = load_model(path, torch.float32 if config.device == "cpu" else None, config.device)
    options = GenerateConfig(checkpoint=config.checkpoint, draft="none", batch_size=16, device=config.device)
    context = min(2048, target.config.max_context)
    tokenizer = Tokenizer.load(path)
    engine = with_steps(Engine(options, target, RootOnly(), context, target.config.eos_ids, tokenizer=tokenizer))
    examples, prompts = load_data(config, engine)
    out.mkdir(parents=True, exist_ok=True)
    prompts = [p for p in prompts if len(p) + OWN_TOKENS < context]
    fitting = replace(engine, context=max(map(len, prompts)) + OWN_TOKENS)
    sequences = own_sequences(fitting, prompts, OWN_TOKENS)
    head = make_head(config, target)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )
    info = {"config": asdict(config), "parameters": sum(p.numel() for p in head.parameters()), "curve": []}
    first, state_file, began = 0, out / "resume.pt", time.time()
    if config.resume and state_file.is_file():
        state = torch.load(state_file, map_location=config.device, weights_only=True)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        first, info["curve"] = state["step"], json.loads(state["curve"])
    autocast = torch.autocast(torch.device(config.device).type, DTYPES[config.dtype])
    look, loss_of = torch.compile(lambda tokens, steps: target(tokens, steps)[0]), torch.compile(eagle_loss)
    steps = torch.arange(config.seq_len, device=config.device).expand(config.batch_size, -1)
    feed, sums = batches(examples, config, first), torch.zeros(2)
    for step in tqdm(range(first, config.steps), initial=first, total=config.steps, unit="step", mininterval=5):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * train_demo.lr_share(step, config.steps, config.warmup)
        tokens, mask = (x.to(config.device) for x in next(feed))
        with autocast:
            with torch.no_grad():
                features = look(tokens, steps)
            noise = (torch.rand_like(features[:, 1:]) * 2 - 1) * config.noise
            regression, entropy = loss_of(head, target, (tokens, mask, features), noise, config.inputs)
        (config.feature_weight * regression + config.token_weight * entropy).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums += torch.tensor([regression.item(), entropy.item()])
        done = step + 1
        if done % config.eval_every == 0 or done == config.steps:
            each = (sums / (config.eval_every if done % config.eval_every == 0 else done % config.eval_every)).tolist()
            sums.zero_()
            row = {"step": done, "regression": each[0], "entropy": each[1], "seconds": time.time() - began}
            row |= evaluate(head, target, sequences, config.inputs)
            info["curve"].append(row)
            alphas = " ".join(f"{a:.3f}" for a in row["alpha"])
            tqdm.write(f"step {done}: SmoothL1 {each[0]:.4f}, CE {each[1]:.3f}; alpha {alphas}; tau {row['tau']:.3f}")
            state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            state["curve"] = json.dumps(info["curve"])
            train_demo.replace_file(state_file, lambda p, state=state: torch.save(state, p))
            if done == config.steps:
                sharpness = fit_sharpness(head, target, sequences, config.inputs)
                head.config = replace(head.config, sharpness=sharpness)
                tqdm.write(f"sharpness {sharpness}")
            save_head(head, config, info)
    state_file.unlink(missing_ok=True)
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_demo.add_flags(parser, fields(TrainConfig), {"inputs": INPUTS, "init": ("random", "feature")})
    config = TrainConfig(**vars(parser.parse_args()))
    train_demo.run_or_fail("train_eagle.py", lambda: train(config))


if __name__ == "__main__":
    main()
