"""The benchmark runs and compares like with like; and what it taught stays true (counted, never timed)."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks import engine_overhead
from benchmarks.engine_overhead import MODELS, Interval, build_engine, compare, config_of, median_interval, parse

TOY = ["--hidden", "32", "--layers", "2", "--head-dim", "8", "--seq", "16", "--vocab", "128", "--pairs", "2"]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_toy_run_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "results.jsonl"
    argv = [*TOY, "--json", str(path)]
    results = engine_overhead.main(argv)
    engine_overhead.main([*argv, "--models", "llama", "--dtypes", "bf16"])
    first, second = (json.loads(line) for line in path.read_text().splitlines())

    assert [(result.model, result.dtype) for result in results] == [(m, d) for m in MODELS for d in ("fp32", "bf16")]
    assert first["command"].endswith(" ".join(argv)) and first["machine"]["torch"] == torch.__version__
    assert len(first["results"]) == 4 and len(second["results"]) == 1
    for result in results:
        assert result.wall_ratio.low <= result.wall_ratio.median <= result.wall_ratio.high
        # Weights, main grads and two moments are alive on both sides, in fp32 at least.
        assert min(result.engine_peak_bytes, result.plain_peak_bytes) > 16 * result.num_parameters
    # How far a column is padded depends on the widest ratio, which a busy machine may make large.
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert f"llama bf16 │ {results[-1].wall_ratio}" in printed and f" {results[0].memory_ratio:.3f} │" in printed


@pytest.mark.slow
def test_the_peak_is_that_of_one_side_alone() -> None:
    config = config_of(parse(TOY), "gpt", "fp32")

    def measure(num_bytes: int) -> int:
        def make_side() -> engine_overhead.Step:
            kept = torch.ones(num_bytes // 4)
            return lambda microbatches: float((kept * 2).sum())

        return engine_overhead.peak_bytes(make_side, config)

    # Tensor and double of it, whatever was measured before; the rest is scalars.
    for num_bytes in (1 << 20, 4 << 20, 1 << 20):
        assert 2 * num_bytes <= measure(num_bytes) < 2 * num_bytes + 4096


@pytest.mark.slow
def test_sides_that_compute_different_things_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(parse(TOY), "gpt", "fp32")
    monkeypatch.setattr(engine_overhead, "engine_step", lambda engine: lambda microbatches: 5.0)
    with pytest.raises(ValueError, match="do not compute the same"):
        compare(config, "gpt", num_pairs=1)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 5, 6, 15, 40])
def test_the_interval_of_a_median_is_the_widest_that_is_needed(n: int) -> None:
    interval = median_interval([float(value) for value in reversed(range(1, n + 1))])
    k = int(interval.low)
    assert interval == Interval((n + 1) / 2, k, n + 1 - k)

    def outside(order: int) -> float:
        """Probability that the true median is not between the order-th smallest and largest value."""
        return 2 * sum(math.comb(n, below) for below in range(order)) / 2**n

    assert k == 1 or outside(k) <= 0.05
    assert n < 3 or outside(k + 1) > 0.05


@pytest.mark.parametrize("model", list(MODELS))
def test_linear_layers_run_as_single_gemms(model: str) -> None:
    """[s, b, in] x W^T of a transposed activation becomes s small GEMMs and s copies of W (bmm): 80 times slower in bf16."""
    config = config_of(parse([*TOY, "--micro-batch-size", "3"]), model, "bf16")
    engine = build_engine(config)
    microbatches = engine_overhead.batches_of(config).next_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        engine.train_step(microbatches, lr=1e-3)
    counts = {row.key: row.count for row in profiler.key_averages()}
    num_layers, num_microbatches = config.model.num_layers, len(microbatches)
    # Four linear layers per block and the head; each is one GEMM forward, one for its input, one for its weight.
    gemms = sum(counts.get(f"aten::{name}", 0) for name in ("mm", "addmm", "addmm_"))
    assert gemms == 3 * (4 * num_layers + 1) * num_microbatches
    assert "aten::bmm" not in counts
