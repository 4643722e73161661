"""The `triaxis` command: quick help, examples everywhere, errors that a user can read, tracebacks only for bugs."""

import errno
import os
import subprocess
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from triaxis.engine.errors import ConfigError, DivergenceError
from triaxis.launch import cli

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"__init__", "convert_huggingface", "convert_megatron"}
"""Modules in the folder that are no commands: what `import` and `export` do, by the library."""
MODULES = sorted(
    path.stem.replace("_", "-") for path in (ROOT / "launch" / "commands").glob("*.py") if path.stem not in PARTS
)


def test_the_table_names_every_module():
    assert sorted(cli.COMMANDS) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_what_the_table_says(name):
    parser = cli.command_parser(cli.command_module(name))
    assert parser.prog == f"triaxis {name}"
    assert parser.description == f"{cli.COMMANDS[name][0].upper()}{cli.COMMANDS[name][1:]}."


@pytest.mark.parametrize("name", MODULES)
def test_every_help_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    usage = text.partition("\n\n")[0]
    assert usage.startswith(f"usage: triaxis {name} ") and "[-h]" not in usage
    assert text.partition("\n\n")[2][0].isupper()
    assert max(map(len, text.splitlines())) <= 80
    examples = [line for line in text.splitlines() if f"triaxis {name}" in line and line not in usage]
    assert examples, text


VERBS = [(name, verb) for name in MODULES for verb in cli.command_parser(cli.command_module(name)).verbs]


@pytest.mark.parametrize(("name", "verb"), VERBS)
def test_every_verb_says_what_it_does_and_shows_an_example(name, verb, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([name, verb, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    usage, description, rest = text.split("\n\n", 2)
    assert usage.startswith(f"usage: triaxis {name} {verb} ") and "[-h]" not in usage
    assert description[0].isupper() and description.endswith(".")
    assert f"\n  triaxis {name} {verb} " in rest or f" triaxis {name} {verb} " in rest


def test_help_lists_the_commands_and_shows_examples(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "triaxis verify gpt_tiny" in text
    for name, summary in cli.COMMANDS.items():
        assert name in text
        assert summary.split()[0] in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_imports_no_command_and_nothing_heavy():
    code = "import sys; sys.argv = ['triaxis', '--help']\nimport atexit\n"
    code += (
        "atexit.register(lambda: print('loaded', *sorted(sys.modules)))\nfrom triaxis.launch.cli import main\nmain()"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(shown[shown.index("\nloaded ") :].split()[1:])
    assert "triaxis.launch.cli" in loaded
    heavy = {"torch", "numpy", "pydantic", "rich", "engine"}
    assert not heavy & loaded
    assert not [name for name in loaded if name.startswith("triaxis.launch.commands.")]


@pytest.mark.parametrize(
    ("typed", "meant"), [("trian", "train"), ("topologie", "topology"), ("checkpoints", "checkpoint")]
)
def test_a_misspelled_command_gets_the_nearest(typed, meant, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([typed])
    assert left.value.code == 2
    assert f"unknown command {typed!r}. Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["trian"], ["--"], ["--versoin"]])
def test_what_is_no_command_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert "usage: triaxis" in capsys.readouterr().err


def test_without_a_word_it_shows_its_help(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 0
    assert "turn text into a" in capsys.readouterr().out


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out.startswith(f"triaxis {project['version']} in {ROOT}, torch 2.")


def fake_command(error: BaseException) -> SimpleNamespace:
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("words", nargs="*")
        parser.add_argument("--flag", action="store_true")

    def run(args: Namespace) -> int:
        assert args.words == ["a", "b"]
        assert args.flag
        raise error

    return SimpleNamespace(__name__="triaxis.launch.commands.train", add_arguments=add_arguments, run=run)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError(["parallel.tp = 3: no [/] good"]), 2),
        (DivergenceError("the loss is not finite"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_users_mistake_has_no_traceback(error, exit_code, monkeypatch, capsys):
    monkeypatch.setattr(cli, "command_module", lambda name: fake_command(error))
    assert cli.main(["train", "a", "--flag", "b"]) == exit_code
    shown = capsys.readouterr()
    assert str(error) in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_full_disk_is_no_mistake_in_what_was_typed(monkeypatch, capsys, tmp_path):
    """Whichever words a command has for it: exit code 1, as docs/checkpoints.md says."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "config.yaml").write_text("")
    monkeypatch.setattr("triaxis.launch.commands.report.write_atomically", full)
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "error: the page cannot be written" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "no" / "page.html")]) == 2


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "command_module", lambda name: fake_command(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["train", "a", "b", "--flag"])


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    words = f"{sys.executable} -m triaxis.launch.cli schedule print --pp 8 --microbatches 512 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("schedule=1f1b")
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["--help", "topology configs/gpt_tiny.yaml"])
def test_a_reader_that_ends_before_a_short_output_is_no_error(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "triaxis.launch.cli", *words.split()],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
