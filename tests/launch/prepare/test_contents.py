"""The content of a file decides how it is read where its name does not tell, and tokens of other tools are read as they are."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard

from triaxis.engine.data.corpus.findings import BadInput, Findings, Reading, Vocabulary
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.pieces import InputFile, ReadOptions
from triaxis.engine.data.corpus.record import CorpusRecord
from triaxis.engine.data.corpus.tokenizers import BytesTokenizer
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.encode import documents
from triaxis.launch.prepare.prepare import PrepareRequest, plan, prepare
from triaxis.launch.prepare.readers import reader_of

EOD = 9
ROWS = [{"text": "one, two", "id": 1}, {"text": "three", "id": 2}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(path: Path, vocab_size: int = 70_000, **options: Any) -> list[Any]:
    """The contents of the documents of a file."""
    reading = Reading("stop", Vocabulary(vocab_size, EOD))
    file = InputFile.of(path, ReadOptions(**options))
    pieces = list(reader_of(file.path, file.options).pieces(file, 5, reading))
    found = [document.content for piece in pieces for document in documents(piece, reading)]
    return [each if isinstance(each, str) else each.tolist() for each in found]


def in_memory(write: Callable[[Any], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def zipped(to: Any) -> None:
    with zipfile.ZipFile(to, "w") as archive:
        archive.writestr("a.txt", "text")


NAMED = {
    "lines.txt": (LINES, "JSON lines by its content"),
    "lines": (b"\xef\xbb\xbf" + LINES, "JSON lines by its content"),
    "array.md": (json.dumps(ROWS, indent=1).encode(), "a JSON array"),
    "array.jsonl": (json.dumps(ROWS).encode(), "a JSON array"),
    "object.jsonl": (json.dumps(ROWS[0], indent=1).encode(), "a JSON object over several lines"),
    "table.dat": (b'text,id\n"one, two",1\nthree,2\n', r"a table, a \.csv"),
    "one.dat": (b"text,id\nhello,1\n", r"a table, a \.csv.*--format text takes it as it is"),
    "spaces.dat": (b"id, text\n1, a\n2, b\n3, c\n4, d\n", r"a table, a \.csv"),
    "table.text": (b"id\ttext\n1\tone, two\n2\tthree\n", r"a table, a \.tsv"),
    "lines.gz": (gzip.compress(LINES), "JSON lines by its content"),
    "twice.txt.gz": (gzip.compress(gzip.compress(LINES)), r"compressed, a \.gz"),
    "packed": (lzma.compress(LINES), r"compressed, a \.xz"),
    "packed.jsonl": (bz2.compress(LINES), r"compressed, a \.bz2"),
    "archive.txt": (in_memory(zipped), r"an archive, a \.zip"),
    "rows.txt": (
        in_memory(lambda to: parquet.write_table(arrow.table({"text": ["a"]}), to)),
        r"a \.parquet by its content",
    ),
    "paper.txt": (b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n", "a PDF"),
    "letters.txt": (b"%PDF-1.4\n1 0 obj\n<< >>\n", "a PDF"),
    "crawl.txt.gz": (gzip.compress(b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\ntext"), "a WARC"),
    "letter.txt": (b"{\\rtf1\\ansi text}", "an RTF"),
    **{
        f"pickle{number}": (pickle.dumps(value, protocol), "a pickle of Python")
        for number, (value, protocol) in enumerate(
            ((["text"], 0), ({"text": 1}, 0), (("text", 1), 0), (np.zeros(2), 0), (([1], 2), 0), (["text"], 2))
        )
    },
    "keyless.txt": (
        b'{"id": 1}\n{"id": 2}\n',
        "JSON lines by its content.*have no field 'text', but 'id': .*--text-key NAME",
    ),
    "separators.txt": ('{"text": "a\u2028b"}\n'.encode() * 2, "JSON lines by its content"),
    "long.txt": (b"\n".join([json.dumps({"body": "x" * 70_000}).encode()] * 2), "JSON lines by its content"),
    "scores.jsonl": (b"\x89HDF\r\n\x1a\n\0\0", "an HDF5 file"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_content_that_its_name_does_not_promise_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, title = NAMED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"(?s){name} is .*{title}"):
        read(tmp_path / name)


AS_TEXT = [
    b"text",
    b'{"id": 1}\n',
    b'{"id": 1}\n{"id": 2}\nare lines of an example\n',
    b"text, he said\nhello, you",
    b"text; and\nmore; of it",
    b"(See the source\nc.\nVersion\n",
    b"text, as in this sentence\nand, well, another one\n",
    b"BZh, or ORC: names of formats in a text\n",
    b"[1] A reference.\n[2] Another.\n",
]


@pytest.mark.parametrize("content", AS_TEXT)
def test_a_text_that_looks_like_little_else_stays_a_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt") == [content.decode()]


def test_what_stands_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    """A pointer is text, and would be a document, or the ids that its letters spell."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"0f" * 32)
    for name, content, message in (
        *(
            (name, pointer, "a pointer of Git LFS.*git lfs pull")
            for name in ("a.txt", "b.jsonl", "c.bin", "d.parquet", "e.gz")
        ),
        ("f", b"/annex/objects/SHA256E-s5--ab.txt\n", "a pointer of git-annex.*git annex get"),
        ("g.txt.gz", b"a text", r"not compressed, though its name ends in \.gz"),
        ("h.ZST", b"<html>404</html>", r"not compressed, though its name ends in \.zst"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"(?s){name} is {message}"):
            plan([InputFile.of(tmp_path / name)], Findings("stop"))
    for name, content in (("i", pointer + b"is what a pointer looks like"), ("j.gz", zstandard.compress(b"text"))):
        (tmp_path / name).write_bytes(content)
        assert plan([InputFile.of(tmp_path / name)], Findings("stop"))
    assert read(tmp_path / "j.gz") == ["text"]


def test_utf_16_without_a_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"4 of its 8 characters are zero.*iconv"):
        read(tmp_path / "a.txt")


def test_a_format_that_is_given_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(LINES)
    assert read(tmp_path / "a.txt", format="text") == [LINES.decode()]
    assert read(tmp_path / "a.txt", format="jsonl") == ["one, two", "three"]
    (tmp_path / "b").write_bytes(in_memory(lambda to: parquet.write_table(arrow.table({"text": ["a"]}), to)))
    assert read(tmp_path / "b", format="parquet") == ["a"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_file_is_decompressed_whatever_its_name(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.jsonl").write_bytes(compress(LINES))
    (tmp_path / "a").write_bytes(compress(b"text"))
    assert read(tmp_path / "a.jsonl") == ["one, two", "three"] and read(tmp_path / "a") == ["text"]


STORIES = "\ufeffOnce\nupon\r\n<|end|>\na time<|end|><|end|>\n\nthe <|en|> end\n<|end|>\n".encode()


@pytest.mark.parametrize("cut", [1, 2, 7, 20, 1000])
def test_a_separator_divides_a_text_wherever_it_is_cut(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(STORIES)
    file, reading = InputFile.of(path, ReadOptions(separator="<|end|>")), Reading("stop")
    pieces = list(reader_of(file.path, file.options).pieces(file, cut, reading))
    assert len(pieces) == -(-len(STORIES) // cut)
    found = [document.content for piece in pieces for document in documents(piece, reading)]
    assert found == ["Once\nupon", "a time", "the <|en|> end"]


def test_a_separator_that_overlaps_itself_is_counted_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n\ntwo\nlines\n\n\n\n\nthree")
    assert read(tmp_path / "a.txt", separator="\n\n") == ["one", "two\nlines", "three"]


def test_a_document_that_is_too_long_is_named_and_the_next_one_is_read(tmp_path: Path) -> None:
    rows = [{"text": "good"}, {"text": "x" * 200_000}, {"text": "good too"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.txt").write_text("good;" + "x" * 200_000 + ";good too")
    (tmp_path / "b.txt").write_text("x" * 101)
    parquet.write_table(arrow.table({"text": [row["text"] for row in rows]}), tmp_path / "a.parquet")
    for name, separator, expected in (
        ("a.jsonl", None, ["good", "good too"]),
        ("a.txt", ";", ["good", "good too"]),
        ("a.parquet", None, ["good", "good too"]),
        ("b.txt", None, []),
    ):
        file = InputFile.of(tmp_path / name, ReadOptions(separator=separator, max_document_bytes=100))
        for step in (1000, 10**9):
            reading = Reading("skip")
            pieces = list(reader_of(file.path, file.options).pieces(file, step, reading))
            found = [document.content for piece in pieces for document in documents(piece, reading)]
            assert found == expected and reading.tally[BadInput.TOO_LONG].count == 1, name


def test_names_with_dots_enter_what_is_nested(tmp_path: Path) -> None:
    rows = [{"data": {"text": "one"}, "data.id": "literal"}, {"data": {"text": "two"}, "data.id": "x"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert read(tmp_path / name, text_key="data.text") == ["one", "two"]
        assert read(tmp_path / name, text_key="data.id") == ["literal", "x"]
        with pytest.raises(DataError, match=r"has no (field|column) 'data\.body'"):
            read(tmp_path / name, text_key="data.body")


def test_flipped_bits_of_a_parquet_are_found_by_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.table({"text": ["a text that is kept"]}),
        path,
        write_page_checksum=True,
        write_statistics=False,
        use_dictionary=False,
        compression="none",
    )
    content = bytearray(path.read_bytes())
    content[content.index(b"text that")] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet, rows 1 to 1: they are damaged"):
        read(path)


FLAT = [5, 6, EOD, 7, EOD, EOD, 8]
CUT = [[5, 6, EOD], [7, EOD], [EOD], [8]]


def llm_c(magic: int, dtype: str) -> bytes:
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1 if dtype == "<u2" else 7, len(FLAT)
    return head.tobytes() + np.array(FLAT, dtype).tobytes()


TOKEN_FILES: dict[str, tuple[bytes, int, list[list[int]]]] = {
    "flat.npy": (in_memory(lambda to: np.save(to, np.array(FLAT, "<i8"))), 70_000, CUT),
    "rows.npy": (in_memory(lambda to: np.save(to, np.array([[1, 2], [3, EOD]], "u1"))), 70_000, [[1, 2], [3, EOD]]),
    "nanogpt.bin": (np.array(FLAT, "<u2").tobytes(), 50_257, CUT),
    "olmo.npy": (np.array(FLAT, "<u4").tobytes(), 100_278, CUT),
    "llm_c.bin": (llm_c(20240520, "<u2"), 50_257, CUT),
    "llama3_c.bin": (llm_c(20240801, "<u4"), 128_256, CUT),
}


@pytest.mark.parametrize("name", TOKEN_FILES)
def test_tokens_of_other_tools_are_cut_where_documents_end(tmp_path: Path, name: str) -> None:
    content, vocab_size, expected = TOKEN_FILES[name]
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name, vocab_size) == expected


def test_lists_of_ids_are_tokens(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, EOD]}, {"input_ids": [3]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert read(tmp_path / name, text_key="input_ids") == [[1, 2, EOD], [3]]


def test_what_holds_no_tokens_is_named(tmp_path: Path) -> None:
    floats = in_memory(lambda to: np.save(to, np.ones(3)))
    short = llm_c(20240520, "<u2")[:-2]
    flat, wide = np.arange(20), r"every second token is 0, so a token has {} bytes.*n\.fromfile\('.*{}', '<u{}'\)"
    for name, content, message in (
        ("a.npy", floats, r"holds no tokens \(it has float64"),
        ("b.bin", b"odd", "holds no tokens"),
        ("c.bin", short, "announces 7 tokens, but 6 follow"),
        ("e.bin", flat.astype("<u4").tobytes(), wide.format(4, "e.bin", 4)),
        ("f.bin", flat.astype("<i8").tobytes(), wide.format(8, "f.bin", 8)),
        ("d.bin", llm_c(20240520, "<u4"), "has version 7, but only 1 is known"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path / name, 50_257)
    (tmp_path / "c.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(DataError, match=r"half of a corpus.*data\.train"):
        read(tmp_path / "c.bin")


def test_an_item_that_is_no_id_is_named(tmp_path: Path) -> None:
    for ids, message in (
        ([5, -2, 3], "item 2 of the list 'ids' is -2, and ids are integers"),
        ([5, 3, 2.5], "item 3 of the list 'ids' is 2.5"),
        ([5, True], "item 2 of the list 'ids' is True"),
        ([], "the field 'ids' is empty"),
        (None, "the field 'ids' is null, not text"),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps({"ids": ids}))
        reading = Reading("skip")
        file = InputFile.of(tmp_path / "a.jsonl", ReadOptions("ids"))
        pieces = list(reader_of(file.path, file.options).pieces(file, 1000, reading))
        assert not list(documents(pieces[0], reading))
        (found,) = reading.tally.values()
        assert message in found.places[0].detail
    parquet.write_table(arrow.table({"ids": [[1, 2], [1, None]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2: item 2 of its list is null"):
        read(tmp_path / "a.parquet", text_key="ids")


def test_a_key_with_two_texts_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "lost", "text": "kept"}\n')
    with pytest.raises(DataError, match="line 1: it gives 'text' two values"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "kept", "meta": {"text": "another"}, "id": 1}\n')
    assert read(tmp_path / "a.jsonl") == ["kept"]


class Words(BytesTokenizer):
    """A tokenizer that knows small letters alone, drops digits, and whose library fails on `!`."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown_id = 0

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise ValueError("a library's own words")
        return [ord(each) if each.islower() else 0 for each in text if not each.isdigit()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def test_what_a_tokenizer_does_to_documents_is_counted(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("encode._loaded", "prepare.load_tokenizer"):
        monkeypatch.setattr(f"triaxis.launch.prepare.{module}", lambda *names: Words())
    rows: list[object] = ["ab", "123", "no!", "Xyz", [97, 256], [98], [300]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))

    def made(on_bad: str) -> CorpusRecord:
        request = PrepareRequest((tmp_path / "a.jsonl",), "words", str(tmp_path / "c"), on_bad=on_bad)  # type: ignore[arg-type]
        return prepare(request, num_workers=1, progress=lambda done: None).record

    with pytest.raises(
        DataError, match=r"a\.jsonl, line 3: the tokenizer's library fails on its 3 characters.*own words"
    ):
        made("stop")
    record = made("skip")
    corpus = IndexedTokens(tmp_path / "c")
    found = [corpus.tokens(each).tolist() for each in range(corpus.num_documents)]
    assert found == [[97, 98, 256], [0, 121, 122, 256], [97, 256], [98, 256]]
    assert record.num_unknown_tokens == 1
    assert {kind: left["places"][0].rpartition(": ")[0][-6:] for kind, left in record.left_out.items()} == {
        BadInput.EMPTIED_DOCUMENT: "line 2",
        BadInput.NOT_ENCODED: "line 3",
        BadInput.OTHER_IDS: "line 7",
    }
