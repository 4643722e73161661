"""The first seconds of a command: closed and full streams, foreign bytes, Ctrl-C; words, and no traceback."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT, TRIAXIS
from triaxis.launch.cli import main

TINY = str(ROOT / "configs" / "gpt_tiny.yaml")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """A line for bash in which "$@" is the command."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *TRIAXIS],
        cwd=folder,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": ""},  # the worker of a test is in its folder
    )


def test_a_full_disk_behind_standard_output_is_said(tmp_path: Path) -> None:
    ended = shell(f'"$@" config print {TINY} > /dev/full', tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"error: standard output cannot be written: No space left on device.")
    assert ended.stderr.count(b"\n") == 1


def test_closed_streams_stay_closed_and_nothing_takes_their_place(tmp_path: Path) -> None:
    """Without them, descriptors 0 to 2 would be those of the next files that are opened."""
    ended = shell('"$@" schedule print --pp 2 --microbatches 4 --output made.txt <&- >&- 2>&-', tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    text = (tmp_path / "made.txt").read_text()
    assert "F" in text and "wrote" not in text


@pytest.mark.parametrize("words", [["config", "check", "\udcff.yaml"], ["config", "check", TINY, "a=\udcff"]])
def test_an_argument_that_is_no_utf8_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "xff" in (error := capsys.readouterr().err) and "is not UTF-8" in error


def test_a_variable_that_is_no_utf8_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP", "\udcff")
    assert main(["config", "check", TINY]) == 2
    assert "'TP': its value is no UTF-8" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported_is_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("triaxis.launch.cli.command_module", interrupted)
    assert main(["train", TINY]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_a_rank_imports_its_worker_is_a_code(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("raise KeyboardInterrupt\n")
    ended = shell('"$1" -m triaxis.launch.start.process.start_rank worker', tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_a_rank_prints_no_secret_and_ends_with_the_code_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        "import os\ndef main(words):\n    print(words, os.environ['HF_TOKEN'])\n    raise ValueError(os.environ['HF_TOKEN'])\n"
    )
    ended = shell('export HF_TOKEN=0123456789ab; "$1" -m triaxis.launch.start.process.start_rank worker a b', tmp_path)
    assert (ended.returncode, ended.stdout) == (1, b"['a', 'b'] [redacted]\n")
    assert b"ValueError: [redacted]" in ended.stderr and b"0123456789ab" not in ended.stderr
