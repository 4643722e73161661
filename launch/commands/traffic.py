"""`triaxis traffic`: the calls and bytes per axis of one real training step, compared with the config's prediction."""

import argparse
import os
from dataclasses import replace

from triaxis.launch.commands.train import request
from triaxis.launch.start.command_line import CONFIG, CommandParser, add_dry_run
from triaxis.launch.start.launcher import launch

EXAMPLES = """examples:
  triaxis traffic configs/gpt_tiny.yaml
  TP=4 PP=1 VPP=1 DP=2 triaxis traffic configs/gpt_tiny.yaml parallel.sequence_parallel=false

Exit code 1 if the calls or bytes of any rank differ from the prediction of its config.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis traffic CONFIG [--dry-run] [section.key=value ...]"
    parser.epilog = EXAMPLES
    parser.takes(CONFIG, "the run to check")
    add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Start the ranks; return their exit code."""
    asked = replace(request(args), worker="triaxis.launch.footprint.traffic", trains=True)
    return launch(asked, os.environ)
