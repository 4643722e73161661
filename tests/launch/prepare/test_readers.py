"""Every format gives the documents that were written to it, and whatever cannot become tokens is named and counted."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard

from triaxis.engine.data.corpus.findings import BadInput, Findings, Reading, Vocabulary
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.pieces import InputFile, ReadOptions
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.encode import documents
from triaxis.launch.prepare.inputs import find_inputs
from triaxis.launch.prepare.prepare import Prepared, PrepareRequest, look_at, plan, prepare
from triaxis.launch.prepare.readers import reader_of

TEXTS = ["first", "zwei\nZeilen", "", "drei 🙂", "x" * 3000, *(f"row {number}" for number in range(3000))]
WITH_TEXT = [text for text in TEXTS if text]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_parquet(path: Path, column: arrow.Array, name: str = "text", group_rows: int = 700) -> None:
    parquet.write_table(arrow.table({name: column, "id": list(range(len(column)))}), path, row_group_size=group_rows)


def two_members(content: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """Compressed data may be several streams one after another."""
    return compress(content[: len(content) // 2]) + compress(content[len(content) // 2 :])


def zst(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def read(path: Path, step: int = 1000, on_bad: str = "stop", **options: Any) -> tuple[list[Any], Reading]:
    """The contents of all documents of a file, piece by piece, and the findings."""
    reading = Reading(on_bad, Vocabulary(1000, 0))  # type: ignore[arg-type]
    file = InputFile.of(path, ReadOptions(**options))
    pieces = list(reader_of(file.path, file.options).pieces(file, step, reading))
    assert sum(piece.num_bytes for piece in pieces) in (path.stat().st_size, 0)
    found = []
    for piece in pieces:
        found += [document.content for document in documents(piece, reading)]
        assert reading.done_bytes() == piece.num_bytes or reading.tally
    return found, reading


BOM = "\ufeff".encode()
"""What Windows puts before a text."""


def packed(name: str, content: bytes) -> bytes:
    """The content as the ending of the name wants it."""
    compress = {".gz": gzip.compress, ".zst": zst}.get(Path(name).suffix.lower())
    return two_members(content, compress) if compress else content


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.ndjson", "A.JSONL", "A.Json.GZ"]
)
def test_lines_are_documents(tmp_path: Path, name: str) -> None:
    content = lines(TEXTS)
    (tmp_path / name).write_bytes(packed(name, BOM + content if name[0] == "A" else content))
    found, reading = read(tmp_path / name)
    assert found == WITH_TEXT
    (empty,) = reading.tally.values()
    assert [str(place.with_line()) for place in empty.places] == [
        f"{tmp_path / name}, line 3: the field 'text' is empty"
    ]


@pytest.mark.parametrize("name", ["a.txt", "README", "a.txt.gz", "a.txt.zst", "b.gz", "A.TXT", "A.TXT.GZ"])
def test_a_text_is_one_document(tmp_path: Path, name: str) -> None:
    content = b"Zeile\r\nzwei" * 1000
    (tmp_path / name).write_bytes(packed(name, BOM + content if name[0] == "A" else content))
    assert read(tmp_path / name)[0] == [content.decode()]


@pytest.mark.parametrize(
    "kind", [arrow.string(), arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())]
)
def test_rows_are_documents_and_row_groups_pieces(tmp_path: Path, kind: arrow.DataType) -> None:
    write_parquet(tmp_path / "A.Parquet", arrow.array(TEXTS).cast(kind))
    file = InputFile.of(tmp_path / "A.Parquet")
    assert len(list(reader_of(file.path, file.options).pieces(file, 10, Findings("stop")))) == -(-len(TEXTS) // 700) > 3
    found, reading = read(file.path)
    assert found == WITH_TEXT
    (empty,) = reading.tally.values()
    assert empty.places[0].where == "row 3"


def test_folders_are_searched_by_endings_in_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.jsonl.gz", "b/c/x.parquet", "a.json.zst", "b/notes.md", "b/.hidden/h.txt", ".h.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("x")
    (tmp_path / "in" / "b" / "3.JSON").write_text('{"text": "a document"}\n')
    for name in ("tokenizer.json", "rows.csv.gz", "b/old.tar.gz"):
        (tmp_path / "in" / name).write_text('{\n "vocab": {}\n}')
    expected = ["a.json.zst", "b/1.jsonl.gz", "b/2.txt", "b/3.JSON", "b/c/x.parquet"]
    for pattern in (f"{tmp_path}/in", f"{tmp_path}/i*"):
        inputs = find_inputs([pattern])
        assert [str(path.relative_to(tmp_path / "in")) for path in inputs.files] == expected
        assert inputs.passed_over == {".md": 1, ".json": 1, ".csv.gz": 1, ".tar.gz": 1}
    assert [path.name for path in find_inputs([f"{tmp_path}/in/b/[123n]*"]).files] == [
        "1.jsonl.gz",
        "2.txt",
        "3.JSON",
        "notes.md",
    ]


@pytest.mark.parametrize(("name", "package"), [("a.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(DataError, match=rf"needs the package {package}.*pip install -e '.*\[text\]'"):
        read(tmp_path / name)


def test_a_wide_window_is_read(tmp_path: Path) -> None:
    """`zstd --long=28` and wider: windows that the library refuses by default."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28, hash_log=6, chain_log=6, write_content_size=False)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(packed.compress(b"text") + packed.flush())
    with pytest.raises(zstandard.ZstdError, match="too much memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress((tmp_path / "a.txt.zst").read_bytes())
    assert read(tmp_path / "a.txt.zst")[0] == ["text"]


def damaged_parquet(path: Path) -> None:
    """A column whose second row group has other bytes than were written."""
    write_parquet(path, arrow.array([f"good p{number}" for number in range(20)]), group_rows=10)
    start = parquet.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 12] = b"\xff" * 12
    path.write_bytes(content)


def invalid_parquet(path: Path) -> None:
    """Rows: good, no UTF-8, null, good."""
    binary = arrow.array([b"good u1", b"caf\xe9", None, b"good u2"], arrow.binary())
    text = arrow.StringArray.from_buffers(4, *binary.buffers()[1:], binary.buffers()[0], binary.null_count)
    write_parquet(path, text)


GOOD = lines([f"good line {number}" for number in range(200)])
DAMAGES: dict[str, tuple[BadInput, str, str]] = {
    "latin1.txt": (BadInput.NOT_UTF8, r"latin1\.txt is no UTF-8 text: byte 3 is 0xe9", ""),
    "latin1.jsonl": (BadInput.NOT_UTF8, r"latin1\.jsonl, line 2: .*can't decode byte 0xe9", "a"),
    "broken.jsonl": (BadInput.NOT_JSON, r"broken\.jsonl, line 3: .*Each line of a \.jsonl is one document", "a"),
    "nokey.jsonl": (BadInput.NO_FIELD, r"nokey\.jsonl, line 2: it has no field 'text', but 'content'", "a"),
    "list.jsonl": (BadInput.NO_FIELD, r"list\.jsonl, line 2: it has no field 'text', but a list", "a"),
    "number.jsonl": (BadInput.NOT_TEXT, r"number\.jsonl, line 2: the field 'text' is a int, not text", "a"),
    "digits.jsonl": (BadInput.NOT_JSON, r"digits\.jsonl, line 2: a whole number has more than 4,300 digits", "a"),
    "half.jsonl": (BadInput.NOT_UNICODE, r"half\.jsonl, line 2: .*half a surrogate pair", "a"),
    "cut.jsonl.gz": (
        BadInput.DAMAGED_FILE,
        r"cut\.jsonl\.gz, line \d+: the file is damaged or truncated here",
        "lines",
    ),
    "cut.jsonl.zst": (BadInput.DAMAGED_FILE, r"cut\.jsonl\.zst, line \d+: .*in the middle of a frame", "lines"),
    "other.txt.gz": (BadInput.DAMAGED_FILE, r"other\.txt\.gz is damaged or truncated \(Not a gzipped file", ""),
    "plain.txt.gz": (BadInput.OTHER_FORMAT, r"plain\.txt\.gz is not compressed", ""),
    "cut.parquet": (BadInput.DAMAGED_FILE, r"cut\.parquet is no whole parquet file", ""),
    "page.parquet": (BadInput.DAMAGED_FILE, r"page\.parquet, rows 11 to 20: they are damaged", "rows"),
    "column.parquet": (BadInput.NO_FIELD, r"column\.parquet has no column 'text', but 'content', 'id'", ""),
    "twice.parquet": (BadInput.NO_FIELD, r"twice\.parquet has 2 columns 'text'.*Rename one", ""),
    "number.parquet": (BadInput.NOT_TEXT, r"number\.parquet has the column 'text', but of int64, not of text", ""),
    "invalid.parquet": (BadInput.NOT_UTF8, r"invalid\.parquet, row 2: .*can't decode byte 0xe9", "u"),
    "array.json": (BadInput.OTHER_FORMAT, r"array\.json is a JSON array and not lines", ""),
    "scan.txt": (BadInput.NOT_UTF8, r"scan\.txt is no UTF-8 text: byte 0 is 0x89.*UTF-16.*or no text at all", ""),
    "empty.txt": (BadInput.EMPTY_FILE, r"empty\.txt is empty", ""),
    "gone.txt": (BadInput.VANISHED_FILE, r"gone\.txt vanished", ""),
}
"""File -> its fault, the message, and which documents of it are good."""


def make_damages(folder: Path) -> None:
    first = lines(["good a"])
    contents = {
        "latin1.txt": b"caf\xe9",
        "latin1.jsonl": first + b'{"text": "caf\xe9"}\n' + lines(["good b"]),
        "broken.jsonl": first + b"\n" + b'{"text": \n' + lines(["good b"]),
        "nokey.jsonl": first + b'{"content": "b"}\n' + lines(["good b"]),
        "list.jsonl": first + b"[1]\n" + lines(["good b"]),
        "number.jsonl": first + b'{"text": 3}\n' + lines(["good b"]),
        "digits.jsonl": first + b'{"id": ' + b"9" * 5000 + b"}\n" + lines(["good b"]),
        "array.json": b'[{"text": "lost"}]',
        "scan.txt": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "half.jsonl": first + b'{"text": "\\ud83d"}\n' + lines(["good b"]),
        "cut.jsonl.gz": gzip.compress(GOOD)[:-300],
        # Two frames, of which the second is cut.
        "cut.jsonl.zst": zst(GOOD) + zst(GOOD)[:-20],
        "other.txt.gz": b"\0" * 20,
        "plain.txt.gz": b"never compressed",
        "empty.txt": b"",
        "gone.txt": b"x",
        "whole.txt": b"good whole",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    write_parquet(folder / "cut.parquet", arrow.array(["lost"]))
    os.truncate(folder / "cut.parquet", 100)
    damaged_parquet(folder / "page.parquet")
    write_parquet(folder / "column.parquet", arrow.array(["lost"]), "content")
    write_parquet(folder / "number.parquet", arrow.array([1, 2]))
    twice = arrow.Table.from_arrays([arrow.array(["lost"]), arrow.array(["lost"])], ["text", "text"])
    parquet.write_table(twice, folder / "twice.parquet")
    invalid_parquet(folder / "invalid.parquet")


def make(files: tuple[Path, ...], output: Path, on_bad: str) -> Prepared:
    request = PrepareRequest(files, "bytes", str(output), on_bad=on_bad)  # type: ignore[arg-type]
    return prepare(request, num_workers=1, progress=lambda done: None)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    make_damages(folder)
    return folder


def test_every_damage_is_counted_and_nothing_else_is_lost(damaged: Path, tmp_path: Path, in_process: None) -> None:
    files = find_inputs([str(damaged)], "skip").files
    assert {path.name for path in files} == {*DAMAGES, "whole.txt"}
    (damaged / "gone.txt").unlink()
    record = make(files, tmp_path / "corpus", "skip").record
    corpus = IndexedTokens(tmp_path / "corpus")
    decode = load_tokenizer("bytes").decode
    texts = [decode(corpus.tokens(document).tolist()) for document in range(corpus.num_documents)]
    assert all(text.startswith("good ") for text in texts)
    assert texts.count("good a") == texts.count("good b") == 7
    assert {"good whole", "good u1", "good u2", *(f"good p{number}" for number in range(10))} < set(texts)
    in_frames = [text for text in texts if text.startswith("good line")]
    # The whole first frame of the .zst, and what can be decompressed of the .gz.
    from_gzip = zlib.decompressobj(31).decompress((damaged / "cut.jsonl.gz").read_bytes()).count(b"\n")
    assert in_frames == [f"good line {number}" for number in (*range(from_gzip), *range(200))] and from_gzip > 50
    assert len(texts) == record.num_documents == 14 + 3 + 10 + len(in_frames)
    expected: dict[str, int] = {}
    for kind, _, _ in [*DAMAGES.values(), (BadInput.NOT_TEXT, "the null of invalid.parquet", "")]:
        expected[kind] = expected.get(kind, 0) + 1
    assert {kind: found["count"] for kind, found in record.left_out.items()} == expected
    places = "\n".join(place for found in record.left_out.values() for place in found["places"])
    for name in DAMAGES:
        assert name in places


@pytest.mark.parametrize("name", DAMAGES)
def test_the_first_damage_stops_and_is_named(damaged: Path, name: str) -> None:
    path = damaged / name
    if name == "gone.txt":
        path.unlink()
    findings = Reading("stop")
    with pytest.raises(DataError, match=DAMAGES[name][1]) as raised:
        for unit in plan(look_at(PrepareRequest((path,), "bytes", "out"), findings), findings):
            for piece in unit:
                list(documents(piece, findings))
    assert "--on-bad skip" in str(raised.value)


def ipc(path: Path, new: Callable[..., Any]) -> None:
    table = arrow.table({"text": TWO})
    with arrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table)


def in_archive(folder: Path) -> Path:
    """A text that goes into an archive under its name."""
    (folder / "a.txt").write_text(TWO[0])
    return folder / "a.txt"


def tar(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(in_archive(path.parent), "a.txt")


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(in_archive(path.parent), "a.txt")


TWO = ['one, "two"\r\nü', "three"]
OTHER_FORMATS: dict[str, Callable[[Path], object]] = {
    "a b.csv": lambda path: path.write_bytes('\ufefftext,id\n"one, ""two""\r\nü",1\nthree,2\n'.encode()),
    "rows.TSV.gz": lambda path: path.write_bytes(
        gzip.compress('text\tid\n"one, ""two""\r\nü"\t1\nthree\t2\n'.encode())
    ),
    "array.json": lambda path: path.write_bytes(BOM + json.dumps([{"text": text} for text in TWO], indent=1).encode()),
    "array.ndjson.gz": lambda path: path.write_bytes(
        gzip.compress(json.dumps([{"text": text} for text in TWO]).encode())
    ),
    "object.json": lambda path: path.write_text(json.dumps({"text": TWO[0]}, indent=2)),
    "rows.jsonl.XZ": lambda path: path.write_bytes(lzma.compress(lines(TWO))),
    "rows.json.bz2": lambda path: path.write_bytes(bz2.compress(lines(TWO))),
    "stream.arrow": lambda path: ipc(path, arrow.ipc.new_stream),
    "file.feather": lambda path: ipc(path, arrow.ipc.new_file),
    "texts.tar.gz": tar,
    "texts.TGZ": tar,
    "texts.zip": zipped,
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_the_command_for_another_format_makes_what_is_read(tmp_path: Path, name: str) -> None:
    """No such file becomes a document, and the refusal's command, run as it is printed, gives what the file holds."""
    path = tmp_path / name
    OTHER_FORMATS[name](path)
    with pytest.raises(DataError, match="which is not read") as raised:
        read(path)
    _, command, rest = str(raised.value).split("\n")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command.strip()], check=True, env=environment, timeout=60)
    made = rest.removeprefix("and give ").partition(" to --input")[0]
    found = [text for file in find_inputs([made]).files for text in read(file)[0]]
    assert found == TWO[: len(found)] and len(found) == (1 if "text" in name or "object" in name else 2)


def test_a_line_deep_in_a_file_is_named_by_its_number(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triaxis.launch.prepare.prepare.UNIT_BYTES", 500)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"{\n" + GOOD + b"[]\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 201: Expecting property name"):
        make((path,), tmp_path / "corpus", "stop")
    assert any((tmp_path / "corpus.parts").glob("*.json")), "what is whole stays"
    record = make((path,), tmp_path / "corpus", "skip").record
    assert record.num_documents == 400
    assert [
        "line 201" in place or "line 402" in place
        for kind in record.left_out
        for place in record.left_out[kind]["places"]
    ]
    assert not (tmp_path / "corpus.parts").exists()
    with pytest.raises(DataError, match="line 201"):
        make((path,), tmp_path / "corpus", "stop")
    assert make((path,), tmp_path / "corpus", "skip").already_there


def test_a_file_that_changes_under_way_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    (unit,) = plan(look_at(PrepareRequest((path,), "bytes", "out"), Findings("stop")), Findings("stop"))
    path.write_text("longer text")
    with pytest.raises(DataError, match=r"a\.txt changed while the corpus was made: it had 4 bytes and has 11"):
        list(documents(unit[0], Reading("stop")))


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> None:
    """Between the first look and the reading, its permissions may change."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("good")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **named: Any) -> IO[Any]:
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"a\.txt may not be read by this user"):
        make(files, tmp_path / "corpus", "stop")
    record = make(files, tmp_path / "corpus", "skip").record
    assert record.left_out == {
        BadInput.UNREADABLE_FILE: {"count": 1, "places": [f"{files[0]} may not be read by this user"]}
    }
    assert record.num_documents == 1


def test_a_document_that_the_format_cannot_count_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> None:
    monkeypatch.setattr("triaxis.launch.prepare.encode.LONGEST_SEQUENCE", 5)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["1234", "12345"]))
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the document has 6 tokens, more than the format counts"):
        make((path,), tmp_path / "corpus", "stop")
    assert make((path,), tmp_path / "corpus", "skip").record.left_out[BadInput.TOO_LONG]["count"] == 1


def test_an_empty_text_leaves_no_parts(tmp_path: Path, in_process: None) -> None:
    (tmp_path / "void.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no text: 1 document, all"):
        make((tmp_path / "void.jsonl",), tmp_path / "out" / "corpus", "stop")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".corpus.lock"]
