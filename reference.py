"""Every operator of decoding in plain PyTorch: the definitions, and the choice of a backend.

1. Scores: noise, cuts, the best tokens.
2. The tree: the next level, the nodes, acceptance.
3. The cycle: decided tokens, slots and positions, moves in the cache.
4. The model: norms, gates, RoPE, rows of the cache, attention.
5. Linear layers: float and packed weights, experts, a router's scores.
6. A `Backend` has these functions as one device runs them: those of the folder backends/ where it
   has its own, which are tested against the definitions, most of them bit for bit.

The definitions have gradients, and fixed shapes, so that torch.compile fuses them with the
operations around them. They run with --plain, and where the folder is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_tree import Accepted, Candidates, Children, DraftTree, Frontier, Level, Scores
from options import added, has_part, load_part

# ------------------------------------------------------------------------------------------- noise

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments per round
DOMAIN_SHIFT = 30  # leaves 2^30 draws per conversation


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Run Philox4x32-10 on broadcastable int64 words in [0, 2^32). Returns: four int64 words.

    Source: Salmon et al. 2011; agrees with the known answers of Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * PHILOX_MULTIPLIERS[0]  # wraps modulo 2^64
        p1 = c2 * PHILOX_MULTIPLIERS[1]
        high0 = (p0 >> 32) & MASK32  # the shift is arithmetic, hence the mask
        high1 = (p1 >> 32) & MASK32
        c0 = high1 ^ c1 ^ k0
        c1 = p1 & MASK32
        c2 = high0 ^ c3 ^ k1
        c3 = p0 & MASK32
        k0 = (k0 + PHILOX_WEYL[0]) & MASK32
        k1 = (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def uniforms(
    seed: Tensor, prompt: Tensor, sample: Tensor, draws: Tensor, count: int, domain: int
) -> Tensor:
    """Return uniform numbers in (0, 1), [B, R, count] fp32.

    seed, prompt, sample: as in `sampling.SamplingTensors`
    draws: [B, R] int64, the draw that each row of noise belongs to
    """
    # masked, though it is small: the compiler takes an index, times a constant, for 32 bits wide
    blocks = torch.arange((count + 3) // 4, device=draws.device) & MASK32  # [C]
    word = draws[:, :, None] + (domain << DOMAIN_SHIFT)  # [B, R, 1]
    counter = (blocks, word, sample[:, None, None], prompt[:, None, None])
    words = philox4x32(counter, seed[..., None, None].unbind(-3))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1)  # [B, R, C, 4]
    bits = words.flatten(2)[:, :, :count]  # [B, R, count]
    # fp32 rounds the topmost values to 1, where the logarithms below would give infinity
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(
    seed: Tensor,
    prompt: Tensor,
    sample: Tensor,
    greedy: Tensor | None,
    first: Tensor,
    rows: int,
    vocab: int,
    domain: int,
) -> Tensor:
    """Return standard Gumbel noise of consecutive draws, [B, rows, vocab] fp32.

    seed, prompt, sample, greedy: as in `sampling.SamplingTensors`
    first: [B] int64, the first draw of each sequence
    """
    draws = first[:, None] + torch.arange(rows, device=first.device)  # [B, R]
    # log1p keeps the upper tail fine
    noise = -torch.log(-torch.log1p(-uniforms(seed, prompt, sample, draws, vocab, domain)))
    if greedy is None:
        return noise
    return noise.masked_fill(greedy[:, None, None], 0.0)


# ------------------------------------------------------------------------------------------ scores


def cut(
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    margin: Tensor | None,
) -> Tensor:
    """Compute `SamplingTensors.cut`: the temperature, then top-k, top-p and min-p.

    scores: [B, N, V] fp32; the others [B], as in `sampling.SamplingTensors`
    """
    z = scores / temperature[:, None, None]
    if top_k is None:
        return z
    ranked, index = z.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(z.shape[-1], device=z.device)  # [V]
    most = top_k[:, None, None]  # [B, 1, 1]
    keep = (places < most) | (most == 0)
    keep = keep & precede(probabilities(ranked, keep), top_p[:, None, None])
    best = ranked.masked_fill(~keep, float("-inf")).amax(-1, keepdim=True)
    keep &= ranked >= best + margin[:, None, None]
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, index, keep), float("-inf"))


def probabilities(z: Tensor, keep: Tensor) -> Tensor:
    """Return the softmax of scores [..., V] over the tokens to keep; 0 elsewhere."""
    return z.masked_fill(~keep, float("-inf")).softmax(-1)


def precede(p: Tensor, mass: Tensor) -> Tensor:
    """Return which tokens have less than a mass before them, [..., V] bool; 1 keeps all.

    p: [..., V] fp32, in order; the first is always kept
    """
    total = cumsum_in_blocks(p) if p.is_cuda else p.cumsum(-1)
    return (total - p < mass) | (mass == 1)  # rounding may add up to more than 1


def cumsum_in_blocks(p: Tensor, block: int = 256) -> Tensor:
    """Add up along the last axis, [..., V]: the compiler fails at long scans (torch 2.11)."""
    parts = F.pad(p, (0, -p.shape[-1] % block)).unflatten(-1, (-1, block)).cumsum(-1)
    ends = parts[..., -1]  # [..., V / block]
    before = ends.cumsum(-1) - ends
    return (parts + before[..., None]).flatten(-2)[..., : p.shape[-1]]


def best(scores: Tensor, noise: Tensor | None, row: Tensor | None) -> Tensor:
    """Find the best token of every row of scores; of equal ones the lowest.

    scores: [B, N, V] fp32
    noise: [B, R, V] fp32, added to the scores; None: no noise
    row: [B, N] int64, the row of the noise for each node
    Returns: [B, N] int64.
    """
    if noise is not None:
        index = row[:, :, None].expand(-1, -1, noise.shape[2])
        scores = scores + noise.gather(1, index)  # [B, N, V]
    return scores.argmax(-1)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k best of every row of scores, best first, and the row's logsumexp.

    scores: [..., V] fp32
    Returns: values and indices, both [..., k]; the logsumexp, [..., 1]. The other backends return
        equal values in the order of their indices; torch.topk has no such rule.
    """
    values, index = scores.topk(k, dim=-1)
    return values, index, scores.logsumexp(-1, keepdim=True)


# ----------------------------------------------------------------------------------- the next level


def expand_frontier(
    scores: Scores | Children,
    front: Frontier | None,
    level: Level,
    grow: Callable | None = None,
) -> tuple[Candidates, Frontier | None]:
    """Value the children of a frontier and choose the next one; of equal candidates, the first.

    front: the frontier; None: the root; grow: of a backend, in place of `grow_level`
    Returns: the level's R k candidates; the next frontier, empty or None after the last level.
    """
    if front is None:
        of_root = scores.tokens if isinstance(scores, Children) else scores.logits
        values = torch.zeros(of_root.shape[:2], device=of_root.device)  # [B, 1]
        seen = torch.zeros(*of_root.shape[:2], level.slots, dtype=torch.bool, device=values.device)
        index = torch.full_like(values, -1, dtype=torch.long)
        front = Frontier(index, index, index, values, seen)  # its tokens and parents are unread
    grown = (grow or grow_level)(scores, front.values, front.seen, level)
    tokens, values, order, chosen_values, seen = grown
    candidates = Candidates(tokens, values, front.index.repeat_interleave(level.k, dim=1))
    if not level.count:
        return candidates, None
    chosen = tokens.gather(1, order)
    index = level.first_candidate + order
    return candidates, Frontier(index, chosen, order // level.k, chosen_values, seen)


def grow_level(
    scores: Scores | Children, values: Tensor, seen: Tensor, level: Level
) -> tuple[Tensor, ...]:
    """Value the children of R nodes and choose those that have children themselves.

    values: [B, R] fp32, of the nodes; seen: [B, R, W] bool, their visible scratch slots
    Returns: tokens and values of the candidates, [B, X = R k]; places among them, values and
        visible slots of the chosen ones, [B, R'], [B, R'], [B, R', W].
    """
    children = scores if isinstance(scores, Children) else scores.best(level.k, topk)
    every = (-1, values.shape[1], -1)  # [B, R, k]
    tokens = children.tokens.expand(every).flatten(1)  # [B, X]
    total = (values[:, :, None] + children.scores.expand(every)).flatten(1)  # [B, X]
    if level.fixed_children is not None:
        order = level.fixed_children[:, : level.count].repeat(len(total), 1)  # [B, R']
    else:
        order = best_first(total)[:, : level.count]
    parent = (order // level.k)[:, :, None]  # [B, R', 1]
    nodes = torch.arange(level.count, device=order.device)
    slots = torch.arange(seen.shape[2], device=order.device)
    own = slots == level.first_slot + nodes[:, None]  # [R', W]
    # a node sees its ancestors and itself
    visible = seen.gather(1, parent.expand(-1, -1, len(slots))) | own
    return tokens, total, order.contiguous(), total.gather(1, order), visible


# ------------------------------------------------------------------------------------------- nodes


def best_first(values: Tensor) -> Tensor:
    """Return the indices by descending value: [B, P].

    Equal values keep their order, so a parent stays before its child.
    """
    return values.sort(dim=1, descending=True, stable=True).indices


def best_nodes(values: Tensor, count: int) -> Tensor:
    """Choose the best of all candidates.

    A value never exceeds its parent's, and ties keep the parent first: the parent of every chosen
    node is chosen.

    values: [B, P] fp32
    Returns: [B, count] flat indices, ascending.
    """
    return best_first(values)[:, :count].sort(dim=1).values


def link_nodes(
    chosen: Tensor, parents: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Number the chosen candidates and find their ancestors.

    chosen: [B, N-1] int64 flat indices, ascending; parents: [B, P] int64 flat indices, -1: the root
    depth: a bound on the depth of any node
    Returns: the node of the root and of each candidate, [B, P+1] int64, 0: none; and the nodes'
        parents, depths and mask, as in `DraftTree`.
    """
    B, drafted = chosen.shape
    P = parents.shape[1]
    nodes = torch.arange(1, drafted + 1, device=chosen.device).expand_as(chosen)
    number = torch.zeros(B, P + 1, dtype=torch.long, device=chosen.device)  # [B, P+1]
    number = number.scatter(1, chosen + 1, nodes)
    above = number.gather(1, parents.gather(1, chosen) + 1)  # [B, N-1]
    above = torch.cat((torch.zeros_like(number[:, :1]), above), 1)
    return number, above, *ancestors(above, depth)


def ancestors(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the depths and the mask of `DraftTree`.

    parents: [B, N]; parents precede their children
    depth: a bound on the depth of any node
    """
    N = parents.shape[1]
    eye = torch.eye(N, dtype=torch.bool, device=parents.device)
    nodes = torch.arange(N, device=parents.device)
    reach = eye | (parents[:, :, None] == nodes)  # [B, N, N]: self and parent
    hops = 1
    while hops < depth:  # squaring doubles the reach
        reach = torch.bmm(reach.float(), reach.float()) > 0
        hops *= 2
    return reach.sum(-1) - 1, reach  # the root counts itself once


def joined(levels: Sequence[Candidates]) -> Candidates:
    """Concatenate the candidates of several levels."""
    return Candidates(*(torch.cat(parts, 1) for parts in zip(*levels)))


def select_nodes(
    levels: Sequence[Candidates],
    expanded: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
    best: Callable = best_nodes,
    link: Callable = link_nodes,
) -> DraftTree:
    """Choose the nodes of a tree among the candidates of all levels.

    expanded: per level, the flat indices of the candidates that the drafter ran, [B, R]
    nodes: [1 or B, N-1] flat indices, ascending; a number: so many best, of equals the first
    depth: a bound on the depth of any node
    text: tokens [B, S+1], and the index of the root in them, [B]
    best, link: of a backend, in place of `best_nodes` and `link_nodes`
    Source: EAGLE-2 (arXiv 2406.16858) 4.2.
    """
    every = joined(levels)
    if isinstance(nodes, int):
        chosen = best(every.values, nodes)
    else:
        chosen = nodes.expand(len(every.values), -1)
    number, *related = link(chosen, every.parents, depth)
    root = text[0].gather(1, text[1][:, None])  # [B, 1]
    tokens = torch.cat((root, every.tokens.gather(1, chosen)), 1)
    root_value = every.values.new_zeros(len(root), 1)
    values = torch.cat((root_value, every.values.gather(1, chosen)), 1)  # [B, N]
    # [B, 1 + sum R]: the root, then the frontiers
    frontiers = torch.cat((torch.full_like(root, -1), *expanded), 1)
    order = torch.arange(frontiers.shape[1], device=root.device).expand_as(frontiers)
    ran_index = torch.zeros_like(number).scatter(1, frontiers + 1, order)  # [B, P+1]
    ran_index = torch.cat((ran_index[:, :1], ran_index.gather(1, chosen + 1)), 1)
    return DraftTree(tokens, *related, values > float("-inf"), values, ran_index)


def build_tree(tokens: Tensor, parents: Tensor, valid: Tensor, depth: int) -> DraftTree:
    """Derive ancestors and depths from parents.

    tokens, parents, valid: [B, N]; parents precede children
    depth: a bound on the depth of any node
    """
    return DraftTree(tokens, parents, *ancestors(parents, depth), valid)


def root_tree(text: tuple[Tensor, Tensor]) -> DraftTree:
    """Build the tree that is only its root: vanilla decoding. text: as for `select_nodes`"""
    tokens = text[0].gather(1, text[1][:, None])  # [B, 1]
    zeros = torch.zeros_like(tokens)
    return build_tree(tokens, zeros, torch.ones_like(tokens, dtype=torch.bool), 0)


# -------------------------------------------------------------------------------------- acceptance


def accept(tree: DraftTree, target_tokens: Tensor, depth: int) -> Accepted:
    """Accept the deepest path on which every token is the target's own at its parent.

    target_tokens: [B, N] int64, the target's token after each node
    depth: D, the deepest path the tree can hold
    Of equally deep paths the one with the lowest node numbers wins.
    """
    matches = tree.valid & (tree.tokens == target_tokens.gather(1, tree.parents))
    matches[:, 0] = True
    # [B, N]: the node and all its ancestors match
    accepted = ~(tree.mask & ~matches[:, None]).any(-1)
    N = accepted.shape[1]
    lowest_first = torch.arange(N - 1, -1, -1, device=target_tokens.device)
    order = tree.depths * N + lowest_first  # unique keys: no ties
    node = torch.where(accepted, order, -1).argmax(-1)  # [B]
    path, length = path_to(tree, node, depth)
    emitted = target_tokens.gather(1, path)
    return Accepted(path, length, emitted, compaction(path, length))


def path_to(tree: DraftTree, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """List the nodes from the root to `node`, [B].

    Returns: the path, [B, D+1], padded with 0; its length without the root, [B].
    """
    length = tree.depths.gather(1, node[:, None]).squeeze(1)  # [B]
    index = node[:, None, None].expand(-1, 1, tree.mask.shape[2])
    on_path = tree.mask.gather(1, index)  # [B, 1, N]: the node's ancestors and itself
    levels = torch.arange(depth + 1, device=node.device)[:, None]  # [D+1, 1]
    hit = on_path & (tree.depths[:, None] == levels)  # [B, D+1, N], at most one per depth
    return hit.int().argmax(-1), length  # 0 where a depth has none


def compaction(path: Tensor, length: Tensor) -> Tensor:
    """Return the slot offset that each depth's key and value come from, [B, D+1].

    Slots past the path keep their content.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    return torch.where(steps <= length[:, None], path, steps)


# --------------------------------------------------------------------------------------- the cycle


def advance(
    tokens: Tensor,
    pos: Tensor,
    draws: Tensor,
    done: Tensor,
    limit: Tensor,
    roots: Tensor,
    path: Tensor,
    length: Tensor,
    emitted: Tensor,
    ends: Tensor,
    features: Tensor,
    columns: Sequence[str],
) -> tuple[Tensor, ...]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root.

    tokens, pos, draws, done, limit: as in `decode.DecodeState`
    roots: [B, N] int64, the nodes' tokens, the root's first
    path, length, emitted: as in `Accepted`
    ends: [E] int64, the tokens that end a sequence
    features: [B, N, F]
    columns: the facts of the report, in their order
    Writes: tokens.
    Returns: pos, draws and done; the decided tokens' count, [B]; the root's and the emitted tokens,
        [B, D+2]; the features along the path, [B, D+1, F]; the report, [B, D+1 + columns] int64.
    """
    width = emitted.shape[1]
    steps = torch.arange(width, device=emitted.device)
    inside = steps <= length[:, None]
    is_end = inside & (emitted[:, :, None] == ends).any(-1)
    to_end = torch.where(is_end, steps, width).amin(1) + 1  # [B], tokens up to the first end
    count = torch.minimum(torch.minimum(length + 1, to_end), limit - pos)
    count = torch.where(done, 0, count)
    keep = steps < count[:, None]
    trash = tokens.shape[1] - 1
    tokens.scatter_(1, torch.where(keep, pos[:, None] + 1 + steps, trash), emitted)
    new_pos = pos + count
    new_done = done | (is_end & keep).any(1) | (new_pos >= limit)
    along_path = path[:, :, None].expand(-1, -1, features.shape[2])
    path_features = features.gather(1, along_path)
    broken = ~path_features.sum((1, 2), dtype=torch.float32).isfinite()  # [B]
    state = new_done + 2 * broken  # 0 .. 3
    facts = {"count": count, "length": length, "done": state, "pos": pos}
    packed = torch.stack([facts[name].long() for name in columns], 1)
    report = torch.cat((emitted, packed), 1)  # one copy to the host
    after = torch.cat((roots[:, :1], emitted), 1)  # [B, D+2]
    return new_pos, draws + count, new_done, count, after, path_features, report


def place_tokens(
    pos: Tensor, depths: Tensor | int, count: int, slot: int = 0, done: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cache slots and positions of the tokens of a step.

    pos: [B] int64, slot and position of the root
    depths: [B, T] int64, or one for all tokens, below the root
    count: T
    slot: the first token's, counted from the root's; the others follow
    done: [B] bool, sequences that attend to nothing
    Returns: slots [B, T]; the first slot of the window, [B]; RoPE positions [B, T].
    """
    slots = pos[:, None] + slot + torch.arange(count, device=pos.device)  # [B, T]
    positions = (pos[:, None] + depths).expand(-1, count)
    start = pos if done is None else torch.where(done, 0, pos)
    return slots, start, positions


def causal(start: Tensor, rows: int, back: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the fields of `kv_cache.causal_window`."""
    if back:
        start = (start - back).clamp(min=0)
    steps = torch.arange(rows, device=start.device)
    mask = (steps[None, :] <= steps[:, None]).expand(start.shape[0], rows, rows)  # [B, T, T]
    return start[:, None] + steps, start, mask


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    """Move slots of all buffers next to each other; all sources are read before any is overwritten.

    buffers: each [B, Hkv, S, E], contiguous; they share no memory and have one shape and dtype
    addresses: [buffers] int64, the buffers' addresses in memory, for a kernel over all of them
    start: [B] int64, the first slot to write
    path: [B, D+1] int64, the slots to read, as offsets from `start`
    Writes: slots start .. start + D of every buffer.
    """
    batch = torch.arange(path.shape[0], device=path.device)[:, None]  # [B, 1]
    target = start[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, D+1]
    source = start[:, None] + path
    for buffer in buffers:
        buffer[batch, :, target] = buffer[batch, :, source]  # [B, D+1, Hkv, E]


# --------------------------------------------------------------------------------------- the model


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, with fp32 statistics. Source: arXiv 1910.07467.

    x: [..., F], in the weight's dtype or fp32; weight: [F]
    Returns: [..., F] in x's dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(x.dtype) * weight).to(x.dtype)


def swiglu(y: Tensor) -> Tensor:
    """Multiply the SiLU of the first half of every row by the second half.

    y: [..., 2 F]. Returns: [..., F]. Source: arXiv 2002.05202.
    """
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_angles(freq: Tensor, positions: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines for `rotate`, times a factor.

    freq: [E/2] fp32; positions: [B, T] int64
    Returns: two [B, T, 1, E] fp32.
    """
    angles = positions[..., None].float() * freq  # [B, T, E/2]
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # [B, T, 1, E]
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE by half-rotation, in fp32. x: [B, T, H, E]. Returns the same shape and dtype.

    rope: cosines and sines, [B, T, 1, E']; elements of a head from E' on stay as they are
    """
    cos, sin = rope
    wide, rest = x.tensor_split((cos.shape[-1],), dim=-1)
    wide = wide.float()
    left, right = wide.chunk(2, dim=-1)
    turned = (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def rotary(
    qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of T tokens.

    qkv: [B, T, H + 2 Hkv, E], heads of queries, keys and values side by side
    rope: cosines and sines, [B, T, 1, E'] fp32 each; E' is E, or less
    Returns: the queries, [B, T, H, E]; the keys, [B, T, Hkv, E].
    """
    q, k = qkv[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
    return rotate(q, rope), rotate(k, rope)


def rotary_cache(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate queries and keys, and write keys and values to the cache.

    qkv: [B, T, H + 2 Hkv, E]
    k, v: [B, Hkv, S, E]; slots: [B, T] int64
    Writes: k, v at the slots.
    Returns: the queries, [B, T, H, E].
    """
    kv_heads = k.shape[1]
    queries, keys = rotary(qkv, rope, qkv.shape[2] - 2 * kv_heads, kv_heads)
    write_rows(k, v, slots, keys, qkv[:, :, -kv_heads:])
    return queries


def write_rows(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values, [B, T, Hkv, E], to the cache. Writes: k, v at the slots, [B, T]."""
    batch = torch.arange(len(slots), device=slots.device)[:, None]  # [B, 1]
    k[batch, :, slots] = encode_rows(keys, k.dtype)
    v[batch, :, slots] = encode_rows(values, v.dtype)


# A row of the cache is the key, or the value, of one head in one slot. In 8 bits it has E codes
# -127 .. 127 of a byte each, and behind them a bf16 scale for each group of elements. It depends on
# its own numbers alone, so that a node of a tree has the row that its token has without drafting.
CACHE_GROUP = 32  # elements that share a scale; the last group of a row may have fewer


def row_width(elements: int, dtype: torch.dtype) -> int:
    """Return the numbers of a cache's row for a head of so many elements. int8: in 8 bits"""
    if dtype != torch.int8:
        return elements
    return elements + torch.bfloat16.itemsize * -(-elements // CACHE_GROUP)


def encode_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as rows of a cache. x: [..., E] -> [..., row_width] of the dtype"""
    if dtype != torch.int8:
        return x.to(dtype)
    elements = x.shape[-1]
    groups = F.pad(x.float(), (0, -elements % CACHE_GROUP)).unflatten(-1, (-1, CACHE_GROUP))
    scale = (groups.abs().amax(-1).clamp(min=1e-30) / 127).bfloat16()  # [..., G]
    codes = (groups / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((codes.flatten(-2)[..., :elements], scale.view(torch.int8)), -1)


def decode_rows(rows: Tensor, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the keys or values of a cache's rows, [..., elements] of the dtype."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    codes, scale = rows.tensor_split((elements,), -1)
    steps = scale.contiguous().view(torch.bfloat16).float()  # [..., G]
    steps = steps.repeat_interleave(CACHE_GROUP, -1)[..., :elements]  # [..., elements]
    return (codes * steps).to(dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
    paths: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from T new tokens to a prefix and to a masked window behind it.

    q: [B, T, H, E], in the cache's dtype; on a CPU also in fp32 over a cache in bf16 or in 8 bits
    k, v: [B, Hkv, S, E], the cache; the tokens' own keys and values are already in it. In 8 bits,
        rows of `row_width`
    start: [B] int64, slots below it are visible to all tokens; start + W <= S
    mask: [B, T, W] bool, the slots among start .. start+W-1 that each token sees, at least one
    first: [B, T] int64, slots below it are hidden from a token and not read; 0 <= first < start + W
        and, of a token that sees only a part of its path, the place of that part
    scale: of the scores; 0: E ** -0.5
    paths: [B, T, 1 + W] int32, from a backend's `path_table`, or None; read by that backend only
    sinks: [H], a further score of every row of a head, which takes its share and has no value
    Returns: [B, T, H * E] in q's dtype. The softmax is in fp32. A traced or captured step reads
        every slot; any other those before the end of the last window.
    """
    B, T, H, E = q.shape
    group = H // k.shape[1]
    if not _is_recorded(start):
        used = int(start.max()) + mask.shape[2]
        k = k[:, :, :used]
        v = v[:, :, :used]
    k = decode_rows(k, E).repeat_interleave(group, dim=1)  # [B, H, S, E] fp32
    v = decode_rows(v, E).repeat_interleave(group, dim=1)  # [B, H, S, E] fp32
    scores = q.transpose(1, 2).float() @ k.transpose(2, 3) * (scale or E**-0.5)  # [B, H, T, S]
    hidden = ~visible_slots(start, mask, first, k.shape[2])[:, None]  # [B, 1, T, S]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(B, H, T, 1)), -1)
    y = scores.softmax(-1)[..., : k.shape[2]] @ v  # [B, H, T, E]
    return y.transpose(1, 2).reshape(B, T, H * E).to(q.dtype)


def _is_recorded(x: Tensor) -> bool:
    """Return whether a step is traced or captured, so that no number of a tensor can be read."""
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return captured or torch.compiler.is_compiling()


def visible_slots(start: Tensor, mask: Tensor, first: Tensor | None, slots: int) -> Tensor:
    """Return the slots of the cache that each token sees: [B, T, slots] bool."""
    T, W = mask.shape[1:]
    offset = torch.arange(slots, device=start.device) - start[:, None]  # [B, slots]
    inside = ((offset >= 0) & (offset < W))[:, None]  # [B, 1, slots]
    index = offset.clamp(0, W - 1)[:, None].expand(-1, T, -1)  # [B, T, slots]
    visible = (offset < 0)[:, None] | (inside & mask.gather(2, index))
    if first is None:
        return visible
    return visible & (torch.arange(slots, device=start.device) >= first[:, :, None])


# ----------------------------------------------------------------------------------- linear layers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Tensor:
    """Multiply rows by a float weight, x W^T, and add a bias.

    x: [..., K], in the weight's dtype, or in fp32, which is rounded to it
    weight: [N, K]; bias: [N]
    fp32_out: the result in fp32; here it is rounded to the weight's dtype first, except on CUDA
        without a bias and gradients
    Returns: [..., N] in x's dtype, or fp32.
    """
    halves = x.dtype == weight.dtype != torch.float32
    learns = x.requires_grad or weight.requires_grad
    if fp32_out and bias is None and x.is_cuda and halves and not learns:
        y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32)
        return y.unflatten(0, x.shape[:-1])
    y = F.linear(x.to(weight.dtype), weight, bias)
    if x.dtype != weight.dtype:
        return y.to(x.dtype)
    return y.float() if fp32_out else y


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Score the experts of each token: [..., F], [E, F] -> [..., E] fp32."""
    return F.linear(x.float(), weight.float())  # rounded to 16 bits, experts would tie


def route(expert: Tensor, experts: int) -> Tensor:
    """Return the routing that products with experts take, here the experts themselves.

    expert: [P] int64, of each row
    """
    return expert


def experts_linear(x: Tensor, weight: Tensor, routing: Tensor) -> Tensor:
    """Multiply every row by the float weight of its expert; here also by that of all others.

    x: [P, K]; weight: [E, N, K]; routing: from `route`
    Returns: [P, N] in x's dtype.
    """
    every = torch.einsum("pk,enk->pen", x.to(weight.dtype), weight)  # [P, E, N]
    return every[torch.arange(len(x), device=x.device), routing].to(x.dtype)


def experts_bias(y: Tensor, bias: Tensor, routing: Tensor) -> Tensor:
    """Add the bias of each row's expert. y: [P, N]; bias: [E, N]; routing: from `route`"""
    return (y + bias[routing]).to(y.dtype)


def matmul(
    x: Tensor,
    weight: Any,
    bias: Tensor | None = None,
    fp32_out: bool = False,
    routing: Tensor | None = None,
) -> Tensor:
    """Multiply rows by a packed weight, x W^T, and add a bias.

    The weight is unpacked in every call; with a routing, every row meets every expert's.

    x: [..., K] bfloat16, float16 or float32; with a routing [P, K]
    weight: `quantize.Codes`, or a backend's record; bias: [N]
    fp32_out: the result in fp32, never rounded
    routing: from `route`, of a stack
    Returns: [..., N] in x's dtype, or fp32.
    """
    rows = x.reshape(-1, x.shape[-1])
    if routing is None:
        y = weight.multiply(rows)
    else:
        y = rows.new_empty(len(rows), weight.outputs, dtype=torch.float32)
        for e in range(weight.experts):
            of_expert = weight.expert(e).multiply(rows)
            y = torch.where(routing[:, None] == e, of_expert, y)
    y = y.view(*x.shape[:-1], weight.outputs)
    y = y if fp32_out else y.to(x.dtype)
    return y if bias is None else y + bias


def experts_matmul(x: Tensor, weight: Any, routing: Tensor) -> Tensor:
    """Compute `experts_linear` with a packed stack."""
    return matmul(x, weight, routing=routing)


# ------------------------------------------------------------------------------------- the backend

DEFINED = (
    ("gumbel", "cut", "best", "topk"),
    ("expand_frontier", "select_nodes", "root_tree", "accept"),
    ("advance", "place_tokens", "causal", "compact"),
    ("rms_norm", "swiglu", "rope_angles", "rotary", "rotary_cache", "attention"),
    ("linear", "matmul", "router_logits"),
    ("route", "experts_linear", "experts_matmul", "experts_bias"),
)


class Backend:
    """The functions above as one device runs them, an attribute each, chosen once.

    A definition that a folder adds (kind "operators") is found when it is first asked for.
    """

    # a device may have these, too:
    model_program: Callable | None = None  # makes what runs the passes of a `Transformer`
    head_program: Callable | None = None  # the same, of an `EagleHead` and its embedding
    path_table: Callable | None = None  # makes what attention reads in every layer in masks' place
    merges_steps = False  # whether neighbouring steps are one launch

    def __init__(self, functions: dict[str, Callable | None]):
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not has_part("operators", name):
            raise AttributeError(f"no folder that is here defines the operator {name}")
        found = load_part("operators", name)
        setattr(self, name, found)
        return found

    def complete(self) -> None:
        """Find the definitions of all folders now, since a step that is traced cannot import."""
        for name in added().get("operators", ()):
            getattr(self, name)


def choose(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, plain: bool = False
) -> Backend:
    """Choose the functions for a device. Where there is backends/, it may build its operators.

    dtype: of the model's weights that are not quantized
    plain: the definitions alone
    """
    functions = {name: globals()[name] for names in DEFINED for name in names}
    if not plain and has_part("backend", device.type):
        functions |= load_part("backend", device.type)(dtype)
    backend = Backend(functions)
    if device.type == "cuda":
        backend.complete()
    return backend


def use_backend(module: nn.Module, backend: Backend) -> None:
    """Let a model run a backend's functions. Writes: `backend` of its modules that have one."""
    for each in module.modules():
        if hasattr(each, "backend"):
            each.backend = backend


TORCH = choose(torch.device("meta"), plain=True)  # for any device, with gradients
