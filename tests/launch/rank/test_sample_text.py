"""The sample text of a run that is asked to stop while the model writes it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.models.inference.test_generate import PROMPT
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.comm.agreement import StopFlags
from triaxis.engine.comm.stop import Stop, StopRequest
from triaxis.launch.rank import sample_text

pytestmark = pytest.mark.distributed

NUM_TOKENS = 12


class AskedAfter(StopRequest):
    """A request that comes when the flags are read for the n-th time."""

    def __init__(self, rank: int, num_reads: int | None) -> None:
        super().__init__(rank)
        self._reads_left = num_reads

    def flags(self) -> StopFlags:
        if self._reads_left is not None:
            self._reads_left -= 1
            if self._reads_left == 0:
                self.ask(Stop.PREEMPTED)
        return super().flags()


class Spelled:
    """A tokenizer whose text is the list of ids."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def written(rank: int, case: Case, asked: int, num_reads: int) -> list[tuple[str, str | None]]:
    """What a rank gets undisturbed, when rank `asked` is asked at its n-th token, and when the stop was agreed before."""
    engine, batches = build_rank(rank, case)
    batches.close()
    config: Any = engine.config
    telemetry = config.telemetry.model_copy(update={"sample_tokens": NUM_TOKENS})
    data = config.data.model_copy(update={"synthetic": False, "tokenizer": "bytes"})
    engine.config = config.model_copy(update={"telemetry": telemetry, "data": data})
    sample_text.load_tokenizer = lambda name: Spelled()  # type: ignore[assignment,return-value]
    valid: Any = [SimpleNamespace(tokens=PROMPT)]
    agreed = StopRequest(rank)
    agreed.decide((1.0, 0.0))
    stop_signals = AskedAfter(rank, num_reads if rank == asked else None)
    return [sample_text.write_sample(engine, valid, stop) for stop in (StopRequest(rank), stop_signals, agreed)]


def test_all_ranks_end_the_text_with_the_same_token() -> None:
    case = Case("gpt", dp=2, num_layers=2, global_batch_size=4)
    for whole, cut, none in run_ranks(written, case.world_size, case, 1, 6):
        assert whole[1] is not None and len(whole[1].split()) == NUM_TOKENS
        assert cut == (whole[0], " ".join(whole[1].split()[:6]))
        assert none == ("", None)
