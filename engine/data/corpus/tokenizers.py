"""Text to token ids and back: bytes, or a Hugging Face `tokenizers` .json (no torch here).

    load_tokenizer("bytes")            ids 0 .. 255 are the bytes of UTF-8, 256 ends a document; vocab_size 257
    load_tokenizer("tokenizer.json")   ids of the file; one of END_OF_DOCUMENT_NAMES, or a named token, ends a document

Text is data: a document that spells the name of a special token gets the ids of its characters, never that token. So no text can
end its own document.
"""

import hashlib
from pathlib import Path
from typing import Any, Protocol

from engine.errors import DataError
from engine.storage.files import sha256_of_file

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Names of the token, tried in this order where none is given."""


class Tokenizer(Protocol):
    """A tokenizer, as the data room and generation use it."""

    vocab_size: int
    """Largest id + 1."""
    eod_id: int
    """Id that ends a document."""
    identity: str
    """Hexadecimal sha256 of everything that decides the ids; equal where two tokenizers encode alike."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document id."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids; the end-of-document id and ids of the padded vocabulary give none."""
        ...


class BytesTokenizer:
    """One id per byte of UTF-8."""

    def __init__(self) -> None:
        self.eod_id = 256
        self.vocab_size = 257
        self.identity = hashlib.sha256(b"bytes of utf-8, 256 ends a document").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Return the text; bytes that are no UTF-8 (a model may write any) become the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library from its .json file.

    Args:
        path: the file.
        eod_token: the token that ends a document; None: the first of END_OF_DOCUMENT_NAMES that it has.

    Raises:
        DataError: no such file, no tokenizer, or no token that ends a document.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        self._tokenizer: Any = _open(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        names = END_OF_DOCUMENT_NAMES if eod_token is None else (eod_token,)
        found = [name for name in names if name in ids]
        if not found:
            raise DataError(
                f"{path} has no token {' or '.join(names)}: without a token between documents the model would learn that one "
                f"document continues the other. Name the token with --eod-token."
            )
        self.eod_id = ids[found[0]]
        self.vocab_size = _vocab_size(self._tokenizer)
        self.identity = hashlib.sha256(f"{sha256_of_file(path)} {self.eod_id}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        known = [token for token in ids if token < self.vocab_size and token != self.eod_id]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """Check that another model's tokenizer.json is readable and that the model has an embedding for each of its ids.

    Raises:
        DataError: the file is no tokenizer, or has ids of `vocab_size` or above.
    """
    ids = _vocab_size(_open(path))
    if ids > vocab_size:
        raise DataError(
            f"{path} has ids up to {ids - 1:,}, and the model {vocab_size:,} tokens: some words would have no embedding. The "
            "tokenizer is another model's. Put the model's own in its place, or move this one out of the folder."
        )


def _open(path: Path) -> Any:
    """Read a tokenizer of the `tokenizers` library; DataError where there is none."""
    import tokenizers  # 10 MB of native code, only needed for a .json

    if not path.is_file():
        raise DataError(
            f"there is no tokenizer at {path}. Give `bytes`, or the path of a tokenizer.json of the Hugging Face "
            f"`tokenizers` library."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(
            f"{path} is no tokenizer of the Hugging Face `tokenizers` library ({error}). Give its tokenizer.json, not "
            f"vocab.json or tokenizer_config.json."
        ) from error


def _vocab_size(tokenizer: Any) -> int:
    """Return the largest id + 1; 0 where the tokenizer has no token."""
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max(ids.values(), default=-1) + 1


def load_tokenizer(name: str, eod_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` or `--tokenizer` names: `bytes`, or the path of a tokenizers .json.

    Raises:
        DataError: see `JsonTokenizer`; or an end-of-document token for bytes, which have their own.
    """
    if name != "bytes":
        return JsonTokenizer(Path(name), eod_token)
    if eod_token is not None:
        raise DataError(
            f"the bytes tokenizer ends a document with id 256; it has no token {eod_token!r}. Leave --eod-token out."
        )
    return BytesTokenizer()
