"""The samples of train, valid and test, from the configuration: training's entry into this room (no torch here).

    data.train [[0.7, web], [0.3, code]]   data.valid none      split each corpus by documents, blend each part
                                           data.valid [[..]]    train: all documents of data.train; valid: all of data.valid
    data.synthetic true                                         random tokens, no corpus

Every process of every node gets the same samples from the same arguments; the first one builds the caches.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config.data import DataConfig
from engine.data.blend import Blend
from engine.data.corpus.indexed import IndexedTokens
from engine.data.corpus.record import read_record
from engine.data.document_statistics import UNBROKEN
from engine.data.samples import SampleSource, SampleStream
from engine.data.split import PARTS, split_documents
from engine.data.synthetic import SyntheticDataset
from engine.errors import DataError

WeightedCorpora = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Datasets:
    """The three parts, each with every sample id >= 0; None where the configuration has none."""

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None
    fingerprint: str
    """Hexadecimal: equal where every sample of every part is equal (within the reach of `IndexedTokens.fingerprint`)."""


def open_datasets(
    data_config: DataConfig, seq_length: int, seed: int, cache_dir: str | Path | None = None, *, vocab_size: int
) -> Datasets:
    """Open the corpora, split and blend them.

    Args:
        data_config: the corpora and their split.
        seq_length: labels per sample.
        seed: of all orders.
        cache_dir: folder of index caches, instead of `data.cache_dir`; without both, PREFIX.cache next to each corpus.
        vocab_size: of the model, without padding; a corpus with larger ids is refused.

    Raises:
        DataError: a corpus is missing, damaged, too small for its split or of another vocabulary.
    """
    # Choices beyond the defaults are a part of what a sample is; without them the digest is that of older checkpoints.
    chosen = data_config.model_dump(
        include={"synthetic_document_length", "count_document_starts"}, exclude_defaults=True
    )
    choices = [chosen] if chosen else []
    if data_config.synthetic:
        train, valid, test = (
            SyntheticDataset(
                seed + number,
                vocab_size,
                seq_length,
                mean_document_length=data_config.synthetic_document_length,
                count_document_starts=data_config.count_document_starts,
            )
            for number in range(len(PARTS))
        )
        return Datasets(train, valid, test, _digest("synthetic", seed, vocab_size, seq_length, *choices))
    named = [prefix for _, prefix in [*data_config.train, *(data_config.valid or [])]]
    for weighted in filter(None, (data_config.train, data_config.valid)):
        assert len({prefix for _, prefix in weighted}) == len(weighted), (
            "a corpus named twice gives the same samples again"
        )
    corpora = {prefix: _open_corpus(prefix, vocab_size) for prefix in named}
    folder = cache_dir or data_config.cache_dir

    def blend(weighted: WeightedCorpora, documents: Mapping[str, range]) -> Blend:
        streams = [
            SampleStream(
                corpora[prefix],
                documents[prefix],
                seq_length=seq_length,
                seed=seed,
                cache_dir=Path(folder or f"{prefix}.cache"),
                vocab_size=vocab_size,
                count_document_starts=data_config.count_document_starts,
            )
            for _, prefix in weighted
        ]
        return Blend(streams, [weight for weight, _ in weighted])

    def identity(weighted: WeightedCorpora) -> list[tuple[float, str]]:
        return [(weight, corpora[prefix].fingerprint) for weight, prefix in weighted]

    if data_config.valid is not None:
        whole = {prefix: range(corpus.num_documents) for prefix, corpus in corpora.items()}
        digest = _digest("whole", identity(data_config.train), identity(data_config.valid), seed, seq_length, *choices)
        return Datasets(blend(data_config.train, whole), blend(data_config.valid, whole), None, digest)

    split = data_config.split
    cut = {prefix: split_documents(corpora[prefix].num_documents, split, prefix) for _, prefix in data_config.train}
    blends = {
        part: blend(data_config.train, {prefix: parts[part] for prefix, parts in cut.items()})
        for part, weight in zip(PARTS, split, strict=True)
        if weight > 0
    }
    digest = _digest("split", identity(data_config.train), split, seed, seq_length, *choices)
    return Datasets(blends["train"], blends.get("valid"), blends.get("test"), digest)


def unbroken_corpora(source: SampleSource) -> list[str]:
    """Return the prefixes of corpora whose documents are longer than UNBROKEN samples on average: their ends seem to be lost."""
    sources = source.sources if isinstance(source, Blend) else ()
    streams = [each for each in sources if isinstance(each, SampleStream)]
    return [
        stream.corpus.prefix
        for stream in streams
        if stream.num_tokens > UNBROKEN * stream.seq_length * len(stream.documents)
    ]


def _open_corpus(prefix: str, vocab_size: int) -> IndexedTokens:
    corpus = IndexedTokens(prefix)
    record = read_record(prefix)
    if record is not None and record.vocab_size > vocab_size:
        raise DataError(
            f"{prefix} was prepared with the tokenizer {record.tokenizer} of {record.vocab_size:,} tokens, but model.vocab_size = "
            f"{vocab_size:,}: there is no embedding for the others. Set model.vocab_size={record.vocab_size}."
        )
    return corpus


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
