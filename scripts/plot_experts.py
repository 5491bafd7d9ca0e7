"""How many experts of a mixture a draft tree touches, layer by layer, and what verifying it can gain at most.

    python scripts/plot_experts.py --checkpoint checkpoints/demo-moe --json experts.json --out experts.png

How it works:
1. Real prompts are decoded with trees of several sizes, and with chains, each with a trace.
2. Every tree of the trace goes through the target once more, behind the text it was drafted for. The inputs of all
   layers are noted, and every layer's attention and router are asked what the feed-forward was given.
3. Counted are the different experts of a tree in a layer. Were routes independent and even, m nodes would touch
   E (1 - (1 - J/E)^m) of E experts, J to a token. Quartiles are over trees, of their means over layers.
4. A pass reads the experts that are touched, and everything else once. `most` is tau over the bytes of a pass, in those
   of a one-token pass: the speedup if drafting were free and reading weights were all that a pass does.
5. A margin is the distance between the last expert chosen and the next, in the router's logits. Where it is within
   rounding, another order of addition sends a token elsewhere.

Not here: times (bench.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import _path  # noqa: F401  (finds the project)
from bench import BenchConfig, fitting, read_tasks
from bench_report import COLORS
from decode import Engine
from draft_tree import build_tree
from files import replace_file, write_text
from generate import Batch, load
from measure import Series, block_inputs, environment, pass_bytes, shown_path, with_config
from model import KVCache, MoEFeedForward, Transformer, Window, causal_window, rope_angles
from options import GenerateConfig, one_line_errors, option, parse
from tree_shapes import MAX_NODES

MARGINS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the router's logits


@dataclass(frozen=True)
class ExpertsConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option("checkpoints/demo-moe", "Hugging Face directory of a Mixtral or a Qwen3-MoE")
    eagle: str = option("", "directory of its EAGLE head; default: the checkpoint's name with -eagle")
    inflate: str = option("", "look at a stand-in in this shape, as mixtral-tiny: added layers route too")
    dynamic: str = option("2,4,6,8,16,26,32,48,60", "nodes of dynamic trees, root included")
    chains: str = option("2,4,6,8", "nodes of chains, root included")
    tasks: str = option("demo,gsm8k,humaneval", "names in data/eval, or JSONL files of id, task and turns")
    limit: int = option(5, "prompts per task; 0: all", least=0)
    max_new_tokens: int = option(96, "tokens per prompt", least=2)
    temperature: float = option(0.0, "0 is greedy")
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)
    json: str = option("", "write the numbers to this file")
    out: str = option("", "write the picture to this PNG file")

    def check(self) -> None:
        """Raises: ValueError for a value that cannot work."""
        for name in ("json", "out"):
            if not Path(getattr(self, name)).parent.is_dir():
                raise ValueError(f"--{name}: cannot write {getattr(self, name)}; its directory does not exist")
        if not self.trees:
            raise ValueError("nothing to draft; give sizes with --dynamic or --chains")

    @property
    def trees(self) -> list[tuple[str, int]]:
        """Shapes and nodes. Raises: ValueError for what is no number of nodes."""
        trees = []
        for name, shape in (("dynamic", "dynamic"), ("chains", "chain")):
            for text in filter(None, getattr(self, name).split(",")):
                if not text.isdecimal() or not 2 <= int(text) <= MAX_NODES:
                    raise ValueError(f"--{name} must be numbers from 2 to {MAX_NODES}, as 4,8,16; it has {text!r}")
                trees.append((shape, int(text)))
        return trees


# ---------------------------------------------------------------------------------------------- routes


class Routes(NamedTuple):
    """Where the nodes of one tree went."""

    expert: Tensor  # [L, N, J] int64, of the layers that have experts
    margin: Tensor  # [L, N] fp32, between the last expert chosen and the next; inf where all are chosen

    def touched(self) -> Tensor:
        """Different experts in each layer, [L] fp32."""
        return torch.tensor([float(len(layer.unique())) for layer in self.expert])


def routes_of(target: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache, window: Window) -> Routes:
    """Run rows through the target and ask every router. tokens, positions: [1, N]. Writes: `cache` at the slots."""
    _, inputs = block_inputs(target, tokens, positions, cache, window)
    rope = rope_angles(target.rope_freq, positions, target.config.rope_factor)
    experts, margins = [], []
    for layer, x, kv in zip(target.layers, inputs, zip(cache.k, cache.v)):
        if not isinstance(layer.ffn, MoEFeedForward):
            continue
        # the layer's first half once more: it writes what is in the cache already
        given = layer.ffn_norm(x + layer.attention(layer.attention_norm(x), rope, kv, window))  # [1, N, F]
        expert, _ = layer.ffn.router(given)
        best = layer.ffn.router.logits(given)[0].sort(descending=True).values  # [N, E]
        best = torch.nn.functional.pad(best, (0, 1), value=-torch.inf)
        experts.append(expert[0])
        margins.append(best[:, expert.shape[2] - 1] - best[:, expert.shape[2]])
    return Routes(torch.stack(experts).cpu(), torch.stack(margins).cpu())


@torch.inference_mode()
def replay(target: Transformer, ids: list[int], cycles: list[dict]) -> Iterator[Routes]:
    """The routes of every tree of a sequence, the last one first.

    ids: the prompt and what followed; cycles: lines of its trace, in order
    """
    weight = target.embedding.weight
    tokens = torch.tensor([ids], device=weight.device)
    begin = torch.zeros(1, dtype=torch.long, device=weight.device)
    cache = KVCache.empty(target.config, 1, len(ids) + MAX_NODES, weight.dtype, str(weight.device))
    target(tokens, torch.arange(len(ids), device=weight.device)[None], cache, causal_window(begin, len(ids)))
    for row in reversed(cycles):  # a tree is written over what comes after its root
        assert ids[row["pos"]] == row["root"], row
        drafted = torch.tensor([[row["root"], *row["draft_tokens"]]], device=weight.device)  # [1, N]
        parents = torch.tensor([[0, *row["parents"]]], device=weight.device)
        tree = build_tree(drafted, parents, torch.ones_like(drafted).bool(), MAX_NODES)
        start = begin + row["pos"]
        slots = start + torch.arange(drafted.shape[1], device=weight.device)[None]
        yield routes_of(target, drafted, start + tree.depths, cache, Window(slots, start, tree.mask))


# ------------------------------------------------------------------------------------------- measuring


def independent(nodes: float, experts: int, chosen: int) -> float:
    """Experts that so many tokens touch on average, if they choose evenly and independently."""
    return experts * (1 - (1 - chosen / experts) ** nodes)


def tree_config(config: GenerateConfig, shape: str, nodes: int) -> GenerateConfig:
    """The options of a tree."""
    return replace(
        config, tree=shape, **({"tree_depth": nodes - 1} if shape == "chain" else {"tree_topk": 10, "tree_size": nodes})
    )


def measure(engine: Engine, shape: str, prompts: list[list[str]]) -> dict[str, Any]:
    """Decode with one tree and replay it. Returns: a line of the result."""
    batch = Batch(engine, prompts)
    for group in batch.groups:
        batch.run(group)
    found: list[Routes] = []
    for number, entry in enumerate(batch.entries):
        cycles = [row for row in batch.trace if row["row"] == number]
        found += replay(engine.target, entry.prompt + entry.new, cycles)
    if not found:
        raise ValueError("every prompt ended with its first token; give other prompts with --tasks")
    c, nodes = engine.target.config, engine.drafter.size
    touched = torch.stack([routes.touched() for routes in found])  # [cycles, L]
    tau = batch.stats.summary()["tau"]
    share = pass_bytes(engine.target, 0, float(touched.mean())) / pass_bytes(engine.target, 0)
    margins = torch.cat([routes.margin.flatten() for routes in found])
    return {
        "tree": shape, "nodes": nodes, "trees": len(found), "tau": tau,
        "touched": float(touched.mean()),
        "quartiles": Series.quartiles(touched.mean(1).tolist())[1:],
        "by_layer": touched.mean(0).tolist(),
        "independent": independent(nodes, c.n_experts, c.experts_per_token),
        "pass_bytes": share, "most": tau / share,
        "margins_below": {str(m): float((margins < m).float().mean()) for m in MARGINS},
    }  # fmt: skip


def prompts_for(engine: Engine, config: ExpertsConfig) -> list[list[str]]:
    """The first turns of all tasks, those that fit."""
    asked = BenchConfig(tasks=config.tasks, limit=config.limit, max_new_tokens=config.max_new_tokens)
    fits = (fitting(engine, name, prompts, asked).prompts for name, prompts in read_tasks(asked).items())
    return [turns[:1] for prompts in fits for turns in prompts]


# --------------------------------------------------------------------------------------------- results


def table(rows: list[dict]) -> Iterator[str]:
    """Markdown, line by line."""
    yield "| tree | nodes | tau | experts touched (quartiles) | if independent | bytes of a pass | most |"
    yield "|---|---|---|---|---|---|---|"
    for r in rows:
        low, high = r["quartiles"]
        yield (
            f"| {r['tree']} | {r['nodes']} | {r['tau']:.2f} | {r['touched']:.2f} ({low:.2f}-{high:.2f}) | "
            f"{r['independent']:.2f} | {r['pass_bytes']:.2f} | {r['most']:.2f} |"
        )


def draw(rows: list[dict], experts: int, chosen: int, title: str, out: Path) -> None:
    """Experts touched, and the most that can be gained, by nodes. Writes: `out`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    every = [1 + i / 10 for i in range(10 * max(row["nodes"] for row in rows))]
    left.plot(
        every, [independent(m, experts, chosen) for m in every], "--", color=COLORS[0], label="independent routes"
    )
    for shape, color in zip(dict.fromkeys(row["tree"] for row in rows), COLORS[1:]):
        mine = sorted((row for row in rows if row["tree"] == shape), key=lambda row: row["nodes"])
        x, y = [row["nodes"] for row in mine], [row["touched"] for row in mine]
        left.plot(x, y, "o-", color=color, label=f"{shape}, with quartiles")
        left.vlines(x, *zip(*(row["quartiles"] for row in mine)), color=color, alpha=0.5, lw=3)  # may lie beside a mean
        right.plot(x, [row["most"] for row in mine], "o-", color=color, label=shape)
    left.axhline(experts, color="#333333", lw=0.8)
    left.set(ylabel=f"experts touched, of {experts}", ylim=(0, experts + 0.4))
    right.axhline(1, color="#333333", lw=0.8, ls="--")
    right.set(ylabel="tau / bytes of a pass (one token: 1)", ylim=(0, 1.1 * max(1, *(row["most"] for row in rows))))
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("nodes of a tree, root included")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    replace_file(out, lambda path: figure.savefig(path, dpi=110, format="png"))
    plt.close(figure)


def run(config: ExpertsConfig) -> None:
    """Measure, print, write."""
    config.check()
    if config.threads:
        torch.set_num_threads(config.threads)
    kept = ("checkpoint", "eagle", "inflate", "max_new_tokens", "temperature", "dtype", "device")
    engine = load(GenerateConfig(draft="eagle", trace="-", **{name: getattr(config, name) for name in kept}))
    c = engine.target.config
    if not c.n_experts:
        raise ValueError(f"{config.checkpoint} is dense; name a mixture of experts with --checkpoint")
    prompts, rows = prompts_for(engine, config), []
    for shape, nodes in tqdm(config.trees, unit="tree"):
        chosen = tree_config(engine.config, shape, nodes)
        chosen.check()
        rows.append(measure(with_config(engine, chosen), shape, prompts))
    facts = environment(engine.config.device)
    what = c.stand_in or shown_path(config.checkpoint)
    title = f"{what}, {engine.config.dtype}, T = {config.temperature:g}, {len(prompts)} prompts of {config.tasks}"
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"{title}, {config.max_new_tokens} tokens\n")
    print("\n".join(table(rows)))
    largest = max(rows, key=lambda row: row["nodes"])
    below = ", ".join(f"{m}: {100 * share:.2g} %" for m, share in largest["margins_below"].items())
    print(f"\nroutes whose margin is below, in trees of {largest['nodes']} nodes: {below}")
    if config.json:
        record = {"title": title, "environment": facts, "experts": c.n_experts, "per_token": c.experts_per_token}
        write_text(config.json, json.dumps(record | {"prompts": len(prompts), "rows": rows}))
    if config.out:
        draw(rows, c.n_experts, c.experts_per_token, title, Path(config.out))


def main() -> None:
    """The command line."""
    config = parse(ExpertsConfig, "plot_experts.py", __doc__)
    with one_line_errors("plot_experts.py"):
        run(config)


if __name__ == "__main__":
    main()
