"""What every tokenizer has: text to ids and back, vocabulary sizes, special ids, and a hash that identifies it."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path


class Tokenizer(ABC):
    """A conversion of texts to ids and back."""

    vocab_size: int
    """Largest id + 1."""
    text_size: int
    """1 + the largest id in encoded text or at a document's end: the number of embeddings a model needs.

    Ids of other special tokens may be larger.
    """
    eod_id: int
    """End-of-document id."""
    unknown_id: int | None = None
    """Id for text that the tokenizer does not know; None if it can encode every text."""
    identity: str
    """Hexadecimal sha256 over everything that decides the ids; tokenizers with equal identities give equal ids."""
    json_file: Path | None = None
    """Path to the tokenizer.json, which other libraries read; None if the tokenizer has another form."""

    _content: str
    """What decides the ids, beside the end-of-document id."""

    def identity_with(self, eod_id: int) -> str:
        """Compute the hash that would identify this tokenizer with another end-of-document id."""
        return hashlib.sha256(f"{self._content} {eod_id}".encode()).hexdigest()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Convert a text to ids, without any special token."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Convert several texts to ids, one list per text, without any special token."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Convert ids to text, without special ids, the end-of-document id, and ids in the vocabulary's padding."""
