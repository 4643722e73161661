"""Samples are exact, the same whatever the length of a run, and their caches are built once and never trusted blindly."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.data import epoch_index
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.epoch_index import EpochKey, build_epoch
from triaxis.engine.data.samples import SampleStream, input_lengths
from triaxis.engine.data.shuffle import permutation, random_bits
from triaxis.engine.errors import DataError

Write = Callable[..., str]
Documents = list[np.ndarray]


def stream(
    prefix: str, documents: range | None = None, *, seq_length: int = 16, seed: int = 3, vocab_size: int = 5000
) -> SampleStream:
    corpus = IndexedTokens(prefix)
    return SampleStream(
        corpus,
        documents or range(corpus.num_documents),
        seq_length=seq_length,
        seed=seed,
        cache_dir=Path(prefix).parent / "cache",
        vocab_size=vocab_size,
    )


@pytest.mark.parametrize("documents", [range(40), range(7, 29), range(38, 40)])
@pytest.mark.parametrize("seq_length", [1, 16, 37])
def test_an_epoch_is_its_stream_cut_into_samples(
    write_corpus: Write, numbered_documents: Documents, documents: range, seq_length: int
) -> None:
    samples = stream(write_corpus(numbered_documents), documents, seq_length=seq_length)
    per_epoch = samples.samples_per_epoch
    seen = []
    for epoch in range(3):
        order = permutation(len(documents), "documents", 3, epoch)
        text = np.concatenate([numbered_documents[documents.start + document] for document in order])
        assert per_epoch == (len(text) - 1) // seq_length
        expected = [
            text[start : start + seq_length + 1].tolist() for start in range(0, per_epoch * seq_length, seq_length)
        ]
        found = [samples[epoch * per_epoch + place].tokens.tolist() for place in range(per_epoch)]
        assert sorted(found) == sorted(expected)
        seen.append(found)
    if per_epoch > 4:
        assert seen[0] != seen[1] != seen[2], "each epoch has an order of its own"


def test_samples_have_the_promised_types(write_corpus: Write, numbered_documents: Documents) -> None:
    sample = stream(write_corpus(numbered_documents))[0]
    assert (sample.tokens.dtype, sample.tokens.shape) == (np.int64, (17,))
    assert (sample.loss_mask.dtype, sample.loss_mask.shape, sample.loss_mask.all()) == (np.bool_, (16,), True)


def test_empty_documents_are_stepped_over(write_corpus: Write) -> None:
    empty = np.array([], np.int64)
    samples = stream(write_corpus([empty, np.arange(9), empty, empty, np.arange(9, 20), empty]), seq_length=4)
    tokens = sorted(
        {token for sample_id in range(samples.samples_per_epoch) for token in samples[sample_id].tokens.tolist()}
    )
    assert samples.samples_per_epoch == 4
    assert len(tokens) == 4 * 4 + 1


@pytest.mark.parametrize("seq_length", [1, 5, 16, 200])
def test_lengths_are_those_of_the_documents(
    write_corpus: Write, numbered_documents: Documents, seq_length: int
) -> None:
    """Also of documents that go through several samples: `numbered_documents` has 1 to 60 tokens each."""
    document_of = np.concatenate([np.full(len(document), place) for place, document in enumerate(numbered_documents)])
    samples = stream(write_corpus(numbered_documents), seq_length=seq_length)
    for sample_id in range(2 * samples.samples_per_epoch):
        sample = samples[sample_id]
        places = document_of[sample.tokens]  # every token of these documents is another one
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        assert sample.lengths == tuple(np.diff(starts, append=seq_length + 1))
        assert sample.lengths == samples.lengths(sample_id)
        assert input_lengths(sample.lengths) == tuple(np.diff(np.append(starts[starts < seq_length], seq_length)))


def test_an_eod_token_inside_a_document_ends_nothing(write_corpus: Write) -> None:
    eod = 7
    samples = stream(write_corpus([np.full(9, eod), np.full(8, eod)]), seq_length=16)
    assert sorted(samples[0].lengths) == [8, 9]


def test_one_token_documents(write_corpus: Write) -> None:
    sample = stream(write_corpus([np.array([token]) for token in range(9)]), seq_length=8)[0]
    assert sample.lengths == (1,) * 9
    assert input_lengths(sample.lengths) == (1,) * 8


def test_first_tokens_of_documents_can_be_left_out_of_the_loss(write_corpus: Write) -> None:
    documents = [np.arange(10), np.arange(10, 14), np.arange(14, 20)]
    corpus = IndexedTokens(write_corpus(documents))
    samples = SampleStream(
        corpus,
        range(3),
        seq_length=19,
        seed=3,
        cache_dir=Path(corpus.prefix).parent / "cache",
        vocab_size=20,
        count_document_starts=False,
    )
    sample = samples[0]
    assert sorted(set(range(20)) - set(sample.tokens[1:][sample.loss_mask].tolist()) - {sample.tokens[0]}) == sorted(
        {0, 10, 14} - {sample.tokens[0]}
    )


def test_any_order_of_asking_gives_the_same_samples(write_corpus: Write, numbered_documents: Documents) -> None:
    prefix = write_corpus(numbered_documents)
    first = stream(prefix)
    forward = [first[sample_id].tokens.tolist() for sample_id in range(300)]
    again = stream(prefix)
    assert [again[sample_id].tokens.tolist() for sample_id in reversed(range(300))] == forward[::-1]


def test_the_seed_decides(write_corpus: Write, numbered_documents: Documents) -> None:
    prefix = write_corpus(numbered_documents)
    orders = [[stream(prefix, seed=seed)[i].tokens.tolist() for i in range(10)] for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]


def test_orders_are_pinned() -> None:
    """The order of the data is part of the format: this fails when a change would reshuffle every run under way."""
    assert permutation(10, "documents", 1234, 0).tolist() == [5, 6, 1, 4, 7, 8, 0, 9, 3, 2]
    assert random_bits(2, "samples", 1234, 1).tolist() == [13276394471272642502, 3496735303636144459]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**63), st.integers(0, 1000))
def test_permutations_are_permutations(count: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(count, "samples", seed, epoch)) == list(range(count))


def test_too_few_tokens_for_one_sample(write_corpus: Write) -> None:
    prefix = write_corpus([np.arange(16)])
    with pytest.raises(DataError, match=r"hold 16 tokens, but one sample takes model.seq_length \+ 1 = 17"):
        stream(prefix)
    assert stream(prefix, seq_length=15)[5].tokens.tolist() == list(range(16))


def test_a_token_outside_the_vocabulary_is_refused(write_corpus: Write, numbered_documents: Documents) -> None:
    samples = stream(write_corpus(numbered_documents), vocab_size=3)
    with pytest.raises(DataError, match=r"model\.vocab_size = 3: there is no embedding"):
        for sample_id in range(samples.samples_per_epoch):
            samples[sample_id]


def cache_file(prefix: str) -> Path:
    (path,) = (Path(prefix).parent / "cache").glob("*.index")
    return path


def test_a_second_start_reads_the_cache(
    write_corpus: Write, numbered_documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_corpus(numbered_documents)
    first = stream(prefix)[0].tokens.tolist()

    def refuse(*arguments: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(epoch_index, "build_epoch", refuse)
    assert stream(prefix)[0].tokens.tolist() == first
    with pytest.raises(AssertionError, match="built again"):
        stream(prefix, seed=4)[0]


@pytest.mark.parametrize("damage", ["truncated", "a bit flipped", "of another epoch", "emptied"])
def test_a_damaged_cache_is_built_again(
    write_corpus: Write, numbered_documents: Documents, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus(numbered_documents)
    samples = stream(prefix)
    expected = [samples[sample_id].tokens.tolist() for sample_id in range(5)]
    path = cache_file(prefix)
    whole = path.read_bytes()
    if damage == "of another epoch":
        samples[samples.samples_per_epoch]
        (other,) = {*path.parent.glob("*.index")} - {path}
        path.write_bytes(other.read_bytes())
    else:
        flipped = bytes([*whole[:-3], whole[-3] ^ 1, *whole[-2:]])
        path.write_bytes({"truncated": whole[:-8], "a bit flipped": flipped, "emptied": b""}[damage])
    again = stream(prefix)
    assert [again[sample_id].tokens.tolist() for sample_id in range(5)] == expected
    assert path.read_bytes() == whole
    assert "building it again" in caplog.text


def _ask(prefix: str, marks: str, answers: "multiprocessing.SimpleQueue[list[int]]") -> None:
    def build_and_mark(key: EpochKey, lengths: np.ndarray, num_samples: int) -> epoch_index.EpochIndex:
        Path(marks, str(os.getpid())).touch()
        time.sleep(0.3)  # long enough for all to find that there is no cache yet
        return build_epoch(key, lengths, num_samples)

    epoch_index.build_epoch = build_and_mark
    answers.put(stream(prefix)[0].tokens.tolist())


def test_processes_of_a_node_build_once(write_corpus: Write, numbered_documents: Documents, tmp_path: Path) -> None:
    prefix = write_corpus(numbered_documents)
    (marks := tmp_path / "marks").mkdir()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_ask, args=(prefix, str(marks), answers)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 6
    first = answers.get()
    assert all(answers.get() == first for _ in range(5))
    assert len(list(marks.iterdir())) == 1
    assert not list(tmp_path.rglob("*.partial"))


def test_a_cache_folder_that_cannot_be_is_named(
    write_corpus: Write, numbered_documents: Documents, tmp_path: Path
) -> None:
    prefix = write_corpus(numbered_documents)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        stream(prefix)[0]
