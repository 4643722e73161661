"""The documents that a step read, sample by sample, computed from the configuration and never recorded.

    step  ->  positions  ->  sample ids (without skipped ranges)  ->  (corpus, its own sample)  ->  parts of documents

The samples of a step follow from the configuration, the number of the step and the skipped ranges, in every layout. So the result
holds for any number of ranks and restarts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from triaxis.engine.config.phases import RunPhase
from triaxis.engine.data.blend import Blend
from triaxis.engine.data.remainder import ContinuedStream
from triaxis.engine.data.samples import DocumentPart, SampleSource, SampleStream
from triaxis.engine.data.skipped import SkippedRanges


@dataclass(frozen=True, slots=True)
class SampleRead:
    """One sample of a step.

    Attributes:
        position: number of the sample in the run, from 0.
        sample_id: number of the sample in the data, from 0; larger than `position` after skipped ranges.
        corpus: prefix of the corpus.
        epoch: epoch of the corpus, from 0.
        pieces: stretches of consecutive tokens of the epoch, each as parts of documents in order. The first token of a piece is no
            label, and the last token of the sample is a label only.
    """

    position: int
    sample_id: int
    corpus: str
    epoch: int
    pieces: tuple[tuple[DocumentPart, ...], ...]

    @property
    def parts(self) -> tuple[DocumentPart, ...]:
        """Return the parts of all pieces, in order."""
        return tuple(part for piece in self.pieces for part in piece)


def reads_of_step(step: int, phase: RunPhase, source: SampleSource, skipped: SkippedRanges) -> Iterator[SampleRead]:
    """Yield the samples of a step in order; steps count from 1.

    Args:
        phase: phase of the run that has the step.
        source: blend of that phase, indexed by ids of the run (`Datasets.train_after`).
    """
    first = phase.samples_before(step - 1)
    for position, sample_id in enumerate(skipped.ids(first, phase.samples_per_step), start=first):
        yield read_of(source, sample_id, position)


def read_of(source: SampleSource, sample_id: int, position: int) -> SampleRead:
    """Locate the documents of one sample of a blend."""
    assert isinstance(source, Blend), "random tokens come from no corpus"
    number, inner = source.locate(sample_id)
    stream = source.sources[number]
    assert isinstance(stream, SampleStream | ContinuedStream)
    pieces = tuple(map(tuple, stream.pieces(inner)))
    return SampleRead(position, sample_id, stream.corpus.prefix, stream.epoch_of(inner), pieces)
