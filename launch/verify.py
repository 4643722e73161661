"""From a config and a layout to a verdict: runs one process and the layout, reads what their ranks wrote (no torch here)."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import Config, parallel_sizes
from engine.config_load import ENVIRONMENT, load_config, to_yaml
from engine.config_problems import with_value
from engine.errors import ConfigError
from engine.pipeline.partition import partition
from engine.shard_spec import localize
from engine.verify.judge import TOLERANCES, Evidence, Verdict, judge
from engine.verify.records import REFERENCE_STEPS, ParameterFacts, RankReport, StepFacts
from engine.verify.shrink import shrink
from launch.from_checkpoint import JOB
from launch.launcher import Request, launch
from models.memory import settled
from models.specs import model_specs, stage_specs

WORKER = "launch.verify_rank"

CLIP = 0.5
"""Below any gradient norm off the initial point, so that clipping is at work."""

LEARNING_RATE = 1e-2
ONE_PROCESS = {
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "dp": 1,
    "sequence_parallel": False,
    "layers_per_stage": None,
}


class VerificationError(Exception):
    """The runs could not be made; `exit_code` is theirs."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"a run ended with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing to verify.

    Attributes:
        config: the layout's, as it will run.
        reference: the same in one process.
    """

    config: Config
    reference: Config

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.config.precision.dtype]


def trial(path: Path, overrides: tuple[str, ...], *, small: bool, num_steps: int, dtype: str | None) -> Trial:
    """The two configurations of a verification.

    Args:
        path, overrides: as for training, the layout among the overrides.
        small: shrink it (`engine/verify/shrink.py`).
        num_steps: optimizer steps.
        dtype: of both runs; None: the config's own.

    Raises:
        ConfigError: all problems at once.
    """
    asked = load_config(path, overrides, os.environ)
    asked = with_value(asked, "parallel.dp", asked.parallel.dp or 1)
    # What is chosen by memory is chosen for the sizes that were asked for.
    asked = settled(asked, parallel_sizes(asked))
    tree = asked.model_dump(mode="json")
    for section, values in (shrink(asked) if small else {}).items():
        tree[section] |= values
    tree["data"] = {"synthetic": True}
    tree["train"] |= {"steps": num_steps, "tokens": None, "eval_interval": None}
    optimizer = asked.optimizer
    tree["optimizer"] |= {
        "lr": LEARNING_RATE,
        "min_lr": 0.0,
        "warmup_steps": 0,
        "decay_steps": None,
        "clip_grad": CLIP,
        "weight_decay": optimizer.weight_decay or 0.1,
    }
    tree["precision"]["dtype"] = dtype or asked.precision.dtype
    tree["checkpoint"] = {}
    tree["telemetry"] = {}
    one = tree | {
        "parallel": tree["parallel"] | ONE_PROCESS,
        "schedule": {"name": "auto"},
        "recompute": {"granularity": "none"},
        "offload": {},
    }
    reference = checked(one)
    # Settled like the layout, so that a layout of one process is equal to it.
    return Trial(checked(tree), settled(reference, parallel_sizes(reference)))


def checked(tree: Mapping[str, Any]) -> Config:
    """A tree as a configuration.

    Raises:
        ConfigError: all problems at once.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        path = Path(folder) / "verify.yaml"
        path.write_text(json.dumps(tree))
        try:
            return load_config(path)
        except ConfigError as error:
            raise ConfigError(error.problems, "the configuration to verify") from None


def verify(asked: Trial) -> Verdict:
    """Run both and compare.

    Raises:
        VerificationError: a run did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-verify-") as name:
        folder = Path(name)
        for config, is_reference in ((asked.reference, True), (asked.config, False)):
            exit_code = _start(config, folder, is_reference=is_reference)
            if exit_code:
                raise VerificationError(exit_code)
        return judge(evidence(asked.config, folder), asked.tolerance)


def show_plan(asked: Trial) -> None:
    """Say how both runs would be started; start nothing."""
    with tempfile.TemporaryDirectory(prefix="triaxis-verify-") as name:
        for config, is_reference in ((asked.reference, True), (asked.config, False)):
            _start(config, Path(name), is_reference=is_reference, dry_run=True)


def _start(config: Config, folder: Path, *, is_reference: bool, dry_run: bool = False) -> int:
    job = {"folder": str(folder), "is_reference": is_reference, "sites": None}
    return start_ranks(config, folder / ("reference" if is_reference else "layout"), job, dry_run=dry_run)


def start_ranks(config: Config, place: Path, job: Mapping[str, object], *, dry_run: bool = False) -> int:
    """Run the ranks of `launch/verify_rank.py`; returns their exit code.

    Args:
        config: with the layout.
        place: a folder that is not there yet, for configuration and job.
        job: what `launch/verify_rank.py` reads.
        dry_run: say how they would be started; start nothing.
    """
    place.mkdir()
    path = place / "verify.yaml"
    path.write_text(to_yaml(config))
    (place / JOB).write_text(json.dumps(job))
    # What is started is said beside the certificate, unless it is all that was asked for.
    with without_layout_variables(), redirect_stdout(sys.stdout if dry_run else sys.stderr):
        return launch(Request(path, (), dry_run=dry_run, worker=WORKER), os.environ)


@contextmanager
def without_layout_variables() -> Iterator[None]:
    """Leave out TP, PP and the like, which have been read already: the runs in the block differ from them on purpose."""
    kept = {name: os.environ.pop(name) for name in ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def evidence(config: Config, folder: Path) -> Evidence:
    """What the ranks of a layout left in `folder`, with what the layout does with each parameter."""
    steps = json.loads((folder / REFERENCE_STEPS).read_text())
    return Evidence(
        parallel_sizes(config),
        config.parallel.sequence_parallel,
        parameter_facts(config),
        tuple(StepFacts(**one) for one in steps),
        tuple(RankReport.read(path) for path in sorted(folder.glob("rank_*.json"))),
    )


def parameter_facts(config: Config) -> tuple[ParameterFacts, ...]:
    """Every parameter of the model in forward order, as the layout holds it."""
    parallel = config.parallel
    stages = partition(config.model.num_layers, parallel.pp, parallel.vpp, parallel.layers_per_stage)
    first_stage: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for spec in stage_specs(config.model, stage):
            first_stage.setdefault(spec.name, number)
    facts = []
    for spec in model_specs(config.model):
        record = localize(spec, tp=parallel.tp, tp_index=0, sequence_parallel=parallel.sequence_parallel)
        facts.append(
            ParameterFacts(
                spec.name, record.replicas, record.sum_over, spec.decay, spec.tied_ends, first_stage[spec.name]
            )
        )
    return tuple(facts)
