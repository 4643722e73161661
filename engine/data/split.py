"""Splits a corpus by documents into train, valid and test.

    documents   0 ............................. 97 | 98 99 |        split 98, 2, 0 of 100 documents
                             train                  valid   test: none

The parts are contiguous ranges in file order, with bounds rounded to the nearest document as in Megatron. So the same `data.split`
always holds back the same documents of a file.
"""

from collections.abc import Sequence

from triaxis.engine.errors import DataError

PARTS = ("train", "valid", "test")


def split_documents(num_documents: int, split: Sequence[float], corpus: str) -> dict[str, range]:
    """Compute the document ranges of train, valid and test, keyed by these names.

    Args:
        num_documents: documents in the corpus.
        split: three weights, relative to their sum; a part with weight 0 is an empty range.
        corpus: corpus name, for error messages.

    Raises:
        DataError: a part with a positive weight would get no document.
    """
    assert len(split) == len(PARTS) and min(split) >= 0 and split[0] > 0, split
    bounds = [0]
    for part in range(len(PARTS)):
        bounds.append(round(num_documents * sum(split[: part + 1]) / sum(split)))
    parts = {name: range(bounds[at], bounds[at + 1]) for at, name in enumerate(PARTS)}
    empty = [name for name, weight in zip(PARTS, split, strict=True) if weight > 0 and not parts[name]]
    if empty:
        shares = ", ".join(f"{name} {len(parts[name])}" for name in PARTS)
        raise DataError(
            f"{corpus} has {num_documents:,} documents, and data.split = {list(split)} gives {shares}: {' and '.join(empty)} would "
            f"be empty, since a document is never cut. Raise that weight, set it to 0, give data.valid a corpus of its own, "
            f"or prepare the text as more documents (one per file, or one per line of a .jsonl)."
        )
    return parts
