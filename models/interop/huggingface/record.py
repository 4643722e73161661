"""Keep what a Hugging Face import cannot store in the model, for a later export.

    imported/qwen3/hugging_face.json    {"special_ids": {"bos_token_id": 1, "eos_token_id": [2, 7]}, "generation_config": "{..}",
                                         "ignored": {"strange_key": 3}, "tokenizer_sha256": "ab12.."}

The record has parts of config.json and generation_config.json that no layer uses. Exporting the imported checkpoint, or a run that
started from it, restores them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.data.corpus.tokenizers import SENTENCEPIECE, TOKENIZER_JSON
from triaxis.engine.errors import CheckpointError, ConfigError, shown
from triaxis.engine.storage.files import sha256_of_file
from triaxis.engine.storage.json_text import parse_json

RECORD = "hugging_face.json"
GENERATION_CONFIG = "generation_config.json"

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id")
"""config.json keys that name tokens; an absent key has the family's default."""


@dataclass(frozen=True, slots=True)
class ImportRecord:
    """Facts about an import that an export restores.

    Attributes:
        special_ids: values of those SPECIAL_IDS keys that config.json had.
        generation_config: text of generation_config.json; None if there was none.
        ignored: config.json keys that `--ignore` let through, with their values.
        tokenizer_sha256: hash of the tokenizer.json, or else tokenizer.model, that these ids belong to; None if the folder had
            neither.
    """

    special_ids: Mapping[str, Any] = field(default_factory=dict)
    generation_config: str | None = None
    ignored: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_sha256: str | None = None

    def ends_with(self, token_id: int) -> bool:
        """Whether this token ends a text, or true if no end is known."""
        end = self.special_ids.get("eos_token_id")
        return end is None or token_id in (end if isinstance(end, list) else [end])

    def to_text(self) -> str:
        """Serialize the record as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def record_of(folder: Path, keys: Mapping[str, Any], ignored: Mapping[str, Any]) -> ImportRecord:
    """Build the record for a Hugging Face folder.

    Args:
        folder: folder with config.json, and optionally generation_config.json and tokenizer.json.
        keys: content of config.json.
        ignored: keys and values that `--ignore` lets through.

    Raises:
        ConfigError: an id is no integer, list of integers or null; or generation_config.json is not a JSON mapping.
    """
    ids = {key: keys[key] for key in SPECIAL_IDS if key in keys}
    problems = [
        f"{key} = {shown(value)}: must be an id, a list of ids or null; generation would not know its own tokens. Mend the file."
        for key, value in ids.items()
        if not all(type(part) is int for part in (value if isinstance(value, list) else [value or 0]))
    ]
    text, path = None, folder / GENERATION_CONFIG
    tokenizer = next((folder / name for name in (TOKENIZER_JSON, SENTENCEPIECE) if (folder / name).is_file()), None)
    try:
        # Decode bytes so that newlines are kept: the file is exported unchanged.
        text = path.read_bytes().decode() if path.is_file() else None
        if text is not None and not isinstance(parse_json(text), dict):
            raise ValueError("it is no mapping of keys to values")
    except (OSError, ValueError) as error:
        problems.append(f"{GENERATION_CONFIG} cannot be read: {error}. Get it again, or move it out of the folder.")
    if problems:
        raise ConfigError(problems, str(folder))
    return ImportRecord(ids, text, ignored, None if tokenizer is None else sha256_of_file(tokenizer))


def record_of_checkpoint(candidate: Candidate, file: Path | None, tokenizer: str | None) -> ImportRecord | None:
    """Find the import record of a checkpoint that came from a Hugging Face model.

    The record is next to the imported checkpoint or the imported tokenizer. The result is None if there is no record, or if the
    exported tokenizer is not the imported one.

    Args:
        file: file of the exported tokenizer; None if there is none.
        tokenizer: name of the exported tokenizer; None if none is exported, so that no hash is compared.

    Raises:
        CheckpointError: the record cannot be read, or is damaged.
    """
    folders = [candidate.folder, *(Path(ancestor.path) for ancestor in reversed(candidate.manifest.lineage))]
    places = [folder.parent / RECORD for folder in folders]
    places += [] if file is None else [file.with_name(RECORD)]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        return None
    record, own = read_record(found), sha256_of_file(file) if file is not None and file.is_file() else None
    return record if tokenizer is None or record.tokenizer_sha256 == own else None


def generation_config(ids: Mapping[str, Any], record: ImportRecord | None) -> str:
    """Return the text for generation_config.json: the imported text, if the record has it.

    Otherwise bos, eos and pad ids make up the text.

    Args:
        ids: exported tokenizer's ids for a built text, such as `eos_token_id`; the record's ids, unless null, replace them.
        record: import record; None if the model was not imported.
    """
    if record is not None and record.generation_config is not None:
        return record.generation_config
    own = {} if record is None else record.special_ids
    known = {**ids, **{key: value for key, value in own.items() if value is not None}}
    return json.dumps({key: known[key] for key in SPECIAL_IDS[:3] if key in known}, indent=2) + "\n"


def read_record(path: Path) -> ImportRecord:
    """Read an import record.

    Raises:
        CheckpointError: the file is missing, unreadable or no such record.
    """
    try:
        made = ImportRecord(**parse_json(path.read_bytes()))
        if not isinstance(made.special_ids, dict) or not isinstance(made.generation_config, str | None):
            raise ValueError("special_ids must be a mapping and generation_config a text")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no record of an import: {error}. The ids of special tokens would be lost. Restore it from a copy, or "
            "remove it to export without them."
        ) from None
    return made
