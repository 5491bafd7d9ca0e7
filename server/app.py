"""Serve a model to OpenAI clients: completions, chats and responses, streamed or whole.

scripts/serve.py starts it, with every option of generate.py that says what is decoded and how.

1. One thread decodes (batcher.py): one session serves requests side by side. A finished sequence,
   or one whose client has left, is evicted for the next request.
2. The event loop reads requests (transport.py, bodies.py, parameters.py) and answers in events as
   the text comes (replies.py, responses.py), which are sent, or summed up at the end.

The text is a function of (weights, prompt, parameters of sampling, seed, number of the choice), and
of the JSON schema in `response_format` (drafts/grammar.py, which needs llguidance): that of
generate.py for this prompt and these options, whatever the batch, but for the bytes of a character
that is cut at the end. Tool calls are taken out of it (tool_calls.py).
Without a seed one is drawn; the other options are the server's where a request names none, and its
sampling that of the model, as far as one recommends any.
Trade-off: on CUDA three kinds of cycles are compiled, and under a schema no captured one runs.
/ is a page to chat with (page.html), /health says whether answers are decoded.
`draft: false` in a request decodes without drafting.
Completions, too, end at the stop ids of the model's chat template, as with --chat.
Lookups search the texts of all clients: no text changes, but its speed tells whether another began
alike.
Not here: TLS. The default address is reached from this machine alone; with another --host give an
--api_key, and put a proxy before it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from files.rank import of_ranks
from options import log_note
from run.engine import Engine, mode_for
from run.load import load
from run.methods import told_draft
from run.observer import Observer
from run.options import Sampling
from run.parsing import one_line_errors
from run.warm_up import warm_up
from server.batcher import Batcher, Delta, Job, Refusal
from server.bodies import SHOWN, Body, Chat, Completion
from server.options import ServeConfig
from server.parameters import RequestParams, RequestReader, no_model
from server.recommended import with_recommended_sampling
from server.replies import ChatReply, Reply
from server.responses import ResponseReply, Responses
from server.transport import Guard, Listener, is_loopback, json_body, listen

SILENCE_S = 5  # seconds without an event, behind which a stream has a comment
PAGE = Path(__file__).with_name("page.html")
OF_THE_PAGE = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
# the kind of a request's body, and the writer of its answer
ANSWERS = {
    "/v1/completions": (Completion, Reply),
    "/v1/chat/completions": (Chat, ChatReply),
    "/v1/responses": (Responses, ResponseReply),
}


class Server:
    """The endpoints."""

    def __init__(self, engine: Engine, config: ServeConfig):
        self.engine = engine
        self.config = config
        self.name = Path(config.checkpoint).name
        self.batcher = Batcher(engine, config.max_waiting)
        self.reader = RequestReader(engine, config, self.name)
        self.reading = asyncio.Lock()  # tokenizers are used by one thread at a time

    def app(self) -> Starlette:
        """Return the application. It starts the batcher and ends it."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.batcher.start()
            yield
            self.batcher.close()
            await asyncio.to_thread(self.batcher.join)

        routes = [
            Route("/", self.page),
            Route("/props", self.props),
            Route("/v1", self.models),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
        ]
        for path, kinds in ANSWERS.items():
            routes.append(Route(path, partial(self.answer, *kinds), methods=["POST"]))
        guards = [Middleware(Guard, config=self.config)]
        if self.config.cors:  # before the key, which a browser's question about origins lacks
            anything = {"allow_headers": ["*"], "allow_methods": ["*"]}
            allowed = {"allow_origins": self.config.origins(), **anything}
            guards.insert(0, Middleware(CORSMiddleware, **allowed))
        faults = (Refusal, HTTPException, ClientDisconnect, Exception)
        handlers = dict.fromkeys(faults, _fault)
        return Starlette(
            routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=guards
        )

    async def page(self, request: Request) -> Response:
        """Answer with the page to chat with, which needs nothing of another host."""
        return FileResponse(PAGE, headers=OF_THE_PAGE)

    async def props(self, request: Request) -> Response:
        """Answer with what the page has to know of the model."""
        engine = self.engine
        told = {
            "model": self.name,
            "drafts": told_draft(engine),
            "rests": engine.presets[0].size == 1,
            "chat": engine.template is not None,
            "context": engine.context,
            "max_tokens": min(self.config.max_new_tokens, engine.context),
        }
        return JSONResponse(told | engine.config.sampling._asdict())

    async def health(self, request: Request) -> Response:
        """Answer 200 while answers are decoded, else 503."""
        if not self.batcher.open or not self.batcher.is_alive():
            raise Refusal(503, "the server decodes no answers; start it again")
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """Answer for the one model, or the list of it."""
        asked = request.path_params.get("name")
        if asked and asked != self.name:
            raise no_model(asked, self.name)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "gpt-eagle"}
        return JSONResponse(model if asked else {"object": "list", "data": [model]})

    async def answer(self, kind: type[Body], writer: type[Reply], request: Request) -> Response:
        """Answer a request for text. kind: of its body; writer: of the answer"""
        body = await json_body(request, self.config.max_body)
        async with self.reading:
            asked = await asyncio.to_thread(self.reader.read, kind, body)
        reply = writer(asked, self.name, self.engine.tokenizer)
        pieces: asyncio.Queue[Delta | Refusal] = asyncio.Queue()
        jobs = self._jobs(asked, pieces)
        self.batcher.submit(jobs)
        events = _events(pieces, jobs, reply)
        if asked.body.stream:
            return StreamingResponse(_streamed(events, reply), media_type="text/event-stream")
        async with aclosing(events):
            async for _ in events:
                if await request.is_disconnected():
                    return Response(status_code=499)
        return JSONResponse(reply.whole())

    def _jobs(self, asked: RequestParams, pieces: asyncio.Queue[Delta | Refusal]) -> list[Job]:
        loop = asyncio.get_running_loop()
        samples = asked.body.n
        copies = samples if asked.sampling.temperature == 0 else 1  # equal answers

        def tell(piece: Delta | Refusal) -> None:
            of_all = [piece]
            if isinstance(piece, Delta):
                of_all = [piece._replace(choice=piece.choice + i) for i in range(copies)]
            with suppress(RuntimeError):  # the loop has ended
                for each in of_all:
                    loop.call_soon_threadsafe(pieces.put_nowait, each)

        tokenizer = self.engine.tokenizer
        jobs = []
        for number, prompt in enumerate(asked.prompts):
            for sample in range(0, samples, copies):
                job = Job(
                    prompt,
                    asked.sampling,
                    asked.seed,
                    asked.most,
                    noise_id=(number, sample),
                    decoder=tokenizer.stream(not asked.chat, asked.shown),
                    stops=asked.stops,
                    guide=asked.guide,
                    draft_limit=asked.draft_limits[number],
                    shows_half=False,
                    choice=number * samples + sample,
                    likeliest=asked.body.likeliest,
                    tell=tell,
                    wants_trees=asked.body.trees and asked.body.stream,
                )
                jobs.append(job)
        return jobs


async def _fault(request: Request, error: Exception) -> Response:
    """Answer with an error in OpenAI's shape. A traceback, if any, is the terminal's."""
    headers = None
    if isinstance(error, ClientDisconnect):  # nobody reads the answer
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path[:SHOWN]}"
        headers = error.headers
        error = Refusal(error.status_code, f"{where}: {error.detail}")
    elif not isinstance(error, Refusal):
        error = Refusal(500, "the server failed; see the terminal")
    return JSONResponse(error.body, error.status, headers)


async def _events(
    pieces: asyncio.Queue[Delta | Refusal], jobs: list[Job], reply: Reply
) -> AsyncIterator[str]:
    """Yield the events of an answer as its pieces come, or ""; a comment in a silence.

    Raises: Refusal when the server ends.
    """
    open = reply.asked.choices
    try:
        yield reply.begin()
        while open:
            try:
                piece = await asyncio.wait_for(pieces.get(), SILENCE_S)
            except asyncio.TimeoutError:
                yield ": still reading or waiting\n\n"  # a comment, so that no proxy hangs up
                continue
            if isinstance(piece, Refusal):
                raise piece
            open -= piece.reason is not None
            yield reply.piece(piece)
        # of a prompt's answers the first one's
        reply.cached = sum(job.cached for job in jobs if job.choice % reply.asked.body.n == 0)
        yield reply.end()
    finally:  # also when the client has left
        for job in jobs:
            job.left = True


async def _streamed(events: AsyncIterator[str], reply: Reply) -> AsyncIterator[str]:
    """Yield events, the last one of an error where there is one."""
    try:
        async with aclosing(events):
            async for event in events:
                if event:
                    yield event
    except Refusal as error:
        yield reply.fault(error)


def load_engine(config: ServeConfig) -> Engine:
    """Load the model. Raises: ValueError for any failure."""
    engine = load(config)
    if engine.tokenizer is None:
        raise ValueError(f"{config.checkpoint} has no tokenizer; a server needs one")
    if engine.captured:
        warm_other_modes(engine)
    return engine


def warm_other_modes(engine: Engine) -> None:
    """Compile and capture the cycles of the usual modes beside the engine's own.

    No request waits for them then; the first one with penalties or rarer cuts waits for its mode.
    No policy learns from these cycles.
    """
    config = engine.config
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=1)):
        served = sampling.temperature > 0 or config.accept == "exact"
        if served and mode_for(sampling) != mode_for(config.sampling):
            other = replace(config, **sampling._asdict())
            warm_up(replace(engine, config=other, policy=Observer()))


def main(config: ServeConfig, given: set[str]) -> None:
    """Run the server. given: names of the options that were given"""
    with one_line_errors("serve.py"):
        of_ranks("refuse_torchrun", lambda: None)()
        with listen(config) as listener:  # before the model is loaded
            config = with_recommended_sampling(config, given)
            server = Server(load_engine(config), config)
            host, port = listener.getsockname()[:2]
            if ":" in host:
                host = f"[{host}]"
            print(
                f"{server.name} at http://{host}:{port}/v1, {config.batch_size} sequences; "
                f"a page to chat: http://{host}:{port}/",
                file=sys.stderr,
                flush=True,
            )
            if not config.api_key and not is_loopback(config.host):
                note = f"everybody who reaches {config.host} may ask; --api_key KEY asks for a key"
                log_note(note)
            Listener(server.app(), server.batcher).run(sockets=[listener])
