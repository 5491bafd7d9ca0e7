"""The parameters of serve.py's requests, read and checked.

A parameter that is not served is refused by name, unless its value cannot change the answer.
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
from options import require
from run.engine import Engine
from run.options import GenerateConfig, Sampling
from run.parsing import MOST, by_names, check_kinds
from run.prompts import ContextOverflow, check_ids
from run.tree_paths import DraftLimit
from server.batcher import Refusal
from server.call_forms import Form, form_of
from server.options import ServeConfig
from server.tool_calls import Tools, as_taken, read_message, read_tools

ROLES = ("system", "developer", "user", "assistant", "tool")
SHOWN = 100  # characters of a request that a message repeats, at most
MOST_LIKELIEST = 20  # tokens beside each log-probability
MOST_STOPS = 256
DRAWN = -1  # a seed that is drawn, as in llama.cpp and vLLM
# parameters that change no answer, whatever their value: of the client, of storing and scheduling
WITHOUT_EFFECT = {
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "priority", "request_id", "cache_prompt", "cache_salt",
    "id_slot", "keep_alive", "ttl", "extra_headers", "return_progress", "timings_per_token",
    # of samplers that are off as long as these are the only ones named
    "dynatemp_exponent", "mirostat_eta", "mirostat_tau",
}  # fmt: skip
# parameters of other servers that are off where they are false or hold nothing
SWITCHES = {
    "audio", "ban_eos_token", "banned_tokens", "chat_template",
    "continue_final_message", "custom_params", "custom_token_bans", "documents",
    "dynamic_temperature", "early_stopping", "ebnf", "echo", "extra_body", "functions", "grammar",
    "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "ignore_eos", "images", "include_stop_str_in_output",
    "json_schema", "kv_transfer_params", "logits_processors", "lora", "lora_path",
    "mm_processor_kwargs", "negative_prompt", "no_stop_trim", "plugins", "post_sampling_probs",
    "prompt_logprobs", "raw", "reasoning_in_content", "regex", "response_fields",
    "return_hidden_states", "return_token_ids", "return_tokens", "return_tokens_as_token_ids",
    "stop_regex", "stop_token_ids", "structural_tag", "structured_outputs", "suffix",
    "temperature_last", "tools", "transforms", "use_beam_search", "vllm_xargs",
    "web_search_options",
}  # fmt: skip
NOTHING = (False, "", [], {})
# parameters of other servers that are not served, with the values that change nothing
NEUTRAL: dict[str, tuple] = dict.fromkeys(sorted(SWITCHES), NOTHING) | {
    "add_bos_token": (True,),  # of chats, whose templates write it
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # of chats: vLLM's default there
    "best_of": (1,),
    "detokenize": (True,),
    "dynatemp_range": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto", *NOTHING),  # without functions
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": (["text"],),
    "n_indent": (0,),
    "n_keep": (0,),
    "n_probs": (0, False),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "parallel_tool_calls": (False, True),  # and the other parameters of tools, in a completion
    "parse_tool_calls": (True,),
    "penalty_alpha": (0,),
    "reasoning_format": ("auto", "deepseek"),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (False, True),
    "stream_reasoning": (True,),
    "tfs_z": (1,),
    "tool_choice": ("none", "auto", *NOTHING),
    "top_a": (0,),
}
# why some are not
WHY = dict.fromkeys(
    ("mirostat", "mirostat_mode"),
    ", as it cuts by the surprise of all sampled tokens, which differs from node to node of a "
    "draft tree; use typical_p or min_p",
)
# of sampling, those that are read by the rules of the options of these names
SHAPING = {*Sampling._fields} - {"temperature", "top_k", "top_p", "min_p"} | {"repeat_penalty"}
# of these
WHOLE = {"repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_tokens"}
SERVED = SHAPING | {
    "model", "max_tokens", "max_completion_tokens", "n_predict", "temperature", "top_k", "top_p",
    "min_p", "n", "stream", "stream_options", "stop", "seed", "logprobs", "top_logprobs",
    "response_format", "draft", "draft_tokens", "trees", "do_sample",
}  # fmt: skip
OF_PROMPTS = {"add_special_tokens", "add_bos_token", "echo"}  # of completions
# of chats
OF_TEMPLATES = {
    "chat_template_kwargs", "reasoning_effort", "include_reasoning", "enable_thinking", "think",
    "continue_final_message", "add_generation_prompt",
}  # fmt: skip
# parts of a message
UNSERVED = {"image": "images are", "audio": "audio is", "video": "videos are", "file": "files are"}
# variables of a template that the server sets itself
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "self"}
OF_TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}  # of chats (tool_calls.py)


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
        body = self._checked(body)
        source = "messages" if chat else "prompt"
        self._check_names(body, {source} | (OF_TOOLS | OF_TEMPLATES if chat else OF_PROMPTS))
        sampling = self._sampling(body)
        options = body.get("stream_options", {})
        need(isinstance(options, dict), "stream_options must be an object", "stream_options")
        options = _without_nulls(options)
        most = self._most(body, chat)
        need(source in body, f"{source} is missing", source)
        tools = self._tools(body) if chat else None
        prompts = [body[source]]
        if not chat and _is_list_of_prompts(body[source]):
            prompts = body[source]
        capacity = self.config.max_waiting + self.config.batch_size
        samples = self._integer(body, "n", 1, 1, capacity)
        need(  # before they are tokenized
            len(prompts) * samples <= capacity,
            f"at most {capacity} answers may wait or run at once; lower n, or send fewer prompts",
            "n",
        )
        guide = self._grammar(body, tools)
        bos = not chat and self._adds_bos(body)
        thinks = None
        try:
            if chat:
                text = self._rendered(body, tools, guide is not None)
                thinks = opened_by(text)
                prompts = [self.engine.tokenizer.encode(text, self.engine.template.bos, True)]
            ids = [self._ids(prompt, bos) for prompt in prompts]
        except ValueError as error:
            raise refusal(error, source) from None
        return RequestParams(
            ids,
            samples,
            sampling,
            self._seed(body),
            most,
            self._likeliest(body, chat),
            self._stops(body),
            self._flag(body, "stream"),
            self._flag(options, "include_usage"),
            guide,
            tools,
            self._drafts(body, len(prompts)),
            self._flag(body, "trees"),
            thinks,
            self._flag(body, "include_reasoning", True),
            self._shown(chat, tools),
            not chat and self._flag(body, "echo"),
        )

    def _adds_bos(self, body: dict) -> bool:
        """Return whether a text begins with the model's BOS token, if it has one."""
        return all(self._flag(body, name, True) for name in ("add_special_tokens", "add_bos_token"))

    def _checked(self, body: Any) -> dict:
        """Return a request without its nulls. Raises: Refusal where it is for another model."""
        need(isinstance(body, dict), "the body must be a JSON object")
        body = _without_nulls(body)
        asked = body.get("model", self.name)
        if asked != self.name:
            raise no_model(asked, self.name)
        return body

    def _check_names(self, body: dict, own: set[str]) -> None:
        """Refuse parameters that are not served. own: names that only one endpoint serves"""
        for name, value in body.items():
            need(
                name in SERVED or name in own or _is_neutral(name, value),
                f"{name[:SHOWN]} = {json.dumps(value)[:SHOWN]} is not served{WHY.get(name, '')}; "
                "leave it out",
                name[:SHOWN],
            )

    def _sampling(self, body: dict) -> Sampling:
        """Read the parameters of the distribution; the server's own where they are missing."""
        own = self.config.sampling
        temperature = body.get("temperature", own.temperature)
        if not self._flag(body, "do_sample", True):
            temperature = 0
        need(
            _is_number(temperature) and (0 <= temperature <= 2 or temperature == own.temperature),
            f"temperature must be a number from 0 to 2; it is {json.dumps(temperature)[:SHOWN]}",
            "temperature",
        )
        top_p = body.get("top_p", own.top_p)
        need(
            _is_number(top_p) and 0 < top_p <= 1,
            f"top_p must be a number above 0, at most 1; it is {json.dumps(top_p)[:SHOWN]}",
            "top_p",
        )
        top_k = self._integer(body, "top_k", own.top_k, -1, MOST)  # -1: all, as vLLM has it
        min_p = body.get("min_p", own.min_p)
        need(
            _is_number(min_p) and 0 <= min_p <= 1,
            f"min_p must be a number from 0 to 1; it is {json.dumps(min_p)[:SHOWN]}",
            "min_p",
        )
        drawn = "do_sample" in body and body["do_sample"]
        fault = "do_sample = true needs a temperature above 0; raise it, or leave do_sample out"
        need(not drawn or temperature > 0, fault, "do_sample")
        own = {"temperature": temperature, "top_k": max(top_k, 0), "top_p": top_p, "min_p": min_p}
        config = replace(self.config, **own)
        try:
            config.check_acceptance()
        except ValueError as error:
            raise refusal(error, "temperature") from None
        return self._shaped(config, {name: body[name] for name in SHAPING & body.keys()})

    def _shaped(self, config: GenerateConfig, asked: dict) -> Sampling:
        """Read the parameters that have no rules of their own here. config: with the others"""
        form = 'logit_bias must be an object, as {"15043": -100}'
        need(isinstance(asked.get("logit_bias", {}), dict), form, "logit_bias")
        for name in WHOLE & asked.keys():
            asked[name] = _as_whole(asked[name])
        if asked.get("repeat_penalty") == asked.get("repetition_penalty"):
            asked.pop("repeat_penalty", None)  # the same under both names
        if "logit_bias" in asked:
            asked["logit_bias"] = {id: n for id, n in asked["logit_bias"].items() if n != 0}
        for name in ("bad_words", "allowed_token_ids"):
            if not asked.get(name, True):  # false, or an empty list
                asked[name] = []
        if isinstance(asked.get("allowed_token_ids"), list):
            ids = map(_as_whole, asked["allowed_token_ids"])
            asked["allowed_token_ids"] = ",".join(map(str, ids))
        try:
            config = replace(config, **by_names(GenerateConfig, asked))
            check_kinds(config)
            config.check_numbers()
            config.check_acceptance()
            self.engine.check_sampling(config.sampling)
        except ValueError as error:
            message = str(error).removeprefix("--set ").removeprefix("--")
            param = next((name for name in asked if name in message), None)
            # messages end with the value, which may have any length
            raise Refusal(400, message[: 3 * SHOWN], param) from None
        return config.sampling

    def _most(self, body: dict, chat: bool) -> int:
        """Read the tokens of an answer; 0, where a completion only echoes its prompt."""
        limit = self.engine.context
        least = 0 if not chat and self._flag(body, "echo") else 1
        most = min(self.config.max_new_tokens, limit)
        for name in ("max_tokens", "max_completion_tokens", "n_predict"):
            asked = _as_whole(body.get(name, most))
            # -1 is no bound, as in llama.cpp and LM Studio
            asked = limit if asked == -1 else self._integer({name: asked}, name, most, least, MOST)
            most = min(asked, limit)
        return most

    def _integer(self, body: dict, name: str, default: int, least: int, most: int) -> int:
        value = _as_whole(body.get(name, default))
        shown = json.dumps(body.get(name))[:SHOWN]
        need(
            type(value) is int and least <= value <= most,
            f"{name} must be a whole number from {least} to {most}; it is {shown}",
            name,
        )
        return value

    def _seed(self, body: dict) -> int:
        seed = self._integer(body, "seed", DRAWN, -(2**63), 2**64 - 1)
        if seed == DRAWN:
            return random.getrandbits(53)  # which every client of JSON can repeat
        return seed % 2**64

    def _flag(self, body: dict, name: str, default: bool = False) -> bool:
        value = body.get(name, default)
        need(type(value) is bool, f"{name} must be true or false", name)
        return value

    def _drafts(self, body: dict, count: int) -> list[DraftLimit]:
        """Read how many tokens a cycle of each prompt may draft, or by what tree; `count` prompts.

        The texts are the same.
        """
        asked = body.get("draft_tokens")
        each = asked if isinstance(asked, list) else [asked] * count
        fault = f"draft_tokens has {len(each)} values, and there are {count} prompts"
        need(len(each) == count, f"{fault}; give one for each", "draft_tokens")
        return [self._draft(body, _as_whole(most)) for most in each]

    def _draft(self, body: dict, most: Any) -> DraftLimit:
        """Read the bound of a prompt's drafts: a number of tokens, a tree, or None for any."""
        wanted = self._flag(body, "draft", most is None or most != 0)
        need(wanted or not most, "draft = false drafts no tokens; leave draft_tokens out", "draft")
        name = "draft_tokens" if "draft_tokens" in body else "draft"
        need(type(most) is not bool, "draft_tokens must be a number or a tree; use draft", name)
        try:
            return self.engine.draft_limit(most if wanted else 0, name)
        except ValueError as error:
            raise refusal(error, name) from None

    def _likeliest(self, body: dict, chat: bool) -> int | None:
        """Read how many tokens come beside each log-probability; None: no log-probabilities.

        A chat has a flag and a number, a completion the number alone.
        """
        if not chat:
            need(not body.get("top_logprobs"), "top_logprobs is for chats; set logprobs to it")
            if body.get("logprobs", False) is False:
                return None
            return self._integer(body, "logprobs", 0, 0, MOST_LIKELIEST)
        asked = self._flag(body, "logprobs")
        likeliest = self._integer(body, "top_logprobs", 0, 0, MOST_LIKELIEST)
        need(asked or not likeliest, "top_logprobs needs logprobs: true", "top_logprobs")
        return likeliest if asked else None

    def _stops(self, body: dict) -> list[str]:
        stops = body.get("stop", list(self.config.stop))
        if isinstance(stops, str):
            stops = [stops]
        fit = (
            isinstance(stops, list)
            and len(stops) <= MOST_STOPS
            and all(isinstance(s, str) and len(s) <= 256 for s in stops)
        )
        need(fit, f"stop must be at most {MOST_STOPS} texts of at most 256 characters", "stop")
        return [stop for stop in stops if stop]  # an empty one stops nothing

    def _variables(self, body: dict) -> dict:
        """Read the variables that the chat template gets beside the messages."""
        name = "chat_template_kwargs"
        variables = body.get(name, {})
        need(isinstance(variables, dict), f"{name} must be an object", name)
        taken = sorted(RESERVED & variables.keys())
        need(not taken, f"{name} cannot set {', '.join(taken)}; leave that out", name)
        if "reasoning_effort" in body:
            effort = body["reasoning_effort"]
            fault = "reasoning_effort must be a text"
            need(isinstance(effort, str), fault, "reasoning_effort")
            variables = {"reasoning_effort": effort} | variables
        for name in ("think", "enable_thinking"):  # ollama's name, and that of the templates
            if name in body:
                variables = {"enable_thinking": self._flag(body, name)} | variables
        return variables

    def _tools(self, body: dict) -> Tools | None:
        """Read the tools that an answer may call."""
        if not OF_TOOLS & body.keys() or self.engine.template is None:
            return None
        try:
            return read_tools(body, lambda: self._form)
        except ValueError as error:
            raise refusal(error, "tools") from None

    def _grammar(self, body: dict, tools: Tools | None) -> Any:
        """Compile the grammar that an answer must follow."""
        source: str | dict | None = None
        name = "response_format"
        try:
            if name in body:
                source = schema_of(body[name])
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
            special = self.config.control_tokens != "none"
            ids = engine.tokenizer.encode(prompt, bos=bos, special=special)
        elif isinstance(prompt, list):
            ids = list(map(_as_whole, prompt))
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

    def _rendered(self, body: dict, tools: Tools | None, guided: bool) -> str:
        """Render a chat up to the answer. guided: a grammar begins with it"""
        variables = self._variables(body)
        messages = _messages(body["messages"])
        begun = ""
        if self._continues(body, messages):
            begun = messages.pop()["content"]
        text = self._text(messages, tools, variables)
        # a grammar leaves no room for thinking, and some templates do not know the variable
        if guided or begun or variables.get("enable_thinking") is False:
            text = closed(text)
        text += begun
        return tools.form.forced(text) if tools and tools.forced else text

    def _continues(self, body: dict, messages: list[dict]) -> bool:
        """Return whether the answer goes on with the last message, which is the assistant's."""
        name = "continue_final_message"
        is_begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        continues = self._flag(body, name, is_begun)
        fault = f"{name} must be true where the assistant's message is the last one, and only there"
        need(continues == is_begun, fault, name)
        name = "add_generation_prompt"
        need(self._flag(body, name, True) or continues, f"{name} must be true here", name)
        return continues

    def _text(self, messages: list[dict], tools: Tools | None, variables: dict) -> str:
        """Render a chat: a system message or none, then an order the template takes."""
        engine = self.engine
        if engine.config.chat in (None, NO_TEMPLATE):
            raise ValueError("this model has no chat template here; ask for completions")
        require(messages != [], "there is no message before the assistant's; send the user's, too")
        # a template without calls is refused
        if any("tool_calls" in message for message in messages):
            messages = as_taken(messages, self._form)
        if self.config.control_tokens != "all":
            messages = words_as_text(engine.tokenizer, messages)
        system = self.config.system
        if messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        return self._template(system).render_messages(messages, tools and tools.given, variables)


def _as_whole(value: Any) -> Any:
    """Return a number with a point as a whole one where it is: 5.0 is 5, as JSON Schema has it."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a value of a parameter that is not served cannot change the answer."""
    if name in WITHOUT_EFFECT:
        return True
    neutral = NEUTRAL.get(name, ())
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


def _without_nulls(options: dict) -> dict:
    return {name: value for name, value in options.items() if value is not None}


def _is_list_of_prompts(prompt: Any) -> bool:
    """Return whether a list holds several prompts, and not the token ids of one."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return not any(type(_as_whole(part)) is int for part in prompt)


def _messages(messages: Any) -> list[dict]:
    """Return messages as templates take them."""
    require(isinstance(messages, list) and messages, "messages must be a list, with one at least")
    parsed: list[dict] = []
    for message in messages:
        parsed.append(_message(message, parsed))
    return parsed


def _message(message: Any, earlier: list[dict]) -> dict:
    """Return a message as templates take it. earlier: the messages before it"""
    if not isinstance(message, dict):
        message = {}
    message = _without_nulls(message)
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    calls = "tool_calls" in message
    content = message.get("content")
    if content is None and (calls or message.get("role") == "assistant"):
        content = ""  # calls or other fields are the answer
    if isinstance(content, list):
        content = _joined_parts(content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError("a message must have a role and a text as its content")
    role = message["role"]
    if calls or role == "tool":
        return read_message(message, content, earlier)
    if role not in ROLES:
        raise ValueError(f"a message's role must be one of {ROLES}; it is {role[:SHOWN]!r}")
    # other fields, as reasoning_content, are the template's
    return message | {"role": "system" if role == "developer" else role, "content": content}


def _joined_parts(parts: list) -> str | None:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        other = next((told for name, told in UNSERVED.items() if name in str(kind)), "")
        require(not other, f"{other} not served here; send text alone")
        if kind != "text":
            return None
        if not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts)
