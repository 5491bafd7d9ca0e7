"""The rows of a running batch, for serve.py: one thread decodes what many clients ask for.

1. `Job` is one answer that is asked for; `Rows.submit` lets it wait, or refuses it where too many do.
2. The thread gives free rows to who waits longest, and tells a job what each step adds to its text (`Answer`).
3. A job whose client has left loses its row, or its place among those that wait, before the next step.

Trade-off: a job takes the free row that has most of its prompt cached. Reused and recomputed rows of a cache are equal
where products give a row the same bits in any pass (our operators); in fp32 they may differ by rounding.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from decode import Engine
from sampling import MASK32
from session import Session, common_prefix
from stats import Stats


class Refusal(Exception):
    """A request that is not served."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(
            status, "invalid_request_error"
        )
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": None}}


class Piece(NamedTuple):
    """What a step adds to an answer."""

    choice: int
    text: str
    tokens: int  # so far
    reason: str | None  # why it is over: "stop" or "length"


class Answer:
    """Tokens become text, up to an end of sequence or a stop string."""

    def __init__(self, decoder: Any, stops: list[str], ends: list[int]):
        """decoder: hf.tokenizer.StreamDecoder; ends: token ids"""
        self.decoder, self.stops, self.eos_tensor = decoder, stops, ends
        self.held, self.tokens = "", 0  # text that may begin a stop string; how many tokens came
        self.over = self.stopped = False  # whether no more may come; whether it ended by itself

    def push(self, id: int) -> str:
        """Add a token. Returns: the text that is certain by now."""
        self.tokens += 1
        self.held += self.decoder.push([id])
        if id in self.eos_tensor:
            self.stopped = True
            return self.close()
        return self._take(False)

    def close(self) -> str:
        """End it. Returns: the rest of the text."""
        self.over = True
        self.held += self.decoder.flush()
        return self._take(True)

    def _take(self, last: bool) -> str:
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        begun = [
            n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])
        ]
        end = min(found) if found else len(self.held) - (0 if last else max(begun, default=0))
        text, self.held = self.held[:end], self.held[end:]
        if found:
            self.over, self.stopped = True, True
        return text


@dataclass(eq=False)
class Job:
    """One answer that is asked for."""

    choice: int  # its number in the response
    prompt: list[int]
    stream: tuple[int, int]  # (prompt, sample), the key of its noise, with the seed
    seed: int
    most: int  # tokens
    answer: Answer
    tell: Callable[
        [Piece | Refusal], None
    ]  # told, by the rows' thread, what each step adds, or why nothing more comes
    left: bool = False  # whether nobody waits for it any more


class Rows(threading.Thread):
    """The thread that decodes: a session whose rows take waiting jobs."""

    def __init__(self, engine: Engine, most: int):
        """most: jobs that may wait for a row"""
        super().__init__(daemon=True)
        self.session, self.most = Session(engine), most
        self.jobs: list[Job | None] = [None] * engine.config.batch_size
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()  # guards the fields here
        self.open, self.failed = True, False  # whether jobs are taken; whether decoding raised

    def submit(self, jobs: list[Job]) -> None:
        """Let jobs wait for rows. Raises: Refusal when there are too many."""
        with self.changed:
            if not self.open:
                raise self._ended()
            self.waiting = deque(job for job in self.waiting if not job.left)
            if len(self.waiting) + len(jobs) > self.most + self.jobs.count(None):
                raise Refusal(
                    429,
                    f"{len(self.waiting)} answers wait already, {self.most} may; try again later",
                )
            self.waiting += jobs
            self.changed.notify()

    def close(self) -> None:
        """Let the thread end behind its step. Whoever waits is told; nothing is taken in any more."""
        with self.changed:
            self.open = False
            self.changed.notify()

    def run(self) -> None:
        try:
            while self._assign():
                self._step()
        except Exception:  # a bug: whoever waits is told, and so is the terminal
            traceback.print_exc()
            self.failed = True
        with self.changed:
            self.open = False
            for job in (*filter(None, self.jobs), *self.waiting):
                job.tell(self._ended())

    def _ended(self) -> Refusal:
        """Why nothing is decoded any more."""
        if self.failed:
            return Refusal(500, "the decoding thread failed; see the terminal")
        return Refusal(503, "the server is shutting down")

    def _assign(self) -> bool:
        """Free the rows of clients who have left, and give those that are free to who waits. False: the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or any(self.jobs) or not self.open)
            for row, job in enumerate(self.jobs):
                if job and job.left:
                    self._free(row)
            while None in self.jobs and self.waiting:
                job = self.waiting.popleft()
                if not job.left:
                    self._admit(job)
            return self.open

    def _admit(self, job: Job) -> None:
        session, free = self.session, [row for row, other in enumerate(self.jobs) if other is None]
        row = max(free, key=lambda row: common_prefix(session.history[row], job.prompt))
        self.jobs[row] = job  # before what may fail: it is told then
        session.admit(row, job.prompt, job.stream, job.most)
        session.state.key.seed[row] = torch.tensor([job.seed & MASK32, job.seed >> 32])

    def _free(self, row: int) -> None:
        self.session.release(row)
        self.jobs[row] = None

    def _step(self) -> None:
        session = self.session
        for row, ids in enumerate(session.step() if any(self.jobs) else ()):
            job = self.jobs[row]
            if job is None or (not ids and session.busy(row)):
                continue
            answer, text = job.answer, ""
            for id in ids:
                text += answer.push(id) if not answer.over else ""
            if not answer.over and not session.busy(row):
                text += answer.close()
            if answer.over:
                with self.changed:
                    self._free(row)
            job.tell(Piece(job.choice, text, answer.tokens, _reason(answer)))
        session.stats, session.trace = Stats(), []  # which nobody reads


def _reason(answer: Answer) -> str | None:
    return ("stop" if answer.stopped else "length") if answer.over else None
