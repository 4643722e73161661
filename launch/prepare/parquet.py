"""Read documents from a parquet file, one row group at a time.

The documents are a column with text or with lists of ids. Text is decoded value by value, so that a value that is not UTF-8 spoils
no other. Page checksums are verified if the file has them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from triaxis.engine.data.corpus.findings import BadInput, Findings, InputPlace, Reading
from triaxis.engine.data.corpus.optional import need
from triaxis.engine.data.corpus.pieces import Document, InputFile, Piece, share, too_long

BATCH_ROWS = 16
"""Rows in memory at once. They are few, because each may be as long as the longest allowed document."""
RULE = "Each row of a parquet file is one document; --text-key names another column."


class Parquet:
    """The reader for parquet files, in which each row is one document."""

    title = "parquet"

    def pieces(self, file: InputFile, step: int, findings: Findings) -> Iterator[Piece]:
        """Yield one piece per row group; none if the file is bad. Each piece has an equal share of the file's bytes.

        Raises:
            DataError: the package pyarrow is not installed.
        """
        arrow = need("pyarrow", f"{file.path}, a .parquet,")
        path, key = str(file.path), file.options.text_key
        try:
            with self._open(file) as parquet:
                schema, count = parquet.schema_arrow, parquet.num_row_groups
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            detail = f"is no whole parquet file ({error})"
            findings.add(BadInput.DAMAGED_FILE, InputPlace(path, detail=detail), "Copy or download it again.")
            return
        try:
            column = _column(arrow, schema, key)
        except KeyError:
            detail = f"has no column {key!r}, but {', '.join(map(repr, schema.names))}"
            findings.add(BadInput.NO_FIELD, InputPlace(path, detail=detail), RULE)
            return
        if schema.names.count(key) > 1:
            detail = f"has {schema.names.count(key)} columns {key!r}"
            findings.add(
                BadInput.NO_FIELD,
                InputPlace(path, detail=detail),
                f"Which of them holds the documents? Rename one. {RULE}",
            )
        elif not _is_text(arrow, column) and not _is_ids(arrow, column):
            detail = f"has the column {key!r}, but of {column}, not of text or of lists of ids"
            findings.add(BadInput.NOT_TEXT, InputPlace(path, detail=detail), RULE)
        else:
            for number in range(count):
                yield Piece(file, number, number + 1, share(file.size, number, count))

    def documents(self, piece: Piece, reading: Reading) -> Iterator[Document]:
        """Yield the column's values in the piece's row group."""
        arrow = need("pyarrow", f"{piece.file.path}, a .parquet,")
        path, key = str(piece.file.path), piece.file.options.text_key
        with self._open(piece.file) as parquet:
            rows = [parquet.metadata.row_group(group).num_rows for group in range(piece.stop)]
            row, last = sum(rows[:-1]), sum(rows)
            first, here = row, max(rows[-1], 1)
            reading.done_bytes = lambda: piece.num_bytes * (row - first) // here
            try:
                for batch in parquet.iter_batches(BATCH_ROWS, [piece.start], [key], use_threads=False):
                    for value in _values(arrow, batch, key):
                        row += 1
                        yield from _document(value, InputPlace(path, f"row {row:,}"), piece.file, reading)
            except (arrow.ArrowException, OSError) as error:
                place = InputPlace(path, f"rows {row + 1:,} to {last:,}", detail=f"they are damaged ({error})")
                reading.add(BadInput.DAMAGED_FILE, place, "Copy or download the file again.")

    def _open(self, file: InputFile) -> Any:
        reader = need("pyarrow.parquet", f"{file.path}, a .parquet,")
        return reader.ParquetFile(file.path, page_checksum_verification=True)


def _document(
    value: bytes | list[int | None] | None, place: InputPlace, file: InputFile, reading: Reading
) -> Iterator[Document]:
    """Yield the document in a row. An empty, null, too long or non-UTF-8 row is added to `reading` as bad input."""
    if value is None or (isinstance(value, list) and None in value):
        what = "it is null" if value is None else f"item {value.index(None) + 1:,} of its list is null"
        reading.add(BadInput.NOT_TEXT, replace(place, detail=what), RULE)
    elif not value:
        reading.add(BadInput.EMPTY_DOCUMENT, replace(place, detail="it is empty"))
    elif isinstance(value, list):
        yield Document(place, np.array(value))
    elif len(value) > file.options.max_document_bytes:
        too_long(file, place, reading)
    else:
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            reading.add(
                BadInput.NOT_UTF8, replace(place, detail=str(error)), "Guessing would train on wrong characters."
            )
        else:
            yield Document(place, text)


def _column(arrow: Any, schema: Any, key: str) -> Any:
    """Look up a column's type by its name or its dotted path into structs. Raises KeyError."""
    if key in schema.names:
        return schema.types[schema.names.index(key)]
    kind = arrow.struct(list(schema))
    for name in key.split("."):
        if not arrow.types.is_struct(kind) or name not in (kind.field(i).name for i in range(kind.num_fields)):
            raise KeyError(key)
        kind = kind.field(name).type
    return kind


def _is_text(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    value = kind.value_type if types.is_dictionary(kind) else kind
    checks = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(check(value) for check in checks)


def _is_ids(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_integer(kind.value_type))


def _values(arrow: Any, batch: Any, key: str) -> list[Any]:
    """Return a column's values, either undecoded bytes of texts or lists of ids."""
    column = batch.column(0)
    if key not in batch.schema.names:
        for name in key.split(".")[1:]:
            column = need("pyarrow.compute", "a nested column").struct_field(column, name)
    if _is_ids(arrow, column.type):
        return list(column.to_pylist())
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return list(column.cast(arrow.large_binary()).to_pylist())
