"""The benchmark of `triaxis prepare` runs at toy size, and its corpora are those of Megatron's builder."""

import json
from pathlib import Path

import pytest

from benchmarks import prepare
from tests.lacking import need_package

SECONDS = {
    "batches": {"wall": [1.0, 4.0, 2.0], "cpu": [2.0, 2.0, 2.0]},
    "ours": {"wall": [2.0, 1.0, 1.0], "cpu": [1.0, 4.0, 1.0]},
    "megatron": {"wall": [5.0, 4.0, 4.0], "cpu": [9.0, 9.0, 8.0]},
}


def test_a_share_is_of_all_cores() -> None:
    record = {"tokens": 8, "workers": 4, "seconds": SECONDS}
    assert prepare.rates(record, "wall") == {"batches": 4.0, "ours": 8.0, "megatron": 2.0}
    assert prepare.shares(record) == {"wall": 0.5, "cpu": 2.0}


@pytest.mark.slow
def test_the_sides_run_and_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_package("megatron.core", "pip install 'megatron-core>=0.16,<0.17'")
    results = tmp_path / "prepare.jsonl"
    words = ["--megabytes", "1", "--rounds", "1", "--workers", "2", "--tokenizer", "train-bpe:500"]
    record = prepare.main([*words, "--results", str(results)])
    assert record.items() <= json.loads(results.read_text()).items()
    assert record["vocab_size"] == 500 and record["tokens"] > 100_000
    assert all(seconds > 0 for side in record["seconds"].values() for clock in side.values() for seconds in clock)
    assert "ours / megatron" in capsys.readouterr().out
