"""Write a stand-in of real size: a small target and its head as the same function in a larger shape.

    python scripts/bench/inflate.py --shape llama2-7b --out stand-ins/7b
    python generate.py --checkpoint stand-ins/7b --prompt "def read_lines(path):"
    python scripts/bench/inflate.py --shape tiny-0.5b --n_layers 9 --vocab_size 4096 --out stand-ins/short
    python scripts/bench/inflate.py --checkpoint checkpoints/demo-moe --shape mixtral-tiny --out stand-ins/mixtral

How it works:
1. extras/stand_in.py computes one tensor after the other; they are written in shards, so that no more than one shard
   is in memory. `config.json` carries the stand-in's name, and everything that is printed from it says so.
2. checkpoint.py writes them: whole or not at all. A run that was killed is started again.

The result is a Hugging Face directory like any other. Without the disk: `generate.py --checkpoint DIR --inflate SHAPE`.
Not here: the maths, and what a stand-in is good for (extras/stand_in.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from checkpoint import SHARD_BYTES, check_out, write_checkpoint
from command_line import one_line_errors, option, parse
from extras.stand_in import SHAPES, InflatedFiles, Shape, head_config, inflate_head, inflate_target
from files import read_json
from model import DTYPES
from options import DEMO

SIZES = tuple(f.name for f in fields(Shape) if f.name != "name")


@dataclass(frozen=True)
class InflateConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEMO, "Hugging Face directory of the small target")
    eagle: str = option(
        "",
        "directory of its EAGLE-1/2 head; default: the checkpoint's name with -eagle, if it exists",
    )
    shape: str = option("llama2-7b", "shape of the stand-in", tuple(SHAPES))
    dim: int = option(0, "width; 0, here and below: the shape's own")
    n_layers: int = option(0, "layers of the target; the head keeps its own")
    n_heads: int = option(0, "query heads")
    n_kv_heads: int = option(0, "key and value heads")
    head_dim: int = option(0, "width of a head")
    ffn_dim: int = option(0, "neurons of a layer or expert, and of the head's layers")
    vocab_size: int = option(0, "tokens; those beyond the small model's are never chosen")
    n_experts: int = option(0, "experts of a layer; as many as the small model's")
    experts_per_token: int = option(0, "those that see a token; as many as the small model's")
    out: str = option("", "directory to write the target to")
    eagle_out: str = option(
        "", "directory to write the head to; default: OUT-eagle, where generate.py finds it"
    )
    dtype: str = option("", "default: the checkpoint's", tuple(DTYPES))
    random_twin: bool = option(
        False, "random weights instead of the function: to check what the zeros save"
    )
    overwrite: bool = option(False, "replace stand-ins that are there already")

    def check(self) -> None:
        """Raises: ValueError for a value that cannot work."""
        if not self.out:
            raise ValueError("--out is missing; name the directory to write")
        for name in SIZES:
            if getattr(self, name) < 0:
                raise ValueError(
                    f"--{name} must be positive, or 0 for the shape's own; it is {getattr(self, name)}"
                )
        if self.eagle_out and Path(self.eagle_out).resolve() == Path(self.out).resolve():
            raise ValueError(
                f"--eagle_out must not be the target's directory {self.out}; name another one"
            )

    @property
    def whole_shape(self) -> Shape:
        """The named shape with the sizes that were given."""
        return Shape.parse(
            ",".join([self.shape, *(f"{n}={getattr(self, n)}" for n in SIZES if getattr(self, n))])
        )


def check(files: InflatedFiles, out: Path, overwrite: bool) -> None:
    """Raises: ValueError when `out` may not be written, or the disk is too small for it."""
    settings = out / "config.json"
    if (
        out.exists()
        and overwrite
        and not (settings.is_file() and "stand_in" in read_json(settings))
    ):
        raise ValueError(
            f"--overwrite replaces stand-ins only, and {out} is none; choose another directory"
        )
    check_out(out, overwrite, files_bytes(files))


def write(
    files: InflatedFiles, out: Path, overwrite: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a stand-in in Hugging Face layout. Raises: ValueError when that cannot be done. Writes: `out`."""
    check(files, out, overwrite)
    write_checkpoint(out, _computed(files), files.config, files.path, overwrite, shard_bytes)


def files_bytes(files: InflatedFiles) -> int:
    """What all tensors take."""
    return sum(math.prod(recipe.size) for recipe in files.recipes.values()) * files.dtype.itemsize


def _computed(files: InflatedFiles) -> Iterator[tuple[str, Tensor]]:
    with tqdm(
        total=files_bytes(files), unit="B", unit_scale=True, desc=files.config["stand_in"]
    ) as bar:
        for name in files.recipes:
            tensor = files.read(name)
            yield name, tensor
            bar.update(tensor.nbytes)


def run(config: InflateConfig) -> None:
    """Write the target, and the head where there is one."""
    config.check()
    path, shape, dtype = Path(config.checkpoint), config.whole_shape, DTYPES.get(config.dtype)
    bundled = path.with_name(path.name + "-eagle")
    head = Path(config.eagle) if config.eagle else bundled if bundled.is_dir() else None
    jobs = [(inflate_target(path, shape, dtype, random_twin=config.random_twin), Path(config.out))]
    if head is None and config.eagle_out:
        raise ValueError(
            f"--eagle_out needs a head; name its directory with --eagle (there is no {bundled})"
        )
    if head is not None:
        small = head_config(head)
        out = (
            Path(config.eagle_out)
            if config.eagle_out
            else jobs[0][1].with_name(jobs[0][1].name + "-eagle")
        )
        jobs.append((inflate_head(head, small, shape, dtype, random_twin=config.random_twin), out))
    for files, out in jobs:  # before anything is computed
        check(files, out, config.overwrite)
    for files, out in jobs:
        write(files, out, config.overwrite)
        print(f"wrote {out}, {files_bytes(files) / 1e9:.2f} GB: {files.config['stand_in']}")
    named = f" --eagle {jobs[-1][1]}" if config.eagle_out else ""
    print(
        f'next: python generate.py --checkpoint {config.out}{named} --prompt "def read_lines(path):"'
    )


def main() -> None:
    config = parse(InflateConfig, "inflate.py", __doc__)
    with one_line_errors("inflate.py"):
        run(config)


if __name__ == "__main__":
    main()
