"""Finds a run's tokenizer, and refuses one that contradicts the run's corpora.

    data.tokenizer X       every corpus with a record must have been encoded by X
    data.tokenizer null    the tokenizer in the first record, with which all records must agree; `bytes` if no corpus has a record

Every training process resolves the tokenizer right after reading the configuration. From then on `data.tokenizer` is a name, which
config.yaml and checkpoints record. A run on synthetic data keeps null.
"""

from collections.abc import Sequence

from triaxis.engine.config.quantities.run_phases import at_phase
from triaxis.engine.config.schema.model import BYTES_VOCABULARY
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import idx_path
from triaxis.engine.data.corpus.matching import find_recorded, recorded_as
from triaxis.engine.data.corpus.record import read_record
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import BYTES
from triaxis.engine.errors import DataError


def with_tokenizer(config: Config) -> tuple[Config, str | None]:
    """Return the configuration with its tokenizer's name, and a note if bytes are assumed.

    Bytes are assumed if `data.tokenizer` is null and no corpus has a record. Otherwise the note is None. Without corpora, the
    configuration is returned unchanged.

    Raises:
        DataError: a corpus was encoded by another tokenizer, the recorded tokenizer is not found, or the model's vocabulary is too
            small for assumed bytes.
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
    """Return the end-of-document id of a run's corpora, recorded by `triaxis prepare`, or else the tokenizer's."""
    records = (read_record(prefix) for prefix in corpora_of(config))
    return next((each.eod_id for each in records if each is not None and each.append_eod), tokenizer.eod_id)


def corpora_of(config: Config) -> list[str]:
    """List the corpus prefixes that any of a run's phases names, without repeats. Synthetic data has none."""
    phases = [at_phase(config, entry["name"]).data for entry in config.phases] or [config.data]
    named = ([*data.train, *(data.valid or ())] for data in phases if not data.synthetic)
    return list(dict.fromkeys(source.path for sources in named for source in sources))


def _assumed(config: Config, prefixes: Sequence[str]) -> str:
    """Write the note that the `bytes` tokenizer is assumed for the corpora at `prefixes`.

    Raises:
        DataError: all corpora exist, and model.vocab_size is smaller than the 257 ids of `bytes`.
    """
    why = f"{', '.join(prefixes)}: no record names the tokenizer (`triaxis prepare` writes PREFIX.json), so bytes are assumed"
    if config.model.vocab_size < BYTES_VOCABULARY and all(idx_path(prefix).is_file() for prefix in prefixes):
        raise DataError(
            f"{why}, and model.vocab_size = {config.model.vocab_size:,} is less than their {BYTES_VOCABULARY}: larger ids would "
            "have no embedding. Name the tokenizer: data.tokenizer=PATH"
        )
    return f"{why}: its text is shown as bytes. data.tokenizer=PATH names another one."
