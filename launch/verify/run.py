"""Train a model in one process and in a layout, and compare the written files."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from itertools import count
from pathlib import Path

from triaxis.engine.config.load import ENVIRONMENT
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.quantities.update_settings import update_rule
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.launch.inference.request import JOB
from triaxis.launch.start.launcher import Request, launch
from triaxis.launch.verify.sweep import attributed
from triaxis.launch.verify.trial import CLIP, ONE_PROCESS, Trial, checked, trial
from triaxis.launch.verify.verdict.evidence import Evidence
from triaxis.launch.verify.verdict.judge import Verdict, judge
from triaxis.launch.verify.verdict.records import (
    NOISE_REPORT,
    REFERENCE_DIGESTS,
    REFERENCE_SAMPLES,
    REFERENCE_STEPS,
    ParameterFacts,
    RankReport,
    RoutingReport,
    StepFacts,
    samples_of,
)
from triaxis.models.specs import model_specs, stage_specs

__all__ = [
    "CLIP",
    "ONE_PROCESS",
    "Trial",
    "VerificationError",
    "checked",
    "evidence",
    "show_plan",
    "start_ranks",
    "trial",
    "verify_layout",
]

WORKER = "triaxis.launch.verify.rank"


class VerificationError(Exception):
    """A run of a verification failed with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"a run ended with exit code {exit_code}")
        self.exit_code = exit_code


def verify_layout(asked: Trial) -> Verdict:
    """Run the reference and the layout, and compare them.

    With `asked.noise`, a run in a wider dtype measures rounding first. If reference and layout differ, sub-layouts are run to find
    the responsible axis or feature.

    Raises:
        VerificationError: a run failed, other than a sub-layout's.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-verify-") as name:
        folder = Path(name)
        for number, (config, job) in enumerate(_runs(asked, folder)):
            if exit_code := start_ranks(config, folder / f"run_{number}", job):
                raise VerificationError(exit_code)
        seen = evidence(asked.config, folder)
        sub_layouts = count()

        def is_equal(config: Config) -> bool | None:
            for report in folder.glob("rank_*.json"):
                report.unlink()
            if start_ranks(config, folder / f"sub_layout_{next(sub_layouts)}", layout_job(folder)):
                return None
            return judge(evidence(config, folder), asked.tolerance).equal

        return attributed(asked.config, seen, judge(seen, asked.tolerance), is_equal)


def show_plan(asked: Trial) -> None:
    """Print how each run of a verification would be started, and start nothing.

    Runs without one axis or feature, which look for a difference's cause, are not shown.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-verify-") as name:
        folder = Path(name)
        for number, (config, job) in enumerate(_runs(asked, folder)):
            start_ranks(config, folder / f"run_{number}", job, dry_run=True)


def _runs(asked: Trial, folder: Path) -> Iterator[tuple[Config, dict[str, object]]]:
    """Yield (configuration, job) for each run. A job has the arguments of `observe` in `launch/verify/rank.py`."""
    yield asked.reference, layout_job(folder) | {"is_reference": True}
    if asked.noise is not None:
        yield asked.noise, layout_job(folder) | {"noise_of": asked.reference.precision.dtype}
    yield asked.config, layout_job(folder)


def layout_job(folder: Path) -> dict[str, object]:
    """Build the job for a layout's ranks, in the form that `launch/verify/rank.py` reads."""
    return {"folder": str(folder), "is_reference": False, "sites": None, "noise_of": None}


def start_ranks(config: Config, place: Path, job: Mapping[str, object], *, dry_run: bool = False) -> int:
    """Run `launch/verify/rank.py` on every rank, and return the exit code.

    Args:
        place: new folder for the configuration and the job.
        job: job that `launch/verify/rank.py` reads.
        dry_run: print the commands and start nothing.
    """
    place.mkdir()
    path = place / "verify.yaml"
    path.write_text(to_yaml(config))
    (place / JOB).write_text(json.dumps(job))
    # Launch lines go to stderr, because the certificate goes to stdout; a dry run prints them on stdout.
    with without_layout_variables(), redirect_stdout(sys.stdout if dry_run else sys.stderr):
        return launch(Request(path, (), dry_run=dry_run, worker=WORKER), os.environ)


@contextmanager
def without_layout_variables() -> Iterator[None]:
    """Hide TP, PP and similar variables inside the block, whose runs have other layouts."""
    kept = {name: os.environ.pop(name) for name in ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def evidence(config: Config, folder: Path) -> Evidence:
    """Collect the reports of a layout's ranks and the reference's records from `folder`, for `judge`."""
    num_steps = config.train.steps
    steps = json.loads((folder / REFERENCE_STEPS).read_text())[:num_steps]
    samples, noise = folder / REFERENCE_SAMPLES, folder / NOISE_REPORT
    return Evidence(
        parallel_sizes(config),
        parameter_facts(config),
        tuple(StepFacts(**one) for one in steps),
        tuple(RankReport.read(path) for path in sorted(folder.glob("rank_*.json"))),
        samples_of(json.loads(samples.read_text())[:num_steps]) if samples.exists() else (),
        RankReport.read(noise) if noise.exists() else None,
        routings_of(folder, num_steps),
    )


def routings_of(folder: Path, num_steps: int | None) -> tuple[RoutingReport, ...]:
    """Read the reference's expert choices for the first `num_steps` steps.

    The result is empty if the reference has not written them.
    """
    path = folder / REFERENCE_DIGESTS
    found = [RoutingReport(**one) for one in json.loads(path.read_text())] if path.exists() else []
    return tuple(one for one in found if num_steps is None or one.step < num_steps)


def parameter_facts(config: Config) -> tuple[ParameterFacts, ...]:
    """List each parameter's weight decay and first stage in the layout, in forward order."""
    first_stage: dict[str, int] = {}
    for number, stage in enumerate(stages_of(config)):
        for spec in stage_specs(config.model, stage):
            first_stage.setdefault(spec.name, number)
    facts = []
    for spec in model_specs(config.model):
        decay = update_rule(spec.name, config.optimizer, decays=spec.decay).weight_decay
        facts.append(ParameterFacts(spec.name, decay > 0, first_stage[spec.name]))
    return tuple(facts)
