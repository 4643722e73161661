"""Lists Python's standard-library sources as a text, and computes a text's entropies.

    <stdlib>/**/*.py, sorted, up to `max_bytes`  -->  files ordered by the hashes of their names  -->  prepare

Files are sorted first, so that the same Python gives the same files. The order by hashes then mixes the files, because a split by
documents validates on the last ones.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data.corpus.own import Corpus
from triaxis.engine.errors import DataError

STDLIB_BYTES = 12_000_000
ENTROPY_TOKENS = 20_000_000
LARGEST_PAIR_TABLE = 2**24
NOT_STDLIB = {"site-packages", "dist-packages"}


def stdlib_files(max_bytes: int = STDLIB_BYTES) -> tuple[Path, ...]:
    """List the standard library's source files, at most `max_bytes` together, ordered by a hash.

    Files are taken in name order, until the next one would exceed `max_bytes`. A virtual environment uses its base Python's files.
    Empty files are left out, and so are the few that are not UTF-8.

    Raises:
        DataError: this Python has no sources (a minimal or frozen build), or none fits into `max_bytes`.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in _sources(root))
    chosen: list[str] = []
    num_bytes = 0
    for name in names:
        content = (root / name).read_bytes()
        if num_bytes + len(content) > max_bytes:
            break
        with suppress(UnicodeDecodeError):
            if content.decode():
                chosen.append(name)
                num_bytes += len(content)
    if not chosen:
        raise DataError(
            f"no Python sources of at most {max_bytes:,} bytes in {root}, the standard library of this Python: it may be a "
            f"minimal build without sources. Prepare another text with --input."
        )
    return tuple(root / name for name in sorted(chosen, key=lambda name: hashlib.sha256(name.encode()).digest()))


def _sources(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        # Installed packages lie inside the library folder and may be far larger, so their folders are not entered.
        below[:] = [name for name in below if name not in NOT_STDLIB]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def entropies(
    tokens: Corpus | NDArray[np.integer[Any]], vocab_size: int, max_tokens: int = ENTROPY_TOKENS
) -> dict[str, float]:
    """Compute a corpus's entropies from its token frequencies, in nats per token.

    They are losses to compare with: `uniform`, ln(vocab_size), is an untrained model's loss, where training begins;
    `unigram entropy` is the best loss without any context, and `bigram entropy` the best with one token of context.

    The entropies are H(X) and H(X_t | X_{t-1}) (Shannon 1948), exact for the counted text. For other text they are a little too
    low, more so with a larger vocabulary.

    Args:
        tokens: corpus, or its tokens, integers [n].
        vocab_size: tokenizer vocabulary without padding.
        max_tokens: largest number of tokens to count, from the first on.

    Raises:
        DataError: fewer than two tokens, or one outside the vocabulary.
    """
    ids = (tokens[:max_tokens] if isinstance(tokens, np.ndarray) else _first_tokens(tokens, max_tokens)).astype(
        np.int64
    )
    if len(ids) < 2 or ids.min() < 0 or ids.max() >= vocab_size:
        raise DataError(
            f"entropies need at least two tokens in 0 .. {vocab_size - 1}; there are {len(ids):,}"
            + (f" in {ids.min()} .. {ids.max()}." if len(ids) else ".")
        )
    first = _entropy(np.bincount(ids[:-1]))
    pairs = ids[:-1] * vocab_size + ids[1:]
    # Counting in a table of all pairs is several times as fast as sorting, if the table is not much larger than the text.
    small = vocab_size**2 <= LARGEST_PAIR_TABLE
    both = _entropy(np.bincount(pairs) if small else np.unique(pairs, return_counts=True)[1])
    return {
        "uniform": math.log(vocab_size),
        "unigram entropy": _entropy(np.bincount(ids)),
        "bigram entropy": both - first,
    }


def _first_tokens(corpus: Corpus, max_tokens: int) -> NDArray[np.integer[Any]]:
    parts: list[NDArray[np.integer[Any]]] = []
    missing = max_tokens
    for document in range(corpus.num_documents):
        parts.append(corpus.tokens(document, 0, missing))
        missing -= len(parts[-1])
        if missing == 0:
            break
    return np.concatenate(parts)


def _entropy(counts: NDArray[np.int64]) -> float:
    """Compute the entropy in nats from token counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
