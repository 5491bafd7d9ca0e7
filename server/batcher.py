"""The batch of serve.py: one thread decodes the answers that many clients wait for.

1. A `Job` is one requested answer. `Batcher.submit` queues it, or refuses it in a full queue.
2. The thread gives free places of the batch to the jobs that wait longest. After each step it
   passes the new text of every sequence (`Piece`) to its job.
3. A job whose client has left is evicted, or leaves the queue, before the next step.
4. Finished sequences stay cached until their place is needed, the least recently used one first.
   A prompt that begins as a cached one does, of a finished answer or not, is read from there on:
   a conversation's next turn in its place, others after a copy.

Trade-off: prefixes are copied, not shared, which takes memory and no page tables. Reused and
recomputed cache entries are equal where products give a row the same bits in any pass (our
operators); in fp32 they may differ by rounding.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from decode import PREFILL_CHUNK, Engine
from extras.drafted import Drafted, Nodes
from extras.logprobs import Logprob, Logprobs
from hf.tokenizer import Until
from options import Sampling
from server.counters import Counters
from session import Session, common_prefix
from stats import Stats

WORTH_A_WAIT = 64  # tokens that are soon cached; reading them takes about a step
ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Refusal(Exception):
    """A request that is not served."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": None}}


class Scored(NamedTuple):
    """A token of an answer, with its log-probability."""

    id: int
    start: int  # characters of the answer before it
    logprob: Logprob


class Drafts(NamedTuple):
    """How the tokens behind an answer's last piece were drafted."""

    tokens: int = 0
    accepted: int = 0  # of these, tokens that were drafted
    rejected: int = 0  # rows of draft trees that were verified and not accepted
    passes: int = 0  # of the target, those of the prompt left out
    # the piece's text in parts: the source of the draft, "" for none, its characters, its cycle
    spans: tuple[tuple[str, int, int], ...] = ()
    trees: tuple[Nodes, ...] = ()  # of cycles, where the request asks for them

    def and_more(self, other: Drafts) -> Drafts:
        """Return the sum of two pieces."""
        return Drafts(*(own + more for own, more in zip(self, other)))


class Piece(NamedTuple):
    """The text that a step adds to an answer."""

    choice: int
    text: str
    tokens: int  # so far
    reason: str | None  # "stop" or "length" at the end of the answer
    scored: list[Scored]  # the tokens that begin in the text, where the request asks for them
    drafts: Drafts = Drafts()


class Answer:
    """The text of a sequence, up to an end of sequence or a stop string.

    The bytes of a character that is not complete at the end are left out. A token comes with the
    text that it begins in; one that is cut off, as an end of sequence is, does not come.
    """

    def __init__(self, decoder: Any, stops: list[str], ends: list[int]):
        """decoder: hf.tokenizer.StreamDecoder; ends: token ids"""
        self.decoder = decoder
        self.until = Until(stops)
        self.ends = ends
        self.told = 0  # characters before those that may begin a stop string
        self.scored: deque[Scored] = deque()  # tokens that begin in these
        self.tokens = 0
        self.drafts = Drafts()  # since they were last taken, without spans
        self.spans: deque[tuple[str, int, int]] = deque()  # of the text not taken yet
        self.over = False
        self.stopped = False  # at an end of sequence or a stop string

    def push(
        self, id: int, logprob: Logprob | None = None, source: str = "", cycle: int = 0
    ) -> str:
        """Add a token. source: of its draft. Returns: the text that is certain by now."""
        self.tokens += 1
        self.drafts = self.drafts.and_more(Drafts(tokens=1, accepted=source != ""))
        if logprob is not None:
            self.scored.append(Scored(id, self.told + len(self.until.held), logprob))
        text = self.decoder.push([id])
        self.spans.append((source, len(text), cycle))
        ended = id in self.ends
        told = self._take(text, ended)
        self.stopped = self.over = ended or self.until.stopped
        return told

    def close(self) -> str:
        """End the answer. Returns: the rest of the text."""
        self.over = True
        return self._take("", True)

    def take_scored(self) -> list[Scored]:
        """Return the tokens that begin in the text told since the last call."""
        taken = []
        while self.scored and self.scored[0].start < self.told:
            taken.append(self.scored.popleft())
        return taken

    def take_drafts(self, characters: int) -> Drafts:
        """Return how the tokens since the last call were drafted. characters: of the text since"""
        spans: list[tuple[str, int, int]] = []
        while characters and self.spans:
            source, count, cycle = self.spans.popleft()
            if count > characters:
                self.spans.appendleft((source, count - characters, cycle))
                count = characters
            characters -= count
            if spans and spans[-1][::2] == (source, cycle):
                count += spans.pop()[1]
            if count:
                spans.append((source, count, cycle))
        taken = self.drafts._replace(spans=tuple(spans))
        self.drafts = Drafts()
        return taken

    def _take(self, text: str, last: bool) -> str:
        told = self.until.push(text, last)
        self.told += len(told)
        return told


@dataclass(eq=False)
class Job:
    """One requested answer."""

    choice: int  # its number in the response
    prompt: list[int]
    stream: tuple[int, int]  # (prompt, sample): with the seed the key of its noise
    sampling: Sampling
    seed: int
    most: int  # tokens
    likeliest: int | None  # tokens beside each log-probability; None: no log-probabilities
    answer: Answer
    tell: Callable[[Piece | Refusal], None]  # called by the batcher's thread
    guide: Any = None  # masks the tokens of the answer; None: the engine's
    wants_drafts: bool = True
    wants_trees: bool = False
    left: bool = False  # the client has left
    came: float = field(default_factory=time.perf_counter)  # host's clock (s)


class Batcher(threading.Thread):
    """The thread that decodes: a session whose free places take waiting jobs."""

    def __init__(self, engine: Engine, most: int):
        """most: jobs that may wait"""
        super().__init__(daemon=True)
        self.session = Session(engine)
        self.logprobs = Logprobs(engine.target)
        self.session.readers.append(self.logprobs)
        self.drafted = Drafted(engine)
        self.session.readers.append(self.drafted)
        self.most = most
        batch = engine.config.batch_size
        self.jobs: list[Job | None] = [None] * batch
        self.free = list(range(batch))  # places, the least recently used one first
        self.prompts: list[list[int]] = [[] for _ in range(batch)]  # the last of each place
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
            while self.free and self.waiting and not self._is_being_read(self.waiting[0].prompt):
                job = self.waiting.popleft()
                if not job.left:
                    self._admit(job)
            return self.open

    def _is_being_read(self, prompt: list[int]) -> bool:
        """Return whether a long beginning of a prompt is being read, as part of another one."""
        session = self.session
        coming = [common_prefix(other, prompt) for other in session.prefilling.values()]
        if max(coming, default=0) <= PREFILL_CHUNK:  # else both are read in a step or two
            return False
        cached = max(session.cached(seq, prompt) for seq in range(len(self.jobs)))
        return max(coming) - cached > WORTH_A_WAIT

    def _admit(self, job: Job) -> None:
        session = self.session
        seq, source = self._place(job.prompt)
        self.jobs[seq] = job  # before the calls that may fail: `run` then refuses it
        self.free.remove(seq)
        self.prompts[seq] = job.prompt
        session.configure(seq, job.sampling, job.seed, job.wants_drafts)
        self.drafted.begin(seq, job.wants_trees)
        self.logprobs.want(seq, job.likeliest)
        session.admit(seq, job.prompt, job.stream, job.most, source, job.guide)
        self.counters.prompt_tokens += len(job.prompt)
        self.counters.cached_tokens += len(session.history[seq])

    def _place(self, prompt: list[int]) -> tuple[int, int]:
        """Choose a place for a prompt, and the place whose cached beginning of it is reused."""
        cached = [self.session.cached(seq, prompt) for seq in range(len(self.jobs))]
        oldest = self.free[0]
        source = max(range(len(cached)), key=lambda seq: (cached[seq], seq == oldest))
        last = self.prompts[source]
        if source in self.free and prompt[: len(last)] == last:
            return source, source  # a conversation goes on
        return oldest, source

    def _evict(self, seq: int, reason: str) -> None:
        self.counters.ended[reason] += 1
        self.session.release(seq)
        self.jobs[seq] = None
        self.free.append(seq)

    def _step(self) -> None:
        session = self.session
        new_tokens = session.step() if any(self.jobs) else ()
        for seq, ids in enumerate(new_tokens):
            job = self.jobs[seq]
            if job is None or (not ids and session.busy(seq)):
                continue
            fault = session.faults.get(seq) or session.broken.get(seq)
            if fault:
                with self.changed:
                    self._evict(seq, "left")
                job.tell(Refusal(500 if seq in session.broken else 400, fault))
                continue
            answer = job.answer
            before = answer.tokens
            text = ""
            scored = self.logprobs.take(seq) or repeat(None)
            marks = self.drafted.take(seq)
            trees = tuple(marks.trees)
            cost = Drafts(rejected=marks.rejected, passes=marks.passes, trees=trees)
            answer.drafts = answer.drafts.and_more(cost)
            cycles = marks.cycles if job.wants_trees else repeat(0)
            for id, logprob, source, cycle in zip(ids, scored, marks.sources, cycles):
                if not answer.over:
                    text += answer.push(id, logprob, source, cycle)
            if not answer.over and not session.busy(seq):
                text += answer.close()
            self.counters.tokens += answer.tokens - before
            if before == 0 and answer.tokens:
                self.counters.first_token(time.perf_counter() - job.came)
            reason = _reason(answer)
            if reason:
                with self.changed:
                    self._evict(seq, reason)
            drafts = answer.take_drafts(len(text)) if text or reason else Drafts()
            scored = answer.take_scored()
            job.tell(Piece(job.choice, text, answer.tokens, reason, scored, drafts))
        self.counters.step(session.stats)
        # without readers they would only grow
        session.stats = Stats()


def _reason(answer: Answer) -> str | None:
    if not answer.over:
        return None
    return "stop" if answer.stopped else "length"
