"""The MLP, cut over tp by its inner width.

x [s(/t), b, h] --column--> [s, b, f/t] --nonlinearity, row--> [s(/t), b, h]
"""

import torch
from torch import nn

from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.linear.layers import ColumnParallelLinear, RowParallelLinear
from triaxis.models.gpt.context import BuildContext


class MLP(nn.Module):
    """A layer's dense MLP, or all its shared experts as one MLP.

    `shares_input`: whether another module also saves the input x for the backward.
    """

    def __init__(self, context: BuildContext, name: str, *, shares_input: bool = False) -> None:
        super().__init__()
        up = "gate_up" if context.model.activation_kind.is_gated else "up"
        self.up = ColumnParallelLinear(
            [context.parameter(f"{name}.{up}.weight")],
            context.optional_parameters(f"{name}.{up}.bias"),
            context.region,
            context.queue,
            f"{name}.{up}",
            context.form if shares_input else context.form_behind_norm("mlp"),
            consumer_sums_biases=True,
        )
        self.down = RowParallelLinear(
            context.parameter(f"{name}.down.weight"),
            context.optional_parameter(f"{name}.down.bias"),
            context.region,
            context.queue,
            f"{name}.down",
            context.form.alone("activation"),
        )

        self.inner = context.saved.recomputed("mlp", self.up)
        activation = ActivationKernel(context.model.activation, context.kernels.fusion, self.up.takes_bias_total)
        self.activated = context.saved.recomputed("activation", activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activated(self.inner(x)))
