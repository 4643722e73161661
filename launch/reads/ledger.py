"""Computes the documents that a step read, sample by sample, from the configuration.

    step  ->  positions  ->  sample ids (without skipped ranges)  ->  (corpus, sample in the corpus)  ->  document parts

The result is the same in every layout, and after any number of restarts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from triaxis.engine.config.quantities.run_phases import RunPhase
from triaxis.engine.data.blend import Blend
from triaxis.engine.data.remainder import ContinuedStream
from triaxis.engine.data.samples import DocumentPart, SampleSource, SampleStream
from triaxis.engine.data.skipped import SkippedRanges


@dataclass(frozen=True, slots=True)
class SampleRead:
    """One sample in a step.

    Attributes:
        position: index of the sample in the run, from 0.
        sample_id: index of the sample in the data, from 0; larger than `position` after skipped ranges.
        corpus: prefix of the sample's corpus.
        epoch: index of the epoch within the corpus, from 0.
        pieces: stretches of consecutive tokens in the epoch, each as document parts in order. A piece's first token is only an
            input, never a label. All its other tokens are labels. All tokens but the sample's last are inputs.
    """

    position: int
    sample_id: int
    corpus: str
    epoch: int
    pieces: tuple[tuple[DocumentPart, ...], ...]

    @property
    def parts(self) -> tuple[DocumentPart, ...]:
        """The document parts that make up the sample, in reading order."""
        return tuple(part for piece in self.pieces for part in piece)


def reads_of_step(step: int, phase: RunPhase, source: SampleSource, skipped: SkippedRanges) -> Iterator[SampleRead]:
    """Yield a step's samples in order.

    Args:
        step: step number, from 1.
        phase: run phase that contains the step.
        source: the phase's blend, indexed by sample id in the run.
        skipped: sample ids that the run leaves out.
    """
    first = phase.samples_before(step - 1)
    for position, sample_id in enumerate(skipped.ids(first, phase.samples_per_step), start=first):
        yield read_of(source, sample_id, position)


def read_of(source: SampleSource, sample_id: int, position: int) -> SampleRead:
    """Find the corpus and document parts of sample `sample_id` in a blend. `position` is its index in the run."""
    assert isinstance(source, Blend), "random tokens come from no corpus"
    number, inner = source.locate(sample_id)
    stream = source.sources[number]
    assert isinstance(stream, SampleStream | ContinuedStream)
    pieces = tuple(map(tuple, stream.pieces(inner)))
    return SampleRead(position, sample_id, stream.corpus.prefix, stream.epoch_of(inner), pieces)
