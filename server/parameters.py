"""Requests, read and checked: prompts as tokens, the distribution, the grammar, the drafts.

The models of server/bodies.py check the names and kinds of a request. The rest needs the engine, or
the rules of the options of the command line.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from drafts.grammar import compile_grammars, schema_of
from files.chat import NO_TEMPLATE, chat_template, words_as_text
from files.fetch import fetched
from files.io import LocalError
from files.thinking import Tags, closed, hidden_tags, opened_by
from options import log_note, require
from run.engine import Engine
from run.options import GenerateConfig, Sampling
from run.parsing import by_names
from run.prompts import ContextOverflow, check_ids
from run.tree_paths import DraftLimit
from server.batcher import Refusal
from server.bodies import DRAWN, SHOWN, Body, Chat, Completion, as_whole, in_log, parsed
from server.call_forms import Form, form_of
from server.options import ServeConfig
from server.tool_calls import Tools, as_taken, read_messages, read_tools

# variables of a template that the server sets itself
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "self"}
MOST_TOLD = 1000  # sets of ignored names that the log has told


def need(holds: bool, message: str, param: str | None = None) -> None:
    """Check a condition of a request. Raises: Refusal with status 400."""
    if not holds:
        raise Refusal(400, message, param)


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

    prompts: list[list[int]]
    samples: int
    sampling: Sampling
    seed: int
    most: int  # tokens of an answer
    likeliest: int | None  # tokens beside each log-probability; None: no log-probabilities
    stops: list[str]
    stream: bool
    usage: bool  # a stream ends with the usage
    guide: Any  # drafts.grammar.Grammar that the answers follow, or None
    tools: Tools | None
    draft_limits: list[DraftLimit]  # of each prompt
    wants_trees: bool
    thinks: Tags | None  # of the thinking that the prompt opens
    tells_thinking: bool  # a chat's answer has its thinking
    shown: frozenset[int]  # control tokens that have a text: those of tags and calls
    echoes: bool  # a completion begins with its prompt

    @property
    def choices(self) -> int:
        """The number of answers."""
        return len(self.prompts) * self.samples


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

    def read(self, body: Any, chat: bool) -> RequestParams:
        """Check a request. Raises: Refusal."""
        if isinstance(body, dict) and body.get("model") not in (None, self.name):
            raise no_model(body["model"], self.name)
        asked = parsed(Chat if chat else Completion, body)
        self._tell_ignored(asked.ignored)
        sampling = self._sampling(asked)
        tools = self._tools(asked, body) if chat else None
        prompts = [] if chat else _prompts(asked.prompt)
        count = max(len(prompts), 1)
        self._check_capacity(count * asked.n)  # before they are tokenized
        guide = self._grammar(asked, tools)
        thinks = None
        source = "messages" if chat else "prompt"
        try:
            if chat:
                text = self._rendered(asked, tools, guide is not None)
                thinks = opened_by(text)
                prompts = [self.engine.tokenizer.encode(text, self.engine.template.bos, True)]
            bos = not chat and asked.add_special_tokens and asked.add_bos_token
            ids = [self._ids(prompt, bos) for prompt in prompts]
        except ValueError as error:
            raise refusal(error, source) from None
        stops = list(self.config.stop) if asked.stop is None else asked.stop
        return RequestParams(
            ids,
            asked.n,
            sampling,
            random.getrandbits(53) if asked.seed == DRAWN else asked.seed % 2**64,
            self._most(asked),
            asked.likeliest,
            [stop for stop in stops if stop],  # an empty one stops nothing
            asked.stream,
            asked.stream_options.include_usage,
            guide,
            tools,
            self._drafts(asked, count),
            asked.trees,
            thinks,
            not chat or asked.include_reasoning,
            self._shown(chat, tools),
            asked.echo,
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
        given = asked.shaping
        given["temperature"] = 0 if asked.do_sample is False else temperature
        if asked.top_k is not None:
            given["top_k"] = max(asked.top_k, 0)
        try:
            config = replace(self.config, **by_names(GenerateConfig, _as_options(given)))
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

    def _drafts(self, asked: Body, count: int) -> list[DraftLimit]:
        """Read how many tokens a cycle of each prompt may draft, or by what tree; `count` prompts.

        The texts are the same.
        """
        bounds = asked.draft_tokens
        each = bounds if isinstance(bounds, list) else [bounds] * count
        fault = f"draft_tokens has {len(each)} values, and there are {count} prompts"
        need(len(each) == count, f"{fault}; give one for each", "draft_tokens")
        return [self._draft(asked, as_whole(most)) for most in each]

    def _draft(self, asked: Body, most: Any) -> DraftLimit:
        """Read the bound of a prompt's drafts: a number of tokens, a tree, or None for any."""
        fault = "draft = false drafts no tokens; leave draft_tokens out"
        need(asked.draft is not False or not most, fault, "draft")
        name = "draft" if asked.draft_tokens is None else "draft_tokens"
        need(type(most) is not bool, "draft_tokens must be a number or a tree; use draft", name)
        try:
            return self.engine.draft_limit(0 if asked.draft is False else most, name)
        except ValueError as error:
            raise refusal(error, name) from None

    def _variables(self, asked: Chat) -> dict:
        """Return the variables that the chat template gets beside the messages."""
        name = "chat_template_kwargs"
        variables = asked.chat_template_kwargs
        taken = sorted(RESERVED & variables.keys())
        need(not taken, f"{name} cannot set {', '.join(taken)}; leave that out", name)
        thinks = asked.think if asked.enable_thinking is None else asked.enable_thinking
        named = {"reasoning_effort": asked.reasoning_effort, "enable_thinking": thinks}
        return {name: value for name, value in named.items() if value is not None} | variables

    def _tools(self, asked: Chat, body: dict) -> Tools | None:
        """Read the tools that an answer may call."""
        try:
            if self.engine.template is not None:
                return read_tools(asked, body.get("tools"), lambda: self._form)
        except ValueError as error:
            raise refusal(error, "tools") from None
        return None

    def _grammar(self, asked: Body, tools: Tools | None) -> Any:
        """Compile the grammar that an answer must follow."""
        source: str | dict | None = None
        name = "response_format"
        try:
            if asked.response_format is not None:
                source = schema_of(asked.response_format)
            need(not source or not tools, f"{name} cannot go with tools; leave one out", name)
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

    def _ids(self, prompt: Any, bos: bool) -> list[int]:
        """Return the ids of a prompt, a text or token ids. bos: a text begins with that token"""
        engine = self.engine
        ids = prompt
        if isinstance(prompt, str):
            ids = engine.tokenizer.encode(prompt, bos=bos, special=True)
        elif isinstance(prompt, list):
            ids = list(map(as_whole, prompt))
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise ValueError("prompt must be a text, a list of token ids, or a list of either")
        return check_ids(ids, engine.target.config, engine.context)

    def _shown(self, chat: bool, tools: Tools | None) -> frozenset[int]:
        """Return the control tokens that have a text in an answer."""
        if not chat:
            return frozenset()
        tags = hidden_tags(self.engine.tokenizer)
        of_calls = tools.form.controls.values() if tools else ()
        return tags | ({*of_calls} - {*self.engine.eos_ids})

    def _rendered(self, asked: Chat, tools: Tools | None, guided: bool) -> str:
        """Render a chat up to the answer. guided: a grammar begins with it"""
        variables = self._variables(asked)
        messages = read_messages(asked.messages)
        begun = ""
        if _continues(asked):
            begun = messages.pop()["content"]
        text = self._text(messages, tools, variables)
        # a grammar leaves no room for thinking, and some templates do not know the variable
        if guided or begun or variables.get("enable_thinking") is False:
            text = closed(text)
        text += begun
        return tools.form.forced(text) if tools and tools.forced else text

    def _text(self, messages: list[dict], tools: Tools | None, variables: dict) -> str:
        """Render a chat: a system message or none, then an order the template takes."""
        engine = self.engine
        if engine.config.chat in (None, NO_TEMPLATE):
            raise ValueError("this model has no chat template here; ask for completions")
        require(messages != [], "there is no message before the assistant's; send the user's, too")
        # a template without calls is refused
        if any("tool_calls" in message for message in messages):
            messages = as_taken(messages, self._form)
        messages = words_as_text(engine.tokenizer, messages)
        system = self.config.system
        if messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        return self._template(system).render_messages(messages, tools and tools.given, variables)


def _continues(asked: Chat) -> bool:
    """Return whether the answer goes on with the last message, which is the assistant's."""
    last = asked.messages[-1]
    is_begun = last.role == "assistant" and not last.tool_calls
    name = "continue_final_message"
    fault = f"{name} must be true where the assistant's message is the last one, and only there"
    need(asked.continue_final_message in (None, is_begun), fault, name)
    name = "add_generation_prompt"
    need(asked.add_generation_prompt or is_begun, f"{name} must be true here", name)
    return is_begun


def _as_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return parameters of sampling as the command line has them."""
    given = {name: as_whole(value) for name, value in given.items() if value is not None}
    if given.get("repeat_penalty") == given.get("repetition_penalty"):
        given.pop("repeat_penalty", None)  # the same under both names
    biases = given.get("logit_bias", {})
    need(isinstance(biases, dict), 'logit_bias must be an object, as {"15043": -100}', "logit_bias")
    given["logit_bias"] = {id: number for id, number in biases.items() if number != 0}
    for name in ("bad_words", "allowed_token_ids"):
        if not given.get(name, True):  # false, or an empty list
            given[name] = []
    if isinstance(given.get("allowed_token_ids"), list):
        ids = map(as_whole, given["allowed_token_ids"])
        given["allowed_token_ids"] = ",".join(map(str, ids))
    return given


def _prompts(prompt: Any) -> list:
    """Return the prompts of a request: one, a text or token ids, or a list of several."""
    if not isinstance(prompt, list) or not prompt:
        return [prompt]
    if any(type(as_whole(part)) is int for part in prompt):
        return [prompt]
    return prompt
