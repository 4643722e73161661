"""The memory that FP8 adds to a rank, and the count of the banner, against an engine's own copies and layers."""

from collections.abc import Iterator

import pytest
import torch

from tests.parity.cases import Case, build_rank
from triaxis.engine.config.quantities.fp8_layers import fp8_line
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.errors import ConfigError
from triaxis.engine.linear.fp8_gemms import Fp8Gemms
from triaxis.engine.linear.layers import ColumnParallelLinear, RowParallelLinear
from triaxis.engine.step import Engine
from triaxis.models.predict.rank_memory import predicted_memory
from triaxis.models.predict.step_time.cluster import cluster_at
from triaxis.models.predict.step_time.estimate import Estimator

CASES = [
    Case("blocks_of_32", num_layers=2, global_batch_size=1, fp8="mxfp8"),
    Case("blocks_of_128", num_layers=1, global_batch_size=1, fp8="blockwise"),
    Case("qwen", num_layers=3, global_batch_size=1, fp8="tensorwise"),
    Case("mla", num_layers=2, global_batch_size=1, fp8="tensorwise"),
]


def gemms_of(engine: Engine) -> Iterator[object]:
    for chunk in engine.chunks:
        assert isinstance(chunk, torch.nn.Module)
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                yield module.gemms


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_and_linears_are_those_of_the_engine(case: Case) -> None:
    engine, batches = build_rank(0, case)
    engine.forward_backward(batches.next_step())
    batches.close()
    gemms = list(gemms_of(engine))
    in_fp8 = [each for each in gemms if isinstance(each, Fp8Gemms)]
    tensors = [
        tensor for each in in_fp8 for pair in each._copies for copy in pair for tensor in (copy.values, copy.inverse)
    ]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    config = case.config()
    predicted = predicted_memory(config, engine.topology.sizes, 0)
    # Weights that are adjacent have one scale together, and two are counted.
    assert predicted.temporaries - 8 * len(in_fp8) <= held <= predicted.temporaries
    assert f"in {len(in_fp8)} of {len(gemms)} linears" in fp8_line(config, "emulated")


def test_layers_at_the_ends_stay_in_the_run_s_dtype() -> None:
    case = Case("blocks_of_32", num_layers=3, global_batch_size=1, fp8="mxfp8")
    config = case.config()
    assert config.precision.fp8 is not None
    fp8 = config.precision.fp8.model_copy(update={"bf16_layers": [1, 1]})
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"fp8": fp8})})
    assert fp8_line(config, "torch") == "mxfp8 (torch) in 4 of 13 linears; float64: first layer, last layer, head"


def test_times_are_not_predicted() -> None:
    config = CASES[0].config()
    with pytest.raises(ConfigError, match=r"no rates of FP8 GEMMs are known.*precision\.fp8=null"):
        Estimator(cluster_at("8xH100")).closed_form(config, parallel_sizes(config))
