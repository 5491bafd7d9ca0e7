"""The batch of serve.py: one thread decodes the answers that many clients wait for.

1. A `Job` is one requested answer. `Batcher.submit` queues it, or refuses it in a full queue.
2. The thread gives free places of the batch to the jobs that wait longest. After each step it
   passes the new text of every sequence (`Piece`) to its job.
3. A job whose client has left is evicted, or leaves the queue, before the next step.

Trade-off: a job takes the free place that has most of its prompt cached. Reused and recomputed
cache entries are equal where products give a row the same bits in any pass (our operators); in
fp32 they may differ by rounding.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from decode import Engine
from options import Sampling
from scripts.counters import Counters
from session import Session, common_prefix
from stats import Stats

ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Refusal(Exception):
    """A request that is not served."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": None}}


class Piece(NamedTuple):
    """The text that a step adds to an answer."""

    choice: int
    text: str
    tokens: int  # so far
    reason: str | None  # "stop" or "length" at the end of the answer


class Answer:
    """The text of a sequence, up to an end of sequence or a stop string.

    The bytes of a character that is not complete at the end are left out.
    """

    def __init__(self, decoder: Any, stops: list[str], ends: list[int]):
        """decoder: hf.tokenizer.StreamDecoder; ends: token ids"""
        self.decoder = decoder
        self.stops = stops
        self.ends = ends
        self.held = ""  # text that may begin a stop string
        self.tokens = 0
        self.over = False
        self.stopped = False  # at an end of sequence or a stop string

    def push(self, id: int) -> str:
        """Add a token. Returns: the text that is certain by now."""
        self.tokens += 1
        self.held += self.decoder.push([id])
        if id in self.ends:
            self.stopped = True
            return self.close()
        return self._take(False)

    def close(self) -> str:
        """End the answer. Returns: the rest of the text."""
        self.over = True
        return self._take(True)

    def _take(self, last: bool) -> str:
        found = [self.held.find(stop) for stop in self.stops if stop in self.held]
        if found:
            end = min(found)
            self.over = True
            self.stopped = True
        elif last:
            end = len(self.held)
        else:
            end = len(self.held) - self._begun()
        text = self.held[:end]
        self.held = self.held[end:]
        return text

    def _begun(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        lengths = [
            n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])
        ]
        return max(lengths, default=0)


@dataclass(eq=False)
class Job:
    """One requested answer."""

    choice: int  # its number in the response
    prompt: list[int]
    stream: tuple[int, int]  # (prompt, sample): with the seed the key of its noise
    sampling: Sampling
    seed: int
    most: int  # tokens
    answer: Answer
    tell: Callable[[Piece | Refusal], None]  # called by the batcher's thread
    left: bool = False  # the client has left
    came: float = field(default_factory=time.perf_counter)  # host's clock (s)


class Batcher(threading.Thread):
    """The thread that decodes: a session whose free places take waiting jobs."""

    def __init__(self, engine: Engine, most: int):
        """most: jobs that may wait"""
        super().__init__(daemon=True)
        self.session = Session(engine)
        self.most = most
        self.jobs: list[Job | None] = [None] * engine.config.batch_size
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()  # guards the fields here
        self.open = True  # takes jobs
        self.failed = False  # decoding raised
        self.counters = Counters()

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs. Raises: Refusal when there are too many."""
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

    def page(self) -> str:
        """Return the counters, in Prometheus' text form."""
        with self.changed:
            running = sum(job is not None for job in self.jobs)
            waiting = sum(not job.left for job in self.waiting)
        return self.counters.page(running, waiting)

    def close(self) -> None:
        """Let the thread end behind its step, with a refusal for every unfinished job."""
        with self.changed:
            self.open = False
            self.changed.notify()

    def run(self) -> None:
        """Decode until the end. `threading.Thread` calls this."""
        try:
            while self._schedule():
                self._step()
        except Exception:  # a bug: the clients get a refusal, the terminal a traceback
            traceback.print_exc()
            self.failed = True
        with self.changed:
            self.open = False
            for job in (*filter(None, self.jobs), *self.waiting):
                job.tell(self._ended())

    def _ended(self) -> Refusal:
        if self.failed:
            return Refusal(500, "the decoding thread failed; see the terminal")
        return Refusal(503, "the server is shutting down")

    def _schedule(self) -> bool:
        """Evict the jobs of clients that left and admit waiting ones. Returns: False at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or any(self.jobs) or not self.open)
            for seq, job in enumerate(self.jobs):
                if job and job.left:
                    self._evict(seq, "left")
            while None in self.jobs and self.waiting:
                job = self.waiting.popleft()
                if not job.left:
                    self._admit(job)
            return self.open

    def _admit(self, job: Job) -> None:
        session = self.session
        free = [seq for seq, other in enumerate(self.jobs) if other is None]
        seq = max(free, key=lambda seq: common_prefix(session.history[seq], job.prompt))
        self.jobs[seq] = job  # before the calls that may fail: `run` then refuses it
        session.configure(seq, job.sampling, job.seed)
        session.admit(seq, job.prompt, job.stream, job.most)
        self.counters.prompt_tokens += len(job.prompt)

    def _evict(self, seq: int, reason: str) -> None:
        self.counters.ended[reason] += 1
        self.session.release(seq)
        self.jobs[seq] = None

    def _step(self) -> None:
        session = self.session
        new_tokens = session.step() if any(self.jobs) else ()
        for seq, ids in enumerate(new_tokens):
            job = self.jobs[seq]
            if job is None or (not ids and session.busy(seq)):
                continue
            answer = job.answer
            before = answer.tokens
            text = ""
            for id in ids:
                if not answer.over:
                    text += answer.push(id)
            if not answer.over and not session.busy(seq):
                text += answer.close()
            self.counters.tokens += answer.tokens - before
            if before == 0 and answer.tokens:
                self.counters.first_token(time.perf_counter() - job.came)
            reason = _reason(answer)
            if reason:
                with self.changed:
                    self._evict(seq, reason)
            job.tell(Piece(job.choice, text, answer.tokens, reason))
        self.counters.step(session.stats)
        # without readers they would only grow
        session.stats = Stats()
        session.trace = []


def _reason(answer: Answer) -> str | None:
    if not answer.over:
        return None
    return "stop" if answer.stopped else "length"
