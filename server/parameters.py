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
from files.io import LocalError
from files.jinja import words_as_text
from files.texts import NO_TEMPLATE
from files.thinking import Tags, closed, hidden_tags, opened_by
from options import log_note, require
from run.engine import Engine
from run.options import GenerateConfig, Sampling
from run.parsing import by_names
from run.prompts import ContextOverflow, answer_room, check_ids
from server.batcher import Refusal
from server.bodies import DRAWN, SHOWN, Body, Chat, Completion, as_whole, in_log, need, parsed
from server.call_forms import Form, form_of
from server.options import ServeConfig
from server.tool_calls import Tools, as_taken, read_tools

MOST_TOLD = 1000  # sets of ignored names that the log has told


def refusal(error: ValueError, param: str) -> Refusal:
    """Return the refusal for an error, without names of this machine's files and options."""
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else None
    message = error.plain if isinstance(error, LocalError) else str(error)
    return Refusal(400, message, param, code)


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
        engine = self.engine
        checkpoint = fetched(self.config.checkpoint)
        options = engine.config
        return chat_template(checkpoint, engine.tokenizer, options.chat, system, options.has_schema)

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
        sampling = self._sampling(asked)
        tools = self._tools(asked) if chat else None
        count = 1 if chat else len(asked.prompt)
        self._check_capacity(count * asked.n)  # before they are tokenized
        guide = self._grammar(asked, tools)
        try:
            if chat:
                prompts, thinks, dropped = self._of_chat(asked, tools, guide is not None)
            else:
                prompts, thinks, dropped = self._of_completion(asked)
            for ids in prompts:
                check_ids(ids, self.engine.target.config, self.engine.context)
        except ValueError as error:
            raise refusal(error, "messages" if chat else "prompt") from None
        stops = self.config.stop if asked.stop is None else asked.stop
        return RequestParams(
            asked,
            prompts,
            sampling,
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

    def _tell_ignored(self, names: frozenset[str]) -> None:
        """Name the parameters of a request that are not served, once for each set of them."""
        shown = in_log(names)
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
        try:
            config = replace(self.config, **by_names(GenerateConfig, given))
            config.check_request()
            self.engine.check_sampling(config.sampling)
        except ValueError as error:
            message = str(error).removeprefix("--")
            param = next((name for name in given if name in message), None)
            # messages end with the value, which may have any length
            raise Refusal(400, message[: 3 * SHOWN], param) from None
        return config.sampling

    def _most(self, asked: Body) -> int:
        """Return the tokens of an answer; 0, where a completion only echoes its prompt."""
        limit = self.engine.context
        most = min(self.config.max_new_tokens, limit)
        for name in ("max_tokens", "max_completion_tokens", "n_predict"):
            given = getattr(asked, name)
            need(given != 0 or asked.echo, f"{name} should be at least 1; it is 0", name)
            if given is not None:  # -1 is no bound, as in llama.cpp and LM Studio
                most = limit if given == -1 else min(given, limit)
        return most

    def _drafts(self, asked: Body, count: int) -> list[float]:
        """Read how many tokens a cycle of each prompt may draft; `count` prompts.

        The texts are the same.
        """
        bounds = asked.draft_tokens
        each = bounds if isinstance(bounds, list) else [bounds] * count
        fault = f"draft_tokens has {len(each)} values, and there are {count} prompts"
        need(len(each) == count, f"{fault}; give one for each", "draft_tokens")
        name = "draft" if bounds is None else "draft_tokens"
        limits = []
        for most in map(as_whole, each):
            fault = "draft = false drafts no tokens; leave draft_tokens out"
            need(asked.draft is not False or not most, fault, "draft")
            need(type(most) is not bool, "draft_tokens must be a number; use draft", name)
            try:
                limits.append(self.engine.draft_limit(0 if asked.draft is False else most, name))
            except ValueError as error:
                raise refusal(error, name) from None
        return limits

    def _tools(self, asked: Chat) -> Tools | None:
        """Read the tools that an answer may call."""
        try:
            if self.engine.template is not None:
                return read_tools(asked, lambda: self._form)
        except ValueError as error:
            raise refusal(error, "tools") from None
        return None

    def _grammar(self, asked: Body, tools: Tools | None) -> Any:
        """Compile the grammar that an answer must follow."""
        source: str | dict | None = asked.response_format
        name = "response_format"
        need(not source or not tools, f"{name} cannot go with tools; leave one out", name)
        try:
            if tools and tools.forced:
                name = "tools"
                source = tools.grammar()
            return None if source is None else self._compiled(json.dumps(source))
        except ValueError as error:
            raise refusal(error, name) from None

    @lru_cache(maxsize=64)  # noqa: B019  (one reader a server)
    def _compiled(self, source: str) -> Any:
        """Compile a grammar. source: a text in Lark or a schema, as JSON"""
        return compile_grammars(self.engine, json.loads(source), 1)[0]

    def _room(self, asked: Body) -> int:
        """Return the tokens of a prompt that leave room for an answer, as on the terminal."""
        return self.engine.context - answer_room(self._most(asked), self.engine.context)

    def _of_completion(self, asked: Completion) -> tuple[list[list[int]], None, int]:
        """Return the ids of the prompts, and how many of the first ones' are left out at most."""
        bos = asked.add_special_tokens and asked.add_bos_token
        prompts = []
        dropped = [0]
        for ids in asked.prompt:
            if isinstance(ids, str):
                ids = self.engine.tokenizer.encode(ids, bos=bos, special=True)
            fault = "prompt must be a text, a list of token ids, or a list of either"
            require(isinstance(ids, list) and all(type(id) is int for id in ids), fault)
            if asked.truncation == "auto":
                dropped.append(max(len(ids) - self._room(asked), 0))
            prompts.append(ids[dropped[-1] :])
        return prompts, None, max(dropped)

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
        tags = hidden_tags(self.engine.tokenizer)
        of_calls = tools.form.controls.values() if tools else ()
        return tags | ({*of_calls} - {*self.engine.eos_ids})

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
