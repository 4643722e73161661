"""`triaxis verify --oracle`: our layouts compared with another library's model, which is trained in its own process.

    oracle (one process, CPU)  ->  whole tensors under our names  <-  our one process, then our layouts: each rank its parts

All of them train on a small corpus (`launch/verify/oracles/corpus.py`), which the oracle reads, cuts and counts by itself.

The files are those of an ordinary verification, so ranks and judge are the same; only the writer of the reference differs. Our
one process goes first: when it differs too, the model is a different one, and no layout is to blame.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from triaxis.engine.config.moe import BalanceConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError
from triaxis.engine.program import pip_install
from triaxis.launch.inference.request import JOB
from triaxis.launch.start.command_line import refuse
from triaxis.launch.start.import_path import import_variables
from triaxis.launch.start.launcher import thread_variables
from triaxis.launch.verify.oracles.corpus import with_corpus, write_corpus
from triaxis.launch.verify.run import (
    ONE_PROCESS,
    Trial,
    VerificationError,
    checked,
    evidence,
    layout_job,
    start_ranks,
    trial,
)
from triaxis.launch.verify.verdict.judge import Cause, Verdict, judge
from triaxis.models.interop.huggingface.config import family_of
from triaxis.models.interop.megatron.config import megatron_args

WORKER = "triaxis.launch.verify.oracles.rank"

ORACLES = {
    "megatron-core": ("megatron-core>=0.16,<0.17", "Megatron-Core's GPTModel and its distributed optimizer"),
    "transformers": ("transformers", "the Hugging Face model that an export would write, and torch's AdamW"),
}
"""Name of the package -> (what pip installs it by, what it is as an oracle)."""

MEGATRON_VERSION = "0.16."
"""Of which the patches in `launch/verify/oracles/megatron_cpu.py` are."""

DTYPES = ("float64", "fp32")
NUM_STEPS = 5

SITES = ("token_losses", "loss")
"""The outputs that every model has."""

_LARGEST = {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "sequence_parallel": True}
LAYOUTS: tuple[dict[str, int | bool], ...] = (
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"pp": 2, "vpp": 2, "dp": 2},
)
"""What is compared where no layout was asked for: every way of cutting, on 4 ranks each, of one small model."""


@dataclass(frozen=True, slots=True)
class OracleTrial:
    """A comparison with an oracle.

    Attributes:
        oracle: one of `ORACLES`.
        trials: our one process, then layouts; all of one model, batch and optimizer.
    """

    oracle: str
    version: str
    trials: tuple[Trial, ...]

    @property
    def against(self) -> str:
        return f"{self.oracle} {self.version}"


def oracle_trial(
    path: Path,
    overrides: Sequence[str],
    *,
    oracle: str,
    layout: Sequence[str] | None,
    small: bool,
    num_steps: int,
    dtype: str,
) -> OracleTrial:
    """Build the configurations of a comparison.

    Args:
        oracle: one of `ORACLES`.
        layout: overrides of `parallel`; None: those of `LAYOUTS`.

    Raises:
        ConfigError: the oracle's package is missing or of another version, or it cannot express the model; the config is wrong.
    """
    if dtype not in DTYPES:
        why = f"each model rounds to {dtype} in places of its own, and a difference of that size would be no bug"
        refuse([f"--dtype {dtype} with --oracle: {why}. Give one of {', '.join(DTYPES)}."])
    found = installed_version(oracle)
    if layout is None:
        ignored = [word for word in overrides if word.startswith(("parallel.", "schedule."))]
        why = (
            f"without --layout, our one process and {len(LAYOUTS)} layouts are compared, and this word would be ignored"
        )
        refuse(f"{word}: {why}. Give the layout: --layout tp=2,pp=2." for word in ignored)
    largest = [f"parallel.{name}={str(value).lower()}" for name, value in _LARGEST.items()]
    own_sizes = ["parallel.layers_per_stage=null", "schedule.name=auto", "schedule.file=null", *largest]
    chosen = own_sizes if layout is None else layout
    asked = trial(path, (*overrides, *chosen), small=small, num_steps=num_steps, dtype=dtype)
    refuse(refusals(oracle, asked.config), f"a comparison with {oracle}")
    layouts = [asked.config]
    if layout is None:
        tree = asked.config.model_dump(mode="json")
        layouts = [checked(tree | {"parallel": tree["parallel"] | ONE_PROCESS | sizes}) for sizes in LAYOUTS]
    trials = [Trial(config, asked.reference) for config in layouts if config != asked.reference]
    return OracleTrial(oracle, found, (Trial(asked.reference, asked.reference), *trials))


def installed_version(oracle: str) -> str:
    """Return the version of an oracle's package.

    Raises:
        ConfigError: it is not installed, or not one that is known here.
    """
    requirement, _ = ORACLES[oracle]
    try:
        found = version(oracle)
    except PackageNotFoundError:
        problem = f"{oracle} is not installed, and the comparison is with its code"
    else:
        if oracle != "megatron-core" or found.startswith(MEGATRON_VERSION):
            return found
        problem = (
            f"{oracle} {found} is installed: what lets it run on a CPU was written for {MEGATRON_VERSION}x, and on another "
            "version it could compute something else in silence"
        )
    raise ConfigError([f"--oracle {oracle}: {problem}. Run  {pip_install(requirement)}"], "the command line")


def refusals(oracle: str, config: Config) -> Iterator[str]:
    """List the features of the model that the oracle cannot express."""
    for name in ("hidden_dropout", "attention_dropout"):
        if probability := getattr(config.model, name):
            yield (
                f"model.{name} = {probability}: {oracle} draws masks from generators of its own, so equal models would differ. "
                f"Add model.{name}=0."
            )
    if config.optimizer.ema is not None:
        yield f"optimizer.ema: {oracle} keeps no moving average that is compared. Add optimizer.ema=null."
    if config.optimizer.name != "adamw":
        yield f"optimizer.name = {config.optimizer.name}: {oracle} is compared with AdamW alone. Add optimizer.name=adamw."
    if config.optimizer.groups:
        yield f"optimizer.groups: {oracle} trains all parameters, with one rate and one decay. Add optimizer.groups=[]."
    if config.model.mtp is not None:
        yield f"model.mtp is given: {oracle} is compared by the next token alone. Add model.mtp=null."
    if (moe := config.model.moe) is not None:
        for name in BalanceConfig.model_fields:
            if rate := getattr(moe.balance, name):
                yield (
                    f"model.moe.balance.{name} = {rate}: {oracle} trains without it, so gradients and choices would differ. Add "
                    f"model.moe.balance.{name}=0."
                )
        if moe.choice_bias:
            yield f"model.moe.choice_bias = True: {oracle} trains no bias of a choice. Add model.moe.choice_bias=false."
    try:
        if oracle == "megatron-core":
            if megatron_args(config.model)["apply_layernorm_1p"]:
                yield f"model.norm = {config.model.norm}: on a CPU {oracle} has no norm whose weights are stored less one."
        else:
            family_of(config.model)
    except ConfigError as error:
        yield from error.problems


def verify_against(asked: OracleTrial) -> Iterator[tuple[Trial, Verdict]]:
    """Run the oracle, then one trial after another; yield each verdict as soon as it is there.

    When our one process differs, its verdict is the last: all layouts would differ as it does.

    Raises:
        VerificationError: a run did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-oracle-") as name:
        folder = Path(name)
        write_corpus(asked.trials[0].reference, folder)
        if exit_code := _run_oracle(asked, folder):
            raise VerificationError(exit_code)
        for number, one in enumerate(asked.trials):
            for report in folder.glob("rank_*.json"):
                report.unlink()  # of the layout before
            exit_code = start_ranks(with_corpus(one.config, folder), folder / f"layout_{number}", _job(folder))
            if exit_code:
                raise VerificationError(exit_code)
            verdict = verdict_against(asked, one, folder)
            yield one, verdict
            if not number and not verdict.equal:
                return


def verdict_against(asked: OracleTrial, one: Trial, folder: Path) -> Verdict:
    """Judge the files in `folder`: the oracle's, and those of the ranks of this trial."""
    verdict = judge(evidence(one.config, folder), one.tolerance)
    return replace(verdict, cause=_cause(asked, one, verdict))


def show_oracle_plan(asked: OracleTrial) -> None:
    """Print how all runs would be started; start nothing."""
    with tempfile.TemporaryDirectory(prefix="triaxis-oracle-") as name:
        folder = Path(name)
        variables = [f"{name}={shlex.quote(value)}" for name, value in import_variables(os.environ).items()]
        print("oracle ", *variables, *_oracle_command(folder / "oracle" / "verify.yaml"))
        for number, one in enumerate(asked.trials):
            start_ranks(one.config, folder / f"layout_{number}", _job(folder), dry_run=True)


def _job(folder: Path) -> dict[str, object]:
    return layout_job(folder) | {"sites": SITES}


def _oracle_command(path: Path) -> list[str]:
    return [sys.executable, "-m", WORKER, str(path)]


def _run_oracle(asked: OracleTrial, folder: Path) -> int:
    """Run the oracle in its own process: the globals of its code, and the patches that it needs, end with it."""
    place = folder / "oracle"
    place.mkdir()
    path = place / "verify.yaml"
    path.write_text(to_yaml(with_corpus(asked.trials[0].reference, folder)))
    (place / JOB).write_text(json.dumps({"folder": str(folder), "oracle": asked.oracle}))
    # On the CPU, on any device of the layouts, and offline.
    variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | thread_variables(os.environ)
    variables |= import_variables(os.environ)
    return subprocess.run(_oracle_command(path), env=os.environ | variables, stdout=sys.stderr, check=False).returncode


def _cause(asked: OracleTrial, one: Trial, verdict: Verdict) -> Cause | None:
    """Return the cause of a difference from an oracle; the judge's guess covers only layouts and the parts that report outputs."""
    if verdict.equal:
        return None
    first = verdict.differences[0]
    if first.what == "samples":
        return Cause(
            verdict.cause.axis if verdict.cause and one.config != one.reference else None,
            f"the model was not reached: {asked.oracle} and our loader read the corpus apart from each other, and ids, tokens, "
            "labels or masks of samples differ",
        )
    if one.config == one.reference:
        return Cause(
            None,
            f"our one process differs from {asked.oracle} already, first in {first.what}: no layout is to blame, but the "
            "arithmetic of the model or of the update, or the exchange of weights between their names and ours",
        )
    if first.what in ("output", "loss"):
        return Cause(
            None,
            f"our one process agrees with {asked.oracle}, so the forward of the layout is wrong: the same command without "
            "--oracle compares it place by place and says where",
        )
    return verdict.cause
