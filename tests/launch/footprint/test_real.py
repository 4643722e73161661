"""A rank's steps on real tensors in a fake world: the same calls as on tensors without memory, on a device that is here."""

import math

import pytest
import torch

from tests.launch.command_line import ROOT
from tests.parity.cases import Case
from triaxis.engine.errors import TopologyError
from triaxis.launch.cli import main
from triaxis.launch.footprint.real import RealSteps, real_steps
from triaxis.launch.footprint.run import Footprint, Footprints
from triaxis.models.gpt.chunk import build_chunks

pytestmark = pytest.mark.distributed

RANKS = [
    (Case("gpt", tp=2, pp=2, vpp=2, dp=64, sequence_parallel=True, dtype="fp32", global_batch_size=128), 131),
    (Case("qwen", tp=4, pp=4, dp=2, recompute=("full", "uniform", 1), dtype="bf16"), 31),
    (Case("gpt_dropout", pp=2, dp=4, recompute=("selective", "uniform", 1)), 0),
]


def both(case: Case, rank: int, device: str) -> tuple[RealSteps, Footprint]:
    config = case.config()
    real = real_steps(config, rank, build_chunks, torch.device(device), num_steps=2)
    return real, Footprints(config, build_chunks, full=True).of(rank)


@pytest.mark.parametrize(("case", "rank"), RANKS, ids=str)
def test_a_rank_calls_what_it_calls_on_tensors_without_memory(case: Case, rank: int) -> None:
    real, counted = both(case, rank, "cpu")
    assert real.coordinates == counted.coordinates
    assert real.events == counted.events != ()
    assert len(real.seconds) == 2 and all(0 < seconds < math.inf for seconds in real.seconds)
    assert real.peak_allocated_bytes is None


def test_there_are_no_more_ranks_than_the_layout_has() -> None:
    with pytest.raises(TopologyError, match="rank 4 does not exist"):
        real_steps(Case("gpt", tp=4).config(), 4, build_chunks, torch.device("cpu"))


def test_the_command_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["footprint", "--config", str(ROOT / "configs" / "gpt_tiny.yaml"), "runtime.device=cpu"]
    assert main([*command, "--layout", "tp=2,pp=2,dp=2", "--rank", "5", "train.global_batch_size=8", "--real"]) == 0
    out = capsys.readouterr().out
    assert "on the CPU, as if the network took no time" in out
    (calls,) = [line.split()[2:] for line in out.splitlines() if "calls sent" in line]
    assert calls[0] == calls[1] != "0"
    assert main([*command, "--layout", "tp=2,pp=2,dp=2", "--replay", "--real"]) == 2
    assert "Leave one out" in capsys.readouterr().err


class ReachedError(Exception):
    """The end of a test on a GPU that is not here."""


def test_the_peak_is_reset_where_cuda_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator has no devices before that: `Invalid device argument`."""
    calls: list[str] = []

    def reset(device: torch.device) -> None:
        raise ReachedError(*calls, device)

    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    with pytest.raises(ReachedError) as reached:
        real_steps(Case("gpt").config(), 0, build_chunks, torch.device("cuda", 0))
    assert reached.value.args == ("init", torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "rank"), [*(pytest.param(*each, marks=pytest.mark.slow) for each in RANKS[:2]), RANKS[2]], ids=str
)
def test_a_rank_on_a_card(case: Case, rank: int) -> None:
    real, counted = both(case, rank, "cuda")
    assert real.events == counted.events
    assert real.peak_allocated_bytes is not None and real.peak_reserved_bytes is not None
    state = sum(counted.state.values())
    assert state < real.peak_allocated_bytes <= real.peak_reserved_bytes
