"""Prepare a corpus from text files, with the same bytes for any number of processes.

    files --plan--> pieces --units--> worker 0: encode  \\
      a reader per format             worker 1: encode   >--> PREFIX.parts --in the order of the plan--> PREFIX.bin, .idx, .json
                                      worker 2: encode  /

The plan depends only on the files, and the parts are joined in the plan's order. A killed run leaves its complete parts, and the
same command continues from them. PREFIX.json is written last and marks the corpus as complete. It records the inputs and hashes, so
that a second start can see whether anything is left to do.
"""

import multiprocessing
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace, OnBad, Tally, add_up, is_allowed
from triaxis.engine.data.corpus.indexed import IndexedWriter, bin_path, idx_path, smallest_dtype
from triaxis.engine.data.corpus.pieces import AS_NAMED, InputFile, Piece, ReadOptions, Unit
from triaxis.engine.data.corpus.record import CorpusRecord, read_record, record_path, request_digest
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import DataError, counted, shown
from triaxis.engine.storage.files import locked, sha256_of_file, write_atomically
from triaxis.launch.prepare.encode import EncodeSettings, make_part, start_worker, unusable
from triaxis.launch.prepare.other_formats import refused_file
from triaxis.launch.prepare.parts import PROGRESS, SUFFIXES, Done, Part, ProgressTable, digest_of
from triaxis.launch.prepare.readers import reader_of
from triaxis.launch.prepare.train_bpe import size_to_train, train_bpe

UNIT_BYTES = 2**20
"""Fewest input bytes per unit, so that encoding a unit takes much longer than sending it to a worker."""
MOST_UNIT_BYTES = 64 * 2**20
"""Most bytes per unit, for files that can be cut. A killed run loses up to one unit per worker, some seconds of work."""
UNITS = 4096
"""Number of units per corpus, if UNIT_BYTES and MOST_UNIT_BYTES allow it.

These are enough to occupy all cores of any node, and few enough for one folder of parts.
"""
MOST_WORKERS = 1024
"""Most encoding processes, far more than any node has cores."""
UNITS_AHEAD = 3
"""Units per worker that are submitted and not yet finished."""
PROGRESS_SECONDS = 0.2
INSTALLING = "installing"
"""A file in the parts folder with the digest of the request whose corpus is being moved into place."""

Progress = Callable[[Done], None]


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """A preparation's inputs, tokenizer and output.

    Attributes:
        files: input files, in order.
        tokenizer: name for `load_tokenizer`, or `train-bpe:N`.
        output: corpus prefix.
        options: reading options for all files.
        text_keys: field or column with the text, one per file; if empty, `options.text_key` is used for all files.
        eod_token: end-of-document token; None: the tokenizer's own.
        append_eod: whether each document ends with that token.
        on_bad: whether to stop at bad input or to skip and count it.
    """

    files: tuple[Path, ...]
    tokenizer: str
    output: str
    options: ReadOptions = AS_NAMED
    text_keys: tuple[str, ...] = ()
    eod_token: str | None = None
    append_eod: bool = True
    on_bad: OnBad = "stop"

    @property
    def input_bytes(self) -> int:
        """Total size of the existing input files, in bytes."""
        return sum(path.stat().st_size for path in self.files if path.exists())

    @property
    def parts(self) -> Path:
        """Folder for unfinished work: the output prefix with the ending `.parts`."""
        return Path(f"{self.output}.parts")

    @property
    def trained_tokenizer(self) -> Path:
        """Path for the tokenizer that `train-bpe:N` writes."""
        return Path(f"{self.output}.tokenizer.json")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The corpus's record, and whether the corpus was complete before `prepare`."""

    record: CorpusRecord
    already_there: bool


def look_at(request: PrepareRequest, findings: Findings) -> list[InputFile]:
    """Return the usable input files with their size and mtime. Missing and empty files are added to the findings.

    Raises:
        DataError: a file is missing or empty, and `findings` stops at bad input.
    """
    found = []
    keys = request.text_keys or (request.options.text_key,) * len(request.files)
    for path, key in zip(request.files, keys, strict=True):
        try:
            file = InputFile.of(path, replace(request.options, text_key=key))
        except FileNotFoundError as error:
            unusable(path, error, findings)
            continue
        if file.size:
            found.append(file)
        else:
            findings.add(BadInput.EMPTY_FILE, InputPlace(str(path), detail="is empty"), "Repair it, or leave it out.")
    return found


def plan(files: Sequence[InputFile], findings: Findings) -> list[Unit]:
    """Cut files into pieces, and group the pieces into units, each encoded by one worker.

    The result depends on the files alone. A .jsonl may be cut at any byte. A file that is one document is never cut.

    Raises:
        DataError: a file is bad as a whole, and `findings` stops at bad input.
    """
    step = min(max(UNIT_BYTES, sum(file.size for file in files) // UNITS), MOST_UNIT_BYTES)
    units: list[Unit] = []
    pieces: list[Piece] = []
    num_bytes = 0
    for file in files:
        for piece in _pieces(file, step, findings):
            pieces.append(piece)
            num_bytes += piece.num_bytes
            if num_bytes >= step:
                units.append(tuple(pieces))
                pieces, num_bytes = [], 0
    return [*units, tuple(pieces)] if pieces else units


def _pieces(file: InputFile, step: int, findings: Findings) -> Iterator[Piece]:
    try:
        reader = refused_file(file) or reader_of(file.path, file.options)
        yield from reader.pieces(file, step, findings)
    except PermissionError as error:
        unusable(file.path, error, findings)


def prepare(request: PrepareRequest, *, num_workers: int, force: bool = False, progress: Progress) -> Prepared:
    """Write the corpus PREFIX.bin, PREFIX.idx and PREFIX.json, unless it is complete already.

    A second process with the same output waits until the first is done. After an error or a kill, the output is absent or the older
    corpus is still there.

    Args:
        num_workers: number of encoding processes.
        force: whether to prepare a complete corpus again, and to replace one with other inputs or settings.
        progress: function (work finished so far) that is called several times a second.

    Raises:
        DataError: the tokenizer, an input or the output cannot be used, or the output holds another corpus.
    """
    if not 1 <= num_workers <= MOST_WORKERS:
        raise DataError(
            f"--workers {shown(num_workers)}: at most {MOST_WORKERS:,} processes, and at least 1, may encode. Each has its own "
            "tokenizer, and more workers than cores gain nothing."
        )
    identity = _identity(request)
    findings = Findings(request.on_bad)
    folder = Path(request.output).parent
    try:
        files = look_at(request, findings)
        digest = request_digest(files, identity, append_eod=request.append_eod)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{Path(request.output).name}.lock"):
            existing = read_record(request.output)
            if existing and not force and _is_complete(request, existing, digest):
                if request.parts.is_dir():  # left by a run that was killed just before it removed them
                    _remove_parts(request.parts)
                return Prepared(existing, already_there=True)
            may_replace = force or _was_installing(request, digest)
            _refuse_another_corpus(request, existing, digest, may_replace)
            request.parts.mkdir(exist_ok=True)
            try:
                units = plan(files, findings)
                tokenizer = _open_tokenizer(request, units, may_replace)
                record = _write(request, units, tokenizer, findings.tally, digest, num_workers, progress)
            finally:
                _remove_parts(request.parts, keep_whole=True)
    except OSError as error:
        raise DataError(
            f"preparing {request.output} failed: {error.strerror or error} ({error.filename or folder}). There is "
            f"no complete corpus of these inputs. Check that file's permissions and the room on its disk, or choose another "
            f"--output. Finished parts are kept in {request.parts}."
        ) from error
    return Prepared(record, already_there=False)


def _identity(request: PrepareRequest) -> str:
    """Return the text by which the tokenizer enters the request's digest.

    It is the tokenizer's identity, or the training settings of a tokenizer that is yet to be trained.
    """
    if size_to_train(request.tokenizer) is not None:
        return f"{request.tokenizer} {request.eod_token}"
    return load_tokenizer(request.tokenizer, request.eod_token).identity


def _is_complete(request: PrepareRequest, existing: CorpusRecord, digest: str) -> bool:
    return (
        existing.request == digest
        and is_allowed(existing.left_out, request.on_bad)
        and existing.problem(request.output) is None
        and (size_to_train(request.tokenizer) is None or request.trained_tokenizer.is_file())
    )


def _refuse_another_corpus(
    request: PrepareRequest, existing: CorpusRecord | None, digest: str, may_replace: bool
) -> None:
    output = request.output
    there = [path for path in (bin_path(output), idx_path(output)) if path.exists()]
    if may_replace or not there or (existing and existing.request == digest):
        return
    why = "it was made from other inputs, from inputs that have changed since, or with another tokenizer or key"
    raise DataError(
        f"{there[0]} exists, and {why if existing else f'no {record_path(output).name} beside it records what it is'}. "
        f"Runs that read it would change. Choose another --output, or replace it with --force."
    )


def _was_installing(request: PrepareRequest, digest: str) -> bool:
    """Whether a run with the same request was killed while it replaced the output."""
    path = request.parts / INSTALLING
    return path.is_file() and path.read_text() == digest


@dataclass(frozen=True, slots=True)
class OpenTokenizer:
    """A preparation's open tokenizer.

    Attributes:
        name: name or path by which workers open the same tokenizer.
        trained: content of the tokenizer.json that `train-bpe:N` trained; None: the tokenizer existed before.
    """

    tokenizer: Tokenizer
    name: str
    trained: bytes | None = None


def _open_tokenizer(request: PrepareRequest, units: Sequence[Unit], may_replace: bool) -> OpenTokenizer:
    """Open the request's tokenizer.

    `train-bpe:N` is trained first, unless an earlier run has left the tokenizer in the parts folder.

    Raises:
        DataError: another trained tokenizer is at the output, and `may_replace` is off.
    """
    vocab_size = size_to_train(request.tokenizer)
    if vocab_size is None:
        return OpenTokenizer(load_tokenizer(request.tokenizer, request.eod_token), request.tokenizer)
    pieces = tuple(piece for unit in units for piece in unit)
    kept = request.parts / f"{digest_of(pieces, request.tokenizer, request.eod_token)}.json"
    if not kept.is_file():
        write_atomically(kept, [train_bpe(units, vocab_size, request.eod_token, request.on_bad)])
    content, path = kept.read_bytes(), request.trained_tokenizer
    if path.exists() and path.read_bytes() != content and not may_replace:
        raise DataError(
            f"{path} exists and is another tokenizer: models trained with it would read other words. Choose another --output, or "
            f"replace it with --force."
        )
    return OpenTokenizer(load_tokenizer(str(kept), request.eod_token), str(kept), content)


def _write(
    request: PrepareRequest,
    units: Sequence[Unit],
    opened: OpenTokenizer,
    left_out: Tally,
    digest: str,
    num_workers: int,
    progress: Progress,
) -> CorpusRecord:
    """Encode the parts, join them and move the corpus into place.

    The parts' bad input is added to `left_out`, which already has the bad input found in planning. While the file
    INSTALLING exists, the output's files may belong to two corpora. A later start with the same request then replaces them without
    --force.

    Raises:
        DataError: no document has a token.
    """
    tokenizer, dtype = opened.tokenizer, smallest_dtype(opened.tokenizer.vocab_size)
    options = (dtype.str, request.append_eod)
    names = [digest_of(unit, tokenizer.identity, *options) for unit in units]
    job = EncodeSettings(opened.name, request.eod_token, *options, request.on_bad, request.parts, len(units))
    num_documents = num_tokens = num_unknown = 0
    with (
        IndexedWriter(request.output, dtype) as writer,
        closing(_parts_in_order(units, names, job, num_workers, progress)) as parts,
    ):
        for part in parts:
            writer.add_encoded(part.token_blocks(), part.lengths())
            num_documents += part.num_documents
            num_tokens += part.num_tokens
            num_unknown += part.num_unknown
            add_up(left_out, part.left_out)
        if not num_documents:
            _remove_parts(request.parts)
            raise DataError(
                f"the inputs hold no text: {counted(_num_empty(left_out), 'document')}, all without a token. "
                f"Nothing was written."
            )
        write_atomically(request.parts / INSTALLING, [digest.encode()])
        if opened.trained is not None:
            write_atomically(request.trained_tokenizer, [opened.trained])
        record_path(request.output).unlink(missing_ok=True)
    record = CorpusRecord(
        tokenizer=request.tokenizer if opened.trained is None else str(request.trained_tokenizer),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype=dtype.name,
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_unknown_tokens=num_unknown,
        num_skipped_documents=_num_empty(left_out),
        num_input_files=len(request.files),
        input_bytes=sum(piece.num_bytes for unit in units for piece in unit),
        bin_bytes=bin_path(request.output).stat().st_size,
        bin_sha256=writer.bin_sha256,
        idx_sha256=sha256_of_file(idx_path(request.output)),
        request=digest,
        tokenizer_identity=tokenizer.identity,
        append_eod=request.append_eod,
        text_size=tokenizer.text_size,
        left_out={
            kind: {"count": found.count, "places": [str(place.with_line()) for place in found.places]}
            for kind, found in left_out.items()
        },
    )
    write_atomically(record_path(request.output), [record.to_json().encode()])
    _remove_parts(request.parts)
    return record


def _num_empty(left_out: Tally) -> int:
    return sum(
        left_out[kind].count for kind in (BadInput.EMPTY_DOCUMENT, BadInput.EMPTIED_DOCUMENT) if kind in left_out
    )


def _parts_in_order(
    units: Sequence[Unit], names: Sequence[str], job: EncodeSettings, num_workers: int, progress: Progress
) -> Generator[Part, None, None]:
    """Yield the parts in the plan's order, while workers encode later parts.

    Raises:
        DataError: a worker died, or stopped at bad input.
    """
    if not units:
        return
    table = ProgressTable(job.folder / PROGRESS, len(units), create=True)
    others = set(multiprocessing.active_children())
    # spawn: the caller may have threads or torch loaded, and a forked copy of those can hang.
    pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker)
    waiting = iter(enumerate(zip(units, names, strict=True)))
    running: dict[Future[Part], int] = {}
    made: dict[int, Part] = {}
    try:
        for at in range(len(units)):
            while at not in made:
                for number, (unit, name) in islice(waiting, UNITS_AHEAD * num_workers - len(running)):
                    running[pool.submit(make_part, unit, number, name, job)] = number
                ready, _ = wait(running, PROGRESS_SECONDS, FIRST_COMPLETED)
                made |= {running.pop(future): future.result() for future in ready}
                progress(table.total())
            yield made.pop(at)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died. If it printed an error above, it could not start (a script of yours that prepares text "
            "needs `if __name__ == '__main__':`). Otherwise it was probably killed because memory ran out: a text file is one "
            f"document, encoded whole. Use fewer --workers, or split very large files. Finished parts are kept in {job.folder}."
        ) from error
    except BaseException:
        # Parts are complete or absent, so a worker may be killed at any moment.
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _remove_parts(folder: Path, *, keep_whole: bool = False) -> None:
    """Remove all files that preparations write to the parts folder, and the folder if it is then empty.

    With `keep_whole`, files stay that a later start can use: complete parts, and INSTALLING.
    """
    for path in folder.glob("*"):
        is_ours = path.suffix in (*SUFFIXES, ".partial") or path.name in (PROGRESS, INSTALLING)
        is_whole = path.name == INSTALLING or (path.suffix in SUFFIXES and path.with_suffix(".json").exists())
        if is_ours and not (keep_whole and is_whole):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
