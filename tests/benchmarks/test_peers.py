"""The benchmark of peers runs, holds both sides to the same losses, and counts what they send (never timed here)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import peers
from benchmarks.deepspeed_peer import DeepSpeedPeer
from benchmarks.peers import SentBytes, config_of_layout, layout_of, parse, traced_peak
from tests.harness import run_ranks
from tests.launch.command_line import ROOT
from triaxis.engine.layout.rank_grid import ParallelSizes

pytestmark = pytest.mark.distributed

SIZES = {"hidden": 128, "layers": 4, "seq": 16, "vocab": 128, "microbatches": 4, "micro-batch-size": 1, "pairs": 2}


def run(num_ranks: int, layout: str, folder: Path, peer: str = "torch", *more: str) -> dict[str, Any]:
    """The benchmark's record of a toy run."""
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    words = ["-m", "benchmarks.peers", "--peer", peer, "--layout", layout, *sizes, *more]
    said = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
            *(*words, "--json", str(folder / "peers.jsonl")),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    result: dict[str, Any] = json.loads((folder / "peers.jsonl").read_text())["result"]
    assert f"{result['model']} {result['dtype']}" in said.stdout
    return result


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plain_loop_trains_the_same_model(
    model: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "results.jsonl"
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    words = ["--peer", "plain", "--model", model, "--dtype", dtype, *sizes, "--json", str(path)]
    assert peers.main(words) == 0
    record = json.loads(path.read_text())
    assert record["command"].endswith(" ".join(words)) and record["machine"]["torch"] == torch.__version__
    result = record["result"]
    assert result["largest_loss_difference"] < (2e-6 if dtype == "fp32" else 2e-2)
    assert result["speed_ratio"]["low"] <= result["speed_ratio"]["median"] <= result["speed_ratio"]["high"]
    # Weights, main grads and two moments are alive on both sides, in fp32 at least.
    assert min(result["our_peak_bytes"], result["peer_peak_bytes"]) > 16 * result["num_parameters"]
    assert f"{result['our_peak_bytes'] / result['peer_peak_bytes']:.3f}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("peer", ["plain", "tp"])
def test_sides_that_cut_samples_train_the_same_model(num_ranks: int, peer: str, tmp_path: Path) -> None:
    more = ("--kv-heads", "2", "--seq", "32", "--hidden", str(64 * num_ranks))
    result = run(num_ranks, f"cp={num_ranks}", tmp_path, peer, *more)
    assert result["largest_loss_difference"] < 2e-6
    assert min(result["our_peak_bytes"], result["peer_peak_bytes"]) > 0


@pytest.mark.slow
def test_sides_that_compute_different_things_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "make_ours", lambda config, rank: lambda microbatches: 5.0)
    monkeypatch.setattr(peers.Contest, "peak", lambda self, make: 0.0)
    words = ["--peer", "plain", "--layers", "1", "--seq", "16", "--vocab", "128", "--json", str(tmp_path / "none")]
    with pytest.raises(ValueError, match="do not train the same"):
        peers.main(words)


@pytest.mark.slow
def test_the_peak_is_that_of_one_side_alone() -> None:
    # Tensor and double of it, whatever was measured before.
    for num_bytes in (1 << 20, 4 << 20, 1 << 20):
        peak = traced_peak(lambda num_bytes=num_bytes: (kept := torch.ones(num_bytes // 4)).mul(2).sub_(kept))
        assert 2 * num_bytes <= peak < 2 * num_bytes + 4096


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--peer plain --layout tp=2", "no parallelism but cp"),
        ("--peer torch --model gpt", "train a Llama in fp32"),
        ("--peer torch --dtype bf16", "train a Llama in fp32"),
    ],
)
def test_a_peer_is_not_asked_for_what_it_has_not(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
        pytest.param(2, "dp=2", marks=pytest.mark.slow),
        pytest.param(2, "pp=2,vpp=2", marks=pytest.mark.slow),
        pytest.param(8, "tp=2,pp=2,dp=2", marks=pytest.mark.slow),
    ],
)
def test_torch_trains_the_same_model(num_ranks: int, layout: str, tmp_path: Path) -> None:
    result = run(num_ranks, layout, tmp_path)
    # fp32's rounding: the weights are the same at the start, and after two steps of warm-up and two pairs.
    assert result["largest_loss_difference"] < 2e-6
    assert result["our_peak_bytes"] > 0 and result["peer_peak_bytes"] > 0
    # Four collectives a layer, forward and backward (2205.05198, figure 5), [s, b, h] of fp32 each. Beyond them both have
    # those around embedding and head; ours gathers the inputs of two linear layers again in the backward, instead of keeping them.
    if layout == "tp=2":
        tokens = SIZES["seq"] * SIZES["microbatches"] * SIZES["micro-batch-size"]
        collective = tokens * SIZES["hidden"] * 4 // 2
        per_layer = SIZES["layers"] * collective
        assert 8 * per_layer < result["peer_sent_bytes"] < 10 * per_layer < result["our_sent_bytes"] < 12 * per_layer


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2"])
def test_megatron_core_trains_the_same_model_and_sends_as_much(layout: str, tmp_path: Path) -> None:
    result = run(2, layout, tmp_path, "megatron-core")
    assert result["largest_loss_difference"] < 2e-6
    # Beside the collectives of training both send a few numbers per step, not the same ones.
    assert result["our_sent_bytes"] == pytest.approx(result["peer_sent_bytes"], rel=0.01)


def test_deepspeed_that_is_not_installed_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.peers.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(["--layout", "pp=2", "--peer", "deepspeed"])
    assert "pip install deepspeed" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["tp=2", "pp=2,vpp=2"])
def test_deepspeed_is_not_asked_for_what_it_has_not(layout: str) -> None:
    options = parse(["--layout", layout])
    config = config_of_layout(options)
    with pytest.raises(ValueError, match="neither tensor parallelism nor an interleaved schedule"):
        DeepSpeedPeer(config, ParallelSizes(**({"tp": 1, "pp": 1, "vpp": 1, "dp": 1} | layout_of(layout))), {})


def count_some(rank: int) -> dict[str, int]:
    """One of each collective, 1,000 floats, and a message."""
    world = dist.get_world_size()
    whole, shard = torch.zeros(250 * world), torch.zeros(250)
    with SentBytes() as counter:
        dist.all_reduce(whole)
        dist.all_gather_into_tensor(whole, shard)
        dist.all_to_all_single(torch.empty_like(whole), whole)
        dist.broadcast(whole, 0)
        if rank == 0:
            dist.send(shard, 1)
        elif rank == 1:
            dist.recv(shard, 0)
    return dict(counter.sent)


@pytest.mark.slow
def test_what_a_ring_sends_is_counted() -> None:
    first, second, *_ = run_ranks(count_some, 4)
    collectives = {"allreduce_": 6000, "_allgather_base_": 3000, "alltoall_base_": 3000, "broadcast_": 3000}
    assert first == collectives | {"send": 1000}
    assert second == collectives
