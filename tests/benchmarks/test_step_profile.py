"""The profile of a step runs, adds up, and sees every wait (counted, never timed)."""

import re

import pytest
import torch

from benchmarks import step_profile
from tests.harness import run_ranks
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

ONE_RANK = [f"parallel.{size}=1" for size in ("tp", "pp", "vpp", "dp")]
TOY = ["model.num_layers=1", "model.seq_length=16", "model.hidden_size=32", "train.global_batch_size=8"]


def test_one_rank_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*ONE_RANK, "parallel.sequence_parallel=false", *TOY]
    step_profile.main(["configs/gpt_tiny.yaml", *overrides, "--steps", "2", "--profiled", "1", "--top", "4"])
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"│ (\S[^│]*?) +│ +(-?[\d.]+) │ +-?[\d.]+% │", printed))
    parts = [
        "compiled functions, CPU",
        "Python and its operators, CPU",
        "waiting for calls, off CPU",
        "off CPU elsewhere",
    ]
    # Four numbers rounded to 0.01 ms.
    assert sum(float(rows[part]) for part in parts) == pytest.approx(float(rows["wall"]), abs=0.03)
    assert float(rows["waiting for calls, off CPU"]) == 0.0
    assert "run_backward" in printed


def waited_calls(rank: int) -> tuple[dict[str, int], list[str]]:
    """What `timed_waits` counted over a step, and what the ledger wrote down."""
    config = Config.model_validate(
        {
            "model": {
                "num_layers": 1,
                "hidden_size": 16,
                "num_attention_heads": 2,
                "seq_length": 8,
                "vocab_size": 128,
            },
            "data": {"synthetic": True},
            "train": {"steps": 1, "global_batch_size": 2},
            "parallel": {"tp": 2, "sequence_parallel": True},
            "optimizer": {"lr": 1e-3},
        }
    )
    topology = Topology(RankGrid(ParallelSizes(tp=2)), rank, torch.device("cpu"), kv_heads=2)
    engine = build(resolve_recompute(config, topology.sizes), topology, build_chunks)
    batches = Batches(
        SyntheticDataset(1, 128, 8),
        global_batch_size=2,
        micro_batch_size=1,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device="cpu",
    )
    original = Pending.wait
    with step_profile.timed_waits(topology.ledger) as waits:
        engine.train_step(batches.next_step(), lr=1e-3)
    assert Pending.wait is original
    batches.close()
    return dict(waits.calls), [f"{e.axis}: {e.purpose}" for e in topology.ledger.events if e.phase == "wait"]


@pytest.mark.distributed
def test_every_wait_is_seen() -> None:
    for counted, written in run_ranks(waited_calls, 2):
        assert counted == {name: written.count(name) for name in written}
        assert counted["tp: embedding forward"] == 2
