"""The command quantize.py: round a model's weights to int8 or int4 once, into files.

    python quantize.py --checkpoint DIR --quant int4 --out DIR-int4

Not here: how a directory is rounded (files/rounding.py).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

from files.fetch import fetched
from files.io import check_apart, check_out, is_gguf, read_json
from options import FORMAT_NAMES, load_part
from run.parsing import one_line_errors, option, parse


@dataclass(frozen=True)
class QuantizeConfig:
    """Options of quantize.py. Units and effects are in the help texts."""

    checkpoint: str = option("", "Hugging Face directory of a target model or a head", bare=True)
    quant: str = option("int4", "format", FORMAT_NAMES)
    group_size: int = option(
        0, "inputs that share a scale (int4): 32, 64 or 128; 0: 64, or 32 where 64 does not fit"
    )
    out: str = option("", "directory to write")
    device: str = option("cpu", "where to compute: cpu or cuda")
    overwrite: bool = option(False, "replace the directory if it is there")


def check_no_gguf(path: Path) -> None:
    """Check that a checkpoint is no GGUF file. Raises: ValueError."""
    if is_gguf(path):
        raise ValueError(
            f"{path} is a GGUF file, which runs in its own bits as it is: "
            f"python generate.py --checkpoint {path}"
        )


def read_command(argv: list[str] | None = None) -> QuantizeConfig:
    """Read the command line. Exit with status 2 on a mistake."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported
    config = parse(QuantizeConfig, "quantize.py", "Round a model's weights once and for all.", argv)
    with one_line_errors("quantize.py"):
        check_no_gguf(Path(config.checkpoint))
        if not config.checkpoint or not config.out:
            raise ValueError("--checkpoint and --out are needed: directories to read and to write")
        # it may be a head; a model is checked when it is read
        config = replace(config, checkpoint=str(fetched(config.checkpoint, is_head=True)))
        check_no_gguf(Path(config.checkpoint))
        read_json(Path(config.checkpoint, "config.json"))
        check_apart(Path(config.checkpoint), Path(config.out))
        check_out(Path(config.out), config.overwrite)
    return config


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    config = read_command(argv)
    # asked for here, as torch takes seconds, and --help and mistakes are answered before
    rounding = load_part("reader", "rounding")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with one_line_errors("quantize.py"):
        rounding.write_quantized(config)
