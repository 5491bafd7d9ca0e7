"""The processes that torchrun starts: their checks and printing, where there are several.

1. `init_ranks` meets the other ranks; `check_same_on_all_ranks` compares their options, prompts and
   software.
2. `report_from_rank_0` lets rank 0 alone print, and ends all ranks with one line when one fails.

Not here: the part of the model that a rank has (tp.py).
"""

from __future__ import annotations

import io
import os
import reprlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from files.machine import has_cpu_operators
from files.rank import Rank, this_rank
from options import one_line
from run.load import set_cuda_device
from run.options import GenerateConfig, pick_device

TIMEOUT_S = 600  # to wait for the others: one may compile, or read from a slow disk
WAIT_FOR_RANK_0_S = 3  # seconds that another rank waits for rank 0 to report the same failure
FILES = ("json", "trace", "profile")  # options that only rank 0 obeys


class RankLost(RuntimeError):
    """Another rank has ended, or cannot be reached."""


def refuse_torchrun() -> NoReturn:
    """Refuse several processes of a program that splits nothing.

    Raises: ValueError, on rank 0; the other ranks exit silently with status 2.
    """
    if this_rank().rank:
        sys.exit(2)
    raise ValueError(
        "torchrun splits what generate.py loads, and nothing else; start this program without it"
    )


@contextmanager
def report_from_rank_0(program: str) -> Iterator[None]:
    """Let rank 0 alone print, and let one rank report why all end."""
    here = this_rank()
    silent = here.rank > 0
    errors = io.StringIO()
    stdout = sys.stdout
    stderr = sys.stderr
    if silent:
        stdout = io.StringIO()
        stderr = errors
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            yield
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        if status and not _says_why(here):
            raise SystemExit(status) from None
        if isinstance(error, RankLost):
            print(f"{program}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        if silent and status == 2:  # a user's mistake, which is the last line
            print(errors.getvalue().splitlines()[-1], file=sys.stderr)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _says_why(here: Rank) -> bool:
    """Return whether this rank, which fails, reports the reason.

    Rank 0 does, if it fails soon too. Otherwise the first rank to reach the store does.
    """
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30)
        )
        if here.rank == 0:
            store.set("gpt_eagle/rank 0", "failed")
        else:
            for _ in range(10 * WAIT_FOR_RANK_0_S):
                if store.check(["gpt_eagle/rank 0"]):
                    return False
                time.sleep(0.1)
        return store.add("gpt_eagle/failed", 1) == 1
    except RuntimeError:  # the process that holds the store has ended
        return here.rank == 0


@contextmanager
def collective_errors() -> Iterator[None]:
    """Turn the error of a collective into `RankLost`; a full memory stays one."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        why = one_line(error).partition(". ")[0]
        raise RankLost(f"a collective failed; another rank has probably ended: {why}") from None


def check(config: GenerateConfig) -> None:
    """Check the options, before prompts are read.

    Raises: ValueError for an option that is wrong, or cannot go with torchrun.
    """
    config.check()
    path = config.prompt_file
    refused = {}  # flag -> reason
    if config.tree == "auto":
        refused["--tree auto"] = "it goes by the ranks' clocks, which differ: use --tree dynamic"
    if config.grammar:
        refused["--grammar"] = "its masks are made in one process: start one"
    if config.interactive:
        refused["--interactive"] = "there is one keyboard: use --prompt_file with turns"
    if os.path.exists(path) and not os.path.isfile(path):
        refused[f"--prompt_file {path}"] = "all ranks read it: use a file"
    if refused:
        flag, reason = next(iter(refused.items()))
        raise ValueError(f"{flag} cannot go with torchrun: {reason}")


def init_ranks(config: GenerateConfig, prompts: list) -> GenerateConfig:
    """Meet the other ranks.

    Returns: the options of this rank: with its device, and with files for rank 0 only.
    Raises: ValueError where a rank has no device, or where ranks have different options, prompts or
        software.
    """
    here = this_rank()
    device = _device(config, here)
    timeout = timedelta(seconds=TIMEOUT_S)
    with collective_errors():
        if not dist.is_initialized():
            store, *_ = next(dist.rendezvous("env://", timeout=timeout))
            check_devices(store, torch.device(device).type, here)
            backend = "gloo" if device == "cpu" else "nccl"
            dist.init_process_group(
                backend, store=store, rank=here.rank, world_size=here.world_size, timeout=timeout
            )
    set_cuda_device(device)
    if device == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        processor = f"CPU with {capability}, {torch.get_num_threads()} threads"
    else:
        processor = torch.cuda.get_device_name()
    software = {
        "torch": torch.__version__,
        "C++ operators": has_cpu_operators(),
        "processor": processor,
    }
    check_same_on_all_ranks(config, prompts=prompts, **software)
    config = replace(config, device=device)
    if here.rank:
        config = replace(config, **dict.fromkeys(FILES, ""))
    return config


def check_devices(store: dist.Store, kind: str, here: Rank) -> None:
    """Check that all ranks have the same kind of device, before they need it to communicate.

    Raises: ValueError.
    """
    store.set(f"gpt_eagle/device of {here.rank}", kind)
    kinds = []
    for rank in range(here.world_size):
        kinds.append(store.get(f"gpt_eagle/device of {rank}").decode())  # waits for the rank
    check_same("device", kinds)


def check_same_on_all_ranks(config: GenerateConfig, **others: Any) -> None:
    """Check that all ranks have the same options, and the same `others`.

    Raises: ValueError with the first difference.
    """
    gathered = _gather(asdict(config) | others | dict.fromkeys((*FILES, "device")))
    names = {name: None for values in gathered for name in values}  # in order, each once
    for name in names:
        check_same(name, [values.get(name) for values in gathered])


def smallest(value: int) -> int:
    """Return the smallest of all ranks' values."""
    return min(_gather(value))


def _gather(value: Any) -> list:
    """Return all ranks' values, in the order of the ranks."""
    gathered = [value] * this_rank().world_size
    with collective_errors():
        dist.all_gather_object(gathered, value)
    return gathered


def check_same(name: str, values: list) -> None:
    """Check that a value is the same on all ranks. Raises: ValueError with two that differ."""
    for rank, value in enumerate(values):
        if value != values[0]:
            both = f"{reprlib.repr(values[0])} on rank 0 and {reprlib.repr(value)} on rank {rank}"
            raise ValueError(f"all ranks need the same {name}; it is {both}: start them alike")


def _device(config: GenerateConfig, here: Rank) -> str:
    """Return the device of a rank. Raises: ValueError where there is none."""
    name = pick_device(config.device)
    if name == "cpu":
        return name
    if torch.device(name).index is not None:
        raise ValueError(
            f"--device {name} is one GPU, and every rank needs its own; use --device cuda"
        )
    return pick_device(f"cuda:{here.local}")
