"""`triaxis completion`: a shell that has read it completes commands, verbs, options, choices, configs and files."""

import subprocess
from pathlib import Path

import pytest

from triaxis.launch.cli import main

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_triaxis
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda text: said.append(text))
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "triaxis"
    path.write_text(said[0])
    return path


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pl", {"plan"}),
        ("train gpt_ti", {"gpt_tiny"}),
        ("train min", {"mine.yaml"}),
        ("train --from", {"--from-scratch"}),
        ("checkpoint fin", {"fingerprint"}),
        ("bench --device c", {"cpu", "cuda"}),
        ("export runs out --to m", {"megatron"}),
    ],
)
def test_bash_completes(typed: str, completed: set[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    words = ["bash", "-c", COMPLETE, "bash", str(script), "triaxis", *typed.split()]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(said.stdout.split()) == completed, said.stderr


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_one_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "fingerprint" in out and "from-scratch" in out
