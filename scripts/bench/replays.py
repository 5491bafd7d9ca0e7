"""Repeat a cycle from one state, for papers.py --replays: every result must have the same bits.

Not here: where a cycle's time goes (`generate.py --profile FILE` writes a trace for a viewer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from run.engine import Engine
from run.session import Session
from runtime import WARM_UPS, tensors_of


def warm_session(engine: Engine, ids: list[int]) -> tuple[Session, int]:
    """Cache a prompt and run cycles until they are warm. Returns: the session, its preset."""
    batch = engine.config.batch_size
    session = Session(engine, [(0, sample) for sample in range(batch)])
    decoding = session.decode_turn([ids] * batch)
    next(decoding)
    while session.prefilling:  # chunks of the prompt
        next(decoding)
    preset = session.policy.next_preset(session.view, reads_prompt=False)
    for _ in range(1 + WARM_UPS):
        session.time_cycle(preset)
    return session, preset


def replay(session: Session, preset: int, saved: list[Tensor]) -> list[Tensor]:
    """Run a cycle from a saved state. Returns: the new state."""
    for buffer, value in zip(tensors_of(session.state), saved):
        buffer.copy_(value)
    session.time_cycle(preset)
    return tensors_of(session.state)


def compare_replays(name: str, engine: Engine, ids: list[int], replays: int) -> None:
    """Repeat a cycle behind a prompt. A cycle that depends on more than its state is an error."""
    session, preset = warm_session(engine, ids)
    saved = [x.clone() for x in tensors_of(session.state)]
    first = [x.clone() for x in replay(session, preset, saved)]
    different = torch.zeros((), dtype=torch.long, device=session.state.pos.device)
    for _ in range(replays):
        state = replay(session, preset, saved)
        different += ~torch.stack([(x == y).all() for x, y in zip(state, first)]).all()
    text = f"{int(different)} of {replays} replays differ"
    print(f"one cycle of {name}: {text}", flush=True)
    assert not different, text
