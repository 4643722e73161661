"""Names of the Hugging Face Hub and of object stores, where a path belongs, come with the line that brings them here."""

import os
import shlex
from pathlib import Path

import pytest

from triaxis.engine.config.values.places import local_path
from triaxis.engine.data.corpus.tokenizers import load_tokenizer, split_name
from triaxis.engine.errors import ConfigError, DataError, TriaxisError
from triaxis.engine.storage.elsewhere import MOST_NAME_BYTES, MOST_NAMES, as_typed, how_to_bring, why_no_path
from triaxis.launch.cli import main
from triaxis.launch.prepare.inputs import find_inputs
from triaxis.models.interop.megatron.command_line.parse import words_of

HUB = "hf download meta-llama/Llama-3.1-8B --local-dir FOLDER"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("meta-llama/Llama-3.1-8B", HUB),
        (Path("meta-llama/Llama-3.1-8B"), HUB),
        ("hf://meta-llama/Llama-3.1-8B", HUB),
        (Path("hf://datasets/owner/text"), "hf download owner/text --repo-type dataset --local-dir FOLDER"),
        ("s3://bucket/x.jsonl", "the store's own tool"),
        (Path("gs://bucket/x"), "the store's own tool"),
        ("hf://gpt2", "the store's own tool"),
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


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("x" * MOST_NAME_BYTES, True),
        ("x" * (MOST_NAME_BYTES + 1), False),
        ("\u00e9" * 128, False),
        ("/".join("a" * MOST_NAMES), True),
        ("/".join("a" * (MOST_NAMES + 1)), False),
        (f"/{'x' * 200}" * 21, False),
    ],
)
def test_no_path_is_longer_than_linux_and_python_allow(text: str, is_one: bool) -> None:
    """Python asks the system about some of them with a traceback, and makes folders below 1,000 others with a RecursionError."""
    assert (why_no_path(text) == "") is is_one
    if is_one:
        assert local_path(text) == text
        return
    with pytest.raises(ValueError, match="Give a shorter one"):
        local_path(text)
    for open_it in (load_tokenizer, lambda name: find_inputs([name])):
        with pytest.raises(DataError, match="Give a shorter one"):
            open_it(text)
    with pytest.raises(ConfigError, match="Give a shorter one"):
        words_of([f"@{text}"])


def test_a_long_pattern_is_no_name() -> None:
    """What cuts text may be longer than the name of a file."""
    assert split_name(f"qwen.tiktoken:{'x' * 300}") == (Path("qwen.tiktoken"), "x" * 300)


def test_an_address_has_both_its_slashes() -> None:
    assert as_typed(Path("s3://bucket/x")) == "s3://bucket/x"
    assert as_typed(Path("/a/b")) == "/a/b"
    with pytest.raises(DataError, match=r"at hf://openai/gpt2: .* hf download openai/gpt2"):
        load_tokenizer("hf://openai/gpt2")


def test_an_address_is_no_path_beside_a_folder_of_its_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai").mkdir()
    assert how_to_bring("openai/gpt2") == "" and "hf download openai/gpt2" in how_to_bring("hf://openai/gpt2")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(DataError, match="it is a FIFO, not a file"):
        load_tokenizer(str(fifo))
    with pytest.raises(DataError, match="it is a device, not a file"):
        load_tokenizer("/dev/zero")
