"""Golden counts: what a step of a full-size model asks of the card, as text that a person reads in a diff.

    python -m tests.cuda_stub.golden NAME           write golden/NAME.txt anew; its notes stay
    python -m tests.cuda_stub.golden NAME CALLS     print it instead, and write every call of the step to the file CALLS

Rank 0 runs alone (benchmarks/host/lone_rank.py). Only while kernels are tried are there values. Then kernels, copies and messages
do nothing (`card_values` in c/card.c).
"""

import ctypes
import os
import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from benchmarks.host.lone_rank import lone_engine
from tests.cuda_stub.build import variables
from tests.cuda_stub.values import library
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.data.loader import count_labels
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.run.garbage import GarbageCollection
from triaxis.engine.step import Engine
from triaxis.launch.footprint.run import microbatches
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.predict.rank_memory import predicted_memory

FOLDER = Path(__file__).with_name("golden")
OURS = f"{Path(__file__).resolve().parents[2]}/triaxis/"

TWO = "model.num_layers=2 train.global_batch_size=2 train.micro_batch_size=1 parallel.dp=1"
ALONE = "parallel.tp=1 parallel.sequence_parallel=false"
EXPERTS = f"model.num_layers=2 train.global_batch_size=16 parallel.pp=1 parallel.ep=8 parallel.dp=8 {ALONE}"
ZBV = f"train.global_batch_size=6 train.micro_batch_size=1 parallel.pp=2 parallel.vpp=2 parallel.dp=1 {ALONE}"
GRAPHS = f"model.num_layers=2 train.global_batch_size=8 train.micro_batch_size=1 parallel.dp=2 {ALONE}"
ROWS: Mapping[str, tuple[str, int, str]] = {
    "llama_tp1": ("llama3_8b", 1, f"{TWO} {ALONE}"),
    "llama_tp8": ("llama3_8b", 8, f"{TWO} parallel.tp=8"),
    "llama_fp8_tp8": ("llama3_8b", 8, f"{TWO} parallel.tp=8 precision.fp8.recipe=tensorwise precision.fp8.gather=fp8"),
    "gemma": ("gemma2_9b", 4, TWO),
    "mixtral_ep8_all_to_all": ("mixtral_8x7b", 8, f"{EXPERTS} kernels.dispatch=all_to_all"),
    "mixtral_ep8_all_gather": ("mixtral_8x7b", 8, f"{EXPERTS} kernels.dispatch=all_gather"),
    "llama_cp8": ("llama3_8b_128k", 16, f"{TWO} data.attention=across"),
    "llama_dp2_graphs": ("llama3_8b", 2, f"{GRAPHS} kernels.graphs=on"),
    "llama_pp2_zbv": ("llama3_8b", 2, f"model.num_layers=8 {ZBV} schedule.name=zbv"),
}
"""A configuration of configs/, the ranks of the run, and settings."""

KINDS = ("product", "attention", "compiled", "copy", "fill", "other", "NCCL")
KERNELS = {"attention": "^cudnn|flash|flex", "compiled": "^triton_", "product": "^cublas|GemmUniversal"}
"""Patterns of kernels' names; the first that fits."""

NOTES = "\nnotes\n"


def text_of(name: str, calls: Path) -> str:
    """Record the third step of a configuration. Needs a process of its own."""
    path, size, settings = ROWS[name]
    words = ["data.synthetic=true", *settings.split()]
    config = load_config(f"configs/{path}.yaml", words, {}, world_size=size)
    engine, sizes = lone_engine(config), parallel_sizes(config)
    predicted = predicted_memory(engine.config, sizes, 0).tensors
    _run(engine, calls)
    # Torch counts a graph's memory as allocated only while it is recorded.
    has_graphs = engine.kernels.choices.graphs == "on"
    peak = torch.cuda.max_memory_reserved() if has_graphs else torch.cuda.max_memory_allocated()
    lines = [
        f"configs/{path}.yaml, rank 0 of {size}, {settings}",
        ", ".join(f"{kernel} {choice}" for kernel, choice in engine.kernels.choices.named().items()),
        *_lines(calls.read_text().splitlines(), _groups(engine.topology)),
        *("", "memory"),
        f"{'peak of the allocator':36}{peak / 2**30:9.3f} GiB",
        f"{'prediction':36}{predicted / 2**30:9.3f} GiB",
    ]
    return "\n".join(lines) + "\n"


def _run(engine: Engine, calls: Path) -> None:
    """Train as `engine.train.train_steps` does: labels are posted a step ahead, and numbers read a step later."""
    batches, marks = microbatches(engine), _Marks(engine)
    labels, before = engine.post_labels(count_labels(batches)), None
    with GarbageCollection(engine.config.runtime.gc_interval):
        for step in range(3):
            if step == 2:
                library().card_log_start()
            posted = engine.post_labels(count_labels(batches))
            result = engine.update(engine.forward_backward(batches, [marks.instruction], labels=labels), 1e-4)
            if before is not None:
                before.read()
            labels, before = posted, result
    assert library().card_log_stop(str(calls).encode()) == 0


class _Marks:
    """Writes into the record what runs, and which function of ours asked for a wait or for memory."""

    def __init__(self, engine: Engine) -> None:
        self._names: dict[str, bytes] = {}
        self._phase, self._last = "", weakref.ref(torch.empty(0))
        self._asked = ctypes.CFUNCTYPE(None)(self._ask)
        library().card_on_wait(self._asked)
        for chunk in engine.chunks:
            for block in cast(GPTChunk, chunk).blocks:
                block.register_forward_pre_hook(self._enter)
                block.register_forward_hook(self._leave)

    def instruction(self, one: Any) -> None:
        """Mark an instruction of the pipeline; None: the last is over."""
        is_action = isinstance(one, Action)
        self._phase = one.kind.words if is_action else "update" if one is None else "messages"
        self._mark(f"rest, {self._phase}|{one.microbatch if is_action else 0}")

    def _enter(self, block: Any, given: tuple[torch.Tensor, ...]) -> None:
        self._mark(f"{block.name}, forward{'' if self._phase == 'forward' else ' again'}")
        if given[0] is not self._last() and given[0].requires_grad:
            given[0].register_hook(lambda grad: self._mark(f"rest, {self._phase}"))

    def _leave(self, block: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self._mark(f"rest, {self._phase}")
        self._last = weakref.ref(out)
        if out.requires_grad:
            out.register_hook(lambda grad: self._mark(f"{block.name}, {self._phase}"))

    def _ask(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        self._mark(f"by {frame.f_code.co_filename.removeprefix(OURS)} {frame.f_code.co_qualname}")

    def _mark(self, text: str) -> None:
        # The record keeps a pointer.
        library().card_mark(self._names.setdefault(text, text.encode()))


def _groups(topology: Topology) -> dict[str, str]:
    """Return the axes that share each communicator."""
    found: dict[str, str] = {}
    for name, axis in topology._axes.items():
        if axis._backend is not None:
            group: Any = axis._backend.group
            pointer = str(group._get_backend(topology.device)._comm_ptr())
            found[pointer] = f"{found[pointer]}/{name}" if pointer in found else name
    return found


def _lines(calls: Sequence[str], groups: Mapping[str, str]) -> Iterator[str]:
    """Count the calls of a step, in sections: waits, allocations, a microbatch's calls by place, messages."""
    place, microbatch, asked = "rest", "0", ("", "")
    asks: dict[str, Counter[str]] = {"wait": Counter(), "allocation": Counter()}
    of_places: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    messages: dict[str, Counter[str]] = defaultdict(Counter)
    for line in calls:
        kind, name, stream, size, group = line.split("\t")
        if kind in asks:
            asked = kind, f"{name}({size})" if kind == "allocation" else name
        elif name.startswith("by "):
            asks[asked[0]][f"{asked[1]} {name}"] += 1
        elif kind == "mark":
            place, _, number = name.partition("|")
            microbatch = number or microbatch
        elif kind == "message":
            what = f"{groups[group]} {name}"
            where = "rest" if place.startswith("rest") else "forward" if place.endswith("forward") else "backward"
            messages[f"{what:36}{size:>12}  {_stream(stream)}"][where] += 1
        if kind in ("kernel", "copy", "fill", "message", "graph"):
            named = next((each for each, pattern in KERNELS.items() if re.search(pattern, name)), "other")
            of_places[place][microbatch][{"kernel": named, "message": "NCCL", "graph": "other"}.get(kind, kind)] += 1
    for kind, counts in asks.items():
        yield from ("", f"{kind}s in the third step")
        yield from (f"{count:3} {what}" for what, count in sorted(counts.items()))
    yield from ("", f"{'device calls of a microbatch':36}" + "".join(f"{each:>10}" for each in ("all", *KINDS)))
    for place, of in sorted(of_places.items()):
        alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for microbatch, counts in sorted(of.items()):
            alike[tuple(counts[kind] for kind in KINDS)].append(microbatch)
        for cells, numbers in alike.items():
            label = place if len(alike) == 1 else f"{place} {' '.join(numbers)}"
            yield f"{label:36}" + "".join(f"{each:10}" for each in (sum(cells), *cells))
    yield from ("", f"{'NCCL calls of the step':36}       bytes  stream          all   forward  backward      rest")
    for what, counts in sorted(messages.items()):
        cells = (counts.total(), counts["forward"], counts["backward"], counts["rest"])
        yield what + "".join(f"{each:10}" for each in cells)


def _stream(stream: str) -> str:
    priority = ctypes.c_int()
    library().cudaStreamGetPriority(ctypes.c_void_p(int(stream)), ctypes.byref(priority))
    return "computation" if stream == "0" else "urgent     " if priority.value < 0 else "another    "


def main(name: str, calls: str = "") -> None:
    os.environ.update(variables())
    path = FOLDER / f"{name}.txt"
    with TemporaryDirectory() as folder:
        text = text_of(name, Path(calls or f"{folder}/calls"))
    if calls:
        print(text, end="", flush=True)
    else:
        notes = path.read_text().partition(NOTES)[1:] if path.exists() else ()
        path.write_text(text + "".join(notes))
    # Groups without peers are not closed.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
