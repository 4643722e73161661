"""Opens tokenizers, which convert text to token ids and back.

    load_tokenizer("bytes")                 ids 0 .. 255 are UTF-8 bytes, and 256 ends a document
    load_tokenizer("tokenizer.json")        a file for Hugging Face's `tokenizers` library
    load_tokenizer("gpt2-vocab.json")       GPT-2's two files; the other one is gpt2-merges.txt beside it
    load_tokenizer("some/folder")           a transformers folder with a tokenizer.json, and special tokens in its config
    load_tokenizer("tokenizer.model")       a sentencepiece model, or its folder if that has no tokenizer.json
    load_tokenizer("gpt2.tiktoken")         tiktoken ranks, with :PATTERN after the name for how a text is cut

A document that spells a special token's name gets the ids of the name's characters, never that token. So no text can end its own
document. Special tokens are not added either.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.data.corpus.end_of_document import end_of_document
from triaxis.engine.data.corpus.sentencepiece_model import SentencePieceTokenizer
from triaxis.engine.data.corpus.tiktoken_ranks import ENDING, TiktokenTokenizer
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.errors import DataError, brief, shown
from triaxis.engine.storage.elsewhere import how_to_bring, how_to_get, why_no_path
from triaxis.engine.storage.files import sha256_of_file
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.state_files import kind_of

BYTES = "bytes"
TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
VOCAB, MERGES = "vocab.json", "merges.txt"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
_TOKEN_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
_AGAIN = "Which tokens the tokenizer has would be a guess. Copy the file from the model's folder again."


class BytesTokenizer(Tokenizer):
    """A tokenizer with one id per UTF-8 byte."""

    def __init__(self) -> None:
        self.eod_id = 256
        self.vocab_size = self.text_size = 257
        self.identity = hashlib.sha256(b"bytes of utf-8, 256 ends a document").hexdigest()

    def identity_with(self, eod_id: int) -> str:
        """Return the fixed identity hash, since this tokenizer has only one end-of-document id."""
        return self.identity

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Decode bytes. Invalid UTF-8 becomes the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class JsonTokenizer(Tokenizer):
    """A tokenizer from the Hugging Face `tokenizers` library. The file's truncation, padding and dropout are switched off.

    Args:
        path: a .json file, or a transformers folder with a tokenizer.json; or GPT-2's vocab.json, with its merges.txt beside it.
        eod_token: end-of-document token; None: the folder's eos_token, else the first name in END_OF_DOCUMENT_NAMES that the
            tokenizer has.

    Raises:
        DataError: the file does not exist or is not a tokenizer, the folder's other files are damaged or contradict it, or it has
            no end-of-document token.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        folder = path if path.is_dir() else None
        file, merges = path / TOKENIZER_JSON if folder else path, _merges_of(path)
        self.json_file: Path | None = None if merges else file
        self._tokenizer: Any = _open(file, merges)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            # BPE dropout varies the ids from call to call; a corpus needs one fixed encoding.
            self._tokenizer.model.dropout = None
        own, added = _of_folder(folder, self._tokenizer) if folder else (None, [])
        self._tokenizer.encode_special_tokens = True
        self.eod_id = end_of_document(path, self._tokenizer.token_to_id, eod_token, own)
        self.vocab_size = _vocab_size(self._tokenizer)
        self.unknown_id = _unknown_id(self._tokenizer)
        self.text_size = max(_text_size(self._tokenizer), self.eod_id + 1)
        self._sha256, self._added = sha256_of_file(file), [json.dumps(added)] if added else []
        self._added += [sha256_of_file(merges)] if merges else []
        self.identity = self.identity_with(self.eod_id)

    def identity_with(self, eod_id: int) -> str:
        """Compute the hash that would identify this tokenizer with another end-of-document id."""
        return hashlib.sha256(" ".join([self._sha256, str(eod_id), *self._added]).encode()).hexdigest()

    def id_of(self, token: str) -> int | None:
        """Look up the id of an ordinary or special token; None if the tokenizer lacks it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def tokens_of_no_text(self) -> list[str]:
        """List the special tokens that the library by default adds to every text."""
        tokens: list[str] = self._tokenizer.encode("").tokens
        return tokens

    def token_of(self, token_id: int) -> str:
        name: str = self._tokenizer.id_to_token(token_id)
        return name

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # "fast" skips the tokens' offsets in the text; the ids are the same.
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        known = [token for token in ids if token < self.vocab_size and token != self.eod_id]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text


def _of_folder(folder: Path, tokenizer: Any) -> tuple[str | None, list[str]]:
    """Add to `tokenizer` the tokens that tokenizer_config.json lists and tokenizer.json lacks.

    transformers does the same when it opens the folder.

    Returns:
        The folder's eos_token or None, and the names of the added tokens.

    Raises:
        DataError: the two files give a token different ids, or one file cannot be read.
    """
    added = []
    for number, token in _added_tokens(folder / CONFIG):
        name = token["content"]
        if tokenizer.token_to_id(name) is None:
            _add_token(tokenizer, token)
            added.append(name)
        if (found := tokenizer.token_to_id(name)) != number:
            raise DataError(
                f"{folder}: {CONFIG} gives {name!r} the id {number}, but {TOKENIZER_JSON} gives {found}: the two files belong to "
                f"different models. Copy both from one model."
            )
    return special_token(folder, "eos_token"), added


def special_token(folder: Path, role: str) -> str | None:
    """Read a transformers folder's token for a role, such as `eos_token`, or None.

    Raises:
        DataError: tokenizer_config.json or special_tokens_map.json is not a JSON object, or names something other than a token.
    """
    for path in (folder / CONFIG, folder / SPECIAL_TOKENS):
        if token := _json_of(path).get(role):
            name = token.get("content") if isinstance(token, dict) else token
            if not isinstance(name, str):
                raise DataError(f"{path}: {role} = {shown(token)} is no token: it must be a text. {_AGAIN}")
            return name
    return None


def _added_tokens(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read the (id, token) pairs that a tokenizer_config.json lists, sorted by id. A missing file lists none.

    Raises:
        DataError: the file is not a JSON object, or its list has a form that transformers does not write.
    """
    listed = _json_of(path).get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise DataError(f"{path}: added_tokens_decoder = {shown(listed)} must map ids to tokens. {_AGAIN}")
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
    """Read a JSON object from a tokenizer's folder, or {} if the file is missing."""
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
    """Check that a tokenizer.json is readable and encodes text to ids below `vocab_size`.

    Returns:
        A note about special tokens with ids >= `vocab_size`, which have no embedding; None if there are none.

    Raises:
        DataError: the file is not a tokenizer, or text may contain ids >= `vocab_size`.
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


def _merges_of(path: Path) -> Path | None:
    """Find the merges.txt beside a vocab.json; both names may have the same beginning. None for any other path."""
    merges = path.with_name(path.name.removesuffix(VOCAB) + MERGES)
    return merges if path.name.endswith(VOCAB) and merges.is_file() else None


def _open(path: Path, merges: Path | None = None) -> Any:
    """Open a tokenizer file with the `tokenizers` library, or GPT-2's two files. DataError if a file is missing or invalid."""
    import tokenizers  # 10 MB of native code, only needed for a .json

    if not path.is_file():
        obstacle = f": it is {kind_of(path.stat().st_mode)}, not a file" if path.exists() else ""
        raise DataError(
            f"there is no tokenizer at {path}{obstacle}. Give {', '.join(kind.shown for kind in KINDS)}; `triaxis prepare` also "
            "trains one: train-bpe:32000. For a transformers folder without a tokenizer.json, "
            "AutoTokenizer(..).save_pretrained writes one." + how_to_bring(path)
        )
    try:
        if merges is None:
            return tokenizers.Tokenizer.from_file(str(path))
        return tokenizers.Tokenizer.from_str(tokenizers.ByteLevelBPETokenizer(str(path), str(merges)).to_str())
    except Exception as error:  # the library raises a bare Exception
        raise DataError(
            f"{path} is no tokenizer of the Hugging Face `tokenizers` library ({error}). Give its tokenizer.json, or a vocab.json "
            f"with its merges.txt beside it."
        ) from error


def _vocab_size(tokenizer: Any) -> int:
    """Compute the largest id + 1, or 0 if the tokenizer has no tokens."""
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max(ids.values(), default=-1) + 1


def _unknown_id(tokenizer: Any) -> int | None:
    """Look up the unknown token's id, or None if the tokenizer's model has none."""
    model = parse_json(tokenizer.to_str())["model"]
    if isinstance(found := model.get("unk_id"), int):
        return found
    token: int | None = tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    return token


def _text_size(tokenizer: Any) -> int:
    """Compute 1 + the largest id that encoding a text can give. Encoded text never contains added special tokens."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    never = special - tokenizer.get_vocab(with_added_tokens=False).keys()
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return max((each for name, each in ids.items() if name not in never), default=-1) + 1


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """One form of tokenizer, and how to recognise and open it."""

    shown: str
    """Description of the form, for messages."""
    fits: Callable[[Path, str | None], bool]
    """Predicate over a path and the pattern after its colon: whether they name a tokenizer in this form."""
    open: Callable[[Path, str | None, str | None], Tokenizer]
    """Function that opens the tokenizer, from a path, a pattern and an end-of-document token."""


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
"""Tokenizer kinds; the first that fits a name opens it."""


def split_name(name: str) -> tuple[Path, str | None]:
    """Split a name such as `gpt2.tiktoken:PATTERN` into a path and PATTERN. Other names give (path, None)."""
    path, colon, pattern = name.partition(":")
    # pathlib raises for names that no file can have, and a pattern may be such a name.
    is_ranks = colon and not os.path.exists(name) and (os.path.isfile(path) or path.endswith(ENDING))  # noqa: PTH110, PTH113
    return (Path(path), pattern) if is_ranks else (Path(name), None)


def load_tokenizer(name: str, eod_token: str | None = None) -> Tokenizer:
    """Open the tokenizer that `data.tokenizer` or `--tokenizer` names. KINDS lists the accepted forms.

    Raises:
        DataError: the file is missing or cannot be opened, the tokenizer lacks `eod_token`, or `eod_token` is given for `bytes`,
            which has a fixed end of document.
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
    """Open a sentencepiece model. A folder's eos_token is the default for `eod_token`."""
    if path.is_file():
        return SentencePieceTokenizer(path, eod_token)
    return SentencePieceTokenizer(path / SENTENCEPIECE, eod_token or special_token(path, "eos_token"))


def _bytes_tokenizer(eod_token: str | None) -> BytesTokenizer:
    if eod_token is not None:
        raise DataError(
            f"the bytes tokenizer ends a document with id 256; it has no token {eod_token!r}. Leave --eod-token out."
        )
    return BytesTokenizer()
