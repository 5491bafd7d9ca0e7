"""Chat templates: the text before, between and after the turns of a conversation.

`chat_template` returns one of two kinds, with one interface:

1. `JinjaTemplate` (files/jinja.py), the default: the checkpoint's own, a Jinja program, rendered
   as `transformers` does it. It writes BOS itself. `stop_ids` renders a probe, so that a template
   that fails is refused before decoding.
2. `FixedTemplate`, for `--chat NAME`: fixed strings, for checkpoints without a template, and to
   repeat the official EAGLE's runs (sources: its evaluation scripts, and FastChat's conversation
   templates). None is a default.

`read_text_files` reads the tokenizer with it. `--system TEXT` takes the place of a template's own
system message. An empty text leaves it out of a fixed template; the checkpoint's own gets an empty
message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from files.io import LocalError, has_colours, is_gguf, read_text
from files.thinking import Tags, Thinking
from files.tokenizer import Tokenizer, load_tokenizer, optional_json
from options import load_part

NO_TEMPLATE = "none"  # of --chat: texts go on as they are, without a template
PROBE = ("A question.", "The answer of the probe.", "Another question.")


class ChatTemplate:
    """Renders conversations. Subclasses give `render` and `turn_ends`."""

    bos = True  # begin with BOS where the text does not
    reply: str  # the text before an earlier answer
    title: str  # for messages
    thinks: Tags | None = None  # of the thinking that a prompt opens

    def render_messages(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        variables: dict | None = None,
    ) -> str:
        """Return the text of the prompt for the next answer.

        messages, tools: as `transformers` takes them, without a system message at the beginning
        variables: further ones of the template, as enable_thinking
        Raises: ValueError for a conversation that the template has no place for.
        """
        raise NotImplementedError

    def render(self, turns: list[str], answers: list[str]) -> str:
        """Return the text of the prompt for the next answer. answers: one fewer than turns"""
        raise NotImplementedError

    def with_system(self, text: str) -> ChatTemplate:
        """Return the template with another system message.

        Raises: ValueError when it has no place for one.
        """
        raise NotImplementedError

    def turn_ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids that end an answer besides EOS."""
        raise NotImplementedError

    def encode_messages(self, tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
        """Return the token ids of the prompt for the answer to messages.

        messages: {"role": "system", "user" or "assistant", "content": text}, a system's first alone
        Raises: ValueError for other ones.
        """
        for message in messages:
            texts = [message.get("role"), message.get("content")]
            if not all(isinstance(text, str) for text in texts):
                form = '{"role": "user", "content": "text"}'
                raise ValueError(f"a message is {form}; one is {str(message)[:100]}")
        template = self
        messages = words_as_text(tokenizer, messages)
        if messages[0]["role"] == "system":
            template = self.with_system(messages[0]["content"])
            messages = messages[1:]
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("messages end with one of the user, which is answered")
        text = template.render_messages(messages)
        return tokenizer.encode(text, bos=self.bos, special=True)

    def encode(self, tokenizer: Tokenizer, turns: list[str], answers: list[str]) -> list[int]:
        """Return the token ids of the prompt for the next answer. Turns name no control tokens."""
        turns = list(map(tokenizer.as_text, turns))
        return tokenizer.encode(self.render(turns, answers), bos=self.bos, special=True)

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids that end an answer.

        Raises: ValueError when the template cannot work with this tokenizer.
        """
        return tuple(dict.fromkeys((*tokenizer.eos_ids, *self.turn_ends(tokenizer))))


def words_as_text(tokenizer: Tokenizer, messages: list[dict]) -> list[dict]:
    """Return messages in which the names of control tokens are text, but for the model's answers.

    messages: with a text as the content
    """
    return [
        message
        if message["role"] == "assistant"
        else message | {"content": tokenizer.as_text(message["content"])}
        for message in messages
    ]


# ---------------------------------------------------------------------------- a checkpoint's own


def refusal(path: Path, reason: Any) -> LocalError:
    """Return the error about a template that cannot be used, one line."""
    return LocalError(
        f"{path}: its chat template {reason}; "
        f"use --chat NAME with one of {', '.join(CHAT_TEMPLATES)}, or {NO_TEMPLATE} for no chat",
        f"the model's chat template {reason}",
    )


def template_text(path: Path, name: str = "default") -> str | None:
    """Read the Jinja template of a checkpoint; None: it has none.

    name: of several, in a directory of their own or a list; tool_use is for tools
    Raises: ValueError when it cannot be read.
    """
    only = name == "default"
    if is_gguf(path):
        return load_part("reader", "gguf template")(path, "" if only else name)
    jinja = path / "chat_template.jinja"
    more = path / "additional_chat_templates"
    wanted = jinja if only else more / f"{name}.jinja"
    try:
        if wanted.is_file():
            return read_text(wanted)
    except ValueError as error:
        raise refusal(path, f"cannot be read ({error})") from None
    if not only and (jinja.is_file() or more.is_dir()):
        return None  # the files are all there is, as in transformers
    template = optional_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # of {name, template}
        named = {
            each.get("name"): each.get("template") for each in template if isinstance(each, dict)
        }
        template = named.get(name, template if only else None)
    elif not only:
        template = None
    if template is not None and not isinstance(template, str):
        raise refusal(path, "is neither a text nor a list of named ones with a default")
    return template


def jinja_template(path: Path, tokenizer: Tokenizer, system: str | None) -> ChatTemplate:
    """Return the checkpoint's own template.

    Raises: ValueError when it has none, or one that fails.
    """
    text = template_text(path)
    if text is None:
        raise ValueError(
            f"{path} has no chat template; use --chat NAME with one of {', '.join(CHAT_TEMPLATES)}"
        )
    of_tools = template_text(path, "tool_use")
    make = load_part("reader", "jinja")  # it needs jinja2, which other checkpoints do without
    return make(path, text, of_tools, tokenizer.special, system)


# ----------------------------------------------------------------------------------------- fixed


@dataclass(frozen=True)
class FixedTemplate(ChatTemplate):
    """The text around the turns of a conversation."""

    name: str
    ask: str  # after every turn
    next: str  # between an earlier answer and the turn after it
    start: str = ""  # before everything
    slot: str = ""  # around the system message; "" where the template has no place for one
    system: str = ""  # the system message; "" for none
    turn: str = ""  # before the first turn
    reply: str = ""  # before an earlier answer
    stops: tuple[str, ...] = ()  # tokens that end an answer besides EOS
    # drop white space around a turn; around an answer it is always dropped
    trim_turns: bool = False

    @property
    def title(self) -> str:
        """The template's name in messages."""
        return f"the chat template {self.name}"

    def render_messages(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        variables: dict | None = None,
    ) -> str:
        """Render, as the base class."""
        if tools:
            raise ValueError(f"{self.title} knows no tools; leave them out")
        if variables:
            raise ValueError(f"{self.title} knows no {', '.join(variables)}; leave that out")
        roles = [message["role"] for message in messages]
        expected = [("user", "assistant")[i % 2] for i in range(len(roles))]
        if len(roles) % 2 == 0 or roles != expected:
            order = "messages must go user, assistant, ..., user behind a system message"
            raise ValueError(f"{order}; they go {str(roles)[:100]}")
        texts = [message["content"] for message in messages]
        return self.render(texts[0::2], texts[1::2])

    def render(self, turns: list[str], answers: list[str]) -> str:
        """Render, as the base class."""
        if self.trim_turns:
            turns = [turn.strip() for turn in turns]
        past = ""
        for turn, answer in zip(turns[:-1], answers, strict=True):
            past += turn + self.ask + self.reply + answer.strip() + self.next
        opening = ""
        if self.system:
            opening = self.slot.replace("{system}", self.system)
        return self.start + opening + self.turn + past + turns[-1] + self.ask

    def turn_ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of `stops`, as the base class.

        Raises: ValueError when the tokenizer lacks one of the template's tokens.
        """
        lacking = self.lacking(tokenizer)
        if lacking:
            others = [each.name for each in CHAT_TEMPLATES.values() if not each.lacking(tokenizer)]
            raise ValueError(
                f"the chat template {self.name} needs the control token {lacking}, which this "
                "tokenizer lacks; leave --chat out for the model's own template, or use --chat "
                f"{' or '.join((*others, NO_TEMPLATE))}"
            )
        return tuple(map(tokenizer.id_of, self.stops))

    def lacking(self, tokenizer: Tokenizer) -> str:
        """Return a control token of the template that a tokenizer lacks; "": it has all."""
        text = self.start + self.slot + self.turn + self.ask + self.reply + self.next
        return next((each for each in CONTROL.findall(text) if tokenizer.id_of(each) is None), "")

    def with_system(self, text: str) -> FixedTemplate:
        """Return the template with another system message.

        Raises: ValueError when it has no place for one.
        """
        if not self.slot:
            fault = f"the chat template {self.name} has no place for a system message"
            raise LocalError(f"{fault}; drop --system", f"{fault}; leave it out")
        return replace(self, system=text)


CONTROL = re.compile(r"</?s>|<\|\w+\|>")  # the control tokens in the templates' text
# LLaMA-2's default; the two spaces after "safe." are Meta's
SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, "
    "while being safe.  Your answers should not include any harmful, unethical, racist, sexist, "
    "toxic, dangerous, or illegal content. Please ensure that your responses are socially unbiased "
    "and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of "
    "answering something not correct. If you don't know the answer to a question, please don't "
    "share false information."
)
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n".format
# LLaMA-3's text begins with BOS; `encode` adds it to the others
LLAMA3 = FixedTemplate(  # LLaMA-3.1's own has two more lines, with dates, before the system message
    name="llama3",
    start="<|begin_of_text|>",
    slot=f"{HEADER('system')}{{system}}<|eot_id|>",
    system=SYSTEM,
    turn=HEADER("user"),
    ask=f"<|eot_id|>{HEADER('assistant')}",
    next=f"<|eot_id|>{HEADER('user')}",
    stops=("<|eot_id|>",),
    trim_turns=True,
)
LLAMA2 = FixedTemplate(
    name="llama2",
    start="[INST] ",
    slot="<<SYS>>\n{system}\n<</SYS>>\n\n",
    system=SYSTEM,
    ask=" [/INST] ",
    next=" </s><s>[INST] ",
)
MISTRAL = FixedTemplate(  # Mixtral uses it too
    name="mistral",
    start="[INST] ",
    ask=" [/INST]",
    reply=" ",
    next="</s>[INST] ",
)
VICUNA = FixedTemplate(
    name="vicuna",
    slot="{system} ",
    system=VICUNA_SYSTEM,
    turn="USER: ",
    ask=" ASSISTANT:",
    reply=" ",
    next="</s>USER: ",
)
CHAT_TEMPLATES = {template.name: template for template in (LLAMA3, LLAMA2, MISTRAL, VICUNA)}


def chat_template(
    path: Path,
    tokenizer: Tokenizer,
    name: str = "",
    system: str | None = None,
    closes: bool = False,
) -> ChatTemplate:
    """Choose the fixed chat template called `name`, or for "" the own one of the checkpoint.

    path: the checkpoint
    system: the system message; None: the template's own
    closes: the thinking that it opens is closed, as every answer begins with a schema
    Raises: ValueError for an unknown name, and when the template is missing, fails, or has no place
    for `system`.
    """
    if not name:
        return replace(jinja_template(path, tokenizer, system), closes=closes)
    if name not in CHAT_TEMPLATES:
        known = ", ".join((*CHAT_TEMPLATES, NO_TEMPLATE))
        raise ValueError(f"--chat must be one of {known}; got {name}")
    template = CHAT_TEMPLATES[name]
    if system is None:
        return template
    return template.with_system(system)


class OnTerminal:
    """Shows an answer on a terminal: its thinking dimmed, without the tags."""

    DIM = "\033[2m"
    PLAIN = "\033[0m"

    def __init__(self, template: ChatTemplate | None):
        """template: None for a text that goes on, which has no thinking"""
        self.thinking = Thinking(template.thinks) if template and has_colours() else None
        self.thought = False  # thinking is shown, and no answer yet

    def push(self, text: str, last: bool) -> tuple[str, str, int]:
        """Add text. last: nothing follows.

        Returns: what is shown first, the text of the answer behind it; the characters before that.
        """
        if self.thinking is None:
            return "", text, 0
        before = self.thinking.read
        thought, answer = self.thinking.push(text, last)
        shown = f"{self.DIM}{thought}{self.PLAIN}" if thought else ""
        self.thought = self.thought or bool(thought)
        if answer and self.thought:
            self.thought = False
            shown += "\n\n"
        return shown, answer, self.thinking.read - before - len(answer)


class TextFiles(NamedTuple):
    """The text side of a checkpoint."""

    tokenizer: Tokenizer | None  # None: only ids go in and out
    template: ChatTemplate | None  # None: texts go on as they are


def template_name(path: Path, config: Any) -> str | None:
    """Return the name of the chat template, "" for the checkpoint's own; None: texts go on.

    By default it is the checkpoint's own, where it has one. Token ids are no chat.
    Raises: ValueError for a template that cannot be read, and for --system without one.
    """
    if config.chat == NO_TEMPLATE or config.prompt_ids is not None:
        return None
    if config.chat is not None:
        return config.chat
    if template_text(path) is not None:
        return ""
    if config.system is not None:
        raise ValueError(
            f"--system belongs to a chat template, and {path} has none; "
            f"add --chat NAME with one of {', '.join(CHAT_TEMPLATES)}"
        )
    return None


def read_text_files(path: Path, config: Any) -> TextFiles:
    """Read the tokenizer of a checkpoint, and the chat template that its texts are put into.

    Raises: ValueError for a missing or broken one that is needed.
    """
    name = template_name(path, config)
    tokenizer = load_tokenizer(path, config.prompt_ids is None, name is not None)
    template = None
    if name is not None:
        template = chat_template(path, tokenizer, name, config.system, config.has_schema)
        template.stop_ids(tokenizer)  # refuses one that cannot work with it
    return TextFiles(tokenizer, template)
