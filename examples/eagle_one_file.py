"""Speculative decoding with EAGLE, the whole method in one file: to read, to copy, to change.

A small head drafts a tree of tokens. The target model reads the whole tree in one pass. The deepest
path on which every token is the target's own choice is accepted, and one more choice behind it.
So the text is the target's own; the draft only decides how many tokens a pass brings.

    python examples/eagle_one_file.py --checkpoint DIR --head DIR --prompt "Once upon a time"

Start at `Engine.generate`, the loop; `draft` and `verify` are its steps. One sequence, hence no
batch dimension. Letters in shapes: T tokens of a pass, N nodes of a tree, D drafted levels, K
children of a node, S slots of a cache, F width, H and Hkv heads, E head width, V vocabulary.
Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

GROUP = 32  # inputs that share a scale in int4
MASK32 = 0xFFFFFFFF


def unfilled(*shape: int) -> nn.Parameter:
    """Make a weight without memory; `fill` puts a file's tensor in its place."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """A linear layer. Its weight is floats, or integer codes that become floats at every use."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = unfilled(outputs, inputs)
        self.bias = unfilled(outputs) if bias else None

    def quantize(self, bits: int) -> None:
        """Round the weight: int8 with a scale per output, int4 with one per GROUP inputs."""
        outputs, inputs = self.weight.shape
        group = inputs if bits == 8 else GROUP
        if inputs % group:
            raise ValueError(f"int4 needs a multiple of {GROUP} inputs, not {inputs}; use int8")
        weight = self.weight.float().view(outputs, -1, group)  # [out, in/G, G]
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
        codes = (weight / scale).round().to(torch.int8)
        if bits == 4:  # two codes in a byte, made positive since a shift would mind the sign
            low, high = (codes + 8).to(torch.uint8).chunk(2, -1)
            codes = low | high << 4  # [out, in/G, G/2]
        self.weight = None
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)  # [out, in/G, 1] fp32

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        codes = self.codes
        if codes.dtype == torch.uint8:
            codes = torch.cat((codes & 15, codes >> 4), -1).float() - 8  # [out, in/G, G]
        return F.linear(x, (codes * self.scale).flatten(1).to(x.dtype), self.bias)


class Place(NamedTuple):
    """The place of each of the T tokens of a pass. Siblings share a position, but not a slot."""

    slots: Tensor  # [T] int64, the cache slot that the token's key and value are written to
    positions: Tensor  # [T] int64, the RoPE position
    visible: Tensor  # [T, S] bool, the slots that the token sees, its own included


def rope_frequencies(config: dict) -> Tensor:
    """Return RoPE's radians per position, [E/2] fp32, scaled as the config says."""
    E = config["head_dim"]
    freq = 1 / config["rope_theta"] ** (torch.arange(0, E, 2, device=config["device"]).float() / E)
    rope = config["rope"]
    if "factor" not in rope:
        return freq
    slow = freq / rope["factor"]
    if "low_freq_factor" not in rope:  # the type "linear"
        return slow
    # the type "llama3": long waves slow down, short ones stay, those between are blended
    turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
    low = rope["low_freq_factor"]
    return slow.lerp(freq, ((turns - low) / (rope["high_freq_factor"] - low)).clamp(0, 1))


class Attention(nn.Module):
    """Grouped-query attention over a static cache.

    The cache never grows; a mask says which slots count. So every pass has the same shapes: a step
    compiles once, and a GPU can replay it as a captured graph.
    """

    def __init__(self, config: dict, inputs: int):
        super().__init__()
        self.E = config["head_dim"]
        self.kv_heads = config["num_key_value_heads"]
        width = config["num_attention_heads"] * self.E
        self.q_proj = Linear(inputs, width)
        self.k_proj = Linear(inputs, self.kv_heads * self.E)
        self.v_proj = Linear(inputs, self.kv_heads * self.E)
        self.o_proj = Linear(width, config["hidden_size"])
        self.register_buffer("freq", rope_frequencies(config))
        # zeros, since a hidden slot counts 0 times, and 0 times a NaN of unset memory is a NaN
        cache = torch.zeros(2, self.kv_heads, config["slots"], self.E, dtype=config["dtype"])
        self.register_buffer("cache", cache.to(config["device"]))  # keys and values

    def heads(self, x: Tensor) -> Tensor:  # [T, H E] -> [H, T, E]
        return x.unflatten(-1, (-1, self.E)).transpose(0, 1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:  # [H, T, E] -> [H, T, E]
        """Apply RoPE in fp32, in Hugging Face's layout: the two halves of E make the pairs."""
        angles = positions[:, None] * self.freq  # [T, E/2]
        cos = angles.cos()
        sin = angles.sin()
        left, right = x.float().chunk(2, -1)  # [H, T, E/2]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)

    def forward(self, x: Tensor, place: Place) -> Tensor:  # [T, inputs] -> [T, F]
        """Attend. Writes: the cache at `place.slots`."""
        q = self.rotate(self.heads(self.q_proj(x)), place.positions)  # [H, T, E]
        self.cache[0, :, place.slots] = self.rotate(self.heads(self.k_proj(x)), place.positions)
        self.cache[1, :, place.slots] = self.heads(self.v_proj(x))
        # query heads that share a key head become rows of it, so that no key is copied per head
        rows = q.reshape(1, self.kv_heads, -1, self.E)  # [1, Hkv, (H/Hkv) T, E]
        mask = place.visible.repeat(rows.shape[2] // len(x), 1)  # [(H/Hkv) T, S]
        y = F.scaled_dot_product_attention(rows, *self.cache[:, None], attn_mask=mask)
        return self.o_proj(y.reshape(q.shape).transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: dict):
        super().__init__()
        self.gate_proj = Linear(config["hidden_size"], config["intermediate_size"])
        self.up_proj = Linear(config["hidden_size"], config["intermediate_size"])
        self.down_proj = Linear(config["intermediate_size"], config["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:  # [T, F] -> [T, F]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Mixtral's feed-forward (arXiv 2401.04088): a router weighs the best experts of each token."""

    def __init__(self, config: dict):
        super().__init__()
        self.chosen = config["num_experts_per_tok"]
        self.gate = nn.Linear(config["hidden_size"], config["num_local_experts"], False, "meta")
        self.experts = nn.ModuleList(MLP(config) for _ in range(config["num_local_experts"]))

    def forward(self, x: Tensor) -> Tensor:  # [T, F] -> [T, F]
        scores = F.linear(x.float(), self.gate.weight.float())  # in 16 bits, experts would tie
        best, expert = scores.topk(self.chosen)  # [T, chosen]
        share = torch.zeros_like(scores).scatter(1, expert, best.softmax(-1))  # [T, experts]
        # shapes must not depend on the choice, and a tree needs nearly every expert: run them all
        return sum(mlp(x) * share[:, e, None] for e, mlp in enumerate(self.experts)).to(x.dtype)


class Block(nn.Module):
    """A transformer layer. Its owner norms the attention's input, since there the heads differ."""

    def __init__(self, config: dict, inputs: int, *norms: str):
        """inputs: width of the attention's input; norms: names of those that its owner applies."""
        super().__init__()
        for name in (*norms, "post_attention_layernorm"):
            self.register_module(name, make_norm(config))
        self.self_attn = Attention(config, inputs)
        self.mlp = Experts(config) if "num_local_experts" in config else MLP(config)

    def forward(self, x: Tensor, h: Tensor, place: Place) -> Tensor:
        """Run the layer. x: [T, F], the residual stream; h: [T, inputs], the attention's input."""
        x = x + self.self_attn(h, place)
        return x + self.mlp(self.post_attention_layernorm(x))


def make_norm(config: dict) -> nn.RMSNorm:
    return nn.RMSNorm(config["hidden_size"], config.get("rms_norm_eps", 1e-6), device="meta")


class Target(nn.Module):
    """LLaMA, Mistral or Mixtral. Modules have Hugging Face's names, so weights need no map."""

    def __init__(self, config: dict):
        super().__init__()
        width = config["hidden_size"]
        self.aux_layers = ()  # the layers whose inputs an EAGLE-3 head reads
        self.embed_tokens = nn.Embedding.from_pretrained(unfilled(config["vocab_size"], width))
        layers = range(config["num_hidden_layers"])
        self.layers = nn.ModuleList(Block(config, width, "input_layernorm") for _ in layers)
        self.norm = make_norm(config)
        self.lm_head = Linear(width, config["vocab_size"])

    def forward(self, tokens: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Run over T tokens. Writes: the caches.

        Returns: the LM head's input, [T, F]; the features that a head reads, [T, F] or [T, 3F].
        """
        x = self.embed_tokens(tokens)  # [T, F]
        aux = []
        for i, block in enumerate(self.layers):
            if i in self.aux_layers:
                aux.append(x)
            x = block(x, block.input_layernorm(x), place)
        x = self.norm(x)
        return x, torch.cat(aux, -1) if aux else x


class Head(nn.Module):
    """An EAGLE head. Row j reads feature f_j and token x_{j+1}; it predicts f_{j+1} and x_{j+2}.

    EAGLE-1 and 2 use the target's LM head. EAGLE-3 reads three layers, and has an LM head of its
    own over a smaller vocabulary.
    """

    def __init__(self, config: dict, tensors: dict[str, Tensor], target: Target):
        super().__init__()
        width = config["hidden_size"]
        layers = len(target.layers)
        self.sharpness = config.get(
            "draft_sharpness", 1.0
        )  # c in log softmax(c z), fitted per head
        self.is_eagle3 = "midlayer.hidden_norm.weight" in tensors
        self.embed_tokens = target.embed_tokens
        ids = torch.arange(config.get("draft_vocab_size") or config["vocab_size"])
        if self.is_eagle3:
            target.aux_layers = config.get("eagle_aux_hidden_state_layer_ids")
            target.aux_layers = target.aux_layers or (2, layers // 2, layers - 3)
            self.midlayer = Block(config, 2 * width, "input_layernorm", "hidden_norm")
            self.norm = make_norm(config)
            self.lm_head = Linear(width, len(ids))
        else:
            self.layers = nn.ModuleList([Block(config, width)])  # no norm before its attention
            self.norm = nn.Identity()
            self.lm_head = target.lm_head
        ids += tensors.get("d2t", 0)  # the difference between a token and its logit's place
        self.register_buffer("ids", ids.to(config["device"]))  # [Vd] int64, each logit's token
        self.fc = Linear((2 + self.is_eagle3) * width, width, bias="fc.bias" in tensors)

    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features into `hidden` of `forward`, whose outputs are that already."""
        return self.fc(features) if self.is_eagle3 else features

    def forward(self, tokens: Tensor, hidden: Tensor, place: Place) -> Tensor:
        """Predict the next features, [T, F]. tokens: [T], x_{j+1}; hidden: [T, F], f_j."""
        embedded = self.embed_tokens(tokens)  # [T, F]
        if self.is_eagle3:
            block = self.midlayer
            h = torch.cat((block.input_layernorm(embedded), block.hidden_norm(hidden)), -1)
            return block(hidden, h, place)
        x = self.fc(torch.cat((embedded, hidden), -1))
        return self.layers[0](x, x, place)

    def logits(self, out: Tensor) -> Tensor:  # [T, F] -> [T, Vd] fp32
        return self.lm_head(self.norm(out)).float()


def gumbel(key: Tensor, first: Tensor, rows: int, vocab: int) -> Tensor:
    """Return Gumbel noise of consecutive draws, [rows, vocab] fp32: a pure function of its key.

    The argmax of log p + noise is an exact draw from p. No draft changes the noise, so none changes
    the text. key: [4] int64, seed (low word, high word), sample, prompt; first: [1], the first draw
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


class State(NamedTuple):
    """A sequence after a pass of the target. The root is the last token decided, not cached yet."""

    pos: Tensor  # [1] int64, index of the root
    draw: Tensor  # [1] int64, tokens drawn so far
    emitted: Tensor  # [D+1] int64, the tokens that the pass decided, root last; then padding
    features: Tensor  # [D+1, F or 3F], the target's features that each was decided from
    last: Tensor  # [1] int64, place of the root in `emitted`: the number of accepted nodes
    key: Tensor  # [4] int64, of the noise


class Tree(NamedTuple):
    """N nodes: the root, then drafted tokens, parents before their children."""

    tokens: Tensor  # [N] int64
    parents: Tensor  # [N] int64; the root is its own parent
    mask: Tensor  # [N, N] bool, mask[i, j]: j is i or an ancestor of i
    noise: Tensor | None  # [D+1, V] fp32, of the draw at each depth; None at temperature 0


class Engine(nn.Module):
    """A target, a head, and the size of their trees. A chain is a tree with K = 1."""

    def __init__(self, target: Target, head: Head | None, options: argparse.Namespace):
        """Without a head the tree is its root: that is vanilla decoding, by the same loop."""
        super().__init__()
        self.target = target
        self.head = head
        self.D = options.depth if head else 0  # drafted levels
        self.K = options.topk  # children of a node, and nodes per level that get children
        self.N = options.nodes if head else 1  # verified nodes, root included
        self.temperature = options.temperature
        self.vocab = target.embed_tokens.num_embeddings
        S = target.layers[0].self_attn.cache.shape[2]
        self.register_buffer("every", torch.arange(S, device=options.device))  # [S], all slots
        self.captured = options.compile and options.device != "cpu"
        if options.compile:
            mode = "reduce-overhead" if self.captured else "default"
            self.draft = torch.compile(self.draft, fullgraph=True, dynamic=False, mode=mode)
            self.verify = torch.compile(self.verify, fullgraph=True, dynamic=False, mode=mode)

    def causal(self, positions: Tensor) -> Place:
        """Place consecutive tokens, [T], each in the slot of its position."""
        return Place(positions, positions, self.every <= positions[:, None])

    def noise(self, key: Tensor, draw: Tensor) -> Tensor | None:
        """Return the noise of a tree whose root's children are draw number `draw`."""
        return gumbel(key, draw, self.D + 1, self.vocab) if self.temperature else None

    def draft(self, state: State) -> Tree:
        """Draft a tree below the root. Writes: the head's cache.

        The head first reads the accepted tokens with the target's own features; only these rows
        stay. Then it goes on from its own outputs, in slots that the next draft overwrites.
        """
        root = state.emitted[state.last]  # [1]
        noise = self.noise(state.key, state.draw)
        if self.head is None:
            zero = torch.zeros_like(root)
            return Tree(root, zero, zero[None] == 0, noise)
        # token j + 1 makes row j, hence - 1; the rows of padding lie where nothing sees them
        rows = state.pos - 1 - state.last + self.every[: self.D + 1]
        out = self.head(state.emitted, self.head.fuse(state.features), self.causal(rows))
        return self.rerank(root, *self.grow(out[state.last], state.pos, noise), noise)

    def grow(self, out: Tensor, pos: Tensor, noise: Tensor | None) -> list[Tensor]:
        """Score P = K + (D-1) K^2 candidates; the best K paths of a level get children.

        out: [1, F], the head's output at the root
        Returns: of each candidate, [P]: its token; its value, the log-probability of its path; the
            number of its parent among the candidates, -1 for the root. Source: EAGLE-2, 4.1.
        """
        head = self.head
        K = self.K
        visible = (self.every < pos)[None]  # [R, S]; R = 1 node at the root, then K
        path = torch.zeros(1, device=out.device)  # [R], values of the nodes that get children
        number = torch.full_like(pos, -1)  # [R], their numbers
        first = 0  # number of a level's first candidate
        levels = []
        for level in range(self.D):
            scores = head.logits(out)  # [R, Vd]
            if noise is not None:  # the target will choose with this noise: the draft foresees it
                scores = scores + self.temperature * noise[level, head.ids]
            log_q, best = (head.sharpness * scores).log_softmax(-1).topk(K)  # [R, K]
            tokens = head.ids[best].flatten()  # [R K]
            values = (path[:, None] + log_q).flatten()
            levels.append((tokens, values, number.repeat_interleave(K)))
            if level + 1 == self.D:
                return [torch.cat(parts) for parts in zip(*levels)]
            order = values.argsort(descending=True, stable=True)[:K]
            number = first + order
            first += len(values)
            path = values[order]
            slots = pos + level * K + self.every[:K]
            visible = visible[order // K] | (self.every == slots[:, None])  # ancestors and itself
            place = Place(slots, (pos + level).expand(K), visible)
            out = head(tokens[order], out[order // K], place)  # [K, F]

    def rerank(self, root, tokens, values, parents, noise) -> Tree:
        """Make a tree of the N - 1 best candidates, by the outputs of `grow`. Source: EAGLE-2, 4.2.

        No child is better than its parent, and a stable order keeps it behind: no node is orphaned.
        """
        best = values.argsort(descending=True, stable=True)[: self.N - 1].sort().values
        nodes = self.every[: self.N]
        node = torch.zeros_like(self.every[:1]).expand(len(values) + 1)
        node = node.scatter(0, best + 1, nodes[1:])  # [P+1], of the root and of each candidate
        parents = torch.cat((nodes[:1], node[parents[best] + 1]))  # [N]
        mask = nodes[:, None] == nodes
        ancestor = nodes
        for _ in range(self.D):
            ancestor = parents[ancestor]
            mask = mask | (ancestor[:, None] == nodes)
        return Tree(torch.cat((root, tokens[best])), parents, mask, noise)

    def choose(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Choose the target's own token, [T], behind LM head inputs [T, F]. noise: [T, V]."""
        scores = self.target.lm_head(x).float()  # [T, V]
        return (scores if noise is None else scores / self.temperature + noise).argmax(-1)

    def verify(self, tree: Tree, state: State) -> State:
        """Run the target over the tree and accept a path. Writes: the target's caches."""
        pos = state.pos
        depths = tree.mask.sum(-1) - 1  # [N]
        offset = self.every - pos  # [S], from the root's slot
        in_tree = (offset >= 0) & (offset < self.N)
        visible = (offset < 0) | in_tree & tree.mask[:, offset.clamp(0, self.N - 1)]  # [N, S]
        place = Place(pos + self.every[: self.N], pos + depths, visible)
        x, features = self.target(tree.tokens, place)
        noise = None if tree.noise is None else tree.noise[depths]  # nodes of a depth share a draw
        choice = self.choose(x, noise)  # [N]
        path, last = self.accept(tree, depths, choice)
        for block in self.target.layers:  # the accepted nodes move next to the prefix
            cache = block.self_attn.cache
            cache[:, :, place.slots[: self.D + 1]] = cache[:, :, pos + path]
        step = last + 1
        return State(pos + step, state.draw + step, choice[path], features[path], last, state.key)

    def accept(self, tree: Tree, depths: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Accept the deepest path on which every token is the target's choice at its parent.

        choice: [N], the target's token behind each node
        Returns: path, [D+1], the node of each depth, then padding; its length, [1], without root.
        """
        matches = (tree.tokens == choice[tree.parents]) | (depths == 0)  # [N]
        accepted = ~(tree.mask & ~matches).any(-1)  # the node and all its ancestors match
        # of shape [1], since an index of shape [] would be read by the host
        deepest = torch.where(accepted, depths, -1).argmax(0, keepdim=True)
        on_path = tree.mask[deepest] & (depths == self.every[: self.D + 1, None])  # [D+1, N]
        return on_path.int().argmax(-1), depths[deepest]

    def prefill(self, prompt: Tensor, key: Tensor) -> State:
        """Read a prompt, [n] int64, and decide the first root. Writes: the caches."""
        rows = self.every[: len(prompt)]
        x, features = self.target(prompt, self.causal(rows))
        draw = torch.zeros_like(key[:1])
        noise = self.noise(key, draw)
        root = self.choose(x[-1:], None if noise is None else noise[:1])  # [1]
        if self.head:  # the last feature waits for the first draft
            self.head(prompt[1:], self.head.fuse(features[:-1]), self.causal(rows[:-1]))
        features = F.pad(features[-1:], (0, 0, 0, self.D))  # [D+1, F or 3F]
        return State(draw + len(prompt), draw + 1, F.pad(root, (0, self.D)), features, draw, key)

    @torch.no_grad()
    def generate(self, prompt: list[int], key: list[int]) -> Iterator[list[int]]:
        """Yield the new tokens of each pass, without end: the first root, then a path a time.

        key: seed (low word, high word), sample, prompt. The caches have room for the caller's limit.
        """
        device = self.every.device
        state = self.prefill(torch.tensor(prompt, device=device), torch.tensor(key, device=device))
        while True:
            last, *emitted = torch.cat((state.last, state.emitted)).tolist()  # to the host, once
            yield emitted[: last + 1]
            if self.captured:
                torch.compiler.cudagraph_mark_step_begin()
            state = self.verify(self.draft(state), state)
            if self.captured:  # a graph writes its outputs to the same memory every time
                state = State(*[part.clone() for part in state])


def read_config(path: Path) -> dict:
    """Read config.json, under its own keys. Raises: ValueError for a model that is not served."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or "quantization_config" in config:
        raise ValueError(f"{path}: only RoPE scaling linear and llama3, only float weights")
    config["rope"] = rope
    config["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a directory's weights, a Mixtral's under LLaMA's names. Raises: ValueError."""
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise ValueError(f"{path} has no model*.safetensors and no pytorch_model*.bin")
    tensors = {}
    for file in files:
        is_safe = file.suffix == ".safetensors"
        part = load_file(file) if is_safe else torch.load(file, weights_only=True, mmap=True)
        for name, tensor in part.items():
            name = name.removeprefix("model.").replace("block_sparse_moe.", "mlp.")
            name = name.replace(".w1.", ".gate_proj.").replace(".w3.", ".up_proj.")
            tensors[name.replace(".w2.", ".down_proj.")] = tensor
    return tensors


def fill(model: nn.Module, tensors: dict[str, Tensor], config: dict, bits: int) -> None:
    """Put tensors in the place of unfilled weights, and quantize linear layers to 8 or 4 bits.

    Raises: ValueError for a missing, unexpected or mis-shaped weight.
    """
    weights = dict(model.named_parameters())
    empty = {name: weight.shape for name, weight in weights.items() if weight.is_meta}
    wrong = [n for n, shape in empty.items() if n not in tensors or tensors[n].shape != shape]
    wrong += [n for n in tensors if n not in weights and not n.endswith(("d2t", "t2d", "inv_freq"))]
    if wrong:
        raise ValueError(f"{len(wrong)} weights are missing, unexpected or mis-shaped: {wrong[0]}")
    for name in empty:
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        value = tensors[name].to(config["device"], config["dtype"])
        setattr(layer, leaf, nn.Parameter(value, requires_grad=False))
        if isinstance(layer, Linear) and leaf == "weight" and bits < 16:
            layer.quantize(bits)


def load(options: argparse.Namespace) -> tuple[Engine, list[int]]:
    """Load the models. Returns: the engine; the ids that end a text. Raises: ValueError."""
    path = Path(options.checkpoint)
    config = read_config(path)
    dtype = options.dtype or config.get("torch_dtype") or config.get("dtype") or "float32"
    slots = options.context + max(options.nodes, options.depth * options.topk + 1)
    here = {"dtype": getattr(torch, dtype), "device": options.device, "slots": slots}
    tensors = read_tensors(path)
    if config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    target = Target(config | here)
    fill(target, tensors, here, options.bits)
    head = None
    if options.head:
        tensors = read_tensors(Path(options.head))
        config_of_head = read_config(Path(options.head)) | here
        head = Head(config_of_head, tensors, target)
        fill(head, tensors, here, options.bits)
    eos = config.get("eos_token_id")
    return Engine(target, head, options), eos if isinstance(eos, list) else [eos]


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line."""
    # without a usage line, a mistake is one line on standard error, with exit status 2
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
    for name, default, text in (
        ("checkpoint", "checkpoints/demo", "directory of the target, as Hugging Face has it"),
        ("head", "", "directory of an EAGLE-1, 2 or 3 head; without one, nothing is drafted"),
        ("prompt", "", "text; it needs tokenizer.json and the package tokenizers"),
        ("prompt_ids", "", "in its place: token ids, such as 1,17,35"),
        ("max_new_tokens", 128, "tokens to decide"),
        ("temperature", 0.0, "0: the likeliest token every time"),
        ("seed", 0, "of the noise"),
        ("depth", 6, "drafted levels"),
        ("topk", 10, "children of a node; 1: a chain"),
        ("nodes", 60, "verified nodes, root included; a chain has depth + 1"),
        ("context", 2048, "tokens that the caches hold"),
        ("bits", 16, "8 or 4: quantize the weights"),
        ("dtype", "", "default: the checkpoint's"),
        ("device", "cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu"),
    ):
        parser.add_argument(f"--{name}", default=default, type=type(default), help=text)
    parser.add_argument("--compile", action="store_true", help="compile draft and verify")
    return parser, parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Check the tree. Raises: ValueError."""
    pool = options.topk + (options.depth - 1) * options.topk**2
    if not 2 <= options.nodes <= pool + 1:
        raise ValueError(f"--nodes must be 2 to {pool + 1}, the candidates K + (D-1) K^2 and a root")


def main(argv: list[str] | None = None) -> None:
    """Decode one prompt; print the text, or ids without a tokenizer, then the speed."""
    parser, options = parse(argv)
    try:
        if options.topk == 1:
            options.nodes = options.depth + 1
        check(options)
        engine, eos = load(options)
        tokenizer = None
        if (Path(options.checkpoint) / "tokenizer.json").exists() and not options.prompt_ids:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(Path(options.checkpoint) / "tokenizer.json"))
        prompt = [int(i) for i in options.prompt_ids.split(",") if i]
        if tokenizer:
            prompt = tokenizer.encode(options.prompt).ids
        if not prompt or not 0 <= min(prompt) <= max(prompt) < engine.vocab:
            raise ValueError("no prompt")
        if len(prompt) >= options.context:
            raise ValueError("too long")
    except (ValueError, OSError, KeyError, SafetensorError) as error:
        parser.error(" ".join(str(error).split()))
    key = [options.seed & MASK32, options.seed >> 32, 0, 0]
    limit = min(options.max_new_tokens, options.context - len(prompt))
    if options.compile:  # at the second pass everything is compiled, at the third captured
        for _ in zip(range(4), engine.generate(prompt, key)):
            pass
    new: list[int] = []
    passes = -1  # the first tokens are the prompt's pass
    drafted = 0
    for tokens in engine.generate(prompt, key):
        if passes < 0:
            start = time.perf_counter()
        passes += 1
        new += tokens
        stop = [i for i, token in enumerate(new) if token in eos]
        if stop or len(new) >= limit:
            break
    elapsed = time.perf_counter() - start
    tau = (len(new) - 1) / max(passes, 1)
    new = new[: min(stop + [limit - 1]) + 1]
    print(tokenizer.decode(new) if tokenizer else ",".join(map(str, new)))
    print(f"{len(new)} tokens, {(len(new)-1) / elapsed:.1f} tokens/s, tau {tau:.2f} in {passes} passes")


if __name__ == "__main__":
    main()
