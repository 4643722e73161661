"""A corpus is the same for any number of workers, complete or not there, and never replaces another one by accident."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from triaxis.engine.data.corpus.findings import Findings, Reading
from triaxis.engine.data.corpus.indexed import IndexedTokens, bin_path
from triaxis.engine.data.corpus.pieces import InputFile, Piece
from triaxis.engine.data.corpus.record import read_record
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import DataError
from triaxis.engine.storage.files import write_atomically
from triaxis.launch.commands import prepare as command
from triaxis.launch.prepare import prepare as prepare_module
from triaxis.launch.prepare.encode import documents as documents_of
from triaxis.launch.prepare.inputs import find_inputs
from triaxis.launch.prepare.parts import Done
from triaxis.launch.prepare.prepare import Prepared, PrepareRequest, look_at, plan, prepare

LINES = ["first", "", "zwei\nmit Umbruch", "drei \u2028 🙂", "x" * 500, "last"]


def quietly(done: Done) -> None:
    assert done.num_bytes >= 0


def make(files: tuple[Path, ...], output: Path, num_workers: int = 1, force: bool = False, **fields: Any) -> Prepared:
    request = PrepareRequest(files, fields.pop("tokenizer", "bytes"), str(output), **fields)
    return prepare(request, num_workers=num_workers, force=force, progress=quietly)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three text files and a .jsonl."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"b.txt": "bé\r\n", "a.txt": "a a a", "c.md": "c" * 3000}.items():
        (folder / name).write_bytes(text.encode())
    lines = [json.dumps({"id": number, "text": line}) for number, line in enumerate(LINES)]
    (folder / "d.jsonl").write_text("\n".join([*lines[:3], "  ", *lines[3:]]))
    return folder


def documents(prefix: Path) -> list[str]:
    tokens = IndexedTokens(prefix)
    found = [tokens.tokens(document).tolist() for document in range(tokens.num_documents)]
    assert all(ids[-1] == 256 and 256 not in ids[:-1] for ids in found)
    return [load_tokenizer("bytes").decode(ids) for ids in found]


def test_the_corpus_is_the_text_in_order(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "UNIT_BYTES", 100)  # several units, the .jsonl cut inside lines
    files = find_inputs([str(texts / "*.txt"), str(texts / "*")]).files
    assert [path.name for path in files] == ["a.txt", "b.txt", "c.md", "d.jsonl"]
    assert len(plan(look_at(PrepareRequest(files, "bytes", "out"), Findings("stop")), Findings("stop"))) > 5
    one, three = make(files, tmp_path / "out" / "one"), make(files, tmp_path / "out" / "three", num_workers=3)
    assert documents(tmp_path / "out" / "one") == ["a a a", "bé\r\n", "c" * 3000, *filter(None, LINES)]
    assert (one.record.num_documents, one.record.num_skipped_documents, one.record.num_input_files) == (8, 1, 4)
    assert (
        one.record.bin_sha256
        == three.record.bin_sha256
        == hashlib.sha256(bin_path(tmp_path / "out" / "one").read_bytes()).hexdigest()
    )
    assert one.record.idx_sha256 == three.record.idx_sha256
    assert one.record.input_bytes == sum(path.stat().st_size for path in files)
    names = {path.name for path in (tmp_path / "out").iterdir() if not path.name.endswith(".lock")}
    assert names == {f"{corpus}.{ending}" for corpus in ("one", "three") for ending in ("bin", "idx", "json")}


def test_a_file_is_read_once_under_all_its_names(texts: Path) -> None:
    """`**` follows links of folders, without end where one leads back."""
    (texts / "again").symlink_to(texts)
    (texts / "z.txt").symlink_to("a.txt")
    (texts / "y.txt").hardlink_to(texts / "b.txt")
    for pattern in (str(texts / "**" / "*.txt"), str(texts / "*.txt")):
        found = find_inputs([pattern])
        assert [path.name for path in found.files] == ["a.txt", "b.txt"] and found.num_links >= 2


def test_what_is_no_file_is_said_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, words in (("x" * 5000, "names no file"), (str(tmp_path / "pipe.jsonl"), "is a FIFO or a device")):
        with pytest.raises(DataError, match=words) as caught:
            find_inputs([name])
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("cut", [1, 7, 40, 41, 1000])
def test_every_line_belongs_to_one_piece(texts: Path, cut: int) -> None:
    path = texts / "d.jsonl"
    size = path.stat().st_size
    file = InputFile.of(path)
    pieces = [Piece(file, at, min(at + cut, size), min(cut, size - at)) for at in range(0, size, cut)]
    reading = Reading("stop")
    found = [document.content for piece in pieces for document in documents_of(piece, reading)]
    assert found == list(filter(None, LINES))
    (empty,) = reading.tally.values()
    assert (empty.count, [place.with_line().where for place in empty.places]) == (1, ["line 2"])


def test_a_killed_run_leaves_no_worker_and_no_corpus(tmp_path: Path) -> None:
    """SIGKILL in the middle: nobody can clean up, and still no process is left, and a new start succeeds."""
    source = tmp_path / "many.jsonl"
    source.write_text(json.dumps({"text": "x" * 1000}) + "\n")
    os.mkfifo(tmp_path / "stuck.txt")  # a worker that reads it waits for ever
    script = (
        "import sys; from pathlib import Path; from triaxis.launch.prepare import prepare as p\n"
        "if __name__ == '__main__':\n"
        "    p.plan = lambda files, *rest: [(p.Piece(file, 0, file.size, 1),) for file in files]\n"
        "    p.look_at = lambda request, *rest: [p.InputFile.of(path) for path in request.files]\n"
        "    request = p.PrepareRequest(tuple(map(Path, sys.argv[1:3])), 'bytes', sys.argv[3])\n"
        "    done = lambda done: done.num_documents and print('started', flush=True)\n"
        "    p.prepare(request, num_workers=2, progress=done)\n"
    )
    (tmp_path / "script.py").write_text(script)
    output = tmp_path / "corpus"
    command_line = [sys.executable, tmp_path / "script.py", source, tmp_path / "stuck.txt", output]
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(command_line, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(root)})
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    workers = psutil.Process(parent.pid).children()
    assert len(workers) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    left = psutil.wait_procs(workers, timeout=20)[1]
    for worker in left:
        worker.kill()
    assert left == []
    assert not bin_path(output).exists()
    assert make((source,), output).record.num_documents == 1
    assert sorted(path.name for path in tmp_path.glob("corpus*")) == ["corpus.bin", "corpus.idx", "corpus.json"]


def test_bad_input_ends_workers_that_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker waits for ever on a pipe, the other one meets a line that is no JSON."""
    (tmp_path / "bad.jsonl").write_text("{")
    os.mkfifo(tmp_path / "stuck.txt")
    files = [InputFile.of(tmp_path / name) for name in ("stuck.txt", "bad.jsonl")]
    monkeypatch.setattr(prepare_module, "look_at", lambda *_: files)
    monkeypatch.setattr(prepare_module, "plan", lambda *_: [(Piece(file, 0, file.size, 1),) for file in files])
    children = set(psutil.Process().children())
    with pytest.raises(DataError, match=r"bad\.jsonl, line 1: "):
        make(tuple(file.path for file in files), tmp_path / "corpus", num_workers=2)
    new = set(psutil.Process().children()) - children
    assert not [process for process in new if "resource_tracker" not in " ".join(process.cmdline())]
    assert not (tmp_path / "corpus.parts").exists()


@pytest.mark.slow
def test_processes_that_are_killed_go_on_to_the_same_bytes(tmp_path: Path) -> None:
    """The command and its workers, killed together from outside whenever some more parts are whole."""
    lines = [json.dumps({"text": f"line {number} " * 50}) for number in range(20_000)]
    for name in "abcdef":
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    parts, kills = tmp_path / "killed.parts", 0

    def command_line(output: str) -> list[str]:
        words = ["prepare", "--input", str(tmp_path), "--output", str(tmp_path / output), "--workers", "2"]
        return [sys.executable, "-m", "triaxis.launch.cli", *words]

    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    while True:
        before = len(list(parts.glob("*.json")))
        process = subprocess.Popen(command_line("killed"), env=environment, start_new_session=True)
        while process.poll() is None and len(list(parts.glob("*.json"))) < before + 8:
            time.sleep(0.01)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        assert not bin_path(tmp_path / "killed").exists()
    assert process.returncode == 0 and kills >= 5
    subprocess.run(command_line("undisturbed"), env=environment, check=True)
    for ending in (".bin", ".idx"):
        assert Path(f"{tmp_path}/killed{ending}").read_bytes() == Path(f"{tmp_path}/undisturbed{ending}").read_bytes()
    assert not parts.exists()


def test_a_second_start_has_nothing_to_do(texts: Path, tmp_path: Path, in_process: None) -> None:
    files, output = find_inputs([str(texts / "*.txt")]).files, tmp_path / "corpus"
    first = make(files, output)
    assert not first.already_there
    when = bin_path(output).stat().st_mtime_ns
    assert make(files, output, num_workers=2) == Prepared(first.record, already_there=True)
    assert bin_path(output).stat().st_mtime_ns == when
    assert not make(files, output, force=True).already_there


def test_a_damaged_corpus_is_made_again(texts: Path, tmp_path: Path, in_process: None) -> None:
    files, output = find_inputs([str(texts / "*.txt")]).files, tmp_path / "corpus"
    first = make(files, output)
    content = bin_path(output).read_bytes()
    bin_path(output).write_bytes(b"\1" + content[1:])
    assert make(files, output) == first
    assert bin_path(output).read_bytes() == content


def test_another_corpus_is_replaced_only_by_force(texts: Path, tmp_path: Path, in_process: None) -> None:
    output = tmp_path / "corpus"
    first = make(find_inputs([str(texts / "*.txt")]).files, output)
    other = find_inputs([str(texts / "c.md")]).files
    with pytest.raises(DataError, match="made from other inputs"):
        make(other, output)
    assert read_record(str(output)) == first.record
    assert make(other, output, force=True).record.num_documents == 1
    Path(f"{output}.json").unlink()
    with pytest.raises(DataError, match=r"no corpus\.json beside it"):
        make(other, output)


def test_a_record_never_describes_another_corpus(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "corpus"
    make(find_inputs([str(texts / "*.txt")]).files, output)

    def stop(path: Path, parts: list[bytes]) -> None:
        if path.name == "corpus.json":
            raise OSError(28, "No space left on device")
        write_atomically(path, parts)

    monkeypatch.setattr(prepare_module, "write_atomically", stop)
    with pytest.raises(DataError, match="No space left on device"):
        make(find_inputs([str(texts / "c.md")]).files, output, force=True)
    assert IndexedTokens(output).num_documents == 1
    assert read_record(str(output)) is None


def test_a_foreign_json_is_never_replaced(texts: Path, tmp_path: Path, in_process: None) -> None:
    (tmp_path / "corpus.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(DataError, match="neither read nor replaced"):
        make(find_inputs([str(texts / "*.txt")]).files, tmp_path / "corpus", force=True)
    assert "BPE" in (tmp_path / "corpus.json").read_text()


def test_a_json_tokenizer_with_many_ids_is_written_as_int32(tmp_path: Path, texts: Path, in_process: None) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "</s>": 1, "a": 70_000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    record = make((texts / "a.txt",), tmp_path / "corpus", tokenizer=str(tmp_path / "words.json")).record
    assert (record.dtype, record.vocab_size, record.eod_id) == ("int32", 70_001, 1)
    assert IndexedTokens(tmp_path / "corpus").tokens(0).tolist() == [70_000, 70_000, 70_000, 1]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_the_command_says_what_it_wrote_and_what_to_type_next(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--input",
        str(texts / "*.txt"),
        str(texts / "d.jsonl"),
        "--output",
        str(tmp_path / "my corpus"),
        "--workers",
        "1",
    ]
    assert run(*arguments) == 0
    record = read_record(str(tmp_path / "my corpus"))
    shown = capsys.readouterr().out
    assert record is not None
    for part in (
        record.bin_sha256,
        "7, 1 without text left out",
        "uint16",
        "triaxis train 'data.train=",
        "model.vocab_size=257",
    ):
        assert part in shown
    assert f"'data.train={tmp_path}/my corpus'" in shown
    assert run(*arguments) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --input"),
        (["--stdlib", "--input", "x.txt"], "either --input"),
        (["--input", "x.txt", "--max-bytes", "5"], "belongs to --stdlib"),
        (["--stdlib", "--max-bytes", "0"], "at most 0 bytes"),
        (["--stdlib", "--workers", "0"], "--workers 0"),
        (["--stdlib", "--tokenizer", "gpt2"], "no tokenizer at gpt2"),
    ],
)
def test_the_commands_mistakes(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        run(*arguments, "--output", str(tmp_path / "corpus"))
    assert raised.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_help_shows_an_example() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert "triaxis prepare --stdlib" in parser.format_help()
