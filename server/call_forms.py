"""The forms in which models write calls of tools, learned from their chat templates.

`form_of` renders a probe, whose text fits one row of the table `FORMS`:

1. object: JSON with the name and the arguments (Qwen2.5, Llama 3, Hermes, SmolLM3).
2. json: the name, then the arguments in JSON (Mistral, gpt-oss, DeepSeek).
3. tags: keys and values between tags, texts as they are (Qwen3-Coder, Qwen3.5, GLM-4.5, MiniMax,
   Seed-OSS).
4. pairs: name{key:value} (Gemma 4) or [name(key=value)] (LFM2, LFM2.5).

A form reads calls from a text that may go on: a pattern for the head of a call, the tags before the
name and the name, and one reader of arguments a kind. White space between their parts is free.
It also gives the grammar of a forced call. Not here: templates that write ids (Kimi-K2).
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

from drafts.grammar import STYLE
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
# further ways to begin a call of harmony: a channel before the recipient, no namespace
SLIPS = ("<|channel|>commentary ", "<|channel|>analysis ", "to=")
CONSTRAIN = "<|constrain|>"  # of harmony: a control token that the model alone writes
BRACKETS = {":": "{}", "=": "()"}  # around pairs, by what stands between key and value
COMPOSED = {"$ref", "allOf", "anyOf", "oneOf"}  # keys of a schema with properties elsewhere
DEEPEST = 8  # references that are followed to find a type
REACH = 200  # characters within which a call names its tool, and its arguments begin

SEPARATOR = re.compile(r"[\s,]*")
LISTED = re.compile(r"\s*([,\]])\s*")  # behind a call in a list
KEY = re.compile(r"""(?:<\|"\|>|["'])?([^:=]*?)(?:<\|"\|>|["'])?\s*[:=]""")
# of pairs: a text between Gemma's marks; one in quotes, perhaps with quotes that end nothing
# within; another word
MARKED = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
QUOTED = re.compile(r"""(['"])(?:[^\\]|\\.)*?\1(?=\s*[,)\]}])""", re.DOTALL)
BARE = re.compile(r"""[^\s,)\]}'"][^,)\]}]*(?=[,)\]}])""")


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
        if opening.endswith(RECIPIENT):
            return [RECIPIENT, *SLIPS]
        return tags_of(opening)

    @cached_property
    def marks(self) -> list[str]:
        """The texts that announce a call; none: it is at the beginning of an answer."""
        if self.kind == "object":
            return [FENCE, *self.tags]
        return [tag + "to=" if tag.startswith("<|channel|>") else tag for tag in self.tags]

    @cached_property
    def ends(self) -> list[str]:
        """The tags behind a call."""
        if self.kind != "object":
            return tags_of(self.closing)
        end = self.closing.strip().lstrip("]").lstrip()
        return [FENCE, *([end] if end else [])]

    @cached_property
    def tail(self) -> re.Pattern:
        """The text behind a call that belongs to it."""
        between = r"[\s,;\]}]" if self.kind == "object" else r"\s"
        return re.compile(f"(?:{any_of(between, self.ends)})*")

    def head(self, names: Iterable[str]) -> re.Pattern:
        """Return the pattern of a call before its arguments. names: of tools"""
        tags = any_of(r"\s", self.tags)
        if self.kind == "object":
            return re.compile(rf"(?:{tags})*(?:{FENCE}\w*)?[\s\[]*")
        begin = ""
        if self.kind == "json":  # an id or a type may stand before the last tag
            last = "".join(tags_of(self.middle)[-1:])
            begin = rf"(?![\w-])(?P<last>[^{{]{{0,80}}?{re.escape(last)})?"
        if self.kind == "tags":
            begin = spaced(tags_of(self.begin))
        if self.kind == "pairs":
            begin = r"\s*" + re.escape(BRACKETS[self.middle][0])
        longest_first = sorted(map(re.escape, names), reverse=True)
        return re.compile(rf"(?:{tags})*(?P<name>{'|'.join(longest_first)}){begin}\s*")

    def parameter(self, keys: Iterable[str], ended: bool) -> re.Pattern:
        """Return the pattern of a key and its value between tags.

        An end that no tag follows is of the value. A value without an end goes up to the tag of a
        key of the tool (`keys`), or to the last ends of a call where the text has `ended`.
        """
        behind_key, *more = tags_of(self.middle)
        end = self.end.lstrip()
        space = re.escape(self.end.removesuffix(end))  # the template's own around a value
        before = re.escape(self.middle[len(self.middle.rstrip()) :])
        tag = re.escape(self.key)
        last = any_of("(?!)", self.ends)
        goes_on = rf"{tag}|{re.escape(self.ends[0])}" + (
            rf"|{self.tail.pattern}\Z" if ended else ""
        )
        ends = rf"(?:{space})?{re.escape(end)}\s*(?={goes_on})"
        ends += rf"|\s(?={tag}(?:{any_of('(?!)', keys)}){re.escape(behind_key)})"
        if ended:
            ends += rf"|(?:{space})?(?=(?:{last}){self.tail.pattern}\Z)"
        key = rf"\s*{tag}(?P<key>.*?){re.escape(behind_key)}{spaced(more)}"
        return re.compile(rf"{key}(?:{before})?(?P<value>.*?)(?:{ends})", re.DOTALL)

    def read(
        self, text: str, tools: dict[str, dict], ended: bool = False
    ) -> tuple[list[tuple[str, Any]], int]:
        """Read the calls at the beginning of a text.

        tools: the schema of the arguments, by the tool's name
        ended: the model ended the text
        Returns: names and arguments; the place behind them
        Raises: EOFError where the text may go on to be a call, ValueError where it is none.
        """
        in_list = self.kind == "pairs" and self.opening.endswith("[")
        calls = []
        at = 0
        while True:
            head = self.head(tools).match(text, at)
            if head is None:
                raise EOFError if len(text) - at < REACH else ValueError
            *call, at = self._call(text, head, tools, ended)
            calls.append(tuple(call))
            if not in_list:
                return calls, at
            further = _matched(LISTED, text, at)
            at = further.end()
            if further[1] == "]":
                return calls, at

    def _call(
        self, text: str, head: re.Match, tools: dict[str, dict], ended: bool
    ) -> tuple[str, Any, int]:
        """Read a call behind its head. Returns: its name and arguments; the place behind it"""
        at = head.end()
        if self.kind == "object":
            # what comes may complete the head
            require(text.startswith("{", at) or FENCE.startswith(text[at:]), "no object")
            value, at = self._json(text, at, ended)
            keys = [key for key in (self.key, *KEYS) if key in value]
            require(keys or not value.keys() - OF_A_CALL, "another object with a name")
            return value.get("name"), value[keys[0]] if keys else None, at
        name = head["name"]
        if self.kind == "tags":
            return name, *self._tagged(text, at, tools[name], ended)
        if self.kind == "pairs":
            return name, *_pairs(text, at, BRACKETS[self.middle][1])
        is_call = head["last"] or not self.opening.endswith(RECIPIENT)
        if ended and is_call and not text[at:].strip():
            return name, None, at  # a call without arguments
        require(text.startswith("{", at) or at == len(text) or at < REACH, "no arguments")
        return name, *self._json(text, at, ended)

    def _json(self, text: str, at: int, ended: bool) -> tuple[dict, int]:
        """Read a JSON object. Where the text has ended, its last bracket may be missing, or it may
        be as Python writes it.

        In its texts line breaks may be as they are: models that write files write them so.
        """
        decoder = json.JSONDecoder(strict=False)
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            if not ended:
                raise EOFError from None
            inner = re.split(any_of(r"\Z", self.ends), text[at:])[0]
            value = _parsed(inner)
            if isinstance(value, str):
                value = decoder.decode(inner.strip() + "}")
            end = at + len(inner)
        require(isinstance(value, dict), "no object")
        return value, end

    def _tagged(self, text: str, at: int, schema: dict, ended: bool) -> tuple[dict, int]:
        """Read keys and values between tags, up to the tag that ends them."""
        stop = self.ends[0]
        if stop not in text and not ended:
            raise EOFError
        properties = _dict(schema.get("properties"))
        parameter = self.parameter(properties, ended)
        arguments = {}
        while found := parameter.match(text, at):
            key = found["key"].strip()
            arguments[key] = _typed(found["value"], _types(properties.get(key), schema))
            at = found.end()
        end = spaced([stop]) + (rf"|{self.tail.pattern}\Z" if ended else "")
        return arguments, _matched(re.compile(end), text, at).end()

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
        parts = re.split(f"({any_of('(?!)', self.controls)})", text)
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


def tags_of(text: str) -> list[str]:
    """Split a text where a tag begins, as <parameter= or [ARGS], and drop white space around."""
    parts = map(str.strip, re.split(r"(?=<|\[[A-Z])", text))
    return [part for part in parts if part]


def any_of(pattern: str, texts: Iterable[str]) -> str:
    """Return a pattern that matches what another one does, or one of some texts."""
    return "|".join([pattern, *map(re.escape, texts)])


def spaced(texts: Iterable[str]) -> str:
    """Return a pattern of texts with white space before each."""
    return "".join(rf"\s*{re.escape(text)}" for text in texts)


# ------------------------------------------------------------------------------- the arguments


def _pairs(text: str, at: int, end: str) -> tuple[dict, int]:
    """Read keys and values up to the bracket that ends them."""
    found = {}
    at = _skipped(text, at)
    while not text.startswith(end, at):
        key = _matched(KEY, text, at)
        found[key[1].strip()], at = _value(text, key.end())
        at = _skipped(text, at)
    return found, at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
    """Read a value of pairs: an object, a list, a text in quotes or a word."""
    at = _skipped(text, at)
    if text.startswith("{", at):
        return _pairs(text, at + 1, "}")
    if text.startswith("[", at):
        items = []
        at = _skipped(text, at + 1)
        while not text.startswith("]", at):
            item, at = _value(text, at)
            items.append(item)
            at = _skipped(text, at)
        return items, at + 1
    marked = MARKED.match(text, at)
    if marked:
        return marked[1], marked.end()
    word = QUOTED.match(text, at) or _matched(BARE, text, at)
    value = _parsed(word[0])
    if value == word[0] and value[0] in "'\"":  # quotes within it may not be escaped
        value = value[1:-1]
    return value, word.end()


def _skipped(text: str, at: int) -> int:
    return SEPARATOR.match(text, at).end()


def _matched(pattern: re.Pattern, text: str, at: int) -> re.Match:
    found = pattern.match(text, at)
    if found is None:
        raise EOFError
    return found


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
    return f"{rule}: %json {json.dumps(schema | {'x-guidance': STYLE})}"


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
