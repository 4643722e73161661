"""A mixture of experts that replaces a layer's MLP.

    x [s(/t), b, h] --tokens of this rank--> [T, h] --router--> k experts each --dispatch--> rows [R, h] of this rank's experts
      --up, activation, down--> [R, h] --combine--> [T, h] ----> [s(/t), b, h], plus the shared experts' MLP of x

T is the number of this rank's tokens, k the number of experts per token, and R the number of rows that this rank's experts receive.
Each of a stage's dp x cp x tp ranks routes its own tokens. If sequence parallelism is off, x is cut over tp before the router, and
the result is gathered over tp at the end.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from triaxis.engine.activations.linear_map import mapped
from triaxis.engine.expert_parallel.dispatch import Dispatched
from triaxis.engine.expert_parallel.experts import Ends, ExpertContext, ExpertDown, ExpertUp
from triaxis.engine.expert_parallel.routing import Choice
from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.mlp import MLP
from triaxis.models.specs import up_name


class MoE(nn.Module):
    """One layer's router, this rank's share of its experts, and its shared experts."""

    def __init__(self, context: BuildContext, name: str, layer: int) -> None:
        super().__init__()
        assert context.experts is not None, "a model with experts has their ranks"
        self.context = context
        self.layer = layer
        self.name = name
        self.experts = context.experts
        self.router = context.parameter(f"{name}.router.weight")
        self.bias = context.optional_parameter(f"{name}.router.bias")
        kernel = context.kernels.choices.experts
        assert kernel is not None
        # The row count differs from call to call.
        self.activation = ActivationKernel(context.model.activation, context.kernels.fusion, lengths="rows")
        work = ExpertContext(context.queue, context.kernels.fusion, kernel)
        up = up_name(context.model)
        self.up = ExpertUp(context.parameter(f"{name}.experts.{up}.weight"), work, f"{name}.experts.{up}")
        self.down = ExpertDown(context.parameter(f"{name}.experts.down.weight"), work, f"{name}.experts.down")
        self.shared = MLP(context, f"{name}.shared", shares_input=True) if self.experts.router.moe.shared_size else None
        if self.bias is not None and not self.bias.record.is_frozen:
            self.experts.load.balance(layer, self.bias)

    def forward(self, x: torch.Tensor, keys: DropoutKeys) -> torch.Tensor:
        """Apply the experts to x [s(/t), b, h], and return the same shape. `keys` gives each token's position in its sample."""
        region, saved = self.context.region, self.context.saved
        is_cut = self.experts.cuts_tokens and not region.sequence_parallel
        # All tp ranks hold the whole sequence and its gradient; each routes a part of it.
        local = mapped(x, self._part, self._whole) if is_cut else x
        tokens = local.flatten(0, 1)
        choose = partial(self._choose, keys, x.shape)
        # A replayed layer takes the forward's choice from `once`; a different choice would exchange different rows.
        weights, choice = self.experts.router.weights(
            tokens, self.router, lambda scores: saved.once(partial(choose, scores))
        )
        dispatch = self.experts.dispatch.begin(choice)
        # The shared experts need no other rank's tokens, so they run while the exchange that dispatch waits for is in flight.
        shared = None if self.shared is None else self.shared(x)
        sent = dispatch(tokens, weights)
        y = sent.combine(self._outputs(sent)).view_as(local)
        if is_cut:
            y = mapped(y, self._whole, self._part)
        return y if shared is None else y + shared

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """Cut out this rank's part of a sequence, [s, b, h] -> [s/t, b, h]."""
        return x[replace(self.context.region, sequence_parallel=True).shard_of_sequence(x.shape[0])].clone()

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the sequence from the tp ranks' parts, [s/t, b, h] -> [s, b, h]."""
        return self.context.region.axis.all_gather(x.contiguous(), f"{self.name} tokens").wait()

    def _outputs(self, sent: Dispatched) -> torch.Tensor:
        """Run this rank's experts on the rows [R, h] sent to them, and return [R, h]."""
        saved = self.context.saved
        inner = saved.recomputed("mlp", partial(self._up, sent.ends))(sent.rows)
        activated = saved.recomputed("activation", self.activation)(inner)
        out: torch.Tensor = self.down(activated, sent.weights, sent.ends)
        return out

    def _choose(self, keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor) -> Choice:
        experts = self.chosen(keys, shape, scores)
        counted = self.counted(keys, shape, scores, experts)
        choice = self.experts.router.choice(experts, counted, scores, shape[1])
        if self.training:
            self.experts.load.add(self.layer, choice.counts)
        return choice

    def chosen(self, keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor) -> torch.Tensor:
        """Choose experts int64 [T, k] for this rank's tokens by scores [T, E] plus bias.

        `shape` is the layer input's shape. With `force_balanced`, the tokens' positions decide instead.
        """
        router = self.experts.router
        if router.moe.force_balanced:
            return router.in_turn(self.positions(keys, shape, scores))
        return router.choose(scores, None if self.bias is None else self.bias.weight().detach())

    def counted(
        self, keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Select each token's experts, int64 [T, k], that the sequence-wise balance loss counts.

        The config decides: `experts`, or the k experts with the highest scores.
        """
        return self.experts.router.counted(experts, scores)

    def positions(self, keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor) -> torch.Tensor:
        """Compute the positions [T] of this rank's tokens in their samples."""
        region, samples = self.context.region, shape[1]
        length = shape[0] * (region.axis.size if region.sequence_parallel else 1)
        part = replace(region, sequence_parallel=self.experts.cuts_tokens).shard_of_sequence(length)
        rows = keys.rows(length, scores.device)[part]
        return rows.expand(-1, samples).flatten()

    def _up(self, ends: Ends, rows: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.up(rows, ends)
        return inner
