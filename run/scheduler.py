"""The scheduler: requests take places of a session, and every step brings them tokens and text.

1. `Scheduler.submit` queues a `Request`, a prompt and how it is answered.
2. `Scheduler.step` gives free places to the requests that wait longest, runs one step of the
   session, and returns a `Piece` for every request that the step brought something.
3. A request ends at an end of sequence, at a stop string, at its limit, where its guide allows
   nothing, or where numbers are not finite: `Request.reason`. Its place is free from then on.
4. Finished sequences stay cached until their place is needed, the least recently used one first.
   A prompt that begins as a cached one does, of a finished request or not, is read from there on:
   a conversation's next turn in its place, others after a copy.

Runs of many prompts, streams, the chat, the server and the benchmarks differ in where their
requests come from and where the pieces go.
Trade-off: prefixes are copied, not shared, which takes memory and no page tables. Reused and
recomputed cache entries are equal where matmuls give a row the same bits in any pass (our
operators); in fp32 they may differ by rounding.
Not here: cycles and caches (run/session.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any, NamedTuple

from decode import PREFILL_CHUNK
from files.tokenizer import StopMatcher, StreamDecoder
from run.engine import Engine
from run.options import Sampling
from run.session import Session, common_prefix
from run.stats import Stats

WORTH_A_WAIT = 64  # tokens that are soon cached; reading them takes about a step


@dataclass(eq=False)
class Request:
    """A prompt and how it is answered; the answer so far."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    limit: int  # new tokens
    # (prompt, sample), with the seed the key of the noise of a new conversation; None: the noise
    # of the place goes on, and its draws
    noise_id: tuple[int, int] | None = (0, 0)
    place: int = -1  # of the session, once it has one; a request may ask for one
    decoder: StreamDecoder | None = None  # makes the text; None: there is none
    stops: Sequence[str] = ()  # texts that end the answer before them
    guide: Any = None  # masks the tokens of the answer; None: the engine's, if any
    draft_limit: float = inf  # drafted tokens of a cycle: `Session.configure`
    shows_half: bool = True  # an incomplete character at the end is U+FFFD; False: it is left out
    index: tuple[int, int, int] = (0, 0, 0)  # (prompt, sample, turn), for whoever asks

    tokens: list[int] = field(default_factory=list, init=False)
    text: str = field(default="", init=False)  # the part that is certain by now
    cached: int = field(default=0, init=False)  # tokens of the prompt that were not read again
    # the end: "stop", "length", "context", "grammar" (which allowed nothing) or "nan"; before, ""
    reason: str = field(default="", init=False)
    fault: str = field(default="", init=False)  # of the last two, for a person

    def __post_init__(self) -> None:
        self._until = StopMatcher(self.stops)

    @classmethod
    def of(cls, engine: Engine, prompt: list[int], **fields: Any) -> Request:
        """Make a request with the engine's own options. fields: those that differ"""
        config = engine.config
        if engine.tokenizer is not None and "decoder" not in fields:
            # a plain continuation keeps its leading space; an answer shows the tags of its thinking
            if engine.template is None:
                fields["decoder"] = engine.tokenizer.stream(continuation=True)
            else:
                fields["decoder"] = engine.template.stream(engine.tokenizer)
        own = {
            "sampling": config.sampling,
            "seed": config.seed,
            "limit": config.max_new_tokens,
            "stops": config.stop,
        }
        return cls(prompt, **own | fields)

    def push(self, id: int) -> str:
        """Add a token. Returns: its text, of which `text` takes the part that is certain."""
        text = self.decoder.push([id]) if self.decoder else ""
        self.tokens.append(id)
        may_end = len(self.tokens) > self.sampling.min_tokens
        self.text += self._until.push(text) if may_end else text
        return text

    def close(self, reason: str) -> None:
        """End the answer."""
        rest = ""
        if self.decoder and self.shows_half:
            rest = self.decoder.flush()
        self.text += self._until.push(rest, last=True)
        self.reason = reason

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has ended the text."""
        return self._until.stopped


class Piece(NamedTuple):
    """The tokens and the text that a step brings a request; the last one of an answer ends it."""

    request: Request
    tokens: list[int]  # up to the one that ends the answer
    texts: list[str]  # of each token, without regard to stop strings
    text: str  # that has become certain; behind the last token also the text that was held back


class Scheduler:
    """The requests of a session: those that wait, and those that have a place."""

    def __init__(
        self,
        engine: Engine,
        on_admitted: Callable[[Request], None] = lambda request: None,
    ):
        """on_admitted: called when a request has its place, before its first step"""
        self.engine = engine
        self.session = Session(engine)
        self.on_admitted = on_admitted
        batch = engine.config.batch_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request | None] = [None] * batch  # by place
        self.last: list[list[int]] = [[] for _ in range(batch)]  # the last prompt of each place
        self.ended = [0] * batch  # when each place became free: numbers that grow
        self._clock = count(1)

    @property
    def busy(self) -> bool:
        """Return whether any request waits or is decoded."""
        return bool(self.waiting) or any(self.running)

    def submit(self, request: Request) -> None:
        """Queue a request; one that asks for a place goes before the others."""
        if request.place < 0:
            self.waiting.append(request)
        else:
            self.waiting.appendleft(request)

    def cancel(self, request: Request) -> None:
        """End a request, wherever it is. The part of its text that is cached stays."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._leave(request.place)

    def step(self) -> list[Piece]:
        """Admit requests and run a step. Returns: the pieces of those that it brought something."""
        self._admit_waiting()
        if not any(self.running):
            return []
        new = self.session.step()
        pieces = []
        for request, tokens in zip(list(self.running), new):
            if request and (tokens or not self.session.busy(request.place)):
                pieces.append(self._take(request, tokens))
        return pieces

    def close(self) -> None:
        """Leave the session's buffers to the next one."""
        self.session.close()

    def run(self, requests: list[Request]) -> Iterator[list[Piece]]:
        """Decode some requests to their ends. Yields the pieces of each step."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield self.step()

    def take_stats(self) -> Stats:
        """Return the measurements since the last call."""
        stats = self.session.stats
        self.session.stats = Stats()
        return stats

    # ------------------------------------------------------------------------------------- places

    def _admit_waiting(self) -> None:
        """Give free places to the requests that wait longest."""
        while self.waiting:
            request = self.waiting[0]
            free = [place for place, other in enumerate(self.running) if other is None]
            if request.place >= 0:
                free = [place for place in free if place == request.place]
            if not free or self._is_being_read(request.prompt):
                return
            self.waiting.popleft()
            place, source = self._choose(request.prompt, free)
            self._admit(request, place, source)

    def _is_being_read(self, prompt: list[int]) -> bool:
        """Return whether a long beginning of a prompt is being read, as part of another one."""
        session = self.session
        coming = [common_prefix(other, prompt) for other in session.prefilling.values()]
        if max(coming, default=0) <= PREFILL_CHUNK:  # else both are read in a step or two
            return False
        cached = max(session.cached(place, prompt) for place in range(len(self.running)))
        return max(coming) - cached > WORTH_A_WAIT

    def _choose(self, prompt: list[int], free: list[int]) -> tuple[int, int]:
        """Choose a free place for a prompt, and the place whose cached beginning is reused."""
        cached = [self.session.cached(place, prompt) for place in range(len(self.running))]
        oldest = min(free, key=self.ended.__getitem__)
        source = max(range(len(cached)), key=lambda place: (cached[place], place == oldest))
        if source in free and self._goes_on(source, prompt):
            return source, source
        return oldest, source

    def _goes_on(self, place: int, prompt: list[int]) -> bool:
        """Return whether a prompt goes on with the conversation of a place."""
        last = self.last[place]
        return prompt[: len(last)] == last

    def _admit(self, request: Request, place: int, source: int) -> None:
        """Give a request its place. source: the place whose cached beginning it reuses"""
        session = self.session
        request.place = place
        self.running[place] = request
        self.last[place] = request.prompt
        session.configure(place, request.sampling, request.seed, request.draft_limit)
        own = (request.noise_id, request.limit, source, request.guide)
        session.admit(place, request.prompt, *own)
        request.cached = len(session.history[place])
        self.on_admitted(request)

    def _leave(self, place: int) -> None:
        self.session.release(place)
        self.running[place] = None
        self.ended[place] = next(self._clock)

    # --------------------------------------------------------------------------------------- text

    def _take(self, request: Request, tokens: list[int]) -> Piece:
        """Add the new tokens of a request up to its end. Writes: the request."""
        session = self.session
        place = request.place
        known = len(request.text)
        texts: list[str] = []
        for id in tokens:
            texts.append(request.push(id))
            if request.stopped:
                session.truncate(place, len(tokens) - len(texts))
                break
        reason = self._reason(request)
        if reason:
            request.close(reason)
            self._leave(place)
        return Piece(request, tokens[: len(texts)], texts, request.text[known:])

    def _reason(self, request: Request) -> str:
        """Return the reason why a request has ended; "" while it goes on. Writes: its fault."""
        session = self.session
        place = request.place
        if request.stopped:
            return "stop"
        if place in session.guide_errors:
            request.fault = session.guide_errors[place]
            return "grammar"
        if place in session.nan_sequences:
            request.fault = session.nan_sequences[place]
            return "nan"
        if session.busy(place):
            return ""
        if request.tokens[-1] in self.engine.eos_ids and not self.engine.config.ignore_eos:
            return "stop"
        return "length" if len(request.tokens) >= request.limit else "context"


def truncation_note(engine: Engine, reason: str) -> str:
    """Describe the reason of an answer that was cut; "" for another reason."""
    most = engine.config.max_new_tokens
    if reason == "length" and most < engine.context:
        return f"cut at {most} tokens: --max_new_tokens"
    if reason in ("length", "context"):
        return f"cut at the context of {engine.context} tokens: --context"
    return ""
