"""Tokenizers for the sentencepiece library's .model files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triaxis.engine.data.corpus.end_of_document import end_of_document
from triaxis.engine.data.corpus.optional import need
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.errors import DataError
from triaxis.engine.storage.files import sha256_of_file


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a .model file. No beginning-of-text or end-of-text token is added.

    Args:
        path: path to the .model file.
        eod_token: end-of-document token; None: the model's eos, else the first name in END_OF_DOCUMENT_NAMES that the model has.

    Raises:
        DataError: the package sentencepiece is missing, the file is not such a model, or it has no end-of-document token.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        sentencepiece = need("sentencepiece", f"{path}, a sentencepiece model,")
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{path} is no model of the sentencepiece library ({error}). Llama 3's own tokenizer.model holds tiktoken's "
                f"ranks: give it as {path}:llama3."
            ) from error
        self.vocab_size = self.text_size = int(self._model.vocab_size())
        unknown = int(self._model.unk_id())
        self.unknown_id = unknown if unknown >= 0 else None
        own = self._model.id_to_piece(self._model.eos_id()) if self._model.eos_id() >= 0 else None
        self.eod_id = end_of_document(path, self._id_of, eod_token, own)
        self._content = sha256_of_file(path)
        self.identity = self.identity_with(self.eod_id)

    def _id_of(self, name: str) -> int | None:
        found = int(self._model.piece_to_id(name))
        return found if self._model.id_to_piece(found) == name else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._model.encode(list(texts), num_threads=1)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode([token for token in ids if token < self.vocab_size and token != self.eod_id])
        return text
