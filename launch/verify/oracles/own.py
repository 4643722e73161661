"""Run a user's plain function as an oracle, for `--oracle mine.py:reference`.

    def reference(model, weights, batch):
        x = weights["embedding.word.weight"][batch.tokens]              # [b, s, h]
        ...
        return losses                                                   # [b, s], of every label

`model` is the `model` section of the configuration. `weights` has whole tensors under our names, in their specs' shapes. `batch` is
a `triaxis.engine.data.loader.MicroBatch` with tokens, labels and positions, int64 [b, s]. torch's AdamW updates the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch
from torch import nn

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.storage.user_module import find_sources, load
from triaxis.launch.verify.oracles.adamw import UpdatedByTorch
from triaxis.models.specs import model_specs

Reference = Callable[[ModelConfig, Mapping[str, torch.Tensor], MicroBatch], torch.Tensor]


def module_of(oracle: str) -> tuple[ModuleType, str]:
    """Load the module in `SOURCE:NAME`, and return it with its source digest.

    Raises:
        UserModuleError: the module does not exist, or running it fails.
    """
    source = oracle.rpartition(":")[0]
    digest = find_sources(source).digest()
    return load(source, digest), digest


class _Same:
    """A `model.Pair` of two parameters with the same name and shape."""

    def __init__(self, spec: ParamSpec) -> None:
        self.ours, self.theirs = (spec,), (spec.name,)

    def to_theirs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def to_ours(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)


class OwnFunction(UpdatedByTorch):
    """A `model.Oracle` whose losses the function in `SOURCE:NAME` computes."""

    def __init__(self, oracle: str, config: Config) -> None:
        self._function: Reference = getattr(module_of(oracle)[0], oracle.rpartition(":")[2])
        self._model = config.model
        specs = model_specs(config.model)
        self.pairs = [_Same(spec) for spec in specs]
        dtype = DTYPES[config.precision.dtype]
        named = {
            spec.name: nn.Parameter(torch.zeros(spec.shape, dtype=dtype), requires_grad=spec.is_trained)
            for spec in specs
        }
        trained = [spec for spec in specs if spec.is_trained]
        decayed, others = ([named[spec.name] for spec in trained if spec.decay is decays] for decays in (True, False))
        super().__init__(named, decayed, others, config.optimizer)

    def token_losses(self, microbatch: MicroBatch) -> torch.Tensor:
        return self._function(self._model, self._named, microbatch)

    def end_backward(self) -> None:
        """Give a zero gradient to each parameter that the user's function does not read."""
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
