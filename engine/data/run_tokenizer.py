"""The tokenizer of a run: the one that it names, or else that of its corpora; never one that contradicts them.

    data.tokenizer X       every corpus with a record must have been encoded by X
    data.tokenizer null    that of the first corpus with a record, and every other one must agree; without records: bytes

Every process of a training run resolves it once, right after it has read the configuration. From there on `data.tokenizer` is a
name, which the run's config.yaml and its checkpoints record. A run on synthetic data keeps null.
"""

from collections.abc import Sequence

from triaxis.engine.config.model import BYTES_VOCABULARY
from triaxis.engine.config.phases import at_phase
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import idx_path
from triaxis.engine.data.corpus.matching import find_recorded, recorded_as
from triaxis.engine.data.corpus.record import read_record
from triaxis.engine.data.corpus.tokenizers import BYTES, Tokenizer
from triaxis.engine.errors import DataError


def with_tokenizer(config: Config) -> tuple[Config, str | None]:
    """Return the configuration with the name of the run's tokenizer, and a note where it is only assumed.

    Raises:
        DataError: a corpus was encoded by another tokenizer, or the recorded one is not found.
    """
    prefixes = corpora_of(config)
    if not prefixes:
        return config, None
    records = {prefix: record for prefix in prefixes if (record := read_record(prefix)) is not None}
    name, note = config.data.tokenizer, None
    if name is None and records:
        name = find_recorded(*next(iter(records.items())))
    elif name is None:
        name, note = BYTES, _assumed(config, prefixes)
    for prefix, record in records.items():
        name = recorded_as(prefix, record, name)
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": name})}), note


def recorded_end(config: Config, tokenizer: Tokenizer) -> int:
    """Return the id that ends the documents of a run's corpora, by the first record that has one; else the tokenizer's."""
    records = (read_record(prefix) for prefix in corpora_of(config))
    return next((each.eod_id for each in records if each is not None and each.append_eod), tokenizer.eod_id)


def corpora_of(config: Config) -> list[str]:
    """Return the prefixes of the corpora of all phases of a run, each once; none for synthetic data."""
    phases = [at_phase(config, entry["name"]).data for entry in config.phases] or [config.data]
    named = ([*data.train, *(data.valid or ())] for data in phases if not data.synthetic)
    return list(dict.fromkeys(source.path for sources in named for source in sources))


def _assumed(config: Config, prefixes: Sequence[str]) -> str:
    """Return the note that bytes are assumed; DataError where the model has fewer tokens."""
    why = f"{', '.join(prefixes)}: no record names the tokenizer (`triaxis prepare` writes PREFIX.json), so bytes are assumed"
    if config.model.vocab_size < BYTES_VOCABULARY and all(idx_path(prefix).is_file() for prefix in prefixes):
        raise DataError(
            f"{why}, and model.vocab_size = {config.model.vocab_size:,} is less than their {BYTES_VOCABULARY}: larger ids would "
            "have no embedding. Name the tokenizer: data.tokenizer=PATH"
        )
    return f"{why}: its text is shown as bytes. data.tokenizer=PATH names another one."
