"""The CUDA code of a decode cycle, written, compiled and counted without a GPU. cycle_offline.py runs this file.

1. An engine of fake tensors (fake_cuda.py) runs the body of a captured cycle, as it would on the device.
2. `torch.compile` is replaced: Dynamo traces a step, inductor writes its code, which is kept; the step itself then runs
   on fake tensors. The launches of a step are read from that code.
3. Our own operators are opaque to inductor. Where one is called, its implementation for CUDA runs: what that launches
   is counted, and each Triton kernel is compiled for what it is launched with.
4. Of operations outside of compiled steps each is a launch, but for views and allocations.
5. Inductor's kernels are compiled too, in all configurations that it would choose from by timing.

Trade-off: the target has a few layers; a step that runs once a layer is counted for as many as the real one has.
A product of cuBLAS counts as one launch. Nothing is run on a GPU, and no time of one is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
MODELS = {
    "": {},
    "gqa": {"n_kv_heads": 8},
    "qwen3": {"n_kv_heads": 8, "qk_norm": True},
}  # what the shape becomes
CONTEXT = 4096
GROUP = 128
FREE = (
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "detach",
    "lift_fresh",
)  # operations that launch nothing
LAUNCH = re.compile(  # in inductor's code: a Triton kernel, a library's, our operators, and what it left to torch
    r"^(?:(\w+)\.run\(|.*?extern_kernels\.(\w+)\(|.*?torch\.ops\.gpt_eagle\.(\w+)\.default\("
    r"|.*?torch\.ops\.(aten\.\w+)|.*?(\.copy_)\()"
)
BUFFER = re.compile(r"empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")


class Launches(NamedTuple):
    """What one call in a step's code launches."""

    operator: str  # of ours; empty where it is not
    kernels: list[str]


@dataclass
class Step:
    """A compiled step of the cycle."""

    name: str
    code: str | None = None  # that inductor wrote; empty where there is nothing to do
    calls: int = 0  # in a cycle
    dynamo_s: float = 0.0
    inductor_s: float = 0.0
    operators: list[Launches] = field(
        default_factory=list
    )  # ours, as the calls of a cycle ran them

    def launches(self) -> list[Launches]:
        """What one call launches, in order."""
        own, found = iter(self.operators), []
        for line in (
            self.code.partition("def call(")[2].partition("runner = Runner")[0].splitlines()
        ):
            match = LAUNCH.match(line.strip())
            if match is None or line.strip().startswith(("#", "assert_")):
                continue
            kernel, library, operator, *others = match.groups()
            if operator:
                found.append(next(own))
                assert found[-1].operator == operator, (self.name, found[-1], operator)
            else:
                name = library or next(filter(None, others), None) or re.sub(r"_\d+$", "", kernel)
                found.append(Launches("", [name]))
        operators = sum(bool(part.operator) for part in found)
        assert operators * self.calls == len(self.operators), (
            self.name,
            operators,
            self.calls,
            self.operators,
        )
        return found

    def largest_temporary_bytes(self) -> int:
        """The largest buffer that the code allocates."""
        sizes = [
            prod(int(n) for n in shape.split(",") if n.strip()) * getattr(torch, dtype).itemsize
            for shape, dtype in BUFFER.findall(self.code or "")
        ]
        return max(sizes, default=0)


class Case(NamedTuple):
    """What is decoded with."""

    target: str  # format of the weights
    draft: str
    tree: Any  # None: vanilla
    model: str = ""  # of MODELS


# --------------------------------------------------------------------------------------------- recording


class Recorder(TorchDispatchMode):
    """Writes down what a cycle over fake tensors would launch. In force while one is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.implementations: dict[str, Callable] = {}  # of our operators, on CUDA
        self.steps: list[Step] = []
        self.step: Step | None = None  # the compiled one that runs
        self.eager: list[str] = []  # launches outside of compiled steps
        self.own: list[str] | None = None  # launches of the operator of ours that runs
        self.sources: dict[
            str, str
        ] = {}  # inductor's kernels: the source with a neutral name, and the source
        self.kernels: dict[
            str, tuple[Any, float]
        ] = {}  # ours: compiled, and the time it took (s); by hash
        self.failed: dict[str, str] = {}  # of ours, that do not compile: why

    def start(self) -> Recorder:
        """Forget the last cycle, but not the code of its steps."""
        self.eager.clear()
        for step in self.steps:
            step.calls, step.operators = 0, []
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
        """Take down an operation of torch's, if it launches something."""
        on_device = any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves((args, result)))
        name = function._schema.name.partition("::")[2]
        if on_device and function.namespace == "aten" and not function.is_view and name not in FREE:
            self.note(f"aten.{name}")

    def note(self, launch: str) -> None:
        """Take down a launch outside of inductor's code."""
        (self.eager if self.own is None else self.own).append(launch)

    def _run_own(self, name: str, args: tuple, kwargs: dict) -> None:
        """Do what an operator of ours does on CUDA."""
        self.own = []
        with self:
            self.implementations[name](*args, **kwargs)
        own, self.own = self.own, None
        if self.step is None:
            self.eager += own
        else:
            self.step.operators.append(Launches(name, own))


class At(MockTensor):
    """The type of a tensor and its place in its storage: what a kernel is compiled for."""

    def __init__(self, x: Tensor):
        super().__init__(x.dtype, list(x.shape))
        self.offset = x.storage_offset() * x.itemsize

    def data_ptr(self) -> int:
        return self.offset


def watch_operators(recorder: Recorder) -> None:
    """Learn what is registered for CUDA; before the project's operators are imported."""
    register = torch.library.Library.impl

    def impl(self: Any, name: Any, function: Any, key: str = "", **options: Any) -> Any:
        if key == "CUDA":
            recorder.implementations[name] = function
        return register(self, name, function, key, **options)

    torch.library.Library.impl = impl


def replace_launches(recorder: Recorder) -> None:
    """Compile a kernel of ours for what it is launched with, instead of launching it."""
    compile = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        began = time.perf_counter()
        args = [At(x) if isinstance(x, Tensor) else x for x in args]
        options = {name: At(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        recorder.note(self.fn.__name__)
        try:
            kernel = compile(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # of Triton or ptxas: a kernel that does not compile is a result
            recorder.failed[self.fn.__name__] = reason(error)
        else:
            recorder.kernels.setdefault(kernel.hash, (kernel, time.perf_counter() - began))

    JITFunction.run = run


def reason(error: Exception) -> str:
    """Why something does not compile, shortly."""
    return f"{type(error).__name__}: {error}"[:500]


def replace_compiler(recorder: Recorder) -> None:
    """Let torch.compile write the code of a step and keep it; the step itself runs as it is."""
    trace = torch.compile

    def compile(function: Callable, options: dict | None = None, **how: Any) -> Callable:
        step = Step(re.sub(r"_\d+$", "", function.__name__))
        recorder.steps.append(step)

        def run(*args: Any) -> Any:
            if step.code is None:
                write(
                    step,
                    partial(trace, function, fullgraph=True, dynamic=False),
                    args,
                    options or {},
                    recorder,
                )
            step.calls, recorder.step = step.calls + 1, step
            try:
                return function(*args)
            finally:
                recorder.step = None

        return run

    torch.compile = compile


def write(step: Step, trace: Callable, args: tuple, options: dict, recorder: Recorder) -> None:
    """Trace a step and let inductor write its code. Writes: step, the recorder's sources."""
    graphs, codes = [], []

    def backend(graph: Any, inputs: list) -> Callable:
        graphs.append((graph, inputs))
        return graph.forward

    def keep(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> None:
        recorder.sources.setdefault(source.replace(name, "kernel"), source)

    began = time.perf_counter()
    trace(backend=backend)(*args)
    step.dynamo_s = time.perf_counter() - began
    patches = {name: value for name, value in options.items() if name != "guard_filter_fn"}
    with (
        patch.object(GraphLowering, "save_output_code", codes.append),
        patch.object(AsyncCompile, "triton", keep),
    ):
        for graph, inputs in graphs:  # none, where a step computes nothing
            began = time.perf_counter()
            compile_fx(graph, inputs, config_patches=patches)
            step.inductor_s = time.perf_counter() - began
    step.code = "".join(codes)


# ------------------------------------------------------------------------------------------------ engine


def quantized(linear: nn.Linear, format: str) -> nn.Module:
    """A layer of the same shape in a format."""
    from quantize import FORMATS

    if format == "none":
        return linear
    kind, shape = FORMATS[format], linear.weight.shape
    codes = torch.empty(shape, dtype=torch.int8)
    scale = torch.empty(kind.scale_shape(shape, GROUP), dtype=kind.scale_dtype)
    return kind(codes, scale, linear.bias, fp32_out=getattr(linear, "fp32_out", False))


def quantize_all(model: nn.Module, format: str) -> None:
    """Put every linear layer of a model into a format."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, quantized(layer, format))


def make_engine(case: Case) -> Any:
    """An engine as generate.py makes it, of tensors that hold nothing; the default device is the GPU."""
    from decode import Engine, with_cycles
    from drafters import RootOnly
    from eagle_draft import EagleConfig, EagleDrafter, EagleHead
    from extras.stand_in import Shape
    from model import ModelConfig, Transformer, rope_frequencies
    from options import GenerateConfig

    sizes = {name: size for name, size in asdict(Shape.parse(SHAPE)).items() if name != "name"}
    config = ModelConfig(
        **sizes | {"n_layers": LAYERS, "max_context": CONTEXT} | MODELS[case.model]
    )
    torch.set_default_dtype(torch.bfloat16)
    target, head = Transformer(config), EagleHead(EagleConfig(replace(config, n_layers=1)))
    torch.set_default_dtype(torch.float32)
    lm_head = quantized(target.lm_head, case.draft) if case.draft != case.target else None
    for model, format in ((target, case.target), (head, case.draft)):
        model.rope_freq = rope_frequencies(config, "cuda")
        quantize_all(model.requires_grad_(False), format)
    options = GenerateConfig(device="cuda", compile=True, context=CONTEXT)
    drafter = RootOnly()
    if case.tree is not None:
        drafter = EagleDrafter(head, target, case.tree, options.sampling, lm_head)
    return with_cycles(Engine(options, target, drafter, CONTEXT, (2,)))


def run_case(case: Case, recorder: Recorder) -> dict[str, Any]:
    """Write the code of a cycle, and count. Returns: a row of the report."""
    import ops.cuda.attention
    from session import Buffers

    recorder.steps.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            engine = make_engine(case)
        work = Buffers(engine)
        ops.cuda.attention.counters(0)  # made once in a process, not in a cycle
        work.replay(engine, 0)  # writes code
        with recorder.start():
            work.replay(engine, 0)
    return counts(recorder) | {
        "cache_buffer_bytes": work.cache.k[0].numel() * work.cache.k[0].itemsize
    }


# ---------------------------------------------------------------------------------------------- counting


def counts(recorder: Recorder) -> dict[str, Any]:
    """What a cycle launches: by step, per layer, per drafted level, and in all for as many layers as the shape has."""
    from extras.stand_in import SHAPES

    steps, layer, level, cycle = {}, 0, 0, len(recorder.eager)
    for step in recorder.steps:
        parts = step.launches() if step.calls else []
        names = [name for part in parts for name in part.kernels]
        by_layer = step.calls > 1
        calls = step.calls + by_layer * (SHAPES[SHAPE].n_layers - LAYERS)
        cycle, layer = cycle + calls * len(names), layer + by_layer * len(names)
        level += between(parts, "attention")
        label = step.name if step.name not in steps else f"{step.name} {len(steps)}"
        steps[label] = {
            "calls": calls, "launches": len(names), "kernels": dict(Counter(names)), "order": names,
            "largest_temporary_bytes": step.largest_temporary_bytes(),
            "dynamo_s": round(step.dynamo_s, 2), "inductor_s": round(step.inductor_s, 2),
        }  # fmt: skip
    totals = {"per_layer": layer, "per_level": level, "per_cycle": cycle}
    return totals | {"outside": dict(Counter(recorder.eager)), "steps": steps}


def between(parts: list[Launches], word: str) -> int:
    """Launches from the last but one operator of ours with this word in its name to the last one; 0: there are none."""
    places = [i for i, part in enumerate(parts) if word in part.operator]
    return sum(len(part.kernels) for part in parts[places[-2] : places[-1]]) if places[1:] else 0


# --------------------------------------------------------------------------------------------- compiling


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of local memory, which are what was spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    registers, stack = (
        int(re.search(rf"{name}:(\d+)", usage.stdout)[1]) for name in ("REG", "STACK")
    )
    return {"registers": registers, "stack_bytes": stack}


def own_kernels(recorder: Recorder) -> Iterator[dict[str, Any]]:
    """Our Triton kernels, each as often as it was compiled anew."""
    for name, error in recorder.failed.items():
        yield {"name": name, "whose": "own", "error": error, "seconds": 0.0}
    for kernel, seconds in recorder.kernels.values():
        facts = {
            "warps": kernel.metadata.num_warps,
            "shared_bytes": kernel.metadata.shared,
            "seconds": round(seconds, 2),
        }
        yield {"name": kernel.name, "whose": "own"} | resources(kernel.asm["cubin"]) | facts


def inductor_kernels(recorder: Recorder) -> Iterator[dict[str, Any]]:
    """Compile inductor's kernels, in all configurations."""
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_heuristics.StaticTritonCompileResult.can_statically_launch = staticmethod(
        lambda *_, **__: None
    )
    for source in recorder.sources.values():
        tuner = getattr(PyCodeCache.load(source), re.search(r"def (triton_\w+)\(", source)[1])
        row = {"name": tuner.fn.__name__, "whose": "inductor", "configurations": len(tuner.configs)}
        began = time.perf_counter()
        try:
            found = [tuner._precompile_config(config).kernel for config in tuner.configs]
            use = [
                resources(kernel.asm["cubin"]) | {"shared_bytes": kernel.metadata.shared}
                for kernel in found
            ]
            row |= {name: max(one[name] for one in use) for name in use[0]}
        except Exception as error:  # as above
            row["error"] = reason(error)
        yield row | {"seconds": round(time.perf_counter() - began, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=fake_cuda.GPUS, help="compute capability")
    parser.add_argument("--json", help="file to write")
    parser.add_argument(
        "cases",
        nargs="+",
        help="TARGET/DRAFT/TREE, as none/int4/dynamic-6-10-60, none/none/chain-5, int4/int4/vanilla; "
        "/gqa or /qwen3 behind that for another attention",
    )
    options = parser.parse_args()
    fake_cuda.install(fake_cuda.GPUS[options.gpu])
    # constants of fake tensors cannot be folded, and matrices cannot be timed with and without padding
    inductor.joint_graph_constant_folding = inductor.shape_padding = False
    inductor.force_disable_caches = True
    recorder, found = Recorder(), {}
    watch_operators(recorder)
    replace_launches(recorder)
    replace_compiler(recorder)
    from draft_tree import DynamicTree, StaticTree
    from files import write_text

    for text in options.cases:
        target, draft, tree, *model = text.split("/")
        kind, *sizes = tree.split("-")
        make = {"vanilla": lambda: None, "chain": StaticTree.chain, "dynamic": DynamicTree}[kind]
        found[text] = run_case(Case(target, draft, make(*map(int, sizes)), *model), recorder)
        print(f"{text}: {found[text]['per_cycle']} launches a cycle", file=sys.stderr, flush=True)
    kernels = [*own_kernels(recorder), *inductor_kernels(recorder)]
    write_text(
        options.json, json.dumps({"gpu": options.gpu, "cases": found, "kernels": kernels}, indent=1)
    )


if __name__ == "__main__":
    main()
