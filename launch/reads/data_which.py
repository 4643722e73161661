"""Runs `triaxis data which`, which prints the documents that a run's step has read."""

import argparse
from pathlib import Path

from triaxis.engine.config.quantities.plan import planned_steps
from triaxis.engine.config.quantities.run_phases import at_phase, run_phases
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.matching import find_recorded
from triaxis.engine.data.corpus.own import open_corpus
from triaxis.engine.data.corpus.record import read_record
from triaxis.engine.data.corpus.tokenizers import BYTES, load_tokenizer
from triaxis.engine.data.datasets import open_run_datasets
from triaxis.engine.data.samples import DocumentPart
from triaxis.engine.errors import attempt_name
from triaxis.launch.reads.ledger import SampleRead, reads_of_step
from triaxis.launch.reads.spans import read_trained, span_of_step
from triaxis.launch.report.record import RunRecord
from triaxis.launch.start.command_line import CommandParser, print_json, refuse

EXAMPLES = """examples:
  triaxis data which --run runs/gpt_tiny --step 120
  triaxis data which --run runs/gpt_tiny --step 120 --text
"""
MOST_CHARACTERS = 200
"""Most characters of each document part that `--text` shows."""


def add_arguments(parser: CommandParser) -> None:
    summary = "list the documents that a step of a run has read, sample by sample"
    which = parser.add_verb("which", summary, "--run RUN --step S [--text]", EXAMPLES)
    which.set_defaults(verb_function=which_documents)
    which.add_argument("--run", required=True, type=Path, metavar="RUN", help="directory of the run")
    which.add_argument("--step", required=True, type=int, metavar="S", help="number of the step, from 1")
    which.add_argument("--text", action="store_true", help="show the beginning of each part as text")


def which_documents(args: argparse.Namespace) -> int:
    """Print the samples of the step `args.step`, each with its document parts; return 0.

    Raises:
        DataError: the run's config cannot be read, or the run was trained on random tokens.
        ConfigError: the run has no such step.
    """
    run, config = read_trained(args.run)
    num_steps = planned_steps(config) or 0
    if not 1 <= args.step <= num_steps:
        refuse([f"--step {args.step}: the run has the steps 1 to {num_steps:,}."])
    span = span_of_step(run, config, args.step)
    config, skipped = span.config, span.skipped
    phase = next(phase for phase in run_phases(config) if args.step <= phase.end_step)
    config = at_phase(config, phase.name) if config.phases else config
    datasets = open_run_datasets(config)
    reads = list(reads_of_step(args.step, phase, datasets.train_after(skipped), skipped))
    readers = {read.corpus: _Reader(read.corpus, config) for read in reads} if args.text else {}
    print("\n".join(_title(args.step, config, run)))
    names = {source.path: f"{source.name}: " if source.name else "" for source in config.data.train}
    for read in reads:
        epoch = f", epoch {read.epoch}" if read.epoch else ""
        moved = f" (id {read.sample_id:,})" if read.sample_id != read.position else ""
        print(f"sample {read.position:,}{moved}  {names[read.corpus]}{read.corpus}{epoch}")
        for part in read.parts:
            print(f"  document {part.document:,}  tokens {part.first:,} to {part.first + part.length - 1:,}")
            if read.corpus in readers:
                print(f"    {readers[read.corpus].text(part)!r}")
    print_json(args, [_as_json(read, readers.get(read.corpus)) for read in reads])
    return 0


class _Reader:
    """A corpus that a run reads, with its tokenizer.

    The tokenizer is the one that the corpus records. If there is no record, it is the run's tokenizer.
    """

    def __init__(self, prefix: str, config: Config) -> None:
        record = read_record(prefix)
        name = find_recorded(prefix, record) if record is not None else config.data.tokenizer or BYTES
        self._corpus, self._tokenizer = open_corpus(prefix, config.model.own), load_tokenizer(name)

    def text(self, part: DocumentPart) -> str:
        """Decode the beginning of a document part, at most MOST_CHARACTERS characters."""
        # A token is usually one character or more, so this many tokens are enough.
        last = part.first + min(part.length, MOST_CHARACTERS)
        return self._tokenizer.decode(self._corpus.tokens(part.document, part.first, last).tolist())[:MOST_CHARACTERS]


def _title(step: int, config: Config, run: RunRecord) -> list[str]:
    made = {record["step"]: record.get("attempt", 0) for record in run.steps}
    state = f"made by {attempt_name(made[step])}" if step in made else "not made yet"
    return [f"step {step:,}, {state}: {config.train.global_batch_size:,} samples of {config.model.seq_length:,} tokens"]


def _as_json(read: SampleRead, reader: _Reader | None) -> dict[str, object]:
    texts = [{} if reader is None else {"text": reader.text(part)} for part in read.parts]
    return {
        "position": read.position,
        "sample_id": read.sample_id,
        "corpus": read.corpus,
        "epoch": read.epoch,
        "parts": [part._asdict() | text for part, text in zip(read.parts, texts, strict=True)],
    }
