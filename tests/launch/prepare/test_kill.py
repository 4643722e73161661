"""A preparation that is killed at any moment goes on from its whole parts and ends in the bytes of an undisturbed one.

The preparation runs in a forked process that kills itself at the n-th of its events: before and after every write, rename and
removal. `test_prepare.py` kills one with worker processes from outside.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter, bin_path, idx_path
from triaxis.engine.data.corpus.record import read_record, record_path
from triaxis.launch.prepare import parts as parts_module
from triaxis.launch.prepare import prepare as prepare_module
from triaxis.launch.prepare.encode import EncodeSettings
from triaxis.launch.prepare.parts import Done, PartWriter
from triaxis.launch.prepare.prepare import PrepareRequest, prepare

ENDINGS = (bin_path, idx_path)
BYTES, TRAINED = "bytes", "train-bpe:280"


@pytest.fixture
def request_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> Callable[[str, str], PrepareRequest]:
    """Several units, a .jsonl cut inside lines; a batch of three documents, so that parts are written in several steps."""
    monkeypatch.setattr(prepare_module, "UNIT_BYTES", 400)
    monkeypatch.setattr("triaxis.launch.prepare.encode.BATCH_DOCUMENTS", 3)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"the text of {name} " * 10)
    lines = [json.dumps({"text": f"the cat number {number} sat on the mat"}) for number in range(40)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    files = tuple(tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl"))
    return lambda tokenizer, output: PrepareRequest(files, tokenizer, str(tmp_path / output))


def run(request: PrepareRequest) -> Done:
    """Prepare, and return what the last call of the progress was given."""
    calls = [Done()]
    prepare(request, num_workers=1, progress=calls.append)
    return calls[-1]


def killed_at(number: int, request: PrepareRequest) -> int:
    """Prepare in a process that kills itself at event `number`, from 1; return the events of one that is not killed, else 0."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def event() -> None:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            for owner, name in (
                (PartWriter, "add"),
                (PartWriter, "finish"),
                (IndexedWriter, "add_encoded"),
                (IndexedWriter, "_write_index"),
                (parts_module, "write_atomically"),
                (prepare_module, "write_atomically"),
                (Path, "replace"),
                (Path, "unlink"),
            ):
                setattr(owner, name, with_events(getattr(owner, name), event))
            run(request)
            os.write(writer, str(count).encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as output:
        events = output.read()
    assert os.WIFSIGNALED(status) != bool(events)
    return int(events or 0)


def with_events(function: Callable[..., Any], event: Callable[[], None]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        event()
        result = function(*arguments, **named)
        event()
        return result

    return wrapped


def content(request: PrepareRequest) -> list[bytes]:
    paths = [ending(request.output) for ending in ENDINGS]
    paths += [request.trained_tokenizer] if request.tokenizer == TRAINED else []
    return [path.read_bytes() for path in paths]


def whole_bytes(request: PrepareRequest) -> int:
    """Input bytes of the parts that are whole."""
    if not request.parts.is_dir():
        return 0
    marks = [json.loads(path.read_text()) for path in request.parts.glob("*.json")]
    return sum(mark["num_bytes"] for mark in marks if "num_bytes" in mark)


@pytest.mark.parametrize(
    ("tokenizer", "num_kills"),
    [(BYTES, 6), *(pytest.param(tokenizer, 30, marks=pytest.mark.slow) for tokenizer in (BYTES, TRAINED))],
)
def test_a_kill_at_any_event_changes_no_byte(
    request_of: Callable[[str, str], PrepareRequest], tokenizer: str, num_kills: int
) -> None:
    undisturbed = request_of(tokenizer, "undisturbed")
    num_events = killed_at(0, undisturbed)
    expected = content(undisturbed)
    assert num_events > 60
    seen = set()
    for number in range(1, num_events, num_events // num_kills):
        request = request_of(tokenizer, f"killed_{number}")
        assert killed_at(number, request) == 0
        if all(ending(request.output).exists() for ending in ENDINGS):
            IndexedTokens(request.output)  # never half of one and half of the other
        whole = whole_bytes(request)
        found = run(request).found_bytes
        assert found == whole or read_record(request.output) is not None
        assert content(request) == expected
        assert not request.parts.exists()
        seen.add(whole)
    assert len(seen) > min(5, num_kills // 2), "kills met several numbers of whole parts"


def test_a_corpus_is_killed_again_and_again(request_of: Callable[[str, str], PrepareRequest]) -> None:
    """Each start goes on from where the one before was killed."""
    undisturbed, request = request_of(BYTES, "undisturbed"), request_of(BYTES, "killed")
    num_events = killed_at(0, undisturbed)
    kills = 0
    while not killed_at(20 + 10 * kills, request):
        kills += 1
    assert 3 <= kills < num_events // 10 - 3, (
        "without the parts of earlier starts, it would take all the events of one start"
    )
    assert content(request) == content(undisturbed)


def test_a_replacement_that_was_killed_needs_no_second_force(
    request_of: Callable[[str, str], PrepareRequest], tmp_path: Path
) -> None:
    """From the removal of the old index on, the corpus is neither the old nor the new one."""
    request = request_of(BYTES, "corpus")
    run(request)
    (tmp_path / "a.txt").write_text("another text")
    request.parts.mkdir()
    (request.parts / prepare_module.INSTALLING).write_text("another request")
    with pytest.raises(Exception, match="made from other inputs"):
        run(request)
    files = prepare_module.look_at(request, prepare_module.Findings("stop"))
    digest = prepare_module.request_digest(files, prepare_module.load_tokenizer(BYTES).identity)
    (request.parts / prepare_module.INSTALLING).write_text(digest)
    idx_path(request.output).unlink()
    record_path(request.output).unlink()
    run(request)
    assert IndexedTokens(request.output).num_documents == 42


def test_a_part_is_found_by_equal_bytes_alone(request_of: Callable[[str, str], PrepareRequest], tmp_path: Path) -> None:
    """A damaged part, another tokenizer, option or input: made again. The other parts are taken."""
    request = request_of(BYTES, "corpus")
    kept = tmp_path / "kept"
    make_part = prepare_module.make_part

    def keep(unit: Any, number: int, digest: str, job: EncodeSettings) -> Any:
        part = make_part(unit, number, digest, job)
        kept.mkdir(exist_ok=True)
        for suffix in parts_module.SUFFIXES:
            (kept / f"{digest}{suffix}").write_bytes(part.path.with_suffix(suffix).read_bytes())
        return part

    prepare_module.make_part, total = keep, 0  # type: ignore[assignment]
    try:
        total = run(request).num_bytes
    finally:
        prepare_module.make_part = make_part

    def found(**changes: Any) -> int:
        again = PrepareRequest(
            **{"files": request.files, "tokenizer": BYTES, "output": str(tmp_path / "again"), **changes}
        )
        again.parts.mkdir()
        for path in kept.iterdir():
            (again.parts / path.name).write_bytes(path.read_bytes())
        number = run(again).found_bytes
        for ending in (*ENDINGS, record_path):
            ending(again.output).unlink()
        return number

    assert found() == total
    assert found(append_eod=False) == 0
    assert found(tokenizer=TRAINED) == 0
    assert found(on_bad="skip") == total
    assert 0 < found(files=request.files[1:]) < total
    damaged = sorted(kept.glob("*.tokens"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert 0 < found() < total
