"""Chat templates: the text before, between and after the turns of a conversation.

There are four. `chat_template` chooses the one whose markers appear in the checkpoint's own Jinja template.
Sources: the evaluation scripts of the official EAGLE, and FastChat's conversation templates.
Trade-off: the templates are fixed strings, so no code of a checkpoint is executed, and no other template is supported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hf.tokenizer import Tokenizer, optional_json


@dataclass(frozen=True)
class ChatTemplate:
    """The text around the turns of a conversation."""

    name: str
    start: str  # before the first turn
    ask: str  # after every turn
    reply: str  # before an earlier answer
    next: str  # between an earlier answer and the turn after it
    markers: tuple[str, ...]  # a checkpoint whose own Jinja template has all of these uses this template
    stops: tuple[str, ...] = ()  # tokens that end an answer besides EOS
    trim_turns: bool = False  # whether to drop white space around a turn; around an answer it is always dropped

    def render(self, turns: list[str], answers: list[str]) -> str:
        """The text of the prompt for the next answer. answers: one fewer than turns."""
        *earlier, last = (turn.strip() for turn in turns) if self.trim_turns else turns
        pairs = zip(earlier, answers, strict=True)
        past = "".join(turn + self.ask + self.reply + answer.strip() + self.next for turn, answer in pairs)
        return self.start + past + last + self.ask

    def encode(self, tokenizer: Tokenizer, turns: list[str], answers: list[str]) -> list[int]:
        """Token ids of the prompt for the next answer, with BOS. Control tokens within a turn are parsed too."""
        return tokenizer.encode(self.render(turns, answers), special=True)

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The ids that end an answer. Raises: ValueError when the tokenizer lacks one of the template's tokens."""
        for token in CONTROL.findall(self.start + self.ask + self.reply + self.next):
            if tokenizer.id_of(token) is None:
                raise ValueError(
                    f"the chat template {self.name} needs the control token {token}, which this tokenizer lacks; "
                    f"use another --chat: {', '.join(CHAT_TEMPLATES)}"
                )
        return tuple(dict.fromkeys((*tokenizer.eos_ids, *map(tokenizer.id_of, self.stops))))


CONTROL = re.compile(r"</?s>|<\|\w+\|>")  # the control tokens in the templates' text
# LLaMA-2's default; the two spaces after "safe." are Meta's
SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being "
    "safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal "
    "content. Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering "
    "something not correct. If you don't know the answer to a question, please don't share false information."
)
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n".format
# LLaMA-3's text begins with BOS; `encode` adds it to the others
CHAT_TEMPLATES = {
    template.name: template
    for template in (  # the first one whose markers are found is chosen
        ChatTemplate(  # LLaMA-3.1's own has two more lines, with dates, before the system message
            name="llama3",
            start=f"<|begin_of_text|>{HEADER('system')}{SYSTEM}<|eot_id|>{HEADER('user')}",
            ask=f"<|eot_id|>{HEADER('assistant')}", reply="", next=f"<|eot_id|>{HEADER('user')}",
            markers=("<|start_header_id|>",), stops=("<|eot_id|>",), trim_turns=True,
        ),
        ChatTemplate(
            name="llama2", start=f"[INST] <<SYS>>\n{SYSTEM}\n<</SYS>>\n\n",
            ask=" [/INST] ", reply="", next=" </s><s>[INST] ", markers=("<<SYS>>",),
        ),
        ChatTemplate(  # Mixtral uses it too
            name="mistral", start="[INST] ", ask=" [/INST]", reply=" ", next="</s>[INST] ", markers=("[INST]",),
        ),
        ChatTemplate(
            name="vicuna", start=f"{VICUNA_SYSTEM} USER: ",
            ask=" ASSISTANT:", reply=" ", next="</s>USER: ", markers=("USER:", "ASSISTANT:"),
        ),
    )
}  # fmt: skip


def chat_template(path: Path, name: str | None = None) -> ChatTemplate:
    """Choose the chat template called `name`, or the one that the checkpoint in `path` uses.

    Raises: ValueError for an unknown name, or when the checkpoint has no template or an unknown one.
    """
    names = ", ".join(CHAT_TEMPLATES)
    if name is not None and name not in CHAT_TEMPLATES:
        raise ValueError(f"--chat must be one of {names}; got {name}")
    if name is not None:
        return CHAT_TEMPLATES[name]
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        text = jinja.read_text(encoding="utf-8", errors="replace")
    else:  # one template, or a list of named ones
        text = str(optional_json(path / "tokenizer_config.json").get("chat_template"))
    for template in CHAT_TEMPLATES.values():
        if all(marker in text for marker in template.markers):
            return template
    raise ValueError(f"{path} has no chat template that is known here; use --chat NAME with one of {names}")
