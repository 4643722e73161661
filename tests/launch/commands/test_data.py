"""`triaxis prepare` and `triaxis data`, as a person types them."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.record import read_record
from triaxis.launch.cli import main
from triaxis.launch.commands.prepare import progress_shown
from triaxis.launch.prepare import prepare as prepare_module
from triaxis.launch.prepare.parts import Done


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts, in which the commands run; they encode in threads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_module, "ProcessPoolExecutor", lambda number, **settings: ThreadPoolExecutor(number))
    (tmp_path / "texts").mkdir()
    rows = [{"body": f"document {number}"} for number in range(10)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "texts" / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "texts" / "b.jsonl").write_bytes(lines + b"{}\n[]\n" + lines[:-5])
    (tmp_path / "texts" / "notes.md").write_text("not read")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


def test_a_folder_with_bad_lines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("prepare", "--input", "texts", "--text-key", "body", "--output", "data/c", "--workers", "1")
    err = said(capsys, *words, code=2)
    assert "error: texts/b.jsonl, line 11: it has no field 'body'" in err and "--on-bad skip" in err
    out = said(capsys, *words, "--on-bad", "skip")
    assert "not read   1 .md: files in folders are read by their endings" in out
    assert "left out   2 x document without the field: texts/b.jsonl, line 11: " in out
    assert "left out   1 x line that is no JSON: texts/b.jsonl, line 22: " in out
    assert "id 256 ends each document" in out
    record = read_record("data/c")
    assert record is not None and record.num_documents == 29
    assert record.left_out["document without the field"]["count"] == 2


def test_without_an_end_the_output_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("prepare", "--input", "texts/a.jsonl.gz", "--json-key", "body", "--workers", "1")
    assert "NO token between documents" in said(capsys, *words, "--no-append-eod", "--output", "without")
    said(capsys, *words, "--output", "with")
    without, ended = IndexedTokens("without"), IndexedTokens("with")
    assert without.num_documents == ended.num_documents == 10
    for document in range(10):
        assert [*without.tokens(document).tolist(), 256] == ended.tokens(document).tolist()
    out = said(capsys, "data", "inspect", "without")
    assert "0 of 10 documents end with id 256" in out and "10 do not, so each runs into the next one" in out


def test_look_join_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("prepare", "--input", "texts/a.jsonl.gz", "--text-key", "body", "--workers", "1", "--output")
    said(capsys, *words, "one")
    said(capsys, *words, "two")
    assert "both: 20 documents, 220 tokens as uint16" in said(capsys, "data", "merge", "one", "two", "--output", "both")
    out = said(capsys, "data", "inspect", "both")
    for part in (
        "documents  20",
        "11.0 tokens per document",
        "20 of 20 documents end with id 256, 9.09% of all tokens",
        "bytes, 257",
        "first      'document 0'",
    ):
        assert part in out
    found = json.loads(said(capsys, "data", "inspect", "both", "--json"))
    assert (found["documents"], found["quantiles"]["50%"], found["eod_id"]) == (20, 11, 256)
    assert found["record"]["num_input_files"] == 2 and found["first_text"] == "document 0"
    out = said(capsys, "data", "split", "both", "--parts", "3,1", "--output", "train", "valid")
    assert out.splitlines() == [
        "train: 15 documents, 165 tokens as uint16",
        "valid: 5 documents, 55 tokens as uint16",
    ]
    said(capsys, "data", "split", "both", "--documents", "10,4", "--output", "x", "y", "z")
    assert [IndexedTokens(name).num_documents for name in "xyz"] == [10, 4, 6]
    assert Path("x.bin").read_bytes() == Path("one.bin").read_bytes()
    assert "must be numbers above 0" in said(
        capsys, "data", "split", "both", "--parts", "1,no", "--output", "p", "q", code=2
    )
    assert "1.5 is no whole number" in said(
        capsys, "data", "split", "both", "--documents", "1.5", "--output", "p", "q", code=2
    )
    assert "would get 30, 0" in said(capsys, "data", "split", "both", "--documents", "30", "--output", "p", "q", code=2)


def test_a_corpus_without_a_record_shows_ids(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "prepare", "--input", "texts/notes.md", "--output", "one", "--workers", "1")
    Path("one.json").unlink()
    out = said(capsys, "data", "inspect", "one")
    assert "unknown: there is no record" in out and "ids 110, 111, 116, 32" in out
    out = said(capsys, "data", "inspect", "one", "--tokenizer", "bytes")
    assert "1 of 1 documents end with id 256" in out and "first      'not read'" in out


def test_each_path_has_a_key_and_the_output_says_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.ndjson").write_text('{"data": {"text": "one"}}\n')
    words = ("prepare", "--input", "texts/a.jsonl.gz", "rows.ndjson", "texts/*.md", "--output", "c", "--workers", "1")
    out = said(capsys, *words, "--text-key", "body", "rows.ndjson=data.text")
    assert "text       3 files (2 as JSON lines, 1 as text)" in out and "documents  12" in out
    assert "is already prepared" in said(capsys, *words, "--text-key", "rows.ndjson=data.text", "body")


def test_a_corpus_is_checked_and_its_damage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "prepare", "--input", "texts/a.jsonl.gz", "--text-key", "body", "--output", "one", "--workers", "1")
    assert (
        said(capsys, "data", "check", "one")
        == "one: 110 tokens, as its record has it\n  ids 32 to 256; 10 documents end with id 256\n"
    )
    content = bytearray(Path("one.bin").read_bytes())
    content[4:6] = (999).to_bytes(2, "little")
    Path("one.bin").write_bytes(content)
    assert main(["data", "check", "one"]) == 1
    out = capsys.readouterr().out
    assert (
        "one.bin is not what was written" in out
        and "ids from 32 to 999, and the tokenizer has those from 0 to 256" in out
    )
    Path("one.json").unlink()
    assert main(["data", "check", "one", "--tokenizer", "bytes"]) == 1, "an id outside"
    content[4:6] = content[-2:] = (32).to_bytes(2, "little")
    Path("one.bin").write_bytes(content)
    assert main(["data", "check", "one", "--tokenizer", "bytes"]) == 0, "most documents end"
    for at in [*range(22, len(content), 22), len(content)]:
        content[at - 2 : at] = (32).to_bytes(2, "little")
    Path("one.bin").write_bytes(content)
    capsys.readouterr()
    assert main(["data", "check", "one", "--tokenizer", "bytes"]) == 1
    assert "one: most documents do NOT end with the tokenizer's end of a document, id 256" in capsys.readouterr().out
    (found,) = json.loads(said(capsys, "data", "check", "one", "--json"))
    assert (found["largest_id"], found["ends"], found["problems"]) == (117, [[32, 10]], [])


def test_a_log_file_gets_a_line_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("triaxis.launch.commands.prepare.time.monotonic", lambda: now[0])
    out = StringIO()
    with progress_shown(Console(file=out, soft_wrap=True, highlight=False), 1000) as progress:
        progress(Done())
        now[0] = 140.0
        progress(Done(num_bytes=600, num_documents=7, num_tokens=300, found_bytes=400))
        progress(Done(num_bytes=601))
    assert out.getvalue() == "prepare: 60% of 1,000 bytes, 7 documents, 300 tokens, 400 bytes from an earlier start\n"
