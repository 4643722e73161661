"""Modules of a GPT take the parameters that the records of the model's kinds name."""

from typing import Any, cast

import pytest
import torch

from engine.config.layer_kinds import NORMS
from engine.config.model import ModelConfig
from engine.kernels.fusion import EAGER
from engine.kernels.registry import Kernels
from engine.layout.shard_spec import localize
from engine.tensor_parallel.parameter import ShardedParameter
from models.gpt.context import BuildContext, Norm
from models.specs import final_norm_specs


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
        dtype=torch.float64,
        seed=0,
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
        with pytest.raises(KeyError, match=name):
            Norm(context_of(model, without=name), "final_norm")
    assert len(Norm(context_of(model), "final_norm").weights) == len(kind.parameters)
