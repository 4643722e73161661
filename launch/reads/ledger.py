"""The reads of a step: the documents behind each sample, computed and never recorded (no torch here).

    step  ->  positions  ->  sample ids (without skipped ranges)  ->  (corpus, its own sample)  ->  parts of documents

The samples of a step follow from the configuration, the number of the step and the skipped ranges, in every layout. So a run that
was made on any number of ranks, with any number of restarts, has read what this module says.
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
        position: in the run, from 0.
        sample_id: of the data, from 0; above the position where ranges were skipped.
        corpus: prefix.
        epoch: of the corpus, from 0.
        pieces: parts of documents, in order, by tokens that follow each other in the epoch; no label is the first token of a piece,
            and the last token of the sample is a label only.
    """

    position: int
    sample_id: int
    corpus: str
    epoch: int
    pieces: tuple[tuple[DocumentPart, ...], ...]

    @property
    def parts(self) -> tuple[DocumentPart, ...]:
        """Return the parts of all pieces."""
        return tuple(part for piece in self.pieces for part in piece)


def reads_of_step(step: int, phase: RunPhase, source: SampleSource, skipped: SkippedRanges) -> Iterator[SampleRead]:
    """Yield the samples of a step, which counts from 1, in order.

    Args:
        phase: of the run, in which the step is.
        source: the blend of that phase, by ids of the run (`Datasets.train_after`).
    """
    first = phase.samples_before(step - 1)
    for position, sample_id in enumerate(skipped.ids(first, phase.samples_per_step), start=first):
        yield read_of(source, sample_id, position)


def read_of(source: SampleSource, sample_id: int, position: int) -> SampleRead:
    """Return what one sample of a blend of corpora is made of."""
    assert isinstance(source, Blend), "random tokens come from no corpus"
    number, inner = source.locate(sample_id)
    stream = source.sources[number]
    assert isinstance(stream, SampleStream | ContinuedStream)
    pieces = tuple(map(tuple, stream.pieces(inner)))
    return SampleRead(position, sample_id, stream.corpus.prefix, stream.epoch_of(inner), pieces)
