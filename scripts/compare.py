"""Compare every drafter at hand on your prompts, explain each speedup, and recommend a command.

    python scripts/compare.py --checkpoint MODEL --prompts FILE --chat [--heads DIR,DIR]

1. The drafters: none; a lookup in the text (ngram); Token Recycling; with heads of any kind, given
   or bundled, chains, dynamic trees, `--tree auto`, which learns a tree while it decodes, and an
   EAGLE head's dynamic tree with lookups.
2. All decode the same prompts in turn in one process, one prompt untimed first (measure.py speed).
3. The fastest over all prompts is recommended. Vanilla decoding is, where no other is faster.

A line holds: speedup = tau / (verify + draft of a vanilla pass), its bound, the quartiles of the
speedup over prompts, and the share of sequences that are equal to vanilla's.
Not here: draft models, datastores, Lookahead, which is slower than vanilla wherever it was
measured, and tables by task (scripts/measure.py speed has them all).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import json
import shlex
import sys
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.fetch import fetched, with_files
from files.head_kinds import head_kind
from files.io import check_directory, is_gguf
from files.registry import check_architecture
from run.options import DEFAULT, GenerateConfig
from run.parsing import SWITCHES, one_line_errors, option, parse
from run.prompts import prompts_of_file
from scripts.bench.cases import SpeedOptions

WITHOUT_HEAD = ("none", "ngram", "recycling")


@dataclass(frozen=True)
class CompareConfig:
    """Options. Units and effects are in the help texts."""

    prompts: str = option("", "a text file, or JSONL with `turns`, as generate.py's --prompt_file")
    checkpoint: str = option(DEFAULT, "the target, as generate.py's")
    heads: str = option(
        "",
        "heads of any kind, comma-separated; default: the one next to the target",
        alias="head",
    )
    limit: int = option(20, "prompts at most, the first ones; 0: all", least=0)
    chat: str | None = option(
        None, "apply a chat template: the model's, or the one named; default: none", optional=True
    )
    max_new_tokens: int = option(128, "tokens per turn", least=1)
    temperature: float = option(0.0, "0 is greedy", least=0)
    quant: str = option("none", "round the target's weights", ("none", "int8", "int4"))
    context: int = option(0, "KV capacity in tokens; 0: as of generate.py", least=0)
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    def bench(self, tasks: str) -> SpeedOptions:
        """Return the options of the measurement. tasks: the file of the prompts"""
        methods = [*WITHOUT_HEAD]
        for kind, of_kind in OF_KIND.items():
            if not self.heads and has_head(self.checkpoint, kind):
                methods += of_kind
        for path in map(Path, self.heads.split(",") if self.heads else ()):
            if not is_gguf(path):
                check_directory(path)
            named = head_option(path)
            methods += [f"{method}:{named}" for method in OF_KIND[head_kind(path)]]
        return SpeedOptions(
            checkpoint=self.checkpoint,
            tasks=tasks,
            limit=self.limit,
            methods=",".join(methods),
            temperatures=str(self.temperature),
            quant=self.quant,
            options=f"context={self.context}" if self.context else "",
            chat=self.chat,
            max_new_tokens=self.max_new_tokens,
            device=self.device,
        )


def read_command(argv: list[str] | None = None) -> CompareConfig:
    """Read the command line. Exit with status 2 on a mistake."""
    config = parse(CompareConfig, "compare.py", __doc__, argv)
    with one_line_errors("compare.py"):
        if not config.prompts:
            raise ValueError("--prompts is missing; name a file with your prompts")
        prompts_of_file(Path(config.prompts), "--prompts")
        draft = "none" if config.heads else ""
        named = with_files(GenerateConfig(checkpoint=config.checkpoint, draft=draft))
        check_architecture(Path(named.checkpoint))
        heads = [str(fetched(head, is_head=True)) for head in config.heads.split(",") if head]
    return replace(config, checkpoint=named.checkpoint, heads=",".join(heads) or named.head)


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = read_command() if __name__ == "__main__" else None

from scripts.bench import speed
from scripts.bench.methods import CHAIN, Setting, has_head, head_option, method_config
from scripts.bench.table import explained

OF_KIND = {  # of a head
    "eagle": ("eagle:dynamic", "eagle+ngram", "eagle:auto"),
    "medusa": (f"medusa:{CHAIN}", "medusa:dynamic", "medusa:auto"),
    "hydra": (f"hydra:{CHAIN}", "hydra:dynamic", "hydra:auto"),
    "block": (f"block:{CHAIN}", "block:dynamic", "block:auto"),
    "mtp": (f"mtp:{CHAIN}", "mtp:dynamic", "mtp:auto"),
    "assistant": (f"assistant:{CHAIN}", "assistant:dynamic", "assistant:auto"),
}


def measure(config: CompareConfig) -> tuple[SpeedOptions, list[dict[str, Any]]]:
    """Measure every drafter. Returns: the options of the measurement; a row of its log for each.

    Raises: ValueError.
    """
    prompts = prompts_of_file(Path(config.prompts), "--prompts")
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder, "prompts.jsonl")
        rows = [{"id": i, "task": "prompts", "turns": turns} for i, turns in enumerate(prompts)]
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        bench = config.bench(str(tasks))
        bench.check()
        return bench, speed.measure(bench)


def described(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return the line of a drafter. plain: the row of `none`"""
    if row is plain:
        return f"none: {row['tokens_per_s']:.1f} tokens/s"
    line = f"{row['method']}: {explained([row], [plain])}"
    if row["speedup_quartiles"]:
        low, high = row["speedup_quartiles"]  # those of prompts, as is the median before them
        line += f"; {row['speedup']:.2f} ({low:.2f} to {high:.2f}) by prompt"
    if row["identical"] is not None:
        line += f"; {100 * row['identical']:.0f} % of sequences identical"
    return line


def fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the most tokens per second over all prompts; of equals the first."""
    return max(rows, key=lambda row: row["tokens"] / row["decode_s"] if row["decode_s"] else 0.0)


def command(config: CompareConfig, bench: SpeedOptions, method: str) -> str:
    """Return the command line of generate.py that decodes the prompts as the measurement did."""
    setting = Setting(config.quant, config.temperature, 1)
    chosen = method_config(method, setting, bench)
    words = ["python", "generate.py"]
    for f in fields(GenerateConfig):
        value = getattr(chosen, f.name)
        if f.name == "tree" and chosen.tree_depth:
            value = f"{value}:{chosen.tree_depth}"
        if value == f.default or not f.metadata["flag"]:  # a part of --tree
            continue
        words.append(f"--{f.name}")
        if f.type not in SWITCHES and value != "":  # a bare --chat is the model's own template
            words.append(str(value))
    return shlex.join([*words, "--prompt_file", config.prompts])


def main(argv: list[str] | None = None, config: CompareConfig | None = None) -> None:
    """Run the command line. config: the result of `read_command`, where it is there already"""
    config = config or read_command(argv)
    with one_line_errors("compare.py"):
        bench, rows = measure(config)
        print()
        for row in rows:
            print(described(row, rows[0]))
        best = fastest(rows)
        print(f"\nrecommended, {best['method']}:\n    {command(config, bench, best['method'])}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(config=COMMAND)
