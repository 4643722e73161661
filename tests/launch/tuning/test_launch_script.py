"""Launch scripts of Megatron-LM: what they would start is recorded, and nothing is started."""

from pathlib import Path

import pytest

from triaxis.engine.errors import ConfigError
from triaxis.launch.tuning.launch_script import words_of_script

ARGS = """ARGS=(--num-layers "$1" --save "a b")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.sh"


@pytest.mark.parametrize(
    ("start", "line"),
    [
        ('torchrun --nproc_per_node 8 p.py "${ARGS[@]}"', "--nproc_per_node 8 p.py --num-layers 4 --save 'a b'"),
        ('cd "$(dirname "$0")"; exec srun -c 8 p.py "${ARGS[@]}"', "-c 8 p.py --num-layers 4 --save 'a b'"),
        ('srun -l bash -c "torchrun p.py ${ARGS[*]}" && torchrun and more; exit 0', None),
        ('srun -l bash -c "torchrun p.py ${ARGS[*]}"', "torchrun p.py --num-layers 4 --save a b"),
        ('for i in 1 2; do torchrun p.py "${ARGS[@]}"; done; exit 3', "p.py --num-layers 4 --save 'a b'"),
    ],
)
def test_the_words_of_the_one_command_are_recorded(script: Path, start: str, line: str | None) -> None:
    script.write_text(ARGS + start)
    if line is not None:
        assert words_of_script(f"{script} 4") == line
        return
    with pytest.raises(
        ConfigError, match=r"train\.sh started 2 different commands with torchrun or srun, and a run is one"
    ):
        words_of_script(f"{script} 4")


def test_a_script_finds_an_empty_folder_and_no_variables(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    script.write_text('[ -z "$(ls -A)" ] && [ "$HOME" = "$PWD" ] && torchrun p.py --strange "${SECRET-none}"')
    assert words_of_script(str(script)) == "p.py --strange none"


@pytest.mark.parametrize(
    ("text", "said"),
    [("set -u; torchrun $NODES", "started 0 .* NODES: unbound variable"), ("exit 3", "exit code is 3")],
)
def test_a_script_that_starts_nothing_is_refused(script: Path, text: str, said: str) -> None:
    script.write_text(text)
    with pytest.raises(ConfigError, match=said):
        words_of_script(str(script))


def test_a_script_that_does_not_end_is_ended(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaxis.launch.tuning.launch_script.MOST_SECONDS", 1)
    script.write_text("sleep 100")
    with pytest.raises(ConfigError, match="exit code is"):
        words_of_script(str(script))


def test_there_is_a_file_to_run() -> None:
    for source in ("", "nosuch.sh", "'nosuch.sh"):
        with pytest.raises(ConfigError):
            words_of_script(source)
