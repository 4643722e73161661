"""One transformer layer: attention and an MLP or experts, each a branch that is added to the residual stream."""

from collections.abc import Callable

import torch
from torch import nn

from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.attention import Attention
from triaxis.models.gpt.context import BuildContext, Positions
from triaxis.models.gpt.hidden_dropout import HiddenDropout
from triaxis.models.gpt.latent_attention import LatentAttention
from triaxis.models.gpt.mlp import MLP
from triaxis.models.gpt.moe import MoE


class FirstNorm:
    """The next layer's first norm, computed by the current layer together with its last addition.

    Attributes:
        norm: the next layer's first norm; None: the next layer, if any, normalises its input itself.
    """

    def __init__(self) -> None:
        self.norm: nn.Module | None = None
        self._normalised: torch.Tensor | None = None

    def put(self, normalised: torch.Tensor | None) -> None:
        """Keep the norm's output for the next layer."""
        self._normalised = normalised

    def take(self) -> torch.Tensor | None:
        """Return the output kept by the previous layer and drop the reference, so that only the caller holds it."""
        normalised, self._normalised = self._normalised, None
        return normalised


class Block(nn.Module):
    """One transformer layer with two branches, each post_norm(f(norm(x))) with the norms that the model has.

    Sequential: y = x + attention(x), then y + mlp(y). Parallel: x + attention(x) + mlp(x).
    """

    def __init__(self, context: BuildContext, layer: int) -> None:
        super().__init__()
        context = context.of_layer(layer)
        self.context = context
        self.name = f"layers.{layer}"
        self.attention_norm, self.attention_post_norm = self._norms("attention")
        kind = context.model.layer_kind(layer)
        own, ours = context.model.own, Attention if context.model.mla is None else LatentAttention
        self.attention = (own.attention or ours)(context, f"{self.name}.attention", kind)
        self.mlp_norm, self.mlp_post_norm = self._norms("mlp")
        self.attention_input, self.mlp_input = self._input(self.attention_norm), self._input(self.mlp_norm)
        mlp = f"{self.name}.mlp"
        self.mlp = MoE(context, mlp, layer) if kind.has_experts else (own.mlp or MLP)(context, mlp)
        self.attention_dropout = context.hidden_dropout(f"{self.name}.attention.residual_dropout")
        self.mlp_dropout = context.hidden_dropout(f"{mlp}.residual_dropout")

    def forward(
        self,
        x: torch.Tensor,
        positions: Positions,
        keys: DropoutKeys,
        first: FirstNorm | None = None,
    ) -> torch.Tensor:
        """Run the layer: [s(/t), b, h] -> the same shape. `first` brings this layer's normalised x, and takes the next layer's."""
        first = FirstNorm() if first is None else first
        y, inputs = self._with_attention(x, positions, keys, first.take())
        if inputs is None:
            inputs = self.mlp_input(x if self.context.model.parallel_block else y)
        branch = self.mlp(inputs, keys) if isinstance(self.mlp, MoE) else self.mlp(inputs)
        y, following = self._added(y, branch, self.mlp_post_norm, first.norm, self.mlp_dropout, keys)
        first.put(following)
        return y

    def _with_attention(
        self,
        x: torch.Tensor,
        positions: Positions,
        keys: DropoutKeys,
        inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add attention's branch to x; return the sum and, if computed with it, the MLP's normalised input, else None.

        The branch's tensor goes out of scope here, so its memory is free when the MLP begins.
        """
        if inputs is None:
            inputs = self.attention_input(x)
        branch = self.attention(inputs, positions, keys)
        follows = None if self.context.model.parallel_block else self.mlp_norm
        return self._added(x, branch, self.attention_post_norm, follows, self.attention_dropout, keys)

    def _norms(self, branch: str) -> tuple[nn.Module | None, nn.Module | None]:
        """Build the norms before and after a branch; None for one that the model lacks."""
        model, name = self.context.model, f"{self.name}.{branch}"
        before = self.context.norm(f"{name}.norm") if model.norms_before else None
        return before, self.context.norm(f"{name}.post_norm") if model.norms_after else None

    def _input(self, norm: nn.Module | None) -> Callable[..., torch.Tensor]:
        """Build the function from the residual stream to a branch's input: the norm, or the identity."""
        return nn.Identity() if norm is None else self.context.saved.recomputed("norm", norm)

    def _added(
        self,
        x: torch.Tensor,
        branch: torch.Tensor,
        norm: nn.Module | None,
        follows: nn.Module | None,
        dropout: HiddenDropout | None,
        keys: DropoutKeys,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add a branch's output, normalised if the model has a norm after it, to the residual stream x.

        Returns:
            The sum, and its norm by `follows`; None if that norm runs by itself. It does with dropout, which has its own function,
            and if norms are recomputed. A replay must give the forward's bits, so both use the same function.
        """
        branch = branch if norm is None else norm(branch)
        if dropout is not None and self.training:
            return dropout(branch, keys, x), None
        if follows is None or "norm" in self.context.saved.parts:
            return torch.add(x, branch, alpha=self.context.model.residual_multiplier), None
        y, normalised = follows(x, branch)
        return y, normalised
