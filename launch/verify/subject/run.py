"""Compare another engine's layouts with its run in one process, for `triaxis verify --subject`.

    our config  ->  a small model, its weights and batches  ->  ADAPTER.py in one process  ->  the reference
                                                                ADAPTER.py in a layout      ->  each rank's tensors, compared
                                                                --against ENGINE            ->  compared with the reference

Weights have Hugging Face's names. All files are safetensors and JSON, so the adapter may run in another environment.
"""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, counted
from triaxis.engine.storage.state_files import read_text
from triaxis.launch.start.command_line import refuse
from triaxis.launch.start.launcher import thread_variables
from triaxis.launch.verify.covering import covering_rows
from triaxis.launch.verify.oracle import installed_version, refusals, run_oracle
from triaxis.launch.verify.oracles.corpus import with_corpus
from triaxis.launch.verify.run import VerificationError, layout_job, start_ranks
from triaxis.launch.verify.sweep import attributed
from triaxis.launch.verify.trial import ONE_PROCESS, Trial, trial
from triaxis.launch.verify.verdict.evidence import Evidence
from triaxis.launch.verify.verdict.judge import Verdict, judge

AXES = ("tp", "pp", "dp", "cp")
"""Axes that an adapter may declare."""

MOST_RANKS = 8
"""Largest number of ranks in a covering layout."""

MOST_SECONDS = 600
"""Default time limit for one adapter run; ranks that wait for each other forever are a bug too."""

OURS = "triaxis"
"""Our one process, as an engine for `--against`."""


class ReportError(Exception):
    """An adapter's report is missing, late or cannot be compared."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, the script that runs another engine, parsed but not run.

    Attributes:
        path: absolute path of the script.
        axes: axes that the adapter's layouts may have.
        smallest: number of ranks on each axis in the smallest layout, which is the reference.
    """

    path: Path
    axes: tuple[str, ...]
    smallest: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SubjectTrial:
    """Another engine, the subject, and the layouts in which it is verified.

    Attributes:
        python: interpreter that runs the subject.
        trials: layouts of one small model, each compared with the smallest layout.
        against: (engine, version) of a second engine, to compare the subject's smallest layout with; (`OURS`,): Triaxis in one
            process; empty: none.
        most_seconds: time limit for one run, in seconds.
    """

    adapter: Adapter
    python: str
    trials: tuple[Trial, ...]
    against: tuple[str, ...]
    most_seconds: int


def read_adapter(path: Path) -> Adapter:
    """Read the axes and the smallest layout that an adapter declares.

    Raises:
        ConfigError: the file cannot be read, its axes are not all from `AXES`, or its smallest layout has other axes or other
            sizes than 1 and 2.
    """
    try:
        found = {
            ast.unparse(one.targets[0]): ast.literal_eval(one.value)
            for one in ast.parse(read_text(path), str(path)).body
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in ("AXES", "SMALLEST")
        }
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError([f"--subject {path}: it cannot be read ({error})."], "the command line") from error
    axes: Any = found.get("AXES")
    smallest: Any = found.get("SMALLEST", {})
    problems = []
    if not isinstance(axes, tuple) or not axes or not set(axes) <= set(AXES):
        problems.append(
            f"--subject {path}: AXES = {axes or 'nothing'}: AXES must be a tuple of axes from {', '.join(AXES)}, such "
            "as AXES = ('tp', 'dp'), or no layout can be chosen."
        )
    elif not isinstance(smallest, dict) or not all(at in axes and size in (1, 2) for at, size in smallest.items()):
        problems.append(
            f"--subject {path}: SMALLEST = {smallest}: it must give 1 or 2 ranks to axes from {', '.join(axes)}."
        )
    refuse(problems)
    return Adapter(path.absolute(), axes, dict.fromkeys(AXES, 1) | smallest)


def covering_layouts(adapter: Adapter) -> list[dict[str, int]]:
    """Choose layouts with 1 or 2 ranks per axis, and more ranks than the smallest layout.

    No axis is smaller than in the smallest layout. A layout has at most `MOST_RANKS` ranks. Any two axes occur in all combinations
    of sizes that these rules allow.
    """
    sizes = {axis: (2, 1) if adapter.smallest[axis] == 1 else (2,) for axis in adapter.axes}
    smallest = math.prod(adapter.smallest.values())

    def is_legal(row: Mapping[str, object]) -> bool:
        return smallest < 2 ** sum(size == 2 for size in row.values()) <= MOST_RANKS

    return [{axis: int(str(size)) for axis, size in row.items()} for row in covering_rows(sizes, is_legal)]


def subject_trial(
    path: Path,
    overrides: Sequence[str],
    *,
    adapter: Path,
    python: str,
    layouts: Sequence[str],
    against: str | None,
    num_steps: int,
    dtype: str,
    most_seconds: int,
) -> SubjectTrial:
    """Build layouts of another engine, the subject, and a small model that they can divide.

    Args:
        path, overrides: config file and overrides as for training; layouts in them are ignored.
        adapter: script that runs the subject.
        python: interpreter that runs the subject.
        layouts: layouts in words, such as `tp=2,dp=2`; empty: those from `covering_layouts`.
        against: name of a second engine, to compare the subject's smallest layout with; None: none.
        num_steps, dtype, most_seconds: settings for every run.

    Raises:
        ConfigError: the adapter cannot be read, a layout or the config is wrong, the model has no Hugging Face equivalent, or the
            `against` engine is not installed or cannot express the model.
    """
    subject = read_adapter(adapter)
    chosen = [_sizes(one, subject) for one in layouts] or covering_layouts(subject)
    largest = {axis: math.lcm(subject.smallest[axis], *(one.get(axis, 1) for one in chosen)) for axis in AXES}
    words = [f"parallel.{name}={json.dumps(value)}" for name, value in (ONE_PROCESS | largest).items()]
    asked = trial(path, (*overrides, *words, "schedule.name=auto"), small=True, num_steps=num_steps, dtype=dtype)
    compared = {"transformers", against or OURS} - {OURS}
    refuse(
        dict.fromkeys(said for name in sorted(compared) for said in refusals(name, asked.reference)),
        "a subject's model",
    )
    alone = _with_sizes(asked.reference, subject.smallest)
    trials = tuple(Trial(_with_sizes(alone, one), alone) for one in chosen)
    compared_with = () if against is None else (against,) if against == OURS else (against, installed_version(against))
    return SubjectTrial(subject, python, trials, compared_with, most_seconds)


def _sizes(layout: str, adapter: Adapter) -> dict[str, int]:
    """Parse a layout in words into sizes.

    Raises:
        ConfigError: a word names none of the adapter's axes, or its size is not a multiple of the axis's in `adapter.smallest`.
    """
    words = [word.partition("=") for word in re.split("[, ]+", layout.strip())]
    wrong = [
        "".join(word)
        for word in words
        if word[0] not in adapter.axes
        or not re.fullmatch("[1-9][0-9]*", word[2])
        or int(word[2]) % adapter.smallest[word[0]]
    ]
    if wrong:
        smallest = f", a multiple of its smallest layout's ({named(adapter.smallest)})"
        raise ConfigError(
            [
                f"--layout {wrong[0]}: the adapter declares {', '.join(adapter.axes)}, each with a number of ranks such as "
                f"{adapter.axes[0]}=2"
                f"{smallest if max(adapter.smallest.values()) > 1 else ''}."
            ],
            "the command line",
        )
    return {name: int(size) for name, _, size in words}


def named(sizes: Mapping[str, int]) -> str:
    """Write a layout in words, such as `tp=2 dp=2`, without axes of one rank. If all have one, return `one process`."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"


def _with_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=dict(sizes))})


def verify_subject(asked: SubjectTrial) -> Iterator[tuple[Trial, Verdict, str]]:
    """Run the subject in its smallest layout, the reference, then verify each other layout.

    Each result is (trial, verdict, name of the reference). With `--against ENGINE`, the first result compares the smallest layout
    with ENGINE. A layout that differs runs again, with one axis after another collapsed to one rank.

    Raises:
        VerificationError: a run failed, other than one with a collapsed axis.
        ReportError: a report cannot be compared, a run exceeds the time limit, or the smallest layout's own ranks disagree or have
            a number that is not finite.
    """
    from triaxis.launch.verify.subject.files import Reference, write_as_subject, write_inputs

    with tempfile.TemporaryDirectory(prefix="triaxis-subject-") as name:
        folder, runs, alone = Path(name), count(), asked.trials[0].reference
        job, parameters = write_inputs(alone, folder)

        def run(config: Config) -> Path:
            place = folder / f"run_{next(runs)}"
            place.mkdir()
            sizes = parallel_sizes(config)
            told = {"layout": {axis: sizes.size(axis) for axis in AXES}, "num_steps": config.train.steps}
            (place / "job.json").write_text(json.dumps(job | told))
            if exit_code := _start(asked, place, sizes.world_size):
                raise VerificationError(exit_code)
            return place

        def seen(place: Path, config: Config, reference: Reference) -> Evidence:
            sizes = parallel_sizes(config)
            ranks = reference.reports(place, parameters, sizes)
            return Evidence(sizes, parameters, reference.steps[: config.train.steps], ranks, are_whole=True)

        smallest = run(alone)
        reference = Reference(smallest, parallel_sizes(alone).world_size)
        of_reference = judge(seen(smallest, alone, reference), asked.trials[0].tolerance)
        if not of_reference.equal:
            first = of_reference.differences[0]
            what = f"{first.what} of {first.name}" if first.name else first.what
            raise ReportError(
                "the smallest layout cannot be the reference, because its ranks disagree or a number is not finite: "
                f"first the {what} in step {first.step + 1} (error {first.error:.1e}, bound {first.bound:.1e})"
            )
        if asked.against:
            _run_against(asked, folder)
            other = Reference(write_as_subject(alone, folder), 1)
            verdict = judge(seen(smallest, alone, other), asked.trials[0].tolerance)
            yield Trial(alone, alone), verdict, " ".join(asked.against)
        for one in asked.trials:
            found = seen(run(one.config), one.config, reference)

            def is_equal(config: Config, tolerance: float | None = one.tolerance) -> bool | None:
                if any(parallel_sizes(config).size(axis) % size for axis, size in asked.adapter.smallest.items()):
                    return None
                try:
                    return judge(seen(run(config), config, reference), tolerance).equal
                except (VerificationError, ReportError):
                    return None

            verdict = attributed(one.config, found, judge(found, one.tolerance), is_equal)
            yield one, verdict, named(asked.adapter.smallest)


def _run_against(asked: SubjectTrial, folder: Path) -> None:
    """Run the `--against` engine in one process, which writes reference files to `folder`.

    Raises:
        VerificationError: the run failed.
    """
    config = _with_sizes(asked.trials[0].reference, dict.fromkeys(AXES, 1))
    if asked.against[0] == OURS:
        job = layout_job(folder) | {"is_reference": True}
        exit_code = start_ranks(with_corpus(config, folder), folder / OURS, job)
    else:
        exit_code = run_oracle(asked.against[0], config, folder)
    if exit_code:
        raise VerificationError(exit_code)


def _start(asked: SubjectTrial, place: Path, world_size: int) -> int:
    """Run the adapter, the script for the other engine, on every rank.

    Returns the first nonzero exit code, or 0. A rank that fails ends the others. An exit by signal n gives 128 + n.

    Raises:
        ReportError: the time limit has passed, which ends all ranks.
    """
    from torch.distributed import TCPStore

    # Ranks meet in our store, as torchrun's do, so nothing else can take the port before rank 0 opens it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    around = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    # A copy of the module is placed next to the job, wherever the adapter's environment is.
    module = Path(__file__).with_name("triaxis_subject.py")
    shutil.copy(module, place)
    paths = [str(place), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, **thread_variables(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables.pop("PYTHONSAFEPATH", None)  # modules next to the adapter are found first
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [asked.python, str(asked.adapter.path), str(place)],
                    env=variables | around | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=sys.stderr,
                )
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        waiting, end = set(ranks), time.monotonic() + asked.most_seconds
        while waiting:
            if time.monotonic() > end:
                raise ReportError(
                    f"ranks {sorted(map(ranks.index, waiting))} did not finish within "
                    f"{counted(asked.most_seconds, 'second')}; raise the limit with --timeout"
                )
            for rank in [*waiting]:
                try:
                    code = rank.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
                waiting.discard(rank)
                if code:
                    return code if code > 0 else 128 - code
    return 0
