"""Chooses k experts for each token, and weights for their outputs.

    logits = x W^T [T, E]      scores s = softmax(logits) or sigmoid(logits)      all in the accumulation dtype
    choice                     the k largest s + bias, on a tie the lower expert; with groups, only within the best groups
    weights g                  the chosen experts' s; with `normalize`, divided by their sum; times `scaling`

T is the number of tokens, E the number of experts. The bias affects only the choice, so it has no gradient (2408.15664). Two losses
add to the logits' gradient but not to the reported loss. They cover every token in the global batch, even those that the loss mask
excludes.

    z loss            z sum_tokens log(sum(exp(logits)))^2                                                 2202.08906, equation 5
    sequence loss     a sum_samples S sum_i f_i P_i, f_i = E / (k S) x tokens that i counts,               2412.19437, equations
                      P_i = 1 / S sum_tokens s_i / sum(s)                                                  17 to 20

z and a are configured coefficients, i is an expert, S the number of tokens in a sample. Expert i counts the tokens for which s_i is
among the k largest s, without bias and groups. With `balance.sequence_counts: choices`, i instead counts the tokens that chose it.
f is all-reduced over the cp x tp ranks that share a sample. With softmax, the sequence loss is Switch's auxiliary loss (2101.03961,
equation 4) per sample.

A recomputed forward reuses the first forward's choices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.weight_grad import WeightGradKernel, add_matmul
from triaxis.engine.numerics.precision import accumulate, accumulation_dtype
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

SMALLEST_SUM = 1e-20
"""Constant added to a token's sum of chosen scores, as in the model families that normalise."""


class Choice(NamedTuple):
    """Experts chosen for T tokens.

    Attributes:
        experts: expert numbers int64 [T, k].
        counts: how many of the T tokens chose each expert, int64 [E].
        fractions: each expert's tokens per sample, times E / (k S), [b, E] in the accumulation dtype; None without a sequence loss.
    """

    experts: torch.Tensor
    counts: torch.Tensor
    fractions: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Router:
    """Routing rule for a model's layers, on one rank.

    Attributes:
        moe: the rule's configuration.
        seq_length: number S of tokens in a whole sample.
        sample: axis of the ranks that share each sample's tokens.
        loss_scale: 1 / nominal tokens in the global batch.
        dynamic_scale: loss scale for the backward (not 1 in fp16), a scalar on the device that each step sets.
        fusion: wrapper that compiles the passes over scores and logits.
        kernel: kernel of the logits' product; `fused` reads 16-bit operands as they are.
    """

    moe: MoEConfig
    seq_length: int
    sample: Axis
    loss_scale: float
    dynamic_scale: torch.Tensor
    fusion: Fusion
    kernel: WeightGradKernel

    def choose(self, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Choose experts int64 [T, k] by scores [T, E] plus the bias [E], if given (`top_experts`)."""
        return self.fusion(top_experts)(scores, bias, self.moe)

    def in_turn(self, positions: torch.Tensor) -> torch.Tensor:
        """Choose experts int64 [T, k] round-robin by the tokens' positions int64 [T] in their samples."""
        k = self.moe.top_k
        return (positions.unsqueeze(-1) * k + torch.arange(k, device=positions.device)) % self.moe.num_experts

    def counted(self, experts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the k experts per token that the sequence loss counts, [T, k].

        With `moe.counts_scores`, these have the token's largest scores, without bias and groups; else they are `experts`.
        """
        return self.fusion(_largest)(scores, self.moe.top_k) if self.moe.counts_scores else experts

    def choice(self, experts: torch.Tensor, counted: torch.Tensor, scores: torch.Tensor, samples: int) -> Choice:
        """Build a `Choice` of `experts`; its `fractions` count each expert's tokens in `counted`.

        Both are int64 [T, k]: `experts` for routing, `counted` for the sequence loss alone. The T tokens are flattened from
        [T / samples, samples].
        """
        count, moe = self.fusion(_count), self.moe
        counts, of_samples = count(experts, samples, moe.num_experts, scores.dtype)
        if not moe.balance.sequence_loss:
            return Choice(experts, counts, None)
        if counted is not experts:
            _, of_samples = count(counted, samples, moe.num_experts, scores.dtype)
        # This rank has only its part of each sample's tokens.
        of_samples = self.sample.all_reduce(of_samples, "fractions").wait()
        return Choice(experts, counts, of_samples * (moe.num_experts / (moe.top_k * self.seq_length)))

    def weights(
        self,
        x: torch.Tensor,
        weight: ShardedParameter,
        choose: Callable[[torch.Tensor], Choice],
    ) -> tuple[torch.Tensor, Choice]:
        """Route tokens x [T, h] by the router's weight [E, h].

        Args:
            choose: function (scores [T, E]) -> choice; called once.

        Returns:
            Weights [T, k] in the accumulation dtype, and the choice.
        """
        return _Route.apply(x, weight.weight(), weight, choose, self)


def top_experts(scores: torch.Tensor, bias: torch.Tensor | None, moe: MoEConfig) -> torch.Tensor:
    """Choose the k experts with the largest scores [T, E] plus bias [E], if given, as int64 [T, k].

    On a tie the lower number comes first. With groups, only experts in the best groups are eligible. A group's score is its best
    expert's (2405.04434, section 2.2.2) or the sum of its best two (2412.19437, section 2.1.2).
    """
    if bias is not None:
        scores = scores + bias
    if moe.groups > 1:
        by_group = scores.unflatten(-1, (moe.groups, -1))
        num_best = 1 if moe.group_score == "max" else 2
        of_group = by_group.gather(-1, _largest(by_group, num_best)).sum(-1)
        left_out = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, _largest(of_group, moe.top_groups), False)
        scores = by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return _largest(scores, moe.top_k)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Find the largest values in the last dim, largest first, as int64 [.., count]; on a tie the lower index comes first."""
    # Compiled, all rounds are one kernel; a stable sort is six. torch.topk breaks ties arbitrarily.
    numbers = torch.arange(values.shape[-1], device=values.device)
    found = []
    for _ in range(count):
        found.append(values.argmax(-1, keepdim=True))
        values = values.masked_fill(numbers == found[-1], -torch.inf)
    return torch.cat(found, dim=-1)


def count_values(values: torch.Tensor, count: int) -> torch.Tensor:
    """Count how often 0 .. count - 1 occur in `values`, at most 2^31 - 1 times, as int64 [count], without a read by the host."""
    flat = values.flatten()
    # Inductor has no kernel that counts in int64.
    counts = torch.zeros(count, dtype=torch.int32, device=flat.device)
    return counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).to(torch.int64)


def _count(
    experts: torch.Tensor, samples: int, num_experts: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count this rank's tokens that chose each expert: int64 [E], and per sample in `dtype`, [samples, E]."""
    # One count over the combined numbers (sample, expert).
    of_sample = torch.arange(len(experts), device=experts.device).remainder(samples).unsqueeze(-1)
    counts = count_values(of_sample * num_experts + experts, samples * num_experts).view(samples, num_experts)
    return counts.sum(0), counts.to(dtype)


class _Route(torch.autograd.Function):
    """Autograd function for scores, choice and weights. It saves the tokens, the router's weight, the logits and the choice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        parameter: ShardedParameter,
        choose: Callable[[torch.Tensor], Choice],
        router: Router,
    ) -> tuple[torch.Tensor, Choice]:
        logits = _logits(x, weight, router.kernel)
        scores = _scores(logits, router.moe)
        choice = choose(scores)
        ctx.parameter, ctx.router = parameter, router
        ctx.save_for_backward(x, weight, logits, choice.experts, choice.fractions)
        return router.fusion(_weights)(scores, choice.experts, router.moe), choice

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None, None, None]:
        x, weight, logits, experts, fractions = ctx.saved_tensors
        router: Router = ctx.router
        grad_logits = router.fusion(_weights_backward)(
            logits, experts, fractions, grad, router.dynamic_scale, router.loss_scale, router.moe
        )
        parameter: ShardedParameter = ctx.parameter
        parameter.add_grad(grad_logits.t() @ accumulate(x))
        return (grad_logits @ accumulate(weight)).to(x.dtype), None, None, None, None


def _weights(scores: torch.Tensor, experts: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    """Compute the weights [T, k] of the chosen experts from scores [T, E]."""
    weights = scores.gather(-1, experts)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return weights * moe.scaling


def _weights_backward(
    logits: torch.Tensor,
    experts: torch.Tensor,
    fractions: torch.Tensor | None,
    grad: torch.Tensor,
    dynamic_scale: torch.Tensor,
    loss_scale: float,
    moe: MoEConfig,
) -> torch.Tensor:
    """Compute the gradient for logits [T, E] from that for the weights [T, k], and add those of the balance losses."""
    scores, balance, scale = _scores(logits, moe), moe.balance, loss_scale * dynamic_scale
    grad = grad * moe.scaling
    if moe.normalize:
        # g_j = c_j / total over the chosen scores c, so dc_j = (dg_j - sum_i dg_i c_i / total) / total.
        chosen = scores.gather(-1, experts)
        total = chosen.sum(-1, keepdim=True) + SMALLEST_SUM
        grad = (grad - (grad * chosen / total).sum(-1, keepdim=True)) / total
    grad_scores = torch.zeros_like(scores).scatter(-1, experts, grad)
    if fractions is not None:
        grad_scores = grad_scores + _of_shares(scores, fractions * (balance.sequence_loss * scale))
    if moe.score == "softmax":
        grad_logits = scores * (grad_scores - (grad_scores * scores).sum(-1, keepdim=True))
    else:
        grad_logits = grad_scores * scores * (1 - scores)
    if balance.z_loss:
        # The gradient of log_sum^2 is 2 log_sum softmax(logits).
        log_sum = logits.logsumexp(-1, keepdim=True)
        grad_logits = grad_logits + (logits - log_sum).exp() * log_sum * (2 * balance.z_loss * scale)
    return grad_logits


def _logits(x: torch.Tensor, weight: torch.Tensor, kernel: WeightGradKernel) -> torch.Tensor:
    if kernel == "separate":
        return accumulate(x) @ accumulate(weight).t()
    logits = x.new_empty(len(x), len(weight), dtype=accumulation_dtype(x.dtype))
    add_matmul(logits, x.t(), weight.t(), overwrite=True, kernel=kernel)
    return logits


def _scores(logits: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    return logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()


def _of_shares(scores: torch.Tensor, of_sample: torch.Tensor) -> torch.Tensor:
    """Compute the gradient for scores s [T, E] from that for s / sum(s), given per sample [b, E]."""
    samples, num_experts = of_sample.shape
    total = scores.sum(-1, keepdim=True)
    grad = of_sample.expand(scores.shape[0] // samples, samples, num_experts).reshape(scores.shape)
    return (grad - (grad * scores / total).sum(-1, keepdim=True)) / total
