"""Run a worker process of `triaxis prepare`, which encodes text into files of token ids.

unit = pieces of files  -->  documents  -->  batches  -->  document . eod | document . eod | ...   PREFIX.parts/DIGEST
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace, OnBad, Reading, Vocabulary
from triaxis.engine.data.corpus.indexed import LONGEST_SEQUENCE, Tokens
from triaxis.engine.data.corpus.pieces import Document, InputFile, Piece, Unit
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import shown
from triaxis.launch.prepare.parts import PROGRESS, Done, Part, PartWriter, ProgressTable, find_part
from triaxis.launch.prepare.readers import reader_of

BATCH_CHARACTERS = 2**19
"""Characters after which a batch is encoded: enough for the tokenizer library's batching, few compared with a worker's memory."""
BATCH_DOCUMENTS = 1024

# A worker encodes many units with one tokenizer, whose file may take a second to parse.
_loaded = lru_cache(maxsize=1)(load_tokenizer)


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """Settings that are equal for all units of a preparation.

    Attributes:
        tokenizer, eod_token: arguments to `load_tokenizer`.
        dtype: dtype of the token files.
        append_eod: whether each document ends with the end-of-document token.
        on_bad: whether to stop at bad input, or to skip and count it.
        num_units: number of units, which is also the number of rows in the progress table.
    """

    tokenizer: str
    eod_token: str | None
    dtype: str
    append_eod: bool
    on_bad: OnBad
    folder: Path
    """The folder for the parts."""
    num_units: int


def start_worker() -> None:
    """Prepare a new worker process.

    The worker exits when its parent exits, even by a kill, and leaves Ctrl-C to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # There is one worker per core, so the library's own threads would only compete for cores.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def make_part(unit: Unit, number: int, digest: str, job: EncodeSettings) -> Part:
    """Encode a unit of input into token files, unless an earlier run has completed them.

    Args:
        unit: pieces of input files.
        number: index of the unit, and of its row in the progress table.
        digest: name of the token files (`digest_of` in `parts.py`).

    Raises:
        DataError: bad input, if the job stops at it.
        OSError: an input file cannot be read, or a token file cannot be written.
    """
    table = ProgressTable(job.folder / PROGRESS, job.num_units)
    path = job.folder / digest
    found = find_part(path, job.on_bad)
    if found is not None:
        table.write(number, Done(found.num_bytes, found.num_documents, found.num_tokens, found.num_bytes))
        return found
    tokenizer: Tokenizer = _loaded(job.tokenizer, job.eod_token)
    reading = Reading(job.on_bad, Vocabulary(tokenizer.vocab_size, tokenizer.eod_id))
    done_bytes = 0
    with PartWriter(path, job.dtype) as part:
        for piece in unit:
            for batch in _batches(documents(piece, reading)):
                _encode(batch, tokenizer, job, reading, part)
                table.write(number, Done(done_bytes + reading.done_bytes(), part.num_documents, part.num_tokens))
            done_bytes += piece.num_bytes
        table.write(number, Done(done_bytes, part.num_documents, part.num_tokens))
        return part.finish(done_bytes, reading.tally)


def documents(piece: Piece, reading: Reading) -> Iterator[Document]:
    """Yield a piece's documents; none if the file changed after it was cut into pieces.

    A changed file is added to the findings.

    Raises:
        DataError: bad input, if the reading stops at it.
        OSError: the file cannot be read; a missing or forbidden file is added to the findings instead.
    """
    path = piece.file.path
    reading.done_bytes = lambda: 0
    if not is_as_planned(piece.file, reading):
        return
    try:
        yield from reader_of(path, piece.file.options).documents(piece, reading)
    except (FileNotFoundError, PermissionError) as error:
        unusable(path, error, reading)
    reading.done_bytes = lambda: piece.num_bytes


def is_as_planned(file: InputFile, findings: Findings) -> bool:
    """Whether a file is readable and unchanged since it was cut into pieces. If not, it is added to the findings."""
    try:
        now = InputFile.of(file.path, file.options)
    except (FileNotFoundError, PermissionError) as error:
        unusable(file.path, error, findings)
        return False
    if now != file:
        detail = (
            f"changed while the corpus was made: it had {file.size:,} bytes and has {now.size:,}, or its mtime changed"
        )
        advice = "Its pieces would come from different texts. Start again when it is complete."
        findings.add(BadInput.CHANGED_FILE, InputPlace(str(file.path), detail=detail), advice)
    return now == file


def unusable(path: Path, error: FileNotFoundError | PermissionError, findings: Findings) -> None:
    """Add a file that is missing or forbidden to the findings.

    Raises:
        DataError: the findings stop at bad input.
    """
    kind = BadInput.VANISHED_FILE if isinstance(error, FileNotFoundError) else BadInput.UNREADABLE_FILE
    detail = "vanished" if kind is BadInput.VANISHED_FILE else "may not be read by this user"
    advice = "Its documents would be missing. Bring it back, or leave it out."
    findings.add(kind, InputPlace(str(path), detail=detail), advice)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    batch: list[Document], tokenizer: Tokenizer, job: EncodeSettings, findings: Findings, part: PartWriter
) -> None:
    tokens: list[Tokens] = []
    end = np.array([tokenizer.eod_id] if job.append_eod else [], np.int64)
    for document, ids in zip(batch, _ids(batch, tokenizer, findings), strict=True):
        if ids is None:
            continue
        # A document with ready-made tokens may already end with eod.
        has_end = not isinstance(document.content, str) and len(ids) > 0 and ids[-1] == tokenizer.eod_id
        row = np.concatenate([ids, end[: 1 - has_end]])
        if len(ids) == 0:
            place = replace(document.place, detail="the tokenizer leaves nothing of its text")
            findings.add(BadInput.EMPTIED_DOCUMENT, place)
        elif len(row) > LONGEST_SEQUENCE:
            detail = f"the document has {len(row):,} tokens, more than the format counts ({LONGEST_SEQUENCE:,})"
            findings.add(BadInput.TOO_LONG, replace(document.place, detail=detail), "Split the document.")
        else:
            tokens.append(row)
    if tokens:
        part.add(tokens, tokenizer.unknown_id)


def _ids(batch: list[Document], tokenizer: Tokenizer, findings: Findings) -> Iterator[Tokens | None]:
    """Yield each document's token ids [n]. For a bad document, yield None and add it to the findings."""
    texts = [document.content for document in batch if isinstance(document.content, str)]
    try:
        encoded: Iterator[list[int] | None] = iter(tokenizer.encode_batch(texts))
    except BaseException as error:  # a Rust panic is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        encoded = (_alone(document, tokenizer, findings) for document in batch if isinstance(document.content, str))
    for document in batch:
        if isinstance(document.content, str):
            ids = next(encoded)
            yield None if ids is None else np.array(ids, np.int64)
        elif document.content.min() < 0 or document.content.max() >= tokenizer.vocab_size:
            wrong = int(np.argmax((document.content < 0) | (document.content >= tokenizer.vocab_size)))
            found = f"id {int(document.content[wrong]):,} at its place {wrong + 1:,}"
            detail = f"it has {found}, and the tokenizer those from 0 to {tokenizer.vocab_size - 1:,}"
            advice = "They would mean other words. Name with --tokenizer the one that made them."
            findings.add(BadInput.OTHER_IDS, replace(document.place, detail=detail), advice)
            yield None
        else:
            yield document.content


def _alone(document: Document, tokenizer: Tokenizer, findings: Findings) -> list[int] | None:
    """Encode one text of a batch on which the tokenizer's library failed.

    If the library fails on this text alone, return None and add the text to the findings.
    """
    assert isinstance(document.content, str)
    try:
        return tokenizer.encode(document.content)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        detail = f"the tokenizer's library fails on its {len(document.content):,} characters ({shown(str(error))})"
        findings.add(
            BadInput.NOT_ENCODED, replace(document.place, detail=detail), "Shorten or remove what is special about it."
        )
        return None
