"""Ranks on CPUs that run many cases one after the other. test_tp.py starts this and compares the
results.

    python tests/cases/tp_cases.py CASES.json OUT.json        # {"2": {"name": {options, "prompts": [ids]}}, "4": ...}

With "rank 1", a case has options that rank 1 alone gets, after all ranks have connected.

The ranks are forked after all imports, which would take longer than the cases. Rank 0 writes the
results.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import decode
import drafts.ngram_draft  # noqa: F401  (before the ranks are forked)
from run import ranks
from run.library import generate
from run.load import load
from run.options import GenerateConfig


def features(engine: decode.Engine, prompt: list[int]) -> torch.Tensor:
    """The target's residual stream behind its layers, normed, [T, F], and the logits of the last row, [V], in a row."""
    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = engine.target(ids, torch.arange(len(prompt))[None])
        return torch.cat((out.flatten(), engine.target.logits(out[:, -1]).flatten())).float()


def case(options: dict[str, Any]) -> dict[str, Any]:
    """Decode. Returns: the results of this rank, and whether all ranks have the same."""
    prompts, own = options.pop("prompts"), options.pop("rank 1", {})
    config = GenerateConfig(**options, device="cpu")
    ranks.check(config)
    config = ranks.init_ranks(config, prompts)
    config = replace(config, **own) if dist.get_rank() == 1 else config
    engine = load(config)
    result = generate(engine, prompts)
    mine = {
        "tokens": result.tokens,
        "accepted": result.stats["accept_lengths"],
        "features": features(engine, prompts[0]).tolist(),
    }
    every: list[Any] = [None] * dist.get_world_size()
    held = {id(t): t.nbytes for t in (*engine.target.parameters(), *engine.target.buffers())}
    dist.all_gather_object(every, (mine, sum(held.values())))
    agree = all(other[0] == mine for other in every)
    told = {"agree": agree, "bytes": [other[1] for other in every]}
    return mine | told


def run(rank: int, cases: dict[str, dict], out: Path) -> None:
    found = {}
    for name, options in cases.items():
        try:
            found[name] = case(dict(options))
        except ValueError as error:  # every rank finds it
            found[name] = {"error": str(error)}
    if rank == 0:
        out.write_text(json.dumps(found))


def main(cases: dict[str, dict], out: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for world, part in cases.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        children = []
        for rank in range(int(world)):
            child = os.fork()
            if child == 0:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                status = 1
                try:
                    run(rank, part, out)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
            children.append(child)
        for child in children:
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"a rank of {world} ended with {status}")
        found[world] = json.loads(out.read_text())
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
