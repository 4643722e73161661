"""Balances the experts' load by the routers' biases, and counts rows that overflow buffers.

    in each layer's forward   `add` counts how many tokens chose each expert
    once a step               `post` all-reduces the counts [layers with experts, experts] over the world
    after that                `update` moves each router's bias, unless the step is skipped (2408.15664):
                              bias += rate x sign(mean load - expert's load)

Exactly one rank counts each choice.
"""

from collections.abc import Sequence

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import EXPERTS
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


class ExpertLoad:
    """Counts of the tokens that chose each expert, in one rank's layers and one step.

    Args:
        layers: indices of the model's layers with experts, on all stages.
        num_experts: number of experts E.
        rate: bias change per step; 0 leaves biases unchanged.
        device: device for the counts.

    Attributes:
        counts: number of tokens that chose each expert since `begin`, int64 [layers, E]. They are this rank's, or the sum over
            all ranks once `post` has completed.
        overflow: number of this rank's rows beyond the dispatch buffer since `begin`, an int64 scalar.
        loss_scale: loss scale in the current backward, a float64 scalar on the device; it also scales the balance losses.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, rate: float, device: torch.device) -> None:
        self.layers = tuple(layers)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._rate = rate
        self._biases: dict[int, ShardedParameter] = {}
        self.loss_scale = torch.ones((), dtype=AGREEMENT_DTYPE, device=device)
        self.counts = torch.zeros(len(self.layers), num_experts, dtype=torch.int64, device=device)
        self.overflow = torch.zeros((), dtype=torch.int64, device=device)

    def balance(self, layer: int, bias: ShardedParameter) -> None:
        """Register a layer's router bias, float [E], for `update`. Two modules for the same layer register the same bias."""
        self._biases[layer] = bias

    def begin(self) -> None:
        """Reset the counts at the start of a step or a validation."""
        self.counts.zero_()
        self.overflow.zero_()

    def add(self, layer: int, counts: torch.Tensor) -> None:
        """Add the number of a layer's tokens that chose each expert, int64 [E]."""
        self.counts[self._rows[layer]] += counts

    def add_overflow(self, rows: torch.Tensor) -> None:
        """Add `rows`, an int64 scalar on the device, to the count of rows beyond the dispatch buffer."""
        self.overflow += rows

    def post(self, world: Axis) -> Pending:
        """Post the in-place all-reduce that sums the counts over all ranks."""
        return world.all_reduce(self.counts, f"{EXPERTS} load")

    def update(self, counts: torch.Tensor, skip: torch.Tensor) -> None:
        """Move each bias by the rate, up for experts below the mean load, down for those above.

        `counts` [layers, E] is the load over the global batch. Nothing changes if `skip`, a bool on the device, is true.
        """
        if not self._rate:
            return
        for layer, router in self._biases.items():
            load, bias = counts[self._rows[layer]], router.value.data
            too_little = torch.sign(load.sum() - load * len(load)).to(bias.dtype)
            bias.add_((too_little * self._rate).masked_fill(skip, 0.0))
