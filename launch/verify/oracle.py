"""Compare our layouts with another library's model, for `triaxis verify --oracle`.

    oracle (one process, CPU)  ->  whole tensors under our names  <-  our one process, then our layouts: each rank its parts

The other library's model, the oracle, is trained in its own process. All runs train on the small corpus of
`launch/verify/oracles/corpus.py`. Our engine in one process is compared first. If it differs, no layout is to blame.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.moe import BalanceConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError
from triaxis.engine.program import pip_install
from triaxis.engine.storage.user_module import UserModuleError
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
"""Package name -> (pip requirement, description as an oracle)."""

MEGATRON_VERSION = "0.16."
"""Version that the patches in `launch/verify/oracles/megatron_cpu.py` are written for."""

DTYPES = ("float64", "fp32")
NUM_STEPS = 5

SITES = ("token_losses", "loss")
"""Sites whose outputs are compared with an oracle's; every model has them."""

_LARGEST = {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "sequence_parallel": True}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"pp": 2, "vpp": 2, "dp": 2},
)
"""Layouts compared by default: every way of cutting, on 4 ranks each, for one small model.

With dp, an even number of experts is cut in two."""


@dataclass(frozen=True, slots=True)
class OracleTrial:
    """A comparison with an oracle.

    Attributes:
        oracle: one of `ORACLES`, or a function as SOURCE:NAME.
        version: version of the oracle's package. For a function: the first digits of its source digest.
        trials: our engine in one process, then in each layout. All have the same model, batch and optimizer.
    """

    oracle: str
    version: str
    trials: tuple[Trial, ...]

    @property
    def against(self) -> str:
        return f"{self.oracle} {self.version}"


def is_own(oracle: str) -> bool:
    """Whether an oracle is a user's function, written as SOURCE:NAME."""
    return ":" in oracle


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
    """Build the configurations for a comparison with an oracle.

    Args:
        oracle: one of `ORACLES`, or a function as SOURCE:NAME.
        layout: overrides for `parallel`; None: all `LAYOUTS` are compared.

    Raises:
        ConfigError: the dtype is not in `DTYPES`, overrides set a layout that would be ignored, the oracle is not installed or not
            supported, the oracle cannot express the model, or the config is wrong.
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
        layout = _largest(path, overrides)
        asked = trial(path, (*overrides, *layout), small=small, num_steps=num_steps, dtype=dtype)
        layouts = [checked(tree) for tree in _layouts(asked.config)]
    else:
        asked = trial(path, (*overrides, *layout), small=small, num_steps=num_steps, dtype=dtype)
        layouts = [asked.config]
    refuse(refusals(oracle, asked.config), f"a comparison with {oracle}")
    trials = [Trial(config, asked.reference) for config in layouts if config != asked.reference]
    return OracleTrial(oracle, found, (Trial(asked.reference, asked.reference), *trials))


def _largest(path: Path, overrides: Sequence[str]) -> list[str]:
    """Build overrides for a layout with the largest sizes in `LAYOUTS`.

    A small model that is legal in this layout is legal in all of them.
    """
    # The config's own layout is not run, so the model need not fit it.
    model = load_config(path, (*overrides, *_words(ONE_PROCESS)), os.environ).model
    stages = _listed_stages(model, _LARGEST["pp"] * _LARGEST["vpp"])
    return _words({**ONE_PROCESS, **_LARGEST, "ep": _ways(model), "layers_per_stage": stages})


def _words(parallel: Mapping[str, object]) -> list[str]:
    words = {f"parallel.{name}": value for name, value in parallel.items()}
    return [
        f"{name}={json.dumps(value)}"
        for name, value in (words | {"schedule.name": "auto", "schedule.file": None}).items()
    ]


def _layouts(config: Config) -> Iterator[dict[str, Any]]:
    """Yield the config as a nested dict, once with each layout in `LAYOUTS`."""
    tree = config.model_dump(mode="json")
    for sizes in LAYOUTS:
        experts = {"ep": _ways(config.model) if sizes.get("dp", 1) > 1 else 1}
        stages = _listed_stages(config.model, sizes.get("pp", 1) * sizes.get("vpp", 1))
        yield tree | {"parallel": tree["parallel"] | ONE_PROCESS | sizes | experts | {"layers_per_stage": stages}}


def _ways(model: ModelConfig) -> int:
    """Return the ep of layouts with dp > 1: 2 if the number of experts is even, else 1."""
    return 1 if model.moe is None or model.moe.num_experts % 2 else 2


def _listed_stages(model: ModelConfig, num_stages: int) -> list[int] | None:
    """List the layers per stage if there are fewer layers than stages, else return None.

    The first stages have 1 layer each, and the last have 0.
    """
    num_layers = model.num_layers
    return None if num_layers >= num_stages else [1] * num_layers + [0] * (num_stages - num_layers)


def installed_version(oracle: str) -> str:
    """Look up the version of an oracle's package.

    For a user's function, return the first 8 digits of its source digest.

    Raises:
        ConfigError: the package is missing, its version is not supported here, or a user's function cannot be loaded.
    """
    if is_own(oracle):
        return _digest(oracle)
    requirement, _ = ORACLES[oracle]
    try:
        found = version(oracle)
    except PackageNotFoundError:
        problem = f"{oracle} is not installed, and the comparison is with its code"
    else:
        if oracle != "megatron-core" or found.startswith(MEGATRON_VERSION):
            return found
        problem = (
            f"{oracle} {found} is installed, but our patches for the CPU are for {MEGATRON_VERSION}x; with another "
            "version they could silently compute something else"
        )
    raise ConfigError([f"--oracle {oracle}: {problem}. Run  {pip_install(requirement)}"], "the command line")


def _digest(oracle: str) -> str:
    from triaxis.launch.verify.oracles.own import module_of

    source, _, name = oracle.rpartition(":")
    try:
        module, digest = module_of(oracle)
    except UserModuleError as error:
        raise ConfigError([f"--oracle {oracle}: {error}."], "the command line") from error
    if not callable(getattr(module, name, None)):
        raise ConfigError([f"--oracle {oracle}: {source} has no function {name!r}."], "the command line")
    return digest[:8]


def what_is(oracle: str) -> str:
    """Name the model and the optimizer that an oracle runs, for messages."""
    return "a function of whole tensors, and torch's AdamW" if is_own(oracle) else ORACLES[oracle][1]


def refusals(oracle: str, config: Config) -> Iterator[str]:
    """Yield a message for each setting of model, optimizer or data that the oracle cannot follow."""
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
    if config.model.z_loss:
        yield f"model.z_loss = {config.model.z_loss}: {oracle} trains without it, so gradients would differ. Add model.z_loss=0."
    if config.model.mtp is not None:
        yield f"model.mtp is given: {oracle} is compared by the next token alone. Add model.mtp=null."
    if (moe := config.model.moe) is not None:
        for name in BalanceConfig.model_fields:
            # The balance field that is not a rate has no effect without the rates.
            if isinstance(rate := getattr(moe.balance, name), float) and rate:
                yield (
                    f"model.moe.balance.{name} = {rate}: {oracle} trains without it, so gradients and choices would differ. Add "
                    f"model.moe.balance.{name}=0."
                )
    if oracle == "megatron-core":
        yield from _documents_of_megatron(config)
    if is_own(oracle):
        return
    if config.model.own.with_parameters() or config.model.own.loss:
        yield f"model.extension: {oracle} has no code for it. Give a function of yours: --oracle mine.py:reference."
    try:
        if oracle == "megatron-core":
            if megatron_args(config.model)["apply_layernorm_1p"]:
                yield f"model.norm = {config.model.norm}: on a CPU {oracle} has no norm whose weights are stored less one."
        else:
            family_of(config.model)
    except ConfigError as error:
        # Only the nearest family's problem is shown, the one with the fewest obstacles.
        yield from (
            error.problems
            if oracle == "megatron-core"
            else [min(error.problems, key=lambda one: ("model.moe = " in one, one.count("; ")))]
        )


def _documents_of_megatron(config: Config) -> Iterator[str]:
    data, kinds = config.data, set(config.model.kinds)
    if data.attention == "within" and any(kind.window is not None for kind in kinds):
        yield (
            "data.attention = within: megatron-core's attention in torch replaces the mask of documents by that of its window, "
            "and another model would be compared. Add data.attention=across."
        )
    if data.attention == "across" and data.positions == "document" and any(kind.rotary for kind in kinds):
        yield (
            "data.positions = document: megatron-core rotates by the place in the sample, and another model would be compared. "
            "Add data.positions=sample, or data.attention=within, where both rotate alike."
        )


def verify_against(asked: OracleTrial) -> Iterator[tuple[Trial, Verdict]]:
    """Run the oracle, then each trial, and yield (trial, verdict against the oracle).

    If our engine in one process differs from the oracle, no layout is run.

    Raises:
        VerificationError: a run failed.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-oracle-") as name:
        folder = Path(name)
        write_corpus(asked.trials[0].reference, folder)
        if exit_code := run_oracle(asked.oracle, asked.trials[0].reference, folder):
            raise VerificationError(exit_code)
        for number, one in enumerate(asked.trials):
            for report in folder.glob("rank_*.json"):
                report.unlink()  # left by the layout before
            exit_code = start_ranks(with_corpus(one.config, folder), folder / f"layout_{number}", _job(folder))
            if exit_code:
                raise VerificationError(exit_code)
            verdict = verdict_against(asked, one, folder)
            yield one, verdict
            if not number and not verdict.equal:
                return


def verdict_against(asked: OracleTrial, one: Trial, folder: Path) -> Verdict:
    """Judge the files that the oracle and this trial's ranks wrote to `folder`."""
    verdict = judge(evidence(one.config, folder), one.tolerance)
    return replace(verdict, cause=_cause(asked, one, verdict))


def show_oracle_plan(asked: OracleTrial) -> None:
    """Print how every run would be started, and start nothing."""
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


def run_oracle(oracle: str, config: Config, folder: Path) -> int:
    """Run the oracle in its own process, and return the exit code.

    Args:
        config: configuration for one process.
        folder: folder with the corpus, to which the oracle writes its files.
    """
    place = folder / "oracle"
    place.mkdir()
    path = place / "verify.yaml"
    path.write_text(to_yaml(with_corpus(config, folder)))
    (place / JOB).write_text(json.dumps({"folder": str(folder), "oracle": oracle}))
    # The oracle runs on the CPU, whatever device the layouts use, and offline.
    variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | thread_variables(os.environ)
    variables |= import_variables(os.environ)
    return subprocess.run(_oracle_command(path), env=os.environ | variables, stdout=sys.stderr, check=False).returncode


def _cause(asked: OracleTrial, one: Trial, verdict: Verdict) -> Cause | None:
    """Describe why a trial differs from an oracle.

    Layouts run only after our one process has agreed with the oracle. So a layout that differs first in gradients or updates
    keeps the verdict's own cause. None: the trial does not differ.
    """
    if verdict.equal:
        return None
    first = verdict.differences[0]
    if first.what == "samples":
        return Cause(
            verdict.cause.axis if verdict.cause and one.config != one.reference else None,
            f"the model was not compared: {asked.oracle} and our loader read the corpus differently, so ids, tokens, "
            "labels or masks of samples differ",
        )
    if one.config == one.reference:
        return Cause(
            None,
            f"our one process already differs from {asked.oracle}, first in {first.what}: no layout is to blame; the "
            "model or the update computes something else, or weights are converted wrongly between their names and "
            "ours",
        )
    if first.what in ("output", "loss"):
        return Cause(
            None,
            f"our one process agrees with {asked.oracle}, so the forward of the layout is wrong: the same command without "
            "--oracle compares every site and names the first wrong one",
        )
    return verdict.cause
