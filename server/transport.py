"""The HTTP of serve.py below its endpoints: socket, bodies, clients that stall, foreign hosts."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import re
import socket
import sys
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.batcher import Batcher, Refusal
from server.bodies import SHOWN
from server.options import ServeConfig

READ_S = 30  # seconds for the head of a request, and for its body


def listen(config: ServeConfig) -> socket.socket:
    """Open a socket at the address and port. Raises: ValueError where that cannot be."""
    try:
        addresses = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, *_, address = addresses[0]
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


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def brings_key(scope: Scope, key: str) -> bool:
    """Return whether a request brings the key."""
    scheme, _, brought = Headers(scope=scope).get("authorization", "").partition(" ")
    is_key = hmac.compare_digest(brought.strip().encode(), key.encode())
    return is_key and scheme.lower() == "bearer"


class KnownHosts:
    """Refuses requests that name another machine in their Host, but for those with the key.

    A page of another site, whose name is resolved to this machine, does not have it.
    """

    def __init__(self, app: ASGIApp, names: set[str], key: str):
        """key: "" for none"""
        self.app = app
        self.names = names
        self.key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The server calls this."""
        app = self.app
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "").lower()
            known = re.sub(r":\d+$", "", host) in self.names
            if not known and not (self.key and brings_key(scope, self.key)):
                body = Refusal(400, f"{host[:SHOWN]!r} is no name of this server").body
                app = JSONResponse(body, 400)
        await app(scope, receive, send)


class Keys:
    """Refuses requests to /v1 that do not bring the key."""

    def __init__(self, app: ASGIApp, key: str):
        self.app = app
        self.key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The server calls this."""
        app = self.app
        guarded = scope["type"] == "http" and scope["path"].startswith("/v1")
        if guarded and not brings_key(scope, self.key):
            app = JSONResponse(Refusal(401, "the key is missing or wrong").body, 401)
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

    def _await_request(self) -> None:
        before = self.cycle  # of the last request
        self.loop.call_later(READ_S, lambda: self.cycle is before and self.transport.close())


class Listener(uvicorn.Server):
    """Ends answers before it waits for their connections, and itself when the batcher failed."""

    def __init__(self, app: ASGIApp, batcher: Batcher):
        super().__init__(
            uvicorn.Config(app, http=Connection, log_level="warning", timeout_graceful_shutdown=5)
        )
        self.batcher = batcher

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End the answers. Ctrl-C calls this."""
        self.batcher.close()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Watch the batcher, ten times a second. Returns: whether to end."""
        return await super().on_tick(counter) or self.batcher.failed

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve to the end. Exits with status 1 when decoding has failed."""
        super().run(sockets)
        if self.batcher.failed:
            sys.exit(1)


async def json_body(request: Request, most: int) -> Any:
    """Read the body of a request. most: bytes. Raises: Refusal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site may send other types unasked
        raise Refusal(415, "the body must be application/json, and its header Content-Type say so")
    try:
        data = await asyncio.wait_for(_at_most(request, most), READ_S)
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


async def _at_most(request: Request, most: int) -> bytes:
    """Read a body to its end, as clients read no answer before they have sent all."""
    data = bytearray()
    async for part in request.stream():
        data += part[: most + 1 - len(data)]
    if len(data) > most:
        raise Refusal(413, f"the body has more than {most} bytes")
    return bytes(data)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
