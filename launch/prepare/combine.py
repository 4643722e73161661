"""Merge and split corpora by documents, without encoding the text a second time.

merge   A, B, ..  -->  C          writes A's documents, then B's and so on; the bytes are those of preparing all texts together
split   C         -->  A, B, ..   writes contiguous ranges of the documents; merging the parts in order gives C
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter, bin_path, idx_path
from triaxis.engine.data.corpus.own import refuse_repeated
from triaxis.engine.data.corpus.record import CorpusRecord, read_record, record_path
from triaxis.engine.errors import DataError, counted
from triaxis.engine.storage.files import locked, sha256_of_file, write_atomically


def merge(prefixes: Sequence[str], output: str, *, force: bool = False) -> CorpusRecord | None:
    """Write all corpora's documents, in this order, as one corpus.

    Args:
        prefixes: corpus paths without endings. A corpus from Megatron's tools has no record, and its tokenizer is not compared.
        output: prefix for the new corpus.
        force: whether to replace an existing corpus.

    Returns:
        The new corpus's record, or None if one input has none.

    Raises:
        DataError: a corpus is missing, damaged or named twice, or the tokenizers differ.
        DataError: the output exists without `force`, is one of the corpora, or cannot be written.
    """
    corpora = [IndexedTokens(prefix) for prefix in prefixes]
    refuse_repeated("data merge", corpora, "its documents would be in the new corpus twice. Name it once.")
    records = [read_record(prefix) for prefix in prefixes]
    _check_agreement(corpora, records)
    record = None if None in records else _sum([record for record in records if record is not None])
    return _write(output, [(corpus, range(corpus.num_documents)) for corpus in corpora], record, prefixes, force)


def split(
    prefix: str, outputs: Sequence[str], bounds: Sequence[int], *, force: bool = False
) -> list[CorpusRecord | None]:
    """Write contiguous ranges of a corpus's documents as separate corpora.

    Args:
        prefix: corpus path without an ending.
        outputs: prefix for each part.
        bounds: each part's first document, then the number of all documents; rises from 0. [len(outputs) + 1].
        force: whether to replace existing corpora.

    Returns:
        Each part's record, or None if the corpus has none.

    Raises:
        DataError: the corpus is missing or damaged, a part would be empty, or an output is named twice.
        DataError: an output exists without `force`, is the corpus itself, or cannot be written.
    """
    corpus, record = IndexedTokens(prefix), read_record(prefix)
    ranges = [range(start, stop) for start, stop in pairwise(bounds)]
    if len(ranges) != len(outputs) or not all(ranges) or bounds[0] != 0 or bounds[-1] != corpus.num_documents:
        shares = ", ".join(f"{len(part):,}" for part in ranges)
        raise DataError(
            f"{prefix} has {counted(corpus.num_documents, 'document')}, and its parts would get {shares}. Each part needs a "
            f"document, and each document a part. Give one --output per part, and shares that leave a document for each."
        )
    if len({Path(output).resolve() for output in outputs}) < len(outputs):
        raise DataError(f"--output {' '.join(outputs)}: the second part would replace the first. Name each part once.")
    for output in outputs:
        _refuse_to_replace(output, [prefix], force)
    # It is unknown which input text belongs to which part, so the input counts are reset.
    part = (
        None
        if record is None
        else replace(
            record, num_input_files=0, input_bytes=0, num_skipped_documents=0, num_unknown_tokens=0, left_out={}
        )
    )
    return [
        _write(output, [(corpus, chosen)], part, [prefix], force)
        for output, chosen in zip(outputs, ranges, strict=True)
    ]


def bounds_of_shares(num_documents: int, shares: Sequence[float]) -> list[int]:
    """Compute the argument `bounds` of `split` for parts in proportion to `shares`.

    The result has each part's first document, then `num_documents`: [len(shares) + 1].
    """
    return [0, *(round(num_documents * sum(shares[: at + 1]) / sum(shares)) for at in range(len(shares)))]


def _write(
    output: str,
    sources: Sequence[tuple[IndexedTokens, range]],
    record: CorpusRecord | None,
    inputs: Sequence[str],
    force: bool,
) -> CorpusRecord | None:
    """Write documents from several corpora as one corpus.

    If `record` is given, it is written with the new corpus's counts and hashes, and returned.
    """
    folder = Path(output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{Path(output).name}.lock"):
            _refuse_to_replace(output, inputs, force)
            with IndexedWriter(output, sources[0][0].dtype) as writer:
                for corpus, documents in sources:
                    writer.add_encoded(*corpus.encoded(documents))
                record_path(output).unlink(missing_ok=True)
            if record is None:
                return None
            written = IndexedTokens(output)
            idx_sha256 = sha256_of_file(idx_path(output))
            record = replace(
                record,
                num_documents=written.num_documents,
                num_tokens=written.num_tokens,
                bin_bytes=bin_path(output).stat().st_size,
                bin_sha256=writer.bin_sha256,
                idx_sha256=idx_sha256,
                request=hashlib.sha256(f"{writer.bin_sha256} {idx_sha256}".encode()).hexdigest(),
            )
            write_atomically(record_path(output), [record.to_json().encode()])
            return record
    except OSError as error:
        raise DataError(
            f"writing {output} failed: {error.strerror or error} ({error.filename or folder}). There is no complete corpus of "
            f"that name. Check that file's permissions and the room on its disk, or choose another --output."
        ) from error


def _refuse_to_replace(output: str, inputs: Sequence[str], force: bool) -> None:
    target = bin_path(output)
    if target.exists() and any(target.samefile(bin_path(prefix)) for prefix in inputs):
        raise DataError(f"--output {output} is one of the corpora that are read. Choose another name.")
    read_record(output)  # raises if PREFIX.json is some other file
    if not force and any(path.exists() for path in (bin_path(output), idx_path(output))):
        raise DataError(
            f"{output} exists, and runs that read it would change. Choose another --output, or use --force."
        )


def _check_agreement(corpora: Sequence[IndexedTokens], records: Sequence[CorpusRecord | None]) -> None:
    for corpus in corpora[1:]:
        if corpus.dtype != corpora[0].dtype:
            raise DataError(
                f"{corpora[0].prefix} holds {corpora[0].dtype}, but {corpus.prefix} holds {corpus.dtype}: a corpus has one token "
                f"type, which follows from the tokenizer. Prepare both with one tokenizer."
            )
    known = [(corpus.prefix, record) for corpus, record in zip(corpora, records, strict=True) if record is not None]
    for prefix, record in known[1:]:
        first_prefix, first = known[0]
        has_identity = bool(first.tokenizer_identity and record.tokenizer_identity)
        one, other = _tokens_of(first, has_identity), _tokens_of(record, has_identity)
        if one != other:
            raise DataError(
                f"{first_prefix} and {prefix} use different ids for the same text: {one}; {other}. Half of the merged corpus "
                f"would be noise to a model. Prepare both with one tokenizer."
            )


def _tokens_of(record: CorpusRecord, has_identity: bool) -> str:
    """Describe a corpus's tokenizer, vocabulary size and end of documents.

    Equal descriptions mean equal ids for a text.

    Args:
        has_identity: whether to name the tokenizer by its identity hash, which older records lack, or by its recorded name.
    """
    tokenizer = f"sha256 {record.tokenizer_identity[:16]}" if has_identity else record.tokenizer
    ends = f"id {record.eod_id} ends a document" if record.append_eod else "no token ends a document"
    return f"{tokenizer}, {record.vocab_size:,} tokens, {ends}"


def _sum(records: Sequence[CorpusRecord]) -> CorpusRecord:
    """Sum all records' input counts. Other fields are those of the first record."""
    left_out: dict[str, dict[str, object]] = {}
    for record in records:
        for kind, found in record.left_out.items():
            known = left_out.get(kind, {"count": 0, "places": []})
            left_out[kind] = {name: known[name] + found[name] for name in known}
    return replace(
        records[0],
        num_input_files=sum(record.num_input_files for record in records),
        input_bytes=sum(record.input_bytes for record in records),
        num_skipped_documents=sum(record.num_skipped_documents for record in records),
        num_unknown_tokens=sum(record.num_unknown_tokens for record in records),
        left_out=left_out,
    )
