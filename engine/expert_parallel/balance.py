"""The load of experts over a global batch: its counts, the bias that balances it, and the overflow of buffers.

    a layer's forward      adds its tokens' choices to counts [layers with experts, E], and counts rows that overflow the buffer
    once a step            all-reduces the counts over the world; then each router's bias moves (2408.15664):
                           bias += rate x sign(mean load - load), unless the step is skipped

Tokens are cut over dp, cp and tp, and layers over pp, so each choice is counted on exactly one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import EXPERTS
from triaxis.engine.expert_parallel.routing import count_values
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class Balanced:
    """A router whose bias follows the load.

    Attributes:
        row: row of its layer in the counts.
        bias: float [E], replicated on every rank of the stage.
    """

    row: int
    bias: ShardedParameter


class ExpertLoad:
    """The counts of one rank's layers in a step.

    Args:
        layers: indices of the model's layers with experts, on all stages.
        num_experts: number of experts E.
        rate: change of a bias per step; 0 leaves biases alone.
        device: device of the counts.

    Attributes:
        loss_scale: loss scale of the current backward, a float64 scalar on the device; it also scales the balance losses.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, rate: float, device: torch.device) -> None:
        self.layers = tuple(layers)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._rate = rate
        self._routers: dict[int, Balanced] = {}
        self.loss_scale = torch.ones((), dtype=AGREEMENT_DTYPE, device=device)
        self._counts = torch.zeros(len(self.layers), num_experts, dtype=torch.int64, device=device)
        self._overflow = torch.zeros((), dtype=torch.int64, device=device)

    def balance(self, layer: int, bias: ShardedParameter) -> None:
        """Register a layer's bias to follow its load; a second module of the same layer shares the bias."""
        self._routers[layer] = Balanced(self._rows[layer], bias)

    def begin(self) -> None:
        """Reset the counts at the start of a step or a validation."""
        self._counts.zero_()
        self._overflow.zero_()

    def add(self, layer: int, experts: torch.Tensor) -> None:
        """Add the choices int64 [T, k] of a layer's tokens to its counts."""
        row = self._counts[self._rows[layer]]
        row += count_values(experts, len(row))

    def add_overflow(self, rows: torch.Tensor) -> None:
        """Add a number of rows that overflowed a buffer, an int64 scalar."""
        self._overflow += rows

    @property
    def counts(self) -> torch.Tensor:
        """Return the choices since `begin`, int64 [layers, E]: this rank's, and after `post` in place those of all ranks."""
        return self._counts

    @property
    def overflow(self) -> torch.Tensor:
        """Return the number of this rank's rows that overflowed since `begin`, an int64 scalar."""
        return self._overflow

    def post(self, world: Axis) -> Pending:
        """Post the in-place all-reduce of the counts over all ranks."""
        return world.all_reduce(self._counts, f"{EXPERTS} load")

    def update(self, counts: torch.Tensor, skip: torch.Tensor) -> None:
        """Move the biases by the counts [layers, E] of the global batch, unless `skip`, a bool on the device, is set."""
        if not self._rate:
            return
        for router in self._routers.values():
            load = counts[router.row]
            bias = router.bias.value.data
            too_little = torch.sign(load.sum() - load * len(load)).to(bias.dtype)
            bias.add_((too_little * self._rate).masked_fill(skip, 0.0))
