"""Runs `triaxis data repeats`, which finds tokens read twice or left out."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from triaxis.engine.config.quantities.run_phases import data_segments
from triaxis.engine.config.tree import Config
from triaxis.engine.data.blend import Blend
from triaxis.engine.data.datasets import open_run_datasets
from triaxis.engine.data.remainder import ContinuedStream
from triaxis.engine.data.samples import SampleSource, SampleStream
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import counted
from triaxis.launch.reads.repeats import ReadSpan, RunReads, reads_of_run
from triaxis.launch.reads.spans import read_trained, spans_of
from triaxis.launch.report.record import RunRecord
from triaxis.launch.start.command_line import CommandParser, print_json

EXAMPLES = """examples:
  triaxis data repeats --run runs/gpt_tiny
"""
MOST_SHOWN = 20


def add_arguments(parser: CommandParser) -> None:
    summary = "find tokens that a run has read twice in an epoch, or left out, over all its attempts"
    repeats = parser.add_verb("repeats", summary, "--run RUN", EXAMPLES)
    repeats.set_defaults(verb_function=find_repeats)
    repeats.add_argument("--run", required=True, type=Path, metavar="RUN", help="directory of the run")


def find_repeats(args: argparse.Namespace) -> int:
    """Print how many tokens in each epoch a run has read, and which tokens twice.

    Return 1 for a repeat, a jump in the samples, or a finished epoch that left out too many labels, else 0. Too many means at
    least the sum of the run's different sequence lengths.

    Raises:
        DataError: the run's config cannot be read, or the run was trained on random tokens.
    """
    run, config = read_trained(args.run)
    spans = list(spans_of(run, config))
    sources = _Sources()
    found = reads_of_run(spans, sources.open, sources.labels_of)
    allowed = sum({segment.seq_length for span in spans for segment in data_segments(span.config)})
    lost = [epoch for epoch in found.epochs if epoch.is_over and epoch.left_out >= allowed]
    is_bad = bool(found.repeats or found.jumps or lost)
    print("\n".join(_lines(run, spans, found, allowed)))
    epochs = [{**asdict(epoch), "left_out": epoch.left_out} for epoch in found.epochs]
    repeats = [asdict(repeat) for repeat in found.repeats]
    print_json(args, {"samples": found.num_samples, "repeats": repeats, "epochs": epochs, "jumps": found.jumps})
    return int(is_bad)


class _Sources:
    """A cache of open datasets, shared by configurations that describe the same samples."""

    def __init__(self) -> None:
        self._opened: dict[str, SampleSource] = {}

    def open(self, config: Config, skipped: SkippedRanges) -> SampleSource:
        """Open the training samples that a config describes, indexed by sample id in the run."""
        key = repr((data_segments(config), config.train.seed, config.data, skipped.ranges))
        if key not in self._opened:
            self._opened[key] = open_run_datasets(config).train_after(skipped)
        return self._opened[key]

    def labels_of(self, config: Config, corpus: str) -> int:
        """Count the labels in one epoch of a corpus: all tokens except the first."""
        source = self.open(config, SkippedRanges())
        assert isinstance(source, Blend), "random tokens are of no corpus"
        streams = [each.stream if isinstance(each, ContinuedStream) else each for each in source.sources]
        found = [each for each in streams if isinstance(each, SampleStream) and each.corpus.prefix == corpus]
        return found[0].num_tokens - 1


def _lines(run: RunRecord, spans: list[ReadSpan], found: RunReads, allowed: int) -> Iterator[str]:
    attempts = sorted({span.attempt for span in spans})
    steps = sum(span.end_step - span.first_step for span in spans)
    yield f"{run.path}: {counted(steps, 'step')} of {counted(len(attempts), 'attempt')}, {counted(found.num_samples, 'sample')}"
    yield f"steps repeated after a resume: {sum(map(len, run.replaced)):,}"
    yield from (f"jump: {jump}" for jump in found.jumps)
    for epoch in found.epochs:
        skipped = f", {epoch.skipped:,} of skipped samples" if epoch.skipped else ""
        rest = ""
        if epoch.is_over:
            rest = f", {epoch.left_out:,} left over" if epoch.left_out < allowed else f", {epoch.left_out:,} LEFT OUT"
        yield f"{epoch.corpus}, epoch {epoch.epoch}: {epoch.read:,} of {epoch.labels:,} tokens read{skipped}{rest}"
    for repeat in found.repeats[:MOST_SHOWN]:
        last = repeat.first + repeat.length - 1
        yield (
            f"read twice: {repeat.corpus}, epoch {repeat.epoch}, document {repeat.document:,}, tokens {repeat.first:,} to "
            f"{last:,}, in step {repeat.earlier_step:,} and in step {repeat.step:,}"
        )
    if len(found.repeats) > MOST_SHOWN:
        yield f"and {len(found.repeats) - MOST_SHOWN:,} more"
    if not found.repeats:
        yield "nothing was read twice in an epoch"
