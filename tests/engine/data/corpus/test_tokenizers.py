"""Text comes back as it went in, and no text can end its own document."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import DataError

TEXTS = ["the cat sat on the mat and the dog sat on the log", "der Hund bellt, die Katze läuft über das Dach"] * 20


def train_json(path: Path, special: list[str]) -> str:
    """A byte-level BPE of 300 and a few tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(path))
    return str(path)


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_give_any_text_back(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text


def test_bytes_decode_whatever_a_model_writes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.decode([0xFF, 65, 256, 300, 0xC3]) == "\ufffdA\ufffd"


def test_a_json_tokenizer_gives_text_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(train_json(tmp_path / "t.json", ["<unk>", "<|endoftext|>"]))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (300, 1)
    text = "the dog sat; Übermut <|endoftext|> 🙂"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode())
    assert tokenizer.eod_id not in ids, "text that spells the token must not become it"
    assert tokenizer.decode([*ids, tokenizer.eod_id, 383]) == text


def test_the_end_of_document_token_can_be_named(tmp_path: Path) -> None:
    path = train_json(tmp_path / "t.json", ["<unk>", "<stop>"])
    assert load_tokenizer(path, "<stop>").eod_id == 1
    assert load_tokenizer(path, "<stop>").identity != load_tokenizer(path, "<unk>").identity
    with pytest.raises(DataError, match="--eod-token"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="<missing>"):
        load_tokenizer(path, "<missing>")


def test_the_two_files_of_gpt2_are_one_tokenizer(tmp_path: Path) -> None:
    whole = Path(train_json(tmp_path / "t.json", ["<|endoftext|>"]))
    model = json.loads(whole.read_text())["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    one, other = load_tokenizer(str(whole)), load_tokenizer(str(tmp_path / "gpt2-vocab.json"))
    assert one.encode("banana band") == other.encode("banana band") and one.eod_id == other.eod_id
    assert other.decode(other.encode(" an \u00e9<|endoftext|>")) == " an \u00e9<|endoftext|>"
    assert other.eod_id not in other.encode("<|endoftext|>") and other.json_file is None
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges[1:]]))
    assert load_tokenizer(str(tmp_path / "gpt2-vocab.json")).identity != other.identity


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no tokenizer at"):
        load_tokenizer("Bytes")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(DataError, match=r"vocab\.json is no tokenizer"):
        load_tokenizer(str(tmp_path / "vocab.json"))
    with pytest.raises(DataError, match="Leave --eod-token out"):
        load_tokenizer("bytes", "</s>")
