"""A corpus is matched with the tokenizer that encoded it, whichever of its tokens ends documents, and with no other one."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter
from triaxis.engine.data.corpus.matching import match_tokenizer
from triaxis.engine.data.corpus.record import CorpusRecord, record_path
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.prepare import PrepareRequest, prepare

TEXT = "the quick brown fox jumps over the lazy dog"
SPECIAL = ["<|endoftext|>", "<|turn|>"]


def make_tokenizer(folder: Path, text: str = TEXT) -> Path:
    """A folder of transformers with a byte-level BPE, whose documents end with a turn; its tokenizer.json does not say so."""
    import tokenizers

    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([text] * 3, vocab_size=270)
    made.add_special_tokens(SPECIAL)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|turn|>"}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


def corpus(output: Path, tokenizer: str, eod_token: str | None = None) -> tuple[str, CorpusRecord]:
    text = output.with_suffix(".txt")
    text.write_text(TEXT)
    request = PrepareRequest((text,), tokenizer, str(output), eod_token=eod_token)
    return str(output), prepare(request, num_workers=1, progress=lambda done: None).record


def refused(prefix: str, names: Sequence[str], vocab_size: int = 300) -> str:
    with pytest.raises(DataError) as error:
        match_tokenizer(prefix, names, vocab_size, "the model")
    return str(error.value)


@pytest.mark.parametrize("eod_token", [None, "<|turn|>", "<|endoftext|>"])
@pytest.mark.parametrize("name", ["model", "model/tokenizer.json"])
@pytest.mark.usefixtures("in_process")
def test_the_models_own_tokenizer_is_found_however_it_was_named(
    tmp_path: Path, model: Path, name: str, eod_token: str | None
) -> None:
    prefix, _ = corpus(tmp_path / "corpus", str(tmp_path / name), eod_token)
    names = [str(model / "tokenizer.json"), str(model)]
    found = match_tokenizer(prefix, names, 300, "the model")
    assert found.is_proven and found.name in names
    assert found.tokenizer.decode(found.corpus.tokens(0).tolist()) == TEXT


@pytest.mark.usefixtures("in_process")
def test_another_tokenizer_is_refused_even_with_as_many_ids(tmp_path: Path, model: Path) -> None:
    other = make_tokenizer(tmp_path / "other", "pack my box with five dozen liquor jugs")
    mine, theirs = (load_tokenizer(str(folder / "tokenizer.json")) for folder in (model, other))
    assert mine.vocab_size == theirs.vocab_size
    prefix, _ = corpus(tmp_path / "corpus", str(other))
    error = refused(prefix, [str(model)])
    assert str(other) in error and "the same ids would mean other words" in error
    assert f"triaxis prepare --tokenizer {model}" in error
    assert "the same ids" in refused(prefix, ["bytes"])


@pytest.mark.usefixtures("in_process")
def test_a_record_without_an_identity_proves_nothing(tmp_path: Path, model: Path) -> None:
    prefix, record = corpus(tmp_path / "corpus", str(model))
    record_path(prefix).write_text(replace(record, tokenizer_identity="").to_json())
    assert not match_tokenizer(prefix, [str(model)], 300, "the model").is_proven
    assert "the same ids would mean other words" in refused(prefix, ["bytes"])


@pytest.mark.usefixtures("in_process")
def test_without_an_identity_the_tokenizer_with_the_recorded_vocabulary_is_taken(tmp_path: Path, model: Path) -> None:
    other = make_tokenizer(tmp_path / "other", "a few other words, and more of them than before")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    prefix, record = corpus(tmp_path / "corpus", "bytes")
    record_path(prefix).write_text(replace(record, tokenizer_identity="").to_json())
    assert len(tokenizer["model"]["vocab"]) + 2 != record.num_embeddings
    assert match_tokenizer(prefix, [str(other), "bytes"], 300, "the model").name == "bytes"


def test_without_a_record_ids_are_compared(tmp_path: Path, model: Path) -> None:
    largest = load_tokenizer(str(model)).vocab_size - 1
    prefix = str(tmp_path / "theirs")
    with IndexedWriter(prefix, "<u2") as writer:
        writer.add_document([1, 2, largest])
    found = match_tokenizer(prefix, [str(model)], 300, "the model")
    assert not found.is_proven and f"below {largest + 1}" in found.evidence
    assert "no embedding" in refused(prefix, [str(model)], largest)
    assert "neither the model nor" in refused(prefix, [])
    with IndexedWriter(prefix, "<u2") as writer:
        writer.add_document([1, largest + 1, 2])
    assert f"ends at {largest}" in refused(prefix, [str(model)])


@pytest.mark.usefixtures("in_process")
def test_a_model_without_a_tokenizer_takes_that_of_the_corpus(tmp_path: Path, model: Path) -> None:
    prefix, record = corpus(tmp_path / "corpus", "bytes")
    found = match_tokenizer(prefix, [], 257, "the model")
    assert (found.name, found.is_proven) == ("bytes", False)
    assert "no embedding" in refused(prefix, [], 256)
    record_path(prefix).write_text(replace(record, tokenizer="gone/tokenizer.json").to_json())
    assert "cannot be opened" in refused(prefix, [], 257)


@pytest.mark.usefixtures("in_process")
def test_what_cannot_be_opened_is_passed_over_unless_nothing_can(tmp_path: Path, model: Path) -> None:
    prefix, _ = corpus(tmp_path / "corpus", str(model))
    found = match_tokenizer(prefix, [str(tmp_path / "gone.json"), str(model)], 300, "the model")
    assert found.name == str(model)
    assert "there is no tokenizer at" in refused(prefix, [str(tmp_path / "gone.json")])


@pytest.mark.parametrize("most_tokens", [1, 100, 1000, 10**9])
def test_the_largest_id_of_all_or_of_some(tmp_path: Path, most_tokens: int) -> None:
    tokens = np.arange(10_000)[::-1]
    with IndexedWriter(tmp_path / "corpus", "<i4") as writer:
        writer.add_document(tokens[:7000])
        writer.add_document(tokens[7000:])
    assert IndexedTokens(tmp_path / "corpus").ids(most_tokens)[1] == 9999, "the first stretch begins with the file"
    with IndexedWriter(tmp_path / "corpus", "<i4") as writer:
        writer.add_document(np.arange(10_000))
    assert IndexedTokens(tmp_path / "corpus").ids(most_tokens)[1] == 9999, "the last stretch ends with the file"
