"""The forms in which models write calls of tools, learned from their chat templates.

`form_of` renders a probe, whose text fits one row of the table `FORMS`:

1. object: JSON with the name and the arguments (Qwen2.5, Llama 3, Hermes, SmolLM3).
2. json: the name, then the arguments in JSON (Mistral, gpt-oss, DeepSeek).
3. tags: keys and values between tags, texts as they are (Qwen3-Coder, Qwen3.5, GLM-4.5, MiniMax,
   Seed-OSS).
4. pairs: name{key:value} (Gemma 4) or [name(key=value)] (LFM2, LFM2.5).

A form reads calls from a text that may go on, with other white space than the template's between
their parts, and gives the grammar of a forced one. Not here: templates that write ids (Kimi-K2).
Sources: published chat templates; the parsers of vLLM and llama.cpp for what models write beside.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from drafts.grammar import STYLE, without_formats
from files.jinja import ChatTemplate
from files.thinking import FINAL, behind_thinking, without_opening
from files.tokenizer import Tokenizer
from options import require
from server.bodies import NOTHING

PROBE = "probe_of_a_tool"
ANOTHER_PROBE = "probe_of_another_tool"
ARGUMENTS = {"key_of_probe": "text of probe", "other_key": "other text"}  # sorted by their keys
JSON = r'\{\s*"key_of_probe":\s*"text of probe",\s*"other_key":\s*"other text"\s*\}'
# the text of the probe's call, by the kind of its form; the groups are fields of `Form`
FORMS = {
    "object": rf'(?P<opening>[^{{]*)\{{[^{{}}]*"name":\s*"{PROBE}",[^{{}}]*"(?P<key>\w+)":\s*{JSON}'
    r"[^{}]*\}(?P<closing>.*)",
    "json": rf"(?P<opening>.*?){PROBE}(?P<middle>.*?){JSON}(?P<closing>.*)",
    "tags": rf"(?P<opening>.*?){PROBE}(?P<begin>.*?)(?P<key><[^<]*?)key_of_probe(?P<middle>.+?)"
    r"text of probe(?P<end>.+?)(?P<gap>\s*)(?P=key)other_key(?P=middle)other text(?P=end)"
    r"(?P<closing>.*<.*)",
    "pairs": rf"(?P<opening>.*?){PROBE}[{{(]key_of_probe(?P<middle>[:=]).*[}})](?P<closing>.*)",
}
FENCE = "```"
KEYS = ("arguments", "parameters")  # of a JSON call that is not in the template's form
OF_A_CALL = {"name", "type", "id"}  # its other keys
RECIPIENT = "to=functions."  # of harmony: before a name
CHANNELS = ("<|channel|>commentary ", "<|channel|>analysis ")  # that it may stand in
CONSTRAIN = "<|constrain|>"  # of harmony: a control token that the model alone writes
QUOTE = '<|"|>'  # of Gemma 4: around a text
BRACKETS = {":": "{}", "=": "()"}  # around pairs, by what stands between key and value
COMPOSED = {"$ref", "allOf", "anyOf", "oneOf"}  # keys of a schema with properties elsewhere
DEEPEST = 8  # references that are followed to find a type

SPACE = re.compile(r"\s*")
SEPARATOR = re.compile(r"[\s,]*")
# a text in quotes, perhaps with quotes that end nothing; another word
QUOTED = re.compile(r"""(['"])(?:[^\\]|\\.)*?\1(?=\s*[,)\]}])""", re.DOTALL)
BARE = re.compile(r"""[^\s,)\]}'"][^,)\]}]*(?=[,)\]}])""")


class Cursor:
    """A place in a text that may go on.

    Its methods read what comes next. They raise EOFError where the text ends before that is
    certain, and ValueError where it is something else.
    """

    def __init__(self, text: str, at: int = 0, ended: bool = False):
        """ended: nothing follows, and the model itself ended the text there"""
        self.text = text
        self.at = at
        self.ended = ended

    def take(self, *marks: str) -> str:
        """Read one of some marks, and white space before it."""
        begin = SPACE.match(self.text, self.at).end()
        for mark in sorted(marks, key=len, reverse=True):
            found = self.text[begin : begin + len(mark)]
            if found == mark:
                self.at = begin + len(mark)
                return mark
            if mark.startswith(found):
                raise EOFError
        raise ValueError

    def passes(self, mark: str) -> bool:
        """Return whether a mark comes next, behind white space and commas, which it reads."""
        self.at = SEPARATOR.match(self.text, self.at).end()
        try:
            return self.take(mark) == mark
        except ValueError:
            return False

    def up_to(self, mark: str) -> str:
        """Read a text and the mark that ends it. Returns: the text"""
        end = self.text.find(mark, self.at)
        if end < 0:
            raise EOFError
        text = self.text[self.at : end]
        self.at = end + len(mark)
        return text

    def match(self, pattern: re.Pattern) -> str:
        """Read a text that matches a pattern."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise EOFError
        self.at = found.end()
        return found[0]

    def json(self) -> Any:
        """Read a JSON object, in whose texts line breaks may be as they are.

        Models that write files write them so.
        """
        self.take("{")
        try:
            value, self.at = json.JSONDecoder(strict=False).raw_decode(self.text, self.at - 1)
        except (ValueError, RecursionError):
            raise EOFError from None
        return value


# ----------------------------------------------------------------------------------- the form


@dataclass(frozen=True, kw_only=True)
class Form:
    """The text of a call: an opening, what its kind has within, and a closing."""

    kind: str
    opening: str
    closing: str
    key: str = ""  # object: of the arguments; tags: before a key
    middle: str = ""  # json: between name and arguments; tags and pairs: between key and value
    begin: str = ""  # tags: behind the name
    end: str = ""  # tags: behind a value
    gap: str = ""  # tags: between an end and a key
    controls: dict[str, int] = field(default_factory=dict)  # control tokens in it -> their ids
    several: bool = True  # a message may have several calls
    takes_text: bool = False  # the template takes arguments as a text in JSON
    drops: bool = False  # the template drops calls; they are written into the content

    @cached_property
    def tags(self) -> list[str]:
        """The tags before the name; a model may leave some out, or the prompt ends with them."""
        opening = behind_thinking(self.opening)
        if self.kind == "object":
            return [tag for tag in [opening.strip().rstrip("[").rstrip()] if tag]
        if not opening.endswith(RECIPIENT):
            return _tags(opening)
        bare = RECIPIENT.removesuffix("functions.")
        return [RECIPIENT, *(each + to for each in CHANNELS for to in (RECIPIENT, bare))]

    @property
    def marks(self) -> list[str]:
        """The texts that announce a call; none: it is at the beginning of an answer."""
        return [FENCE, *self.tags] if self.kind == "object" else self.tags

    @property
    def follows(self) -> str:
        """The characters that begin a further call without its opening."""
        return "{[" if self.kind == "object" else ""

    @cached_property
    def ends(self) -> list[str]:
        """The tags behind a call, and the empty text."""
        if self.kind != "object":
            return ["", *_tags(self.closing)]
        end = self.closing.strip().lstrip("]").lstrip()
        return ["", FENCE, *([end] if end else [])]

    @cached_property
    def tail(self) -> re.Pattern:
        """The text behind a call that belongs to it."""
        between = r"[\s,;\]]" if self.kind == "object" else r"\s"
        return re.compile(f"(?:{'|'.join([between, *map(re.escape, self.ends[1:])])})*")

    def read(
        self, text: str, tools: dict[str, dict], ended: bool = False
    ) -> tuple[list[tuple[str, Any]], int]:
        """Read the calls at the beginning of a text.

        tools: the schema of the arguments, by the tool's name
        ended: the model ended the text
        Returns: names and arguments; the place behind them
        Raises: EOFError where the text ends before a call does, ValueError where it is none.
        """
        place = Cursor(text, ended=ended)
        calls = []
        another = True
        while another:
            calls.append(READERS[self.kind](self, place, tools))
            in_list = self.kind == "pairs" and self.opening.endswith("[")
            another = in_list and place.take(",", "]") == ","
        return calls, place.at

    def rules(self, call: str, name: str, schema: dict) -> list[str]:
        """Return the grammar of a call behind its opening, in Lark.

        call: the rule's name
        Raises: ValueError for a form or a schema that has none.
        """
        fault = "the model's chat template writes calls in a form that cannot be forced"
        require(self.kind != "pairs", f"{fault}; use tool_choice auto")
        if self.kind == "tags":
            return _tag_rules(self, call, name, schema)
        begin = self.lark(name + self.middle)
        end = ""
        if self.kind == "object":
            begin = self.lark(f'{{"name": "{name}", "{self.key}": ')
            end = ' "}"'
        return [f"{call}: {begin} {call}_json{end}", _json_rule(f"{call}_json", schema)]

    def forced(self, prompt: str) -> str:
        """Return a prompt whose answer goes on with a call. prompt: without open thinking"""
        prompt = prompt.removesuffix(FINAL)
        if behind_thinking(prompt).strip():
            return prompt + self.opening
        return prompt + behind_thinking(self.opening).lstrip("\n")

    def written(self, calls: list[dict]) -> str:
        """Return the text of earlier calls, as Python has it: of pairs."""
        texts = []
        for call in calls:
            function = call["function"]
            pairs = [f"{key}{self.middle}{value!r}" for key, value in function["arguments"].items()]
            texts.append(f"{function['name']}({', '.join(pairs)})")
        return f"{self.opening}{', '.join(texts)}{self.closing}"

    def lark(self, text: str) -> str:
        """Return a text in Lark, its control tokens by their ids."""
        parts = [text]
        if self.controls:
            parts = re.split(f"({'|'.join(map(re.escape, self.controls))})", text)
        return " ".join(
            f"<[{self.controls[part]}]>" if part in self.controls else _literal(part)
            for part in parts
            if part
        )


LFM2 = Form(
    kind="pairs",
    opening="<|tool_call_start|>[",
    middle="=",
    closing="]<|tool_call_end|>",
    drops=True,
)


# ------------------------------------------------------------------------------ reading, by kind


def _name(form: Form, place: Cursor, tools: Iterable[str]) -> str:
    """Read tags, and the name behind them."""
    found = place.take(*form.tags, *tools)
    while found in form.tags:
        found = place.take(*form.tags, *tools)
    return found


def _read_object(form: Form, place: Cursor, tools: dict[str, dict]) -> tuple[str, Any]:
    """Read an object, perhaps in a fenced block; its opening may be missing."""
    mark = re.escape("".join(form.tags))
    place.match(re.compile(rf"\s*(?:{mark})?\s*(?:{FENCE}\w*)?[\s\[]*"))
    if FENCE.startswith(place.text[place.at :]):
        raise EOFError
    value = place.json()
    keys = [key for key in (form.key, *KEYS) if key in value]
    require(keys or not value.keys() - OF_A_CALL, "another object with a name")
    return value.get("name"), value[keys[0]] if keys else None


def _read_json(form: Form, place: Cursor, tools: dict[str, dict]) -> tuple[str, Any]:
    """Read a name and an object. An id or a type may stand before the last tag between them."""
    name = _name(form, place, tools)
    for mark in _tags(form.middle)[-1:]:
        require(not re.match(r"[\w-]", place.up_to(mark)), "a longer name")
    if place.ended and not place.text[place.at :].strip():
        return name, None  # a call without arguments
    return name, place.json()


def _read_tags(form: Form, place: Cursor, tools: dict[str, dict]) -> tuple[str, Any]:
    """Read a name, and keys and values between tags."""
    name = _name(form, place, tools)
    for tag in _tags(form.begin):
        place.take(tag)
    schema = tools[name]
    properties = _dict(schema.get("properties"))
    arguments = {}
    behind_key, *more = _tags(form.middle)
    tag = place.take(form.key, form.ends[1])
    while tag == form.key:
        key = place.up_to(behind_key).strip()
        for each in more:
            place.take(each)
        value, tag = _tagged(form, place, properties)
        arguments[key] = _typed(value, _types(properties.get(key), schema))
    return name, arguments


def _tagged(form: Form, place: Cursor, keys: Iterable[str]) -> tuple[str, str]:
    """Read a value, its end and the next tag; an end that no tag follows is of the value.

    A value without an end goes up to the tag of a further key, or to the end of the call.
    Returns: the value without the template's own white space around it; the tag
    """
    text = place.text
    begin = place.at
    end = form.end.lstrip()
    names = "|".join(map(re.escape, keys)) or "(?!)"
    further = re.compile(rf"\s{re.escape(form.key)}(?:{names}){re.escape(_tags(form.middle)[0])}")
    unclosed = further.search(text, begin)
    limit = unclosed.start() if unclosed else len(text)
    stop = text.find(end, begin, limit)
    tag = ""
    while stop >= 0 and not tag:
        place.at = stop + len(end)
        try:
            tag = place.take(form.key, form.ends[1])
        except ValueError:
            stop = text.find(end, stop + 1, limit)
    if not tag:
        stop = limit if unclosed or not place.ended else text.rfind(form.ends[1], begin)
        if stop in (-1, len(text)):
            raise EOFError
        place.at = stop
        tag = place.take(form.key, form.ends[1])
    before = form.middle[len(form.middle.rstrip()) :]
    behind = form.end.removesuffix(end)
    return text[begin:stop].removeprefix(before).removesuffix(behind), tag


def _read_pairs(form: Form, place: Cursor, tools: dict[str, dict]) -> tuple[str, Any]:
    """Read a name, and keys and values in brackets."""
    name = _name(form, place, tools)
    begin, end = BRACKETS[form.middle]
    place.take(begin)
    return name, _pairs(place, form.middle, end)


READERS = {"object": _read_object, "json": _read_json, "tags": _read_tags, "pairs": _read_pairs}


def _tags(text: str) -> list[str]:
    """Split a text where a tag begins, as <parameter= or [ARGS], and drop white space around."""
    parts = map(str.strip, re.split(r"(?=<|\[[A-Z])", text))
    return [part for part in parts if part]


def _pairs(place: Cursor, assign: str, end: str) -> dict:
    """Read keys and values up to the bracket that ends them."""
    found = {}
    while not place.passes(end):
        key = place.up_to(assign).replace(QUOTE, "").strip().strip("\"'")
        found[key] = _value(place)
    return found


def _value(place: Cursor) -> Any:
    """Read a value of pairs: a text in quotes, an object, a list or a word."""
    if place.passes(QUOTE):
        return place.up_to(QUOTE)
    if place.passes("{"):
        return _pairs(place, ":", "}")
    if place.passes("["):
        items = []
        while not place.passes("]"):
            items.append(_value(place))
        return items
    if place.text[place.at] not in "'\"":
        return _parsed(place.match(BARE))
    word = place.match(QUOTED)
    value = _parsed(word)
    return word[1:-1] if value == word else value  # quotes within it may not be escaped


def _parsed(text: str) -> Any:
    """Return a value in JSON, or as Python writes it; a text that is neither stays one."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip().replace("\n", "\\n"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _typed(text: str, types: set[str]) -> Any:
    """Return a value between tags as its schema has it. types: those that it allows"""
    if types and "string" not in types:
        return _parsed(text)
    return None if "null" in types and text in ("null", "None") else text


def _types(schema: Any, root: dict, left: int = DEEPEST) -> set[str]:
    """Return the types of the values that a schema allows; none: any. root: where it lies"""
    schema = _dict(schema)
    if "$ref" in schema and left:
        target: Any = root
        for key in str(schema["$ref"]).split("/")[1:]:
            target = _dict(target).get(key)
        return _types(target, root, left - 1)
    choices = _list(schema.get("anyOf") or schema.get("oneOf"))
    if choices and left:
        return set().union(*(_types(each, root, left - 1) for each in choices))
    types = schema.get("type")
    return {each for each in (types, *_list(types)) if isinstance(each, str)}


def _dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _literal(text: str) -> str:
    """Return a text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _json_rule(rule: str, schema: dict) -> str:
    """Return a rule for an object or another value that follows a schema."""
    schema = without_formats(schema) | {"x-guidance": STYLE}
    return f"{rule}: %json {json.dumps(schema)}"


def _tag_rules(form: Form, call: str, name: str, schema: dict) -> list[str]:
    """Return the grammar of keys and values between tags: they come in the schema's order."""
    fault = f"{name} cannot be forced, as its parameters are composed; list its properties"
    require(not COMPOSED & schema.keys(), fault)
    parts = [form.lark(name + form.begin)]
    rules = []
    for number, (key, own) in enumerate(_dict(schema.get("properties")).items()):
        value = f"{call}_{number}"
        part = f"{form.lark(form.key + key + form.middle)} {value} {form.lark(form.gap)}"
        parts.append(part if key in _list(schema.get("required")) else f"({part})?")
        rules += _value_rules(form.lark(form.end), value, own, schema)
    parts.append(form.lark(form.closing.removeprefix(form.gap).rstrip()))
    return [f"{call}: {' '.join(parts)}", *rules]


def _value_rules(end: str, value: str, own: Any, schema: dict) -> list[str]:
    """Return the grammar of a value and its end. own: its schema; schema: that of the tool"""
    types = _types(own, schema)
    if types and "string" not in types:
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return [f"{value}: {value}_json {end}", _json_rule(f"{value}_json", own | shared)]
    texts = [each for each in _list(_dict(own).get("enum")) if isinstance(each, str)]
    if texts:
        return [f"{value}: ({' | '.join(map(_literal, texts))}) {end}"]
    return [f"{value}[suffix={end}]: /(?s:.*)/"]


# ------------------------------------------------------------------------------- of a template


def form_of(template: ChatTemplate, tokenizer: Tokenizer) -> Form:
    """Return how a template writes calls. Raises: ValueError where it writes none."""
    try:
        return _form_of(template, tokenizer, ARGUMENTS)
    except ValueError as error:
        try:
            form = _form_of(template, tokenizer, json.dumps(ARGUMENTS))
        except ValueError:
            raise error from None
        return replace(form, takes_text=True)


def _form_of(template: ChatTemplate, tokenizer: Tokenizer, arguments: Any) -> Form:
    """Return the form. arguments: those of the probe, as the template may take them"""
    function = {"name": PROBE, "description": "A probe.", "parameters": NOTHING}
    tools = [{"type": "function", "function": function}]
    call = {"id": new_id(), "type": "function"}
    call |= {"function": {"name": PROBE, "arguments": arguments}}
    asked = {"role": "user", "content": "A question."}
    answered = {"role": "assistant", "content": "The answer"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "name": PROBE, "content": "A result."}
    # earlier answers are written without the thinking that the prompt may open
    prompt = without_opening(template.render_messages([asked], tools))
    require(PROBE in prompt, f"{template.title} knows no tools; leave them out")
    # behind the last message a template may write other things
    text = template.render_messages([asked, called, result], tools)
    fault = f"{template.title} writes tool calls in a form that is not known here; leave tools out"
    require(text.startswith(prompt), fault)
    opening, named, _ = text.removeprefix(prompt).partition(PROBE)
    if not named and tokenizer.id_of(LFM2.tags[0].rstrip("[")) is not None:
        return replace(LFM2, controls=_controls(tokenizer, LFM2.opening + LFM2.closing))
    text = template.render_messages([asked, called], tools).removeprefix(prompt)
    turn_end = template.render_messages([asked, answered], tools).rpartition("The answer")[2]
    text = opening + named + text.partition(PROBE)[2].removesuffix(turn_end)
    fits = {kind: re.fullmatch(form, text, re.DOTALL) for kind, form in FORMS.items()}
    kind, found = next(((kind, found) for kind, found in fits.items() if found), ("", None))
    require(found is not None, fault)
    more = call | {"id": new_id(), "function": call["function"] | {"name": ANOTHER_PROBE}}
    twice = called | {"tool_calls": [call, more]}
    results = [result, result | {"tool_call_id": more["id"], "name": ANOTHER_PROBE}]
    several = _writes_both(template, [asked, twice, *results], tools)
    controls = _controls(tokenizer, text + CONSTRAIN)
    return Form(kind=kind, **found.groupdict(), controls=controls, several=several)


def _controls(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """Return the control tokens in a text, with their ids."""
    ids = tokenizer.encode(text, bos=False, special=True)
    return {tokenizer.name(id).decode(): id for id in ids if not tokenizer.piece(id)}


def _writes_both(template: ChatTemplate, messages: list[dict], tools: list[dict]) -> bool:
    """Return whether a template writes both calls of a message, and neither raises nor drops one.

    messages: with the calls of two tools in one message
    """
    try:
        template.render_messages(messages, tools)
        return ANOTHER_PROBE in template.render_messages(messages[:2], tools)
    except ValueError:
        return False


def new_id() -> str:
    """Return an id of a call. Mistral's template takes nine letters and digits."""
    return f"{random.getrandbits(36):09x}"
