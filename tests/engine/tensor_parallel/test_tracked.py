"""Ordinary autograd code gets the weights that stay: those of ZeRO-3's layers do not."""

from dataclasses import dataclass

import pytest
import torch

from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.specs import Init, ParamSpec


@dataclass
class Bucket:
    stays: bool
    is_complete: bool = True
    version: int = 0

    def complete(self) -> None: ...

    def overwrites(self, parameter: ShardedParameter) -> bool:
        return True

    def grad_added(self, parameter: ShardedParameter) -> None: ...


@pytest.mark.parametrize("stays", [True, False])
def test_a_weight_that_later_layers_overwrite_is_refused(stays: bool) -> None:
    spec = ParamSpec("layers.3.mlp.mix.weight", (4, 2), Init("ones"))
    parameter = ShardedParameter(localize(spec, tp=1, tp_index=0, sequence_parallel=False), torch.float32)
    weight, main_grad = torch.ones(4, 2), torch.zeros(4, 2)
    parameter.bind(weight, main_grad, Bucket(stays))
    if not stays:
        with pytest.raises(
            ConfigError, match=r"layers\.3\.mlp\.mix\.weight is read outside a linear layer.*in_backward=True"
        ):
            parameter.tracked()
        return
    parameter.tracked().sum().backward()
    assert torch.equal(main_grad, torch.ones(4, 2))
