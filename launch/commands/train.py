"""`triaxis train` starts ranks from a config and overrides (launch/start/launcher.py)."""

import argparse
import os
from dataclasses import replace
from functools import partial

from triaxis.engine.errors import ExitCode
from triaxis.launch.start import hostfile
from triaxis.launch.start.command_line import CONFIG, CommandParser, add_dry_run
from triaxis.launch.start.launcher import DEFAULT_CONFIG, FROM_SCRATCH, Request, default_config, launch
from triaxis.launch.start.preflight import look_before_training

VERBOSE = "--verbose"

EXAMPLES = """examples:
  triaxis train
  triaxis train configs/gpt_tiny.yaml train.steps=20 optimizer.lr=1e-3
  TP=4 PP=1 VPP=1 DP=2 triaxis train configs/gpt_tiny.yaml --dry-run
  triaxis train configs/gpt_tiny.yaml --from-scratch

YAML < environment (TP CP PP VPP DP EP ETP MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE RUN_NAME) < dotted overrides.
Ranks: NPROC_PER_NODE, else the GPUs of this node, else tp pp dp of the config on the CPU.
Several nodes: HOSTFILE=path (`host slots=8` per line) starts them over ssh; srun with one task per GPU; or the same command on each
with NNODES NODE_RANK MASTER_ADDR MASTER_PORT.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis train [CONFIG] [--from-scratch] [--verbose] [--dry-run] [section.key=value ...]"
    parser.epilog = EXAMPLES
    parser.takes(
        CONFIG,
        "the run; without one: configs/gpt_tiny.yaml, or gpt_125m_bytes.yaml on GPUs, on text that is prepared first",
        required=False,
        read_without=DEFAULT_CONFIG,
    )
    parser.add_argument(
        FROM_SCRATCH,
        action="store_true",
        help="start at step 0 though this run has saved checkpoints (they are moved aside); without it, it resumes",
    )
    parser.add_argument(
        VERBOSE,
        action="store_true",
        help="print the line that starts the ranks too, with the environment that is set for them",
    )
    add_dry_run(parser, "print the launch line, the layout and the batch; start nothing")


def run(args: argparse.Namespace) -> int:
    """Start the run here, or on the hosts in HOSTFILE if that is set. Return its exit code."""
    asked = request(args)
    if hostfile.is_asked_for(os.environ):
        flags = [FROM_SCRATCH] if args.from_scratch else []
        flags += [VERBOSE] if args.verbose else []
        path = asked.config_path or default_config(asked.overrides, os.environ)
        return hostfile.start(path, asked.overrides, flags, dry_run=args.dry_run)
    asked = replace(asked, explained_codes=(ExitCode.DIVERGED,), trains=True, verbose=args.verbose)
    if args.from_scratch:
        asked = replace(asked, worker_flags=(FROM_SCRATCH,))
    asked = replace(asked, preflight=partial(look_before_training, from_scratch=args.from_scratch))
    return launch(asked, os.environ)


def request(args: argparse.Namespace) -> Request:
    """Build the request for a command line with a config, overrides and `--dry-run`."""
    return Request(args.config, tuple(args.overrides), args.dry_run)
