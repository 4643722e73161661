"""Read files in which other software has stored tokens.

    .npy   numpy's format, integers [n] or [documents, n]
    .bin   from llm.c: 256 int32 (magic, version, n), then n tokens
    .bin   from nanoGPT, and .npy from OLMo: tokens alone, uint16 if the vocabulary fits, else uint32

Each row in a 2-dim array is a document. In a 1-dim array, a document ends after each end-of-document token.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace, Reading
from triaxis.engine.data.corpus.indexed import Tokens, idx_path
from triaxis.engine.data.corpus.pieces import Document, InputFile, Piece
from triaxis.engine.errors import counted

NUMPY = b"\x93NUMPY"
LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""llm.c magic number -> version and token type (llmc/dataloader.h, train_llama3.cu)."""
LLM_C_HEADER = 256
BLOCK_TOKENS = 2**22
LEAST_TO_SEE = 16
"""Fewest tokens for which zeros at every second place show that the file has wider tokens than assumed."""
RULE = "Tokens are integers: numpy's .npy, or a .bin of nanoGPT or llm.c."


class TokenFile:
    """The reader for files of ready-made tokens, which are not encoded again."""

    title = "tokens"

    def pieces(self, file: InputFile, step: int, findings: Findings) -> Iterator[Piece]:
        """Yield the file as one piece. A .bin that has an .idx beside it is a prepared corpus and is refused."""
        if file.path.suffix == ".bin" and idx_path(file.path.with_suffix("")).is_file():
            detail = "is half of a corpus, a pair of .bin and .idx"
            advice = (
                "It is prepared: give its path without the ending to data.train. `triaxis data merge` joins corpora."
            )
            findings.add(BadInput.OTHER_FORMAT, InputPlace(str(file.path), detail=detail), advice)
        else:
            yield Piece(file, 0, file.size, file.size)

    def documents(self, piece: Piece, reading: Reading) -> Iterator[Document]:
        """Yield an array's rows, or the tokens up to and including each end-of-document token."""
        place = InputPlace(str(piece.file.path))
        vocabulary = reading.vocabulary
        try:
            tokens = _open(piece.file.path, vocabulary.size)
        except (ValueError, EOFError) as error:
            detail = f"holds no tokens ({error})"
            reading.add(BadInput.DAMAGED_FILE, InputPlace(place.path, detail=detail), RULE)
            return
        done = 0
        reading.done_bytes = lambda: piece.num_bytes * done // max(tokens.size, 1)
        rows = tokens if tokens.ndim == 2 else _cut_after(tokens, vocabulary.eod_id)
        for number, row in enumerate(rows, start=1):
            yield Document(InputPlace(place.path, f"document {number:,}"), row)
            done += len(row)


def _open(path: Path, vocab_size: int) -> Tokens:
    """Memory-map a file's tokens, integers [n] or [documents, n].

    Raises:
        ValueError: the file holds no integers, its header is wrong, or its tokens are wider than `vocab_size` needs.
    """
    with path.open("rb") as handle:
        head = handle.read(4 * LLM_C_HEADER)
    if head.startswith(NUMPY):
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2) or not tokens.size:
            raise ValueError(f"it has {tokens.dtype} {list(tokens.shape)}")
        return tokens
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic in LLM_C and len(head) == 4 * LLM_C_HEADER:
        known, width = LLM_C[magic]
        if version != known:
            raise ValueError(f"its llm.c header has version {version}, but only {known} is known for {magic}")
        tokens = np.memmap(path, width, "r", offset=len(head))
        if len(tokens) != count:
            raise ValueError(f"its llm.c header announces {counted(count, 'token')}, but {len(tokens):,} follow")
        return tokens
    tokens = np.memmap(path, dtype, "r")
    first = tokens[:BLOCK_TOKENS]
    if len(first) >= LEAST_TO_SEE and first.any() and not first[1::2].any():
        wide = f"<u{2 * dtype.itemsize}" if len(first) % 4 or first[2::4].any() else f"<u{4 * dtype.itemsize}"
        raise ValueError(
            f"read as {dtype}, every second token is 0, so a token has {np.dtype(wide).itemsize} bytes. Convert it to .npy:  "
            f'python3 -c "import numpy as n; n.save({str(path) + ".npy"!r}, n.fromfile({str(path)!r}, {wide!r}))"'
        )
    return tokens


def _cut_after(tokens: Tokens, eod_id: int) -> Iterator[Tokens]:
    """Yield the documents in a 1-dim array, each including its end-of-document token. The last may lack it."""
    begin = 0
    for start in range(0, len(tokens), BLOCK_TOKENS):
        for end in (np.flatnonzero(tokens[start : start + BLOCK_TOKENS] == eod_id) + start + 1).tolist():
            yield tokens[begin:end]
            begin = end
    if begin < len(tokens):
        yield tokens[begin:]
