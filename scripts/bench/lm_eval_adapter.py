"""Score a model on tasks of lm-evaluation-harness through this runtime, in any format it loads.

    pip install -r scripts/bench/requirements-evals.txt
    python scripts/bench/lm_eval_adapter.py --checkpoint DIR --quant int4 --tasks arc_easy

1. lm_eval makes the requests, and metrics of the answers. Texts become ids as in its own `hf`
   backend: with the tokenizer's BOS if it has one, control tokens parsed, and cut on the left to
   `--context` tokens.
2. A log-likelihood is a pass over the cache, in chunks like prefill. Requests are sorted, and one
   keeps the prefix that it shares with the one before: a question is read once for all its answers.
3. Texts are generated as in generate.py, drafts included, until a stop string or an end of
   sequence. `--chat` renders the requests by the checkpoint's own template.

Trade-off: likelihoods are computed one request at a time; `--batch_size` is for texts.
Not here: sampling; several choices of one token in one pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import PREFILL_CHUNK, Engine
from files import check_outputs, write_text
from generate import load
from kv_cache import KVCache, causal_window
from options import DEFAULT, HEAD_KINDS, GenerateConfig
from prompts import check_ids
from scripts.bench.measure import environment, shown_path
from session import Session, common_prefix

GENERATION = {"until", "max_gen_toks", "do_sample"}  # served arguments of a task
# without effect on greedy texts, as in lm_eval's `hf` backend
OF_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}


@dataclass(frozen=True)
class EvalConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEFAULT, "the model: a Hugging Face directory or a GGUF file")
    tasks: str = option(
        "", "names of lm_eval's tasks, separated by commas; `lm_eval ls tasks` lists them"
    )
    limit: int = option(0, "documents per task; 0: all", least=0)
    num_fewshot: int = option(-1, "examples before each document; -1: as the task has it", least=0)
    include_path: str = option("", "directory with further tasks, as YAML files")
    quant: str = option("none", "round the weights while loading", ("none", "int8", "int4"))
    group_size: int = option(0, "of int4; 0: 64, or 32 where 64 does not divide")
    draft: str = option(
        "",
        "who drafts texts; default: the head that is given or bundled, else none",
        ("none", *HEAD_KINDS, "ngram"),
    )
    head: str = option("", "directory of a trained head", alias="eagle")
    chat: str | None = option(
        None, "render by a chat template: the checkpoint's own, or the one named", optional=True
    )
    system: str | None = option(None, "system message of the chat")
    context: int = option(
        0, "longest text in tokens; 0: what the model was trained for, at most 4096", least=0
    )
    batch_size: int = option(1, "texts generated together", least=1)
    compile: bool = option(False, "compile the steps of a cycle")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    json: str = option("", "write the results to this file")

    def engine(self) -> GenerateConfig:
        """Return the options of the runtime. Raises: ValueError for one that cannot work."""
        own = ("tasks", "limit", "num_fewshot", "include_path", "json")
        options = {name: value for name, value in vars(self).items() if name not in own}
        return GenerateConfig(**options)


# ------------------------------------------------------------------------------------------ scoring


class Scorer:
    """Log-likelihoods and texts of an engine, in token ids."""

    def __init__(self, engine: Engine):
        self.engine = engine
        weight = engine.target.norm.weight
        self.cache = KVCache.empty(
            engine.target.config, 1, engine.context, weight.dtype, str(weight.device)
        )
        self.cached: list[int] = []  # tokens whose keys and values are in the cache

    @torch.inference_mode()
    def score(self, before: list[int], after: list[int]) -> tuple[float, bool]:
        """Score a continuation.

        before: token ids, cut on the left where both are too long; after: the continuation's
        Returns: the log-likelihood of `after` (nats); whether each of its tokens is the likeliest.
        Raises: ValueError for ids that cannot be.
        """
        target = self.engine.target
        context = self.engine.context
        ids = (before + after)[-context - 1 :]
        if not after or len(after) >= len(ids):
            raise ValueError(
                f"a request has {len(before)} tokens and scores {len(after)}: it must be "
                f"1 to {context} behind 1 or more; raise --context, or use other tasks"
            )
        check_ids(ids, target.config.vocab_size, context + 2)
        # the positions that predict the continuation
        first = len(ids) - len(after) - 1
        last = len(ids) - 1
        begin = min(common_prefix(self.cached, ids[:-1]), first)
        self.cached = ids[:begin]
        tokens = torch.tensor([ids], device=target.norm.weight.device)  # [1, T + 1]
        total = 0.0
        greedy = True
        for at in range(begin, last, PREFILL_CHUNK):
            end = min(at + PREFILL_CHUNK, last)
            window = causal_window(tokens.new_tensor([at]), end - at)
            features = target(tokens[:, at:end], window.slots, self.cache, window)  # [1, C, F]
            start = max(at, first)
            if start < end:
                scores = target.logits(features[:, start - at :]).log_softmax(-1)[0]  # [R, V]
                wanted = tokens[0, start + 1 : end + 1]  # [R]
                total += float(scores.gather(1, wanted[:, None]).double().sum())
                greedy &= bool((scores.argmax(-1) == wanted).all())
        self.cached = ids[:-1]
        return total, greedy

    def texts(self, prompts: list[list[int]], until: list[str], most: int) -> Iterator[str]:
        """Generate up to a stop string, which is left out, an end of sequence or `most` tokens.

        prompts: token ids, cut on the left where `most` would not fit
        Yields: a text each, in order. Raises: ValueError when `most` fills the context.
        """
        engine = self.engine
        longest = engine.context - most
        if longest < 1:
            raise ValueError(
                f"a task asks for {most} tokens, and the context holds {engine.context}; "
                "raise --context"
            )
        engine = replace(engine, config=replace(engine.config, max_new_tokens=most))
        size = engine.config.batch_size
        for first in range(0, len(prompts), size):
            group = [prompt[-longest:] for prompt in prompts[first : first + size]]
            yield from generate_group(engine, group, until, first)


def generate_group(
    engine: Engine, prompts: list[list[int]], until: list[str], first: int
) -> list[str]:
    """Generate the texts of a batch, up to their stop strings. first: number of its first prompt"""
    tokenizer = engine.tokenizer
    ends = {tokenizer.id_of(stop) for stop in until}  # control tokens have no text
    prompts = [check_ids(ids, engine.target.config.vocab_size, engine.context) for ids in prompts]
    streams = [(first + seq, 0) for seq in range(len(prompts))]
    decoders = [tokenizer.stream() for _ in prompts]
    texts = [""] * len(prompts)
    running = [True] * len(prompts)
    for new in Session(engine, streams).run(prompts):
        for seq, tokens in enumerate(new[: len(prompts)]):
            if not running[seq]:
                continue
            kept = list(takewhile(lambda token: token not in ends, tokens))
            texts[seq] += decoders[seq].push(kept)
            complete = len(kept) == len(tokens) > 0
            running[seq] = complete and texts[seq] == cut(texts[seq], until)
        if not any(running):
            break
    return [cut(text + decoder.flush(), until) for text, decoder in zip(texts, decoders)]


def stops(until: list[str | None]) -> list[str]:
    """Return the stop strings of a task without null and empty ones, which would end every text."""
    return [stop for stop in until if stop]


def cut(text: str, until: list[str]) -> str:
    """Cut a text at the first of some stop strings."""
    return text[: min([text.find(stop) for stop in until if stop in text], default=len(text))]


# ------------------------------------------------------------------------------------------ adapter


def adapter(engine: Engine) -> Any:
    """Return the engine as a model of lm_eval. Raises: ValueError when that is not installed."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.models.utils import normalize_gen_kwargs
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError as error:
        raise ValueError(
            f"{error.name} is missing; run: pip install -r scripts/bench/requirements-evals.txt"
        ) from None
    scorer = Scorer(engine)
    tokenizer = engine.tokenizer
    ends = (*tokenizer.eos_ids, *engine.eos_ids)
    if not ends:
        raise ValueError(
            f"{engine.config.checkpoint} has no end of sequence, which lm_eval needs; name another"
        )

    class Runtime(TemplateLM):
        eot_token_id = ends[0]
        prefix_token_id = ends[0] if tokenizer.bos_id is None else tokenizer.bos_id
        tokenizer_name = engine.config.checkpoint

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return tokenizer.encode(string, bos=add_special_tokens is not False, special=True)

        def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
            order = sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2])
            found = {i: scorer.score(*requests[i][1:]) for i in order}
            return [found[i] for i in range(len(requests))]

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            scores = []
            for request in requests:
                (text,) = request.args
                ids = self.tok_encode(text)
                windows = get_rolling_token_windows(ids, self.prefix_token_id, engine.context, 1)
                disjoint = map(make_disjoint_window, windows)
                scores.append(sum(scorer.score(*window)[0] for window in disjoint))
            return scores

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            prompts = [self.tok_encode(request.args[0]) for request in requests]
            arguments = [request.args[1] for request in requests]
            return generated(scorer, prompts, arguments, normalize_gen_kwargs)

        def apply_chat_template(
            self, chat_history: list[dict], add_generation_prompt: bool = True
        ) -> str:
            return rendered(engine, chat_history, add_generation_prompt)

    return Runtime()


def generated(
    scorer: Scorer,
    prompts: list[list[int]],
    arguments: list[dict],
    normalize: Callable[[dict], dict],
) -> list[str]:
    """Generate a text per prompt, those with equal generation arguments together.

    normalize: lm_eval's `normalize_gen_kwargs`
    """

    groups: dict[str, list[int]] = {}
    for i, each in enumerate(arguments):
        groups.setdefault(json.dumps(each, sort_keys=True), []).append(i)
    found: dict[int, str] = {}
    for key, members in groups.items():
        wanted = normalize(json.loads(key))
        check_generation(wanted)
        until = stops(wanted["until"])
        texts = scorer.texts([prompts[i] for i in members], until, wanted["max_gen_toks"])
        found |= zip(members, texts)
    return [found[i] for i in range(len(prompts))]


def check_generation(arguments: dict) -> None:
    """Check the generation arguments of a task. Raises: ValueError for one that is not served.

    arguments: of lm_eval's `normalize_gen_kwargs`; at a temperature above 0 it sets `do_sample`
    """
    unknown = sorted(arguments.keys() - GENERATION - OF_SAMPLING)
    if not unknown and not arguments["do_sample"]:
        return
    kind = f"the generation arguments {', '.join(unknown)}" if unknown else "sampling"
    raise ValueError(f"a task asks for {kind}, and texts are greedy here; use other tasks")


def rendered(engine: Engine, messages: list[dict], asks: bool) -> str:
    """Render a conversation by the template. asks: for an answer, which has not begun

    A system message at the beginning, a task's `description`, follows that of --system behind an
    empty line. Raises: ValueError for a conversation that is not of questions and answers in turn,
    or a message that the template leaves out.
    """
    system = [m["content"] for m in messages[:1] if m["role"] == "system"]
    roles = [m["role"] for m in messages[len(system) :]]
    turns = [m["content"] for m in messages if m["role"] == "user"]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    expected = (["user", "assistant"] * len(turns))[: 2 * len(turns) - 1]
    if not asks or roles != expected:
        raise ValueError(
            "a task gives a later system message or the start of an answer; use other tasks"
        )
    template = engine.template
    if not any(system):
        return template.render(turns, answers)
    joined = "\n\n".join(filter(None, (engine.config.system, *system)))
    try:
        text = replace(template, system=joined).render(turns, answers)
        other = replace(template, system=f"Also: {joined}").render(turns, answers)
    except ValueError:
        template.render(turns, answers)  # raises for a fault other than the message
        text = ""
        other = ""
    if text == other:
        raise ValueError(
            "a task gives a system message, and the chat template takes none; "
            "use --chat NAME, or other tasks"
        )
    return text


# --------------------------------------------------------------------------------------------- main


def run(config: EvalConfig) -> dict:
    """Evaluate and print. Returns: lm_eval's results, task by task."""
    if not config.tasks:
        raise ValueError("nothing to do; name tasks with --tasks")
    if config.json:
        write_text(config.json, "{}")  # a file that cannot be written fails before the work
    engine = load(config.engine())
    model = adapter(engine)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    manager = TaskManager(include_path=config.include_path or None)
    names = config.tasks.split(",")
    missing = [name for name in names if name not in manager.all_tasks]
    if missing:
        raise ValueError(
            f"--tasks: lm_eval has no task {', '.join(missing)}; see `lm_eval ls tasks`"
        )
    try:
        found = simple_evaluate(
            model,
            tasks=names,
            limit=config.limit or None,
            task_manager=manager,
            num_fewshot=None if config.num_fewshot < 0 else config.num_fewshot,
            apply_chat_template=engine.template is not None,
            log_samples=False,
        )
    except ConnectionError as error:
        raise ValueError(
            f"--tasks: the data cannot be fetched ({error}); try again, or use --include_path"
        ) from None
    ran = engine.config
    machine = environment(ran.device, "lm_eval")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"{shown_path(ran.checkpoint)}, {ran.dtype}, quant {ran.quant}, draft {ran.draft}, "
        f"context {engine.context}\n"
    )
    print(make_table(found))
    if config.json:
        record = {"environment": machine, "config": vars(config), "results": found["results"]}
        write_text(config.json, json.dumps(record, default=str))
    return found["results"]


def main() -> None:
    """Run the command line."""
    config = parse(EvalConfig, "lm_eval_adapter.py", __doc__)
    with one_line_errors("lm_eval_adapter.py"):
        check_outputs({"--json": config.json})
        run(config)


if __name__ == "__main__":
    main()
