"""The endpoints that read texts and write none: embeddings, and what tokens a text has.

Embeddings are OpenAI's. `/tokenize` and `/detokenize` take and answer llama.cpp's form (`content`)
and vLLM's (`prompt`, or the messages of a chat).
"""

from __future__ import annotations

import base64
import struct
from functools import cached_property
from typing import Any

from drafts.logprobs import Logprob
from files.fetch import fetched
from options import log_note
from server.batcher import Delta, Drafts, Refusal, Scored
from server.parameters import RequestParams, RequestReader, need
from server.prompt_pass import Pooling, embedding, pooling_of, prompt_logprobs


class Readings:
    """Reads texts as the requests of one server have them."""

    def __init__(self, reader: RequestReader):
        self.reader = reader
        self.engine = reader.engine

    @cached_property
    def _pooling(self) -> Pooling:
        """The model's pooling. Raises: Refusal where it is not known."""
        try:
            return pooling_of(fetched(self.reader.config.checkpoint))
        except ValueError as error:
            log_note(f"embeddings are refused: {error}")  # with a path, which is no client's
            raise Refusal(400, "this model's pooling is not known here; see the terminal") from None

    def texts(self, body: Any) -> list[list[int]]:
        """Return the ids of the texts of a request for embeddings. Raises: Refusal."""
        ids = self.reader.read_texts(body)
        form = body.get("encoding_format") or "float"
        need(form in ("float", "base64"), "encoding_format must be float or base64")
        size = self.engine.target.config.dim
        fault = f"dimensions must be {size} here; leave it out"
        need(body.get("dimensions") in (None, size), fault, "dimensions")
        adds_eos = self._pooling.adds_eos
        return [text + list(self.engine.eos_ids[:1]) * adds_eos for text in ids]

    def vector(self, ids: list[int]) -> list[float]:
        """Return the embedding of a text. The decoding thread calls this."""
        return embedding(self.engine, ids, self._pooling.kind)

    def embeddings(self, body: dict, count: int, vectors: list[list[float]]) -> dict[str, Any]:
        """Return the answer to a request for embeddings. count: tokens of all texts"""
        in_base64 = body.get("encoding_format") == "base64"
        data = []
        for index, vector in enumerate(vectors):
            packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            told = packed if in_base64 else vector
            data.append({"object": "embedding", "index": index, "embedding": told})
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.reader.name, "usage": usage}

    def tokenize(self, body: Any) -> dict[str, Any]:
        """Return the tokens of a text of any length, or of a chat. Raises: Refusal."""
        given = dict(body) if isinstance(body, dict) else {}
        strings = given.pop("return_token_strs", False)
        if "messages" in given:
            (ids,) = self.reader.read(given, True).prompts
        else:
            name = "content" if "content" in given else "prompt"
            text = given.get(name)
            need(isinstance(text, str), f"{name} must be a text", name)
            bos = given.get("add_special_tokens", given.get("add_special", name == "prompt"))
            special = given.get("parse_special", True)
            ids = self.engine.tokenizer.encode(text, bos is True, special is True)
        if "content" in given:
            pieces = [{"id": id, "piece": self._name(id)} for id in ids]
            return {"tokens": pieces if given.get("with_pieces") is True else ids}
        names = [self._name(id) for id in ids] if strings is True else None
        counts = {"count": len(ids), "max_model_len": self.engine.context}
        return counts | {"tokens": ids, "token_strs": names}

    def detokenize(self, body: Any) -> dict[str, Any]:
        """Return the text of tokens, under llama.cpp's name and vLLM's. Raises: Refusal."""
        ids = body.get("tokens") if isinstance(body, dict) else None
        most = self.engine.target.config.vocab_size
        fits = isinstance(ids, list) and all(type(id) is int and 0 <= id < most for id in ids)
        need(fits, f"tokens must be a list of token ids, from 0 to {most - 1}", "tokens")
        text = b"".join(map(self.engine.tokenizer.name, ids)).decode("utf-8", "replace")
        return {"content": text, "prompt": text}

    def echoes(self, asked: RequestParams) -> list[Delta]:
        """Return the prompts of a request as the first pieces of its answers, or as all of them.

        The decoding thread calls this where log-probabilities are asked for.
        """
        pieces = []
        reason = None if asked.most else "length"
        for number, ids in enumerate(asked.prompts):
            stream = self.engine.tokenizer.stream(True)
            logprobs: list[Logprob | None] = []
            if asked.likeliest is not None:
                logprobs = prompt_logprobs(self.engine, ids, asked.likeliest)
            text = ""
            scored = []
            for id, logprob in zip(ids, logprobs):
                scored.append(Scored(id, len(text), logprob))
                text += stream.push([id])
            text = self.engine.tokenizer.decode(ids, True)
            drafts = Drafts(spans=(("", len(text), -1),))
            for sample in range(asked.samples):
                choice = number * asked.samples + sample
                pieces.append(Delta(choice, text, 0, reason, scored, drafts))
        return pieces

    def _name(self, id: int) -> str:
        return self.engine.tokenizer.name(id).decode("utf-8", "backslashreplace")
