"""Text to token ids and back: one record of KINDS per kind of tokenizer.

    load_tokenizer("bytes")                 ids 0 .. 255 are the bytes of UTF-8, 256 ends a document; vocab_size 257
    load_tokenizer("tokenizer.json")        a file of Hugging Face's `tokenizers` library
    load_tokenizer("some/folder")           a folder of transformers: its tokenizer.json, and the special tokens of its config
    load_tokenizer("tokenizer.model")       a model of sentencepiece; so is a folder with that file and no tokenizer.json
    load_tokenizer("gpt2.tiktoken")         ranks of tiktoken; .tiktoken:PATTERN names how a text is cut

Text is data: a document that spells the name of a special token gets the ids of its characters, never that token. So no text can
end its own document. No special token is added either, such as a beginning of text that a library would put before each document.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from triaxis.engine.data.corpus.end_of_document import end_of_document
from triaxis.engine.data.corpus.sentencepiece_model import SentencePieceTokenizer
from triaxis.engine.data.corpus.tiktoken_ranks import ENDING, TiktokenTokenizer
from triaxis.engine.errors import DataError, brief, shown
from triaxis.engine.storage.elsewhere import how_to_bring, how_to_get, why_no_path
from triaxis.engine.storage.files import sha256_of_file
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.state_files import kind_of

BYTES = "bytes"
TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
_TOKEN_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
_AGAIN = "Which tokens the tokenizer has would be a guess. Copy the file from the model's folder again."


class Tokenizer(Protocol):
    """A tokenizer, as the data room and generation use it."""

    vocab_size: int
    """Largest id + 1."""
    text_size: int
    """Largest id of a text or of a document's end, + 1: the embeddings that a model needs. Special tokens may lie beyond it."""
    eod_id: int
    """Id that ends a document."""
    unknown_id: int | None
    """Id that stands for whatever the tokenizer does not know; None where it knows every text."""
    identity: str
    """Hexadecimal sha256 of everything that decides the ids; equal where two tokenizers encode alike."""
    json_file: Path | None
    """Its tokenizer.json, which other libraries read; None where it has none."""

    def identity_with(self, eod_id: int) -> str:
        """Return the identity of this tokenizer where another one of its tokens ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any special token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode` gives them."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids; the end-of-document id and ids of the padded vocabulary give none."""
        ...


class BytesTokenizer:
    """One id per byte of UTF-8."""

    json_file: Path | None = None
    unknown_id: int | None = None

    def __init__(self) -> None:
        self.eod_id = 256
        self.vocab_size = self.text_size = 257
        self.identity = hashlib.sha256(b"bytes of utf-8, 256 ends a document").hexdigest()

    def identity_with(self, eod_id: int) -> str:
        """Return the identity: no other id ends a document."""
        return self.identity

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text; bytes that are no UTF-8 (a model may write any) become the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library.

    Args:
        path: its .json file, or a folder of transformers with a tokenizer.json.
        eod_token: the token that ends a document; None: the folder's eos_token, else the first of END_OF_DOCUMENT_NAMES.

    Raises:
        DataError: no such file, no tokenizer, or no token that ends a document.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        folder = path if path.is_dir() else None
        self.json_file: Path | None = path / TOKENIZER_JSON if folder else path
        self._tokenizer: Any = _open(self.json_file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            # It is for the training of models on varied ids; a corpus has one form.
            self._tokenizer.model.dropout = None
        own, added = _of_folder(folder, self._tokenizer) if folder else (None, [])
        self._tokenizer.encode_special_tokens = True
        self.eod_id = end_of_document(path, self._tokenizer.token_to_id, eod_token, own)
        self.vocab_size = _vocab_size(self._tokenizer)
        self.unknown_id = _unknown_id(self._tokenizer)
        self.text_size = max(_text_size(self._tokenizer), self.eod_id + 1)
        self._sha256, self._added = sha256_of_file(self.json_file), [json.dumps(added)] if added else []
        self.identity = self.identity_with(self.eod_id)

    def identity_with(self, eod_id: int) -> str:
        """Return the identity with another end of documents."""
        return hashlib.sha256(" ".join([self._sha256, str(eod_id), *self._added]).encode()).hexdigest()

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, a special one too; None where there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def tokens_of_no_text(self) -> list[str]:
        """Return the tokens that the library itself would add to a text."""
        tokens: list[str] = self._tokenizer.encode("").tokens
        return tokens

    def token_of(self, token_id: int) -> str:
        """Return the name of a token."""
        name: str = self._tokenizer.id_to_token(token_id)
        return name

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # "fast" leaves out the places of tokens in the text, not any id.
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        known = [token for token in ids if token < self.vocab_size and token != self.eod_id]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text


def _of_folder(folder: Path, tokenizer: Any) -> tuple[str | None, list[str]]:
    """Add the tokens of a folder's tokenizer_config.json that its tokenizer.json lacks; return its eos_token and their names.

    transformers does the same when it opens the folder (`added_tokens_decoder` in PreTrainedTokenizerFast).
    """
    added = []
    for number, token in _added_tokens(folder / CONFIG):
        name = token["content"]
        if tokenizer.token_to_id(name) is None:
            _add_token(tokenizer, token)
            added.append(name)
        if (found := tokenizer.token_to_id(name)) != number:
            raise DataError(
                f"{folder}: {CONFIG} gives {name!r} the id {number}, and {TOKENIZER_JSON} {found}: the two are of "
                f"different models. Copy both from one place."
            )
    return special_token(folder, "eos_token"), added


def special_token(folder: Path, role: str) -> str | None:
    """Return the token that a folder of transformers names for a role, such as `eos_token`; None where it names none.

    Raises:
        DataError: its tokenizer_config.json or special_tokens_map.json is no JSON, or names something else than a token.
    """
    for path in (folder / CONFIG, folder / SPECIAL_TOKENS):
        if token := _json_of(path).get(role):
            name = token.get("content") if isinstance(token, dict) else token
            if not isinstance(name, str):
                raise DataError(f"{path}: {role} = {shown(token)} is no token: it must be a text. {_AGAIN}")
            return name
    return None


def _added_tokens(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the tokens that a tokenizer_config.json lists with their ids, in the order of these.

    Raises:
        DataError: the file is no JSON, or its list has another form than transformers writes.
    """
    listed = _json_of(path).get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise DataError(f"{path}: added_tokens_decoder = {shown(listed)} must have tokens by their ids. {_AGAIN}")
    for number, token in listed.items():
        is_id = number.isdecimal() and len(number) < 10
        if not (is_id and isinstance(token, dict) and isinstance(token.get("content"), str)):
            raise DataError(
                f"{path}: added_tokens_decoder has {shown(number)}: {shown(token)}, where an id and a token with its `content` "
                f"belong. {_AGAIN}"
            )
        if wrong := [name for name in _TOKEN_FLAGS if not isinstance(token.get(name, False), bool)]:
            raise DataError(f"{path}: {wrong[0]} of token {number} must be true or false. {_AGAIN}")
    return sorted((int(number), token) for number, token in listed.items())


def _add_token(tokenizer: Any, token: dict[str, Any]) -> None:
    import tokenizers

    flags = {name: token[name] for name in _TOKEN_FLAGS if name in token}
    tokenizer.add_tokens([tokenizers.AddedToken(token["content"], **flags)])


def _json_of(path: Path) -> dict[str, Any]:
    """Read a file of a tokenizer's folder; empty where there is none."""
    if not os.path.lexists(path):
        return {}
    try:
        content: dict[str, Any] = parse_json(path.read_bytes(), is_unique=True)
        if not isinstance(content, dict):
            raise ValueError("it is no mapping of keys to values")
        return content
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a JSON object ({error}), so the tokens that it names are unknown. Copy it again."
        ) from error


def check_tokenizer(path: Path, vocab_size: int) -> str | None:
    """Check that another model's tokenizer.json is readable and that the model has an embedding for each id that text can have.

    Returns:
        A note about special tokens without an embedding, such as Gemma 3 1B's for images; None where there are none.

    Raises:
        DataError: the file is no tokenizer, or a text may have ids of `vocab_size` or above.
    """
    tokenizer = _open(path)
    ids, beyond = _text_size(tokenizer), range(vocab_size, _vocab_size(tokenizer))
    if ids > vocab_size:
        raise DataError(
            f"{path} has ids up to {ids - 1:,}, and the model {vocab_size:,} tokens: some words would have no embedding. The "
            "tokenizer is another model's. Put the model's own in its place, or move this one out of the folder."
        )
    names = [tokenizer.id_to_token(each) for each in beyond]
    few = f"{', '.join(names[:3])}{', ..' if len(names) > 3 else ''}"
    return f"the model has no embedding for {few}: no text is encoded to these special tokens" if names else None


def _open(path: Path) -> Any:
    """Read a tokenizer of the `tokenizers` library; DataError where there is none."""
    import tokenizers  # 10 MB of native code, only needed for a .json

    if not path.is_file():
        obstacle = f": it is {kind_of(path.stat().st_mode)}, not a file" if path.exists() else ""
        raise DataError(
            f"there is no tokenizer at {path}{obstacle}. Give {', '.join(kind.shown for kind in KINDS)}; `triaxis prepare` also "
            "trains one: train-bpe:32000. A folder of transformers without tokenizer.json gets one from "
            "AutoTokenizer(..).save_pretrained." + how_to_bring(path)
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


def _unknown_id(tokenizer: Any) -> int | None:
    """Return the id of text that the tokenizer does not know; None where its model has none."""
    model = parse_json(tokenizer.to_str())["model"]
    if isinstance(found := model.get("unk_id"), int):
        return found
    token: int | None = tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    return token


def _text_size(tokenizer: Any) -> int:
    """Return the largest id + 1 that a text can have: it is never encoded to an added special token."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    never = special - tokenizer.get_vocab(with_added_tokens=False).keys()
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max((each for name, each in ids.items() if name not in never), default=-1) + 1


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """A kind of tokenizer."""

    shown: str
    """How it is given, for messages."""
    fits: Callable[[Path, str | None], bool]
    """Returns true for a path, and the pattern after its colon, that is of this kind."""
    open: Callable[[Path, str | None, str | None], Tokenizer]
    """Opens it: path, pattern, end-of-document token."""


KINDS = (
    TokenizerKind(
        "`bytes`",
        lambda path, pattern: str(path) == BYTES,
        lambda path, pattern, eod_token: _bytes_tokenizer(eod_token),
    ),
    TokenizerKind(
        "ranks of tiktoken (NAME.tiktoken:PATTERN)",
        lambda path, pattern: path.name.endswith(ENDING) or pattern is not None,
        TiktokenTokenizer,
    ),
    TokenizerKind(
        "a sentencepiece .model",
        lambda path, pattern: (path.suffix == ".model" and path.is_file()) or _has_model_only(path),
        lambda path, pattern, eod_token: _sentencepiece(path, eod_token),
    ),
    TokenizerKind(
        "a Hugging Face tokenizer.json or its folder",
        lambda path, pattern: True,
        lambda path, pattern, eod_token: JsonTokenizer(path, eod_token),
    ),
)
"""The kinds of tokenizers; the first that fits opens a name."""


def split_name(name: str) -> tuple[Path, str | None]:
    """Return the path in the name of a tokenizer, and the pattern after its colon."""
    path, colon, pattern = name.partition(":")
    # pathlib raises for a name that no file can have, as a pattern is.
    is_ranks = colon and not os.path.exists(name) and (os.path.isfile(path) or path.endswith(ENDING))  # noqa: PTH110, PTH113
    return (Path(path), pattern) if is_ranks else (Path(name), None)


def load_tokenizer(name: str, eod_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` or `--tokenizer` names; KINDS has what can be named.

    Raises:
        DataError: see the kinds; or an end-of-document token for bytes, which have their own.
    """
    path, pattern = split_name(name)
    if why := why_no_path(name if pattern is None else path):
        raise DataError(f"there is no tokenizer at {brief(name)}: {why}")
    for file in (path, *(path / each for each in (TOKENIZER_JSON, SENTENCEPIECE, CONFIG, SPECIAL_TOKENS))):
        if file.is_file() and (how := how_to_get(file)):
            raise DataError(f"{file} is not there yet, and without it ids and words would not agree.{how}")
    return next(kind for kind in KINDS if kind.fits(path, pattern)).open(path, pattern, eod_token)


def _has_model_only(folder: Path) -> bool:
    return (folder / SENTENCEPIECE).is_file() and not (folder / TOKENIZER_JSON).is_file()


def _sentencepiece(path: Path, eod_token: str | None) -> SentencePieceTokenizer:
    """Open a model of sentencepiece; that of a folder ends documents with the folder's eos_token."""
    if path.is_file():
        return SentencePieceTokenizer(path, eod_token)
    return SentencePieceTokenizer(path / SENTENCEPIECE, eod_token or special_token(path, "eos_token"))


def _bytes_tokenizer(eod_token: str | None) -> BytesTokenizer:
    if eod_token is not None:
        raise DataError(
            f"the bytes tokenizer ends a document with id 256; it has no token {eod_token!r}. Leave --eod-token out."
        )
    return BytesTokenizer()
