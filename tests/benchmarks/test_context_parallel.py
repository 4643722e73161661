"""The benchmark of context parallelism runs, and its three sides train the same model (never timed here)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT

SIZES = {"hidden": 128, "layers": 2, "seq": 32, "vocab": 128, "microbatches": 2, "kv-heads": 2, "pairs": 2}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_sides_train_the_same_model(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, "-m", "benchmarks.context_parallel", *sizes, "--hidden", str(64 * num_ranks), "--json", str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line)["result"] for line in path.read_text().splitlines()]
    assert [result["peer"] for result in results] == ["ours with tp and sequence parallelism", "plain PyTorch"]
    for result in results:
        assert result["layout"] == f"cp={num_ranks}" and result["num_pairs"] == SIZES["pairs"]
        # fp32's rounding: the weights are the same at the start, and after two steps of warm-up and two pairs.
        assert result["largest_loss_difference"] < 2e-6
        assert min(result["our_peak_bytes"], result["peer_peak_bytes"]) > 0
