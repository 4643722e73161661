"""Seconds of a whole training step: microbatches, bubble, data parallelism, optimizer.

    closed form   m (F + B) of the slowest pipeline rank + bubble + exposed dp + optimizer
    simulated     the span of the schedule by `engine/pipeline/simulate.py` in place of the first two

Bubbles, F, I and W the seconds of a rank's layers on one microbatch, of the mean of the other ranks:

    1f1b, gpipe   (p - 1)(F + I + W)           2006.09503, 1811.06965
    interleaved   (p - 1)(F + I + W) / v       2104.04473, section 2.2
    zb_h1         (p - 1)(F + I - W)           2401.10241, table 1
    zbv           (p - 1) max(F, I, F + I - 2 W) / 2     2401.10241, section 6, with the wait for the first forward; more with few W
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from triaxis.engine.config.plan import batch_plan, rank_grid
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.models.predict.cut import Memo, StageCut
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.step_time.cluster import Cluster
from triaxis.models.predict.step_time.facts import Parameters, activation_bytes, element_bytes
from triaxis.models.predict.step_time.implementation import OURS, Implementation
from triaxis.models.predict.step_time.layer import Seconds, total
from triaxis.models.predict.step_time.links import Link, Links
from triaxis.models.predict.step_time.stage import StageTimer, Timed, timer_key

SIMULATED_ROUNDS = 3
"""Microbatches that are simulated, in units of pp; a longer step goes on at the pace of the last round."""


COMPONENTS = ("compute", "recompute", "tp", "cp", "experts", "pipeline bubble", "transfers", "dp", "optimizer")
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step.

    Attributes:
        seconds: of one optimizer step.
        components: seconds of the slowest pipeline rank by what it does; they add up to `seconds`.
    """

    seconds: float
    components: Mapping[str, float]

    @property
    def bubble_share(self) -> float:
        """Return the part of the step that is bubble."""
        return max(0.0, self.components.get("pipeline bubble", 0.0)) / self.seconds


class Estimator:
    """Step times of layouts on one cluster.

    Args:
        cluster: its nodes and links; its device is read once.
        implementation: the software that runs.
        expert_load: rows of the slowest rank's experts over the mean (max over mean), in every layer.
    """

    def __init__(self, cluster: Cluster, implementation: Implementation = OURS, *, expert_load: float = 1.0) -> None:
        self.cluster, self.implementation, self.expert_load = cluster, implementation, expert_load
        self.device = cluster.load_device()

    def closed_form(
        self,
        config: Config,
        sizes: ParallelSizes,
        documents: DocumentStatistics | None = None,
        *,
        memo: Memo | None = None,
    ) -> StepTime:
        """Predict a step by formula.

        Args:
            config: of a run that breaks no rule.
            sizes: of every axis.
            documents: within which tokens attend; None: across them.
            memo: of earlier predictions of this run with these documents, in other layouts, batches and recomputations; filled and
                used.

        Raises:
            ConfigError: the device has no rate for the run's dtype, the run has FP8, or as `resolve_recompute`.
        """
        if config.schedule.file is not None:
            # Only a named schedule has a formula.
            return self.simulated(config, sizes, documents, memo=memo)
        step = _Step(self, config, sizes, documents, memo)
        return step.result(*step.by_formula())

    def simulated(
        self,
        config: Config,
        sizes: ParallelSizes,
        documents: DocumentStatistics | None = None,
        *,
        memo: Memo | None = None,
    ) -> StepTime:
        """Predict a step by running its schedule through the event simulator; arguments and errors as `closed_form`."""
        step = _Step(self, config, sizes, documents, memo)
        return step.result(*step.by_simulation())

    def simulated_ranks(
        self, config: Config, sizes: ParallelSizes, documents: DocumentStatistics | None = None
    ) -> list[dict[str, float]]:
        """Return the components of every pipeline rank in the step of `simulated`; arguments and errors as there.

        Each adds up to the seconds of the step: what a rank is faster than the slowest, it waits in its bubble.
        """
        step = _Step(self, config, sizes, documents)
        return step.of_ranks(*step.by_simulation())

    def costs(self, config: Config, sizes: ParallelSizes, documents: DocumentStatistics | None = None) -> Costs:
        """Return the seconds of every stage's actions and of a transfer, for a simulator."""
        return _Step(self, config, sizes, documents).costs()


class _Step:
    """One step of one layout."""

    def __init__(
        self,
        estimator: Estimator,
        config: Config,
        sizes: ParallelSizes,
        documents: DocumentStatistics | None,
        memo: Memo | None = None,
    ) -> None:
        if config.precision.fp8 is not None:
            raise ConfigError(
                [
                    "precision.fp8: no rates of FP8 GEMMs are known, and times of bf16 would be taken for theirs. Give "
                    "precision.fp8=null for those of a run without it."
                ]
            )
        self.config, self.sizes = resolve_recompute(config, sizes), sizes
        self.implementation, self.device = estimator.implementation, estimator.device
        memo = {} if memo is None else memo
        self.links = Links(
            estimator.cluster, self.device, rank_grid(self.config, sizes, estimator.cluster.gpus_per_node), memo
        )
        key = timer_key(self.config, sizes)
        if key not in memo:
            memo[key] = StageTimer(
                self.config, sizes, self.device, self.links, self.implementation, documents, estimator.expert_load
            )
        timer: StageTimer = memo[key]
        self.timer = timer.layer_timer
        self.cut = StageCut.of(self.config, memo)
        self.num_microbatches = batch_plan(self.config, sizes.dp).num_microbatches
        self.schedule = schedules.resolve(self.config.schedule.name, sizes.vpp)
        self.ranks = [timer.rank(contents) for _, contents in self.cut.ranks]
        self.parameters = [rank.parameters for rank in self.ranks]
        self._timer, self._waits = timer, self._gathers_in_passes or self.implementation.exposed_transfers
        if self._waits:
            self.ranks = [self._rank(rank) for rank in range(sizes.pp)]
        self.slowest = max(range(sizes.pp), key=lambda rank: self.ranks[rank].total)

    def _stage(self, stage: int) -> Timed:
        """Return the seconds of a stage, with what its passes wait for of the links over dp and pp."""
        timed = self._timer.stage(self.cut.contents[stage])
        if not self._waits:
            return timed
        seconds = Seconds()
        seconds.add(timed.seconds)
        self._sharded_parameters(seconds, self.cut.stages[stage], timed.parameters.all)
        if self.implementation.exposed_transfers and self.sizes.pp > 1:
            seconds.add(Seconds({"transfers": self._transfer()}, {"transfers": self._transfer()}, {}))
        return Timed.of(seconds, timed.parameters)

    def _sharded_parameters(self, seconds: Seconds, stage: StageLayers, numel: int) -> None:
        """Add the time that gathers of a stage's `numel` parameters in each pass, and sums of gradients, take beyond the pass."""
        if not self._gathers_in_passes:
            return
        link, n = self.links.of_axes("dp", "cp"), self.sizes.dp_cp
        calls = len(stage.layers) + 1
        gathered = link.seconds(numel * element_bytes(self.config) * (n - 1) / n, calls)
        reduced = link.seconds(numel * self.implementation.gradient_bytes * (n - 1) / n, calls)
        forward, backward = (
            sum(seconds.forward.values()),
            sum(seconds.input_grad.values()) + sum(seconds.weight_grad.values()),
        )
        copied = (
            self.timer.stream(2 * element_bytes(self.config) * numel) if self.implementation.copies_parameters else 0.0
        )
        seconds.forward["dp"] = copied + gathered / calls + self.device.beyond(gathered * (1 - 1 / calls), forward)
        copied *= 1 + self.implementation.gradient_bytes / element_bytes(self.config)
        seconds.input_grad["dp"] = (
            copied + reduced / calls + self.device.beyond((gathered + reduced) * (1 - 1 / calls), backward)
        )

    @property
    def _gathers_in_passes(self) -> bool:
        """Whether parameters are gathered for each pass; FSDP2 with pipeline stages keeps them from the first pass on."""
        is_fsdp = self.implementation.shards == "parameters" and self.sizes.pp == 1
        return (is_fsdp or (self.implementation is OURS and self.config.parallel.zero > 2)) and self.sizes.dp_cp > 1

    def _rank(self, rank: int) -> Timed:
        seconds = Seconds()
        for stage in self.cut.ranks[rank][0]:
            seconds.add(self._stage(stage).seconds)
        return Timed.of(seconds, self.parameters[rank])

    def _transfer(self) -> float:
        """Return the seconds of a message between stages."""
        if self.sizes.pp == 1:
            return 0.0
        link, whole, t = self.links.hand_over(), activation_bytes(self.config), self.sizes.tp
        if self.config.parallel.cuts_sequence:
            return link.seconds(whole / t)
        if self.implementation.scatter_gather and t > 1:
            return link.seconds(whole / t) + self.links.of_axes("tp").seconds(whole * (t - 1) / t)
        return link.seconds(whole)

    def costs(self) -> Costs:
        """Return the durations of every stage's actions."""
        forward, input_grad, weight_grad = zip(
            *(self._stage(stage).passes for stage in range(len(self.cut.stages))), strict=True
        )
        transfer = 0.0 if self.implementation.exposed_transfers else self._transfer()
        return Costs(forward, input_grad, weight_grad, transfer)

    def by_formula(self) -> tuple[float, float]:
        """Return the seconds of the bubble and of transfers that it is longer by."""
        p, v = self.sizes.pp, self.sizes.vpp
        if p == 1:
            return 0.0, 0.0
        others = [self.ranks[rank].passes for rank in range(p) if rank != self.slowest]
        forward, input_grad, weight_grad = (sum(passes) for passes in zip(*others, strict=True))
        if self.schedule == "zb_h1":
            bubble = forward + input_grad - weight_grad
        elif self.schedule == "zbv":
            bubble = max(forward, input_grad, forward + input_grad - 2 * weight_grad) / 2
        else:
            bubble = (forward + input_grad + weight_grad) / (v if self.schedule == "interleaved" else 1)
        transfers = 0.0 if self.implementation.exposed_transfers else 2 * (p - 1) * self._transfer()
        return max(0.0, bubble), transfers

    def by_simulation(self) -> tuple[float, float]:
        """Return the seconds of the bubble and of transfers in the simulated schedule.

        As in `TimeSplit`, the bubble is what the slowest rank waits with messages that take no time.
        """
        costs = self.costs()
        instant = self._whole_span(replace(costs, transfer=0.0))
        return instant - self.num_microbatches * self.ranks[self.slowest].total, self._whole_span(costs) - instant

    def _whole_span(self, costs: Costs) -> float:
        m, p = self.num_microbatches, self.sizes.pp
        most = SIMULATED_ROUNDS * p
        if m <= most:
            return self._span(m, costs)
        span = self._span(most, costs)
        return span + (m - most) * (span - self._span(most - p, costs)) / p

    def _span(self, num_microbatches: int, costs: Costs) -> float:
        return simulate(schedules.of_config(self.config, self.sizes.pp, self.sizes.vpp, num_microbatches), costs).span

    def result(self, bubble: float, transfers: float) -> StepTime:
        """Put the parts of a step together."""
        components = self._components(self.slowest, bubble, transfers)
        return StepTime(sum(components.values()), components)

    def of_ranks(self, bubble: float, transfers: float) -> list[dict[str, float]]:
        """Put the parts of each pipeline rank's step together; all take as long as the slowest's."""
        seconds = self.result(bubble, transfers).seconds
        ranks = [self._components(rank, 0.0, transfers) for rank in range(self.sizes.pp)]
        for components in ranks:
            components["pipeline bubble"] = seconds - sum(components.values())
        return ranks

    def _components(self, rank: int, bubble: float, transfers: float) -> dict[str, float]:
        """Return the seconds of a pipeline rank by what it does."""
        components = {
            name: self.num_microbatches * seconds for name, seconds in total(self.ranks[rank].seconds.passes).items()
        }
        components["pipeline bubble"] = bubble
        components["transfers"] = components.get("transfers", 0.0) + transfers
        components["dp"] = components.get("dp", 0.0) + self._data_parallel(rank)
        # An update ends with the meeting of all ranks.
        components["optimizer"] = self._optimizer()
        return components

    def _data_parallel(self, rank: int) -> float:
        """Return the exposed seconds of the sums of gradients and of gathered parameters, once a step."""
        how, numels = self.implementation, self.parameters[rank]
        if self._gathers_in_passes:
            return 0.0
        bytes_each = max(how.gradient_bytes, self._main_grad_bytes() if how is OURS else 0)
        reduced = gathered = 0.0
        buckets = 0
        for numel, n, link in self._replicated(numels):
            calls = max(1, -(-numel * bytes_each // self.config.optimizer.bucket_bytes))
            if self._sums_each_microbatch:
                calls = max(1, sum(len(self.cut.stages[stage].layers) for stage in self.cut.ranks[rank][0]))
            wire = numel * (n - 1) / n
            reduced += link.seconds(wire * bytes_each * (2 if how.shards == "none" else 1), calls)
            gathered += link.seconds(wire * element_bytes(self.config), calls)
            buckets += calls
        if not buckets:
            return 0.0
        forward, *backwards = self.ranks[rank].passes
        exposed = self._beyond(reduced, sum(backwards), buckets, hidden=how.dp_overlap)
        if self._sums_each_microbatch:
            # The sums of all microbatches but the last also run under the next forward.
            exposed += (self.num_microbatches - 1) * self.device.beyond(reduced, forward + sum(backwards))
        if how.shards == "none":
            return exposed
        return exposed + self._beyond(gathered, forward, buckets, hidden=how.gather_overlap)

    @property
    def _sums_each_microbatch(self) -> bool:
        """Whether gradients are cut, and so reduced after each microbatch (ZeRO-2)."""
        return self.implementation is OURS and self.config.parallel.zero > 1

    def _replicated(self, numels: Parameters) -> list[tuple[int, int, Link]]:
        """List (parameters, ranks that hold them, their link) of dense ones and of experts; those of one rank are left out."""
        dense = numels.all - numels.experts, self.sizes.dp_cp, self.links.of_axes("dp", "cp")
        experts = numels.experts, self.sizes.expert_dp, self.links.of_expert_replicas()
        return [each for each in (dense, experts) if each[0] and each[1] > 1]

    def _main_grad_bytes(self) -> int:
        return max(4, element_bytes(self.config))

    def _beyond(self, seconds: float, beside: float, buckets: int, *, hidden: bool) -> float:
        """Return what calls take beyond the pass that they run beside; one bucket has nothing to hide behind."""
        if not hidden:
            return seconds
        first = seconds / buckets
        return first + self.device.beyond(seconds - first, beside)

    def _optimizer(self) -> float:
        """Return the seconds of the update: state and gradients go through memory."""
        most = max(self.parameters, key=lambda each: each.all)
        numel, sizes = most.all, self.sizes
        own = float(numel)
        if self.implementation.shards != "none":
            own = (numel - most.experts) / sizes.dp_cp + most.experts / sizes.expert_dp
        whole = own if self.implementation.shards == "parameters" else numel
        return self.timer.stream(
            own * self.implementation.optimizer_bytes + whole * self.implementation.every_step_bytes
        )
