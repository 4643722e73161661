"""What a step costs the host, in ours and in other programs: kernels do nothing on the stub of `tests/cuda_stub`.

    a process for each subject, which builds 2 and 4 layers       warm-up, then the calls of one step are counted
    round 1, 2, ..        each process measures one step of both; the order turns from round to round

Host time is the process's time on its processors, of all threads. A layer's is half the difference of 4 and 2 layers; ratios are of
the same round. A subject that cannot run here as it is published is marked; beside it a ratio compares no products.

    bash tests/run.sh --cuda-stub --collect-only -q            # makes .venv-cuda
    .venv-cuda/bin/python -m benchmarks.host
    .venv-cuda/bin/python -m benchmarks.host --shape llama3_70b --tp 2 --tokens 4096 --rounds 21 triaxis fsdp
    .venv-cuda/bin/python -m benchmarks.host --shape qwen3_30b_a3b --ep 2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from benchmarks.host.process import CALLS, DEPTHS
from benchmarks.host.subjects import SUBJECTS
from benchmarks.pairs import Interval, median_interval
from tests.cuda_stub.build import variables

OURS = "triaxis"
GIB = "400"
"""Memory of the card: no subject is refused for want of it."""

SHALLOW, DEEP = (str(depth) for depth in DEPTHS)
MORE_LAYERS = DEPTHS[1] - DEPTHS[0]


@dataclass(frozen=True, slots=True)
class Measured:
    """One subject.

    Attributes:
        counts: by depth, `process.Counted`.
        rounds: of each round, by depth, the halves of a step (`process.Half`).
    """

    counts: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]

    def milliseconds(self, depth: str, half: int) -> list[float]:
        return [1e3 * one[depth][half]["cpu"] for one in self.rounds]

    def layer(self, half: int) -> float:
        """Return the median of a layer's milliseconds."""
        pairs = zip(self.milliseconds(DEEP, half), self.milliseconds(SHALLOW, half), strict=True)
        return statistics.median((deep - shallow) / MORE_LAYERS for deep, shallow in pairs)

    def calls(self, depth: str, half: str) -> int:
        return sum(self.counts[depth][half].get(kind, 0) for kind in CALLS)

    def of_step(self, kind: str) -> int:
        return sum(self.counts[DEEP][half].get(kind, 0) for half in ("forward_backward", "update"))


class Process:
    """A subject's process.

    Raises:
        RuntimeError: it ended; the message is its last lines.
    """

    def __init__(self, name: str, options: argparse.Namespace, said: IO[str]) -> None:
        words = [sys.executable, "-m", "benchmarks.host.process", name, options.shape]
        environment = {key: value for key, value in os.environ.items() if key != "CARD_VALUES"}
        sizes = options.tp, options.ep, options.tokens, options.microbatches
        more = {"CARD_GIB": GIB, "OMP_NUM_THREADS": "1"}
        self._said = said
        self._process = subprocess.Popen(
            [*words, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**environment, **variables(), **more},
        )
        self.counts = self._answer()

    def round(self, depths: Sequence[int]) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(depths), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise RuntimeError("\n".join(Path(self._said.name).read_text().splitlines()[-3:]))
        return json.loads(line)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Measured]:
    """Measure the subjects in turn; who cannot be built is told and left out."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running: dict[str, Process] = {}
        for name in options.subjects:
            said = stack.enter_context((folder / name).open("w"))
            try:
                running[name] = Process(name, options, said)
            except RuntimeError as error:
                console.print(f"{name} did not run: {error}", highlight=False, markup=False)
            else:
                stack.callback(running[name].close)
        rounds: dict[str, list[Mapping[str, Any]]] = {name: [] for name in running}
        for number in range(options.rounds):
            turn = 1 if number % 2 == 0 else -1
            for name in list(running)[::turn]:
                rounds[name].append(running[name].round(DEPTHS[::turn]))
        return {name: Measured(process.counts, rounds[name]) for name, process in running.items()}


def table_of(measured: Mapping[str, Measured], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"{options.shape}, tp {options.tp}, ep {options.ep}, {options.microbatches} x {options.tokens:,} tokens, "
        f"{DEEP} layers; host in ms of CPU time, medians of {options.rounds} rounds",
        title_justify="left",
    )
    heads = ("calls a layer", "NCCL", "fwd + bwd", "a layer", "ratio", "calls of update", "update", "a layer", "ratio")
    for head in ("subject", *heads, "waits", "peak, GiB"):
        table.add_column(head, justify="left" if head == "subject" else "right", no_wrap=head == "subject")
    for name, one in measured.items():
        deep = [statistics.median(one.milliseconds(DEEP, half)) for half in (0, 1)]
        ratios = [
            "1.000" if name == OURS else str(_ratio(one, measured[OURS], half)) if OURS in measured else ""
            for half in (0, 1)
        ]
        a_layer = (one.calls(DEEP, "forward_backward") - one.calls(SHALLOW, "forward_backward")) / MORE_LAYERS
        table.add_row(
            f"{name} *" if SUBJECTS[name].differs else name,
            f"{a_layer:.0f}",
            str(one.of_step("message")),
            f"{deep[0]:.1f}",
            f"{one.layer(0):.2f}",
            ratios[0],
            str(one.calls(DEEP, "update")),
            f"{deep[1]:.1f}",
            f"{one.layer(1):.2f}",
            ratios[1],
            str(one.of_step("wait")),
            f"{one.counts[DEEP]['peak_bytes'] / 2**30:.1f}",
        )
    return table


def _ratio(one: Measured, ours: Measured, half: int) -> Interval:
    """Divide our time by a subject's, round by round: below 1.0 ours is cheaper."""
    pairs = zip(ours.milliseconds(DEEP, half), one.milliseconds(DEEP, half), strict=True)
    return median_interval([mine / other for mine, other in pairs])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=[*SUBJECTS], help=f"of {', '.join(SUBJECTS)}; all by default")
    parser.add_argument("--shape", default="llama3_8b", help="a model of configs/")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the tensor-parallel group")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sample")
    parser.add_argument("--microbatches", type=int, default=1, help="samples of a rank in a step")
    parser.add_argument("--rounds", type=int, default=11, help="measured steps of each subject")
    options = parser.parse_args(argv)
    if unknown := set(options.subjects) - SUBJECTS.keys():
        parser.error(f"no subject is named {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    console = Console(width=None if sys.stdout.isatty() else 180)
    measured = measure(options, console)
    console.print(table_of(measured, options))
    console.print("ratio: ours / the subject's, with its 95 % interval; below 1.0 ours is cheaper")
    for name in measured:
        one = SUBJECTS[name]
        console.print(
            f"{name}: {one.recipe}" + (f" * not comparable: {one.differs}" if one.differs else ""), markup=False
        )


if __name__ == "__main__":
    main(sys.argv[1:])
