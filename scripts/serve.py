"""Serve a model to OpenAI clients: completions and chat, streamed or whole.

    python scripts/serve.py --compile --batch_size 4 --port 8000
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "def f(", "seed": 3}'

Takes every option of generate.py that says what is decoded and how. Packages:
scripts/requirements-serve.txt.

1. One thread decodes (batcher.py): one session serves requests side by side. A finished sequence,
   or one whose client has left, is evicted for the next request.
2. The event loop reads requests (`Reader`), refuses unserved options by name, and streams the text.

The text is a function of (weights, prompt, temperature, top_k, top_p, seed, number of the choice):
that of generate.py for this prompt and these options, in a batch of any size and company, but for
the bytes of a character that is cut at the end. Without a seed one is drawn; the other options are
the server's where a request names none. Trade-off: on CUDA three kinds of cycles are compiled.
/health says whether answers are decoded, /metrics gives counters in Prometheus' text form.
Completions, too, end at the stop ids of the model's chat template, as with --chat.
Not here: keys and TLS. The default address is reached from this machine alone; with another --host
put a proxy before it.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import asyncio
import errno
import ipaddress
import json
import random
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
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

import ranks
from command_line import MOST, one_line_errors, option, parse
from decode import Engine
from generate import load
from hf.chat import chat_template, template_text
from hf.fetch import fetched
from load import warm_up
from options import GenerateConfig, Sampling
from prompts import check_ids, check_sampled
from sampling import Kind
from scripts.batcher import Answer, Batcher, Job, Piece, Refusal

READ_S = 30  # seconds for the head of a request, and for its body
SHOWN = 100  # characters of a request that a message repeats, at most
# parameters of other servers, with the values that change nothing
UNSERVED: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "parallel_tool_calls": (False, True),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
SERVED = {
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_k", "top_p", "n", "stream",
    "stream_options", "stop", "seed", "user", "store", "metadata",
}  # fmt: skip


@dataclass(frozen=True)
class ServeConfig(GenerateConfig):
    """Options of a server. Those of generate.py that belong to a single run are left out."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free one", least=0, most=65535)
    batch_size: int = option(4, "requests decoded side by side", least=1)
    max_new_tokens: int = option(
        512, "tokens of an answer at most, where a request names no other number", least=1
    )
    max_waiting: int = option(
        64, "answers that may wait for their turn; more requests are refused", least=0
    )
    max_body: int = option(1_000_000, "bytes of a request at most", least=1)
    prompt: str | None = option(None, "", flag=False)
    prompt_file: str = option("", "", flag=False)
    prompt_ids: str | None = option(None, "", flag=False)
    interactive: bool = option(False, "", flag=False)
    num_samples: int = option(1, "", flag=False)
    seed: int = option(0, "", flag=False, least=0, most=2**64 - 1)
    compare: bool = option(False, "", flag=False)
    json: str = option("", "", flag=False)
    results: str = option("", "", flag=False)
    trace: str = option("", "", flag=False)
    profile: str = option("", "", flag=False)


def need(holds: bool, message: str, param: str | None = None) -> None:
    """Check a condition of a request. Raises: Refusal with status 400."""
    if not holds:
        raise Refusal(400, message, param)


def no_model(asked: Any, name: str) -> Refusal:
    """Return the refusal of a model name other than the served one."""
    return Refusal(404, f"there is no model {repr(asked)[:SHOWN]} here; this is {name}", "model")


# ----------------------------------------------------------------------------------------- requests


class Asked(NamedTuple):
    """A checked request."""

    prompts: list[list[int]]
    samples: int
    sampling: Sampling
    seed: int
    most: int  # tokens of an answer
    stops: list[str]
    stream: bool
    usage: bool  # a stream ends with the usage


class Reader:
    """Reads and checks the JSON of requests."""

    def __init__(self, engine: Engine, config: ServeConfig, name: str):
        self.engine = engine
        self.config = config
        self.name = name

    @lru_cache(maxsize=64)  # noqa: B019  (one reader a server)
    def _template(self, system: str | None) -> Any:
        engine = self.engine
        checkpoint = fetched(self.config.checkpoint)
        return chat_template(checkpoint, engine.tokenizer, engine.config.chat, system)

    def read(self, body: Any, chat: bool) -> Asked:
        """Check a request. Raises: Refusal."""
        need(isinstance(body, dict), "the body must be a JSON object")
        body = _without_nulls(body)
        asked = body.get("model", self.name)
        if asked != self.name:
            raise no_model(asked, self.name)
        source = "messages" if chat else "prompt"
        self._check_names(body, source)
        sampling = self._sampling(body)
        options = body.get("stream_options", {})
        need(isinstance(options, dict), "stream_options must be an object", "stream_options")
        options = _without_nulls(options)
        limit = self.engine.context
        own = min(self.config.max_new_tokens, limit)
        most = self._integer(body, "max_tokens", own, 1, limit)
        most = self._integer(body, "max_completion_tokens", most, 1, limit)
        need(source in body, f"{source} is missing", source)
        prompts = [body[source]]
        if not chat and _is_list_of_prompts(body[source]):
            prompts = body[source]
        capacity = self.config.max_waiting + self.config.batch_size
        samples = self._integer(body, "n", 1, 1, capacity)
        need(  # before they are tokenized
            len(prompts) * samples <= capacity,
            f"at most {capacity} answers fit the waiting room; lower n, or send fewer prompts",
            "n",
        )
        encode = self._messages if chat else self._ids
        try:
            ids = [encode(prompt) for prompt in prompts]
        except ValueError as error:
            raise Refusal(400, str(error), source) from None
        seed = self._integer(body, "seed", random.getrandbits(63), -(2**63), 2**64 - 1)
        return Asked(
            ids,
            samples,
            sampling,
            seed % 2**64,
            most,
            self._stops(body),
            self._flag(body, "stream"),
            self._flag(options, "include_usage"),
        )

    def _check_names(self, body: dict, source: str) -> None:
        """Refuse parameters that are not served. source: the one that holds the prompt"""
        for name, value in body.items():
            if name in SERVED or name == source:
                continue
            harmless = any(
                type(value) is type(each) and value == each for each in UNSERVED.get(name, ())
            )
            need(
                harmless,
                f"{name[:SHOWN]} = {json.dumps(value)[:SHOWN]} is not served; leave it out",
                name[:SHOWN],
            )

    def _sampling(self, body: dict) -> Sampling:
        """Read the parameters of the distribution; the server's own where they are missing."""
        own = self.config.sampling
        temperature = body.get("temperature", own.temperature)
        need(
            _is_number(temperature) and (0 <= temperature <= 2 or temperature == own.temperature),
            f"temperature must be a number from 0 to 2; it is {json.dumps(temperature)[:SHOWN]}",
            "temperature",
        )
        top_p = body.get("top_p", own.top_p)
        need(
            _is_number(top_p) and 0 < top_p <= 1,
            f"top_p must be a number above 0, at most 1; it is {json.dumps(top_p)[:SHOWN]}",
            "top_p",
        )
        top_k = self._integer(body, "top_k", own.top_k, -1, MOST)  # -1: all, as vLLM has it
        sampling = Sampling(temperature, max(top_k, 0), top_p)
        try:
            check_sampled(replace(self.config, temperature=temperature))
        except ValueError as error:
            raise Refusal(400, str(error), "temperature") from None
        return sampling

    def _integer(self, body: dict, name: str, default: int, least: int, most: int) -> int:
        value = body.get(name, default)
        shown = json.dumps(value)[:SHOWN]
        need(
            type(value) is int and least <= value <= most,
            f"{name} must be a whole number from {least} to {most}; it is {shown}",
            name,
        )
        return value

    def _flag(self, body: dict, name: str) -> bool:
        value = body.get(name, False)
        need(type(value) is bool, f"{name} must be true or false", name)
        return value

    def _stops(self, body: dict) -> list[str]:
        stops = body.get("stop", [])
        if isinstance(stops, str):
            stops = [stops]
        fit = (
            isinstance(stops, list)
            and len(stops) <= 4
            and all(isinstance(s, str) and 0 < len(s) <= 256 for s in stops)
        )
        need(fit, "stop must be at most four texts of 1 to 256 characters", "stop")
        return stops

    def _ids(self, prompt: Any) -> list[int]:
        """Return the ids of a completion's prompt, a text or token ids."""
        engine = self.engine
        ids = engine.tokenizer.encode(prompt, bos=True) if isinstance(prompt, str) else prompt
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise ValueError("prompt must be a text, a list of token ids, or a list of either")
        return check_ids(ids, engine.target.config.vocab_size, engine.context)

    def _messages(self, messages: Any) -> list[int]:
        """Return the ids of a chat: a system message or none, then user and assistant in turn."""
        engine = self.engine
        if engine.config.chat is None:
            raise ValueError(
                "this model has no chat template; serve it with --chat NAME, or ask for completions"
            )
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one")
        parsed = [_message(message) for message in messages]
        system = self.config.system
        if parsed[0][0] in ("system", "developer"):
            system = parsed.pop(0)[1]
        roles = [role for role, _ in parsed]
        expected = [("user", "assistant")[i % 2] for i in range(len(parsed))]
        if len(parsed) % 2 == 0 or roles != expected:
            order = "messages must go user, assistant, ..., user behind a system message"
            raise ValueError(f"{order}; they go {str(roles)[:SHOWN]}")
        texts = [text for _, text in parsed]
        ids = self._template(system).encode(engine.tokenizer, texts[0::2], texts[1::2])
        return check_ids(ids, engine.target.config.vocab_size, engine.context)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _without_nulls(options: dict) -> dict:
    return {name: value for name, value in options.items() if value is not None}


def _is_list_of_prompts(prompt: Any) -> bool:
    """Tell several prompts from one list of token ids."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return not any(type(part) is int for part in prompt)


def _message(message: Any) -> tuple[str, str]:
    """Return role and text."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = _joined_parts(content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError("a message must have a role and a text as its content")
    return message["role"], content


def _joined_parts(parts: list) -> str | None:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        if not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts)


# ---------------------------------------------------------------------------------------- responses


class Reply:
    """The JSON of a response, whole or in events."""

    def __init__(self, asked: Asked, chat: bool, model: str):
        self.asked = asked
        self.chat = chat
        self.base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": model,
        }

    def usage(self, tokens: Iterable[int]) -> dict[str, int]:
        """Count tokens. tokens: of each choice"""
        prompt = sum(map(len, self.asked.prompts))
        new = sum(tokens)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(
        self, texts: list[str], reasons: list[str | None], tokens: list[int]
    ) -> dict[str, Any]:
        """Return all choices, with the usage."""
        choices = []
        for i, (text, reason) in enumerate(zip(texts, reasons)):
            message = {"role": "assistant", "content": text}
            choices.append(
                _choice(i, reason) | ({"message": message} if self.chat else {"text": text})
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": choices, "usage": self.usage(tokens)}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """Return one event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        event = self.base | {"object": kind, "choices": choices}
        if self.asked.usage:
            event |= {"usage": usage}
        return f"data: {json.dumps(event)}\n\n"

    def piece(self, piece: Piece) -> str:
        """Return the event of a piece."""
        text = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self.event([_choice(piece.choice, piece.reason) | text])

    def begin(self, choice: int) -> str:
        """Return the first event of a chat's choice."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return self.event([_choice(choice, None) | role])


def _choice(index: int, reason: str | None) -> dict[str, Any]:
    return {"index": index, "finish_reason": reason, "logprobs": None}


class Server:
    """The endpoints."""

    def __init__(self, engine: Engine, config: ServeConfig):
        self.engine = engine
        self.config = config
        self.name = Path(config.checkpoint).name
        self.batcher = Batcher(engine, config.max_waiting)
        self.reader = Reader(engine, config, self.name)
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
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/completions", partial(self.answer, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.answer, chat=True), methods=["POST"]),
        ]
        handlers = {
            Refusal: _refused,
            HTTPException: _not_there,
            ClientDisconnect: _left,
            Exception: _failed,
        }
        guards = []
        if _loopback(self.config.host):
            # against a page of another site whose name is resolved to this machine
            names = {"localhost", "127.0.0.1", "[::1]", self.config.host.lower()}
            guards = [Middleware(KnownHosts, names=names)]
        return Starlette(
            routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=guards
        )

    async def health(self, request: Request) -> Response:
        """Answer 200 while answers are decoded, else 503."""
        if not self.batcher.open or not self.batcher.is_alive():
            raise Refusal(503, "the server decodes no answers; start it again")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer with the counters, in Prometheus' text form."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.batcher.page(), media_type=kind)

    async def models(self, request: Request) -> Response:
        """Answer for the one model, or the list of it."""
        asked = request.path_params.get("name", self.name)
        if asked != self.name:
            raise no_model(asked, self.name)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "gpt-eagle"}
        return JSONResponse(model if request.path_params else {"object": "list", "data": [model]})

    async def answer(self, request: Request, chat: bool) -> Response:
        """Answer a completion or a chat."""
        body = await self._body(request)
        async with self.reading:
            asked = await asyncio.to_thread(self.reader.read, body, chat)
        pieces: asyncio.Queue[Piece | Refusal] = asyncio.Queue()
        jobs = self._jobs(asked, chat, pieces)
        reply = Reply(asked, chat, self.name)
        self.batcher.submit(jobs)
        if asked.stream:
            return StreamingResponse(_events(pieces, jobs, reply), media_type="text/event-stream")
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

    async def _body(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site may send other types unasked
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
        engine = self.engine
        loop = asyncio.get_running_loop()

        def tell(piece: Piece | Refusal) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        ends = [] if engine.config.ignore_eos else list(engine.eos_ids)
        jobs = []
        for number, prompt in enumerate(asked.prompts):
            for sample in range(asked.samples):
                decoder = engine.tokenizer.stream(continuation=not chat)
                answer = Answer(decoder, asked.stops, ends)
                stream = (number, sample)
                job = Job(
                    choice=len(jobs),
                    prompt=prompt,
                    stream=stream,
                    sampling=asked.sampling,
                    seed=asked.seed,
                    most=asked.most,
                    answer=answer,
                    tell=tell,
                )
                jobs.append(job)
        return jobs


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


async def _take(pieces: asyncio.Queue[Piece | Refusal], jobs: list[Job]) -> AsyncIterator[Piece]:
    """Yield the pieces of all answers until all are over.

    Raises: Refusal when the server ends or fails.
    """
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
    texts = [""] * len(jobs)
    last = [Piece(i, "", 0, None) for i in range(len(jobs))]
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


# --------------------------------------------------------------------------------------------- main


def listen(config: ServeConfig) -> socket.socket:
    """Open a socket at the address and port. Raises: ValueError where that cannot be."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        remedies = {
            errno.EADDRINUSE: "name another --port, or end who listens there",
            errno.EACCES: "name a --port from 1024 on",
        }
        number = getattr(error, "errno", None)
        remedy = remedies.get(number, "name an address of this machine with --host")
        reason = getattr(error, "strerror", None) or error
        where = f"--host {config.host} --port {config.port}"
        raise ValueError(f"{where}: {reason}; {remedy}") from None


def _loopback(host: str) -> bool:
    """Tell an address that is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class KnownHosts:
    """Refuses requests that name another machine in their Host."""

    def __init__(self, app: ASGIApp, names: set[str]):
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The server calls this."""
        app = self.app
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "").lower()
            if re.sub(r":\d+$", "", host) not in self.names:
                body = Refusal(400, f"{host[:SHOWN]!r} is no name of this machine").body
                app = JSONResponse(body, 400)
        await app(scope, receive, send)


class Connection(H11Protocol):
    """Drops a client whose request does not come."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock. The event loop calls this."""
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Take data. The event loop calls this.

        uvicorn itself has no limit for a further request that has begun.
        """
        super().data_received(data)
        if self.cycle and self.cycle.response_complete:
            self._await_request()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP. The protocol calls this."""
        body = json.dumps(Refusal(400, msg).body)
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        answer = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
        self.transport.write(answer.encode("ascii"))
        self.transport.close()

    def _await_request(self) -> None:
        before = self.cycle  # of the last request
        self.loop.call_later(READ_S, lambda: self.cycle is before and self.transport.close())


class Listener(uvicorn.Server):
    """Ends answers before it waits for their connections, and itself when the batcher failed."""

    def __init__(self, server: Server):
        super().__init__(
            uvicorn.Config(
                server.app(), http=Connection, log_level="warning", timeout_graceful_shutdown=5
            )
        )
        self.batcher = server.batcher

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End the answers. Ctrl-C calls this."""
        self.batcher.close()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Check the batcher, ten times a second. Returns: True to end."""
        return await super().on_tick(counter) or self.batcher.failed

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve to the end. Exits with status 1 when decoding has failed."""
        super().run(sockets)
        if self.batcher.failed:
            sys.exit(1)


def load_engine(config: ServeConfig) -> Engine:
    """Load the model, with its own chat template if it has one.

    Raises: ValueError for any failure.
    """
    if config.chat is None and template_text(fetched(config.checkpoint)) is not None:
        config = replace(config, chat="")
    engine = load(config)
    if engine.tokenizer is None:
        raise ValueError(f"{config.checkpoint} has no tokenizer; a server needs one")
    if engine.captured:
        warm_other_kinds(engine)
    return engine


def warm_other_kinds(engine: Engine) -> None:
    """Compile and capture the cycles of other kinds than the engine's own.

    No request waits for them then.
    """
    config = engine.config
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=1)):
        served = sampling.temperature > 0 or config.accept == "exact"
        if served and Kind.of(sampling) != Kind.of(config.sampling):
            warm_up(replace(engine, config=replace(config, **sampling._asdict())))


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    config = parse(ServeConfig, "serve.py", "Serve a model to OpenAI clients.", argv)
    with one_line_errors("serve.py"):
        config.check()
        ranks.refuse_torchrun()
        with listen(config) as found:  # before the model is loaded
            server = Server(load_engine(config), config)
            host, port = found.getsockname()[:2]
            if ":" in host:
                host = f"[{host}]"
            print(
                f"{server.name} at http://{host}:{port}/v1, {config.batch_size} sequences",
                file=sys.stderr,
                flush=True,
            )
            Listener(server).run(sockets=[found])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a regular exit saves the measurements of --tree auto
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
