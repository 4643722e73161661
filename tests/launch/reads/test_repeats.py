"""The ledger of a run: random runs of five attempts, three phases and two rollbacks read each token once, and a repeat is named."""

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.run_phases import at_phase, run_phases
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.data.datasets import open_run_datasets
from triaxis.engine.data.samples import SampleSource
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.launch.reads.ledger import read_of
from triaxis.launch.reads.repeats import ReadSpan, RunReads, reads_of_run

NUM_TOKENS = 2000
NUM_STEPS = 34


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Three phases over two corpora of 2,000 tokens: 12 steps of 4 samples, 12 of another blend, 10 of longer samples."""
    folder = tmp_path_factory.mktemp("corpora")
    for number, name in enumerate(("web", "code")):
        ends = np.cumsum(np.random.default_rng(number).integers(1, 61, 200))
        ends = np.append(ends[ends < NUM_TOKENS], NUM_TOKENS)
        with IndexedWriter(str(folder / name), "uint16") as writer:
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                writer.add_document(np.arange(start, end) % 250)
    web, code = folder / "web", folder / "code"
    words = [
        "model={num_layers: 2, hidden_size: 16, num_attention_heads: 2, seq_length: 16, vocab_size: 257}",
        f"data={{train: [{{path: {web}, weight: 2}}, {code}], split: [1, 0, 0], cache_dir: {folder / 'cache'}}}",
        "train={global_batch_size: 4}",
        "checkpoint.interval=5",
        f"phases=[{{name: a, until: 768}}, {{name: b, until: 1536, data.train: [{code}, {{path: {web}, weight: 3}}]}}, "
        "{name: c, until: 2736, model.seq_length: 40, train.global_batch_size: 3}]",
    ]
    config = load_config(None, words)
    assert run_phases(config)[-1].end_step == NUM_STEPS
    return config


ATTEMPT = st.tuples(st.integers(0, 6), st.integers(0, 12))
"""Steps that are lost between the attempt before and this one, and steps that it makes."""
ROLLBACK = st.tuples(st.integers(0, NUM_STEPS - 1), st.integers(0, 5))
"""The step that goes wrong, and how many steps before it the checkpoint is."""


@settings(max_examples=25, deadline=None)
@given(
    st.lists(ATTEMPT, min_size=5, max_size=5), st.lists(ROLLBACK, min_size=2, max_size=2, unique_by=lambda one: one[0])
)
def test_random_runs_read_each_token_once(
    config: Config, attempts: list[tuple[int, int]], rollbacks: list[tuple[int, int]]
) -> None:
    found = reads_of(spans_of(config, attempts, dict(rollbacks)))
    assert (found.repeats, found.jumps) == ([], [])
    assert found.num_samples == run_phases(config)[-1].samples_before(NUM_STEPS)
    for epoch in found.epochs:
        assert epoch.labels == NUM_TOKENS - 1
        assert epoch.left_out >= 0
        assert not epoch.is_over or epoch.left_out < 16 + 40


def test_an_attempt_that_forgets_a_skipped_sample_repeats_one(config: Config) -> None:
    """The attempt counts from where it should, but its samples are one behind: the last one is read again."""
    skipped = SkippedRanges.of([(5, 6)])
    # It spells the corpora otherwise, which makes no other ones of them.
    sources = [
        each.model_copy(update={"path": f"{Path(each.path).parent}/./{each.title}"}) for each in config.data.train
    ]
    respelled = config.model_copy(update={"data": config.data.model_copy(update={"train": sources})})
    spans = [ReadSpan(0, 8, 0, config, skipped), ReadSpan(8, 11, 1, respelled, SkippedRanges())]
    found = reads_of(spans)
    assert not found.jumps
    again = 8 * 4  # the id that the ninth step begins with, and that the eighth has ended with
    source = open_run_datasets(config).train_after(skipped)
    assert {(repeat.step, repeat.earlier_step) for repeat in found.repeats} == {(9, 8)}
    assert sum(repeat.length for repeat in found.repeats) == 16
    read = read_of(source, again, 0).pieces
    documents = {part.document for piece in read for part in piece}
    assert {repeat.document for repeat in found.repeats} <= documents
    first = found.repeats[0]
    part = next(part for piece in read for part in piece if part.document == first.document)
    assert part.first <= first.first < part.first + part.length


def test_a_batch_that_changes_on_the_way_is_a_jump(config: Config) -> None:
    entries = [{**entry, "train.global_batch_size": 8} for entry in config.phases]
    larger = at_phase(config, "a").model_copy(update={"phases": entries})
    found = reads_of([ReadSpan(0, 4, 0, config, SkippedRanges()), ReadSpan(4, 6, 1, larger, SkippedRanges())])
    assert found.jumps == ["step 5 (attempt 2) begins with sample 32 of the run, and 16 were consumed before it"]


def test_steps_without_a_record_are_a_jump(config: Config) -> None:
    found = reads_of([ReadSpan(0, 4, 0, config, SkippedRanges()), ReadSpan(5, 6, 0, config, SkippedRanges())])
    assert found.jumps == ["step 6 (attempt 1) begins with sample 20 of the run, and 16 were consumed before it"]


def reads_of(spans: list[ReadSpan]) -> RunReads:
    def open_source(config: Config, skipped: SkippedRanges) -> SampleSource:
        return open_run_datasets(config).train_after(skipped)

    return reads_of_run(spans, open_source, lambda config, corpus: NUM_TOKENS - 1)


def spans_of(config: Config, attempts: list[tuple[int, int]], rollbacks: dict[int, int]) -> list[ReadSpan]:
    """The steps as they were made last, by a run that the attempts and rollbacks have interrupted."""
    made: list[tuple[int, SkippedRanges]] = []
    skipped = SkippedRanges()
    for number, (lost, num_steps) in enumerate(attempts):
        del made[max(0, len(made) - lost) :]
        end = NUM_STEPS if number == len(attempts) - 1 else min(NUM_STEPS, len(made) + num_steps)
        while len(made) < end:
            step = len(made)
            phase = next(phase for phase in run_phases(config) if step < phase.end_step)
            if step in rollbacks:
                back = max(phase.first_step, step - rollbacks.pop(step))
                skipped = skipped.with_([skipped.span(phase.samples_before(step), phase.samples_per_step)])
                del made[back:]
                continue
            made.append((number, skipped))
    spans, step = [], 0
    for (attempt, left_out), group in groupby(made):
        count = len(list(group))
        spans.append(ReadSpan(step, step + count, attempt, config, left_out))
        step += count
    return spans
