"""Modules of a GPT take the parameters that the specs name, all of them and no others."""

from typing import Any, cast

import pytest
import torch

from tests.parity.cases import Case
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.values.model_choices import NORMS
from triaxis.engine.errors import ModelError
from triaxis.engine.kernels.fusion import EAGER
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.tensor_parallel.dropout import DropoutSites
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.gpt.context import BuildContext
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import final_norm_specs


def context_of(model: ModelConfig, without: str = "") -> BuildContext:
    """Make a context with the parameters of the final norm but one, and nothing that a norm does not use."""
    unused = cast(Any, None)
    records = [localize(spec, tp=1, tp_index=0, sequence_parallel=False) for spec in final_norm_specs(model)]
    return BuildContext(
        model=model,
        recompute=unused,
        num_offloaded=0,
        kernels=Kernels(choices=unused, fusion=EAGER),
        region=unused,
        cp=unused,
        mixing=unused,
        experts=None,
        dtype=torch.float64,
        sites=DropoutSites(0),
        parameters={each.name: ShardedParameter(each, torch.float64) for each in records if each.name != without},
        queue=unused,
        saved=unused,
    )


@pytest.mark.parametrize("kind", NORMS.values(), ids=list(NORMS))
def test_a_norm_without_one_of_its_parameters_is_an_error_and_no_other_norm(kind: Any) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "vocab_size": 16}
    model = ModelConfig.model_validate({**sizes, "norm": kind.name})
    for parameter in kind.parameters:
        name = f"final_norm.{parameter}"
        with pytest.raises(ModelError, match=name):
            context_of(model, without=name).norm("final_norm")
    assert len(context_of(model).norm("final_norm").weights) == len(kind.parameters)


@pytest.mark.parametrize(("module", "name"), [("Attention", "proj.bias"), ("MLP", "down.bias")])
def test_a_misspelt_optional_parameter_is_an_error_at_construction(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = BuildContext.optional_parameter

    def misspelt(context: BuildContext, wanted: str) -> ShardedParameter | None:
        return asked(context, f"{wanted}s" if wanted.endswith(name) else wanted)

    config = Case("gpt").config()
    topology = Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu"))
    build(resolve_recompute(config, topology.sizes), topology, build_chunks)
    monkeypatch.setattr(BuildContext, "optional_parameter", misspelt)
    with pytest.raises(ModelError, match=rf"no module took layers\.0\.{module.lower()}\.{name}.* would not be trained"):
        build(resolve_recompute(config, topology.sizes), topology, build_chunks)
