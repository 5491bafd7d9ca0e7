"""Requests as jobs: prompts as tokens, the distribution, the grammar, the bounds of drafts.

The models of server/bodies.py check what a request alone tells. The rest needs the engine, or the
rules of the options of the command line.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from drafts.grammar import compile_grammars
from files.chat import chat_template
from files.fetch import fetched
from files.jinja import words_as_text
from files.texts import NO_TEMPLATE
from files.thinking import Tags, closed, hidden_tags, opened_by
from options import log_note, require
from run.engine import Engine
from run.options import GenerateConfig, Sampling
from run.parsing import by_names
from run.prompts import answer_room, check_ids
from server.batcher import Refusal
from server.bodies import DRAWN, SHOWN, Body, Chat, Completion, need, parsed, refusing
from server.call_forms import Form, form_of
from server.options import ServeConfig
from server.tool_calls import Tools, as_taken, read_tools

MOST_TOLD = 1000  # sets of ignored names that the log has told


def no_model(asked: Any, name: str) -> Refusal:
    """Return the refusal of a model name other than the served one."""
    return Refusal(404, f"there is no model {repr(asked)[:SHOWN]} here; this is {name}", "model")


class RequestParams(NamedTuple):
    """A checked request."""

    body: Body  # as it was sent
    prompts: list[list[int]]
    sampling: Sampling
    seed: int
    most: int  # tokens of an answer
    stops: list[str]
    guide: Any  # drafts.grammar.Grammar that the answers follow, or None
    tools: Tools | None
    draft_limits: list[float]  # drafted tokens of a cycle, of each prompt
    thinks: Tags | None  # of the thinking that the prompt opens
    shown: frozenset[int]  # control tokens that have a text: those of tags and calls
    dropped: int  # of the oldest messages of a chat or tokens of a prompt, for which is no room

    @property
    def chat(self) -> bool:
        """Return whether the answers are messages."""
        return isinstance(self.body, Chat)

    @property
    def choices(self) -> int:
        """The number of answers."""
        return len(self.prompts) * self.body.n


class RequestReader:
    """Reads and checks the JSON of requests."""

    def __init__(self, engine: Engine, config: ServeConfig, name: str):
        self.engine = engine
        self.config = config
        self.name = name
        self.told: set[str] = set()  # ignored names that the log has

    @lru_cache(maxsize=64)  # noqa: B019  (one reader a server)
    def _template(self, system: str | None) -> Any:
        checkpoint = fetched(self.config.checkpoint)
        options = self.engine.config
        tokenizer = self.engine.tokenizer
        return chat_template(checkpoint, tokenizer, options.chat, system, options.has_schema)

    @cached_property
    def _form(self) -> Form:
        """The form of tool calls. Raises: ValueError where the template knows none."""
        return form_of(self.engine.template, self.engine.tokenizer)

    def read(self, kind: type[Body], body: Any) -> RequestParams:
        """Check a request. kind: of its body. Raises: Refusal."""
        if isinstance(body, dict) and body.get("model") not in (None, self.name):
            raise no_model(body["model"], self.name)
        asked = parsed(kind, body)
        self._tell_ignored(asked.ignored)
        chat = isinstance(asked, Chat)
        count = 1 if chat else len(asked.prompt)
        self._check_capacity(count * asked.n)  # before they are tokenized
        tools = self._tools(asked) if chat else None
        guide = self._grammar(asked, tools)
        with refusing("messages" if chat else "prompt"):
            if chat:
                prompts, thinks, dropped = self._of_chat(asked, tools, guide is not None)
            else:
                prompts, dropped = self._of_completion(asked)
                thinks = None
            for ids in prompts:
                check_ids(ids, self.engine.target.config, self.engine.context)
        stops = self.config.stop if asked.stop is None else asked.stop
        return RequestParams(
            asked,
            prompts,
            self._sampling(asked),
            random.getrandbits(53) if asked.seed == DRAWN else asked.seed % 2**64,
            self._most(asked),
            [stop for stop in stops if stop],  # an empty one stops nothing
            guide,
            tools,
            self._drafts(asked, count),
            thinks,
            self._shown(chat, tools),
            dropped,
        )

    def _tell_ignored(self, names: set[str]) -> None:
        """Name the parts of a request that are not served, once for each set of them."""
        shown = ", ".join(sorted(names))[: 3 * SHOWN].encode("unicode_escape").decode()
        if names and shown not in self.told and len(self.told) < MOST_TOLD:
            self.told.add(shown)
            log_note(f"ignored in requests: {shown}")

    def _check_capacity(self, answers: int) -> None:
        most = self.config.max_waiting + self.config.batch_size
        fault = f"at most {most} answers may wait or run at once, and {answers} are asked for"
        need(answers <= most, f"{fault}; lower n, or send fewer prompts", "n")

    def _sampling(self, asked: Body) -> Sampling:
        """Read the parameters of the distribution; the server's own where they are missing."""
        own = self.config.sampling
        temperature = own.temperature if asked.temperature is None else asked.temperature
        fault = "do_sample = true needs a temperature above 0; raise it, or leave do_sample out"
        need(not asked.do_sample or temperature > 0, fault, "do_sample")
        given = asked.shaping | {"temperature": 0 if asked.do_sample is False else temperature}
        with refusing(*given):
            config = replace(self.config, **by_names(GenerateConfig, given))
            config.check_request()
            self.engine.check_sampling(config.sampling)
        return config.sampling

    def _most(self, asked: Body) -> int:
        """Return the tokens of an answer."""
        given = self.config.max_new_tokens if asked.max_tokens is None else asked.max_tokens
        return self.engine.context if given == -1 else min(given, self.engine.context)

    def _drafts(self, asked: Body, count: int) -> list[float]:
        """Read how many tokens a cycle of each prompt may draft; `count` prompts.

        The texts are the same.
        """
        fault = "draft = false drafts no tokens; leave draft_tokens out"
        need(asked.draft is not False or not asked.draft_tokens, fault, "draft")
        bounds = 0 if asked.draft is False else asked.draft_tokens
        each = bounds if isinstance(bounds, list) else [bounds] * count
        fault = f"draft_tokens has {len(each)} values, and there are {count} prompts"
        need(len(each) == count, f"{fault}; give one for each", "draft_tokens")
        name = "draft" if asked.draft is False else "draft_tokens"
        with refusing(name):
            return [self.engine.draft_limit(most, name) for most in each]

    def _tools(self, asked: Chat) -> Tools | None:
        """Read the tools that an answer may call."""
        with refusing("tools"):
            return read_tools(asked, lambda: self._form) if self.engine.template else None

    def _grammar(self, asked: Body, tools: Tools | None) -> Any:
        """Compile the grammar that an answer must follow."""
        source: str | dict | None = asked.response_format
        name = "response_format"
        need(not source or not tools, f"{name} cannot go with tools; leave one out", name)
        with refusing("tools" if tools else name):
            if tools and tools.forced:
                source = tools.grammar()
            return None if source is None else self._compiled(json.dumps(source))

    @lru_cache(maxsize=64)  # noqa: B019  (one reader a server)
    def _compiled(self, source: str) -> Any:
        """Compile a grammar. source: a text in Lark or a schema, as JSON"""
        return compile_grammars(self.engine, json.loads(source), 1)[0]

    def _room(self, asked: Body) -> int:
        """Return the tokens of a prompt that leave room for an answer, as on the terminal."""
        return self.engine.context - answer_room(self._most(asked), self.engine.context)

    def _of_completion(self, asked: Completion) -> tuple[list[list[int]], int]:
        """Return the ids of the prompts, and how many of the first ones' are left out at most."""
        bos = asked.add_special_tokens and asked.add_bos_token
        prompts = []
        dropped = [0]
        for ids in asked.prompt:
            if isinstance(ids, str):
                ids = self.engine.tokenizer.encode(ids, bos=bos, special=True)
            if asked.truncation == "auto":
                dropped.append(max(len(ids) - self._room(asked), 0))
            prompts.append(ids[dropped[-1] :])
        return prompts, max(dropped)

    def _of_chat(
        self, asked: Chat, tools: Tools | None, guided: bool
    ) -> tuple[list[list[int]], Tags | None, int]:
        """Return the ids of a chat, the thinking that it opens, and the turns that are left out."""
        for cut in asked.cuts:
            text = self._rendered(asked, cut, tools, guided)
            ids = self.engine.tokenizer.encode(text, self.engine.template.bos, True)
            if len(ids) <= self._room(asked):
                break
        return [ids], opened_by(text), cut

    def _shown(self, chat: bool, tools: Tools | None) -> frozenset[int]:
        """Return the control tokens that have a text in an answer."""
        if not chat:
            return frozenset()
        of_calls = tools.form.controls.values() if tools else ()
        return hidden_tags(self.engine.tokenizer) | ({*of_calls} - {*self.engine.eos_ids})

    def _rendered(self, asked: Chat, cut: int, tools: Tools | None, guided: bool) -> str:
        """Render a chat up to the answer: a system message or none, then what the template takes.

        cut: turns that are left out; guided: a grammar begins with the answer
        """
        engine = self.engine
        if engine.config.chat in (None, NO_TEMPLATE):
            raise ValueError("this model has no chat template here; ask for completions")
        messages = asked.conversation(cut)
        begun = messages.pop()["content"] if asked.continues else ""
        require(messages != [], "there is no message before the assistant's; send the user's, too")
        # a template without calls is refused
        if any("tool_calls" in message for message in messages):
            messages = as_taken(messages, self._form)
        messages = words_as_text(engine.tokenizer, messages)
        system = self.config.system
        if messages[0]["role"] == "system":
            system, *messages = messages[0]["content"], *messages[1:]
        given = tools and tools.given
        text = self._template(system).render_messages(messages, given, asked.variables)
        # a grammar leaves no room for thinking, and some templates do not know the variable
        if guided or begun or asked.variables.get("enable_thinking") is False:
            text = closed(text)
        text += begun
        return tools.form.forced(text) if tools and tools.forced else text
