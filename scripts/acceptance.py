"""How many tokens of its drafts a head gets accepted: tau and n-alpha by task, tree and temperature.

    python scripts/acceptance.py --tasks data/eval/demo.jsonl,data/eval/gsm8k.jsonl --limit 40
    python scripts/acceptance.py --methods dynamic,dynamic:topk,static:residual --temperatures 1,0.6

A method is a tree (chain, static, dynamic) and, after a colon, how children are picked (topk, noise) or `residual`
for the papers' rule. Rows: tau with its standard error over prompts; n-alpha (chains only): the share of drafted
tokens accepted after n accepted ones; the share of repeated 8-grams of the output, since loops inflate tau.
Time is not measured here: rows are decoded in batches.
Prints a Markdown table; `--json` appends one line per row.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config import DEMO, option, parse, read_jsonl, run_or_fail  # noqa: E402
from decode import Session  # noqa: E402
from generate import encode, load  # noqa: E402
from model import ModelConfig  # noqa: E402

EVAL = Path(DEMO).parents[1] / "data" / "eval"


@dataclass
class TauConfig:
    checkpoint: str = option(DEMO, "Hugging Face directory of the target")
    eagle: str = option("", "default: the bundled head")
    tasks: str = option(",".join(str(EVAL / f"{name}.jsonl") for name in ("demo", "gsm8k", "humaneval")), "JSONL files")
    limit: int = option(40, "prompts per task")
    methods: str = option("chain,static,dynamic", "methods")
    temperatures: str = option("0,1", "temperatures")
    sharpness: float = option(0.0, "0: the head's own")
    top_p: float = option(1.0, "top_p")
    max_new_tokens: int = option(128, "max_new_tokens")
    max_prompt: int = option(512, "longer prompts are left out, and the count is printed")
    batch_size: int = option(16, "batch_size")
    tree_depth: int = option(0, "0: chains 5, dynamic trees 6")
    seed: int = option(0, "of initialisation, order and noise")
    dtype: str = option("float32", "dtype", ("float32", "bfloat16"))
    json: str = option("", "file to append to")
    threads: int = option(0, "threads")


def read_tasks(config: TauConfig) -> dict[str, list[str]]:
    """First turns by task. The demo's worked sums and GSM8K's questions are asked in the same form."""
    tasks: dict[str, list[str]] = {}
    for file in config.tasks.split(","):
        for row in read_jsonl(Path(file), "--tasks"):
            text = row["turns"][0]
            if row["task"] == "gsm8k":
                text = f"Question: {text}\nAnswer:"
            tasks.setdefault(row["task"], []).append(text)
    return {task: texts[: config.limit] for task, texts in tasks.items()}


def repeated(tokens: list[int], n: int = 8) -> float:
    """Share of n-grams that have occurred before in the same output."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def measure(engine, prompts: list[list[int]]) -> dict:
    """Decode all prompts in batches and add up what was accepted."""
    size = engine.config.batch_size
    per_prompt, outputs = [], []
    for first in range(0, len(prompts), size):
        group = prompts[first : first + size]
        session = Session(engine, [(first + i, 0) for i in range(len(group))])
        for _ in session.run(group):
            pass
        lengths = [[t["accept_length"] for t in session.trace if t["row"] == r] for r in range(len(group))]
        per_prompt += [row for row in lengths if row]
        outputs += [session.history[r][len(p) :] for r, p in enumerate(group)]
    every = [length for row in per_prompt for length in row]
    tau = sum(every) / len(every) + 1
    depth = engine.drafter.depth
    hits = [sum(a > n for a in every) for n in range(depth)]
    tried = [sum(a >= n for a in every) for n in range(depth)]
    # ratio of sums; its error by the linearised deviations of the prompts
    spread = [sum(row) + len(row) - tau * len(row) for row in per_prompt]
    error = math.sqrt(sum(d * d for d in spread)) / len(every)
    return {
        "tau": tau,
        "error": error,
        "alpha": [h / t if t else 0.0 for h, t in zip(hits, tried)],
        "repeated": sum(map(repeated, outputs)) / len(outputs),
        "cycles": len(every),
        "prompts": len(prompts),
    }


def options_of(method: str, temperature: float, config: TauConfig) -> dict:
    """Engine options of a method name."""
    tree, _, how = method.partition(":")
    if tree not in ("chain", "static", "dynamic") or how not in ("", "topk", "noise", "residual"):
        raise ValueError(
            f"--methods: {method} is no method; use chain, static or dynamic, with :topk, :noise, :residual"
        )
    options = {"tree": tree, "sharpness": config.sharpness if tree == "dynamic" else 0.0}
    if temperature > 0:  # at 0 all of these are the same
        options |= {"accept": "residual"} if how == "residual" else {"children": how}
    if tree == "chain" or (tree == "dynamic" and config.tree_depth):
        options["tree_depth"] = config.tree_depth or 5
    return options


def run(config: TauConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    tasks = read_tasks(config)
    stand_in = ModelConfig.from_dir(Path(config.checkpoint)).stand_in
    named = f" (a stand-in: {stand_in})" if stand_in else ""
    print(f"# checkpoint {config.checkpoint}{named}, torch {torch.__version__}, {config.dtype}, seed {config.seed}")
    print("| task | T | method | tau | 0-alpha | 1 | 2 | 3 | 4 | repeated 8-grams | prompts |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    jobs = [(float(t), m) for t in config.temperatures.split(",") for m in config.methods.split(",")]
    for temperature, method in tqdm(jobs, unit="method"):
        engine = load(
            checkpoint=config.checkpoint, eagle=config.eagle, draft="eagle", dtype=config.dtype, trace="-",
            temperature=temperature, top_p=config.top_p if temperature else 1.0,
            max_new_tokens=config.max_new_tokens, seed=config.seed,
            batch_size=config.batch_size, **options_of(method, temperature, config),
        )  # fmt: skip
        for task, texts in tasks.items():
            prompts = [encode(engine, [text], []) for text in texts]
            fitting = [p for p in prompts if len(p) <= config.max_prompt]
            if not fitting:
                raise ValueError(f"--max_prompt {config.max_prompt} leaves no prompt of {task}; raise it")
            row = measure(engine, fitting)
            alphas = [f"{a:.2f}" for a in row["alpha"][:5]] if method.startswith("chain") else ["", "", "", "", ""]
            cells = [task, f"{temperature:g}", method, f"{row['tau']:.2f} ± {row['error']:.2f}", *alphas]
            left = f" ({len(prompts) - len(fitting)} too long)" if len(fitting) < len(prompts) else ""
            tqdm.write(f"| {' | '.join(cells)} | {row['repeated']:.2f} | {row['prompts']}{left} |", file=sys.stdout)
            if config.json:
                with open(config.json, "a", encoding="utf-8") as file:
                    facts = {"task": task, "method": method, "temperature": temperature, "sharpness": config.sharpness}
                    file.write(json.dumps(facts | row) + "\n")


def main() -> None:
    config = parse(TauConfig, "acceptance.py", __doc__)
    run_or_fail("acceptance.py", lambda: run(config))


if __name__ == "__main__":
    main()
