"""The choice of k experts for each token, and the weights of their outputs.

    logits = x W^T [T, E]      scores s = softmax(logits) or sigmoid(logits)      all in the accumulation dtype
    choice                     the k largest s + bias, of equal ones the lower expert; with groups, within the best groups
    weights g                  s of the chosen, divided by their sum with `normalize`, times `scaling`

The bias enters the choice alone, so it has no gradient (2408.15664). Two losses add to the gradient of the logits and not to the
reported loss. They are over all tokens of the global batch, counted by the loss or not, because each of them is routed:

    z loss            z sum over tokens of log(sum of exp(logits))^2                                       2202.08906, equation 5
    sequence loss     a sum over samples of S sum_i f_i P_i, f_i = E / (k S) x tokens that i counts,       2412.19437, equations
                      P_i = 1 / S sum over its tokens of s_i / sum(s)                                      17 to 20

Expert i counts the tokens for which s_i is among the k largest s, without bias and groups, which move the choice and not what the
router prefers. With `balance.sequence_counts` = choices it counts those that chose it. S is a sample's tokens. They are cut over
cp x tp ranks, so f is summed over them; P enters linearly and needs no sum. With softmax, s sums to 1, and the sequence loss is
Switch's auxiliary loss (2101.03961, equation 4) of each sample by itself.

Choices of a forward that is recomputed are remembered: in other bits a token could choose otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.moe import MoEConfig
from triaxis.engine.numerics.precision import accumulate
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

SMALLEST_SUM = 1e-20
"""Added to the sum of a token's chosen scores, as in the families that normalise."""


class Choice(NamedTuple):
    """The experts of T tokens.

    Attributes:
        experts: int64 [T, k].
        fractions: f of each sample, [b, E] in the accumulation dtype; None without a sequence loss.
    """

    experts: torch.Tensor
    fractions: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Router:
    """The routing rule of a model's layers, for one rank.

    Attributes:
        moe: the rule.
        seq_length: tokens S of a whole sample.
        sample: the axis of the ranks that share each sample's tokens.
        loss_scale: 1 / nominal tokens of the global batch.
        dynamic_scale: its further factor in an fp16 run, a scalar on the device, which each step sets.
    """

    moe: MoEConfig
    seq_length: int
    sample: Axis
    loss_scale: float
    dynamic_scale: torch.Tensor

    def choose(self, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Choose experts int64 [T, k] by scores [T, E]."""
        return top_experts(scores if bias is None else scores + bias, self.moe)

    def in_turn(self, positions: torch.Tensor) -> torch.Tensor:
        """Choose experts int64 [T, k] one after the other by the tokens' int64 positions [T] in their samples."""
        k = self.moe.top_k
        return (positions.unsqueeze(-1) * k + torch.arange(k, device=positions.device)) % self.moe.num_experts

    def counted(self, experts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the experts int64 [T, k] that the sequence loss counts, of tokens that have chosen `experts`."""
        return _largest(scores, self.moe.top_k) if self.moe.counts_scores else experts

    def choice(self, experts: torch.Tensor, counted: torch.Tensor, scores: torch.Tensor, samples: int) -> Choice:
        """Return the choice of the experts int64 [T, k]; the T tokens are [T / samples, samples], samples fast."""
        return Choice(experts, self._fractions(counted, scores, samples))

    def _fractions(self, experts: torch.Tensor, scores: torch.Tensor, samples: int) -> torch.Tensor | None:
        if not self.moe.balance.sequence_loss:
            return None
        num_tokens, num_experts = scores.shape
        of_sample = torch.arange(num_tokens, device=experts.device).remainder(samples).unsqueeze(-1)
        counts = count_values(of_sample * num_experts + experts, samples * num_experts).to(scores.dtype)
        counts = self.sample.all_reduce(counts, "fractions").wait()
        return counts.view(samples, num_experts) * (num_experts / (self.moe.top_k * self.seq_length))

    def weights(
        self,
        x: torch.Tensor,
        weight: ShardedParameter,
        choose: Callable[[torch.Tensor], Choice],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens x [T, h] by the router's weight [E, h].

        `choose` returns the choice for scores [T, E]; it is called once.

        Returns:
            Weights [T, k] in the accumulation dtype, and experts int64 [T, k].
        """
        return _Route.apply(x, weight.weight(), weight, choose, self)


def top_experts(scores: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    """Return the k experts with the largest scores [T, E] as int64 [T, k]; of equal ones the lower number comes first.

    With groups, only experts of the best groups count: those with the best expert, or with the best sum of two (2405.04434
    section 2.2.2, 2412.19437 section 2.1.2).
    """
    if moe.groups > 1:
        by_group = scores.unflatten(-1, (moe.groups, -1))
        of_group = by_group.amax(-1) if moe.group_score == "max" else by_group.topk(2, dim=-1).values.sum(-1)
        left_out = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, _largest(of_group, moe.top_groups), False)
        scores = by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return _largest(scores, moe.top_k)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    # torch.topk may return any of equal values. A view would hold the places of all values.
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def count_values(values: torch.Tensor, count: int) -> torch.Tensor:
    """Count each of 0 .. count - 1 among integers; int64 [count], without reading a number on the host."""
    flat = values.flatten()
    return torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


class _Route(torch.autograd.Function):
    """Scores, choice and weights. Saves the tokens, the logits and the choice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        parameter: ShardedParameter,
        choose: Callable[[torch.Tensor], Choice],
        router: Router,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = accumulate(x) @ accumulate(weight).t()
        scores = _scores(logits, router.moe)
        choice = choose(scores)
        weights = scores.gather(-1, choice.experts)
        if router.moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
        ctx.parameter, ctx.router = parameter, router
        kept = () if choice.fractions is None else (choice.fractions,)
        ctx.save_for_backward(x, weight, logits, choice.experts, *kept)
        ctx.mark_non_differentiable(choice.experts)
        return weights * router.moe.scaling, choice.experts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None, None, None]:
        x, weight, logits, experts, *fractions = ctx.saved_tensors
        router: Router = ctx.router
        moe, balance = router.moe, router.moe.balance
        scores = _scores(logits, moe)
        grad = grad * moe.scaling
        if moe.normalize:
            chosen = scores.gather(-1, experts)
            total = chosen.sum(-1, keepdim=True) + SMALLEST_SUM
            grad = (grad - (grad * chosen / total).sum(-1, keepdim=True)) / total
        grad_scores = torch.zeros_like(scores).scatter_(-1, experts, grad)
        scale = router.loss_scale * router.dynamic_scale
        for each in fractions:
            grad_scores += _of_shares(scores, each * (balance.sequence_loss * scale))
        if moe.score == "softmax":
            grad_logits = scores * (grad_scores - (grad_scores * scores).sum(-1, keepdim=True))
        else:
            grad_logits = grad_scores * scores * (1 - scores)
        if balance.z_loss:
            log_sum = logits.logsumexp(-1, keepdim=True)
            grad_logits += (logits - log_sum).exp() * log_sum * (2 * balance.z_loss * scale)
        parameter: ShardedParameter = ctx.parameter
        parameter.add_grad(grad_logits.t() @ accumulate(x))
        return (grad_logits @ accumulate(weight)).to(x.dtype), None, None, None, None


def _scores(logits: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    return logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()


def _of_shares(scores: torch.Tensor, of_sample: torch.Tensor) -> torch.Tensor:
    """Return the gradient of scores [T, E] from that of their shares s / sum(s), which a sample's tokens have alike: [b, E]."""
    samples, num_experts = of_sample.shape
    total = scores.sum(-1, keepdim=True)
    grad = of_sample.expand(scores.shape[0] // samples, samples, num_experts).reshape(scores.shape)
    return (grad - (grad * scores / total).sum(-1, keepdim=True)) / total
