"""Our layer of experts computes what Megatron-Core's does, with both forms of its dispatch (never timed here)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lacking import need_package
from tests.launch.command_line import ROOT


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("more", [(), ("--shared", "1")], ids=["routed", "shared"])
def test_both_sides_compute_the_same(more: tuple[str, ...], tmp_path: Path) -> None:
    need_package("megatron.core", "pip install 'megatron-core>=0.16,<0.17'")
    words = [
        "--hidden",
        "32",
        "--ffn",
        "16",
        "--tokens",
        "48",
        "--pairs",
        "2",
        "--json",
        str(tmp_path / "layer.jsonl"),
        *more,
    ]
    said = subprocess.run(
        [sys.executable, "-m", "benchmarks.moe_layer", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    results = json.loads((tmp_path / "layer.jsonl").read_text())["results"]
    assert [result["dispatch"] for result in results] == ["allgather", "alltoall"]
    assert all(0 < result["largest_difference"] < 1e-6 for result in results)
    assert said.stdout.count("ours / theirs") == 2
