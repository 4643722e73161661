"""`triaxis completion` prints a shell script that completes commands, options and files; in bash also config names."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from triaxis.engine.config.shipped import shipped_configs
from triaxis.launch.start.command_line import CommandParser

EXAMPLES = """examples:
  triaxis completion bash > ~/.local/share/bash-completion/completions/triaxis
  triaxis completion zsh > ~/.zfunc/_triaxis

A new shell has it. For zsh, the folder has to be in fpath, and compinit has to run after that.
"""
SHELLS = ("bash", "zsh", "tcsh")
CONFIGS = "_triaxis_configs"
"""Bash function that completes a command's words: shipped config names and files."""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis completion bash|zsh|tcsh"
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the shell's completion script."""
    import shtab

    names = " ".join(shipped_configs())
    configs = f'{CONFIGS}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}'
    print(shtab.complete(_whole_parser(), args.shell, preamble=configs if args.shell == "bash" else ""))
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """Build one parser with all commands. Its paths and configs are marked for shtab to complete."""
    import shtab

    from triaxis.launch.cli import COMMANDS, command_module, command_parser

    whole = argparse.ArgumentParser(prog="triaxis")
    whole.add_argument("--version", action="store_true", help="show the versions of Triaxis, torch and Python")
    commands = whole.add_subparsers()
    for name, summary in COMMANDS.items():
        parser = command_parser(command_module(name))
        for action in _actions(parser):
            if action.dest == "words":
                action.help = "config, or section.key=value"  # shtab skips actions without help
                action.complete = {**shtab.FILE, "bash": CONFIGS}  # type: ignore[attr-defined]
            elif action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        commands.add_parser(name, parents=[parser], add_help=False, help=summary)
    return whole


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
        else:
            yield action
