"""Paths of a configuration are of this machine: `~` and `$NAME` are expanded, and what cannot be is refused in words."""

from pathlib import Path

import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.errors import ConfigError

FIELDS = (
    "data.train",
    "data.valid",
    "data.cache_dir",
    "data.tokenizer",
    "checkpoint.dir",
    "checkpoint.load",
    "runtime.runs_dir",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("NOWHERE", raising=False)
    return tmp_path


def test_what_a_shell_would_have_expanded_is_expanded(home: Path) -> None:
    words = ["checkpoint.dir=~/ck", "data.cache_dir=${SCRATCH}/c", "runtime.runs_dir=$SCRATCH/runs"]
    config = load_config(
        "gpt_tiny", [*words, "data.train=[{path: ~/web}, ./code]", "data.tokenizer='~/t.tiktoken:a+$'"]
    )
    assert (config.checkpoint.dir, config.data.cache_dir) == (f"{home}/ck", "/scratch/c")
    assert config.runtime.runs_dir == "/scratch/runs"
    assert [source.path for source in config.data.train] == [f"{home}/web", "./code"]
    assert config.data.tokenizer == f"{home}/t.tiktoken:a+$"


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("s3://bucket/x", "the store's own tool"),
        ("hf://datasets/owner/text", "hf download owner/text --repo-type dataset"),
        ("$NOWHERE/x", "$NOWHERE is not set"),
        ("${NOWHERE}/x", "${NOWHERE} is not set"),
        ("~nobody_of_that_name/x", "no such user"),
        ('"a\\0b"', "a NUL is in it"),
    ],
)
def test_what_would_mean_another_folder_is_refused(field: str, value: str, words: str, home: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("gpt_tiny", [f"{field}={value}"])
    assert words in str(refused.value)


def test_a_schedules_file_is_a_path_too(home: Path) -> None:
    with pytest.raises(ConfigError, match="NOWHERE is not set"):
        load_config("gpt_tiny", ["schedule.file=$NOWHERE/mine.txt"])
