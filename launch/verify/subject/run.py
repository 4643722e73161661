"""`triaxis verify --subject`: another engine in one process against itself in covering layouts.

    our config  ->  a small model, its weights and batches  ->  ADAPTER.py in one process  ->  the reference
                                                                ADAPTER.py in a layout      ->  the tensors of each rank, compared

The judge is that of our own layouts. Weights have Hugging Face's names, and all files are safetensors and JSON, so the adapter may
run in another environment (`triaxis_subject.py` is all that it needs).
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.storage.state_files import read_text
from triaxis.launch.start.command_line import refuse
from triaxis.launch.start.launcher import thread_variables
from triaxis.launch.verify.covering import covering_rows
from triaxis.launch.verify.oracle import refusals
from triaxis.launch.verify.run import VerificationError
from triaxis.launch.verify.trial import ONE_PROCESS, Trial, trial
from triaxis.launch.verify.verdict.causes import cause_of
from triaxis.launch.verify.verdict.evidence import Evidence, SublayoutVerdict
from triaxis.launch.verify.verdict.judge import Verdict, judge

AXES = ("tp", "pp", "dp", "cp")
"""Axes that an adapter may declare."""

MOST_RANKS = 8
"""Ranks of a covering layout."""

MOST_SECONDS = 1800.0
"""Longest run of an adapter: ranks that wait for each other for ever are a mistake too."""


class ReportError(Exception):
    """A report that nothing can be compared with."""


@dataclass(frozen=True, slots=True)
class SubjectTrial:
    """A subject and the layouts in which it is tried.

    Attributes:
        adapter: its file.
        python: the interpreter that runs it.
        trials: of one small model; each layout against one process.
    """

    adapter: Path
    python: str
    trials: tuple[Trial, ...]


def axes_of(adapter: Path) -> tuple[str, ...]:
    """Return the axes that an adapter declares; the file is read, not run, since its packages may be in another environment.

    Raises:
        ConfigError: it cannot be read, or declares none that is known.
    """
    try:
        tree = ast.parse(read_text(adapter), str(adapter))
        named = [
            one.value for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "AXES"
        ]
        declared = ast.literal_eval(named[0]) if named else ()
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError([f"--subject {adapter}: it cannot be read ({error})."], "the command line") from error
    if not isinstance(declared, tuple) or not declared or not set(declared) <= set(AXES):
        raise ConfigError(
            [
                f"--subject {adapter}: AXES = {declared or 'nothing'}: an adapter declares the axes of its layouts, of "
                f"{', '.join(AXES)}, such as AXES = ('tp', 'dp')."
            ],
            "the command line",
        )
    return tuple(declared)


def covering_layouts(axes: Sequence[str]) -> list[dict[str, int]]:
    """Return layouts with 1 or 2 ranks on each axis, in which every two axes meet in every way, without the one process."""

    def is_legal(row: Mapping[str, object]) -> bool:
        return 1 < 2 ** sum(size == 2 for size in row.values()) <= MOST_RANKS

    return [
        {axis: int(str(size)) for axis, size in row.items()}
        for row in covering_rows(dict.fromkeys(axes, (2, 1)), is_legal)
    ]


def subject_trial(
    path: Path, overrides: Sequence[str], *, adapter: Path, python: str, layout: str | None, num_steps: int, dtype: str
) -> SubjectTrial:
    """Build the layouts of a subject and a small model that fits them all.

    Args:
        path, overrides: as for training; the layout there is not read.
        adapter, python: as of `SubjectTrial`.
        layout: one, in words such as `tp=2,dp=2`; None: covering ones of the axes that the adapter declares.
        num_steps, dtype: of every run.

    Raises:
        ConfigError: the adapter cannot be read, the model has no name at Hugging Face, or the config is wrong.
    """
    axes = axes_of(adapter)
    layouts = covering_layouts(axes) if layout is None else [_sizes(layout, axes)]
    largest = {axis: max(one.get(axis, 1) for one in layouts) for axis in AXES}
    words = [f"parallel.{name}={json.dumps(value)}" for name, value in (ONE_PROCESS | largest).items()]
    asked = trial(path, (*overrides, *words, "schedule.name=auto"), small=True, num_steps=num_steps, dtype=dtype)
    refuse(refusals("transformers", asked.reference), "a subject's model")
    alone = asked.reference.parallel
    configs = [asked.reference.model_copy(update={"parallel": alone.model_copy(update=one)}) for one in layouts]
    return SubjectTrial(adapter.absolute(), python, tuple(Trial(one, asked.reference) for one in configs))


def _sizes(layout: str, axes: Sequence[str]) -> dict[str, int]:
    """Return the sizes of a layout in words.

    Raises:
        ConfigError: a word is no axis of the adapter's with a size.
    """
    words = [word.partition("=") for word in layout.split(",")]
    if wrong := ["".join(word) for word in words if word[0] not in axes or not re.fullmatch("[1-9][0-9]*", word[2])]:
        raise ConfigError(
            [f"--layout {wrong[0]}: the adapter declares {', '.join(axes)}, each with a number of ranks."],
            "the command line",
        )
    return {name: int(size) for name, _, size in words}


def sizes_of(config: Config) -> ParallelSizes:
    parallel = config.parallel
    return ParallelSizes(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp or 1, cp=parallel.cp)


def verify_subject(asked: SubjectTrial) -> Iterator[tuple[Trial, Verdict]]:
    """Run the subject in one process, then in one layout after another; yield each verdict as soon as it is there.

    Where a layout differs, it runs again with one axis after the other collapsed.

    Raises:
        VerificationError: a run did not end well.
        ReportError: a report cannot be compared.
    """
    from triaxis.launch.verify.subject.files import read_reports, write_inputs

    with tempfile.TemporaryDirectory(prefix="triaxis-subject-") as name:
        folder, runs = Path(name), count()
        job, parameters = write_inputs(asked.trials[0].reference, folder)

        def run(config: Config) -> Path:
            place = folder / f"run_{next(runs)}"
            place.mkdir()
            sizes = sizes_of(config)
            layout = {axis: sizes.size(axis) for axis in AXES}
            (place / "job.json").write_text(json.dumps(job | {"layout": layout}))
            if exit_code := _start(asked, place, sizes.world_size):
                raise VerificationError(exit_code)
            return place

        reference = run(asked.trials[0].reference)
        (alone,) = read_reports(reference, reference, parameters, 1)

        def seen(config: Config) -> Evidence:
            ranks = read_reports(run(config), reference, parameters, sizes_of(config).world_size)
            return Evidence(sizes_of(config), False, parameters, alone.steps, ranks)

        for one in asked.trials:
            found = seen(one.config)
            verdict = judge(found, one.tolerance)
            if not verdict.equal:
                outcomes = [
                    SublayoutVerdict(f"{axis}=1", axis, judge(seen(smaller), one.tolerance).equal)
                    for axis, smaller in _collapsed(one.config)
                ]
                verdict = replace(verdict, cause=cause_of(found, verdict.differences, outcomes))
            yield one, verdict


def _collapsed(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the layout with one rank on each of its axes in turn."""
    for axis in AXES:
        if sizes_of(config).size(axis) > 1:
            yield axis, config.model_copy(update={"parallel": config.parallel.model_copy(update={axis: 1})})


def _start(asked: SubjectTrial, place: Path, world_size: int) -> int:
    """Run the adapter on every rank; return the first exit code that is not 0. A rank that fails ends the others."""
    from torch.distributed import TCPStore

    # The ranks meet in our store, as torchrun's do, so nobody takes the port before rank 0 opens it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    around = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    # The module lies beside the job, wherever the adapter's environment is.
    module = Path(__file__).with_name("triaxis_subject.py")
    shutil.copy(module, place)
    paths = [str(place), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, **thread_variables(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [asked.python, str(asked.adapter), str(place)],
                    env=variables | around | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=sys.stderr,
                )
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        waiting, end = set(ranks), time.monotonic() + MOST_SECONDS
        while waiting:
            if time.monotonic() > end:
                raise ReportError(
                    f"ranks {sorted(map(ranks.index, waiting))} have not ended in {MOST_SECONDS:g} seconds"
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
