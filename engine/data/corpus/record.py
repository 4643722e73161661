"""Defines and reads a corpus's record PREFIX.json, with hashes that prove the corpus is complete."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from triaxis.engine.data.corpus.indexed import bin_path, idx_path
from triaxis.engine.data.corpus.pieces import AS_NAMED, InputFile
from triaxis.engine.errors import DataError
from triaxis.engine.storage.files import sha256_of_file
from triaxis.engine.storage.json_text import parse_json

FORMAT = "triaxis corpus 1"


@dataclass(frozen=True, slots=True)
class CorpusRecord:
    """A finished corpus's record: tokenizer, sizes, hashes and left-out input."""

    tokenizer: str
    vocab_size: int
    eod_id: int
    dtype: str
    num_documents: int
    num_tokens: int
    num_skipped_documents: int
    """Number of input documents left out because they gave no text or no tokens."""
    num_input_files: int
    input_bytes: int
    bin_bytes: int
    bin_sha256: str
    idx_sha256: str
    request: str
    """`request_digest` of inputs, options and tokenizer; equal if a corpus is prepared again from the same ones."""
    tokenizer_identity: str = ""
    """`Tokenizer.identity`; empty in records from earlier versions."""
    append_eod: bool = True
    """Whether each document ends with `eod_id`."""
    text_size: int = 0
    """`Tokenizer.text_size`; 0 in records from earlier versions."""
    num_unknown_tokens: int = 0
    """Number of tokens with the tokenizer's unknown id; 0 if they were not counted."""
    left_out: dict[str, Any] = field(default_factory=dict)
    """Map from each kind of left-out input (`BadInput`) to its `count` and first `places`; includes documents without text."""

    @property
    def num_embeddings(self) -> int:
        """Number of embeddings that this corpus needs, the largest possible id + 1."""
        return self.text_size or self.vocab_size

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    def problem(self, prefix: str) -> str | None:
        """Hash the whole corpus. Return a message about any damage, or None if the corpus is intact."""
        for path, expected in ((bin_path(prefix), self.bin_sha256), (idx_path(prefix), self.idx_sha256)):
            if not path.is_file():
                return f"{path} is missing"
            if sha256_of_file(path) != expected:
                return f"{path} is not what was written"
        return None


def record_path(prefix: str) -> Path:
    return Path(f"{prefix}.json")


def read_record(prefix: str) -> CorpusRecord | None:
    """Read a corpus's record, or None if there is none.

    Corpora from Megatron's tools and unfinished corpora have no record.

    Raises:
        DataError: PREFIX.json is damaged, or some other file that must not be replaced.
    """
    path = record_path(prefix)
    if not path.exists():
        return None
    try:
        content = parse_json(path.read_bytes())
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        names = {field.name for field in fields(CorpusRecord)}
        return CorpusRecord(**{name: value for name, value in content.items() if name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a `triaxis prepare` record ({type(error).__name__}: {error}), so it is neither read nor replaced: "
            f"it may be a tokenizer or another file of yours. Choose another prefix, or move the file away."
        ) from error


def request_digest(files: Sequence[InputFile], tokenizer_identity: str, *, append_eod: bool = True) -> str:
    """Hash a corpus's input files, options and tokenizer to a hexadecimal sha256.

    The digest covers each file's path, size and mtime, in order, so touching a file changes the digest. Options with default values
    are left out, so older versions' digests stay valid.
    """
    inputs = [(str(file.path.resolve()), file.size, file.mtime_ns) for file in files]
    keys = list(dict.fromkeys(file.options.text_key for file in files))
    key = keys[0] if len(keys) == 1 else [file.options.text_key for file in files]
    others = {replace(file.options, text_key=AS_NAMED.text_key) for file in files} - {AS_NAMED}
    options = [*([] if append_eod else ["no end of document"]), *map(astuple, others)]
    return hashlib.sha256(json.dumps([FORMAT, inputs, tokenizer_identity, key, *options]).encode()).hexdigest()
