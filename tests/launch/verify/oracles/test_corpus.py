"""The oracle's own reading of a corpus is that of `engine/data`, token by token, over epochs and documents of several sequences."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.cases import Case
from tests.verify import loader_bugs
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.launch.verify.oracles.corpus import CORPUS, HEADER, rows_of_steps, with_corpus, write_corpus
from triaxis.launch.verify.rank import batches_of_steps
from triaxis.launch.verify.samples import MASKED_FRACTION


def written(folder: Path, seed: int = 7) -> Config:
    config = Case("gpt", micro_batch_size=2, num_layers=2).config()
    config = config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})
    write_corpus(config, folder)
    return with_corpus(config, folder)


def differences(config: Config) -> set[str]:
    """Return what of the microbatches differs between the oracle's reading and ours."""
    found = set()
    wanted = list(rows_of_steps(config, MASKED_FRACTION))
    got = batches_of_steps(config, Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu")))
    assert [len(step) for step in got] == [len(step) for step in wanted] and len(got) == config.train.steps
    for ours, rows in zip(chain.from_iterable(got), chain.from_iterable(wanted), strict=True):
        assert ours.sample_ids == rows.sample_ids
        for name in ("tokens", "labels", "loss_mask"):
            if not np.array_equal(getattr(ours, name).numpy(), getattr(rows, name)):
                found.add(name)
        if ours.num_tokens != rows.loss_mask.sum():
            found.add("num_tokens")
    return found


@pytest.mark.parametrize("seed", [1, 7, 1234])
def test_both_read_the_same_rows_beyond_an_epoch(tmp_path: Path, seed: int) -> None:
    config = written(tmp_path, seed)
    num_tokens = (tmp_path / f"{CORPUS}.bin").stat().st_size // 2
    assert config.train.steps is not None
    assert num_tokens < config.train.steps * config.train.global_batch_size * config.model.seq_length
    assert not differences(config)


def test_a_document_may_be_several_sequences(tmp_path: Path) -> None:
    config = written(tmp_path)
    path = tmp_path / f"{CORPUS}.idx"
    content = path.read_bytes()
    magic, version, code, num_sequences, _ = HEADER.unpack(content[: HEADER.size])
    bounds = np.array([*range(0, num_sequences, 2), num_sequences], "<i8")
    sequences = content[HEADER.size : HEADER.size + 12 * num_sequences]
    path.write_bytes(HEADER.pack(magic, version, code, num_sequences, len(bounds)) + sequences + bounds.tobytes())
    assert not differences(config)


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (loader_bugs.the_last_label_of_a_row_is_its_first_token, {"labels"}),
        (loader_bugs.the_last_label_of_a_row_is_not_counted, {"loss_mask", "num_tokens"}),
        (loader_bugs.each_sample_begins_one_token_early, {"tokens", "labels"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bug_of_the_loader_is_seen(plant, what, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((loader_bugs.Batches, "_read_microbatch"), (loader_bugs.SampleStream, "parts_at")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    plant()
    assert differences(written(tmp_path)) == what
