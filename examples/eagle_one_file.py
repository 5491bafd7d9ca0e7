"""Speculative decoding with EAGLE, the whole method in one file: to read, to copy, to change.

A small head drafts a tree of tokens. The target model reads the whole tree in one pass. The deepest
path on which every token is the target's own choice is accepted, and one more choice behind it.
So the text is the target's own; the draft only decides how many tokens a pass brings.

    python examples/eagle_one_file.py                  decodes with the demo and its head
    python examples/eagle_one_file.py --checkpoint DIR --head DIR --prompt "Once upon a time"

It prints the text, on a terminal with accepted drafts in reverse video, then the tokens per pass
(tau), and whether decoding without the head gives the same tokens.

Start at `Engine.generate`, the loop; `draft` and `verify` are its steps. One sequence, hence no
batch dimension. Letters in shapes: T tokens of a pass, N nodes of a tree, D drafted levels, K
children of a node, S slots of a cache, F width, H and Hkv heads, E head width, V vocabulary.
Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

DEMO = Path(__file__).resolve().parents[1] / "checkpoints" / "demo"
PROMPT = "def read_lines(path):"
OPTIONS = (
    ("checkpoint", DEMO, "directory of the target, as Hugging Face has it"),
    ("head", "", "directory of an EAGLE-1, 2 or 3 head, or none; default: CHECKPOINT-eagle"),
    ("prompt", "", f"text to continue; default: {PROMPT}"),
    ("prompt_ids", "", "in its place: token ids, such as 1,17,35"),
    ("max_new_tokens", 64, "tokens to decide"),
    ("temperature", 0.0, "0: the likeliest token every time"),
    ("seed", 0, "of the noise"),
    ("depth", 6, "drafted levels"),
    ("topk", 10, "children of a node; 1: a chain"),
    ("nodes", 0, "verified nodes, root included; 0: 60, or as many as there are"),
    ("context", 2048, "tokens that the caches hold"),
    ("bits", 16, "8 or 4: quantize the weights"),
    ("dtype", "", "default: the checkpoint's"),
    ("threads", 1, "of a CPU; a small model is slower with several"),
    ("device", "", "cuda or cpu; default: cuda if there is one"),
)
# without a usage line, a mistake is one line on standard error, with exit status 2
PARSER = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
for name, default, text in OPTIONS:
    PARSER.add_argument(f"--{name}", default=default, type=type(default), help=text)
PARSER.add_argument("--compile", action="store_true", help="compile draft and verify")
if __name__ == "__main__":
    PARSER.parse_args()  # --help and mistakes are answered before the imports, which take seconds

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

GROUP = 32  # inputs that share a scale in int4
MASK32 = 0xFFFFFFFF
# a file with a weight of another name holds a model that is not served
NAMES = r"(embed_tokens|((input|post_attention)_layer|hidden_)?norm|\w+_proj|gate|w\d|lm_head|fc)"
KNOWN = re.compile(rf"(.*\.)?{NAMES}\.weight|fc\.bias|d2t|t2d|.*inv_freq")


class Place(NamedTuple):  # of the T tokens of a pass; siblings share a position, but not a slot
    slots: Tensor  # [T] int64, the cache slot that a token's key and value are written to
    positions: Tensor  # [T] int64, its RoPE position
    visible: Tensor  # [T, S] bool, the slots that it sees, its own included


class Model(nn.Module):
    """The layers of a target or a head. Weights are buffers, under Hugging Face's names.

    Caches never grow; a mask says which slots count. So every pass has the same shapes: a step
    compiles once, and a GPU can replay it as a captured graph.
    """

    def __init__(self, path: Path, options: argparse.Namespace):
        super().__init__()
        if path.suffix == ".gguf":
            raise ValueError(f"{path} is a GGUF file; name a directory, or run generate.py with it")
        self.config = config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.E = config.get("head_dim") or config["hidden_size"] // self.heads
        self.layers = config["num_hidden_layers"]
        self.register_buffer("freq", self.rope_frequencies().to(options.device))  # [E/2]
        self.dtype = getattr(torch, options.dtype or config.get("torch_dtype") or config["dtype"])
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
        for file in files:
            is_safe = file.suffix == ".safetensors"
            part = load_file(file) if is_safe else torch.load(file, weights_only=True, mmap=True)
            for name, tensor in part.items():
                self.add(name, tensor.to(options.device), options.bits)
        slots = options.context + max(options.nodes, options.depth * options.topk + 1)
        for i in range(self.layers):
            for kind in ("k_cache", "v_cache"):
                # zeros, since a hidden slot counts 0 times, and 0 times a NaN would be a NaN
                cache = torch.zeros(self.kv_heads, slots, self.E, dtype=self.dtype)
                self.register_buffer(f"{kind}{i}", cache.to(options.device))  # [Hkv, S, E]

    def rope_frequencies(self) -> Tensor:
        """Return RoPE's radians per position, [E/2] fp32, scaled as the config says."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.config.get("rope_theta") or 10000.0
        freq = 1 / theta ** (torch.arange(0, self.E, 2) / self.E)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return freq
        if kind != "llama3":
            raise ValueError(f"RoPE scaling must be llama3 or none, not {kind}")
        # long waves slow down, short ones stay, those between are blended
        low = rope["low_freq_factor"]
        turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
        blend = ((turns - low) / (rope["high_freq_factor"] - low)).clamp(0, 1)
        return (freq / rope["factor"]).lerp(freq, blend)

    def add(self, name: str, weight: Tensor, bits: int) -> None:
        """Keep a weight as floats, or a linear layer's as codes: of 8 bits or of 4."""
        if not KNOWN.fullmatch(name):
            raise ValueError(f"the weight {name} is of no LLaMA, Mixtral or EAGLE head")
        buffer = name.removeprefix("model.").removesuffix(".weight").replace(".", "_")
        if bits == 16 or weight.dim() < 2 or name.endswith(("embed_tokens.weight", ".gate.weight")):
            kept = weight.to(self.dtype) if weight.is_floating_point() else weight
            return self.register_buffer(buffer, kept)
        group = weight.shape[1] if bits == 8 else GROUP
        groups = weight.float().unflatten(1, (-1, group))  # [out, in/G, G]
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
        codes = (groups / scale).round().to(torch.int8)
        if bits == 4:  # two codes in a byte, made positive since a shift would mind the sign
            low, high = (codes + 8).to(torch.uint8).chunk(2, -1)
            codes = low | high << 4  # [out, in/G, G/2]
        self.register_buffer(buffer, codes)
        self.register_buffer(f"{buffer}_scale", scale)  # [out, in/G, 1] fp32

    def linear(self, name: str, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        """Multiply with a weight; codes become floats at every use."""
        weight = getattr(self, name)
        if weight.is_floating_point():
            return F.linear(x, weight)
        if weight.dtype == torch.uint8:
            weight = torch.cat((weight & 15, weight >> 4), -1).float() - 8  # [out, in/G, G]
        return F.linear(x, (weight * getattr(self, f"{name}_scale")).flatten(1).to(x.dtype))

    def rms_norm(self, name: str, x: Tensor) -> Tensor:  # [T, F] -> [T, F]
        return F.rms_norm(x, x.shape[-1:], getattr(self, name), self.config["rms_norm_eps"])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:  # [T, H E] -> [H, T, E]
        """Apply RoPE in fp32, in Hugging Face's layout: the two halves of E make the pairs."""
        angles = positions[:, None] * self.freq  # [T, E/2]
        left, right = x.float().unflatten(1, (-1, 2, self.E // 2)).permute(2, 1, 0, 3)
        cos = angles.cos()
        sin = angles.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)

    def attention(self, i: int, name: str, h: Tensor, place: Place) -> Tensor:
        """Attend in layer i: [T, inputs] -> [T, F]. Writes: its caches at `place.slots`."""
        k_cache = getattr(self, f"k_cache{i}")
        v_cache = getattr(self, f"v_cache{i}")
        q = self.rotate(self.linear(f"{name}_self_attn_q_proj", h), place.positions)  # [H, T, E]
        k = self.rotate(self.linear(f"{name}_self_attn_k_proj", h), place.positions)  # [Hkv, T, E]
        v = self.linear(f"{name}_self_attn_v_proj", h).unflatten(1, (-1, self.E)).transpose(0, 1)
        k_cache[:, place.slots] = k
        v_cache[:, place.slots] = v
        # query heads that share a key head become rows of it, so that no key is copied per head
        rows = q.reshape(1, self.kv_heads, -1, self.E)  # [1, Hkv, (H/Hkv) T, E]
        mask = place.visible.repeat(self.heads // self.kv_heads, 1)  # [(H/Hkv) T, S]
        y = F.scaled_dot_product_attention(rows, k_cache[None], v_cache[None], attn_mask=mask)
        y = y.reshape(q.shape).transpose(0, 1).flatten(1)  # [T, H E]
        return self.linear(f"{name}_self_attn_o_proj", y)

    def swiglu(self, x: Tensor, gate: str, up: str, down: str) -> Tensor:  # [T, F] -> [T, F]
        return self.linear(down, F.silu(self.linear(gate, x)) * self.linear(up, x))

    def experts(self, name: str, x: Tensor) -> Tensor:  # [T, F] -> [T, F]
        """Let a router weigh the best experts of each token. Source: Mixtral (arXiv 2401.04088)."""
        scores = F.linear(x.float(), getattr(self, f"{name}_gate").float())  # in 16 bits they tie
        best, chosen = scores.topk(self.config["num_experts_per_tok"])
        share = torch.zeros_like(scores).scatter(1, chosen, best.softmax(-1))  # [T, experts]
        y = torch.zeros_like(x)
        # shapes must not depend on the choice, and a tree needs nearly every expert: run them all
        for e in range(scores.shape[1]):
            weights = [f"{name}_experts_{e}_{w}" for w in ("w1", "w3", "w2")]
            y = y + self.swiglu(x, *weights) * share[:, e, None]
        return y.to(x.dtype)

    def layer(self, i: int, name: str, x: Tensor, h: Tensor, place: Place) -> Tensor:
        """Run layer i. x: [T, F], the residual stream; h: [T, inputs], the attention's input."""
        x = x + self.attention(i, name, h, place)
        h = self.rms_norm(f"{name}_post_attention_layernorm", x)
        if hasattr(self, f"{name}_block_sparse_moe_gate"):
            return x + self.experts(f"{name}_block_sparse_moe", h)
        return x + self.swiglu(h, *[f"{name}_mlp_{part}_proj" for part in ("gate", "up", "down")])


class Target(Model):  # LLaMA, Mistral or Mixtral
    aux_layers = ()  # the layers whose inputs an EAGLE-3 head reads

    def forward(self, tokens: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Return the LM head's input, [T, F], and the features for a head, [T, F or 3F]."""
        x = F.embedding(tokens, self.embed_tokens)  # [T, F]
        inputs = []
        for i in range(self.layers):
            inputs.append(x)
            h = self.rms_norm(f"layers_{i}_input_layernorm", x)
            x = self.layer(i, f"layers_{i}", x, h, place)
        x = self.rms_norm("norm", x)
        return x, torch.cat([inputs[i] for i in self.aux_layers], -1) if self.aux_layers else x

    def logits(self, x: Tensor) -> Tensor:  # [T, F] -> [T, V] fp32
        tied = self.config.get("tie_word_embeddings")
        return self.linear("embed_tokens" if tied else "lm_head", x).float()


class Head(Model):
    """An EAGLE head: from feature f_j and token x_{j+1} it predicts f_{j+1} and x_{j+2}."""

    def __init__(self, path: Path, options: argparse.Namespace, target: Target):
        super().__init__(path, options)
        self.target = target
        self.sharpness = self.config.get("draft_sharpness", 1.0)  # c in log softmax(c z), if fitted
        self.is_eagle3 = hasattr(self, "midlayer_hidden_norm")
        if self.is_eagle3:  # three layers of the target make f_j; the LM head is its own
            listed = self.config.get("eagle_aux_hidden_state_layer_ids")
            target.aux_layers = listed or (2, target.layers // 2, target.layers - 3)
        count = self.config.get("draft_vocab_size") or self.config["vocab_size"]
        ids = torch.arange(count, device=options.device) + getattr(self, "d2t", 0)
        self.register_buffer("ids", ids)  # [Vd] int64, the token of each logit, d2t above its place

    def forward(self, tokens: Tensor, hidden: Tensor, place: Place) -> Tensor:
        """Predict the next features, [T, F]. tokens: [T], x_{j+1}; hidden: [T, F or 3F], f_j."""
        x = F.embedding(tokens, self.target.embed_tokens)  # [T, F]
        if self.is_eagle3:
            if hidden.shape[1] > x.shape[1]:  # the target's; outputs of the head are fused already
                hidden = self.linear("fc", hidden)
            x = self.rms_norm("midlayer_input_layernorm", x)
            h = torch.cat((x, self.rms_norm("midlayer_hidden_norm", hidden)), -1)  # [T, 2F]
            return self.layer(0, "midlayer", hidden, h, place)
        x = self.linear("fc", torch.cat((x, hidden), -1)) + getattr(self, "fc_bias", 0)
        return self.layer(0, "layers_0", x, x, place)  # no norm before its attention

    def logits(self, out: Tensor) -> Tensor:  # [T, F] -> [T, Vd] fp32
        if self.is_eagle3:
            return self.linear("lm_head", self.rms_norm("norm", out)).float()
        return self.target.logits(out)


def gumbel(key: Tensor, first: Tensor, rows: int, vocab: int) -> Tensor:
    """Return Gumbel noise of consecutive draws, [rows, vocab] fp32: a pure function of its key.

    The argmax of log p + noise is an exact draw from p. No draft changes the noise, nor the text.
    key: [4] int64, seed (low word, high word), sample, prompt; first: [1] int64, the first draw.
    Source: Philox4x32-10 (Salmon et al., 2011); a counter gives the noise of four tokens.
    """
    seed_low, seed_high, c2, c3 = key.unbind()
    # the mask changes nothing; without it the compiler takes an index for 32 bits wide
    c0 = torch.arange((vocab + 3) // 4, device=key.device) & MASK32  # [V/4]
    c1 = (first + torch.arange(rows, device=key.device))[:, None]  # [rows, 1]
    for turn in range(10):
        p0 = c0 * 0xD2511F53  # wraps modulo 2^64; a shift keeps the sign, hence the masks
        p1 = c2 * 0xCD9E8D57
        c0 = ((p1 >> 32) & MASK32) ^ c1 ^ ((seed_low + turn * 0x9E3779B9) & MASK32)
        c2 = ((p0 >> 32) & MASK32) ^ c3 ^ ((seed_high + turn * 0xBB67AE85) & MASK32)
        c1 = p1 & MASK32
        c3 = p0 & MASK32
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1).flatten(1)[:, :vocab]
    # fp32 rounds the topmost values to 1, where the logarithms would give infinity
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


class State(NamedTuple):  # after a pass. The root is the last token decided; it is not cached yet
    pos: Tensor  # [1] int64, index of the root
    draw: Tensor  # [1] int64, tokens drawn so far
    emitted: Tensor  # [D+1] int64, the tokens that the pass decided, root last; then padding
    features: Tensor  # [D+1, F or 3F], the target's features that each was decided from
    last: Tensor  # [1] int64, place of the root in `emitted`: the number of accepted nodes
    key: Tensor  # [4] int64, of the noise


class Engine(nn.Module):
    """A target and a head; without one the tree is only a root: vanilla decoding, the same loop."""

    def __init__(self, options: argparse.Namespace):
        """Load the models and try them. Raises: ValueError for files or trees that do not fit."""
        super().__init__()
        pool = options.topk + (options.depth - 1) * options.topk**2  # K + (D-1) K^2 candidates
        options.nodes = options.nodes or min(60, pool + 1)
        if not 2 <= options.nodes <= pool + 1 or options.bits not in (4, 8, 16):
            raise ValueError(f"--nodes must be 2 to {pool + 1} for this --topk, --bits 4, 8 or 16")
        self.D = options.depth if options.head else 0  # drafted levels
        self.K = options.topk  # children of a node, and nodes per level that get children
        self.N = options.nodes if options.head else 1  # verified nodes, root included
        self.temperature = options.temperature
        self.captured = options.compile and options.device != "cpu"
        try:
            self.target = Target(Path(options.checkpoint), options)
            self.head = Head(Path(options.head), options, self.target) if options.head else None
            self.vocab = len(self.target.embed_tokens)  # V
            slots = self.target.k_cache0.shape[1]
            self.register_buffer("every", torch.arange(slots, device=options.device))  # [S]
            list(self.generate([0, 0], 1, 0))  # a trial reads every weight
        except (AttributeError, KeyError, RuntimeError) as error:
            raise ValueError(f"config.json, weights and options do not fit: {error!r}") from None
        if options.compile:
            mode = "reduce-overhead" if self.captured else None
            self.draft = torch.compile(self.draft, fullgraph=True, dynamic=False, mode=mode)
            self.verify = torch.compile(self.verify, fullgraph=True, dynamic=False, mode=mode)

    def drop_head(self) -> None:
        """Draft nothing from now on."""
        self.head = None
        self.D = 0
        self.N = 1

    def causal(self, positions: Tensor) -> Place:  # consecutive tokens, each in its position's slot
        return Place(positions, positions, self.every <= positions[:, None])

    def draft(self, state: State) -> tuple:
        """Draft N nodes, the root first and parents before children. Writes: the head's cache.

        The head first reads the accepted tokens with the target's own features; only these rows
        stay. Then it goes on from its own outputs, in slots that the next draft overwrites.
        Returns: tokens, [N]; parents, [N], the root its own; mask, [N, N] bool, true where column j
            is node i or its ancestor; noise, [D+1, V] fp32, of the draw at each depth, or None.
        """
        root = state.emitted[state.last]  # [1]
        noise = gumbel(state.key, state.draw, self.D + 1, self.vocab) if self.temperature else None
        if self.head is None:
            return root, root * 0, root[None] == root, noise
        # token j + 1 makes row j, hence - 1; the rows of padding lie where nothing sees them
        rows = state.pos - 1 - state.last + self.every[: self.D + 1]
        out = self.head(state.emitted, state.features, self.causal(rows))
        tokens, values, parents = self.grow(out[state.last], state.pos, noise)
        # re-ranking (EAGLE-2, 4.2): no child beats its parent, and a stable order keeps it behind
        best = values.argsort(descending=True, stable=True)[: self.N - 1].sort().values  # [N-1]
        nodes = self.every[: self.N]  # [N]
        # the number of a parent's node is the number of entries up to it; of the root, -1, it is 0
        parents = torch.cat((nodes[:1], torch.searchsorted(best, parents[best], right=True)))  # [N]
        mask = nodes[:, None] == nodes  # [N, N]: itself, then its parent, and so on up to the root
        ancestor = nodes  # [N]
        for _ in range(self.D):
            ancestor = parents[ancestor]
            mask = mask | (ancestor[:, None] == nodes)
        return torch.cat((root, tokens[best])), parents, mask, noise

    def grow(self, out: Tensor, pos: Tensor, noise: Tensor | None) -> list[Tensor]:
        """Score P = K + (D-1) K^2 candidates; the best K paths of a level get children.

        out: [1, F], the head's output at the root. Source: EAGLE-2, 4.1.
        Returns: of each, [P]: token; log-probability of its path; number of its parent, -1: root.
        """
        K = self.K
        visible = (self.every < pos)[None]  # [R, S]; R = 1 node at the root, then K
        path = torch.zeros(1, device=out.device)  # [R], values of the nodes that get children
        number = torch.full_like(pos, -1)  # [R], their numbers
        first = 0  # number of a level's first candidate
        levels = []
        for level in range(self.D):
            scores = self.head.logits(out)  # [R, Vd]
            if noise is not None:  # the target will choose with this noise: the draft foresees it
                scores = scores + self.temperature * noise[level, self.head.ids]
            log_q, best = (self.head.sharpness * scores).log_softmax(-1).topk(K)  # [R, K]
            tokens = self.head.ids[best].flatten()  # [R K]
            values = (path[:, None] + log_q).flatten()
            levels.append((tokens, values, number.repeat_interleave(K)))
            if level + 1 == self.D:
                return [torch.cat(parts) for parts in zip(*levels)]
            order = values.argsort(descending=True, stable=True)[:K]  # places in this level
            number = first + order
            first += len(values)
            path = values[order]  # [K]
            slots = pos + level * K + self.every[:K]
            visible = visible[order // K] | (self.every == slots[:, None])  # [K, S]
            place = Place(slots, (pos + level).expand(K), visible)
            out = self.head(tokens[order], out[order // K], place)  # [K, F]

    def verify(self, state: State, tree: tuple) -> State:
        """Run the target over a tree, accept a path, compact. Writes: the target's caches."""
        tokens, parents, mask, noise = tree
        pos = state.pos
        depths = mask.sum(-1) - 1  # [N]
        offset = self.every - pos  # [S], from the root's slot
        in_tree = (offset >= 0) & (offset < self.N)
        visible = (offset < 0) | in_tree & mask[:, offset.clamp(0, self.N - 1)]  # [N, S]
        place = Place(pos + self.every[: self.N], pos + depths, visible)
        x, features = self.target(tokens, place)
        scores = self.target.logits(x)  # [N, V]
        if noise is not None:
            scores = scores / self.temperature + noise[depths]  # nodes of a depth share a draw
        choice = scores.argmax(-1)  # [N], the target's own token behind each node
        matches = (tokens == choice[parents]) | (depths == 0)
        accepted = ~(mask & ~matches).any(-1)  # [N]: the node and all its ancestors match
        # of shape [1], since an index of shape [] would be read by the host
        deepest = torch.where(accepted, depths, -1).argmax(0, keepdim=True)
        on_path = mask[deepest] & (depths == self.every[: self.D + 1, None])  # [D+1, N]
        path = on_path.int().argmax(-1)  # [D+1], the accepted node of each depth, then padding
        for i in range(self.target.layers):  # the accepted nodes move next to the prefix
            for cache in (getattr(self.target, f"{kind}_cache{i}") for kind in "kv"):
                cache[:, place.slots[: self.D + 1]] = cache[:, pos + path]
        new = depths[deepest] + 1  # [1], tokens decided
        return State(pos + new, state.draw + new, choice[path], features[path], new - 1, state.key)

    @torch.no_grad()
    def generate(self, prompt: list[int], limit: int, seed: int, index: int = 0) -> Iterator:
        """Yield the tokens that each pass decides, `limit` in all or up to the end of the text.

        prompt: two ids or more, for a head reads the feature before the root; index: of its noise
        """
        device = self.every.device
        key = torch.tensor([seed & MASK32, seed >> 32, 0, index], device=device)
        tokens = torch.tensor(prompt, device=device)
        place = self.causal(self.every[: len(prompt) - 1])
        _, features = self.target(tokens[:-1], place)  # the last token is the first root
        if self.head is not None:
            self.head(tokens[1:], features, place)
        zero = torch.zeros_like(key[:1])  # cloned below: a tensor under two names would recompile
        root = F.pad(tokens[-1:], (0, self.D))  # [D+1]
        features = F.pad(features[-1:], (0, 0, 0, self.D))  # [D+1, F or 3F]
        state = State(place.slots[-1:] + 1, zero, root, features, zero.clone(), key)
        ends = self.target.config.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        while limit > 0:
            if self.captured:  # a graph writes its outputs to the same memory every time
                state = State(*[part.clone() for part in state])
                torch.compiler.cudagraph_mark_step_begin()
            state = self.verify(state, self.draft(state))
            last, *emitted = torch.cat((state.last, state.emitted)).tolist()  # to the host, once
            new = emitted[: min(last + 1, limit)]
            stops = [i for i, token in enumerate(new) if token in ends]
            yield new[: stops[0] + 1] if stops else new
            limit = 0 if stops else limit - len(new)


def text_functions(path: Path) -> tuple[Callable, Callable]:
    """Return the functions that turn a text into token ids, and ids into a text."""
    if not (path / "tokenizer.json").exists() and (path / "tokenizer.model").exists():
        from sentencepiece import SentencePieceProcessor

        pieces = SentencePieceProcessor(str(path / "tokenizer.model"))
        return lambda text: pieces.encode(text, add_bos=True), pieces.decode
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode


def shaded(prompt: list[int], paths: list[list[int]], decode: Callable) -> str:
    """Return prompt and answer; on a terminal the accepted drafts are in reverse video.

    paths: the tokens of each pass; the last of a path is the target's own, those before are drafts
    """
    ids = prompt + sum(paths, [])
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return decode(ids)
    shown = decode(prompt)
    length = len(shown)
    end = len(prompt)
    for path in paths:
        # a token alone would lose the space before it, so the text is cut where the prefixes end
        drafts_end = len(decode(ids[: end + len(path) - 1]))
        end += len(path)
        text = decode(ids[:end])
        shown += f"\033[7m{text[length:drafts_end]}\033[0m{text[drafts_end:]}"
        length = len(text)
    return shown


def timed(engine: Engine, prompt: list[int], options: argparse.Namespace) -> tuple[list, float]:
    """Decode a prompt. Returns: the tokens of each pass; tokens per second."""
    limit = min(options.max_new_tokens, options.context - len(prompt))
    for _ in range(1 + options.compile):  # the first run compiles
        start = time.perf_counter()
        paths = list(engine.generate(prompt, limit, options.seed))
        seconds = time.perf_counter() - start
    return paths, len(sum(paths, [])) / seconds


def main(argv: list[str] | None = None) -> None:
    """Decode a prompt; print the text, or ids for ids, then the speed on standard error."""
    options = PARSER.parse_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(max(options.threads, 1))
    bundled = options.checkpoint.with_name(f"{options.checkpoint.name}-eagle")
    if options.head in ("", "none"):
        options.head = str(bundled) if bundled.is_dir() and not options.head else ""
    try:
        engine = Engine(options)
        if options.prompt_ids and not options.prompt:
            prompt = [int(i) for i in options.prompt_ids.split(",") if i]
        else:
            encode, decode = text_functions(options.checkpoint)
            prompt = encode(options.prompt or PROMPT)
        length = options.context - 1
        if not 2 <= len(prompt) <= length or not 0 <= min(prompt) <= max(prompt) < engine.vocab:
            rule = f"2 to {length} ids (--context - 1), each below {engine.vocab}"
            raise ValueError(f"a prompt needs {rule}; this one has {len(prompt)}")
    except (ValueError, OSError, ImportError, SafetensorError) as error:
        PARSER.error(" ".join(str(error).split()))
    paths, rate = timed(engine, prompt, options)
    new = sum(paths, [])
    as_ids = options.prompt_ids and not options.prompt
    print(",".join(map(str, new)) if as_ids else shaded(prompt, paths, decode))
    tau = len(new) / len(paths)
    told = f"{len(new)} tokens, {rate:.1f} tokens/s, tau {tau:.2f}"
    if options.head:
        engine.drop_head()
        plain, plain_rate = timed(engine, prompt, options)
        same = "the same tokens" if sum(plain, []) == new else "other tokens: try --dtype float32"
        cycle = f"a cycle takes {tau * plain_rate / rate:.1f} such passes"
        told += f"; without the head {plain_rate:.1f} tokens/s, {same}; {cycle}"
    print(told, file=sys.stderr)


if __name__ == "__main__":
    main()
