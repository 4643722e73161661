"""Text that is shown piece by piece is the text of all tokens, and no piece ends inside a character."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import BytesTokenizer, load_tokenizer
from triaxis.launch.inference.text_stream import TextStream


def pieces(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> list[str]:
    text = TextStream(tokenizer, before)
    return [*(text.add(token) for token in tokens), text.finish()]


@given(
    st.text(max_size=5),
    st.lists(st.integers(0, 256), max_size=30) | st.text(max_size=10).map(lambda t: list(t.encode())),
)
def test_pieces_of_bytes_are_the_whole(before: str, tokens: list[int]) -> None:
    tokenizer = BytesTokenizer()
    start = tokenizer.encode(before)
    assert before + "".join(pieces(tokenizer, start, tokens)) == tokenizer.decode(start + tokens)


def test_a_character_is_shown_when_it_is_complete() -> None:
    assert pieces(BytesTokenizer(), [], list("a€b".encode())) == ["a", "", "", "€", "b", ""]
    assert pieces(BytesTokenizer(), [], [*"€".encode()][:2]) == ["", "", "�"]


@pytest.fixture(scope="module")
def words_tokenizer(tmp_path_factory):
    """A BPE in the way of SentencePiece: a space before a word is part of its token, and is dropped at the start of a text."""
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the cat"] * 4, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(str(path))


def test_spaces_between_words_are_kept(words_tokenizer) -> None:
    tokens = words_tokenizer.encode("the dog sat on the mat")
    before = words_tokenizer.encode("the cat")
    shown = "".join(pieces(words_tokenizer, before, tokens))
    assert shown == " the dog sat on the mat"
    assert "".join(pieces(words_tokenizer, [], tokens)) == "the dog sat on the mat"
