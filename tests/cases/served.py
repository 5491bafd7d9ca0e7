"""A server in this process, its official client, and tools that a model may call."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from drafts.by_value import ByValue
from run.options import DEMO
from run.parsing import parse
from server import app as serve

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
PROMPT = "def read_lines(path):"
FLAGS = "--device cpu --compile --temperature 1 --chat vicuna --tree auto:4,4,12 --port 0"
FLAGS += " --batch_size 3 --max_new_tokens 400 --max_waiting 12 --max_body 20000"
ARGV = ["--checkpoint", DEMO, *FLAGS.split()]
COMPLETION, CHAT, RESPONSE = "/completions", "/chat/completions", "/responses"
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {"type": "object", "properties": {"name": {"enum": ["Rome", "Oslo"]}}, "required": ["name"]}
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": CITY | {"additionalProperties": False}},
}  # fmt: skip


def tool(name: str, **more: Any) -> dict:
    return {"type": "function", "function": {"name": name, "description": "A tool.", **more}}


TOOLS = [tool("weather", parameters=WEATHER), tool("now")]
NAMED = {"type": "function", "function": {"name": "weather"}}


def template_of(name: str) -> str:
    """Return a chat template: a published one, or a part of one that writes calls (calls/)."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


# a template that opens the thinking
OPENS = template_of("qwen2.5").replace(
    "assistant\\n' }}\n{%- endif %}", "assistant\\n<think>\\n' }}\n{%- endif %}"
)


def demo_with(root: Path, template: str) -> Path:
    """Write the demo and its head, with a chat template. Returns: the demo's folder."""
    for name in ("demo", "demo-eagle"):
        (root / name).mkdir()
        for file in (Path(DEMO).parent / name).iterdir():
            (root / name / file.name).symlink_to(file)
    (root / "demo" / "chat_template.jinja").write_text(template)
    return root / "demo"


def of_schema(schema: object) -> dict:
    """Return a `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def rows(names: str, table: list[tuple]) -> pytest.MarkDecorator:
    """Parametrize a test with rows; a test's name has the beginning of its row."""
    return pytest.mark.parametrize(names, table, ids=[str(row)[:90] for row in table])


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Running:
    """A server in a thread that drafts, whether it pays on this machine or not."""

    def __init__(self, *argv: str):
        config = parse(serve.ServeConfig, "serve.py", "", [*ARGV, *argv])
        config.check()
        self.socket = serve.listen(config)
        self.engine = replace(serve.load_engine(config), policy=ByValue())
        self.server = serve.Server(self.engine, config)
        self.batcher = self.server.batcher
        self.port = self.socket.getsockname()[1]
        self.uvicorn = serve.Listener(self.server.app(), self.batcher)
        self.status: int | None = None  # with which the process would exit
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        wait_for(lambda: self.uvicorn.started)

    def _run(self) -> None:
        try:
            self.uvicorn.run(sockets=[self.socket])
        except SystemExit as error:
            self.status = error.code

    def ask(self, kind: str = COMPLETION, stream: bool = False, **body: Any) -> Any:
        """Ask by the official client. body: fields as they are sent"""
        given = {"model": "demo", "stream": stream}
        if kind == RESPONSE:
            more = {"extra_body": {"seed": 3, "max_output_tokens": 24} | body}
            return self.client.responses.create(input=ASKED[0]["content"], **given, **more)
        more = {"extra_body": {"seed": 3, "max_tokens": 24} | body}
        if kind == CHAT:
            return self.client.chat.completions.create(messages=ASKED, **given, **more)
        return self.client.completions.create(prompt=PROMPT, **given, **more)

    def raw(self, body, path="/v1/completions", method="POST", kind="application/json"):
        """Send a request by hand. Returns: its status, its JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Content-Type": kind})
        response = connection.getresponse()
        found = json.loads(response.read())
        connection.close()
        return response.status, found

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.batcher.is_alive()
