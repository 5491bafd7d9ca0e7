"""Let OpenAI-compatible servers write the answers, in the place of a scheduler of our own.

1. `AnswerServers` takes requests and brings pieces as `run.scheduler.Scheduler` does, so one loop
   (generate_answers.py) has both. vLLM, SGLang, TensorRT-LLM, llama-server and ours are served.
2. A prompt goes to /v1/completions as token ids, as text where a server takes no ids
   (llama-cpp-python): so the server's own chat template does not matter.
3. Servers take turns. One that is away or overloaded is passed over; where all are, they are asked
   again after pauses. A killed run goes on with the prompts that have no line.
4. Token ids are those of the server, where it returns them (vLLM's `return_token_ids`). Elsewhere
   the text is encoded behind its prompt, and must have as many tokens as the server counted.
5. A wrong answer, of another model or tokenizer or broken off, has no line, and is counted.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from openai import (
    APIConnectionError,
    APIStatusError,
    AsyncOpenAI,
    InternalServerError,
    RateLimitError,
    Timeout,
)

from options import log_note, one_line
from run.engine import Engine
from run.scheduler import Piece, Request
from scripts.train.data import hashed

AWAY = (APIConnectionError, InternalServerError, RateLimitError)
PAUSES_S = (1, 2, 4, 8, 16, 32)  # between rounds over all servers, each of which was away
LONGEST_S = 3600.0  # of an answer, its wait in the server's queue included
LOOK_S = 1.0  # between looks at the clock of the run
WRONG = "wrong"  # `Request.reason` of an answer that is not to be used
TAKES_NO_IDS = (400, 422)


@dataclass
class Server:
    """A server. Requests are sent to it by its client."""

    url: str
    client: AsyncOpenAI
    takes_ids: bool | None = None  # as prompts; None: it was not met yet


class AnswerServers:
    """The requests that servers answer."""

    def __init__(self, urls: str, model: str, engine: Engine):
        """Meet the servers. urls: comma-separated; model: its name there; engine: of its texts

        Raises: ValueError where none can be reached, or one serves another model.
        """
        self.model = model
        self.engine = engine
        self.names = engine.tokenizer.token_bytes()
        self.end = engine.template.stop_ids(engine.tokenizer)[-1]  # behind an answer
        self.loop = asyncio.new_event_loop()
        self.asked: dict[asyncio.Task, Request] = {}
        self.turn = 0  # of the servers
        key = os.environ.get("OPENAI_API_KEY", "none")
        options = {"api_key": key, "max_retries": 0, "timeout": Timeout(LONGEST_S, connect=5)}
        clients = {url: AsyncOpenAI(base_url=url, **options) for url in urls.split(",")}
        self.servers = [Server(url, client) for url, client in clients.items()]
        for server in self.servers:
            try:
                self.loop.run_until_complete(self._meet(server))
            except AWAY as error:
                away = self._refusal(server.url, error)
                log_note(str(away))
        if all(server.takes_ids is None for server in self.servers):
            raise away

    async def _meet(self, server: Server) -> None:
        """Ask for the model, and whether prompts may be ids. Writes: the server's `takes_ids`.

        Raises: one of AWAY; ValueError for another model, or a server that refuses.
        """
        try:
            names = [model.id for model in (await server.client.models.list()).data]
            if self.model not in names:
                raise ValueError(
                    f"--answer_model: {server.url} serves {', '.join(names)}, and not {self.model}"
                )
            ids = self.engine.tokenizer.encode("A")
            await server.client.completions.create(model=self.model, prompt=ids, max_tokens=1)
            server.takes_ids = True
        except AWAY:
            raise
        except APIStatusError as error:
            if error.status_code not in TAKES_NO_IDS:
                raise self._refusal(server.url, error) from None
            server.takes_ids = False

    @staticmethod
    def _refusal(url: str, error: Exception) -> ValueError:
        return ValueError(f"--answers_from: {url} does not answer: {one_line(error)[:200]}")

    # --------------------------------------------------------------------------- as a scheduler

    def submit(self, request: Request) -> None:
        """Send a request to the server whose turn it is."""
        self.asked[self.loop.create_task(self._answer(request, self.turn))] = request
        self.turn += 1

    def step(self) -> list[Piece]:
        """Wait a moment for answers. Returns: those that came; their requests have ended.

        Raises: ValueError where no server answers any more, or one refuses a request.
        """
        waiting = asyncio.wait(self.asked, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        try:
            done, _ = self.loop.run_until_complete(waiting)
            answered = [task for task in done if not task.exception()]
            for task in answered or done:  # a failure waits until no answer is lost by it
                self._take(self.asked[task], task.result())
        except BaseException:
            self.close()
            raise
        return [Piece(self.asked[task], self.asked.pop(task).tokens, [], "") for task in answered]

    def close(self) -> None:
        """Drop what is not answered yet."""
        for task in self.asked:
            task.cancel()
        if self.asked:
            self.loop.run_until_complete(asyncio.wait(self.asked))
        self.asked.clear()

    # --------------------------------------------------------------------------- a request

    async def _answer(self, request: Request, turn: int) -> Any:
        """Return the completion of a request. turn: of the server that is asked first"""
        first = turn % len(self.servers)
        for pause_s in (*PAUSES_S, 0):
            for server in self.servers[first:] + self.servers[:first]:
                try:
                    if server.takes_ids is None:
                        await self._meet(server)
                    return await self._complete(server, request)
                except AWAY as error:
                    away = self._refusal(server.url, error)
                except APIStatusError as error:
                    raise self._refusal(server.url, error) from None
            await asyncio.sleep(pause_s)
        raise ValueError(f"{away}; the same command goes on once a server is there")

    async def _complete(self, server: Server, request: Request) -> Any:
        prompt: Any = request.prompt
        if not server.takes_ids:
            prompt = self.text_of(request.prompt)
            tokenizer = self.engine.tokenizer
            if tokenizer.adds_bos and request.prompt[0] == tokenizer.bos_id:  # so does the server
                prompt = prompt.removeprefix(self.names[tokenizer.bos_id].decode())
        # these would be the server's own, and a draw from less than the model's distribution
        whole = {"top_k": self.engine.tokenizer.vocab_size, "min_p": 0.0}
        return await server.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=request.limit,
            temperature=request.sampling.temperature,
            top_p=1.0,
            seed=hashed(str((request.seed, request.noise_id))) // 2,
            extra_body=whole | {"return_token_ids": True},
        )

    def text_of(self, ids: list[int]) -> str:
        """Return the text that is encoded to `ids`, names of control tokens included."""
        text = b"".join(self.names[i] for i in ids).decode(errors="replace")
        if self._encode(text) != ids:
            text = text.removeprefix(" ")  # sentencepiece puts one before a text
        return text

    def _encode(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text, bos=False, special=True)

    def _take(self, request: Request, answer: Any) -> None:
        """Take an answer. Writes: the request's tokens and reason, or its fault."""
        choice = answer.choices[0]
        ids = getattr(choice, "token_ids", None)
        is_told = True
        if ids is None:
            whole = self._encode(self.text_of(request.prompt) + choice.text)
            ids = whole[len(request.prompt) :]
            more = answer.usage.completion_tokens - len(ids)  # the end may count
            is_told = whole[: len(request.prompt)] == request.prompt and more in (0, 1)
        if answer.model != self.model:
            request.fault = "of another model"
        elif answer.usage.prompt_tokens != len(request.prompt):
            request.fault = "of another tokenizer"
        elif choice.finish_reason not in ("stop", "length"):
            request.fault = "broken off"
        elif not is_told:
            request.fault = "whose tokens its text does not tell"
        elif choice.finish_reason == "stop" and ids[-1:] != [self.end]:
            ids = [*ids, self.end]
        request.reason = WRONG if request.fault else choice.finish_reason
        request.tokens += ids
