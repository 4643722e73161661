"""What an earlier comparison with a plain loop taught stays true (counted, never timed)."""

import pytest
import torch

from benchmarks.models import MODELS, batches_of, build_engine, config_of
from benchmarks.peers import parse

TOY = ["--hidden", "32", "--layers", "2", "--head-dim", "8", "--seq", "16", "--vocab", "128"]


@pytest.mark.parametrize("model", list(MODELS))
def test_linear_layers_run_as_single_gemms(model: str) -> None:
    """[s, b, in] x W^T of a transposed activation becomes s small GEMMs and s copies of W (bmm): 80 times slower in bf16."""
    config = config_of(parse([*TOY, "--micro-batch-size", "3"]), model, "bf16")
    engine = build_engine(config)
    microbatches = batches_of(config).next_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        engine.train_step(microbatches, lr=1e-3)
    counts = {row.key: row.count for row in profiler.key_averages()}
    num_layers, num_microbatches = config.model.num_layers, len(microbatches)
    # Four linear layers per block and the head; each is one GEMM forward, one for its input, one for its weight.
    gemms = sum(counts.get(f"aten::{name}", 0) for name in ("mm", "addmm", "addmm_"))
    assert gemms == 3 * (4 * num_layers + 1) * num_microbatches
    assert "aten::bmm" not in counts
