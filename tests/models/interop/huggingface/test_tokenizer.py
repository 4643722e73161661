"""The exported bytes tokenizer gives the ids of ours."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.data.corpus.tokenizers import BytesTokenizer, JsonTokenizer
from triaxis.models.interop.huggingface.tokenizer import bytes_tokenizer_json


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    path.write_text(bytes_tokenizer_json(), encoding="utf-8")
    return JsonTokenizer(path)


def test_it_has_the_same_ids(exported: JsonTokenizer) -> None:
    ours = BytesTokenizer()
    assert (exported.vocab_size, exported.eod_id) == (ours.vocab_size, ours.eod_id)


@settings(deadline=None)
@given(st.text())
def test_text_has_the_same_ids_there_and_back(exported: JsonTokenizer, text: str) -> None:
    ids = BytesTokenizer().encode(text)
    assert exported.encode(text) == ids
    assert exported.decode(ids) == text


@pytest.mark.parametrize("text", ["", " a  b\r\n\tc ", "<|endoftext|>", "naïve – 東京 \U0001f600", "\x00\x7f\xad"])
def test_texts_that_are_easily_changed(exported: JsonTokenizer, text: str) -> None:
    assert exported.encode(text) == list(text.encode())
    assert exported.decode(list(text.encode())) == text
