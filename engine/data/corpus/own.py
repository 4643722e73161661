"""Opens corpora that an extension provides, with the interface of a `.bin/.idx` pair.

    data:
      train: [{path: "extension:memmap:data/tokens.npy", weight: 0.7}, {path: data/web, weight: 0.3}]

The path names a corpus in `Extension.corpora`, then the argument to open the corpus with. `OwnCorpus` implements everything that
the engine needs from `IndexedTokens`.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.config.schema.extension_parts import OWN_CORPUS, DocumentsPart, Extension
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.errors import DataError

FINGERPRINT_DOCUMENTS = 64


class OwnCorpus:
    """A corpus whose documents come from an extension.

    Args:
        prefix: path in the configuration.
        documents: object that the extension opened.

    Raises:
        DataError: the corpus has no tokens, or `documents.lengths()` is not one integer >= 0 per document.
    """

    def __init__(self, prefix: str, documents: DocumentsPart) -> None:
        self.prefix, self._documents = prefix, documents
        self.num_documents = len(documents)
        lengths = np.asarray(documents.lengths())
        if lengths.shape != (self.num_documents,) or lengths.dtype.kind not in "iu" or (lengths < 0).any():
            raise DataError(
                f"{prefix}: lengths() gives {lengths.dtype} {list(lengths.shape)}; it must give the number of tokens of each of "
                f"its {self.num_documents:,} documents, at least 0, since samples are cut by them."
            )
        self._lengths = lengths.astype(np.int64)
        self.num_tokens = int(self._lengths.sum())
        if not self.num_tokens:
            raise DataError(f"{prefix} has no token: there is nothing to learn from.")

    @property
    def cache_dir(self) -> Path:
        """Folder for cached sample orders: ARGUMENT.cache, or NAME.cache if the path is `extension:NAME` alone."""
        name, _, argument = self.prefix.removeprefix(OWN_CORPUS).partition(":")
        return Path(f"{argument or name}.cache")

    def document_lengths(self, documents: range) -> NDArray[np.int64]:
        """Return document lengths in tokens for a contiguous range, int64 [len(documents)]."""
        return self._lengths[documents.start : documents.stop]

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Read tokens `start` to `stop` - 1 from a document.

        Raises:
            DataError: the document is not a list of integers, or contradicts its length.
        """
        tokens = np.asarray(self._documents[document])
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) != self._lengths[document]:
            raise DataError(
                f"{self.prefix}: document {document:,} is {tokens.dtype} {list(tokens.shape)}; it must be "
                f"{self._lengths[document]:,} whole numbers, as lengths() says: samples would begin at other tokens."
            )
        return tokens[start:stop]

    def last_tokens(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read each document's last token, int64 [len(documents)]. An empty document gives -1."""
        return np.array([self.tokens(int(one))[-1] if self._lengths[one] else -1 for one in documents], np.int64)

    def ids(self, most_tokens: int) -> tuple[int, int]:
        """Find the smallest and largest id in up to FINGERPRINT_DOCUMENTS evenly spaced documents. `most_tokens` is ignored."""
        found = [tokens for tokens in self._spaced() if len(tokens)]
        return min(int(each.min()) for each in found), max(int(each.max()) for each in found)

    @property
    def identity(self) -> tuple[int, int]:
        """(-1, hash of the configured path). A corpus in files has (device, inode), which never begins with -1."""
        return -1, int(hashlib.sha256(self.prefix.encode()).hexdigest()[:15], 16)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 over all document lengths and the tokens of FINGERPRINT_DOCUMENTS documents at most."""
        digest = hashlib.sha256(self._lengths.astype("<i8").tobytes())
        for tokens in self._spaced():
            digest.update(tokens.astype("<i8").tobytes())
        return digest.hexdigest()

    def _spaced(self) -> list[NDArray[Any]]:
        filled = np.flatnonzero(self._lengths)
        places = np.linspace(0, len(filled) - 1, min(len(filled), FINGERPRINT_DOCUMENTS), dtype=np.int64)
        return [self.tokens(int(document)) for document in filled[places]]


Corpus = IndexedTokens | OwnCorpus


def open_corpus(prefix: str, own: Extension, tokenizer: str = "bytes") -> Corpus:
    """Open a corpus that a configuration names.

    Args:
        prefix: path without an ending for a pair of files, or `extension:NAME` with or without `:ARGUMENT`.
        own: extension that the configuration names.
        tokenizer: tokenizer name to suggest in the error for a missing pair.

    Raises:
        DataError: the corpus is missing or damaged.
    """
    if not prefix.startswith(OWN_CORPUS):
        return IndexedTokens(prefix, tokenizer)
    name, _, argument = prefix.removeprefix(OWN_CORPUS).partition(":")
    try:
        return OwnCorpus(prefix, own.corpora[name](argument))
    except OSError as error:
        raise DataError(f"{prefix} cannot be opened: {error}") from error


def refuse_repeated(where: str, corpora: Sequence[Corpus], harm: str) -> None:
    """Refuse a corpus that is named twice, even under different spellings of its path.

    Args:
        where: option or command that names the corpora, for the message.
        corpora: corpora, in order.
        harm: sentences on the consequence and the remedy.

    Raises:
        DataError: two names mean the same corpus.
    """
    names: dict[tuple[int, int], str] = {}
    for corpus in corpora:
        if corpus.identity in names:
            raise DataError(
                f"{where} names one corpus twice, as {names[corpus.identity]} and as {corpus.prefix}: {harm}"
            )
        names[corpus.identity] = corpus.prefix
