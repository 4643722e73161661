"""The `triaxis` command: finds the subcommand's module, parses its arguments, prints errors that a user can read.

    triaxis COMMAND [arguments]      ->  launch/commands/COMMAND.py: NAME, HELP, add_arguments(parser), run(args) -> int

Only the module of the command that was asked for is imported, so `triaxis --help` costs no more than starting Python.
Exit codes: 0 done; 2 a mistake in what was typed or configured; 1 a run that broke; 75 preempted and saved; 130 interrupted; the
others stand in launch/failure.py.
A traceback means a bug of ours.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

COMMANDS = {
    "train": "start a training run on this machine, these nodes or this SLURM step",
    "topology": "show ranks, nodes and groups of a layout, as text or as a picture",
    "prepare": "turn text into a .bin/.idx corpus",
    "config": "print or check a configuration, or make one from a Hugging Face config.json",
    "generate": "continue a prompt with the model of a checkpoint",
    "evaluate": "loss and perplexity of a text or corpus under the model of a checkpoint",
    "convert": "bring a model in from Hugging Face or Megatron-Core, or take a checkpoint out",
    "checkpoint": "look into checkpoints: contents, differences, damage, fingerprints",
    "timeline": "put the ranks' timelines of a run together, for Perfetto",
    "schedule": "print, draw or check a pipeline schedule",
    "verify": "prove that a layout trains the same model as one process, or name what differs",
    "doctor": "compare all nodes, measure the layout's groups, and name what is out of line",
    "footprint": "what one rank of any layout keeps, sends and computes in a step, without the machines",
    "report": "turn a run directory into one HTML page",
    "traffic": "run one real step and print the bytes and calls per axis beside what the config predicts",
}
"""Subcommands in the order of `triaxis --help`, with their one-line summaries."""

EXAMPLES = """\
examples:
  triaxis config check configs/gpt_tiny.yaml
  triaxis topology --tp 2 --pp 2 --dp 4
  triaxis train configs/gpt_tiny.yaml train.steps=20
"""


class Command(Protocol):
    """What a module in `launch/commands/` provides."""

    NAME: str
    HELP: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def command_module(name: str) -> Command:
    """Import the module of one subcommand."""
    return cast(Command, importlib.import_module(f"launch.commands.{name}"))


def command_parser(command: Command) -> argparse.ArgumentParser:
    """The parser of one subcommand, as `triaxis COMMAND --help` shows it."""
    parser = argparse.ArgumentParser(
        prog=f"triaxis {command.NAME}",
        description=command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; `argv` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = command_module(_chosen(arguments))
    parsed = _parse(command_parser(command), arguments[1:])
    try:
        return command.run(parsed)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `triaxis ... | head` has read enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error)


def _chosen(arguments: Sequence[str]) -> str:
    """The subcommand that the first argument names; help, a usage error and the exit are argparse's."""
    parser = argparse.ArgumentParser(
        prog="triaxis",
        description="Pretrain GPT models in three dimensions: tensor, pipeline and data parallel.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return str(parser.parse_args(arguments[:1]).command)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Options may stand between positional words (`config.yaml --dry-run train.steps=2`), except around subcommands."""
    try:
        return parser.parse_intermixed_args(arguments)
    except TypeError:  # argparse's word for "this parser has subcommands", said before it looks at the arguments
        return parser.parse_args(arguments)


def _report(error: Exception) -> int:
    """Print an error made for the user without its traceback; anything else is a bug and keeps it."""
    from rich.console import Console
    from rich.text import Text

    from engine.errors import TriaxisError

    if not isinstance(error, TriaxisError):
        raise error
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), str(error)))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
