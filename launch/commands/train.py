"""`triaxis train`, which `launch/pretrain_gpt.sh` calls: config and overrides -> ranks (launch/launcher.py)."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from engine.errors import ConfigError
from launch import hostfile
from launch.failure import DIVERGED
from launch.launcher import DEFAULT_CONFIG, FROM_SCRATCH, Request, launch
from launch.preflight import look_before_training

NAME = "train"
HELP = "Start a training run: on this machine, on this node of several, or as a task of srun."
EXAMPLES = """examples:
  triaxis train
  triaxis train configs/gpt_tiny.yaml train.steps=20 optimizer.lr=1e-3
  TP=4 PP=1 VPP=1 DP=2 triaxis train configs/gpt_tiny.yaml --dry-run
  triaxis train configs/gpt_tiny.yaml --from-scratch

YAML < environment (TP PP VPP DP MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE RUN_NAME) < dotted overrides.
Ranks: NPROC_PER_NODE, else the GPUs of this node, else tp pp dp of the config on the CPU.
Several nodes: HOSTFILE=path (`host slots=8` per line) starts them over ssh; srun with one task per GPU; or the same command on each
with NNODES NODE_RANK MASTER_ADDR MASTER_PORT.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "triaxis train [config.yaml] [section.key=value ...] [--from-scratch] [--dry-run]"
    parser.epilog = EXAMPLES
    parser.add_argument(
        "words",
        nargs="*",
        metavar="config.yaml section.key=value",
        help="a config and overrides; without a config: configs/gpt_tiny.yaml on real text, which is prepared first",
    )
    parser.add_argument(
        FROM_SCRATCH,
        action="store_true",
        help="start at step 0 though this run has saved checkpoints (they are moved aside); without it, it resumes",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the launch line, the layout and the batch; start nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Start it; the exit code is the run's."""
    asked = request(args.words, dry_run=args.dry_run)
    if hostfile.is_asked_for(os.environ):
        flags = [FROM_SCRATCH] if args.from_scratch else []
        return hostfile.start(asked.config_path or DEFAULT_CONFIG, asked.overrides, flags, dry_run=args.dry_run)
    asked = replace(asked, explained_codes=(DIVERGED,), trains=True)
    if args.from_scratch:
        asked = replace(asked, worker_flags=(FROM_SCRATCH,))
    else:
        asked = replace(asked, preflight=look_before_training)
    return launch(asked, os.environ)


def request(words: list[str], *, dry_run: bool) -> Request:
    """A config's path, if the first word is no override, and overrides.

    Raises:
        ConfigError: a later word is no override.
    """
    path = Path(words[0]) if words and "=" not in words[0] else None
    overrides = words[1:] if path else words
    if strangers := [word for word in overrides if "=" not in word]:
        raise ConfigError(
            [
                f"{word!r} is neither the first word (a config) nor an override; it would be ignored. Write overrides as "
                f"section.key=value, such as train.steps=20."
                for word in strangers
            ],
            "the command line",
        )
    return Request(path, tuple(overrides), dry_run)
