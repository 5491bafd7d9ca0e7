"""The start of scripts/serve.py: options and mistakes without torch, then the server."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from options import load_part, require
from run.options import GenerateConfig
from run.parsing import one_line_errors, option, parse_given
from run.prompts import read_grammar
from run.start import with_checked_files

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:\d+)?")
HOST = re.compile(r"\*|[a-z0-9_.-]+|\[[0-9a-f:]+\]")
ABOUT = "Serve a model to OpenAI clients."


@dataclass(frozen=True)
class ServeConfig(GenerateConfig):
    """Options of a server. Those of generate.py that belong to a single run are left out."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free one", least=0, most=65535)
    batch_size: int = option(4, "requests decoded side by side", least=1)
    max_new_tokens: int = option(
        512,
        "tokens of an answer at most, where a request names no other number",
        least=1,
        short="n",
    )
    temperature: float = option(
        0.0,
        "of requests that name none, as are the next three; default: as the model's "
        "generation_config says, 0 where it says nothing",
        least=0,
    )
    max_waiting: int = option(
        64, "answers that may wait for their turn; more requests are refused", least=0
    )
    api_key: str = option("", "key that requests to /v1 must bring, as OpenAI clients send it")
    cors: str = option(
        "", "origins whose pages may ask, comma-separated, as http://localhost:3000; *: all"
    )
    allowed_hosts: str = option(
        "",
        "further names that the server answers to, comma-separated, as behind a proxy; *: any. A "
        "request with the --api_key may use any, and so may all with another --host",
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
    trace: str = option("", "", flag=False)
    profile: str = option("", "", flag=False)

    def origins(self) -> list[str]:
        """Return the origins of --cors, as browsers write them. Raises: ValueError."""
        return [_origin(each) for each in self.cors.lower().split(",") if each.strip()]

    def hosts(self) -> list[str]:
        """Return the names of --allowed_hosts, without ports. Raises: ValueError."""
        return [_host(each) for each in self.allowed_hosts.lower().split(",") if each.strip()]

    def check(self) -> None:
        """Check every option, as one that can never match. Raises: ValueError."""
        super().check()
        self.origins()
        self.hosts()


def _origin(text: str) -> str:
    origin = text.strip().rstrip("/")
    if origin.startswith("http://"):
        origin = origin.removesuffix(":80")
    if origin.startswith("https://"):
        origin = origin.removesuffix(":443")
    rule = "scheme://host:port without a path, as http://localhost:3000, or * for all"
    require(ORIGIN.fullmatch(origin), f"--cors must have origins, {rule}; it has {origin}")
    return origin


def _host(text: str) -> str:
    host = re.sub(r"(?<=[\w\]]):\d+$", "", text.strip())
    rule = "names alone, as llm.example.org, IPv6 in brackets, or * for any"
    require(HOST.fullmatch(host), f"--allowed_hosts must have {rule}; it has {host}")
    return host


def main() -> None:
    """Run the command line. Mistakes that need only a header come before torch is imported."""
    config, given = parse_given(ServeConfig, "serve.py", ABOUT)
    with one_line_errors("serve.py"):
        config.check()
        for name in ("pydantic", "starlette", "uvicorn"):
            remedy = "pip install -r scripts/requirements-serve.txt"
            require(find_spec(name) is not None, f"{name} is missing; {remedy}")
        with_checked_files(config)
        read_grammar(config)
        app = load_part("server", "app")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a regular exit saves the measurements of --tree auto
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app.main(config, given)
