"""Print the results of call.sh as tables, with the last line of every error.

    python3 scripts/gpu/table.py FOLDER
    python3 scripts/gpu/table.py FOLDER --wrong         # families of kernels whose probe failed
    python3 scripts/gpu/table.py FOLDER --bandwidth     # of GPT_EAGLE_BANDWIDTH
    python3 scripts/gpu/table.py FOLDER --speed gpu.json --commit 1a2b3c4    # for README

`--speed` writes the rows of one run that plot_speed.py makes README's table and picture of: one
sequence at T = 0, without faults, on the highest rung, beside gpt-fast at the same size of groups.
A stand-in's head knows its texts, so a tree has a second row, at the tokens a pass of a head that
has not seen its prompts. KL is that of the demo, from the part `fidelity`.

This program imports no torch: it answers at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.io import check_outputs, read_json, write_text
from options import require
from run.parsing import one_line_errors, option, parse
from scripts.bench.row_log import Log

LOGS = ("probes.jsonl", "ladder.jsonl", "beside.jsonl")  # of attempts.py
FAMILY = "family "  # in front of the name of a family of kernels, as probe.py writes it
# methods of the ladder, as README's table names them
METHODS = {"vanilla": "no draft", "chain": "chain of 5", "tree": "tree of 32"}
EAGLE2_TAU = 4.65  # tokens a pass, of EAGLE-2's trees on prompts that its head has not seen (paper)
GROUPS = {"int4": 128, "gptfast-int4": 32, "gptfast-int4-128": 128}  # weights that share a scale
# rows of fidelity.py, by format
FIDELITY = {
    "bf16": "bfloat16",
    "int8": "--quant int8",
    "int4, groups of 128": "--quant int4",
    "int4, groups of 32": "demo-int4-32",
}
HEAD = (
    "weights",
    "T",
    "batch",
    "rung",
    "method",
    "tokens/s",
    "tau",
    "draft ms",
    "verify ms",
    "cycle ms",
    "fault",
)


@dataclass(frozen=True)
class TableConfig:
    folder: str = option("", "the folder of results", positional=True)
    wrong: bool = option(False, "only the families of kernels whose probe failed, as a list")
    bandwidth: bool = option(False, "only the bytes per second that the GPU reads")
    speed: str = option("", "file to write: the rows of README's table, for plot_speed.py")
    commit: str = option("", "of the run, for --speed")


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read a log of attempts; one that is not there is empty."""
    return Log(str(folder / name), name).rows


def weights_of(row: dict[str, Any]) -> str | None:
    """Name the format of an attempt's weights."""
    if row.get("group_size"):
        return f"{row['quant']} in groups of {row['group_size']}"
    return row.get("quant")


def title(row: dict[str, Any]) -> str:
    """Name an attempt."""
    setting = [weights_of(row)]
    if "temperature" in row:
        setting += [f"T = {row['temperature']:g}", f"batch of {row['batch_size']}"]
    parts = (*setting, row["group"], row["name"])
    return ", ".join(dict.fromkeys(part for part in parts if part))


def failed(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Name the attempts that failed, and those that never ended."""
    ended = {title(row) for row in rows if "begun" not in row}
    for row in rows:
        if "error" in row:
            yield f"FAILED {title(row)}: {row['error'][:200]}"
        elif row.get("fault"):
            yield f"FAULT {title(row)}: {row['fault']}"
        elif "begun" in row and title(row) not in ended:
            yield f"HUNG or died: {title(row)}; its stacks are in log.txt"


def wrong_families(folder: Path) -> list[str]:
    """Return the families of kernels whose probe failed, hung or lost the device."""
    rows = [row for row in rows_of(folder, "probes.jsonl") if row["group"].startswith(FAMILY)]
    begun = {row["group"] for row in rows}
    right = {row["group"] for row in rows if "relative_error" in row}
    wrong = {row["group"] for row in rows if "error" in row}
    return sorted(name.removeprefix(FAMILY) for name in (begun - right) | wrong)


def bandwidth(folder: Path) -> str:
    """Return the measured bytes per second, for GPT_EAGLE_BANDWIDTH; "": not measured."""
    rates = [row["bytes_per_s"] for row in rows_of(folder, "probes.jsonl") if "bytes_per_s" in row]
    return f"{rates[-1]:.4g}" if rates else ""


def cells(row: dict[str, Any]) -> list[str]:
    """Return a rate of the ladder, by the columns of HEAD."""
    numbers = [row[name] for name in ("tokens_per_s", "tau", "draft_ms", "verify_ms", "cycle_ms")]
    texts = [f"{number:.2f}" for number in numbers]
    setting = [weights_of(row), f"{row['temperature']:g}", str(row["batch_size"])]
    return [*setting, row["group"], row["name"], *texts, row["fault"] or "none"]


def line(texts: Iterable[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def table(folder: Path) -> Iterator[str]:
    """Yield the lines."""
    for row in rows_of(folder, "probes.jsonl"):
        if "text" in row:
            yield f"{row['name']}: {row['text']}"
    yield line(HEAD)
    yield line(["---"] * len(HEAD))
    ladder = rows_of(folder, "ladder.jsonl")
    for row in ladder:
        if "tokens_per_s" in row:
            yield line(cells(row))
    for row in rows_of(folder, "beside.jsonl"):
        if "tokens_per_s" in row:
            yield f"{row['name']}: {row['tokens_per_s']:.1f} tokens/s"
    for name in LOGS:
        yield from failed(rows_of(folder, name))


# ------------------------------------------------------------------------------ README's table


def format_of(quant: str, group: int) -> str:
    """Name a format of weights. group: weights that share a scale in int4; 0: ours by default"""
    if quant == "int4":
        return f"int4, groups of {group or GROUPS[quant]}"
    return {"none": "bf16"}.get(quant, quant)


def ladder_rates(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield README's rows of our own rates: model, format, engine, tokens_per_s, tau."""
    best = {}
    for row in rows:
        usual = row["temperature"] == 0 and row["batch_size"] == 1
        if usual and "tokens_per_s" in row and not row["fault"] and row["name"] in METHODS:
            form = format_of(row["quant"], row.get("group_size", 0))
            best[row["inflate"], form, METHODS[row["name"]]] = row  # a higher rung comes later
    for (model, form, method), row in best.items():
        made = {"model": model, "format": form, "engine": f"gpt-eagle, {method}"}
        rate = {"tokens_per_s": round(row["tokens_per_s"], 1)}
        if row["name"] != "vanilla":
            rate["tau"] = row["tau"]
        yield made | rate
        if row["name"] == "tree":
            made["engine"] += " at EAGLE-2's tau"
            at_published = round(1e3 * EAGLE2_TAU / row["cycle_ms"], 1)
            yield made | {"tokens_per_s": at_published, "tau": EAGLE2_TAU}


def other_rates(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield README's rows of other runtimes: model, format, engine, tokens_per_s."""
    for row in rows:
        if "tokens_per_s" in row:
            engine, _, form = row["name"].partition("-")
            form = form.partition("-")[0] or "bf16"
            made = {"model": row["shape"], "format": format_of(form, GROUPS.get(row["name"], 0))}
            made["engine"] = engine.replace("gptfast", "gpt-fast")
            yield made | {"tokens_per_s": round(row["tokens_per_s"], 1)}


def speed_rows(folder: Path, commit: str) -> list[dict[str, Any]]:
    """Return the rows of README's table, as plot_speed.py reads them.

    Raises: ValueError for a run without rates, or one that does not say when and where it was.
    """
    facts = [row for row in rows_of(folder, "probes.jsonl") if "date" in row]
    require(facts != [], f"{folder} has no row of facts; begin the call with the part families")
    place = {"machine": facts[-1]["nvidia_smi"].partition(",")[0]}
    place |= {"date": facts[-1]["date"], "commit": commit}
    others = other_rates(rows_of(folder, "beside.jsonl"))
    rates = [*others, *ladder_rates(rows_of(folder, "ladder.jsonl"))]
    require(rates != [], f"{folder} has no rates without a fault; see its summary.txt")
    fidelity = folder / "fidelity.json"
    records = read_json(fidelity)["fidelity"] if fidelity.is_file() else []
    kl = {record["row"]: record["kl"] for record in records}
    rates.sort(key=lambda row: row["format"])
    for row in rates:
        found = kl.get(FIDELITY.get(row["format"], ""))
        row["format"] += f" (KL {found:.4f})" if found is not None else ""
    return [row | place for row in rates]


def write_speed(folder: Path, file: str, commit: str) -> None:
    """Write the rows of README's table, one a line. Writes: the file."""
    require(commit != "", "--speed needs --commit, that of the run")
    check_outputs({"--speed": file})
    rows = speed_rows(folder, commit)
    write_text(file, "[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n]\n")
    print(f"wrote {file}; next: python scripts/bench/plot_speed.py {file} --out gpu.svg")


def main() -> None:
    config = parse(TableConfig, "table.py", __doc__)
    with one_line_errors("table.py"):
        folder = Path(config.folder)
        if not config.folder or not folder.is_dir():
            raise ValueError(f"there is no folder {config.folder!r}; name that of the results")
        if config.wrong:
            print(",".join(wrong_families(folder)))
        elif config.bandwidth:
            print(bandwidth(folder))
        elif config.speed:
            write_speed(folder, config.speed, config.commit)
        else:
            print("\n".join(table(folder)))


if __name__ == "__main__":
    main()
