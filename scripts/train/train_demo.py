"""Train the bundled demo: a small LLaMA, or Mixtral, on the CPython standard library and sums.

    python scripts/train/train_demo.py --out checkpoints/demo            # 74 minutes on 3 cores
    python scripts/train/train_demo.py --out checkpoints/demo --resume   # from the last saved step
    python scripts/train/train_demo.py --moe --ffn_dim 384 --out checkpoints/demo-moe

1. Data: the standard library without its tests, and GSM8K's training split. About 4 % of the Python
   files and 400 sums are held out, chosen by hash, so the split does not depend on any order.
2. Tokens: a sentencepiece BPE of 4096 pieces of the training part. Documents are `<s> text </s>`.
   Some top-level Python definitions start with `<s>` as well, so that the model also learns prompts
   that begin in the middle of a module.
3. Training: Muon (Keller Jordan et al. 2024, as `torch.optim.Muon`) for the layers' matrices, AdamW
   for the rest; bf16 autocast, compiled. The last part trains on longer sequences.
4. `--moe`: two of eight experts per token; their stacks are AdamW's too (Muon takes single
   matrices). The training loss in the record includes load balancing, the held-out losses do not.
5. Output: Hugging Face layout (bf16 safetensors), with the held-out loss curve as a picture.
Not here: the draft head (scripts/train/train_eagle.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece as spm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.io import read_jsonl, replace_file, write_text
from cli.parsing import one_line_errors, option, parse
from hf.weights import export_weights, weight_names
from model import ModelConfig, Router, Transformer
from options import pick_device
from scripts.train import experts_gradient  # noqa: F401  (registers the gradients of experts)

BOS = 1
EOS = 2
EXPERTS_PER_TOKEN = 2  # Mixtral's


@dataclass
class TrainConfig:
    out: str = option(
        "checkpoints/demo", "directory to write; holds the resume state while training"
    )
    sums: str = option(
        "data/train/gsm8k_train_clean.jsonl", "worked sums, JSONL with `turns` and `answers`"
    )
    resume: bool = option(False, "go on from the last saved step")
    dim: int = option(256, "width")
    n_layers: int = option(8, "layers", least=1)
    ffn_dim: int = option(768, "width of the feed-forward; with --moe, of every expert")
    moe: bool = option(
        False, "a mixture of experts: every token goes through the best two of each layer"
    )
    n_experts: int = option(8, "experts of a layer, with --moe")
    balance: float = option(0.02, "weight of the load-balancing loss, with --moe")
    vocab_size: int = option(4096, "pieces")
    tokens: float = option(20e6, "training tokens in all", most=10**15)
    batch_tokens: int = option(4096, "tokens per step", least=1)
    seq_len: int = option(512, "tokens per sequence at first", least=1)
    long_seq_len: int = option(2048, "tokens per sequence in the last part", least=1)
    long_share: float = option(0.12, "share of the steps trained on long sequences")
    optimizer: str = option("muon", "muon or adamw, for the layers' matrices", ("muon", "adamw"))
    lr: float = option(
        2e-3, "peak learning rate of AdamW's part; Muon's is matched to its update size"
    )
    muon_lr: float = option(4e-3, "peak learning rate of Muon's part")
    weight_decay: float = option(0.1, "AdamW")
    warmup: int = option(100, "steps")
    eval_every: int = option(400, "steps between held-out losses and saved states", least=1)
    seed: int = option(0, "of initialisation, order and noise")
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    def check(self) -> None:
        """Check the values. Raises: ValueError for one that cannot work."""
        lengths = (self.seq_len, self.long_seq_len)
        uneven = any(self.batch_tokens % length for length in lengths)
        if self.tokens < self.batch_tokens or uneven:
            raise ValueError(
                "--tokens must hold a step, and --batch_tokens be a multiple of both sequence "
                "lengths"
            )
        if self.dim % 64:
            raise ValueError(
                "--dim must be a multiple of 64: heads are 32 wide, two share keys; "
                f"it is {self.dim}"
            )
        if self.moe and self.out == TrainConfig.out:
            raise ValueError(
                f"--moe would replace the dense demo in {self.out}; "
                "name another directory with --out"
            )
        if self.moe and self.n_experts < EXPERTS_PER_TOKEN:
            raise ValueError(
                f"--n_experts must be at least {EXPERTS_PER_TOKEN}; it is {self.n_experts}"
            )
        for name in ("n_experts", "balance"):
            if not self.moe and getattr(self, name) != getattr(TrainConfig, name):
                raise ValueError(f"--{name} belongs to a mixture of experts; add --moe")

    def model(self) -> ModelConfig:
        """Return the shape of the target."""
        experts = {}
        if self.moe:
            experts = {"n_experts": self.n_experts, "experts_per_token": EXPERTS_PER_TOKEN}
        return ModelConfig(
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.dim // 32,
            n_kv_heads=self.dim // 64,
            head_dim=32,
            ffn_dim=self.ffn_dim,
            vocab_size=self.vocab_size,
            max_context=self.long_seq_len,
            **experts,
        )


# ------------------------------------------------------------------------------- data


def held_out(name: str, share: float) -> bool:
    """Return true for a document of the held-out part, by the hash of its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < share * 2**32


def read_python() -> dict[str, list[str]]:
    """Read the standard library without tests and tables: {"train": [...], "held_out": [...]}."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tests = {"test", "tests", "idle_test"}
    skip = tests | {"encodings", "pydoc_data", "site-packages", "__pycache__", "lib2to3"}
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if skip & set(name.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few files declare another encoding
            continue
        if text.strip():
            part = "held_out" if held_out(str(name), 0.04) else "train"
            parts[part].append(text)
    return parts


def read_sums(path: Path) -> dict[str, list[str]]:
    """Read worked sums as `Question: ...\\nAnswer: ...`, split like `read_python`."""
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for row in read_jsonl(path, "--sums"):
        question = row["turns"][0]
        part = "held_out" if held_out(question, 0.055) else "train"
        parts[part].append(f"Question: {question}\nAnswer: {row['answers'][0]}")
    return parts


def train_tokenizer(documents: list[str], out: Path, vocab_size: int) -> spm.SentencePieceProcessor:
    """Train a BPE that keeps every character, and write `tokenizer.model`."""
    temporary = out / "tokenizer.tmp"
    spm.SentencePieceTrainer.train(
        sentence_iterator=(d for d in documents),
        model_prefix=str(temporary),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["\n"],
        max_sentence_length=10_000_000,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        minloglevel=2,
    )
    os.replace(f"{temporary}.model", out / "tokenizer.model")
    os.remove(f"{temporary}.vocab")
    return spm.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))


def encode_documents(
    documents: list[str], encode: Callable[[str], list[int]], cut_share: float
) -> list[list[int]]:
    """Encode to `<s> text </s>`; a share of the top-level definitions gets a `<s>` of its own."""
    rng = random.Random(0)
    encoded = []
    for text in documents:
        pieces = re.split(r"(?m)(?=^(?:def |class |@|async def ))", text)
        chunks = [pieces[0]]
        for piece in pieces[1:]:
            if rng.random() < cut_share:
                chunks.append(piece)
            else:
                chunks[-1] += piece
        ids = [i for chunk in chunks if chunk for i in (BOS, *encode(chunk))]
        encoded.append([*ids, EOS])
    return encoded


class Stream:
    """Endless shuffled epochs of documents, laid end to end. State: epoch number and offset."""

    def __init__(self, documents: list[list[int]], seed: int):
        self.documents = documents
        self.seed = seed
        self.epoch = -1
        self.offset = 0
        self.data = torch.empty(0, dtype=torch.long)

    def seek(self, steps: int, batch_tokens: int) -> None:
        """Move to the place after `steps` calls of `take`, of `batch_tokens` each."""
        per_epoch = (sum(map(len, self.documents)) - 1) // batch_tokens
        self._load(steps // per_epoch)
        self.offset = steps % per_epoch * batch_tokens

    def _load(self, epoch: int) -> None:
        order = list(range(len(self.documents)))
        random.Random(self.seed * 1000 + epoch).shuffle(order)
        self.data = torch.tensor([i for d in order for i in self.documents[d]])
        self.epoch = epoch
        self.offset = 0

    def take(self, rows: int, length: int) -> Tensor:
        """Return the next [rows, length + 1] tokens, int64; consecutive rows overlap by one."""
        need = rows * length + 1
        if self.offset + need > len(self.data):
            self._load(self.epoch + 1)
        flat = self.data[self.offset : self.offset + need]
        self.offset += rows * length
        return flat.unfold(0, length + 1, length)


# ------------------------------------------------------------------------------- training


def loss_of(model: Transformer, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy (nats per token) of a [rows, length + 1] batch."""
    positions = torch.arange(batch.shape[1] - 1, device=batch.device).expand(batch.shape[0], -1)
    features = model(batch[:, :-1], positions)
    return F.cross_entropy(model.logits(features).flatten(0, 1), batch[:, 1:].flatten())


def imbalance(router: Router, x: Tensor) -> Tensor:
    """Measure the imbalance of a router: 1 for even use, the number of experts when one is used.

    x: [B, T, F]
    Source: Switch Transformer (arXiv 2101.03961) section 2.2, over the chosen experts.
    """
    expert, _ = router(x)  # [B, T, J]
    p = router.logits(x).softmax(-1).mean((0, 1))  # [E]
    share = F.one_hot(expert, len(p)).float().mean((0, 1, 2))  # [E]
    return len(p) * (p * share).sum()


def balanced_loss(model: Transformer, batch: Tensor, weight: float) -> Tensor:
    """Return the `loss_of` a mixture of experts plus `weight` times its routers' mean imbalance."""
    tokens = batch[:, :-1]
    truth = batch[:, 1:]
    positions = torch.arange(tokens.shape[1], device=batch.device).expand_as(tokens)
    x, rope = model.embed(tokens, positions)
    uneven = 0.0
    for layer in model.layers:  # as Transformer.forward, and the routers' inputs are looked at
        x = x + layer.attention(layer.attention_norm(x), rope)
        routed = layer.ffn_norm(x)
        uneven = uneven + imbalance(layer.ffn.router, routed)
        x = x + layer.ffn(routed)
    logits = model.logits(model.norm(x))
    loss = F.cross_entropy(logits.flatten(0, 1), truth.flatten())
    return loss + weight * uneven / len(model.layers)


def init_weights(model: Transformer) -> None:
    """Draw weights as GPT-2: N(0, 0.02), smaller where a layer writes into the residual stream."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            scale = 1.0
            if name.endswith(("wo.weight", "w2.weight")):
                scale = 1 / math.sqrt(2 * model.config.n_layers)
            torch.nn.init.normal_(p, std=0.02 * scale)


def multiplies_bf16(device: str) -> bool:
    """Return true for a GPU, and for a processor with products of bf16."""
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


def make_optimizers(
    model: torch.nn.Module, config: Any, is_matrix: Callable[[str], bool]
) -> list[torch.optim.Optimizer]:
    """Make AdamW for everything, or with `--optimizer muon` Muon for matrices, AdamW for the rest.

    is_matrix: true for the name of a hidden matrix, not a table; stacks of matrices are AdamW's
    Source of Muon: Keller Jordan et al. 2024, with the update size of AdamW.
    """
    large = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    matrices = [p for n, p in large if is_matrix(n) and p.dim() == 2]
    tables = [p for n, p in large if not is_matrix(n) or p.dim() > 2]
    small = [p for p in model.parameters() if p.dim() < 2]
    muon = config.optimizer == "muon"
    decayed = tables if muon else tables + matrices
    groups = [{"params": small, "weight_decay": 0.0}]
    if decayed:
        groups.append({"params": decayed})
    decay = config.weight_decay
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=decay, fused=True
    )
    if not muon:
        return [adamw]
    kind = torch.optim.Muon if multiplies_bf16(config.device) else Fp32Muon
    rule = "match_rms_adamw"
    return [adamw, kind(matrices, lr=config.muon_lr, weight_decay=decay, adjust_lr_fn=rule)]


class Schedule:
    """Linear warm-up, then cosine down to 4 %, of every learning rate in some optimizers."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], steps: int, warmup: int):
        self.optimizers = optimizers
        self.steps = steps
        self.warmup = warmup
        self.peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]

    def set(self, step: float) -> None:
        """Set the learning rates of a position, in steps."""
        share = lr_share(step, self.steps, self.warmup)
        for optimizer, peaks in zip(self.optimizers, self.peaks):
            # loading a state replaces the groups
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * share


def update(module: torch.nn.Module, optimizers: list, loss: Tensor, clip: float) -> None:
    """Step the optimizers down the gradient of `loss`, clipped by norm. Writes: the module."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def lr_share(step: float, steps: int, warmup: int) -> float:
    """Return the share of a peak rate: linear warm-up, then cosine down to 4 %."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def evaluate(model, batches: list[Tensor], device: str) -> float:
    """Return the mean held-out loss, nats per token."""
    with torch.autocast(device.split(":")[0], torch.bfloat16):
        return sum(loss_of(model, b.to(device)).item() for b in batches) / len(batches)


def resume_file(out: Path, resume: bool) -> Path:
    """Return the file of a run's state. Raises: ValueError when there is nothing to resume."""
    file = out / "resume.pt"
    if resume and not file.is_file():
        raise ValueError(
            f"--resume: {out} holds no unfinished run; leave --resume out to start one"
        )
    return file


class Place(NamedTuple):
    """The place of a run in its training."""

    step: int  # steps done
    position: float  # in the schedule of the learning rates
    curve: list[dict]


def save_state(file: Path, module: torch.nn.Module, optimizers: list, place: Place) -> None:
    """Save the state that a stopped run resumes from. Writes: `file`."""
    state = {
        "weights": module.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "step": place.step,
        "position": place.position,
        "curve": json.dumps(place.curve),
    }
    replace_file(file, lambda path: torch.save(state, path))


def load_state(file: Path, module: torch.nn.Module, optimizers: list, device: str) -> Place:
    """Load a state of `save_state`. Writes: the module, the optimizers."""
    state = torch.load(file, map_location=device, weights_only=True)
    module.load_state_dict(state["weights"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return Place(state["step"], state["position"], json.loads(state["curve"]))


def save_checkpoint(model: Transformer, config: TrainConfig, info: dict) -> None:
    """Write the model in Hugging Face layout: config.json and bf16 model.safetensors."""
    c = model.config
    tensors = export_weights(model, weight_names(c), c, torch.bfloat16)
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if config.moe:
        kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        kind |= {"num_local_experts": c.n_experts, "num_experts_per_tok": c.experts_per_token}
    further = {
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }
    write_checkpoint(Path(config.out), tensors, kind | shape_keys(c) | further, info)


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


def plot_curve(info: dict, path: Path) -> None:
    """Draw held-out loss against training tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    tokens = [row["tokens"] / 1e6 for row in info["curve"]]
    lines = [
        ("python", "Python (held-out files)", 2),
        ("sums", "worked sums (held out)", 2),
        ("train", "training", 1),
    ]
    for key, label, width in lines:
        axis.plot(tokens, [row[key] for row in info["curve"]], label=label, lw=width)
    axis.set(
        xlabel="training tokens (million)",
        ylabel="loss (nats per token)",
        title="Demo target model",
    )
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def prepare(config: TrainConfig) -> tuple[Stream, dict[str, list[Tensor]], dict[str, float]]:
    """Read the data, and train or load the tokenizer.

    Returns: the training stream; held-out batches by domain; bytes per token by domain.
    """
    out = Path(config.out)
    domains = {"python": read_python(), "sums": read_sums(Path(config.sums))}
    if config.resume:
        tok = spm.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    else:
        documents = domains["python"]["train"] + domains["sums"]["train"]
        tok = train_tokenizer(documents, out, config.vocab_size)
    training = []
    held = {}
    ratio = {}
    for name, parts in domains.items():
        training += encode_documents(parts["train"], tok.encode, cut_share=0.25)
        for text in parts["held_out"]:
            assert tok.decode(tok.encode(text)) == text, "the tokenizer must round-trip exactly"
        encoded = encode_documents(parts["held_out"], tok.encode, cut_share=0.0)
        flat = torch.tensor([i for d in encoded for i in d])
        length = config.seq_len
        count = min(96, (len(flat) - 1) // length)
        rows = flat[: count * length + 1].unfold(0, length + 1, length)
        held[name] = [b for b in rows.split(8) if len(b) == 8]  # one shape, one compilation
        ratio[name] = sum(len(t.encode()) for t in parts["held_out"]) / len(flat)
    size = sum(map(len, training))
    rounded = {name: round(value, 2) for name, value in ratio.items()}
    print(f"{size / 1e6:.2f} M training tokens; bytes per token: {rounded}")
    return Stream(training, config.seed), held, ratio


def train(config: TrainConfig) -> None:
    """Run the whole recipe. Writes: `config.out`."""
    config.check()
    out = Path(config.out)
    state_file = resume_file(out, config.resume)
    out.mkdir(parents=True, exist_ok=True)
    if config.threads:
        torch.set_num_threads(config.threads)
    stream, held, ratio = prepare(config)
    torch.manual_seed(config.seed)
    model = Transformer(config.model())
    init_weights(model)
    model.to(config.device)
    optimizers = make_optimizers(model, config, lambda name: name.startswith("layers."))
    steps = int(config.tokens // config.batch_tokens)
    schedule = Schedule(optimizers, steps, config.warmup)
    info = {
        "config": asdict(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [],
    }
    first = 0
    if config.resume:
        first, _, info["curve"] = load_state(state_file, model, optimizers, config.device)
    stream.seek(first, config.batch_tokens)
    loss_function = partial(balanced_loss, weight=config.balance) if config.moe else loss_of
    compiled = torch.compile(loss_function)
    bar = tqdm(range(first, steps), initial=first, total=steps, unit="step", mininterval=5)
    begin = time.time()
    recent = []
    for step in bar:
        is_long = step >= steps * (1 - config.long_share)
        length = config.long_seq_len if is_long else config.seq_len
        schedule.set(step)
        batch = stream.take(config.batch_tokens // length, length).to(config.device)
        with torch.autocast(config.device.split(":")[0], torch.bfloat16):
            loss = compiled(model, batch)
        update(model, optimizers, loss, 1.0)
        recent.append(loss.item())
        done = step + 1
        if done % config.eval_every == 0 or done == steps:
            row = {"tokens": done * config.batch_tokens, "train": sum(recent) / len(recent)}
            row |= {name: evaluate(model, batches, config.device) for name, batches in held.items()}
            row |= {f"{n}_bpb": row[n] / math.log(2) / ratio[n] for n in held}
            row["seconds"] = time.time() - begin
            info["curve"].append(row)
            recent = []
            bar.write(json.dumps({k: round(v, 4) for k, v in row.items()}))
            save_state(state_file, model, optimizers, Place(done, done, info["curve"]))
            save_checkpoint(model, config, info)
            replace_file(out / "curve.png", lambda p: plot_curve(info, p))
    state_file.unlink(missing_ok=True)
    print(f"wrote {out}")


def main() -> None:
    config = parse(TrainConfig, "train_demo.py", __doc__)
    with one_line_errors("train_demo.py"):
        train(replace(config, device=pick_device(config.device)))


if __name__ == "__main__":
    main()
