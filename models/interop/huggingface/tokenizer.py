"""Read a Hugging Face folder's tokenizer files, and build those for an export.

The tokenizer of the training data (left) decides which files an export writes (right):

    a transformers folder       its own files; settings that transformers needs are added to tokenizer_config.json if missing
    another tokenizer.json      that file, with a new tokenizer_config.json
    bytes                       a new tokenizer.json
    a sentencepiece .model      that file, which transformers converts
    tiktoken ranks              none, since transformers cannot read them

The tokenizer.json for bytes encodes a text like this:

text  --UTF-8-->  bytes  --GPT-2's letters for bytes-->  "Ġ" for 32, ..  --a vocabulary without merges-->  ids 0 .. 255

Byte b's letter has the id b, and the id 256 ends a document.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.checkpoint.inspect.recorded import end_of_documents, recorded_tokenizer, trained_tokenizer
from triaxis.engine.data.corpus.end_of_document import END_OF_DOCUMENT_NAMES
from triaxis.engine.data.corpus.tokenizers import (
    BYTES,
    CONFIG,
    SENTENCEPIECE,
    SPECIAL_TOKENS,
    TOKENIZER_JSON,
    BytesTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    special_token,
    split_name,
)
from triaxis.engine.errors import DataError
from triaxis.engine.storage.json_text import parse_json

_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))

FILES = (
    TOKENIZER_JSON,
    SENTENCEPIECE,
    CONFIG,
    SPECIAL_TOKENS,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Patterns for tokenizer files in a transformers folder."""

ROLES = ("bos", "eos", "pad")
"""Token roles whose ids config.json and generation_config.json give."""


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Read a transformers folder's tokenizer files, by path relative to the folder."""
    found = sorted(path for pattern in FILES for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def tokenizer_of(
    candidate: Candidate, given: str | None, vocab_size: int
) -> tuple[str | None, Tokenizer | None, list[str]]:
    """Choose the tokenizer to export.

    Returns its name, the tokenizer with the end-of-document token used in training, and notes for the user. The first two are None
    if no tokenizer is exported. A note then says why.

    Args:
        given: value of `--tokenizer`; None if not given.
        vocab_size: model's vocabulary size.

    Raises:
        DataError: the requested tokenizer is missing, is not a tokenizer or has ids beyond the vocabulary; or a run's own
            tokenizer is missing.
    """
    if given == "none":
        return None, None, ["no tokenizer was written, because --tokenizer none was given"]
    named = given or recorded_tokenizer(candidate)
    if named is None:
        return None, None, ["the checkpoint names no tokenizer; give one with --tokenizer"]
    # Synthetic data has no tokenizer, and an import without one names the place where it belongs.
    is_in_use = candidate.manifest.content == "training" and not candidate.manifest.config["data"].get("synthetic")
    if given is None and named != BYTES and not split_name(named)[0].exists() and is_in_use:
        raise DataError(
            f"{candidate.folder} names the tokenizer {named}, which is not there: the export would lack it. Say where it is now "
            "with --tokenizer PATH, or --tokenizer none to export without one."
        )
    try:
        tokenizer = load_tokenizer(named)
        if tokenizer.text_size > vocab_size:
            raise DataError(
                f"the tokenizer {named} has ids up to {tokenizer.text_size - 1:,}, and the model {vocab_size:,} tokens: some of "
                "its words would have no embedding. Give the tokenizer that the model was trained with by --tokenizer."
            )
    except DataError as error:
        if given is not None:
            raise
        return None, None, [f"no tokenizer was written: {error}"]
    name = trained_tokenizer(candidate, named, "--tokenizer ")
    tokenizer = load_tokenizer(name)
    tokenizer.eod_id = end_of_documents(candidate, tokenizer)
    return name, tokenizer, []


def tokenizer_file(name: str) -> Path | None:
    """Locate the file that `load_tokenizer(name)` opens. None for the tokenizer of bytes, which has no file."""
    path, _ = split_name(name)
    files = (path / file for file in (TOKENIZER_JSON, SENTENCEPIECE))
    return None if name == BYTES else next((file for file in files if file.is_file()), path)


def name_in_folder(files: Mapping[str, bytes]) -> str:
    """Return the path by which `load_tokenizer` finds the tokenizer in a folder with these files.

    The path is relative to the folder. It is "." if the folder has a tokenizer file and a tokenizer_config.json. With a tokenizer
    file alone, it is that file's name. With neither, it is tokenizer.json, which the folder lacks.
    """
    own = next((name for name in (TOKENIZER_JSON, SENTENCEPIECE) if name in files), None)
    return "." if own is not None and CONFIG in files else own or TOKENIZER_JSON


@dataclass(frozen=True, slots=True)
class ExportedTokenizer:
    """Tokenizer of an export.

    Attributes:
        files: file contents by path in the exported folder; empty if the export has no tokenizer.
        ids: token ids by key, such as `eos_token_id`, for those ROLES that have a token.
        notes: why files are missing or how transformers tokenizes differently, as text for the user.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ids_of_model(self) -> dict[str, int | None]:
        """Token ids for config.json.

        `pad_token_id` is None, because transformers never trains the embedding of the padding token.
        """
        return {key: self.ids.get(key) for key in ("bos_token_id", "eos_token_id")} | {"pad_token_id": None}


def export_tokenizer(name: str, tokenizer: Tokenizer, *, max_length: int, is_import: bool) -> ExportedTokenizer:
    """Build the files from which Hugging Face transformers loads the training tokenizer.

    Args:
        name: tokenizer name, as for `load_tokenizer`.
        tokenizer: loaded tokenizer; its `eod_id` ended documents in training.
        max_length: longest text in tokens, if the tokenizer does not give one.
        is_import: whether the tokenizer was imported with the weights. If it also has a tokenizer_config.json, its files are
            exported unchanged.

    Raises:
        DataError: tokenizer_config.json or special_tokens_map.json is not a JSON mapping.
    """
    end = {"eos_token_id": tokenizer.eod_id}
    if name == BYTES:
        files = {TOKENIZER_JSON: bytes_tokenizer_json().encode()}
        token = END_OF_DOCUMENT_NAMES[0]
        completed = _completed(files, {"eos_token": token, "pad_token": token}, max_length)
        return ExportedTokenizer(completed, {**end, "pad_token_id": tokenizer.eod_id})
    path, _ = split_name(name)
    is_named = path.name in (TOKENIZER_JSON, SENTENCEPIECE)
    folder = path if path.is_dir() else path.parent if is_named else None
    if folder is not None:
        files = tokenizer_files(folder)
    elif tokenizer.json_file is not None:
        files = {TOKENIZER_JSON: path.read_bytes()}
    elif path.suffix == ".model":
        files = {SENTENCEPIECE: path.read_bytes()}
    else:
        note = f"no tokenizer was written: {name} is no {TOKENIZER_JSON}, which transformers reads; copy its file to the folder"
        return ExportedTokenizer(ids=end, notes=(note,))
    if not isinstance(tokenizer, JsonTokenizer):
        note = f"{SENTENCEPIECE} was copied: transformers makes a tokenizer of it; compare its ids with those of the corpus"
        return ExportedTokenizer(files, end, (note,))
    named: Mapping[str, str | None] = {
        role: special_token(folder, f"{role}_token") if folder else None for role in (*ROLES, "unk")
    }
    notes = []
    if not (is_import and CONFIG in files):
        wanted = _wanted(named, tokenizer, parse_json(files[TOKENIZER_JSON])["model"].get("unk_token"))
        changed = {f"{role}_token": token for role, token in wanted.items() if token and token != named[role]}
        if named["eos"] not in (None, wanted["eos"]):
            notes.append(
                f"eos_token is {wanted['eos']}, which ended documents in training, and no longer {named['eos']}"
            )
        if added := tokenizer.tokens_of_no_text():
            notes.append(
                f"transformers adds {' '.join(added)} to a text; training did not: give add_special_tokens=False"
            )
        files, named = _completed(files, changed, max_length), wanted
    ids = {f"{role}_token_id": tokenizer.id_of(own) for role in ROLES if (own := named[role])}
    return ExportedTokenizer(files, {key: each for key, each in ids.items() if each is not None}, tuple(notes))


def _wanted(named: Mapping[str, str | None], tokenizer: JsonTokenizer, unknown: str | None) -> dict[str, str | None]:
    """Choose the export's bos, eos, pad and unk tokens. `named` has the folder's tokens by role.

    `eos` is the token that ended documents in training. A missing `pad` becomes `eos`, a missing `unk` becomes `unknown`.
    """
    end = tokenizer.token_of(tokenizer.eod_id)
    # Batches need some padding token; the end token is safe, since nothing is read after it.
    return {**named, "eos": end, "pad": named["pad"] or end, "unk": named["unk"] or unknown}


def _completed(files: Mapping[str, bytes], tokens: Mapping[str, str], max_length: int) -> dict[str, bytes]:
    """Return `files` with `tokens`, by key such as `eos_token`, set in the tokenizer's config files.

    tokenizer_config.json is added if missing. It gets a class and `max_length` if it has none.
    """
    # If no class is given, transformers rebuilds the tokenizer by the family's own rules instead of reading the file.
    default = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    there = {name: parse_json(files[name]) for name in (CONFIG, SPECIAL_TOKENS) if name in files}
    wanted = {name: {**keys, **tokens} for name, keys in there.items()}
    wanted[CONFIG] = {**default, **wanted.get(CONFIG, tokens)}
    return {**files, **{name: _to_bytes(keys) for name, keys in wanted.items() if keys != there.get(name)}}


def _to_bytes(keys: Mapping[str, Any]) -> bytes:
    return (json.dumps(keys, indent=2, ensure_ascii=False) + "\n").encode()


def bytes_tokenizer_json() -> str:
    """Build a tokenizer.json with the same ids as `triaxis.engine.data.corpus.tokenizers.BytesTokenizer`."""
    import tokenizers  # 10 MB of native code, needed only to export a byte-level model
    from tokenizers import decoders, models, pre_tokenizers

    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    letters = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT_NAMES[0]])
    assert tokenizer.token_to_id(END_OF_DOCUMENT_NAMES[0]) == BytesTokenizer().eod_id, "special tokens follow the bytes"
    content: str = tokenizer.to_str()
    return content
