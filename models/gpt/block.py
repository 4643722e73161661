"""One transformer layer, with an attention branch and an MLP branch."""

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
    """The next layer's first norm and its output, passed from layer to layer.

    The current layer computes this norm together with its own last addition to the residual stream.

    Attributes:
        norm: the next layer's first norm; None: there is no next layer, or the next layer normalises its input itself.
    """

    def __init__(self) -> None:
        self.norm: nn.Module | None = None
        self._normalised: torch.Tensor | None = None

    def put(self, normalised: torch.Tensor | None) -> None:
        """Keep the norm's output for the next layer. None: the next layer computes it from the residual stream."""
        self._normalised = normalised

    def take(self) -> torch.Tensor | None:
        """Return the kept output, or None, and drop the reference to it."""
        normalised, self._normalised = self._normalised, None
        return normalised


class Block(nn.Module):
    """One transformer layer with two branches, attention and MLP.

    A branch of x is post_norm(f(norm(x))), where f is the branch's module. By default, y = x + attention(x), and the output is
    y + mlp(y). With `model.parallel_block`, the output is x + attention(x) + mlp(x). `model.residual_multiplier` multiplies each
    branch before it is added.
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
        """Run the layer on x [s(/t), b, h], and return the same shape.

        `first` may hold x already normalised by the previous layer. This layer puts the next layer's normalised input there.
        """
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
        """Add attention's branch to x, and normalise the sum for the MLP.

        The second result is None if the MLP's input is still to be computed. `inputs` is attention's input; None: computed here.
        """
        if inputs is None:
            inputs = self.attention_input(x)
        branch = self.attention(inputs, positions, keys)
        follows = None if self.context.model.parallel_block else self.mlp_norm
        return self._added(x, branch, self.attention_post_norm, follows, self.attention_dropout, keys)

    def _norms(self, branch: str) -> tuple[nn.Module | None, nn.Module | None]:
        """Build the norms before and after a branch, with None for a missing norm."""
        model, name = self.context.model, f"{self.name}.{branch}"
        before = self.context.norm(f"{name}.norm") if model.norms_before else None
        return before, self.context.norm(f"{name}.post_norm") if model.norms_after else None

    def _input(self, norm: nn.Module | None) -> Callable[..., torch.Tensor]:
        """Build the function that computes a branch's input: `norm`, or the identity for None."""
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
        """Add a branch's output, normalised by `norm` if given, to the residual stream x.

        Returns:
            The sum, and the sum normalised by `follows`. The second is None if there is no `follows`, with dropout, or if norms are
            recomputed. A recomputed norm must give the forward's bits, so it always runs as a separate function.
        """
        branch = branch if norm is None else norm(branch)
        if dropout is not None and self.training:
            return dropout(branch, keys, x), None
        if follows is None or "norm" in self.context.saved.parts:
            return torch.add(x, branch, alpha=self.context.model.residual_multiplier), None
        y, normalised = follows(x, branch)
        return y, normalised
