"""The preparation of a corpus from text files, by processes whose number does not change a byte (no torch here).

    files --plan--> pieces of about 1 MB --units--> worker 0: encode  \\
      .txt (any name): one document             worker 1: encode   >--in the order of the plan--> PREFIX.bin, .idx, .json
      .jsonl: a document per line               worker 2: encode  /

The plan depends only on the files, and results are written in its order: 1 and 32 workers give the same corpus. Everything that can
be refused is refused before the first token. PREFIX.json, written last, marks the corpus as complete, records its inputs and
hashes, and decides whether a second start has anything to do.
"""

import glob
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from engine.data.corpus.encode import EncodedUnit, Piece, Unit, encode_unit, start_worker
from engine.data.corpus.indexed import IndexedWriter, bin_path, idx_path, smallest_dtype
from engine.data.corpus.record import CorpusRecord, read_record, record_path, request_digest
from engine.data.corpus.tokenizers import load_tokenizer
from engine.errors import DataError, shown
from engine.storage.files import locked, sha256_of_file, write_atomically

UNIT_BYTES = 2**20
"""Input bytes per unit of work: large against the cost of passing it on, small against a worker's memory."""
MOST_WORKERS = 1024
"""Most processes that encode, far above the cores of any node."""

UNITS_AHEAD = 3
"""Units per worker that are encoded ahead of writing."""
NAMES_SHOWN = 5

Progress = Callable[[int, int], None]
"""Called as progress(bytes of input done, documents written)."""


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Inputs, tokenizer and output of a preparation."""

    files: tuple[Path, ...]
    tokenizer: str
    output: str
    """Prefix of the corpus."""
    json_key: str = "text"
    """Field of a .jsonl line that holds the document."""
    eod_token: str | None = None

    @property
    def input_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The corpus, and whether it was complete already."""

    record: CorpusRecord
    already_there: bool


def find_inputs(patterns: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of some paths or globs: in the order of the patterns, sorted within one, each file once.

    Raises:
        DataError: a pattern names no file or a folder, or files are empty or unreadable (all are named).
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        # Path.glob accepts no absolute patterns.
        names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        matches = [Path(name) for name in names] or [Path(pattern)]
        files = [path for path in matches if path.is_file()]
        if not files:
            what = "is a folder" if Path(pattern).is_dir() else "names no file"
            raise DataError(
                f"--input {pattern!r} {what}. Give files or a pattern in quotes, for example '{pattern.rstrip('/*') or '.'}/*.txt' "
                f"or '**/*.txt' for all folders below."
            )
        found |= dict.fromkeys(files)
    for what, wrong in (
        ("empty", [path for path in found if path.stat().st_size == 0]),
        ("not readable by this user", [path for path in found if not os.access(path, os.R_OK)]),
    ):
        if wrong:
            more = f" and {len(wrong) - NAMES_SHOWN:,} more" if len(wrong) > NAMES_SHOWN else ""
            raise DataError(
                f"{len(wrong):,} of {len(found):,} input files {'is' if len(wrong) == 1 else 'are'} {what}: "
                f"{', '.join(map(str, wrong[:NAMES_SHOWN]))}{more}. A document without text would be an end-of-document "
                f"token alone, and the loss of a silently skipped file would go unnoticed. Leave them out or repair them."
            )
    return tuple(found)


def plan(files: Sequence[Path]) -> list[Unit]:
    """Return units of about UNIT_BYTES, a function of the files alone. Text files are never cut; a .jsonl is, at any byte."""
    units: list[Unit] = []
    pieces: list[Piece] = []
    num_bytes = 0
    for path in files:
        size = path.stat().st_size
        lines = path.suffix == ".jsonl"
        step = UNIT_BYTES if lines else size
        for start in range(0, size, step):
            pieces.append(Piece(path, lines, start, min(start + step, size)))
            num_bytes += pieces[-1].num_bytes
            if num_bytes >= UNIT_BYTES:
                units.append(tuple(pieces))
                pieces, num_bytes = [], 0
    return [*units, tuple(pieces)] if pieces else units


def prepare(request: PrepareRequest, *, num_workers: int, force: bool = False, progress: Progress) -> Prepared:
    """Write the corpus PREFIX.bin, PREFIX.idx and PREFIX.json, or find it complete.

    A second process with the same output waits for the first. After an error or a kill there is no corpus, or the older one.

    Args:
        request: inputs, tokenizer and output.
        num_workers: processes that encode.
        force: replace a corpus of other inputs.
        progress: called after every unit.

    Raises:
        DataError: the tokenizer, an input or the output cannot be used, or the output holds another corpus.
    """
    if num_workers < 1:
        raise DataError(f"--workers {num_workers}: at least one process must encode.")
    if num_workers > MOST_WORKERS:
        raise DataError(
            f"--workers {shown(num_workers)}: at most {MOST_WORKERS:,}; each is a process with a tokenizer of its own, and more "
            "than there are cores gain nothing."
        )
    tokenizer = load_tokenizer(request.tokenizer, request.eod_token)
    digest = request_digest(request.files, tokenizer.identity, request.json_key)
    folder = Path(request.output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{Path(request.output).name}.lock"):
            existing = read_record(request.output)
            if existing and existing.request == digest and not force and existing.problem(request.output) is None:
                return Prepared(existing, already_there=True)
            _refuse_another_corpus(request.output, existing, digest, force)
            record = _write(request, digest, num_workers, progress)
    except OSError as error:
        raise DataError(
            f"preparing {request.output} failed: {error.strerror or error} ({error.filename or folder}). There is "
            f"no complete corpus of these inputs. Check that file's permissions and the room on its disk, or choose another "
            f"--output."
        ) from error
    return Prepared(record, already_there=False)


def _refuse_another_corpus(output: str, existing: CorpusRecord | None, digest: str, force: bool) -> None:
    there = [path for path in (bin_path(output), idx_path(output)) if path.exists()]
    if force or not there or (existing and existing.request == digest):
        return
    why = "it was made of other inputs, or of inputs that have changed since, or with another tokenizer or key"
    raise DataError(
        f"{there[0]} exists, and {why if existing else f'there is no {record_path(output).name} beside it that says what it is'}. "
        f"Runs that read it would change. Choose another --output, or replace it with --force."
    )


def _write(request: PrepareRequest, digest: str, num_workers: int, progress: Progress) -> CorpusRecord:
    tokenizer = load_tokenizer(request.tokenizer, request.eod_token)
    dtype = smallest_dtype(tokenizer.vocab_size)
    num_documents = num_tokens = num_skipped = done_bytes = 0
    with IndexedWriter(request.output, dtype) as writer:
        for unit in _encode_all(request, dtype.str, num_workers):
            writer.add_encoded(unit.data, unit.lengths)
            num_documents += len(unit.lengths)
            num_tokens += sum(unit.lengths)
            num_skipped += unit.num_skipped
            done_bytes += unit.num_bytes
            progress(done_bytes, num_documents)
        if not num_documents:
            raise DataError(
                f"the inputs hold no text at all: {num_skipped:,} documents, all of them empty. Nothing was written."
            )
        record_path(request.output).unlink(missing_ok=True)
    record = CorpusRecord(
        tokenizer=request.tokenizer,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype=dtype.name,
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_skipped_documents=num_skipped,
        num_input_files=len(request.files),
        input_bytes=request.input_bytes,
        bin_bytes=bin_path(request.output).stat().st_size,
        bin_sha256=writer.bin_sha256,
        idx_sha256=sha256_of_file(idx_path(request.output)),
        request=digest,
    )
    write_atomically(record_path(request.output), [record.to_json().encode()])
    return record


def _encode_all(request: PrepareRequest, dtype: str, num_workers: int) -> Iterator[EncodedUnit]:
    """Yield the encoded units in the order of the plan, a bounded number of them encoded ahead."""
    units = iter(plan(request.files))
    # spawn: the caller may have threads or torch loaded, and a fork of that can hang.
    pool = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=start_worker)
    try:
        ahead: deque[Future[EncodedUnit]] = deque()

        def submit(count: int) -> None:
            for unit in islice(units, count):
                ahead.append(
                    pool.submit(encode_unit, unit, request.tokenizer, request.eod_token, request.json_key, dtype)
                )

        submit(UNITS_AHEAD * num_workers)
        while ahead:
            yield ahead.popleft().result()
            submit(1)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died. If it printed an error above, it could not start (a script of yours that prepares text "
            "needs `if __name__ == '__main__':`). Else it was most likely killed for want of memory, since a text file is one "
            "document and is encoded whole: use fewer --workers, or cut very large files. Nothing was written."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
