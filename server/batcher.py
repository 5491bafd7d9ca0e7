"""The batch of serve.py: one thread decodes the answers that many clients wait for.

1. A `Job` is one requested answer. `Batcher.submit` queues it, or refuses it in a full queue.
2. The thread hands jobs to a `Scheduler` (run/scheduler.py). After each step it passes the new text
   of every answer (`Delta`) to its job.
3. A job whose client has left is cancelled before the next step.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from drafts.logprobs import Logprob, Logprobs
from options import log_note
from run.drafted import Drafted, DraftMarks, Nodes
from run.engine import Engine
from run.scheduler import Piece, Request, Scheduler

ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Refusal(Exception):
    """A request that is not served."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        """param, code: of OpenAI's errors"""
        super().__init__(message)
        self.status = status
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Scored(NamedTuple):
    """A token of an answer, with its log-probability."""

    id: int
    start: int  # characters of the answer before it
    logprob: Logprob


class Drafts(NamedTuple):
    """How the tokens of a delta were drafted."""

    tokens: int = 0
    accepted: int = 0  # of these, tokens that were drafted
    rejected: int = 0  # rows of draft trees that were verified and not accepted
    passes: int = 0  # of the target, those of the prompt left out
    lengths: tuple[int, ...] = ()  # accepted tokens of each pass that had any drafted
    # the tokens' texts, some not certain yet, in parts: the source of the draft, "" for none, the
    # characters, the cycle
    spans: tuple[tuple[str, int, int], ...] = ()
    trees: tuple[Nodes, ...] = ()  # of cycles, where the request asks for them

    def and_more(self, other: Drafts) -> Drafts:
        """Return the sum of two deltas."""
        return Drafts(*(own + more for own, more in zip(self, other)))


class Delta(NamedTuple):
    """The part of an answer that one step adds, or several."""

    choice: int
    text: str  # that has become certain; of a chat what is neither thinking nor call
    reason: str | None = None  # "stop" or "length" at the end of the answer
    tokens: int = 0  # so far
    scored: list[Scored] = []  # the tokens that begin in the text, where the request asks for them
    drafts: Drafts = Drafts()
    cut_by: str = ""  # at the end of an answer that was cut: "max_tokens" or "context"
    thought: str = ""
    calls: list[dict] = []  # of tools, as clients read them

    def and_more(self, next: Delta) -> Delta:
        """Return a part of an answer together with the one behind it."""
        return next._replace(
            text=self.text + next.text,
            scored=self.scored + next.scored,
            drafts=self.drafts.and_more(next.drafts),
            thought=self.thought + next.thought,
            calls=self.calls + next.calls,
        )


@dataclass(eq=False, kw_only=True)
class Job(Request):
    """One requested answer.

    The bytes of a character that is not complete at the end are left out. A scored token comes with
    the text that it begins in; one that is cut off, as an end of sequence is, does not come.
    """

    choice: int  # its number in the response
    likeliest: int | None  # tokens beside each log-probability; None: no log-probabilities
    tell: Callable[[Delta | Refusal], None]  # called by the batcher's thread
    wants_trees: bool = False
    left: bool = False  # the client has left
    decoded: int = 0  # characters of all tokens
    scored: deque[Scored] = field(default_factory=deque)  # tokens whose beginning is not told yet

    def delta(self, piece: Piece, logprobs: list[Logprob], marks: DraftMarks) -> Delta:
        """Return what a piece adds. logprobs, marks: of its tokens"""
        for id, text, logprob in zip(piece.tokens, piece.texts, logprobs or repeat(None)):
            if logprob is not None:
                self.scored.append(Scored(id, self.decoded, logprob))
            self.decoded += len(text)
        scored = []
        while self.scored and self.scored[0].start < len(self.text):
            scored.append(self.scored.popleft())
        count = len(piece.tokens)
        cycles = marks.cycles if self.wants_trees else repeat(0)
        drafts = Drafts(
            count,
            count - marks.sources[:count].count(""),
            marks.rejected,
            marks.passes,
            tuple(marks.lengths),
            tuple(zip(marks.sources, map(len, piece.texts), cycles)),
            tuple(marks.trees),
        )
        reason = None
        if self.reason:
            reason = "stop" if self.reason == "stop" else "length"
        cut_by = {"length": "max_tokens", "context": "context"}.get(self.reason, "")
        return Delta(self.choice, piece.text, reason, len(self.tokens), scored, drafts, cut_by)


class Batcher(threading.Thread):
    """The thread that decodes."""

    def __init__(self, engine: Engine, most: int):
        """most: jobs that may wait"""
        super().__init__(daemon=True)
        self.scheduler = Scheduler(engine, self._on_admitted)
        self.logprobs = Logprobs(engine.target)
        self.drafted = Drafted(engine)
        self.scheduler.session.observers += [self.logprobs, self.drafted]
        self.most = most
        self.capacity = most + engine.config.batch_size
        self.new: list[Job] = []  # not handed to the scheduler yet
        self.jobs: list[Job] = []  # handed to it, and unfinished
        self.changed = threading.Condition()  # guards the fields here
        self.open = True  # takes jobs
        self.failed = False  # decoding raised

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs. Raises: Refusal when there are too many."""
        with self.changed:
            if not self.open:
                raise self._ended()
            present = [job for job in (*self.jobs, *self.new) if job.place >= 0 or not job.left]
            waiting = sum(job.place < 0 for job in present)
            fault = f"{waiting} answers wait already, {self.most} may; try again later"
            if len(present) + len(jobs) > self.capacity:
                raise Refusal(429, fault)
            self.new += jobs
            self.changed.notify()

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
            for job in (*self.jobs, *self.new):
                job.tell(self._ended())
        if not self.failed:
            self.scheduler.close()

    def _ended(self) -> Refusal:
        if self.failed:
            return Refusal(500, "the decoding thread failed; see the terminal")
        return Refusal(503, "the server is shutting down")

    def _schedule(self) -> bool:
        """Wait for jobs, hand them to the scheduler, and cancel those whose clients have left.

        Returns: False at the end.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.new or not self.open)
            for job in self.new:
                self.scheduler.submit(job)
            self.jobs += self.new
            self.new = []
            for job in [job for job in self.jobs if job.left]:
                self.scheduler.cancel(job)
                self.jobs.remove(job)
            return self.open

    def _on_admitted(self, job: Job) -> None:
        self.drafted.begin(job.place, job.wants_trees)
        self.logprobs.want(job.place, job.likeliest)

    def _step(self) -> None:
        for piece in self.scheduler.step():
            self._tell(piece)
        self.scheduler.take_stats()  # which would grow for ever

    def _tell(self, piece: Piece) -> None:
        """Pass what a step has brought a job to its client."""
        job = piece.request
        if job.fault:
            with self.changed:
                self.jobs.remove(job)
            refusal = Refusal(400, job.fault)
            if job.reason == "nan":
                log_note(job.fault)  # with a remedy, which is no client's
                refusal = Refusal(500, f"{job.fault.partition(':')[0]}; see the terminal")
            job.tell(refusal)
            return
        delta = job.delta(piece, self.logprobs.take(job.place), self.drafted.take(job.place))
        if delta.reason:
            with self.changed:
                self.jobs.remove(job)
        job.tell(delta)
