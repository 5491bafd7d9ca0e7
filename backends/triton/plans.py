"""Plans of products that were measured on a device, in place of estimates.

scripts/measure.py plans measures and writes them. A file measured/NAME.json beside this one, NAME
from `file_name`, holds on all devices of that name; without one, qmatmul.py estimates. The splits
of a product are the same for all numbers of rows, on which a row's bits do not depend.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).with_name("measured")
HEIGHTS = (16, 32, 64)  # rows of x per block
ROWS = (64, 128)  # rows of W per block
MOST_STAGES = 8
MAX_SPLITS = 8


class Tile(NamedTuple):
    """The part of a plan that does not change a result's bits."""

    rows: int  # of W per block
    stages: int  # of the software pipeline


class MeasuredProduct(NamedTuple):
    """The fastest plans of one product."""

    splits: int  # of K
    tiles: dict[int, Tile]  # by rows of x per block, `HEIGHTS`


def file_name(device: str) -> str:
    """Return the name of the file for a device, from its own name."""
    return re.sub(r"\W+", "-", device) + ".json"


def key_of(N: int, K: int, bits: int, group: int, epilogue: str) -> str:
    """Return a product's name in a table. bits: 16 for floats; group: of int4, else 0"""
    form = f"int4-{group}" if bits == 4 else {8: "int8", 16: "16bit"}[bits]
    return f"{form} {N}x{K} {epilogue}"


def to_json(device: str, chosen: dict[str, MeasuredProduct]) -> str:
    """Return the contents of a file. chosen: by `key_of`"""
    rows = {
        key: {"splits": product.splits, "tiles": {str(h): t for h, t in product.tiles.items()}}
        for key, product in chosen.items()
    }
    return json.dumps({"device": device, "products": rows}, indent=1)


@cache
def measured_on(device: str) -> dict[str, MeasuredProduct]:
    """Read the plans for a device, by `key_of`; none where it has no file.

    Raises: ValueError for a file that this version cannot use.
    """
    file = FOLDER / file_name(device)
    if not file.exists():
        return {}
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        return {key: _product(key, row) for key, row in table["products"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} has no plans that can be used ({error}); write it anew with "
            "scripts/measure.py plans, or remove it"
        ) from None


def _product(key: str, row: dict[str, Any]) -> MeasuredProduct:
    """Read a product. Raises: ValueError for plans that no kernel has."""
    splits = row["splits"]
    tiles = {height: Tile(*row["tiles"][str(height)]) for height in HEIGHTS}
    if splits not in range(1, 2 if key.endswith("swiglu") else MAX_SPLITS + 1):
        raise ValueError(f"{key}: {splits} splits")
    for tile in tiles.values():
        if tile.rows not in ROWS or tile.stages not in range(2, MOST_STAGES + 1):
            raise ValueError(f"{key}: {tile}")
    return MeasuredProduct(splits, tiles)
