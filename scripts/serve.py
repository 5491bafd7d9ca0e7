"""Serve a model to OpenAI clients: completions and chat, streamed or whole.

    python scripts/serve.py --compile --batch_size 4 --port 8000
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "def f(", "seed": 3}'

Takes every option of generate.py that says what is decoded and how. Needs scripts/requirements-serve.txt.

1. One thread runs the loop (batcher.py): the rows of one session serve requests side by side; one that is over, or
   whose client has left, gives its row to the next request.
2. The event loop reads requests (`Reader`), refuses by name what is not served, and passes text on as it comes.

A request's text is a function of (weights, prompt, seed, number of the choice): what generate.py prints for this prompt
and --seed, alone or in a crowd. Without a seed one is drawn.
Trade-off: temperature, top_k and top_p are compiled into the cycles: a request that names others is refused.
Completions, too, end where --chat would end them, at the stop ids of the model's chat template.
Not here: keys and TLS. The default address is reached from this machine alone; with another --host put a proxy before
it.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import ranks

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(
        f"serve.py: {error.name} is missing; pip install -r scripts/requirements-serve.txt",
        file=sys.stderr,
    )
    sys.exit(2)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import Engine
from generate import load
from hf.chat import chat_template, template_text
from hf.fetch import fetched
from options import GenerateConfig
from prompts import check_ids
from scripts.batcher import Answer, Job, Piece, Refusal, Rows

READ_S = 30  # seconds for the head of a request, and for its body
SHOWN = 100  # characters of what a request says, at most, that a message repeats
# what other servers take and this one does not, with the values that ask for nothing
UNSERVED: dict[str, tuple] = {
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0, 0.0), "function_call": ("none",), "functions": ([],),
    "logit_bias": ({},), "logprobs": (False,), "parallel_tool_calls": (False, True), "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],),
    "top_logprobs": (0,),
}  # fmt: skip
SERVED = {
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop",
    "seed", "user", "store", "metadata",
}  # fmt: skip


@dataclass(frozen=True)
class ServeConfig(GenerateConfig):
    """Options of a server. Those of generate.py that belong to a single run are left out."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free one", least=0, most=65535)
    batch_size: int = option(4, "requests decoded side by side", least=1)
    max_new_tokens: int = option(
        512, "tokens of an answer at most, and where a request names none", least=1
    )
    max_waiting: int = option(
        64, "answers that may wait for a row; more requests are refused", least=0
    )
    max_body: int = option(1_000_000, "bytes of a request at most", least=1)
    prompt: str | None = option(None, "", flag=False)
    prompt_file: str = option("", "", flag=False)
    prompt_ids: str | None = option(None, "", flag=False)
    interactive: bool = option(False, "", flag=False)
    num_samples: int = option(1, "", flag=False)
    seed: int = option(0, "", flag=False)
    compare: bool = option(False, "", flag=False)
    json: str = option("", "", flag=False)
    results: str = option("", "", flag=False)
    trace: str = option("", "", flag=False)
    profile: str = option("", "", flag=False)


def need(holds: bool, message: str, param: str | None = None) -> None:
    """Raises: Refusal with status 400 unless it holds."""
    if not holds:
        raise Refusal(400, message, param)


def no_model(asked: Any, name: str) -> Refusal:
    """The refusal of a model that is not the one that is served."""
    return Refusal(404, f"there is no model {repr(asked)[:SHOWN]} here; this is {name}", "model")


# ------------------------------------------------------------------------------------------- a request


class Asked(NamedTuple):
    """A request that was understood."""

    prompts: list[list[int]]
    samples: int
    seed: int
    most: int
    stops: list[str]
    stream: bool
    usage: bool  # whether a stream ends with the usage


class Reader:
    """Turns the JSON of a request into what is asked for."""

    def __init__(self, engine: Engine, config: ServeConfig, name: str):
        self.engine, self.config, self.name = engine, config, name

    @lru_cache(maxsize=64)  # noqa: B019  (one reader a server)
    def _template(self, system: str | None) -> Any:
        return chat_template(
            fetched(self.config.checkpoint), self.engine.tokenizer, self.engine.config.chat, system
        )

    def read(self, body: Any, chat: bool) -> Asked:
        """Check a request. Raises: Refusal."""
        need(isinstance(body, dict), "the body must be a JSON object")
        body = {
            name: value for name, value in body.items() if value is not None
        }  # null: as if it were not there
        asked = body.get("model", self.name)
        if asked != self.name:
            raise no_model(asked, self.name)
        source = "messages" if chat else "prompt"
        for name, value in body.items():
            asks_nothing = any(
                type(value) is type(each) and value == each for each in UNSERVED.get(name, ())
            )
            known = name in SERVED or name == source or asks_nothing
            need(
                known,
                f"{name[:SHOWN]} = {json.dumps(value)[:SHOWN]} is not served; leave it out",
                name[:SHOWN],
            )
        for name, mine in (("temperature", self.config.temperature), ("top_p", self.config.top_p)):
            same = type(body.get(name, mine)) in (int, float) and body.get(name, mine) == mine
            need(
                same,
                f"{name} is {mine:g} for all requests; leave it out, or serve with --{name}",
                name,
            )
        options, limit = body.get("stream_options", {}), self.config.max_new_tokens
        need(isinstance(options, dict), "stream_options must be an object", "stream_options")
        options = {name: value for name, value in options.items() if value is not None}
        most = self._whole(body, "max_tokens", limit, 1, limit)
        most = self._whole(body, "max_completion_tokens", most, 1, limit)
        need(source in body, f"{source} is missing", source)
        given, rows = [body[source]], self.config.max_waiting + self.config.batch_size
        if (
            not chat
            and isinstance(given[0], list)
            and given[0]
            and not any(type(part) is int for part in given[0])
        ):
            given = given[0]  # several prompts
        samples = self._whole(body, "n", 1, 1, rows)
        fits = len(given) * samples <= rows  # before they are tokenized
        need(
            fits,
            f"at most {rows} answers fit the waiting room; lower n, or send fewer prompts",
            "n",
        )
        try:
            prompts = [self._messages(part) if chat else self._ids(part) for part in given]
        except ValueError as error:
            raise Refusal(400, str(error), source) from None
        return Asked(
            prompts, samples, self._whole(body, "seed", random.getrandbits(63), -(2**63), 2**64 - 1) % 2**64, most,
            self._stops(body), self._flag(body, "stream"), self._flag(options, "include_usage"),
        )  # fmt: skip

    def _whole(self, body: dict, name: str, default: int, least: int, most: int) -> int:
        value = body.get(name, default)
        whole = type(value) is int and least <= value <= most
        need(
            whole,
            f"{name} must be a whole number from {least} to {most}; it is {json.dumps(value)[:SHOWN]}",
            name,
        )
        return value

    def _flag(self, body: dict, name: str) -> bool:
        need(type(body.get(name, False)) is bool, f"{name} must be true or false", name)
        return body.get(name, False)

    def _stops(self, body: dict) -> list[str]:
        stops = body.get("stop", [])
        stops = [stops] if isinstance(stops, str) else stops
        fit = (
            isinstance(stops, list)
            and len(stops) <= 4
            and all(isinstance(s, str) and 0 < len(s) <= 256 for s in stops)
        )
        need(fit, "stop must be at most four texts of 1 to 256 characters", "stop")
        return stops

    def _ids(self, prompt: Any) -> list[int]:
        """A prompt of a completion: a text or token ids."""
        engine = self.engine
        ids = engine.tokenizer.encode(prompt, bos=True) if isinstance(prompt, str) else prompt
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise ValueError("prompt must be a text, a list of token ids, or a list of either")
        return check_ids(ids, engine.target.config.vocab_size, engine.context)

    def _messages(self, messages: Any) -> list[int]:
        """A system message or none, then user and assistant in turn, the user last."""
        if self.engine.config.chat is None:
            raise ValueError(
                "this model has no chat template; serve it with --chat NAME, or ask for completions"
            )
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one")
        said = [_message(message) for message in messages]
        system = said.pop(0)[1] if said[0][0] in ("system", "developer") else self.config.system
        roles = [role for role, _ in said]
        if (
            not said
            or len(said) % 2 == 0
            or roles != [("user", "assistant")[i % 2] for i in range(len(said))]
        ):
            order = "messages must go user, assistant, ..., user behind a system message"
            raise ValueError(f"{order}; they go {str(roles)[:SHOWN]}")
        turns, answers = ([text for _, text in said[first::2]] for first in (0, 1))
        ids = self._template(system).encode(self.engine.tokenizer, turns, answers)
        return check_ids(ids, self.engine.target.config.vocab_size, self.engine.context)


def _message(message: Any) -> tuple[str, str]:
    """Role and text."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):  # parts
        texts = [
            part.get("text")
            for part in content
            if isinstance(part, dict) and part.get("type") == "text"
        ]
        content = (
            "".join(texts)
            if len(texts) == len(content) and all(isinstance(t, str) for t in texts)
            else None
        )
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError("a message must have a role and a text as its content")
    return message["role"], content


# -------------------------------------------------------------------------------------------- responses


class Reply:
    """The JSON of a response, whole or in events."""

    def __init__(self, asked: Asked, chat: bool, model: str):
        self.asked, self.chat = asked, chat
        self.base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
        }
        self.base["model"] = model

    def usage(self, tokens: Iterable[int]) -> dict[str, int]:
        """tokens: of each choice."""
        prompt, new = sum(map(len, self.asked.prompts)), sum(tokens)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(
        self, texts: list[str], reasons: list[str | None], tokens: list[int]
    ) -> dict[str, Any]:
        """All choices, with the usage."""
        choices = [
            {"index": i, "finish_reason": reason, "logprobs": None}
            | ({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text})
            for i, (text, reason) in enumerate(zip(texts, reasons))
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": choices, "usage": self.usage(tokens)}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """One event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        told = {"usage": usage} if self.asked.usage else {}
        return f"data: {json.dumps(self.base | {'object': kind, 'choices': choices} | told)}\n\n"

    def piece(self, piece: Piece) -> str:
        """The event of a piece."""
        said = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self.event(
            [{"index": piece.choice, "finish_reason": piece.reason, "logprobs": None} | said]
        )

    def begin(self, choice: int) -> str:
        """The event that a choice of a chat begins with."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return self.event([{"index": choice, "finish_reason": None, "logprobs": None} | said])


class Server:
    """The endpoints."""

    def __init__(self, engine: Engine, config: ServeConfig):
        self.engine, self.config, self.name = engine, config, Path(config.checkpoint).name
        self.rows, self.reader = Rows(engine, config.max_waiting), Reader(engine, config, self.name)
        self.reading = asyncio.Lock()  # tokenizers are used by one thread at a time

    def app(self) -> Starlette:
        """The application. It starts the rows' thread and ends it."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.rows.start()
            yield
            self.rows.close()
            await asyncio.to_thread(self.rows.join)

        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/completions", partial(self.answer, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.answer, chat=True), methods=["POST"]),
        ]
        handlers = {Refusal: _refused, HTTPException: _not_there, ClientDisconnect: _left}
        guards = []
        if _loopback(
            self.config.host
        ):  # a page of another site may have its name resolved to this machine
            names = ["localhost", "127.0.0.1", "[::1]", self.config.host]
            guards = [Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)]
        return Starlette(
            routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=guards
        )

    async def models(self, request: Request) -> Response:
        """The one model."""
        asked = request.path_params.get("name", self.name)
        if asked != self.name:
            raise no_model(asked, self.name)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "gpt-eagle"}
        return JSONResponse(model if request.path_params else {"object": "list", "data": [model]})

    async def answer(self, request: Request, chat: bool) -> Response:
        """Completions, and those of chats."""
        body = await self._body(request)
        async with self.reading:
            asked = await asyncio.to_thread(self.reader.read, body, chat)
        pieces: asyncio.Queue[Piece | Refusal] = asyncio.Queue()
        jobs, reply = self._jobs(asked, chat, pieces), Reply(asked, chat, self.name)
        self.rows.submit(jobs)
        if asked.stream:
            return StreamingResponse(_events(pieces, jobs, reply), media_type="text/event-stream")
        done, gone = (
            asyncio.create_task(_whole(pieces, jobs, reply)),
            asyncio.create_task(_gone(request)),
        )
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(done.result()) if done.done() else Response(status_code=499)
        finally:
            done.cancel(), gone.cancel()
            for job in jobs:
                job.left = True

    async def _body(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no page of another site may send without asking
            raise Refusal(415, "the body must be application/json")
        try:
            data = await asyncio.wait_for(_at_most(request, self.config.max_body), READ_S)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not come within {READ_S} s") from None
        try:
            body = json.loads(data.decode("utf-8"), parse_constant=_no_number)
            json.dumps(body, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise Refusal(
                400, "the body has half a character (a surrogate code point); remove it"
            ) from None
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {error}") from None
        return body

    def _jobs(self, asked: Asked, chat: bool, pieces: asyncio.Queue[Piece | Refusal]) -> list[Job]:
        engine, loop = self.engine, asyncio.get_running_loop()

        def tell(piece: Piece | Refusal) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        streams = [(p, s) for p in range(len(asked.prompts)) for s in range(asked.samples)]
        ends = [] if engine.config.ignore_eos else list(engine.eos_ids)
        return [
            Job(
                choice, asked.prompts[p], (p, s), asked.seed, asked.most,
                Answer(engine.tokenizer.stream(continuation=not chat), asked.stops, ends), tell,
            )
            for choice, (p, s) in enumerate(streams)
        ]  # fmt: skip


async def _at_most(request: Request, most: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise Refusal(413, f"the body has more than {most} bytes")
    return bytes(data)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse(error.body, error.status)


async def _not_there(request: Request, error: Exception) -> Response:
    """A path or a method that is not there, in the shape of the others."""
    refusal = Refusal(
        error.status_code, f"{request.method} {request.url.path[:SHOWN]}: {error.detail}"
    )
    return JSONResponse(refusal.body, error.status_code, error.headers)


async def _left(request: Request, error: Exception) -> Response:
    """For a client that left before its request was whole; nobody reads it."""
    return Response(status_code=499)


async def _gone(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _take(pieces: asyncio.Queue[Piece | Refusal], jobs: list[Job]) -> AsyncIterator[Piece]:
    """The pieces of all answers, until all are over. Raises: Refusal when the server ends or fails."""
    open = len(jobs)
    while open:
        piece = await pieces.get()
        if isinstance(piece, Refusal):
            raise piece
        open -= piece.reason is not None
        yield piece


async def _whole(
    pieces: asyncio.Queue[Piece | Refusal], jobs: list[Job], reply: Reply
) -> dict[str, Any]:
    texts, last = [""] * len(jobs), [Piece(i, "", 0, None) for i in range(len(jobs))]
    async for piece in _take(pieces, jobs):
        texts[piece.choice] += piece.text
        last[piece.choice] = piece
    return reply.whole(texts, [piece.reason for piece in last], [piece.tokens for piece in last])


async def _events(
    pieces: asyncio.Queue[Piece | Refusal], jobs: list[Job], reply: Reply
) -> AsyncIterator[str]:
    tokens = [0] * len(jobs)
    try:
        for job in jobs if reply.chat else ():
            yield reply.begin(job.choice)
        async for piece in _take(pieces, jobs):
            tokens[piece.choice] = piece.tokens
            if piece.text or piece.reason:
                yield reply.piece(piece)
        if reply.asked.usage:
            yield reply.event([], reply.usage(tokens))
        yield "data: [DONE]\n\n"
    except Refusal as error:
        yield f"data: {json.dumps(error.body)}\n\n"
    finally:  # also when the client has left
        for job in jobs:
            job.left = True


# ------------------------------------------------------------------------------------------------- main


def listen(config: ServeConfig) -> socket.socket:
    """A socket at the address and port. Raises: ValueError where that cannot be."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[
            0
        ]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        remedy = {
            errno.EADDRINUSE: "name another --port, or end who listens there",
            errno.EACCES: "name a --port from 1024 on",
        }.get(number, "name an address of this machine with --host")
        where, said = (
            f"--host {config.host} --port {config.port}",
            getattr(error, "strerror", None) or error,
        )
        raise ValueError(f"{where}: {said}; {remedy}") from None


def _loopback(host: str) -> bool:
    """Whether a host is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Connection(H11Protocol):
    """Drops a client whose request does not come."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop. uvicorn itself has no limit for a further request that has begun."""
        super().data_received(data)
        if self.cycle and self.cycle.response_complete:
            self._await_request()

    def _await_request(self) -> None:
        before = self.cycle  # of the last request
        self.loop.call_later(READ_S, lambda: self.cycle is before and self.transport.close())


class Listener(uvicorn.Server):
    """Ends answers before it waits for their connections to end, and itself when the rows' thread has failed."""

    def __init__(self, server: Server):
        super().__init__(
            uvicorn.Config(
                server.app(), http=Connection, log_level="warning", timeout_graceful_shutdown=5
            )
        )
        self.rows = server.rows

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Called by Ctrl-C."""
        self.rows.close()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Returns: whether to end."""
        return await super().on_tick(counter) or self.rows.failed

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve to the end. Exits with status 1 when decoding has failed."""
        super().run(sockets)
        if self.rows.failed:
            sys.exit(1)


def load_engine(config: ServeConfig) -> Engine:
    """Load the model, with its own chat template if it has one. Raises: ValueError for anything wrong."""
    if config.chat is None and template_text(fetched(config.checkpoint)) is not None:
        config = replace(config, chat="")
    engine = load(config)
    if engine.tokenizer is None:
        raise ValueError(f"{config.checkpoint} has no tokenizer; a server needs one")
    return engine


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config = parse(ServeConfig, "serve.py", "Serve a model to OpenAI clients.", argv)
    with one_line_errors("serve.py"):
        config.check()
        ranks.refuse_torchrun()
        with listen(config) as found:  # before the model is loaded
            server = Server(load_engine(config), config)
            host, port = found.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            print(
                f"{server.name} at http://{host}:{port}/v1, {config.batch_size} rows",
                file=sys.stderr,
                flush=True,
            )
            Listener(server).run(sockets=[found])


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # the end of a process saves what --tree auto has learned
    main()
