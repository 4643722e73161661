"""Merged corpora are the bytes of one preparation, parts merged again are the whole, and megatron-core reads all of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.lacking import need_package
from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter, bin_path, idx_path
from triaxis.engine.data.corpus.record import CorpusRecord, read_record, record_path
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.combine import bounds_of_shares, merge, split
from triaxis.launch.prepare.describe import describe
from triaxis.launch.prepare.prepare import PrepareRequest, prepare


def prepared(output: Path, *texts: str, append_eod: bool = True) -> CorpusRecord:
    path = output.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    request = PrepareRequest((path,), "bytes", str(output), append_eod=append_eod)
    return prepare(request, num_workers=1, progress=lambda done: None).record


def content(prefix: str | Path) -> tuple[bytes, bytes]:
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


@pytest.fixture
def corpora(tmp_path: Path, in_process: None) -> list[str]:
    """Prefixes of three corpora, and of one made of all their texts."""
    texts = [["a", "", "bb"], ["ccc"], ["d" * 1000, "é", "f"]]
    for number, some in enumerate(texts):
        prepared(tmp_path / str(number), *some)
    prepared(tmp_path / "all", *(text for some in texts for text in some))
    return [str(tmp_path / name) for name in ("0", "1", "2", "all")]


def test_merged_is_prepared_together(corpora: list[str], tmp_path: Path) -> None:
    *parts, whole = corpora
    record = merge(parts, str(tmp_path / "new" / "merged"))
    assert content(tmp_path / "new" / "merged") == content(whole)
    together = read_record(whole)
    assert record is not None and together is not None and record == read_record(str(tmp_path / "new" / "merged"))
    assert record.problem(str(tmp_path / "new" / "merged")) is None
    assert record.left_out == {
        "document without text": {
            "count": 1,
            "places": [f"{tmp_path}/0.jsonl, line 2: the field 'text' is empty"],
        }
    }
    same = replace(together, request="", left_out={}, input_bytes=0, num_input_files=0)
    assert replace(record, request="", left_out={}, input_bytes=0, num_input_files=0) == same
    assert (record.num_input_files, record.input_bytes) == (3, together.input_bytes)


def test_parts_merged_again_are_the_whole(corpora: list[str], tmp_path: Path) -> None:
    whole = corpora[-1]
    num_documents = IndexedTokens(whole).num_documents
    assert bounds_of_shares(num_documents, [0.5, 0.25, 0.25]) == [0, 3, 4, 6]
    outputs = [str(tmp_path / f"part{number}") for number in range(3)]
    records = split(whole, outputs, [0, 3, 4, 6])
    assert [record.num_documents for record in records if record is not None] == [3, 1, 2]
    assert [content(output) for output in outputs[:1]] == [content_of_first_three(corpora, tmp_path)]
    assert merge(outputs, str(tmp_path / "again")) is not None
    assert content(tmp_path / "again") == content(whole)


def content_of_first_three(corpora: list[str], tmp_path: Path) -> tuple[bytes, bytes]:
    merge(corpora[:2], str(tmp_path / "first three"))
    return content(tmp_path / "first three")


def test_megatron_reads_what_is_written(corpora: list[str], tmp_path: Path) -> None:
    need_package("megatron.core", "pip install 'megatron-core>=0.16,<0.17'")
    import torch  # noqa: F401  (megatron-core needs it loaded first)
    from megatron.core.datasets import indexed_dataset

    merge(corpora[:3], str(tmp_path / "merged"))
    split(corpora[-1], [str(tmp_path / "x"), str(tmp_path / "y")], [0, 2, 6])
    texts = [b"a", b"bb", b"ccc", b"d" * 1000, "é".encode(), b"f"]
    for name, expected in (("merged", texts), ("x", texts[:2]), ("y", texts[2:])):
        theirs = indexed_dataset.IndexedDataset(str(tmp_path / name))
        assert [bytes(theirs[number][:-1].astype(np.uint8)) for number in range(len(theirs))] == expected
        assert theirs.document_indices.tolist() == list(range(len(expected) + 1))


def test_documents_of_several_sequences_keep_them(tmp_path: Path) -> None:
    """As Megatron's tools write sentences; their sequences may lie anywhere in the .bin."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with IndexedWriter(first, "<u2") as writer:
        tokens = np.arange(10, dtype="<u2").tobytes()
        writer.add_encoded([tokens], np.array([2, 0, 3, 5]), np.array([2, 4]))
    with IndexedWriter(second, "<u2") as writer:
        writer.add_document([77, 78])
    # The first two sequences change places.
    content_of_index = bytearray(idx_path(first).read_bytes())
    pointers = np.frombuffer(content_of_index, "<i8", 4, 34 + 16)
    pointers[:] = [6, 6, 0, 10]
    idx_path(first).write_bytes(content_of_index)
    assert merge([first, second], str(tmp_path / "merged")) is None
    merged = IndexedTokens(tmp_path / "merged")
    assert [merged.sequence(number).tolist() for number in range(5)] == [
        [3, 4],
        [],
        [0, 1, 2],
        [5, 6, 7, 8, 9],
        [77, 78],
    ]
    assert merged.num_documents == 3
    assert merged.tokens(1).tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    assert merged.last_tokens(np.arange(3)).tolist() == [4, 9, 78]
    assert not record_path(str(tmp_path / "merged")).exists()


def test_what_does_not_belong_together_is_refused(corpora: list[str], tmp_path: Path, in_process: None) -> None:
    one = corpora[0]
    prepared(tmp_path / "no_eod", "x", append_eod=False)
    with pytest.raises(DataError, match=r"use different ids for the same text.*no token ends a document"):
        merge([one, str(tmp_path / "no_eod")], str(tmp_path / "out"))
    with IndexedWriter(tmp_path / "wide", "<i4") as writer:
        writer.add_document([1])
    with pytest.raises(DataError, match=r"holds uint16, but .* int32"):
        merge([one, str(tmp_path / "wide")], str(tmp_path / "out"))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(f"{one}{suffix}")
    for again in (one, str(tmp_path / "link")):
        with pytest.raises(DataError, match=r"data merge names one corpus twice.*Name it once"):
            merge([one, corpora[1], again], str(tmp_path / "out"))
    with pytest.raises(DataError, match="is one of the corpora that are read"):
        merge([one, corpora[1]], one)
    with pytest.raises(DataError, match="exists, and runs that read it would change"):
        merge([one, corpora[1]], corpora[2])
    with pytest.raises(DataError, match=r"has 6 documents, and its parts would get 6, 0"):
        split(corpora[-1], ["a", "b"], [0, 6, 6])
    with pytest.raises(DataError, match="Name each part once"):
        split(corpora[-1], ["a", "a"], [0, 3, 6])
    assert not any(path.name.startswith("out") for path in tmp_path.iterdir())
    assert merge([one, corpora[1]], corpora[2], force=True) is not None


def test_a_record_without_an_identity_is_compared_by_name(corpora: list[str], tmp_path: Path) -> None:
    """Records of earlier versions have none."""
    path = record_path(corpora[0])
    fields = json.loads(path.read_text())
    for name in ("tokenizer_identity", "append_eod", "left_out"):
        del fields[name]
    path.write_text(json.dumps(fields))
    assert merge(corpora[:2], str(tmp_path / "old")) is not None
    path.write_text(json.dumps({**fields, "tokenizer": "another.json"}))
    with pytest.raises(DataError, match=r"another\.json, 257 tokens"):
        merge(corpora[:2], str(tmp_path / "other"))


def test_a_description_counts_what_is_there(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    lengths = draw.integers(0, 50, 400)
    documents = [draw.integers(0, 9, length) for length in lengths]
    with IndexedWriter(tmp_path / "corpus", "<u2") as writer:
        for document in documents:
            writer.add_document(document)
    found = describe(IndexedTokens(tmp_path / "corpus"), eod_id=3)
    assert (found.documents, found.sequences, found.tokens) == (400, 400, lengths.sum())
    assert found.without_tokens == sum(length == 0 for length in lengths)
    assert found.without_end == sum(len(document) > 0 and document[-1] != 3 for document in documents)
    in_order = sorted(lengths)
    assert found.quantiles == {
        "0%": in_order[0], "10%": in_order[39], "50%": in_order[199], "90%": in_order[359], "99%": in_order[395],
        "100%": in_order[399],
    }  # fmt: skip
    assert found.mean_length == lengths.mean()
    assert describe(IndexedTokens(tmp_path / "corpus"), None).without_end is None


def test_a_large_corpus_is_described_by_evenly_spaced_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triaxis.launch.prepare.describe.MOST_DOCUMENTS", 10)
    with IndexedWriter(tmp_path / "corpus", "<u2") as writer:
        for number in range(100):
            writer.add_document([1] * (number + 1))
    found = describe(IndexedTokens(tmp_path / "corpus"), 1)
    assert (found.looked_at, found.quantiles["0%"], found.quantiles["100%"]) == (10, 1, 91)
    assert (found.documents, found.tokens, found.without_end) == (100, 5050, 0)
    with IndexedWriter(tmp_path / "negative", "<i4") as writer:
        writer.add_document([5, -100])
    assert describe(IndexedTokens(tmp_path / "negative"), 1).without_end == 1
