"""A validation that ends early on all ranks, and the attempt after it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.resilience.runs import Trace, open_batches, run
from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.history import RunHistory
from triaxis.engine.comm.stop import Stop, StopRequest
from triaxis.engine.data.loader import Batches
from triaxis.engine.step import Engine

pytestmark = pytest.mark.distributed

CASE = Case("gpt_dropout", tp=1, pp=2, dp=2, num_layers=2, global_batch_size=4)
NUM_BATCHES = 40
SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"steps": 4},
    "eval": {"interval": 2, "steps": NUM_BATCHES},
    "checkpoint": {"interval": None},
}
"""The run saves its end and a stop alone."""


class Asking:
    """Validation batches whose batch `at` asks rank `asked` alone to stop. Each rank writes the number that it took to a file."""

    def __init__(self, batches: Batches, request: StopRequest, folder: Path, rank: int, asked: int, at: int) -> None:
        self._batches, self._request, self._folder = batches, request, folder
        self._rank, self._asked, self._at = rank, asked, at
        self._num_taken = 0
        self.consumed_samples = 0

    def next_step(self) -> list[Any]:
        if (self._rank, self._num_taken) == (self._asked, self._at):
            self._request.ask(Stop.PREEMPTED)
        self._num_taken += 1
        return self._batches.next_step()

    def close(self) -> None:
        (self._folder / f"taken_{self._rank}").write_text(str(self._num_taken))
        self._batches.close()


def opened(folder: str, asked: int, at: int, engine: Engine, request: StopRequest) -> Asking:
    batches = open_batches(engine, RunHistory())(0)
    return Asking(batches, request, Path(folder), engine.topology.rank, asked, at)


def trained(folder: Path, attempt: int = 0, asked: int = -1, at: int = -1) -> list[Trace]:
    folder.mkdir(exist_ok=True)
    validation = partial(opened, str(folder), asked, at)
    traces: list[Trace] = run_ranks(run, CASE.world_size, CASE, str(folder), SECTIONS, None, attempt, None, validation)
    return traces


def test_a_rank_that_is_asked_in_a_validation_stops_all_and_nothing_is_lost(tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight")
    before = trained(tmp_path / "cut", asked=3, at=5)
    taken = [int(path.read_text()) for path in sorted((tmp_path / "cut").glob("taken_*"))]
    after = trained(tmp_path / "cut", attempt=1)

    assert taken == [7] * CASE.world_size, "the batch in which it was asked, and the one that is posted by then"
    assert [trace.stopped for trace in before] == [Stop.PREEMPTED] * CASE.world_size
    for whole, first, second in zip(straight, before, after, strict=True):
        assert first.validated == [], "the mean over 7 of 40 batches is no validation loss"
        assert [step for step, _ in whole.validated] == [1, 3]
        assert second.validated == whole.validated
        assert first.told + second.told == whole.told
        assert second.fingerprint == whole.fingerprint
