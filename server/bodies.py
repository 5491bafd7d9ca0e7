"""The JSON of requests, as models of pydantic: each name that is served, its kind and its range.

1. A field that is null is missing. A whole number may have a point (5.0), as JSON Schema has it; a
   text or a truth value is no number.
2. The parameters of sampling have the rules of the options of these names (run/options.py), so that
   a model only writes them as the command line does; a message's further fields are the template's.
3. Other names are ignored, and a line of the log has them. So are tools that are no functions, as
   web_search, which a server would run itself. Names of `UNSERVED` are refused where they hold
   anything, since the answer would be another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)

from drafts.grammar import schema_of
from files.io import LocalError
from options import require
from run.options import Sampling
from run.parsing import MOST
from run.prompts import ContextOverflow
from server.batcher import Refusal

SHOWN = 100  # characters of a request that a message repeats, at most
MOST_LIKELIEST = 20  # tokens beside each log-probability
MOST_STOPS = 256
DRAWN = -1  # a seed that is drawn, as in llama.cpp and vLLM
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")  # names of one parameter
THOUGHTS = ("thinking", "redacted_thinking")  # parts of a content that are no text of it
# parameters of other servers that ask for another answer
UNSERVED = {
    "audio", "echo", "functions", "grammar", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "ignore_eos", "json_schema", "logits_processors", "mirostat", "n_probs",
    "prompt_logprobs", "stop_token_ids", "structured_outputs", "suffix", "use_beam_search",
}  # fmt: skip
# those of sampling, with the name of llama.cpp for one of them
SHAPING = {*Sampling._fields} - {"temperature", "top_k"} | {"repeat_penalty"}
# variables of a template that the server sets itself
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "self"}


def need(holds: bool, message: str, param: str | None = None) -> None:
    """Check a condition of a request. Raises: Refusal with status 400."""
    if not holds:
        raise Refusal(400, message, param)


@contextmanager
def refusing(*params: str) -> Iterator[None]:
    """Refuse a request for a ValueError of the block, without names of this machine's files.

    params: of which one is wrong, that which the message names, or the first
    """
    try:
        yield
    except ValueError as error:
        message = error.plain if isinstance(error, LocalError) else str(error)
        code = "context_length_exceeded" if isinstance(error, ContextOverflow) else None
        param = next((name for name in params if name in message), params[0])
        # messages end with the value, which may have any length
        raise Refusal(400, message.removeprefix("--")[: 4 * SHOWN], param, code) from None


def as_whole(value: Any) -> Any:
    """Return a number with a point as a whole one where it is one."""
    return int(value) if type(value) is float and value.is_integer() else value


def without_nulls(value: Any) -> Any:
    """Return an object without the fields that are null; another value as it is."""
    if isinstance(value, dict):
        return {name: held for name, held in value.items() if held is not None}
    return value


def as_sent(value: Any, check: Callable[[Any], Any]) -> Any:
    """Return a value as it was sent, once it is checked."""
    check(value)
    return value


def text_of(content: Any) -> Any:
    """Return the text of a message's content, which may come in parts.

    Raises: ValueError for a part without a text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in THOUGHTS:
            continue
        text = part.get("refusal", part.get("text")) if kind else None
        fault = f"a part of type {str(kind)[:SHOWN]} is not served; send text alone"
        require(isinstance(text, str), fault)
        texts.append(text)
    return "".join(texts)


def arguments_of(value: Any) -> Any:
    """Return a call's arguments as an object, in the forms that models and clients write.

    A text is JSON, perhaps with line breaks as they are. Null, an empty text and an empty list, the
    empty object of some languages, are no arguments.
    Raises: ValueError for others.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value.strip() or "{}", strict=False)
        except (ValueError, RecursionError):
            value = ""
    if value is None or value == []:
        return {}
    require(isinstance(value, dict), "should be a JSON object")
    return value


def _of_an_object(schema: dict) -> dict:
    fault = "should be a JSON schema of type object"
    require(schema.get("type", "object") == "object", fault)
    return schema


def _not_reserved(variables: dict) -> dict:
    taken = sorted(RESERVED & variables.keys())
    require(not taken, f"cannot set {', '.join(taken)}; leave that out")
    return variables


def _listed(texts: Any) -> Any:
    return [texts] if isinstance(texts, str) else texts


def _not_zero(count: int) -> int:
    require(count != 0, "should be at least 1")
    return count


def _prompts(prompt: Any) -> list:
    """Return the prompts of a request: one, a text or token ids, or a list of several."""
    is_list = isinstance(prompt, list)
    is_ids = is_list and all(type(as_whole(id)) is int for id in prompt)
    prompts = prompt if is_list and not is_ids else [prompt]
    prompts = [[*map(as_whole, each)] if isinstance(each, list) else each for each in prompts]
    for each in prompts:
        is_ids = isinstance(each, list) and all(type(id) is int for id in each)
        fault = "must be a text, a list of token ids, or a list of either"
        require(isinstance(each, str) or is_ids, fault)
    return prompts


Whole = Annotated[int, BeforeValidator(as_whole)]
Likeliest = Annotated[Whole, Field(ge=0, le=MOST_LIKELIEST)]
Stop = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(pattern="^[A-Za-z0-9_.:/-]{1,128}$")]
Text = Annotated[str, BeforeValidator(text_of)]
Schema = Annotated[dict, AfterValidator(_of_an_object)]
Drafted = Whole | str | None


class Model(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return without_nulls(value)


class Called(Model):
    """The function of a call."""

    name: str
    arguments: Annotated[dict, BeforeValidator(arguments_of)] = {}


class Call(Model):
    """A call of an earlier answer."""

    id: str
    function: Called

    @model_validator(mode="before")
    @classmethod
    def _of_a_function(cls, value: Any) -> Any:
        """Return the call of a custom tool as that of a function, whose argument is its text."""
        custom = value.get("custom") if isinstance(value, dict) else None
        if not isinstance(custom, dict):
            return value
        called = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        return value | {"function": called}

    @property
    def as_taken(self) -> dict:
        """The call as templates take it."""
        called = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": called}


class Message(Model):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    reasoning_content: Text = ""
    refusal: Text = ""
    tool_calls: list[Call] = []
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _has_its_parts(self) -> Message:
        may_be_empty = self.role in ("assistant", "tool") or "content" in self.model_fields_set
        require(may_be_empty, "needs a text as its content")
        fault = "has tool_calls, which belong to an assistant message"
        require(self.role == "assistant" or not self.tool_calls, fault)
        return self

    @property
    def as_taken(self) -> dict:
        """The message as templates take it, with all its further fields."""
        given = self.model_dump(exclude_unset=True) | {"content": self.content or self.refusal}
        given.pop("tool_calls", None)
        if self.role == "developer":
            given["role"] = "system"
        if self.tool_calls:
            given["tool_calls"] = [call.as_taken for call in self.tool_calls]
            if given.get("reasoning_content") and not self.content:
                # its name in the templates of gpt-oss and LFM2.5; gpt-oss takes one text before it
                given = {"thinking": given["reasoning_content"]} | given
        return given


class Function(Model):
    """A function that may be called."""

    name: Name
    parameters: Schema = NOTHING


class Tool(Model):
    """A tool of a chat."""

    type: Literal["function"] = "function"
    function: Function


class StreamOptions(Model):
    """The options of a stream."""

    include_usage: bool = False


class Body(Model):
    """A request, in what completions and chats share."""

    # -1 is no bound, as in llama.cpp and LM Studio
    max_tokens: Annotated[Whole, Field(ge=-1, le=MOST), AfterValidator(_not_zero)] | None = Field(
        None, validation_alias=AliasChoices(*LIMITS)
    )
    n: Annotated[Whole, Field(ge=1)] = 1
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: Annotated[Whole | None, Field(ge=-1, le=MOST)] = None  # -1: all, as vLLM has it
    do_sample: bool | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**64 - 1)] = DRAWN
    stop: Annotated[list[Stop] | None, Field(max_length=MOST_STOPS), BeforeValidator(_listed)] = (
        None
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: Annotated[dict | None, BeforeValidator(schema_of)] = None  # its schema
    draft: bool | None = None
    draft_tokens: Drafted | list[Drafted] = None  # of each prompt
    trees: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def shaping(self) -> dict[str, Any]:
        """The parameters of sampling without rules here, as the command line has them."""
        extra = self.model_extra or {}
        given = {name: as_whole(value) for name, value in extra.items() if name in SHAPING}
        if given.get("repeat_penalty") == given.get("repetition_penalty"):
            given.pop("repeat_penalty", None)  # the same under both names
        is_object = isinstance(given.get("logit_bias", {}), dict)
        need(is_object, 'logit_bias must be an object, as {"15043": -100}', "logit_bias")
        if given.get("bad_words") is False:
            given["bad_words"] = []
        if isinstance(given.get("allowed_token_ids"), list):
            ids = map(as_whole, given["allowed_token_ids"])
            given["allowed_token_ids"] = ",".join(map(str, ids))
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)
        return given

    @property
    def ignored(self) -> set[str]:
        """The names that are not served."""
        return self.model_extra.keys() - SHAPING - UNSERVED - {"model", *LIMITS}


class Completion(Body):
    """A request for completions."""

    prompt: Annotated[list, BeforeValidator(_prompts)]
    add_special_tokens: bool = True
    add_bos_token: bool = True
    logprobs: Likeliest | Literal[False] | None = None

    @property
    def likeliest(self) -> int | None:
        """The tokens beside each log-probability; None: no log-probabilities."""
        return None if self.logprobs is False else self.logprobs


class Chat(Body):
    """A request for a chat's answers."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool], WrapValidator(as_sent)] = []
    left_out: set[str] = set()  # tools and items of an input that are no function or text
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Likeliest = 0
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_not_reserved)] = {}
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    # the second name is ollama's
    enable_thinking: bool | None = Field(
        None, validation_alias=AliasChoices("enable_thinking", "think")
    )
    continue_final_message: bool | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="before")
    @classmethod
    def _functions_alone(cls, body: dict) -> dict:
        """Put functions into the form of chats, also those of Responses; other tools are named."""
        if not isinstance(body.get("tools"), list):
            return body
        functions = []
        left_out = {*body.get("left_out", ())}
        for tool in body["tools"]:
            need(isinstance(tool, dict), "each of the tools must be an object", "tools")
            kind = tool.get("type", "function")
            if kind != "function":
                left_out.add(f"{str(kind)[:SHOWN]} (tools)")
            elif "function" in tool:
                functions.append(tool)
            else:
                inner = {name: held for name, held in tool.items() if name != "type"}
                functions.append({"type": "function", "function": inner})
        return body | {"tools": functions, "left_out": left_out}

    @model_validator(mode="after")
    def _fits_together(self) -> Chat:
        asks = self.logprobs or not self.top_logprobs
        need(asks, "top_logprobs needs logprobs: true", "top_logprobs")
        name = "continue_final_message"
        fault = f"{name} must be true where the assistant's message is the last one, and only there"
        need(getattr(self, name) in (None, self.continues), fault, name)
        name = "add_generation_prompt"
        need(getattr(self, name) or self.continues, f"{name} must be true here", name)
        return self

    @property
    def ignored(self) -> set[str]:
        """The names that are not served, and the types of tools."""
        return super().ignored | self.left_out

    @property
    def continues(self) -> bool:
        """Return whether the answer goes on with the last message, which is the assistant's."""
        return self.messages[-1].role == "assistant" and not self.messages[-1].tool_calls

    @property
    def likeliest(self) -> int | None:
        """The tokens beside each log-probability; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def cuts(self) -> list[int]:
        """How many of the oldest turns may be left out: none, or those before a user's."""
        first = self.messages[0].role in ("system", "developer")
        begins = [i for i, turn in enumerate(self.messages[first:]) if turn.role == "user"]
        return sorted({0, *begins}) if self.truncation == "auto" else [0]

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that the chat template gets beside the messages."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        return without_nulls(named) | self.chat_template_kwargs

    def conversation(self, cut: int = 0) -> list[dict]:
        """Return the messages as templates take them: the system's at the start as one.

        cut: of `cuts`
        Raises: Refusal for a result without its call.
        """
        read: list[dict] = []
        names = {}  # of the calls so far, by their ids
        first = self.messages[0].role in ("system", "developer")
        for message in self.messages[:first] + self.messages[first + cut :]:
            given = message.as_taken
            if message.role == "tool":
                fault = "a tool message must have the tool_call_id of a call before it"
                need(message.tool_call_id in names, fault, "messages")
                given["name"] = names[message.tool_call_id]
            names |= {call.id: call.function.name for call in message.tool_calls}
            if given["role"] == "system" and len(read) == 1 and read[0]["role"] == "system":
                read[0]["content"] += "\n\n" + given["content"]
            else:
                read.append(given)
        return read


def parsed(kind: type[Body], body: Any) -> Any:
    """Return a request as a model. Raises: Refusal with the rule that it breaks, and the value."""
    need(isinstance(body, dict), "the body must be a JSON object")
    for name in sorted(UNSERVED & body.keys()):
        need(not body[name], f"{name} = {_shown(body[name])} is not served; leave it out", name)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    param = str(first["loc"][0])
    need(first["type"] != "missing", f"{where} is missing", param)
    rule = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    rule = rule.removeprefix(f"{where} ")
    raise Refusal(400, f"{where} {rule}; it is {_shown(first['input'])}", param)


def _shown(value: Any) -> str:
    return json.dumps(value)[:SHOWN]
