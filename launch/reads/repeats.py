"""Finds the tokens that a run read twice or left out, over all its attempts.

    attempt 0   runs steps 1 .. 43                          steps 1 .. 40 count as attempt 0's
    attempt 1   resumes after 40, runs steps 41 .. 60       steps 41 .. 60 count as attempt 1's

Within one epoch each token in a corpus should be predicted once. So labels, the predicted tokens, are counted by (corpus, epoch,
document). Attempts may have different seeds, blends or sequence lengths. A sample has stretches of tokens that follow each other
in the epoch. Each stretch's first token is not a label.

In an epoch that is over, every label must have been read, except labels in skipped samples. A few more may be unread: fewer than
the sum of the different sequence lengths that the run used.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from triaxis.engine.config.quantities.run_phases import RunPhase, at_phase, run_phases
from triaxis.engine.config.schema.extension_parts import OWN_CORPUS
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.samples import SampleSource
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import attempt_name
from triaxis.launch.reads.ledger import SampleRead, read_of, reads_of_step

Place = tuple[str, int, int]
"""A document in one epoch: (corpus, epoch, document)."""


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Consecutive steps that the same attempt ran last, with the same skipped sample ids.

    A later attempt may run steps again.

    Attributes:
        first_step, end_step: the span has the steps first_step + 1 .. end_step, counted from 1.
        attempt: index of that attempt.
        config: configuration used by the attempt.
        skipped: sample ids that these steps left out.
    """

    first_step: int
    end_step: int
    attempt: int
    config: Config
    skipped: SkippedRanges

    def parts(self) -> Iterator[tuple[RunPhase, Config, range]]:
        """Yield (phase, its config, steps counted from 0) for each phase that overlaps the span."""
        for phase in run_phases(self.config):
            steps = range(max(self.first_step, phase.first_step), min(self.end_step, phase.end_step))
            if steps:
                yield phase, at_phase(self.config, phase.name) if phase.name else self.config, steps


@dataclass(frozen=True, slots=True)
class Repeat:
    """Tokens `first` .. `first + length - 1` in a document, predicted twice in an epoch.

    `earlier_step` and `step` are the training steps, from 1. They are equal if one step predicted the tokens twice.
    """

    corpus: str
    epoch: int
    document: int
    first: int
    length: int
    step: int
    earlier_step: int


@dataclass(frozen=True, slots=True)
class EpochRead:
    """Label counts for one epoch of a corpus.

    Attributes:
        labels: number of labels in the epoch, which are all tokens except the first.
        read: number of labels that steps have read.
        skipped: number of unread labels in skipped samples.
        is_over: whether a later epoch has begun.
    """

    corpus: str
    epoch: int
    labels: int
    read: int
    skipped: int
    is_over: bool

    @property
    def left_out(self) -> int:
        """Number of labels that no step has read and no skipped sample contains."""
        return self.labels - self.read - self.skipped


@dataclass(frozen=True, slots=True)
class RunReads:
    """The samples, repeated tokens and label counts of a whole run.

    Attributes:
        num_samples: number of samples that the steps consumed.
        repeats: tokens that were read twice.
        epochs: label counts per epoch.
        jumps: messages about steps whose samples do not follow the previous step's samples.
    """

    num_samples: int
    repeats: Sequence[Repeat]
    epochs: Sequence[EpochRead]
    jumps: Sequence[str]


def reads_of_run(
    spans: Sequence[ReadSpan],
    open_source: Callable[[Config, SkippedRanges], SampleSource],
    labels_of: Callable[[Config, str], int],
) -> RunReads:
    """Find the labels (tokens to predict) that the steps of a run read.

    The result has the tokens that were predicted twice in one epoch, the numbers of read and skipped labels per corpus
    and epoch, and a message for each step whose samples do not follow the previous step's.

    Args:
        spans: spans that cover all steps, in order.
        open_source: function (config, skipped ranges) -> the config's samples, indexed by sample id in the run.
        labels_of: function (config, corpus) -> number of labels per epoch.
    """
    read: dict[Place, list[tuple[int, int, int]]] = {}
    left_out: dict[Place, list[tuple[int, int, int]]] = {}
    jumps: list[str] = []
    next_position, num_samples, configs = 0, 0, dict[str, Config]()
    names: dict[Hashable, str] = {}
    identity = cache(_identity)

    def name_of(prefix: str) -> str:
        """Return the name under which a corpus was read first, because attempts may spell its path differently."""
        return names.setdefault(identity(prefix), prefix)

    for span in spans:
        for phase, config, steps in span.parts():
            source = open_source(config, span.skipped)
            if (position := phase.samples_before(steps.start)) != next_position:
                jumps.append(
                    f"step {steps.start + 1:,} ({attempt_name(span.attempt)}) begins with sample {position:,} of the run, and "
                    f"{next_position:,} were consumed before it"
                )
            for step in steps:
                for one in reads_of_step(step + 1, phase, source, span.skipped):
                    configs.setdefault(name_of(one.corpus), config)
                    _add(read, name_of(one.corpus), one, step + 1)
            last = phase.samples_before(steps.stop)
            for sample_id in _skipped_between(span.skipped, position, last):
                one = read_of(source, sample_id, position)
                _add(left_out, name_of(one.corpus), one, 0)
            num_samples, next_position = num_samples + last - position, last
    repeats = [repeat for place in sorted(read) for repeat in _overlaps(place, read[place])]
    return RunReads(num_samples, repeats, _epochs(read, left_out, configs, labels_of), jumps)


def _identity(prefix: str) -> Hashable:
    """Return a key that two names of the same corpus share. An extension's corpus has its name as the key."""
    return prefix if prefix.startswith(OWN_CORPUS) else IndexedTokens(prefix).identity


def _add(places: dict[Place, list[tuple[int, int, int]]], corpus: str, one: SampleRead, step: int) -> None:
    for piece in one.pieces:
        for number, part in enumerate(piece):
            first = part.first + (number == 0)  # the first token of a piece is no label
            if first < part.first + part.length:
                place = (corpus, one.epoch, part.document)
                places.setdefault(place, []).append((first, part.first + part.length, step))


def _skipped_between(skipped: SkippedRanges, position: int, end: int) -> Iterator[int]:
    """Yield the ids skipped just before or between the samples at run positions `position` .. `end - 1`."""
    before = skipped.id_at(position - 1) if position else -1
    for start, stop in skipped.ranges:
        yield from range(max(start, before + 1), min(stop, skipped.id_at(end - 1)))


def _overlaps(place: Place, intervals: list[tuple[int, int, int]]) -> Iterator[Repeat]:
    """Yield a `Repeat` for each interval (first, end, step) that begins before an earlier one ends.

    `step` is the training step that read the tokens first .. end - 1. The repeat has the tokens that the interval shares with the
    earlier interval that ends last.
    """
    reached, by = 0, 0
    for first, end, step in sorted(intervals):
        if first < reached:
            earlier, later = sorted((by, step))
            yield Repeat(*place, first, min(end, reached) - first, later, earlier)
        if end > reached:
            reached, by = end, step


def _epochs(
    read: dict[Place, list[tuple[int, int, int]]],
    left_out: dict[Place, list[tuple[int, int, int]]],
    configs: dict[str, Config],
    labels_of: Callable[[Config, str], int],
) -> list[EpochRead]:
    covered: dict[tuple[str, int], int] = {}
    for (corpus, epoch, _), intervals in read.items():
        covered[corpus, epoch] = covered.get((corpus, epoch), 0) + _union(intervals)
    absent: dict[tuple[str, int], int] = {}
    for (corpus, epoch, document), intervals in left_out.items():
        # Tokens in a skipped sample count as read if some step did read them.
        others = _union([*intervals, *read.get((corpus, epoch, document), [])])
        own = others - _union(read.get((corpus, epoch, document), []))
        absent[corpus, epoch] = absent.get((corpus, epoch), 0) + own
    last = {corpus: max(epoch for name, epoch in covered if name == corpus) for corpus, _ in covered}
    return [
        EpochRead(
            corpus,
            epoch,
            labels_of(configs[corpus], corpus),
            count,
            absent.get((corpus, epoch), 0),
            epoch < last[corpus],
        )
        for (corpus, epoch), count in sorted(covered.items())
    ]


def _union(intervals: Sequence[tuple[int, int, int]]) -> int:
    """Count the tokens first .. end - 1 that at least one interval covers.

    An interval is (first, end, training step that read the tokens).
    """
    total = reached = 0
    for first, end, _ in sorted(intervals):
        total += max(0, end - max(first, reached))
        reached = max(reached, end)
    return total
