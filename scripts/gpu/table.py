"""Print the results of call.sh as tables, with the last line of every error.

    python3 scripts/gpu/table.py FOLDER
    python3 scripts/gpu/table.py FOLDER --wrong         # families of kernels whose probe failed
    python3 scripts/gpu/table.py FOLDER --bandwidth     # of GPT_EAGLE_BANDWIDTH

This program imports no torch: it answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from base.parsing import one_line_errors, option, parse
from scripts.bench.row_log import Log

LOGS = ("probes.jsonl", "ladder.jsonl", "beside.jsonl")  # of attempts.py
FAMILY = "family "  # in front of the name of a family of kernels, as probe.py writes it
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


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read a log of attempts; one that is not there is empty."""
    return Log(str(folder / name), name).rows


def weights_of(row: dict[str, Any]) -> str | None:
    """Name the format of an attempt's weights, and the kernel if it is not the usual one."""
    return "int4 in CUDA C++" if row.get("int4") == "cuda" else row.get("quant")


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
        else:
            print("\n".join(table(folder)))


if __name__ == "__main__":
    main()
