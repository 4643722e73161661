"""Runs the `triaxis` command: parses a subcommand's arguments and prints readable errors.

    triaxis COMMAND [arguments]      ->  launch/commands/COMMAND.py (`_` for `-`): add_arguments(parser), run(args) -> int

Only the requested command's module is imported, so `triaxis --help` is fast. Exit codes: 0 done; 2 a mistake in what was typed or
configured; 1 a run that broke; 75 preempted and saved; 130 interrupted; the others are in engine/errors.py. A traceback means a bug
of ours.
"""

import argparse
import difflib
import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:  # `triaxis --help` imports no Triaxis modules
    from triaxis.launch.start.command_line import CommandParser

GROUPS = {
    "a run, from text to a model": {
        "train": "train on this machine, on several nodes or in a SLURM allocation",
        "new": "write a config from a model's description, a corpus and a machine",
        "prepare": "turn text into a .bin/.idx corpus",
        "plan": "find a cluster's fastest layouts, by predicted time and memory",
        "verify": "prove that a layout trains as one process does, or name the error",
        "bench": "measure layouts by a few training steps, or measure the device",
        "report": "turn a run directory into one HTML page",
        "evaluate": "measure loss and perplexity of a text under a checkpoint's model",
        "generate": "continue a prompt with a checkpoint's model",
        "export": "take a checkpoint out to Hugging Face or Megatron-Core",
    },
    "more": {
        "config": "print or check a configuration",
        "topology": "show ranks, nodes and groups of a layout",
        "schedule": "print, draw, check or time a pipeline schedule",
        "footprint": "count one rank's memory and traffic in any layout, without GPUs",
        "doctor": "compare nodes, measure the layout's groups, name what is odd",
        "data": "look into corpora, join and cut them; list what a step has read",
        "checkpoint": "look into checkpoints: contents, differences, damage",
        "import": "bring a model in from Hugging Face or Megatron-Core",
        "completion": "print the completion of a shell",
    },
}
"""Subcommands in the order of `triaxis --help`; a command's summary also heads its own `--help`."""

COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}

RENAMED = {
    "simulate": "`triaxis schedule times`",
    "start-from": "`triaxis new --weights`",
    "try": "`triaxis bench`",
    "calibrate": "`triaxis bench --device`",
    "traffic": "`triaxis footprint --measured`",
    "timeline": "`triaxis report --timeline`",
    "convert": "`triaxis import` and `triaxis export`",
}
"""Commands renamed before the first release, and their new names."""

EXAMPLES = """\
examples:
  triaxis train gpt_tiny train.steps=20
  triaxis verify gpt_tiny
  triaxis plan llama3_8b --gpus 64xH100

A command reads its config (or checkpoint, or run directory) as the first word.
Options and overrides (section.key=value) follow in any order.
`triaxis COMMAND --help` shows the options and examples of a command.
"""


class Command(Protocol):
    """Interface of a module in `launch/commands/`: `add_arguments` defines the options, `run` returns the exit code."""

    __name__: str
    add_arguments: "Callable[[CommandParser], None]"
    run: Callable[[argparse.Namespace], int]


def command_module(name: str) -> Command:
    """Import a subcommand's module from `launch/commands/`. A `-` in the name is `_` there."""
    return cast(Command, importlib.import_module(f"triaxis.launch.commands.{name.replace('-', '_')}"))


def command_parser(command: Command) -> "CommandParser":
    """Build a subcommand's parser, with its arguments, and its summary from `COMMANDS` as the description."""
    from triaxis.launch.start.command_line import CommandParser

    name = command.__name__.rpartition(".")[2].replace("_", "-")
    summary = COMMANDS[name]
    parser = CommandParser(prog=f"triaxis {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    command.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line without the program's name, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        name = _chosen_and_flushed(arguments)
        # Imported here, so that Ctrl-C during an import is handled like any other.
        from triaxis.launch.start.command_line import text_aside
        from triaxis.launch.start.import_path import import_variables
        from triaxis.launch.start.process.front import check_words, standard_streams

        if argv is None:
            # This process is the command, so it owns everything that it starts: torchrun's ranks, text encoders, compilers.
            os.environ.update(import_variables(os.environ))
            os.environ.pop("PYTHONINSPECT", None)  # they would open an interactive prompt at exit

        with standard_streams():
            try:
                check_words(arguments)
                command = command_module(name)
                args = command_parser(command).parse(arguments[1:])
                with text_aside(args):
                    return command.run(args)
            except (KeyboardInterrupt, BrokenPipeError):
                raise
            except Exception as error:
                return _report(error)
    except KeyboardInterrupt:
        from triaxis.engine.errors import ExitCode

        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # `triaxis ... | head` has read enough.
        return _without_output(0)
    except Exception as error:
        # An error in the streams: what the command itself raised has been reported.
        return _without_output(_report(error))


def _without_output(code: int) -> int:
    from triaxis.launch.start.process.front import drop_output

    drop_output()
    return code


def _chosen_and_flushed(arguments: Sequence[str]) -> str:
    """Run `_chosen` and flush the text of --help, because a failed write at exit could not be handled."""
    try:
        return _chosen(arguments)
    finally:
        try:
            if sys.stdout is not None:  # it was closed before the start
                sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            from triaxis.engine.storage.redaction import unwritable

            raise unwritable("standard output", error) from None


def _chosen(arguments: Sequence[str]) -> str:
    """Return the subcommand that the first argument names. Exit after help or --version, or with a usage error."""
    listed = [
        line
        for title, group in GROUPS.items()
        for line in (f"\n{title}:", *(_filled(f"  {name:<12}{summary}") for name, summary in group.items()))
    ]
    parser = argparse.ArgumentParser(
        prog="triaxis",
        usage="triaxis COMMAND [CONFIG] [options] [section.key=value ...]",
        description="Pretrain GPT models in three dimensions: tensor, pipeline and data parallel.\n"
        + "\n".join(listed),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the versions of Triaxis, torch and Python")
    if "--version" in arguments[:1]:
        _show_versions()
        parser.exit()
    if not arguments:
        parser.print_help()
        parser.exit()
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    name = str(parser.parse_args(arguments[:1]).command)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"The commands are {', '.join(COMMANDS)}."
        hint = f"It is {RENAMED[name]} now." if name in RENAMED else hint
        parser.error(f"unknown command {name!r}. {hint}")
    return name


def _filled(line: str) -> str:
    return textwrap.fill(line, 80, subsequent_indent=" " * 14, break_on_hyphens=False)


def _show_versions() -> None:
    import platform
    from importlib import metadata

    from triaxis.engine.program import ROOT, version

    print(f"triaxis {version()} in {ROOT}, torch {metadata.version('torch')}, Python {platform.python_version()}")


def _report(error: Exception) -> int:
    """Print an error that the user or the environment caused, and return the exit code.

    No traceback is printed. Any other error is raised again.
    """
    from triaxis.launch.start.process.broken_environment import named_environment

    if (cause := named_environment(error)) is not None:
        print(f"error: {cause}", file=sys.stderr)  # needs no further import
        return 2
    from rich.console import Console
    from rich.text import Text

    from triaxis.engine.errors import ExitCode, TriaxisError
    from triaxis.engine.storage.state_files import is_passing

    if not isinstance(error, TriaxisError):
        raise error
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), str(error)))
    # A full disk is not a mistake in what was typed.
    return ExitCode.BROKE if error.exit_code == ExitCode.MISTAKE and is_passing(error) else error.exit_code


if __name__ == "__main__":
    sys.exit(main())
