"""The examples: each trains, `verify` finds the right variant equal and names the wrong one in the words of its README.

Blocks marked `console` begin a command with `$`; each line below it stands in what the command says.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.documented import ROOT, shown_outputs
from tests.harness import run_ranks
from tests.launch.command_line import TRIAXIS, run
from tests.launch.forked_ranks import work

EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/run.yaml"))


def plain(text: str) -> str:
    """Return a text without line breaks, times, folders and digests, which differ from one place to another."""
    text = re.sub(r"^[\d-]+ [\d:.]+ ", "", text, flags=re.MULTILINE)
    return re.sub(r"\S*/(\w+\.py) \(\w{8}\)", r"\1", " ".join(text.split()))


def copied(name: str, to: Path) -> Path:
    folder = to / name
    shutil.copytree(ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for command, _ in shown_outputs((folder / "README.md").read_text()):
        if command.startswith("python -c"):
            assert run(folder, "bash", "-c", command.replace("python", TRIAXIS[0], 1)).exit_code == 0
    return folder


def train(rank: int, folder: str) -> tuple[int, str, str]:
    os.chdir(folder)
    words = ["train.steps=2", "optimizer.warmup_steps=1", "parallel.tp=1", "parallel.sequence_parallel=false"]
    return work(rank, "triaxis.launch.pretrain_gpt", ["run.yaml", *words])


@pytest.mark.distributed
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    ((code, _, err),) = run_ranks(train, 1, str(folder))
    assert code == 0, err
    log = next(folder.glob("runs/run/logs/*/rank_00000.log")).read_text()
    [shown] = [
        shown
        for command, shown in shown_outputs((folder / "README.md").read_text())
        if command == "triaxis train run.yaml"
    ]
    assert all(plain(line) in plain(log) for line in shown.splitlines()), log


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_verify_says_what_the_page_shows(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    verified = [
        (command, shown)
        for command, shown in shown_outputs((folder / "README.md").read_text())
        if " verify " in command
    ]
    assert len(verified) == 2
    for command, shown in verified:
        said = run(folder, *TRIAXIS, *command.split()[1:])
        assert said.exit_code == ("wrong.py" in command), said.err
        for part in re.split(r"\n(?=\S)", shown.strip()):
            assert plain(part) in plain(said.out), said.out


@pytest.mark.slow
def test_the_readme_shows_what_verify_says_of_the_wrong_scale() -> None:
    shown = dict(shown_outputs((ROOT / "README.md").read_text()))
    [command] = [each for each in shown if each.startswith("triaxis verify") and "wrong.py" in each]
    said = run(ROOT, *TRIAXIS, *command.split()[1:])
    assert said.exit_code == 1, said.err
    for part in re.split(r"\n(?=\S)", shown[command].strip()):
        assert plain(part) in plain(said.out)
