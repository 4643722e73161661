"""Bugs that mixtures of experts have had in this field: reductions, balance, replays, and the way of tokens to experts and back."""

from dataclasses import replace
from typing import Any

import torch

from tests.parity.cases import Case
from tests.verify.bug import Bug, anything
from triaxis.engine.activations.saving_hooks import SavingHooks
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.expert_parallel import gather_dispatch
from triaxis.engine.expert_parallel.balance import ExpertLoad
from triaxis.engine.expert_parallel.exchange_dispatch import _There
from triaxis.engine.expert_parallel.gather_dispatch import GatherDispatch
from triaxis.engine.expert_parallel.region import ExpertRegion
from triaxis.engine.expert_parallel.routing import Choice, Router
from triaxis.engine.layout.shard_spec import ExpertPlace
from triaxis.engine.optimizer.distributed import DistributedOptimizer, square_sum
from triaxis.engine.optimizer.grad_buffer import FlatBuffer, GradBuffers
from triaxis.engine.pipeline.executor import Executor
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.moe import MoE


def is_expert(name: str) -> bool:
    return ".experts." in name


def is_router(name: str) -> bool:
    return name.endswith("router.weight")


def is_bias(name: str) -> bool:
    return name.endswith("router.bias")


def is_layer(name: str) -> bool:
    return name.endswith(".mlp")


def _of_experts(buffer: FlatBuffer) -> bool:
    return buffer.layout.key.reduce_over == "expert_dp"


# Reductions ---------------------------------------------------------------------------------------------------------------


class _OverDp:
    """An axis whose reduce-scatter adds over the dp ranks alone; parts stay those of the axis."""

    def __init__(self, axis: Axis, dp: Axis) -> None:
        self._axis, self._dp = axis, dp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._axis, name)

    def reduce_scatter(self, tensor: torch.Tensor, purpose: str, out: torch.Tensor) -> Pending:
        self._dp.all_reduce(tensor, purpose).wait()
        return Pending(out)


def gradients_of_experts_are_reduced_over_dp() -> None:
    made = GradBuffers.__init__

    def init(self: GradBuffers, layouts: Any, parameters: Any, precision: Any, *rest: Any) -> None:
        made(self, layouts, parameters, precision, *rest)
        _, axes, *_ = rest
        for buffer in self.buffers:
            if _of_experts(buffer):
                for bucket in buffer.buckets:
                    bucket.owners = _OverDp(axes["expert_dp"], axes["dp"])  # type: ignore[assignment]

    GradBuffers.__init__ = init  # type: ignore[method-assign,assignment]


def gradient_norm_has_the_experts_of_the_first_rank() -> None:
    found = DistributedOptimizer.grad_square_sum

    def of_first(self: DistributedOptimizer) -> torch.Tensor:
        total = found(self)
        for owned in self.trained:
            # A rank with other experts than the first ones leaves them to that rank.
            if _of_experts(owned.buffer) and owned.segments and owned.segments[0].record.box[0][0]:
                total -= square_sum([owned.grads.to(owned.state.wide)])
        return total

    DistributedOptimizer.grad_square_sum = of_first  # type: ignore[method-assign]


def gradients_of_routers_are_not_summed_over_tp() -> None:
    made = GradBuffers.__init__

    def init(self: GradBuffers, *args: Any) -> None:
        made(self, *args)
        for buffer in self.buffers:
            if any(is_router(entry.record.name) for bucket in buffer.layout.buckets for entry in bucket.entries):
                buffer.sum_axis = None

    GradBuffers.__init__ = init  # type: ignore[method-assign]


def experts_are_not_gathered_after_an_update() -> None:
    gather = GradBuffers.gather

    def dense_alone(self: GradBuffers, **options: bool) -> None:
        kept = self.buffers
        self.buffers = [buffer for buffer in kept if not _of_experts(buffer)]
        gather(self, **options)
        self.buffers = kept

    GradBuffers.gather = dense_alone  # type: ignore[method-assign]


# Balance ------------------------------------------------------------------------------------------------------------------


def losses_on_the_load_grow_with_ep() -> None:
    made = ExpertRegion.of.__func__  # type: ignore[attr-defined]

    def scaled(cls: type[ExpertRegion], config: Config, *others: Any) -> ExpertRegion | None:
        region: ExpertRegion | None = made(cls, config, *others)
        if region is None:
            return None
        scale = region.router.loss_scale * config.parallel.ep
        return replace(region, router=replace(region.router, loss_scale=scale))

    ExpertRegion.of = classmethod(scaled)  # type: ignore[method-assign,assignment]


def losses_on_the_load_are_scaled_by_the_mask() -> None:
    """Plant a factor of nominal / counted tokens, as where all gradients get it at the end of a step."""
    run = Executor.run

    def masked(
        self: Executor, program: Any, microbatches: Any, function: Any, *, output_grad: torch.Tensor, **named: Any
    ) -> list[torch.Tensor]:
        engine = function.__self__
        engine.load.loss_scale.copy_(output_grad[0] * engine.plan.tokens_per_step)
        return run(self, program, microbatches, function, output_grad=output_grad, **named)

    Executor.run = masked  # type: ignore[assignment,method-assign]


def the_load_of_a_sample_is_that_of_each_ranks_tokens() -> None:
    choice = Router.choice

    def alone(self: Router, experts: torch.Tensor, counted: torch.Tensor, scores: torch.Tensor, samples: int) -> Choice:
        # The fractions are of this rank's part of the sample, as if it were the whole.
        part = replace(self, sample=_Alone(), seq_length=len(scores) // samples)  # type: ignore[arg-type]
        return choice(part, experts, counted, scores, samples)

    Router.choice = alone  # type: ignore[method-assign]


class _Alone:
    """An axis of one rank."""

    def all_reduce(self, tensor: torch.Tensor, purpose: str) -> Pending:
        return Pending(tensor)


def biases_follow_the_load_of_each_rank() -> None:
    ExpertLoad.post = lambda self, world: Pending(self.counts.clone())  # type: ignore[method-assign]


def biases_follow_the_last_microbatch() -> None:
    add = ExpertLoad.add

    def last(self: ExpertLoad, layer: int, counts: torch.Tensor) -> None:
        self.counts[self._rows[layer]].zero_()
        add(self, layer, counts)

    ExpertLoad.add = last  # type: ignore[method-assign]


# Choices ------------------------------------------------------------------------------------------------------------------


def a_rank_has_the_bias_of_its_own_experts() -> None:
    def own(self: MoE, keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        group, bias = self.experts.group, self.bias.weight().detach()
        numbers = gather_dispatch.local_numbers(torch.arange(len(bias)), group.place, group.num_local)
        is_other = numbers == group.num_local
        return self.experts.router.choose(scores, bias.masked_fill(is_other, 0.0))

    MoE.chosen = own  # type: ignore[method-assign]


def choices_are_made_again_in_the_replay() -> None:
    """In the replay scores have other bits: here those of bf16."""
    SavingHooks.once = lambda self, function: function()  # type: ignore[method-assign,assignment]
    choose, seen = MoE._choose, set[tuple[int, tuple[int, ...], int]]()

    def again(self: MoE, keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor) -> Choice:
        key = (self.layer, tuple(keys.sample_ids), id(self))
        rounded = scores.bfloat16().to(scores.dtype) if key in seen else scores
        seen.symmetric_difference_update({key})
        return choose(self, keys, shape, rounded)

    MoE._choose = again  # type: ignore[method-assign]


# The way of tokens --------------------------------------------------------------------------------------------------------


def experts_have_the_numbers_of_the_next_rank() -> None:
    local_numbers = gather_dispatch.local_numbers

    def shifted(experts: torch.Tensor, place: ExpertPlace, num_local: int) -> torch.Tensor:
        return local_numbers(experts, replace(place, ep_index=(place.ep_index + 1) % place.ep), num_local)

    gather_dispatch.local_numbers = shifted


def weights_stay_in_the_order_of_arrival() -> None:
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, exchange: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        rows = exchange.there(x.index_select(0, exchange.tokens), "planted").wait().index_select(0, exchange.by_expert)
        return rows, exchange.there(weights.flatten().index_select(0, exchange.slots), "planted").wait()

    _There.forward = staticmethod(forward)  # type: ignore[method-assign]


def outputs_are_combined_without_weights_on_other_ranks() -> None:
    begin = GatherDispatch.begin

    def unweighted(self: GatherDispatch, choice: Choice) -> Any:
        dispatch = begin(self, choice)

        def without(x: torch.Tensor, weights: torch.Tensor) -> Any:
            sent = dispatch(x, weights)
            if self._group.place.ep_index == 0:
                return sent
            return replace(sent, weights=torch.ones_like(sent.weights))

        return without

    GatherDispatch.begin = unweighted  # type: ignore[method-assign]


def tokens_beyond_the_capacity_are_dropped() -> None:
    def balanced(moe: MoEConfig, tokens: int, ep: int, etp: int) -> int:
        return etp * tokens * moe.top_k

    gather_dispatch.buffer_rows = balanced
    ExpertLoad.add_overflow = lambda self, rows: None  # type: ignore[method-assign]


def parts_of_an_expert_are_averaged() -> None:
    begin = GatherDispatch.begin

    def averaged(self: GatherDispatch, choice: Choice) -> Any:
        dispatch, etp = begin(self, choice), self._group.place.etp

        def mean(x: torch.Tensor, weights: torch.Tensor) -> Any:
            sent = dispatch(x, weights)
            return replace(sent, combine=lambda out: sent.combine(out) / etp)

        return mean

    GatherDispatch.begin = averaged  # type: ignore[method-assign]


GATHER = Case("deepseek", dp=2, ep=2, num_layers=2, dispatch="all_gather")
EXCHANGE = replace(GATHER, dispatch="all_to_all")
TP = Case("deepseek", tp=2, dp=2, ep=2, num_layers=2, dispatch="all_gather")

BUGS = (
    Bug(a_rank_has_the_bias_of_its_own_experts, GATHER, "routing", is_layer, "ep", "the router's scores, its bias"),
    Bug(
        gradients_of_experts_are_reduced_over_dp,
        Case("deepseek", tp=4, ep=2, num_layers=2, sequence_parallel=True),
        "gradient",
        is_expert,
        "tp",
        "stays with ep=1",
    ),
    Bug(gradient_norm_has_the_experts_of_the_first_rank, GATHER, "gradient norm", anything, "ep", "vanishes with"),
    Bug(gradients_of_routers_are_not_summed_over_tp, TP, "gradient", is_router, "tp", "not added over tp"),
    Bug(
        experts_are_not_gathered_after_an_update,
        replace(TP, dispatch="all_to_all"),
        "parameter",
        is_expert,
        None,
        "all-gather",
        lives_on=frozenset({"dp", "tp"}),
    ),
    Bug(losses_on_the_load_grow_with_ep, GATHER, "gradient", anything, "ep", "ep=1"),
    Bug(
        losses_on_the_load_are_scaled_by_the_mask,
        Case("moe losses", dp=2, num_layers=2),
        "gradient",
        anything,
        None,
        "stays",
    ),
    Bug(
        the_load_of_a_sample_is_that_of_each_ranks_tokens,
        Case("moe losses", cp=2, dp=2, num_layers=2),
        "gradient",
        anything,
        "cp",
        "vanishes with cp=1",
    ),
    Bug(biases_follow_the_load_of_each_rank, GATHER, "master", is_bias, "dp", "the router bias is not"),
    Bug(biases_follow_the_last_microbatch, GATHER, "master", is_bias, None, "the router bias is not"),
    Bug(
        choices_are_made_again_in_the_replay,
        replace(GATHER, recompute=("full", "uniform", 1)),
        "routing",
        is_layer,
        None,
        "vanishes with recompute.granularity=none",
    ),
    Bug(experts_have_the_numbers_of_the_next_rank, GATHER, "output", is_layer, "ep", "how tokens reach them"),
    Bug(weights_stay_in_the_order_of_arrival, EXCHANGE, "output", is_layer, "ep", "how tokens reach them"),
    Bug(
        outputs_are_combined_without_weights_on_other_ranks,
        GATHER,
        "output",
        is_layer,
        "ep",
        "how tokens reach them",
    ),
    Bug(tokens_beyond_the_capacity_are_dropped, GATHER, "output", is_layer, "ep", "how tokens reach them"),
    Bug(
        parts_of_an_expert_are_averaged,
        Case("deepseek", tp=2, etp=2, dp=2, num_layers=2, dispatch="all_gather"),
        "output",
        is_layer,
        "etp",
        "vanishes with tp=1 and etp=1, with etp=1",
    ),
)
