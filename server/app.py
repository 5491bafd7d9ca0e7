"""Serve a model to OpenAI clients: completions, chats and responses, streamed or whole.

scripts/serve.py starts it, with every option of generate.py that says what is decoded and how.

1. One thread decodes (batcher.py): one session serves requests side by side. A finished sequence,
   or one whose client has left, is evicted for the next request.
2. The event loop reads requests (transport.py, bodies.py, parameters.py) and answers (replies.py,
   responses.py): whole, or in events as the text comes.

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
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn  # noqa: F401  (transport.py)
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from options import log_note
from run.engine import Engine
from run.generate import load
from run.methods import told_draft
from run.observer import Observer
from run.options import Sampling
from run.parsing import one_line_errors
from run.rank import of_ranks
from run.warm_up import warm_up
from sampling import SamplingMode
from server.batcher import Batcher, Delta, Job, Refusal
from server.bodies import SHOWN
from server.options import ServeConfig
from server.parameters import RequestParams, RequestReader, no_model
from server.prompt_pass import echoes
from server.recommended import with_recommended_sampling
from server.replies import Reply, joined
from server.responses import ResponseReply, as_chat
from server.transport import Keys, KnownHosts, Listener, is_loopback, json_body, listen
from server.turns import dropped_messages

SILENCE_S = 10  # seconds without an event, behind which a stream has a comment
PAGE = Path(__file__).with_name("page.html")
OF_THE_PAGE = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
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
            Route("/v1/fit", self.fit, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
        ]
        handlers = {
            Refusal: _refused,
            HTTPException: _not_there,
            ClientDisconnect: _left,
            Exception: _failed,
        }
        config = self.config
        guards = []
        further = {name.strip() for name in config.allowed_hosts.lower().split(",")}
        if is_loopback(config.host) and "*" not in further:
            names = {"localhost", "127.0.0.1", "[::1]", config.host.lower()} | (further - {""})
            guards = [Middleware(KnownHosts, names=names, key=config.api_key)]
        if config.cors:  # before the key, which a browser's question about origins does not bring
            origins = [origin.strip().rstrip("/") for origin in config.cors.split(",")]
            allowed = {"allow_origins": origins, "allow_headers": ["*"], "allow_methods": ["*"]}
            guards.append(Middleware(CORSMiddleware, **allowed))
        if config.api_key:
            guards.append(Middleware(Keys, key=config.api_key))
        return Starlette(
            routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=guards
        )

    async def page(self, request: Request) -> Response:
        """Answer with the page to chat with, which needs nothing of another host."""
        return FileResponse(PAGE, headers=OF_THE_PAGE)

    async def props(self, request: Request) -> Response:
        """Answer with what the page has to know of the model."""
        engine = self.engine
        return JSONResponse(
            {
                "model": self.name,
                "drafts": told_draft(engine),
                "rests": engine.presets[0].size == 1,
                "chat": engine.template is not None,
                "context": engine.context,
                **engine.config.sampling._asdict(),
                "max_tokens": min(self.config.max_new_tokens, engine.context),
            }
        )

    async def health(self, request: Request) -> Response:
        """Answer 200 while answers are decoded, else 503."""
        if not self.batcher.open or not self.batcher.is_alive():
            raise Refusal(503, "the server decodes no answers; start it again")
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """Answer for the one model, or the list of it."""
        asked = request.path_params.get("name", self.name)
        if asked != self.name:
            raise no_model(asked, self.name)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "gpt-eagle"}
        return JSONResponse(model if request.path_params else {"object": "list", "data": [model]})

    async def fit(self, request: Request) -> Response:
        """Answer how many of the oldest messages the page leaves out of its next request."""
        body = await json_body(request, self.config.max_body)
        chat = self.engine.template is not None
        async with self.reading:
            dropped = await asyncio.to_thread(dropped_messages, self.reader, body, chat)
        return JSONResponse({"dropped": dropped})

    async def complete(self, request: Request) -> Response:
        """Answer a completion."""
        asked = await self._asked(await json_body(request, self.config.max_body), False)
        reply = Reply(asked, False, self.name, self.engine.tokenizer)
        return await self._answer(request, reply)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        asked = await self._asked(await json_body(request, self.config.max_body), True)
        reply = Reply(asked, True, self.name, self.engine.tokenizer)
        return await self._answer(request, reply)

    async def respond(self, request: Request) -> Response:
        """Answer a chat in the form of Responses."""
        body = await json_body(request, self.config.max_body)
        asked = await self._asked(as_chat(body), True)
        reply = ResponseReply(asked, body, self.name, self.engine.tokenizer)
        return await self._answer(request, reply)

    async def _asked(self, body: Any, chat: bool) -> RequestParams:
        async with self.reading:
            return await asyncio.to_thread(self.reader.read, body, chat)

    async def _answer(self, request: Request, reply: Reply) -> Response:
        asked = reply.asked
        pieces: asyncio.Queue[Delta | Refusal] = asyncio.Queue()
        if asked.echoes:
            echoed = self.batcher.call(partial(echoes, self.engine, asked))
            for piece in await asyncio.wrap_future(echoed):
                pieces.put_nowait(piece)
        jobs = self._jobs(asked, reply.chat, pieces) if asked.most else []
        self.batcher.submit(jobs)
        if asked.stream:
            events = _events(pieces, jobs, reply)
            return StreamingResponse(events, media_type="text/event-stream")
        done = asyncio.create_task(_whole(pieces, jobs, reply))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(done.result()) if done.done() else Response(status_code=499)
        finally:
            done.cancel()
            gone.cancel()
            for job in jobs:
                job.left = True

    def _jobs(
        self, asked: RequestParams, chat: bool, pieces: asyncio.Queue[Delta | Refusal]
    ) -> list[Job]:
        engine = self.engine
        loop = asyncio.get_running_loop()
        copies = asked.samples if asked.sampling.temperature == 0 else 1  # equal answers

        def tell(piece: Delta | Refusal) -> None:
            of_all = [piece]
            if isinstance(piece, Delta):
                of_all = [piece._replace(choice=piece.choice + i) for i in range(copies)]
            with suppress(RuntimeError):  # the loop has ended
                for each in of_all:
                    loop.call_soon_threadsafe(pieces.put_nowait, each)

        jobs = []
        for number, prompt in enumerate(asked.prompts):
            echoed = engine.tokenizer.decode(prompt, True) if asked.echoes else ""
            for sample in range(0, asked.samples, copies):
                job = Job(
                    prompt,
                    asked.sampling,
                    asked.seed,
                    asked.most,
                    noise_id=(number, sample),
                    decoder=engine.tokenizer.stream(not chat, asked.shown),
                    stops=asked.stops,
                    guide=asked.guide,
                    draft_limit=asked.draft_limits[number],
                    shows_half=False,
                    choice=number * asked.samples + sample,
                    likeliest=asked.likeliest,
                    before=len(echoed),
                    tell=tell,
                    wants_trees=asked.wants_trees and asked.stream,
                )
                jobs.append(job)
        return jobs


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse(error.body, error.status)


async def _not_there(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method, in the shape of the other errors."""
    refusal = Refusal(
        error.status_code, f"{request.method} {request.url.path[:SHOWN]}: {error.detail}"
    )
    return JSONResponse(refusal.body, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer where the server itself is wrong; the terminal gets the traceback."""
    return JSONResponse(Refusal(500, "the server failed; see the terminal").body, 500)


async def _left(request: Request, error: Exception) -> Response:
    """Answer a client that left before the end of its request; nobody reads it."""
    return Response(status_code=499)


async def _gone(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _take(
    pieces: asyncio.Queue[Delta | Refusal], choices: int
) -> AsyncIterator[Delta | None]:
    """Yield the pieces of all choices until all are over; None for a silence, as of a long prompt.

    Raises: Refusal when the server ends or fails.
    """
    open = choices
    while open:
        try:
            piece = await asyncio.wait_for(pieces.get(), SILENCE_S)
        except asyncio.TimeoutError:
            yield None
            continue
        if isinstance(piece, Refusal):
            raise piece
        open -= piece.reason is not None
        yield piece


def _cached(jobs: list[Job], asked: RequestParams) -> int:
    """Count the tokens of prompts that were not read again, once for each prompt."""
    return sum(job.cached for job in jobs if job.choice % asked.samples == 0)


async def _whole(
    pieces: asyncio.Queue[Delta | Refusal], jobs: list[Job], reply: Reply
) -> dict[str, Any]:
    answers: list[list[Delta]] = [[] for _ in range(reply.asked.choices)]
    async for piece in _take(pieces, len(answers)):
        if piece is None:
            continue
        answers[piece.choice].append(piece)
    reply.cached = _cached(jobs, reply.asked)
    return reply.whole([joined(parts) for parts in answers])


async def _events(
    pieces: asyncio.Queue[Delta | Refusal], jobs: list[Job], reply: Reply
) -> AsyncIterator[str]:
    tokens = [0] * reply.asked.choices
    try:
        yield reply.begin()
        async for piece in _take(pieces, len(tokens)):
            if piece is None:
                yield ": still reading or waiting\n\n"  # a comment, so that no proxy hangs up
                continue
            tokens[piece.choice] = piece.tokens
            if piece.text or piece.reason:
                yield reply.piece(piece)
        reply.cached = _cached(jobs, reply.asked)
        yield reply.end(tokens)
    except Refusal as error:
        yield reply.fault(error)
    finally:  # also when the client has left
        for job in jobs:
            job.left = True


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
        if served and SamplingMode.needed_by(sampling) != SamplingMode.needed_by(config.sampling):
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
