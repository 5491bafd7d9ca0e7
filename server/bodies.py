"""The JSON of requests, as models of pydantic: each name that is served, its kind and its range.

1. A field that is null is missing. A whole number may have a point (5.0), as JSON Schema has it; a
   text or a truth value is no number.
2. The parameters of sampling have the rules of the options of these names (run/options.py), so that
   a model leaves them to `RequestReader`; a message's further fields are the chat template's.
3. Other names are ignored, and a line of the log has them. Those of `UNSERVED` are refused where
   they hold anything, since the answer would be another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from run.options import Sampling
from run.parsing import MOST
from server.batcher import Refusal

SHOWN = 100  # characters of a request that a message repeats, at most
MOST_LIKELIEST = 20  # tokens beside each log-probability
MOST_STOPS = 256
MOST_TOOLS = 128  # as OpenAI's
DRAWN = -1  # a seed that is drawn, as in llama.cpp and vLLM
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
# parameters of other servers that ask for another answer
UNSERVED = {
    "audio", "functions", "grammar", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "ignore_eos", "json_schema", "logits_processors", "mirostat", "n_probs",
    "prompt_logprobs", "stop_token_ids", "structured_outputs", "suffix", "use_beam_search",
}  # fmt: skip
# those of sampling, with the name of llama.cpp for one of them
SHAPING = {*Sampling._fields} - {"temperature", "top_k"} | {"repeat_penalty"}


def as_whole(value: Any) -> Any:
    """Return a number with a point as a whole one where it is one."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value


def without_nulls(value: Any) -> Any:
    """Return an object without the fields that are null; another value as it is."""
    if isinstance(value, dict):
        return {name: held for name, held in value.items() if held is not None}
    return value


def in_log(names: Iterable[str]) -> str:
    """Return names of a request for a line of the log: not all, and no control characters."""
    return ", ".join(sorted(names))[: 3 * SHOWN].encode("unicode_escape").decode()


def text_of(content: Any) -> Any:
    """Return the text of a message's content, which may come in parts.

    Raises: ValueError for a part without a text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if not isinstance(text, str):
            raise ValueError(f"a part of type {str(kind)[:SHOWN]} is not served; send text alone")
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
    if not isinstance(value, dict):
        raise ValueError("should be a JSON object")
    return value


Whole = Annotated[int, BeforeValidator(as_whole)]
Tokens = Annotated[Whole | None, Field(ge=-1, le=MOST)]
Likeliest = Annotated[Whole, Field(ge=0, le=MOST_LIKELIEST)]
Stop = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]


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


class Message(Model):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(text_of)] = ""
    tool_calls: list[Call] = []
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _has_its_parts(self) -> Message:
        if self.role != "assistant":
            if "content" not in self.model_fields_set:
                raise ValueError("needs a text as its content")
            if self.tool_calls:
                raise ValueError("has tool_calls, which belong to an assistant message")
        return self


class Function(Model):
    """A function that may be called."""

    name: Name
    parameters: dict = NOTHING

    @field_validator("parameters")
    @classmethod
    def _is_of_an_object(cls, schema: dict) -> dict:
        if schema.get("type", "object") != "object":
            raise ValueError("should be a JSON schema of type object")
        return schema


class Tool(Model):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class StreamOptions(Model):
    """The options of a stream."""

    include_usage: bool = False


class Body(Model):
    """A request, in what completions and chats share."""

    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    n_predict: Tokens = None
    n: Annotated[Whole, Field(ge=1)] = 1
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: Annotated[Whole | None, Field(ge=-1, le=MOST)] = None  # -1: all, as vLLM has it
    do_sample: bool | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**64 - 1)] = DRAWN
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: Any = None
    draft: bool | None = None
    draft_tokens: Any = None
    trees: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def shaping(self) -> dict[str, Any]:
        """The parameters of sampling without rules here."""
        return {name: value for name, value in self.model_extra.items() if name in SHAPING}

    @property
    def ignored(self) -> frozenset[str]:
        """The names that are not served."""
        return frozenset(self.model_extra.keys() - SHAPING - UNSERVED - {"model"})


class Completion(Body):
    """A request for completions."""

    prompt: Any
    echo: bool = False
    add_special_tokens: bool = True
    add_bos_token: bool = True
    logprobs: Likeliest | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_flag(cls, asked: Any) -> Any:
        return None if asked is False else asked

    @property
    def likeliest(self) -> int | None:
        """The tokens beside each log-probability; None: no log-probabilities."""
        return self.logprobs


class Chat(Body):
    """A request for a chat's answers."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Likeliest = 0
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    enable_thinking: bool | None = None
    think: bool | None = None  # ollama's name of it
    continue_final_message: bool | None = None
    add_generation_prompt: bool = True
    echo: Literal[False] = False

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return self

    @property
    def likeliest(self) -> int | None:
        """The tokens beside each log-probability; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


def parsed(kind: type[Body], body: Any) -> Any:
    """Return a request as a model. Raises: Refusal with the rule that it breaks, and the value."""
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    for name in sorted(UNSERVED & body.keys()):
        if body[name]:
            shown = json.dumps(body[name])[:SHOWN]
            raise Refusal(400, f"{name} = {shown} is not served; leave it out", name)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False)[0]
    param = str(first["loc"][0])
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return Refusal(400, f"{where} is missing", param)
    rule = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    shown = json.dumps(first["input"])[:SHOWN]
    return Refusal(400, f"{where} {rule}; it is {shown}", param)
