"""Names of the Hugging Face Hub and of object stores, where a path belongs, come with the line that brings them here."""

import shlex
from pathlib import Path

import pytest

from triaxis.engine.data.corpus.inputs import find_inputs
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import TriaxisError
from triaxis.engine.storage.elsewhere import how_to_bring
from triaxis.launch.cli import main

HUB = "hf download meta-llama/Llama-3.1-8B --local-dir FOLDER"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("meta-llama/Llama-3.1-8B", HUB),
        (Path("meta-llama/Llama-3.1-8B"), HUB),
        ("hf://meta-llama/Llama-3.1-8B", HUB),
        (Path("hf://datasets/owner/text"), "hf download owner/text --repo-type dataset --local-dir FOLDER"),
        ("s3://bucket/x.jsonl", "copy it to a folder here"),
        (Path("gs://bucket/x"), "copy it to a folder here"),
    ],
)
def test_a_name_elsewhere_is_known(name: str | Path, line: str) -> None:
    assert line in how_to_bring(name)


@pytest.mark.parametrize(
    "name", ["gpt2", "model", "./models/gpt2", "/models/gpt2", "a/b/c", "here/model", "texts/*.txt"]
)
def test_a_path_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert how_to_bring(name) == ""


@pytest.mark.parametrize(
    "words",
    ["new --from meta-llama/Llama-3.1-8B", "import meta-llama/Llama-3.1-8B out"],
)
def test_commands_say_so(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(words)) == 2
    assert HUB in capsys.readouterr().err


def test_text_and_tokenizers_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TriaxisError, match=r"names no file\. Nothing is read from other machines"):
        find_inputs(["s3://bucket/x.jsonl"])
    with pytest.raises(TriaxisError, match=HUB):
        load_tokenizer("meta-llama/Llama-3.1-8B")
