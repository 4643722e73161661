"""Opens the train, valid and test samples that a configuration describes.

Each line below shows settings, then the resulting samples:

    data.train web 0.7, code 0.3    data.valid none     split each corpus by documents, then blend each part
                                    data.valid other    train on all documents in data.train, validate on all in data.valid
    data.synthetic true                                 random tokens, no corpus

Every process gets the same samples from the same arguments. On each node, the first process builds the caches.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triaxis.engine.config.quantities.run_phases import DataSegment, data_segments
from triaxis.engine.config.schema.data import DataConfig
from triaxis.engine.config.schema.extension_parts import OURS, Extension
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.sources import Source
from triaxis.engine.data.blend import Blend, counts_of
from triaxis.engine.data.corpus.own import Corpus, open_corpus, refuse_repeated
from triaxis.engine.data.corpus.record import read_record
from triaxis.engine.data.corpus.tokenizers import BYTES
from triaxis.engine.data.document_statistics import UNBROKEN
from triaxis.engine.data.index_cache import Progress
from triaxis.engine.data.remainder import ContinuedStream
from triaxis.engine.data.samples import SampleSource, SampleStream
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.data.split import PARTS, split_documents
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.errors import DataError, counted

IDS_AT_START = 2**18
"""Number of token ids checked at every start in a corpus without a record (PREFIX.json); `triaxis data check` reads all ids."""

ENDS_AT_START = 100
"""Number of documents per corpus whose last token is checked at every start."""


@dataclass(frozen=True, slots=True)
class Datasets:
    """A run's train, valid and test samples. A split that is not configured is None."""

    train: SampleSource
    """Training samples. If the sample length or blend changes during the run: the present segment's samples, numbered from 0."""
    valid: SampleSource | None
    test: SampleSource | None
    fingerprint: str
    """Hexadecimal digest. Equal digests mean equal samples in all parts, as far as `IndexedTokens.fingerprint` can tell."""
    train_after: Callable[[SkippedRanges], SampleSource]
    """Function that opens the training samples for the given skipped ranges, indexed by their ids in the run.

    Each corpus continues after the samples that the run's earlier segments read.
    """


def open_datasets(
    data_config: DataConfig,
    seq_length: int,
    seed: int,
    cache_dir: str | Path | None = None,
    *,
    vocab_size: int,
    own: Extension = OURS,
    segments: Sequence[DataSegment] = (),
    progress: Progress | None = None,
) -> Datasets:
    """Open the corpora, split them and blend them.

    Args:
        data_config: corpora and their split.
        seq_length: labels per sample.
        seed: random seed for the orders of documents and samples.
        cache_dir: folder for index caches, overriding `data.cache_dir`; if neither is set, PREFIX.cache next to each corpus.
        vocab_size: model vocabulary without padding; a corpus with larger ids is refused.
        own: extension that provides the `extension:NAME` corpora.
        segments: parts of the run so far, each with one blend and one sample length (`data_segments`).
        progress: observer notified while orders are built.

    Raises:
        DataError: a corpus is missing, damaged, named twice or too small for its split, or has ids outside the vocabulary.
    """
    # Only non-default choices enter the digest, so digests in older checkpoints stay valid.
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
        digest = _digest("synthetic", seed, vocab_size, seq_length, *choices)
        return Datasets(train, valid, test, digest, lambda skipped: train)
    named = [source.path for source in [*data_config.train, *(data_config.valid or [])]]
    corpora = {prefix: _open_corpus(prefix, vocab_size, data_config.tokenizer or BYTES, own) for prefix in named}
    again = "its samples would be read twice. Name it once, with the sum of the weights."
    for field, blended in (("data.train", data_config.train), ("data.valid", data_config.valid or [])):
        refuse_repeated(field, [corpora[source.path] for source in blended], again)
    other = "validation would use training data. If that is intended, use the same spelling of the path in both."
    refuse_repeated("data.train with data.valid", list(corpora.values()), other)
    folder = cache_dir or data_config.cache_dir

    def stream(prefix: str, documents: Mapping[str, range], length: int) -> SampleStream:
        return SampleStream(
            corpora[prefix],
            documents[prefix],
            seq_length=length,
            seed=seed,
            cache_dir=Path(folder or corpora[prefix].cache_dir),
            vocab_size=vocab_size,
            count_document_starts=data_config.count_document_starts,
            progress=progress,
        )

    def blend(sources: Sequence[Source], documents: Mapping[str, range]) -> Blend:
        streams = [stream(source.path, documents, seq_length) for source in sources]
        return Blend(streams, [source.weight for source in sources])

    def training(documents: Mapping[str, range]) -> tuple[Blend, Callable[[SkippedRanges], SampleSource]]:
        if len(segments) < 2:
            train = blend(data_config.train, documents)
            return train, lambda skipped: train

        def after(skipped: SkippedRanges) -> Blend:
            return continued(segments, skipped, lambda prefix, length: stream(prefix, documents, length))

        return Blend(after(SkippedRanges()).sources, [source.weight for source in data_config.train]), after

    def identity(sources: Sequence[Source]) -> list[tuple[float, str]]:
        return [(source.weight, corpora[source.path].fingerprint) for source in sources]

    if data_config.valid is not None:
        whole = {prefix: range(corpus.num_documents) for prefix, corpus in corpora.items()}
        digest = _digest("whole", identity(data_config.train), identity(data_config.valid), seed, seq_length, *choices)
        train_blend, after = training(whole)
        return Datasets(train_blend, blend(data_config.valid, whole), None, digest, after)

    split = data_config.split
    paths = [source.path for source in data_config.train]
    cut = {path: split_documents(corpora[path].num_documents, split, path) for path in paths}
    documents = {part: {prefix: parts[part] for prefix, parts in cut.items()} for part in PARTS}
    train_blend, after = training(documents["train"])
    valid_blend, test_blend = (
        blend(data_config.train, documents[part]) if weight > 0 else None
        for part, weight in zip(PARTS[1:], split[1:], strict=True)
    )
    digest = _digest("split", identity(data_config.train), split, seed, seq_length, *choices)
    return Datasets(train_blend, valid_blend, test_blend, digest, after)


def open_run_datasets(config: Config, progress: Progress | None = None) -> Datasets:
    """Open a run's train, valid and test samples for the training phase that `config` describes."""
    return open_datasets(
        config.data,
        config.model.seq_length,
        config.train.seed,
        vocab_size=config.model.vocab_size,
        own=config.model.own,
        segments=data_segments(config),
        progress=progress,
    )


def open_orders(source: SampleSource, sample_id: int) -> None:
    """Build and cache each corpus's sample order for the epoch reached at sample `sample_id`.

    Raises:
        DataError: the index cache cannot be written.
    """
    if isinstance(source, Blend):
        for each, inner in source.next_of_each(max(sample_id, source.first_id)):
            each.lengths(inner)


def continued(
    segments: Sequence[DataSegment], skipped: SkippedRanges, open_stream: Callable[[str, int], SampleStream]
) -> Blend:
    """Open the last segment's samples, indexed by the run's sample ids.

    A segment is a part of the run with one blend and sample length. Each corpus continues where earlier segments stopped.

    Args:
        segments: segments in order.
        skipped: skipped sample ids; they count as read.
        open_stream: function (corpus prefix, sample length) -> corpus stream.
    """
    *earlier, present = segments
    # A segment's first id follows the id of the last sample before it.
    first_ids = [0] + [skipped.id_at(each.first_position - 1) + 1 for each in segments[1:]]
    streams: dict[str, ContinuedStream] = {}
    for number, segment in enumerate(earlier):
        num_samples = first_ids[number + 1] - first_ids[number]
        counts = counts_of([weight for weight, _ in segment.train], num_samples)
        for (_, prefix), count in zip(segment.train, counts, strict=True):
            if prefix not in {prefix for _, prefix in present.train}:
                continue
            if prefix not in streams:
                streams[prefix] = ContinuedStream(open_stream(prefix, segment.seq_length))
            stream = streams[prefix].after(0, segment.seq_length)
            streams[prefix] = stream.after(count, segment.seq_length)
    sources = []
    for _, prefix in present.train:
        stream = streams.get(prefix) or ContinuedStream(open_stream(prefix, present.seq_length))
        sources.append(stream.after(0, present.seq_length))
    return Blend(sources, [weight for weight, _ in present.train], first_ids[-1])


def unbroken_corpora(source: SampleSource) -> list[str]:
    """List the corpora whose mean document exceeds UNBROKEN samples: document ends are probably missing."""
    return [
        stream.corpus.prefix
        for stream in _streams(source)
        if stream.num_tokens > UNBROKEN * stream.seq_length * len(stream.documents)
    ]


def trained_and_validated(datasets: Datasets) -> list[str]:
    """List the corpora whose documents both training and validation read. A copy counts as the same corpus."""
    trained = {stream.identity for stream in _streams(datasets.train)}
    validated = [] if datasets.valid is None else _streams(datasets.valid)
    return [stream.corpus.prefix for stream in validated if stream.identity in trained]


def other_ends(source: SampleSource, eod_id: int) -> list[str]:
    """Describe corpora whose first documents mostly do not end with `eod_id`.

    Corpora prepared without an end token are left out.
    """
    found = []
    for stream in _streams(source):
        record, first = read_record(stream.corpus.prefix), stream.documents[:ENDS_AT_START]
        last = stream.corpus.last_tokens(np.arange(first.start, first.stop))
        others = last[(last != eod_id) & (last >= 0)]
        if 2 * len(others) > len(last) and (record is None or record.append_eod):
            ids, counts = np.unique(others, return_counts=True)
            found.append(
                f"{stream.corpus.prefix}: {len(others):,} of the first {len(last):,} documents do not end with id {eod_id}, the "
                f"tokenizer's end of a document; most of them end with id {ids[np.argmax(counts)]}. If the tokenizer is the right "
                "one, generation would never stop: prepare the text again, or name the right one (data.tokenizer)"
            )
    return found


def _streams(source: SampleSource) -> list[SampleStream]:
    """List a blend's corpus streams. A source of random tokens has none."""
    sources = source.sources if isinstance(source, Blend) else ()
    wholes = [each.stream if isinstance(each, ContinuedStream) else each for each in sources]
    return [each for each in wholes if isinstance(each, SampleStream)]


def read_again(source: SampleSource, num_samples: int) -> list[str]:
    """Describe corpora that repeat samples within the first `num_samples` samples. A `ContinuedStream` is left out."""
    if not isinstance(source, Blend):
        return []
    asked = zip(source.sources, counts_of(source.shares, num_samples), strict=True)
    return [
        f"asks {stream.corpus.prefix} for {counted(count, 'sample')}, but its part holds {stream.samples_per_epoch:,}: each is "
        f"read up to {-(-count // stream.samples_per_epoch):,} times, which does not make the loss more exact. Lower eval.steps, "
        "or give validation more documents (data.split, data.valid)"
        for stream, count in asked
        if isinstance(stream, SampleStream) and count > stream.samples_per_epoch
    ]


def doubts(datasets: Datasets, config: Config, eod_id: int | None) -> Iterator[tuple[str, str]]:
    """Yield rows for the banner about samples that are probably not what is meant.

    `eod_id` is the tokenizer's end-of-document id; None if there is no tokenizer.
    """
    if config.data.reads_documents and (unbroken := unbroken_corpora(datasets.train)):
        yield (
            "documents",
            f"{', '.join(unbroken)}: documents are longer than {UNBROKEN} samples on average, so their ends seem to be lost. "
            "Prepare the text again, with one document per line, row or file",
        )
    if datasets.valid is not None and config.eval.interval is not None:
        num_samples = config.eval.steps * config.train.global_batch_size
        yield from (("validation", text) for text in read_again(datasets.valid, num_samples))
    for each in trained_and_validated(datasets):
        yield "validation", f"{each} is also training data: the loss is not that of unseen text"
    if eod_id is not None:
        yield from (("documents", text) for text in other_ends(datasets.train, eod_id))


def _open_corpus(prefix: str, vocab_size: int, tokenizer: str, own: Extension) -> Corpus:
    corpus = open_corpus(prefix, own, tokenizer)
    record = read_record(prefix)
    if record is not None and record.num_embeddings > vocab_size:
        raise DataError(
            f"{prefix} was prepared with the tokenizer {record.tokenizer} of {record.vocab_size:,} tokens, but model.vocab_size = "
            f"{vocab_size:,}: there is no embedding for the others. Set model.vocab_size={record.vocab_size}."
        )
    smallest, largest = corpus.ids(IDS_AT_START) if record is None else (0, 0)
    if smallest < 0 or largest >= vocab_size:
        mend = (
            "Set model.vocab_size to the size of the tokenizer that made it, or prepare" if smallest >= 0 else "Prepare"
        )
        raise DataError(
            f"{prefix} has ids from {smallest:,} to {largest:,}, but model.vocab_size = {vocab_size:,}: some ids would have no "
            f"embedding. {mend} the corpus again."
        )
    return corpus


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
