"""Starts a command that reads a trained model, on ranks in the requested layout.

    triaxis generate CHECKPOINT [section.key=value ...] --tp 2 ..
        |  checkpoint   the manifest of a checkpoint in any layout gives model, tokenizer, dtype and kernels
        |  config       the manifest's values in a one-process layout, changed by the environment, --tp and dotted keys
        |  job          the command's other arguments, as JSON
        v
    one process        the worker runs in this process
    several ranks      launch/start/launcher.py starts them, as for training

Every rank reads the config and the job from two files in a temporary folder.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from triaxis.engine.checkpoint.directory import Candidate, find
from triaxis.engine.checkpoint.inspect.recorded import (
    end_of_documents,
    recorded_config,
    recorded_tokenizer,
    trained_tokenizer,
)
from triaxis.engine.checkpoint.inspect.weights import WhichWeights, check_weights
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import BYTES, load_tokenizer
from triaxis.engine.errors import CheckpointError, ConfigError, DataError
from triaxis.launch.start.command_line import CHECKPOINT, CommandParser, add_weights
from triaxis.launch.start.launcher import Request, launch
from triaxis.launch.start.srun_task import is_rank

JOB = "job.json"

DTYPE_OF_WEIGHTS = {"bfloat16": "bf16", "float16": "fp32", "float32": "fp32", "float64": "float64"}
"""Weight dtype -> run dtype, if the config gives none. fp16 weights run in fp32, which holds their values exactly."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checkpoint that a user asked for, and the configuration for reading its model.

    Attributes:
        candidate: the checkpoint.
        which: weights to read, the trained ones or their moving average.
        tree: configuration before the environment and the overrides are applied.
        overrides: dotted keys with values, including those for --tp, --pp and --dp.
        config: configuration after the environment and the overrides are applied.
    """

    candidate: Candidate
    which: WhichWeights
    tree: Mapping[str, Any]
    overrides: tuple[str, ...]
    config: Config


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of all commands for trained models: checkpoint, overrides, --tp, --pp, --weights, --json."""
    parser.takes(CHECKPOINT, "step_00001000, a folder of checkpoints or a run directory (their latest)")
    for name, meaning in (("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}-parallel ranks (default: 1)")
    add_weights(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def ask(args: argparse.Namespace, train: Mapping[str, int] | None = None) -> Asked:
    """Find the checkpoint and check the config.

    Args:
        args: parsed arguments, including those from `add_arguments`.
        train: batch sizes in the section `train`; None: one sample.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or lacks the requested weights.
        ConfigError: the config has problems, which the message lists.
    """
    overrides = list(args.overrides)
    candidate = find(args.checkpoint)
    check_weights(candidate, args.weights)
    tree = readers_config(candidate, train or {})
    sizes = ("tp", "pp", "dp")
    overrides += [f"parallel.{size}={given}" for size in sizes if (given := getattr(args, size, None)) is not None]
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        try:
            config = load_config(_write_config(Path(folder), candidate, tree), overrides, os.environ)
        except ConfigError as error:
            raise ConfigError(error.problems, f"the configuration for {candidate.folder}") from None
    extension, recorded = config.model.extension, candidate.manifest.config["model"].get("extension")
    if extension is not None and recorded is not None and extension.source != recorded["source"]:
        print(
            f"model.extension: {extension.source}, since {recorded['source']} is not what was trained", file=sys.stderr
        )
    return Asked(candidate, args.weights, tree, tuple(overrides), config)


def readers_config(candidate: Candidate, train: Mapping[str, int]) -> dict[str, Any]:
    """Build the configuration's sections from a checkpoint's manifest, in a one-process layout.

    Args:
        candidate: the checkpoint.
        train: fields of the section `train`; missing ones give a step of one sample.

    Raises:
        CheckpointError: the manifest has no section `model`.
    """
    manifest = candidate.manifest
    saved = recorded_config(candidate)
    if not isinstance(saved.get("model"), dict):
        raise CheckpointError(
            f"the checkpoint of {manifest.run!r} has no `model` section in its manifest: its tensors have no meaning without "
            "heads, norms and positions. Write it again with the section."
        )
    dtypes = {piece.dtype for file in manifest.files for piece in file.pieces}
    return {
        "model": saved["model"],
        # No corpus is opened through this config, so it needs no path.
        "data": {"synthetic": True, "tokenizer": recorded_tokenizer(candidate) or BYTES},
        "precision": saved.get("precision") or {"dtype": DTYPE_OF_WEIGHTS[max(dtypes)]},
        "kernels": saved.get("kernels", {}),
        "parallel": {"dp": 1, "dp_replicas": 1},
        "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, **train},
    }


def open_tokenizer(asked: Asked) -> tuple[Asked, Tokenizer]:
    """Open the model's tokenizer. Return (`asked` with the tokenizer's resolved name, tokenizer).

    Raises:
        DataError: the tokenizer is not where the checkpoint says, it has ids without an embedding, or the model was trained with
            another one.
    """
    name, vocab_size = asked.config.data.tokenizer_name, asked.config.model.vocab_size
    try:
        tokenizer = load_tokenizer(name)
    except DataError as error:
        raise DataError(
            f"{error}\nThe checkpoint {asked.candidate.folder} names this tokenizer; say where it is now: data.tokenizer=PATH"
        ) from error
    if tokenizer.text_size > vocab_size:
        raise DataError(
            f"data.tokenizer = {name} has {tokenizer.text_size:,} ids, the model of {asked.candidate.folder} {vocab_size:,} "
            "tokens: some words would have no embedding, and the others may mean something else. Give the tokenizer that the "
            "model was trained with: data.tokenizer=PATH"
        )
    if (right := trained_tokenizer(asked.candidate, name, "data.tokenizer=")) != name:
        named = asked.config.model_copy(update={"data": asked.config.data.model_copy(update={"tokenizer": right})})
        others = (word for word in asked.overrides if not word.startswith("data.tokenizer="))
        asked = replace(asked, config=named, overrides=(*others, f"data.tokenizer={json.dumps(right)}"))
        tokenizer = load_tokenizer(right)
    tokenizer.eod_id = end_of_documents(asked.candidate, tokenizer)
    return asked, tokenizer


def start(asked: Asked, worker: str, job: Mapping[str, Any]) -> int:
    """Run the worker's ranks and return their exit code. Only rank 0's output goes to stdout.

    Args:
        worker: module that each rank runs, with `main(argv) -> int`.
        job: the command's arguments for the worker, without the checkpoint and the weights to read.
    """
    parallel = asked.config.parallel
    with tempfile.TemporaryDirectory(prefix="triaxis-") as name:
        folder = Path(name)
        path = _write_config(folder, asked.candidate, asked.tree)
        what = {"checkpoint": str(asked.candidate.folder.resolve()), "weights": asked.which}
        (folder / JOB).write_text(json.dumps({**what, **job}))
        if is_rank(os.environ):
            return launch(Request(path, asked.overrides, worker=worker), os.environ)
        if parallel.tp * parallel.pp * (parallel.dp or 1) == 1:
            # A single process has the machine to itself.
            os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
            return int(importlib.import_module(worker).main([str(path), *asked.overrides]))
        # The launcher's messages are for people; the ranks are separate processes and keep the real stdout.
        with redirect_stdout(sys.stderr):
            return launch(Request(path, asked.overrides, worker=worker), os.environ)


def read_job(argv: Sequence[str]) -> dict[str, Any]:
    """Read the job that `start` wrote, from a rank's arguments `argv`."""
    job: dict[str, Any] = json.loads(Path(argv[0]).with_name(JOB).read_text())
    return job


def _write_config(folder: Path, candidate: Candidate, tree: Mapping[str, Any]) -> Path:
    """Write the config to a file named after the checkpoint, because error messages show the file's name."""
    path = folder / f"{candidate.folder.name}.yaml"
    path.write_text(yaml.safe_dump(dict(tree)), encoding="utf-8")
    return path
