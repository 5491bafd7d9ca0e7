"""Write, compile and count the CUDA code of a decode cycle without a GPU, for cycle_offline.py.

1. An engine of fake tensors (fake_cuda.py) runs the body of a captured cycle, as on the device.
2. `torch.compile` is replaced: Dynamo traces a step, inductor writes its code, which is kept and
   counted; the step itself then runs on fake tensors.
3. Our own operators are opaque to inductor. Where one is called, its CUDA implementation runs: its
   launches are counted, and each Triton kernel is compiled for its arguments.
4. Outside of compiled steps each operation is a launch, but for views and allocations.
5. Inductor's kernels are compiled too, in all configurations that it would choose from by timing.
Trade-off: the target has a few layers; a step that runs once a layer is counted for as many as the
real one has. A product of cuBLAS counts as one launch. No time of a GPU is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
import triton
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction, MockTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from scripts.gpu import fake_cuda

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LAYERS = 3  # of the fake target
SHAPE = "llama2-7b"
# changes to the shape, and options, by the last word of a case
MIXTRAL = {"n_kv_heads": 8, "ffn_dim": 14336, "n_experts": 8, "experts_per_token": 2}
MODELS = {
    "gqa": {"n_kv_heads": 8},
    "qwen3": {"n_kv_heads": 8, "qk_norm": True},
    "mixtral": MIXTRAL,
}
HEADS = ("eagle3", "medusa", "hydra", "block")  # others than EAGLE-2's
OPTIONS = {"sampled": {"temperature": 1.0, "top_k": 50, "top_p": 0.9}, "rows": {"batch_size": 4}}
CONTEXT = 4096
GROUP = 128
# operations that launch nothing
FREE = ("empty", "empty_strided", "empty_like", "new_empty", "detach", "lift_fresh")
# in inductor's code: a Triton kernel, a library's, our operators, and operations left to torch
LAUNCH = re.compile(
    r"^(?:(\w+)\.run\(|.*?extern_kernels\.(\w+)\(|.*?torch\.ops\.gpt_eagle\.(\w+)\.default\("
    r"|.*?torch\.ops\.(aten\.\w+)|.*?(\.copy_)\()"
)
BUFFER = re.compile(r"empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")


class Launches(NamedTuple):
    """The launches of one call in a step's code."""

    operator: str  # of ours; empty where it is not
    kernels: list[str]


@dataclass
class Step:
    """A compiled step of the cycle."""

    name: str
    code: str | None = None  # that inductor wrote; empty where there is nothing to do
    calls: int = 0  # in a cycle
    # ours, as the calls of a cycle ran them
    operators: list[Launches] = field(default_factory=list)

    def launches(self) -> list[Launches]:
        """List the launches of one call, in order; inductor may change that of our operators."""
        own: dict[str, list[Launches]] = defaultdict(list)
        for part in reversed(self.operators):
            own[part.operator].append(part)
        found = []
        body = self.code.partition("def call(")[2].partition("runner = Runner")[0]
        for line in map(str.strip, body.splitlines()):
            match = LAUNCH.match(line)
            if match is None or line.startswith(("#", "assert_")):
                continue
            kernel, library, operator, *others = match.groups()
            if operator:
                assert own[operator], (self.name, operator, self.operators)
                found.append(own[operator].pop())
            else:
                name = library or next(filter(None, others), None) or re.sub(r"_\d+$", "", kernel)
                found.append(Launches("", [name]))
        count = sum(bool(part.operator) for part in found)
        ran = len(self.operators)
        assert count * self.calls == ran, (self.name, count, self.calls, self.operators)
        return found

    def largest_temporary_bytes(self) -> int:
        """Return the size of the largest buffer that the code allocates."""
        largest = 0
        for shape, dtype in BUFFER.findall(self.code or ""):
            count = prod(int(n) for n in shape.split(",") if n.strip())
            largest = max(largest, count * getattr(torch, dtype).itemsize)
        return largest


class Case(NamedTuple):
    """The formats, the tree, and the model or the options of a cycle."""

    target: str  # format of the weights
    draft: str
    # vanilla, ngram, recycling, lookahead, chain-DEPTH, and dynamic- or auto-DEPTH-TOPK-SIZE
    tree: str
    word: str = ""  # of MODELS, OPTIONS or HEADS


# ------------------------------------------------------------------------------- recording


class Recorder(TorchDispatchMode):
    """A record of the launches of a cycle over fake tensors. In force while one is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.implementations: dict[str, Callable] = {}  # of our operators, on CUDA
        self.steps: list[Step] = []
        self.step: Step | None = None  # the compiled one that runs
        self.eager: list[str] = []  # launches outside of compiled steps
        self.own: list[str] | None = None  # launches of the operator of ours that runs
        # inductor's kernels: the source with a neutral name, and the source
        self.sources: dict[str, str] = {}
        self.kernels: dict[str, Any] = {}  # ours by hash, compiled
        # ours that do not compile, and the reason
        self.failed: dict[str, str] = {}

    def start(self) -> Recorder:
        """Forget the last cycle, but not the code of its steps."""
        self.eager.clear()
        for step in self.steps:
            step.calls = 0
            step.operators = []
        return self

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "gpt_eagle":
            self._run_own(function._schema.name.partition("::")[2], args, kwargs)
        result = function(*args, **kwargs)
        if self.own is not None or self.step is None:
            self._note_torch(function, args, result)
        return result

    def _note_torch(self, function: Any, args: tuple, result: Any) -> None:
        """Record an operation of torch's, if it launches something."""
        on_device = any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves((args, result)))
        name = function._schema.name.partition("::")[2]
        if on_device and function.namespace == "aten" and not function.is_view and name not in FREE:
            self.note(f"aten.{name}")

    def note(self, launch: str) -> None:
        """Record a launch outside of inductor's code."""
        launches = self.eager if self.own is None else self.own
        launches.append(launch)

    def _run_own(self, name: str, args: tuple, kwargs: dict) -> None:
        """Run the CUDA implementation of an operator of ours."""
        self.own = []
        with self:
            self.implementations[name](*args, **kwargs)
        own = self.own
        self.own = None
        if self.step is None:
            self.eager += own
        else:
            self.step.operators.append(Launches(name, own))


class At(MockTensor):
    """The type of a tensor and its place in its storage, which a kernel is compiled for."""

    def __init__(self, x: Tensor):
        super().__init__(x.dtype, list(x.shape))
        self.offset = x.storage_offset() * x.itemsize

    def data_ptr(self) -> int:
        return self.offset


def watch_operators(recorder: Recorder) -> None:
    """Record the implementations for CUDA; call it before the project's operators are imported."""
    register = torch.library.Library.impl

    def impl(self: Any, name: Any, function: Any, key: str = "", **options: Any) -> Any:
        if key == "CUDA":
            recorder.implementations[name] = function
        return register(self, name, function, key, **options)

    torch.library.Library.impl = impl


def replace_launches(recorder: Recorder) -> None:
    """Compile a kernel of ours for its arguments, instead of launching it."""
    compile = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        args = [At(x) if isinstance(x, Tensor) else x for x in args]
        options = {name: At(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        recorder.note(self.fn.__name__)
        try:
            kernel = compile(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # of Triton or ptxas: a kernel that does not compile is a result
            recorder.failed[self.fn.__name__] = reason(error)
        else:
            recorder.kernels.setdefault(kernel.hash, kernel)

    JITFunction.run = run


def reason(error: Exception) -> str:
    """Return the reason why something does not compile: the innermost error, cut short."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-500:]


def replace_compiler(recorder: Recorder) -> None:
    """Let torch.compile write the code of a step and keep it; the step itself runs as it is."""
    trace = torch.compile

    def compile(function: Callable, options: dict | None = None, **further: Any) -> Callable:
        step = Step(re.sub(r"_\d+$", "", function.__name__))
        recorder.steps.append(step)

        def run(*args: Any) -> Any:
            if step.code is None:
                trace_step = partial(trace, function, fullgraph=True, dynamic=False)
                write(step, trace_step, args, options or {}, recorder)
            step.calls += 1
            recorder.step = step
            try:
                return function(*args)
            finally:
                recorder.step = None

        return run

    torch.compile = compile


def write(step: Step, trace: Callable, args: tuple, options: dict, recorder: Recorder) -> None:
    """Trace a step and let inductor write its code. Writes: step, the recorder's sources."""
    graphs = []
    codes = []

    def backend(graph: Any, inputs: list) -> Callable:
        graphs.append((graph, inputs))
        return graph.forward

    def keep(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> None:
        recorder.sources.setdefault(source.replace(name, "kernel"), source)

    trace(backend=backend)(*args)
    patches = {name: value for name, value in options.items() if name != "guard_filter_fn"}
    with (
        patch.object(GraphLowering, "save_output_code", codes.append),
        patch.object(AsyncCompile, "triton", keep),
    ):
        for graph, inputs in graphs:  # none, where a step computes nothing
            compile_fx(graph, inputs, config_patches=patches)
    step.code = "".join(codes)


# ------------------------------------------------------------------------------- engine


def quantized(layer: nn.Module, format: str) -> nn.Module:
    """Return a linear layer, or the layers of all experts, of the same shape in a format."""
    from quantize import FORMATS, QuantExperts

    if format == "none":
        return layer
    kind = FORMATS[format]
    *experts, outputs, inputs = layer.weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    group = GROUP if format == "int4" else 0
    scale = torch.empty(kind.scale_shape(codes.shape, group), dtype=kind.scale_dtype(group))
    if experts:
        return QuantExperts(kind, repeat((codes, scale), *experts), *experts)
    return kind(codes, scale, layer.bias, fp32_out=getattr(layer, "fp32_out", False))


def quantize_all(model: nn.Module, format: str) -> None:
    """Put every linear layer of a model into a format."""
    from model import ExpertLinear

    for name, layer in list(model.named_modules()):
        if isinstance(layer, (nn.Linear, ExpertLinear)):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, quantized(layer, format))


def make_head(case: Case, config: Any) -> nn.Module:
    """Make a draft head of version 2, or another of `HEADS`: of version 3 with half of the
    vocabulary, five heads of Medusa or Hydra, a layer over a block of eight.
    """
    from drafters import DraftVocab
    from eagle_draft import Eagle3Head, EagleConfig, EagleHead
    from extras.block_draft import BlockHead
    from extras.hydra_draft import HydraHeads
    from extras.medusa_draft import MedusaHeads
    from hf.block_heads import BlockConfig
    from hf.heads import Eagle3
    from hf.token_heads import TokenHeads

    dense = replace(config, n_layers=1, n_experts=0)
    match case.word:
        case "eagle3":
            columns = config.vocab_size // 2
            head = Eagle3Head(EagleConfig(dense, eagle3=Eagle3((0, 1, 2), config.dim, columns)))
            head.vocab = DraftVocab(config.vocab_size, torch.arange(columns))
            return head
        case "medusa" | "hydra":
            kind = MedusaHeads if case.word == "medusa" else HydraHeads
            return kind(TokenHeads(5, 1, config.dim, config.vocab_size, own_lm_heads=True))
        case "block":
            return BlockHead(BlockConfig(dense, (0, 1, 2), 8, 0, causal=False, predicts_next=False))
    return EagleHead(EagleConfig(dense))


def make_drafter(case: Case, target: nn.Module, head: nn.Module, lm_head: Any) -> Any:
    """Make the drafter of a case. lm_head: as for `EagleDrafter`"""
    from draft_tree import DynamicTree, StaticTree
    from drafters import RootOnly
    from eagle_draft import EagleDrafter
    from extras.auto_trees import with_smaller_trees
    from extras.block_draft import BlockDrafter
    from extras.hydra_draft import HydraDrafter
    from extras.lookahead_draft import SIZES, LookaheadDrafter
    from extras.medusa_draft import MedusaDrafter
    from extras.ngram_draft import Ngram, NgramDrafter
    from extras.recycling_draft import drafter_of, empty_matrix
    from options import GenerateConfig

    kind, *sizes = case.tree.split("-")
    device = target.norm.weight.device
    match kind:
        case "vanilla":
            return RootOnly()
        case "ngram":
            return NgramDrafter(Ngram(), device)
        case "recycling":
            matrix = empty_matrix(target.config.vocab_size, device)
            return drafter_of(GenerateConfig(draft=kind), matrix)
        case "lookahead":
            return LookaheadDrafter(SIZES, device)
    if case.word == "block":
        head.embedding = target.embedding  # as where it is loaded
    make = StaticTree.chain if kind == "chain" else DynamicTree
    kinds = {"medusa": MedusaDrafter, "hydra": HydraDrafter, "block": BlockDrafter}
    drafter = kinds.get(case.word, EagleDrafter)(head, target, make(*map(int, sizes)), lm_head)
    return with_smaller_trees(drafter, target) if kind == "auto" else drafter


def make_engine(case: Case) -> Any:
    """Make an engine as generate.py does, of empty tensors; the default device is the GPU."""
    from decode import Engine, with_cycles
    from extras.autosize import AutoTrees
    from extras.presets import pick_and_rank
    from extras.recycling_draft import RANKS
    from extras.stand_in import Shape
    from model import ModelConfig, Transformer, rope_frequencies
    from options import GenerateConfig

    sizes = {name: size for name, size in asdict(Shape.parse(SHAPE)).items() if name != "name"}
    sizes |= {"n_layers": LAYERS, "max_context": CONTEXT} | MODELS.get(case.word, {})
    config = ModelConfig(**sizes)
    torch.set_default_dtype(torch.bfloat16)
    target = Transformer(config)
    head = make_head(case, config)
    torch.set_default_dtype(torch.float32)
    further = OPTIONS.get(case.word, {})
    options = GenerateConfig(device="cuda", compile=True, context=CONTEXT, **further)
    lm_head = None
    if case.draft != case.target and case.word not in HEADS:  # those have LM heads of their own
        lm_head = quantized(target.lm_head, case.draft)
    for model, format in ((target, case.target), (head, case.draft)):
        if hasattr(model, "rope_freq"):
            model.rope_freq = rope_frequencies(config, "cuda")
        quantize_all(model.requires_grad_(False), format)
    drafter = make_drafter(case, target, head, lm_head)
    presets = getattr(drafter, "presets", (drafter,))
    engine = Engine(options, target, presets, CONTEXT, (2,), policy=AutoTrees())
    ranks = {"recycling": RANKS, "lookahead": 1}.get(case.tree.partition("-")[0])
    if ranks:
        engine = replace(engine, pick_tokens=partial(pick_and_rank, ranks=ranks))
    return with_cycles(engine)


def run_case(case: Case, recorder: Recorder) -> dict[str, Any]:
    """Write the code of a cycle, and count its launches. Returns: a row of the report.

    With gradients enabled, as generate.py decodes. A step that needs a value of a tensor on the
    host raises, since fake tensors have none. With presets the largest tree counts, and the code of
    the smallest is written too.
    """
    import ops.cuda.attention
    from runtime import copy_into
    from session import PREFILL_WIDTHS, Session

    recorder.steps.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            engine = make_engine(case)
        session = Session(engine)
        buffers = session.buffers
        ops.cuda.attention.counters(0)  # made once in a process, not in a cycle

        def cycle(preset: int) -> None:
            state, *_ = engine.cycles[session.mode][preset](buffers.cache, buffers.state)
            copy_into(buffers.state, state)

        prefill = {}
        for width in PREFILL_WIDTHS:
            with recorder.start():
                session._read_chunk(0, 0, width, None)
            prefill[width] = len(recorder.eager)
        largest = len(engine.presets) - 1
        for preset in {0, largest}:
            cycle(preset)  # writes code
        session.policy.waiting = 1  # a cycle at rest
        with recorder.start():
            session.policy.prepare(session, largest)
        catch_up = len(recorder.eager)
        with recorder.start():
            cycle(largest)
    buffer = buffers.cache.k[0]
    sizes = {"cache_buffer_bytes": buffer.numel() * buffer.itemsize}
    return counts(recorder) | {"prefill": prefill, "catch_up": catch_up} | sizes


# ------------------------------------------------------------------------------- counting


def counts(recorder: Recorder) -> dict[str, Any]:
    """Count the launches of a cycle: by step, per layer, per drafted level, and in all.

    The total is for as many layers as the shape has.
    """
    from extras.stand_in import SHAPES

    steps = {}
    per_layer = 0
    per_level = 0
    per_cycle = len(recorder.eager)
    written = [step for step in recorder.steps if step.code is not None]
    # of the largest tree first; others do not run
    for step in sorted(written, key=lambda step: step.calls == 0):
        parts = step.launches() if step.calls else []
        names = [name for part in parts for name in part.kernels]
        calls = step.calls
        if step.calls > 1:  # once a layer
            calls += SHAPES[SHAPE].n_layers - LAYERS
            per_layer += len(names)
        per_cycle += calls * len(names)
        per_level += between(parts, "attention")
        label = step.name if step.name not in steps else f"{step.name} {len(steps)}"
        steps[label] = {
            "calls": calls,
            "launches": len(names),
            "kernels": dict(Counter(names)),
            "order": names,
            "largest_temporary_bytes": step.largest_temporary_bytes(),
        }
    totals = {"per_layer": per_layer, "per_level": per_level, "per_cycle": per_cycle}
    return totals | {"outside": dict(Counter(recorder.eager)), "steps": steps}


def between(parts: list[Launches], word: str) -> int:
    """Count the launches from the last but one operator with this word in its name to the last.

    Returns: 0 for fewer than two such operators.
    """
    places = [i for i, part in enumerate(parts) if word in part.operator]
    if len(places) < 2:
        return 0
    return sum(len(part.kernels) for part in parts[places[-2] : places[-1]])


# ------------------------------------------------------------------------------- compiling


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread, and the bytes of local memory, which were spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
    }


def own_kernels(recorder: Recorder) -> Iterator[dict[str, Any]]:
    """Yield our Triton kernels, each as often as it was compiled anew."""
    for name, error in recorder.failed.items():
        yield {"name": name, "whose": "own", "error": error}
    for kernel in recorder.kernels.values():
        row = {"name": kernel.name, "whose": "own"} | resources(kernel.asm["cubin"])
        yield row | {
            "warps": kernel.metadata.num_warps,
            "shared_bytes": kernel.metadata.shared,
        }


def inductor_kernels(recorder: Recorder) -> Iterator[dict[str, Any]]:
    """Compile inductor's kernels, in all configurations. Yields: a row of the report each."""
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_heuristics.StaticTritonCompileResult.can_statically_launch = staticmethod(
        lambda *_, **__: None
    )
    for source in recorder.sources.values():
        tuner = getattr(PyCodeCache.load(source), re.search(r"def (triton_\w+)\(", source)[1])
        row = {"name": tuner.fn.__name__, "whose": "inductor", "configurations": len(tuner.configs)}
        try:
            compiled = [tuner._precompile_config(config).kernel for config in tuner.configs]
            row["shared_bytes"] = max(kernel.metadata.shared for kernel in compiled)
        except Exception as error:  # as above
            row["error"] = reason(error)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=fake_cuda.GPUS, help="compute capability")
    parser.add_argument("--json", help="file to write")
    parser.add_argument(
        "cases",
        nargs="+",
        help="TARGET/DRAFT/TREE, as none/int4/dynamic-6-10-60, none/none/chain-5, "
        f"int4/int4/vanilla; behind that /{', /'.join((*HEADS, *MODELS, *OPTIONS))}",
    )
    options = parser.parse_args()
    fake_cuda.install(fake_cuda.GPUS[options.gpu])
    # constants of fake tensors cannot be folded; matrices cannot be timed with and without padding
    inductor.joint_graph_constant_folding = inductor.shape_padding = False
    inductor.force_disable_caches = True
    recorder = Recorder()
    watch_operators(recorder)
    replace_launches(recorder)
    replace_compiler(recorder)
    from cli.io import write_text

    found = {}
    for text in options.cases:
        found[text] = run_case(Case(*text.split("/")), recorder)
        print(f"{text}: {found[text]['per_cycle']} launches a cycle", file=sys.stderr, flush=True)
    kernels = [*own_kernels(recorder), *inductor_kernels(recorder)]
    report = {"gpu": options.gpu, "cases": found, "kernels": kernels}
    write_text(options.json, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
