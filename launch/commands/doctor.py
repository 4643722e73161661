"""`triaxis doctor` names any node that is unlike the others, badly connected or slow."""

import argparse
import importlib
import os

from triaxis.engine.errors import ExitCode
from triaxis.launch.commands.train import request
from triaxis.launch.start.command_line import CONFIG, CommandParser, add_dry_run, add_json, add_output, refuse
from triaxis.launch.start.launcher import DEFAULT_CONFIG, Request, launch
from triaxis.launch.start.process.ending import run_rank
from triaxis.launch.start.srun_task import is_rank

WORKER = "triaxis.launch.doctor.rank"
EXAMPLES = f"""examples:
  triaxis doctor
  triaxis doctor configs/gpt_tiny.yaml --output doctor.json
  srun --ntasks-per-node=8 triaxis doctor configs/llama3_8b.yaml
  torchrun --nnodes 2 --nproc-per-node 8 ... --module triaxis.launch.cli doctor configs/llama3_8b.yaml

Without a config: this node alone, in one process. With one: the ranks that training would start, on the nodes that it would
take, under the same launchers and variables. Exit code 0: nothing is out of line (there may be warnings);
{ExitCode.OUT_OF_LINE}: a node is; {ExitCode.MISTAKE}: the configuration is wrong; {ExitCode.BROKE}: a rank broke.
"""

ONE_PROCESS = (
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.vpp=1",
    "parallel.dp=1",
    "parallel.sequence_parallel=false",
    "parallel.layers_per_stage=null",
    "schedule.name=auto",
    "schedule.file=null",
    "data.synthetic=true",
)
"""Overrides that turn the default config into a one-rank run, for facts about this node."""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis doctor [CONFIG] [--json] [--output FILE] [--dry-run] [section.key=value ...]"
    parser.epilog = EXAMPLES
    parser.takes(CONFIG, "the run whose nodes are checked; without one, this node alone", required=False)
    add_json(parser)
    add_output(parser)
    add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or run as one of them. Return their exit code.

    Raises:
        ConfigError: several ranks were started without a config.
    """
    asked = request(args)
    is_one_of_several = "RANK" in os.environ or is_rank(os.environ)
    if asked.config_path is None:
        if is_one_of_several:
            why = "several ranks were started, and no config says which of them form groups: there would be nothing to measure"
            refuse([f"{why}. Name the run's config after `triaxis doctor`."])
        asked = Request(DEFAULT_CONFIG, (*ONE_PROCESS, *asked.overrides), asked.dry_run)
    flags = (*(("--json",) if args.json else ()), *(() if args.output is None else (f"--output={args.output}",)))
    if "RANK" in os.environ:
        run_rank(importlib.import_module(WORKER).main, [str(asked.config_path), *asked.overrides, *flags])
    explained = (ExitCode.OUT_OF_LINE,)
    return launch(
        Request(
            asked.config_path,
            asked.overrides,
            asked.dry_run,
            worker=WORKER,
            worker_flags=flags,
            explained_codes=explained,
        ),
        os.environ,
    )
