"""Text of a parquet file: a column of strings, read a row group at a time (no torch here).

Row groups are the only places at which a parquet file can be entered. Values are taken as bytes and decoded one by one, so that
one bad value does not hide the others of its batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from triaxis.engine.data.corpus.findings import Findings, Kind, Place, Reading
from triaxis.engine.data.corpus.optional import need
from triaxis.engine.data.corpus.pieces import InputFile, Piece, share

BATCH_ROWS = 1024
RULE = "Each row of a parquet file is one document; --text-key names another column."


class Parquet:
    """The reader of parquet files."""

    def pieces(self, file: InputFile, text_key: str, step: int, findings: Findings) -> Iterator[Piece]:
        """Yield a piece per row group, of equal shares of the file's bytes.

        Raises:
            DataError: the package pyarrow is not installed.
        """
        arrow = need("pyarrow", f"{file.path}, a .parquet,")
        path = str(file.path)
        try:
            with self._open(file) as parquet:
                schema, count = parquet.schema_arrow, parquet.num_row_groups
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            detail = f"is no whole parquet file ({error})"
            findings.add(Kind.DAMAGED_FILE, Place(path, detail=detail), "Copy or download it again.")
            return
        if text_key not in schema.names:
            detail = f"has no column {text_key!r}, but {', '.join(map(repr, schema.names))}"
            findings.add(Kind.NO_FIELD, Place(path, detail=detail), RULE)
        elif schema.names.count(text_key) > 1:
            detail = f"has {schema.names.count(text_key)} columns {text_key!r}"
            findings.add(
                Kind.NO_FIELD, Place(path, detail=detail), f"Which of them holds the documents? Rename one. {RULE}"
            )
        elif not _is_text(arrow, schema.field(text_key).type):
            detail = f"has the column {text_key!r}, but of {schema.field(text_key).type}, not of text"
            findings.add(Kind.NOT_TEXT, Place(path, detail=detail), RULE)
        else:
            for number in range(count):
                yield Piece(file, number, number + 1, share(file.size, number, count))

    def documents(self, piece: Piece, text_key: str, reading: Reading) -> Iterator[str]:
        """Yield the values of the column in the piece's row group."""
        arrow = need("pyarrow", f"{piece.file.path}, a .parquet,")
        path = str(piece.file.path)
        with self._open(piece.file) as parquet:
            rows = [parquet.metadata.row_group(group).num_rows for group in range(piece.stop)]
            row, last = sum(rows[:-1]), sum(rows)
            first, here = row, max(rows[-1], 1)
            reading.done_bytes = lambda: piece.num_bytes * (row - first) // here
            try:
                for batch in parquet.iter_batches(BATCH_ROWS, [piece.start], [text_key], use_threads=False):
                    for value in _as_bytes(arrow, batch.column(0)):
                        row += 1
                        yield from _document(value, Place(path, f"row {row:,}"), reading)
            except (arrow.ArrowException, OSError) as error:
                place = Place(path, f"rows {row + 1:,} to {last:,}", detail=f"they are damaged ({error})")
                reading.add(Kind.DAMAGED_FILE, place, "Copy or download the file again.")

    def _open(self, file: InputFile) -> Any:
        return need("pyarrow.parquet", f"{file.path}, a .parquet,").ParquetFile(file.path)


def _document(value: bytes | None, place: Place, reading: Reading) -> Iterator[str]:
    """Yield the document of a row, or add the row to the findings."""
    if value is None:
        reading.add(Kind.NOT_TEXT, replace(place, detail="it is null, not text"), RULE)
        return
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        reading.add(Kind.NOT_UTF8, replace(place, detail=str(error)), "Guessing would train on wrong characters.")
    else:
        if text:
            yield text
        else:
            reading.add(Kind.EMPTY_DOCUMENT, replace(place, detail="it is empty"))


def _is_text(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    value = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(value) or types.is_large_string(value) or types.is_string_view(value))


def _as_bytes(arrow: Any, column: Any) -> list[bytes | None]:
    """Return the values of a column of text without checking that they are UTF-8."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[bytes | None] = column.cast(arrow.large_binary()).to_pylist()
    return values
