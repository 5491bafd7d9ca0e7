"""The endpoints that read texts and write none: embeddings, and what tokens a text has.

Embeddings are OpenAI's. `/tokenize` and `/detokenize` take and answer llama.cpp's form (`content`)
and vLLM's (`prompt`, or the messages of a chat).
"""

from __future__ import annotations

import base64
import struct
from functools import cached_property
from typing import Any

from extras.logprobs import Logprob
from extras.prompt_pass import Pooling, embedding, pooling_of, prompt_logprobs
from hf.fetch import fetched
from server.batcher import Delta, Drafts, Scored
from server.parameters import RequestParams, RequestReader, need, refusal


class Readings:
    """Reads texts as the requests of one server have them."""

    def __init__(self, reader: RequestReader):
        self.reader = reader
        self.engine = reader.engine

    @cached_property
    def _pooling(self) -> Pooling:
        return pooling_of(fetched(self.reader.config.checkpoint))

    def texts(self, body: Any) -> list[list[int]]:
        """Return the ids of the texts of a request for embeddings. Raises: Refusal."""
        ids = self.reader.read_texts(body, "input", {"encoding_format", "dimensions"})
        form = body.get("encoding_format") or "float"
        need(form in ("float", "base64"), "encoding_format must be float or base64")
        size = self.engine.target.config.dim
        fault = f"dimensions must be {size} here; leave it out"
        need(body.get("dimensions") in (None, size), fault, "dimensions")
        try:
            adds_eos = self._pooling.adds_eos
        except ValueError as error:
            raise refusal(error, "model") from None
        return [text + list(self.engine.eos_ids[:1]) * adds_eos for text in ids]

    def embeddings(self, body: dict, texts: list[list[int]]) -> dict[str, Any]:
        """Return the answer to a request for embeddings. The decoding thread calls this."""
        data = []
        for index, ids in enumerate(texts):
            vector: Any = embedding(self.engine, ids, self._pooling.kind)
            if body.get("encoding_format") == "base64":
                vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
        count = sum(map(len, texts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.reader.name, "usage": usage}

    def tokenize(self, body: Any) -> dict[str, Any]:
        """Return the tokens of a text or a chat. Raises: Refusal."""
        reader = self.reader
        given = body if isinstance(body, dict) else {}
        if "content" in given:
            text = given["content"]
            need(isinstance(text, str), "content must be a text", "content")
            bos, special, names = (
                given.get(name, name == "parse_special") is True
                for name in ("add_special", "parse_special", "with_pieces")
            )
            ids = self.engine.tokenizer.encode(text, bos, special)
            pieces = [{"id": id, "piece": self._name(id)} for id in ids]
            return {"tokens": pieces if names else ids}
        strings = given.pop("return_token_strs", False)
        if "messages" in given:
            (ids,) = reader.read(body, True).prompts
        else:
            (ids,) = reader.read_texts(body, "prompt", {"add_special_tokens"})
        told = {"count": len(ids), "max_model_len": self.engine.context, "tokens": ids}
        return told | {"token_strs": [self._name(id) for id in ids] if strings else None}

    def detokenize(self, body: Any) -> dict[str, Any]:
        """Return the text of tokens, under llama.cpp's name and vLLM's. Raises: Refusal."""
        ids = body.get("tokens") if isinstance(body, dict) else None
        most = self.engine.target.config.vocab_size
        fits = isinstance(ids, list) and all(type(id) is int and 0 <= id < most for id in ids)
        need(fits, f"tokens must be a list of token ids, from 0 to {most - 1}", "tokens")
        text = b"".join(map(self.engine.tokenizer.name, ids)).decode("utf-8", "replace")
        return {"content": text, "prompt": text}

    def echoes(self, asked: RequestParams) -> list[Delta]:
        """Return the prompts of a request as the first pieces of its answers.

        The decoding thread calls this where log-probabilities are asked for.
        """
        pieces = []
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
                pieces.append(Delta(choice, text, 0, None, scored, drafts))
        return pieces

    def _name(self, id: int) -> str:
        return self.engine.tokenizer.name(id).decode("utf-8", "backslashreplace")
