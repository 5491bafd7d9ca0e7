"""`--interactive`: a conversation on the terminal.

1. A line at the start names the model, the ways to draft and the commands (COMMANDS).
2. On a terminal a line has keys to edit it, and a history, which is kept (run/keyboard.py). A
   paste is one turn, whatever its lines, also where it comes before the first prompt or during an
   answer. Lines between two \"\"\" are one turn, too.
3. An answer goes on to its end, unless --max_new_tokens is given; a cut is said. Tokens that were
   drafted and accepted are coloured by their source, on a terminal, after /drafts; thinking is
   dimmed there.
4. /set changes the options that a call of `generate` takes, and the conversation goes on.
5. When the turns so far no longer fit the context, the oldest are dropped and a note is printed.

Turns and answers go to standard output, all else to standard error.

Ctrl-C ends an answer and not the conversation, and drops the lines that wait; the cached part of
the answer stays. At the prompt a second Ctrl-C, or the end of input, ends the conversation.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from files.chat import chat_template
from files.fetch import title_of
from files.io import StatusLine, has_colours, parse_json, read_named, write_text
from files.thinking import OnTerminal
from run.drafted import Drafted, Spans
from run.engine import Engine
from run.methods import told_draft
from run.options import GenerateConfig
from run.parsing import did_you_mean, read_settings
from run.prompts import OF_A_CALL, answer_room, check_ids, for_one_answer
from run.scheduler import Request, Scheduler, truncation_note
from run.stats import LOOP, repeated, stats_line, summary
from run.terminal import printer

if TYPE_CHECKING:  # prompt_toolkit is imported only where there is a terminal
    from run.keyboard import Keyboard

COMMANDS = {
    "help": "list the commands",
    "clear": "begin a new conversation",
    "retry": "answer the last turn again; above temperature 0 another answer",
    "set": "/set NAME VALUE, as /set temperature 0.7, changes how the model answers; the VALUE "
    "default undoes that; /set lists the names",
    "system": "/system TEXT sets the system message; without a text the template has its own",
    "drafts": "colour the tokens that were drafted and accepted, or no longer",
    "save": "/save FILE writes the conversation",
    "load": "/load FILE goes on with it",
    "bye": "end the conversation, as Ctrl-D",
}
LOOPS = "it repeats itself; /set repetition_penalty 1.1 ends most loops"
OTHER_NAMES = {"exit": "bye", "quit": "bye"}
WITH_FILE = ("save", "load")
WITH_TEXT = ("set", "system", *WITH_FILE)  # the others are turns where a text is behind them
# the options that /set takes
OPTIONS: dict[str, Field] = {
    f.name: f for f in fields(GenerateConfig) if f.name in OF_A_CALL - {"num_samples"}
}
ALIASES = {f.metadata["alias"]: name for name, f in OPTIONS.items() if f.metadata["alias"]}
NOTES_COLUMNS = 80  # at most
COLOURS = {"lookup": "\033[36m"}  # cyan; other sources are green
GREEN = "\033[32m"
PLAIN = "\033[0m"
QUOTES = '"""'


def say(text: str) -> None:
    """Print a note, which is no part of the conversation."""
    printer(sys.stderr, NOTES_COLUMNS)(f"{text}\n")


def read_line(keys: Keyboard | None, prompt: str) -> str:
    """Read a line, or pasted lines. prompt: for a person; a pipe is not asked. Raises: EOFError."""
    if keys is not None:
        return keys.ask(prompt)
    return input(prompt if sys.stdin.isatty() else "")


def command_of(turn: str) -> tuple[str, str] | None:
    """Return the name of a command and the text behind it; None: the turn is the model's."""
    found = re.fullmatch(r"/(\w*)(?:[ \t=]+(.*?))?[ \t]*", turn)
    if found is None:
        return None
    name = OTHER_NAMES.get(found[1], found[1])
    if found[2] and name in COMMANDS and name not in WITH_TEXT:
        return None
    return name, found[2] or ""


def read_turn(keys: Keyboard | None) -> str:
    """Read a turn: a line, pasted lines, or the lines between two \"\"\". Raises: EOFError."""
    line = read_line(keys, "> ")
    if not line.startswith(QUOTES):
        return line
    text = line.removeprefix(QUOTES)
    while not text.endswith(QUOTES):
        try:
            text += "\n" + read_line(keys, ". ")
        except EOFError:
            return text
    return text.removesuffix(QUOTES).strip("\n")


class Chat:
    """A conversation and its session."""

    def __init__(self, engine: Engine, encode: Callable[..., list[int]], keys: Keyboard | None):
        """encode: token ids of (engine, turns, answers); keys: those typed during an answer"""
        self.engine = engine
        self.given = engine.config  # at the start
        self.keys = keys
        self.encode = encode
        self.scheduler = Scheduler(engine)
        self.drafted = Drafted(engine)
        self.scheduler.session.observers.append(self.drafted)
        self.system = engine.config.system
        self.shows_drafts = False
        self.over = False
        self.turns: list[str] = []
        self.answers: list[str] = []
        self.status = StatusLine()

    def close(self) -> None:
        """End the chat."""
        self.scheduler.close()

    def take(self, turn: str) -> None:
        """Answer a turn, or run a command; a mistake is told, and the conversation so far stays."""
        command = command_of(turn)
        try:
            if command:
                self.run(*command)
            elif turn.strip():
                self.ask(turn)
        except ValueError as error:
            say(f"[{error}]")

    # ------------------------------------------------------------------------------------ answers

    def ask(self, turn: str) -> None:
        """Answer a turn. Raises: ValueError for one that cannot be answered."""
        ids, dropped = self._history([*self.turns, turn])
        if dropped:
            full = f"the context of {self.engine.context} tokens is full"
            say(f"[{full}: {dropped} oldest turn(s) dropped]")
        self.turns = [*self.turns, turn][dropped:]
        self.answers = self.answers[dropped:]
        # whatever the prompt is, the noise goes on
        request = Request.of(self.engine, ids, place=0, noise_id=None)
        try:
            self._answer(request)
            cut = request.fault or truncation_note(self.engine, request.reason)
        except KeyboardInterrupt:
            self.scheduler.cancel(request)
            self.status.show("")
            dropped = self.keys.dropped if self.keys else 0
            cut = f"stopped; {dropped} waiting line(s) dropped" if dropped else "stopped"
        print(flush=True)
        if cut:
            say(f"[{cut}]")
        self.answers.append(request.text)
        stats = summary(self.engine, self.scheduler.take_stats())
        loops = repeated(request.tokens) > LOOP
        if loops:  # drafts of a loop are always right
            stats["estimate"] = None
        say(f"[{stats_line(stats, LOOPS if loops else '')}]")

    def _answer(self, request: Request) -> None:
        """Print an answer as it is decided."""
        spans = Spans()
        show = printer(sys.stdout)
        shown = OnTerminal(self.engine.template)
        self.drafted.take(0)
        for pieces in self.scheduler.run([request]):
            self.status.show(self.scheduler.session.prefill_progress())
            for piece in pieces:
                for source, text in zip(self.drafted.take(0).sources, piece.texts):
                    spans.add(source, len(text))
                thought, answer, passed = shown.push(piece.text, piece.request.reason != "")
                spans.take(passed)
                show(thought + self._coloured(answer, spans))

    def _coloured(self, text: str, spans: Spans) -> str:
        """Return some text with colours. spans: of it and of text that comes later"""
        shown = ""
        for source, count, _ in spans.take(len(text)):
            part = text[:count]
            text = text[count:]
            if self.shows_drafts and source:
                part = f"{COLOURS.get(source, GREEN)}{part}{PLAIN}"
            shown += part
        return shown + text

    def _history(self, turns: list[str]) -> tuple[list[int], int]:
        """Encode the latest turns that leave room for an answer.

        Returns: token ids; the number of oldest turns that were dropped.
        Raises: ValueError where even the last turn does not fit.
        """
        engine = self.engine
        room = answer_room(engine.config.max_new_tokens, engine.context)
        dropped = 0
        ids = self.encode(engine, turns, self.answers)
        while len(ids) + room > engine.context and len(turns) - dropped > 1:
            dropped += 1
            ids = self.encode(engine, turns[dropped:], self.answers[dropped:])
        check_ids(ids, engine.target.config, engine.context)
        return ids, dropped

    # ----------------------------------------------------------------------------------- commands

    def run(self, name: str, text: str) -> None:
        """Run a command. text: behind its name. Raises: ValueError for one that cannot be."""
        if not name:
            raise ValueError("/ begins a command; /help lists the commands")
        if name not in COMMANDS:
            hint = did_you_mean(name, COMMANDS) or "; /help lists the commands"
            raise ValueError(f"there is no /{name}{hint}")
        if name in WITH_FILE and not text:
            raise ValueError(f"name a file: /{name} FILE")
        getattr(self, f"_{name}")(text)

    def _bye(self, text: str) -> None:
        self.over = True

    def _help(self, text: str) -> None:
        for name, meaning in COMMANDS.items():
            say(f"/{name:8}{meaning}")
        say(f"{QUOTES:9}begins and ends a turn of several lines")

    def _clear(self, text: str) -> None:
        self.turns = []
        self.answers = []

    def _retry(self, text: str) -> None:
        if not self.turns:
            raise ValueError("there is no turn yet")
        turn = self.turns.pop()
        self.answers.pop()
        self.ask(turn)

    def _set(self, text: str) -> None:
        config = self.engine.config
        name, value = [*re.split(r"[\s=]+", text, maxsplit=1), ""][:2]
        if not name:
            values = {each: getattr(config, each) for each in OPTIONS}
            listed = [f"{each} {_shown(v)}" for each, v in values.items() if _is_listed(each, v)]
            others = [each for each, v in values.items() if not _is_listed(each, v)]
            say(f"[{', '.join(listed)}; unchanged: {', '.join(others)}]")
            return
        name = ALIASES.get(name, name)
        if name not in OPTIONS:
            hint = did_you_mean(name, OPTIONS)
            raise ValueError(f"there is no option {name} in a chat{hint}; /set lists them")
        if value == "default":
            config = replace(config, **{name: getattr(self.given, name)})
            self.engine = replace(self.engine, config=config)
        elif value:
            given = read_settings(GenerateConfig, [f"{name}={value}"])
            self.engine = for_one_answer(self.engine, given)
            config = self.engine.config
        say(f"[{name} is {_shown(getattr(config, name))}]")

    def _system(self, text: str) -> None:
        engine = self.engine
        name = engine.config.chat
        if engine.template is None or name is None:
            raise ValueError("without a chat template there is no system message")
        path = Path(engine.config.checkpoint)
        has_schema = engine.config.has_schema
        template = chat_template(path, engine.tokenizer, name, text or None, has_schema)
        template.stop_ids(engine.tokenizer)  # refuses a template that leaves the message out
        self.engine = replace(engine, template=template)
        self.system = text or None

    def _drafts(self, text: str) -> None:
        if not has_colours():
            raise ValueError("there are no colours here")
        self.shows_drafts = not self.shows_drafts
        lookup = f"{COLOURS['lookup']}by lookup{PLAIN}"
        others = f"{GREEN}by others{PLAIN}"
        colours = f"drafted and accepted: {lookup}, {others}" if self.shows_drafts else "no colours"
        say(f"[{colours}]")

    def _save(self, text: str) -> None:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in zip(self.turns, self.answers):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": answer})
        write_text(text, json.dumps({"messages": messages}, ensure_ascii=False, indent=1))
        say(f"[{len(self.turns)} turn(s) in {text}]")

    def _load(self, text: str) -> None:
        saved = parse_json(read_named(Path(text), "/load"), text)
        messages = saved.get("messages") if isinstance(saved, dict) else None
        if not _are_messages(messages):
            raise ValueError(f"{text} is no conversation that /save has written; name another file")
        if messages and messages[0]["role"] == "system":
            self._system(messages.pop(0)["content"])
        self.turns = [message["content"] for message in messages[0::2]]
        self.answers = [message["content"] for message in messages[1::2]]
        say(f"[{len(self.turns)} turn(s) of {text}]")


def _is_listed(name: str, value: object) -> bool:
    """Return whether /set shows a value: of options with a flag, and of those that are changed."""
    return OPTIONS[name].metadata["flag"] or value != OPTIONS[name].default


def _shown(value: object) -> str:
    """Return an option's value for a person."""
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return str(value)


def _are_messages(value: object) -> bool:
    """Return whether a value is a list of messages: perhaps a system's, then turns and answers."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return False
    roles = [each.get("role") for each in value]
    if roles[:1] == ["system"]:
        roles = roles[1:]
    texts = all(isinstance(each.get("content"), str) for each in value)
    return texts and roles == ["user", "assistant"] * (len(roles) // 2)


def chat(engine: Engine, encode: Callable[..., list[int]], keys: Keyboard | None) -> None:
    """Read turns and print answers until the end of input. encode, keys: as for `Chat`"""
    name = title_of(Path(engine.config.checkpoint))
    kind = "" if engine.template else ", no chat template: it continues your text"
    say(f"[{name}, {told_draft(engine)}{kind}]\n[/help for the commands, Ctrl-D to leave]")
    if keys and keys.fault:
        say(f"[lines are not kept for the next chat: {keys.fault}]")
    stopped = False  # the last key was Ctrl-C
    with closing(Chat(engine, encode, keys)) as talk:
        while not talk.over:
            try:
                talk.take(read_turn(keys))
                stopped = False
            except (EOFError, KeyboardInterrupt) as error:
                say("")
                if stopped or isinstance(error, EOFError):
                    return
                stopped = True
                say("[Ctrl-C again, or Ctrl-D, ends the conversation]")
