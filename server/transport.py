"""The HTTP of serve.py around its endpoints: the socket, who may ask, the bodies, the end."""

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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.batcher import Batcher, Refusal
from server.bodies import SHOWN
from server.options import ServeConfig

READ_S = 30  # seconds for the body of a request
REMEDIES = {
    errno.EADDRINUSE: "name another --port, or end who listens there",
    errno.EACCES: "name a --port from 1024 on",
}


def listen(config: ServeConfig) -> socket.socket:
    """Open a socket at the address and port. Raises: ValueError where that cannot be."""
    try:
        addresses = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, *_, address = addresses[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        remedy = REMEDIES.get(number, "name an address of this machine with --host")
        reason = getattr(error, "strerror", None) or error
        where = f"--host {config.host} --port {config.port}"
        raise ValueError(f"{where}: {reason}; {remedy}") from None


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Guard:
    """Refuses requests to /v1 that do not bring the key, and those that name a foreign host.

    A page of another site whose name is resolved to this machine names that host. A request with
    the key may name any.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig):
        self.app = app
        self.key = config.api_key
        self.names = {*config.hosts(), "localhost", "127.0.0.1", "[::1]", config.host.lower()}
        self.any_host = "*" in self.names or not is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The server calls this."""
        app = self.app
        refusal = self.refusal(scope) if scope["type"] == "http" else None
        if refusal:
            app = JSONResponse(refusal.body, refusal.status)
            with suppress(asyncio.TimeoutError, ClientDisconnect):
                await asyncio.wait_for(_at_most(Request(scope, receive), 0), READ_S)
        await app(scope, receive, send)

    def refusal(self, scope: Scope) -> Refusal | None:
        """Return why a request is not answered; None: it is."""
        headers = Headers(scope=scope)
        scheme, _, brought = headers.get("authorization", "").replace("\t", " ").partition(" ")
        same = hmac.compare_digest(brought.strip().encode(), self.key.encode())
        has_key = bool(self.key) and same and scheme.lower() == "bearer"
        host = headers.get("host", "").lower()
        # no browser sends none, as a probe of HTTP/1.0 does
        is_known = not host or re.sub(r"\.?(:\d+)?$", "", host) in self.names
        if not (self.any_host or has_key or is_known):
            return Refusal(400, f"{host[:SHOWN]!r} is no name of this server")
        if self.key and not has_key and scope["path"].startswith("/v1"):
            return Refusal(401, "the key is missing or wrong")
        return None


class Listener(uvicorn.Server):
    """Ends answers before it waits for their connections, and itself when the batcher failed."""

    def __init__(self, app: ASGIApp, batcher: Batcher):
        options = {"http": "h11", "log_level": "warning", "timeout_graceful_shutdown": 5}
        options["timeout_keep_alive"] = 75  # longer than the 60 s for which proxies keep theirs
        super().__init__(uvicorn.Config(app, **options))
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
    try:
        data = await asyncio.wait_for(_at_most(request, most), READ_S)
        if len(data) > most:
            raise Refusal(413, f"the body has more than {most} bytes")
        if kind != "application/json":  # a page of another site may send other types unasked
            fault = "the body must be application/json, and its header Content-Type say so"
            raise Refusal(415, fault)
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_no_number)
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except asyncio.TimeoutError:
        raise Refusal(408, f"the body did not come within {READ_S} s") from None
    except UnicodeEncodeError:
        fault = "the body has half a character (a surrogate code point); remove it"
        raise Refusal(400, fault) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    return body


async def _at_most(request: Request, most: int) -> bytes:
    """Read a body to its end, as clients read no answer before they have sent all.

    Returns: its first bytes, one more than `most` where it has more
    """
    data = bytearray()
    async for part in request.stream():
        data += part[: most + 1 - len(data)]
    return bytes(data)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
