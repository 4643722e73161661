"""Ours compared with other training programs on one GPU: tokens per second, and FLOPs over those of a GEMM in the same run.

    for each shape and contender a process of its own:   GEMM ceiling, warm-up, timed steps, GEMM ceiling  ->  one line of JSON
    then                                                 one table of all lines

What the results file has is not measured again, so a run that was cut off goes on when the same command is given again. A
contender that cannot run, does not fit or takes too long is a line with its reason.

    python -m benchmarks.gpu --shapes gpt-1.3b --results benchmarks/results/h100.jsonl
    python -m benchmarks.gpu --shapes gpt-1.3b --contenders ours --optimisations --results benchmarks/results/h100.jsonl
    python -m benchmarks.gpu --device cpu --shapes tiny tiny-llama --dtype fp32 --steps 3 --warm-up 1
    python -m benchmarks.gpu --table --results benchmarks/results/h100.jsonl
"""

import argparse
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_contenders.contenders import CONTENDERS, OURS
from benchmarks.gpu_contenders.records import (
    COMMAND_VARIABLE,
    COMMIT_VARIABLE,
    DID_NOT_FIT,
    NO_DEVICE,
    Job,
    append,
    failed,
    newest,
    read,
)
from benchmarks.gpu_contenders.shapes import OPTIMISATIONS, SHAPES, base_words, overridden
from benchmarks.gpu_contenders.tables import one_line, tables
from triaxis.engine.config.load import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_SHAPES = ("gpt-1.3b", "gpt-2.7b", "llama-8b-4k-12l", "llama-8b-8k-12l")
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID"}
ENDS_SECONDS = 10.0
"""Seconds that a process may take to end."""
LAST_LINES = 6


@dataclass(frozen=True, slots=True)
class Session:
    """One call of this command.

    Attributes:
        process_seconds: that one process may take.
        end: the moment of `time.monotonic` at which the command must have ended.
        command: as it was given, for the rows.
    """

    process_seconds: float
    end: float = math.inf
    command: str = ""

    def allowed(self) -> float:
        return min(self.process_seconds, self.end - time.monotonic() - ENDS_SECONDS)


class CutOffError(Exception):
    """End of the command's time: the interrupted run leaves no row, and the next command measures it."""


class NoDeviceError(Exception):
    """torch finds no GPU."""


def requests(options: argparse.Namespace) -> Iterator[Job]:
    """List every requested row, ours first: its numbers matter most where time is short."""
    contenders = sorted(options.contenders, key=lambda name: not CONTENDERS[name].is_ours)
    for shape in options.shapes:
        for name in contenders:
            base = job_of(options, shape, name)
            yield base
            if name == OURS:
                for one in OPTIMISATIONS:
                    if one.name in options.optimisations and not (one.needs_cuda and options.device != "cuda"):
                        yield replace(base, words=overridden(base.words, one.off), variant=one.name, traced=0)


def job_of(options: argparse.Namespace, shape: str, contender: str) -> Job:
    sizes = options.micro_batches.get(contender) or options.micro_batches.get("") or SHAPES[shape].micro_batch_sizes
    ours = CONTENDERS[contender].is_ours
    words = (*base_words(SHAPES[shape], options.device), *CONTENDERS[contender].words)
    return Job(
        shape=shape,
        contender=contender,
        device=options.device,
        dtype=options.dtype,
        micro_batch_sizes=tuple(sizes),
        micro_batch_size=sizes[0],
        words=overridden(words, options.set) if ours else (),
        steps=options.steps,
        warm_up=options.warm_up,
        traced=options.traced if ours else 0,
        ceiling_size=options.ceiling_size,
        ceiling_seconds=options.ceiling_seconds,
    )


def measure(job: Job, results: Path, logs: Path, session: Session) -> None:
    """Run a job's process, with smaller microbatches where it does not fit; a row of it is in `results` afterwards.

    Raises:
        CutOffError: the command's time is over.
        NoDeviceError: a GPU was asked for, and there is none.
    """
    if refusal := CONTENDERS[job.contender].refusal(job.contender, job):
        append(results, failed(job, refusal, about_here(session)))
        return
    known = len(read(results))
    for size in job.micro_batch_sizes:
        job = replace(job, micro_batch_size=size, tried=tuple(s for s in job.micro_batch_sizes if s > size))
        log = logs / f"{job.shape}.{job.contender}{job.variant and '.' + job.variant}.{size}.log"
        code = run_process(job, results, log, session)
        if code == NO_DEVICE:
            raise NoDeviceError
        if code != DID_NOT_FIT:
            if len(read(results)) == known:
                append(results, failed(job, why(code, session, log), about_here(session)))
            return


def run_process(job: Job, results: Path, log: Path, session: Session) -> int | None:
    """Return the exit code of a process in a group of its own; None: it took too long, and the whole group was ended."""
    seconds = session.allowed()
    if seconds <= 0:
        raise CutOffError
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command_of(job, results),
            cwd=ROOT,
            env=environment() | {COMMIT_VARIABLE: commit(), COMMAND_VARIABLE: session.command},
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            if seconds < session.process_seconds:
                raise CutOffError from None
            return None
        finally:
            end(process)


def environment() -> dict[str, str]:
    """Return the variables of this process but for those that make a config, or a rank of ours, another one."""
    return {name: value for name, value in os.environ.items() if name not in {*ENVIRONMENT, *LAUNCHER_VARIABLES}}


def command_of(job: Job, results: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_contenders.process", job.to_json(), str(results.resolve())]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started; nothing where they have ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(ENDS_SECONDS)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def why(code: int | None, session: Session, log: Path) -> str:
    """Return the reason of a process that left no row."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LAST_LINES:] or ["nothing"]
    ended = f"ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
    if code is None:
        ended = f"took more than {session.process_seconds:g} seconds"
    return "\n".join([f"{ended}; it said last: {lines[-1]}", *lines[:-1]])


def about_here(session: Session) -> dict[str, Any]:
    """Describe this process, for a row that no other process wrote."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": session.command,
        "commit": commit() or None,
        "machine": {"cpu": platform.processor() or platform.machine()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }


def commit() -> str:
    """Return the commit of the checkout, with a mark where files differ from it; empty where git does not say."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.stdout.strip()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Ours compared with other training programs on one GPU. One process for each shape and contender.",
        epilog="Contenders: " + "; ".join(f"{name}: {one.what}" for name, one in CONTENDERS.items()) + ".",
    )
    names = [one.name for one in OPTIMISATIONS]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(DEFAULT_SHAPES), help="which")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="which; all that the device can run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that everything runs")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of weights, GEMMs and the ceiling")
    parser.add_argument("--steps", type=int, default=30, help="timed optimizer steps")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before them")
    parser.add_argument("--traced", type=int, default=2, help="steps of ours that are traced after them; 0: none")
    parser.add_argument(
        "--micro-batches", nargs="+", default=[], help="8,4,2 for all, ours=8,4 for one: to try, largest first"
    )
    parser.add_argument("--set", nargs="+", default=[], help="settings of ours, section.key=value")
    parser.add_argument(
        "--optimisations",
        nargs="*",
        choices=names,
        help="ours also without each of these in turn; no name: without each",
    )
    parser.add_argument("--ceiling-size", type=int, default=8192, help="of the square matrices of the ceiling")
    parser.add_argument("--ceiling-seconds", type=float, default=3.0, help="products before they are timed")
    parser.add_argument("--results", type=Path, default=Path("runs/benchmarks/gpu.jsonl"), help="appended to")
    parser.add_argument("--logs", type=Path, default=Path("runs/benchmarks/gpu"), help="what processes print")
    parser.add_argument(
        "--limit-seconds", type=float, default=600.0, help="of one process; then it is ended, and said so"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=math.inf, help="of this command; what it cuts off leaves no row"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure what the file has once more; the newest row counts"
    )
    parser.add_argument("--retry-failed", action="store_true", help="the same for rows without numbers alone")
    parser.add_argument("--table", action="store_true", help="print the table of the file and measure nothing")
    options = parser.parse_args(argv)
    if options.contenders is None:
        options.contenders = [name for name, one in CONTENDERS.items() if one.runs_on(options.device, options.dtype)]
    for name in options.contenders:
        if CONTENDERS[name].needs_cuda and options.device != "cuda":
            parser.error(f"{name} needs CUDA, and --device is {options.device}: leave it out, or measure on a GPU")
        if CONTENDERS[name].has_fp8 and options.dtype != "bf16":
            parser.error(f"{name} is beside bf16, and --dtype is {options.dtype}: leave it out, or give --dtype bf16")
    # Given without a name: all of them.
    options.optimisations = names if options.optimisations == [] else options.optimisations or []
    try:
        options.micro_batches = micro_batches(options.micro_batches)
        for shape in options.shapes:
            check_micro_batches(shape, options.micro_batches)
    except ValueError as error:
        parser.error(str(error))
    return options


def micro_batches(words: Sequence[str]) -> dict[str, list[int]]:
    """Return the sizes to try by contender, largest first; "" for all contenders.

    Raises:
        ValueError: a word is neither 8,4 nor NAME=8,4.
    """
    sizes = {}
    for word in words:
        name, _, numbers = word.rpartition("=")
        if name and name not in CONTENDERS:
            raise ValueError(f"--micro-batches {word}: there is no contender {name!r} among {', '.join(CONTENDERS)}")
        if not all(number.isdigit() and int(number) for number in numbers.split(",")):
            raise ValueError(f"--micro-batches {word}: give sizes as 8,4 or NAME=8,4")
        sizes[name] = sorted({int(number) for number in numbers.split(",")}, reverse=True)
    return sizes


def check_micro_batches(shape: str, sizes: Mapping[str, Sequence[int]]) -> None:
    """Check that a step is whole microbatches.

    Raises:
        ValueError: it is not.
    """
    samples = SHAPES[shape].samples_per_step
    for size in {size for each in sizes.values() for size in each}:
        if samples % size:
            raise ValueError(
                f"--micro-batches {size}: a step of {shape} has {samples} samples, which are no whole microbatches of {size}"
            )


def main(argv: Sequence[str]) -> int:
    """Measure the rows that the results file lacks, then print its tables; return the exit code."""
    options = parse(argv)
    command = shlex.join(["python", "-m", "benchmarks.gpu", *argv])
    session = Session(options.limit_seconds, time.monotonic() + options.budget_seconds, command)
    code = 0
    had = newest(read(options.results))
    for job in [] if options.table else requests(options):
        label = f"{job.shape} {job.contender}{job.variant and ' without ' + job.variant}"
        row = had.get(job.key)
        if row is not None and not options.again and (row["status"] == "measured" or not options.retry_failed):
            print(f"{label}: in the file already, {row['status']}", flush=True)
            continue
        started = time.monotonic()
        try:
            measure(job, options.results, options.logs, session)
        except CutOffError:
            print(f"{label}: the command's time is over; give it again for the rest", flush=True)
            code = 1
            break
        except NoDeviceError:
            print("torch finds no GPU; with --device cpu --shapes tiny everything runs without one", file=sys.stderr)
            return 2
        print(f"{label}: {said(read(options.results)[-1])} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"\n{tables(list(newest(read(options.results)).values()))}")
    return code


def said(row: Mapping[str, Any]) -> str:
    """Format a row as a line."""
    if row["status"] == "failed":
        return one_line(row["reason"])
    return f"{row['tokens_per_second']:,.0f} tokens/s, r {row['r']:.3f}, micro batch {row['micro_batch_size']}"


def interrupted(number: int, frame: object) -> None:
    """End the processes of a command that is ended, then the command."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupted)
    sys.exit(main(sys.argv[1:]))
